"""The vocab-parallel head: devices that share rows split the vocabulary instead of the tokens.

Each device scores all tokens of its row group against its slice of the vocabulary; log-sum-exps
are combined across the slices once, after the loop. The table moves less, the hidden states more
(`select` weighs the two). No collective runs inside a loop.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainer_worker.logprob_head.chunks import Chunks
from trainer_worker.logprob_head.config import HeadConfig, TokenLogprobs
from trainer_worker.logprob_head.gradient import Saved, operand_gradients
from trainer_worker.logprob_head.layout import Layout, gather, largest, reduce, swap, total, varying
from trainer_worker.logprob_head.local import HeadParams
from trainer_worker.logprob_head.score import all_finite, normed, raw_logits, squash


class _Partial(NamedTuple):
    """What one vocabulary slice knows of a token, float32 [r, T] each.

    peak: largest logit. total: sum of exp(z - peak). weighted: sum of exp(z - peak) * (z - peak).
    picked: the target's logit, 0 where another slice holds it. broken: 1 for a non-finite logit.
    """

    peak: jax.Array
    total: jax.Array
    weighted: jax.Array
    picked: jax.Array
    broken: jax.Array


class _Residuals(NamedTuple):
    hidden: jax.Array
    operand: jax.Array
    local_targets: jax.Array
    known: jax.Array
    table: jax.Array
    norm_scale: jax.Array | None
    saved: Saved


def vocab_head(
    hidden: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    norm_scale: jax.Array | None,
    config: HeadConfig,
    layout: Layout,
) -> TokenLogprobs:
    """Scores global hidden [R, T, D] against table [V, D] under the mesh that is set.

    The token axes must split V, and all devices must split D (`select` sees to it).
    """
    params = HeadParams(table=table, norm_scale=norm_scale)
    dtypes = jax.tree.map(lambda x: x.dtype, params)
    vocab = table.shape[0]
    slice_ids = vocab // layout.token_ranks
    group = layout.token_axes

    def table_slice(part: jax.Array) -> jax.Array:
        """[V, D / devices] -> [V / token_ranks, D]: hand vocabulary rows over within the group,
        then gather features from the other groups."""
        part = part.astype(config.compute_dtype)
        return gather(swap(part, group, split=0, join=1), layout.row_axes, 1)

    def table_part(dslice: jax.Array) -> jax.Array:
        """The inverse of `table_slice` for a float32 gradient, summed over the other groups."""
        dslice = reduce(dslice, layout.row_axes, 1)
        return swap(dslice, group, split=1, join=0).astype(dtypes.table)

    def own(x: jax.Array) -> jax.Array:
        """This device's tokens [r, t] of the group's [r, T]."""
        start = jax.lax.axis_index(group) * layout.local_tokens
        return jax.lax.dynamic_slice_in_dim(x, start, layout.local_tokens, axis=1)

    @jax.custom_vjp
    def head(hidden: jax.Array, params: HeadParams, targets: jax.Array) -> TokenLogprobs:
        return forward(hidden, params, targets)[0]

    def forward(
        hidden: jax.Array, params: HeadParams, targets: jax.Array
    ) -> tuple[TokenLogprobs, _Residuals]:
        weights = table_slice(params.table)
        scale = params.norm_scale
        scale = None if scale is None else gather(scale, layout.axes, 0)
        operand = gather(normed(hidden, scale, config).astype(config.compute_dtype), group, 1)
        everyone = gather(targets, group, 1)
        local_targets = everyone - jax.lax.axis_index(group) * slice_ids
        partial = _score_slice(operand, weights, local_targets, config)
        scored, lse = _combine(partial, group)
        known = (everyone >= 0) & (everyone < vocab)
        scored = scored._replace(logprobs=jnp.where(known, scored.logprobs, jnp.nan))
        saved = Saved(lse=lse, entropy=scored.entropy)
        residuals = _Residuals(hidden, operand, local_targets, known, weights, scale, saved)
        return jax.tree.map(own, scored), residuals

    def backward(
        residuals: _Residuals, cotangents: TokenLogprobs
    ) -> tuple[jax.Array, HeadParams, None]:
        stacked = gather(jnp.stack(cotangents, axis=-1), group, 1)
        everyone = TokenLogprobs(
            logprobs=jnp.where(residuals.known, stacked[..., 0], 0.0), entropy=stacked[..., 1]
        )
        doperand, dslice = _slice_gradients(residuals, everyone, config, layout)
        _, pull_norm = jax.vjp(
            lambda h, scale: normed(h, scale, config), residuals.hidden, residuals.norm_scale
        )
        dhidden, dscale = pull_norm(reduce(doperand, group, 1))
        if dscale is not None:
            dscale = reduce(dscale.astype(jnp.float32), layout.axes, 0).astype(dtypes.norm_scale)
        return dhidden, HeadParams(table_part(dslice), dscale), None

    head.defvjp(forward, backward)
    specs = jax.tree.map(lambda x: layout.parameter(x.shape), params)
    return jax.shard_map(
        head,
        in_specs=(layout.tokens, specs, layout.tokens),
        out_specs=layout.tokens,
        check_vma=True,
    )(hidden, params, targets)


def _score_slice(
    operand: jax.Array, weights: jax.Array, local_targets: jax.Array, config: HeadConfig
) -> _Partial:
    """All tokens [r, T, D] of a group against one slice [V / token_ranks, D] of the table."""
    chunks = Chunks.fit(operand.shape[1], config.chunk_tokens)
    slice_ids = weights.shape[0]

    def step(carry: None, chunk: tuple[jax.Array, jax.Array]) -> tuple[None, _Partial]:
        x, y = chunk
        raw = raw_logits(x, weights)
        z = squash(raw, config)
        peak = jnp.max(z, axis=-1)
        shifted = z - peak[..., None]
        exps = jnp.exp(shifted)
        here = (y >= 0) & (y < slice_ids)
        index = jnp.where(here, y, 0)[..., None]
        picked = jnp.take_along_axis(z, index, axis=-1)[..., 0]
        return carry, _Partial(
            peak=peak,
            total=jnp.sum(exps, axis=-1),
            weighted=jnp.sum(exps * shifted, axis=-1),
            picked=jnp.where(here, picked, 0.0),
            broken=1.0 - all_finite(raw).astype(jnp.float32),
        )

    _, out = jax.lax.scan(step, None, (chunks.split(operand), chunks.split(local_targets)))
    partial: _Partial = jax.tree.map(chunks.join, out)
    return partial


def _combine(partial: _Partial, group: tuple[str, ...]) -> tuple[TokenLogprobs, jax.Array]:
    """Scores and log-sum-exp over the whole vocabulary, equal on every device of the group."""
    peak = largest(partial.peak, group)
    drop = partial.peak - peak
    rescale = jnp.exp(drop)
    sums = jnp.stack(
        [
            partial.total * rescale,
            (partial.weighted + drop * partial.total) * rescale,
            partial.picked,
            partial.broken,
        ]
    )
    mass, weighted, picked, broken = total(sums, group)
    log_total = jnp.log(mass)
    finite = broken == 0
    scored = TokenLogprobs(
        logprobs=jnp.where(finite, picked - peak - log_total, jnp.nan),
        entropy=jnp.where(finite, log_total - weighted / mass, jnp.nan),
    )
    return scored, peak + log_total


def _slice_gradients(
    residuals: _Residuals, cotangents: TokenLogprobs, config: HeadConfig, layout: Layout
) -> tuple[jax.Array, jax.Array]:
    """Float32 gradients, from one vocabulary slice, of the operand [r, T, D] and of the slice."""
    chunks = Chunks.fit(residuals.operand.shape[1], config.chunk_tokens)
    weights = residuals.table
    ids = jnp.arange(weights.shape[0], dtype=jnp.int32)

    def step(
        dslice: jax.Array, chunk: tuple[jax.Array, jax.Array, Saved, TokenLogprobs]
    ) -> tuple[jax.Array, jax.Array]:
        x, y, saved, cotangents = chunk
        dx, dweights = operand_gradients(
            x=x,
            table=weights,
            raw=raw_logits(x, weights),
            onehot=y[..., None] == ids,
            saved=saved,
            cotangents=cotangents,
            config=config,
        )
        return dslice + dweights, dx

    split = jax.tree.map(
        chunks.split, (residuals.operand, residuals.local_targets, residuals.saved, cotangents)
    )
    zeros = varying(jnp.zeros(weights.shape, jnp.float32), layout)
    dslice, doperand = jax.lax.scan(step, zeros, split)
    return chunks.join(doperand), dslice
