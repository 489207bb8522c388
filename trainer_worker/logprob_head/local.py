"""The local head: each device scores only its own tokens against a table gathered once.

One shard_map with a custom VJP inside. The forward gathers each head parameter once and the
backward reuses it; the backward sums parameter gradients in float32 over the device's chunks and
reduces them across devices once. No collective runs inside a loop.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainer_worker.logprob_head.chunks import Chunks
from trainer_worker.logprob_head.config import HeadConfig, TokenLogprobs
from trainer_worker.logprob_head.gradient import Saved, known_only, operand_gradients
from trainer_worker.logprob_head.layout import Layout, gather, reduce, varying
from trainer_worker.logprob_head.score import normed, raw_logits, score_and_lse


class HeadParams(NamedTuple):
    """Head parameters: table [V, D] and, when the head applies the final norm, its scale [D]."""

    table: jax.Array
    norm_scale: jax.Array | None


class _Residuals(NamedTuple):
    hidden: jax.Array
    targets: jax.Array
    whole: HeadParams
    saved: Saved


def local_head(
    hidden: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    norm_scale: jax.Array | None,
    config: HeadConfig,
    layout: Layout,
) -> TokenLogprobs:
    """Scores global hidden [R, T, D] against table [V, D] under the mesh that is set.

    Every parameter must have a dimension that the device count divides (`select` sees to it).
    """
    params = HeadParams(table=table, norm_scale=norm_scale)
    dtypes = jax.tree.map(lambda x: x.dtype, params)
    table_dim = layout.split_dimension(table.shape)
    assert table_dim is not None

    def whole(part: HeadParams) -> HeadParams:
        """The table is cast before it travels; the scale stays exact."""
        scale = part.norm_scale
        return HeadParams(
            table=gather(part.table.astype(config.compute_dtype), layout.axes, table_dim),
            norm_scale=None if scale is None else gather(scale, layout.axes, 0),
        )

    def part(whole: HeadParams) -> HeadParams:
        """Float32 gradients of whole parameters, summed over devices: this device's parts."""
        scale = whole.norm_scale
        return HeadParams(
            table=reduce(whole.table, layout.axes, table_dim).astype(dtypes.table),
            norm_scale=None
            if scale is None
            else reduce(scale, layout.axes, 0).astype(dtypes.norm_scale),
        )

    @jax.custom_vjp
    def head(hidden: jax.Array, params: HeadParams, targets: jax.Array) -> TokenLogprobs:
        return forward(hidden, params, targets)[0]

    def forward(
        hidden: jax.Array, params: HeadParams, targets: jax.Array
    ) -> tuple[TokenLogprobs, _Residuals]:
        gathered = whole(params)
        scored, saved = _score_tokens(hidden, gathered, targets, config)
        return scored, _Residuals(hidden, targets, gathered, saved)

    def backward(
        residuals: _Residuals, cotangents: TokenLogprobs
    ) -> tuple[jax.Array, HeadParams, None]:
        dhidden, dwhole = _token_gradients(residuals, cotangents, config, layout)
        return dhidden, part(dwhole), None

    head.defvjp(forward, backward)
    specs = jax.tree.map(lambda x: layout.parameter(x.shape), params)
    return jax.shard_map(
        head,
        in_specs=(layout.tokens, specs, layout.tokens),
        out_specs=layout.tokens,
        check_vma=True,
    )(hidden, params, targets)


def _score_tokens(
    hidden: jax.Array, whole: HeadParams, targets: jax.Array, config: HeadConfig
) -> tuple[TokenLogprobs, Saved]:
    """Scores one device's tokens [r, t, D] with whole parameters."""
    chunks = Chunks.fit(hidden.shape[1], config.chunk_tokens)

    def step(
        carry: None, chunk: tuple[jax.Array, jax.Array]
    ) -> tuple[None, tuple[TokenLogprobs, jax.Array]]:
        x, y = chunk
        raw = raw_logits(
            normed(x, whole.norm_scale, config).astype(config.compute_dtype), whole.table
        )
        return carry, score_and_lse(raw, y, config)

    _, out = jax.lax.scan(step, None, (chunks.split(hidden), chunks.split(targets)))
    scored, lse = jax.tree.map(chunks.join, out)
    return scored, Saved(lse=lse, entropy=scored.entropy)


def _token_gradients(
    residuals: _Residuals, cotangents: TokenLogprobs, config: HeadConfig, layout: Layout
) -> tuple[jax.Array, HeadParams]:
    """Gradients of one device's hidden [r, t, D] and, in float32, of the whole parameters."""
    hidden, targets, whole, saved = residuals
    chunks = Chunks.fit(hidden.shape[1], config.chunk_tokens)
    vocab = whole.table.shape[0]
    ids = jnp.arange(vocab, dtype=jnp.int32)
    cotangents = cotangents._replace(logprobs=known_only(cotangents.logprobs, targets, vocab))
    zeros = jax.tree.map(lambda x: varying(jnp.zeros(x.shape, jnp.float32), layout), whole)

    def step(
        total: HeadParams, chunk: tuple[jax.Array, jax.Array, Saved, TokenLogprobs]
    ) -> tuple[HeadParams, jax.Array]:
        h, y, saved, cotangents = chunk
        x, pull_norm = jax.vjp(lambda h, scale: normed(h, scale, config), h, whole.norm_scale)
        x = x.astype(config.compute_dtype)
        dx, dtable = operand_gradients(
            x=x,
            table=whole.table,
            raw=raw_logits(x, whole.table),
            onehot=y[..., None] == ids,
            saved=saved,
            cotangents=cotangents,
            config=config,
        )
        dh, dscale = pull_norm(dx)
        return jax.tree.map(jnp.add, total, HeadParams(dtable, dscale)), dh

    split = jax.tree.map(chunks.split, (hidden, targets, saved, cotangents))
    total, dhidden = jax.lax.scan(step, zeros, split)
    return chunks.join(dhidden), total
