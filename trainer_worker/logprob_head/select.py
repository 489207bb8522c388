"""From the configured mode to a head, with the reason said in the log when it is not the one asked.

Decides on shapes and the mesh only, at trace time; computes no log-prob itself.
"""

import jax

from trainer_worker.logprob_head.chunked import chunked_head
from trainer_worker.logprob_head.config import HeadConfig, HeadConfigError, TokenLogprobs


def token_logprobs(
    hidden: jax.Array,
    table: jax.Array | None,
    targets: jax.Array,
    config: HeadConfig,
    norm_scale: jax.Array | None = None,
) -> TokenLogprobs:
    """Log-prob and entropy of every token.

    hidden: [R, T, D] floating; targets: int32 [R, T], already shifted by the caller, over the whole
    row; table: [V, D]; norm_scale: [D].
    """
    _check_shapes(hidden, table, targets, norm_scale)
    return chunked_head(hidden, table, targets, norm_scale, config)


def _check_shapes(
    hidden: jax.Array,
    table: jax.Array | None,
    targets: jax.Array,
    norm_scale: jax.Array | None,
) -> None:
    if hidden.ndim != 3:
        raise HeadConfigError(f"hidden has shape {hidden.shape}: give [rows, tokens, features]")
    if targets.shape != hidden.shape[:2]:
        raise HeadConfigError(
            f"targets have shape {targets.shape}, hidden {hidden.shape}: give one id per token"
        )
    if table is not None and (table.ndim != 2 or table.shape[1] != hidden.shape[2]):
        raise HeadConfigError(
            f"table has shape {table.shape}, hidden {hidden.shape}: give [vocab, features]"
        )
    if norm_scale is not None and norm_scale.shape != hidden.shape[2:]:
        raise HeadConfigError(
            f"norm_scale has shape {norm_scale.shape}, hidden {hidden.shape}: give [features]"
        )
