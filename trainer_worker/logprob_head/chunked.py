"""The chunked head: a scan over token chunks, its partitioning left to the compiler.

The backward recomputes each chunk's logits, so [R, T, V] logits never exist. Under a mesh every
device of the token axes computes every chunk, and the table is gathered again in every step.
"""

import jax

from trainer_worker.logprob_head.chunks import Chunks
from trainer_worker.logprob_head.config import HeadConfig, TokenLogprobs
from trainer_worker.logprob_head.score import normed, raw_logits, score_and_lse


def chunked_head(
    hidden: jax.Array,
    table: jax.Array | None,
    targets: jax.Array,
    norm_scale: jax.Array | None,
    config: HeadConfig,
) -> TokenLogprobs:
    """Scores hidden [R, T, D] against table [V, D]; shapes as in `token_logprobs`.

    Without a table, hidden already holds the raw logits (D is the vocabulary).
    """
    chunks = Chunks.fit(hidden.shape[1], config.chunk_tokens)
    weights = None if table is None else table.astype(config.compute_dtype)

    @jax.checkpoint
    def step(
        x: jax.Array, y: jax.Array, weights: jax.Array | None, scale: jax.Array | None
    ) -> TokenLogprobs:
        operand = normed(x, scale, config)
        raw = operand if weights is None else raw_logits(operand.astype(weights.dtype), weights)
        return score_and_lse(raw, y, config)[0]

    def body(carry: None, xy: tuple[jax.Array, jax.Array]) -> tuple[None, TokenLogprobs]:
        return carry, step(*xy, weights, norm_scale)

    _, scored = jax.lax.scan(body, None, (chunks.split(hidden), chunks.split(targets)))
    return TokenLogprobs(logprobs=chunks.join(scored.logprobs), entropy=chunks.join(scored.entropy))
