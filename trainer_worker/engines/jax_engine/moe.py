"""Mixture-of-experts layers: routing, replayed or own, and experts over buffers of a fixed size.

The experts lie over the mesh's `expert` axis. The devices of that axis (which share out a group of
rows) exchange their tokens, each computes its own experts' part, and the parts are summed back.
Each device's buffer holds a fixed number of assignments (a token and one of its experts); what does
not fit is left out and counted, never silently. Nothing is kept from one pass to the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from trainer_worker.engines.jax_engine.config import DROPLESS, MESH_AXES, MoeConfig
from trainer_worker.engines.jax_engine.mesh import TOKENS, WHOLE, constrain, has_mesh

EXPERT_AXIS: Final = "expert"
BY_EXPERT: Final = PartitionSpec(EXPERT_AXIS)


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """How assignments are given room.

    `factor`: of the even load of a device's experts; `DROPLESS` = room for every assignment.
    `exclude_padding`: padding tokens go to no expert and take no room.
    """

    factor: float = DROPLESS
    exclude_padding: bool = True

    def rows(self, assignments: int, ranks: int) -> int:
        """Of one device, where `ranks` devices share `assignments` out between them."""
        if self.factor == DROPLESS:
            return assignments
        return max(1, min(assignments, math.ceil(self.factor * assignments / ranks)))


class Routed(NamedTuple):
    """Where tokens go."""

    experts: Array  # int32 [R, T, k]
    weights: Array  # f32 [R, T, k], summing to 1 over k.


class MoeOutput(NamedTuple):
    """Of one layer."""

    out: Array  # [R, T, D]
    dropped: Array  # int32 scalar: assignments that no buffer had room for, over all devices.
    experts: Array  # int32 [R, T, k]


def route(config: MoeConfig, x: Array, router: Array, recorded: Array | None) -> Routed:
    """Top-k experts of each token of `x` `[R, T, D]`, with probabilities normalised over the k.

    `recorded` int16 `[R, T, k]`: experts to use instead; a token whose ids are -1 uses its own
    router. The weights are the router's own either way, so that it is trained.
    """
    logits = x.astype(jnp.float32) @ router.astype(jnp.float32)
    probabilities = jax.nn.softmax(logits, axis=-1)
    _, experts = lax.top_k(probabilities, config.top_k)
    if recorded is not None:
        replayed = jnp.all(recorded >= 0, axis=-1, keepdims=True)
        experts = jnp.where(replayed, recorded.astype(jnp.int32), experts)
    chosen = jnp.take_along_axis(probabilities, experts, axis=-1)
    return Routed(experts=experts, weights=chosen / jnp.sum(chosen, axis=-1, keepdims=True))


def moe_feed_forward(
    config: MoeConfig,
    buffers: Buffers,
    x: Array,
    layer: Mapping[str, Array],
    real: Array,
    recorded: Array | None,
) -> MoeOutput:
    """SwiGLU experts. `x` `[R, T, D]`, `real` bool `[R, T]`, `recorded` as in `route`."""
    names = ("expert_gate", "expert_up", "expert_down")
    experts = tuple(constrain(layer[name].astype(x.dtype), BY_EXPERT) for name in names)
    router = constrain(layer["router"], WHOLE)
    if recorded is None:
        recorded = jnp.full((*x.shape[:2], config.top_k), -1, jnp.int16)

    def local(
        x: Array, real: Array, recorded: Array, router: Array, experts: tuple[Array, ...]
    ) -> MoeOutput:
        return _local(config, buffers, x, real, recorded, router, experts)

    if not has_mesh():
        return local(x, real, recorded, router, experts)
    mapped: tuple[Array, ...] = jax.shard_map(
        lambda *given: tuple(local(*given)),
        in_specs=(TOKENS, TOKENS, TOKENS, WHOLE, BY_EXPERT),
        out_specs=(TOKENS, WHOLE, TOKENS),
    )(x, real, recorded, router, experts)
    return MoeOutput(*mapped)


def _local(
    config: MoeConfig,
    buffers: Buffers,
    x: Array,
    real: Array,
    recorded: Array,
    router: Array,
    experts: tuple[Array, ...],
) -> MoeOutput:
    """One device's tokens `[r, t, D]` and experts `[E / ranks, ...]`."""
    rows, tokens, width = x.shape
    own, total = experts[0].shape[0], config.num_experts
    routed = route(config, x, router, recorded)
    ids = routed.experts
    if buffers.exclude_padding:
        ids = jnp.where(real[..., None], ids, total)  # No device's.
    flat = _gather(x.reshape(-1, width))
    ids = _gather(ids.reshape(-1, config.top_k)).reshape(-1)
    weights = _gather(routed.weights.reshape(-1, config.top_k)).reshape(-1)

    mine = ids - own * (lax.axis_index(EXPERT_AXIS) if has_mesh() else 0)
    mine = jnp.where((mine >= 0) & (mine < own), mine, own)
    room = buffers.rows(ids.size, total // own)
    order = jnp.argsort(mine, stable=True)[:room]  # By expert, then by token.
    wanted = jnp.bincount(mine, length=own + 1)[:own]
    ends = jnp.minimum(jnp.cumsum(wanted), room)
    sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)
    dropped = (jnp.sum(wanted) - ends[-1]).astype(jnp.int32)

    used = (jnp.arange(room) < ends[-1])[:, None]
    token = order // config.top_k
    # What lies behind the last group is not this device's: 0, in the backward pass too.
    gathered = jnp.where(used, flat[token], 0)
    gate, up, down = experts
    inner = jax.nn.silu(_grouped(gathered, gate, sizes)) * _grouped(gathered, up, sizes)
    part = _grouped(inner.astype(x.dtype), down, sizes) * weights[order][:, None]
    out = jnp.zeros((flat.shape[0], width), jnp.float32).at[token].add(jnp.where(used, part, 0.0))
    if has_mesh():
        out = lax.psum_scatter(out, EXPERT_AXIS, scatter_dimension=0, tiled=True)
        dropped = lax.psum(dropped, MESH_AXES)
    return MoeOutput(
        out=out.reshape(rows, tokens, width).astype(x.dtype),
        dropped=dropped,
        experts=routed.experts,
    )


def _grouped(x: Array, weights: Array, sizes: Array) -> Array:
    """Rows of `x` `[n, in]`, group after group, times their group's matrix `[groups, in, out]`."""
    product: Array = lax.ragged_dot(x, weights, sizes, preferred_element_type=jnp.float32)
    return product


def _gather(x: Array) -> Array:
    if not has_mesh():
        return x
    gathered: Array = lax.all_gather(x, EXPERT_AXIS, axis=0, tiled=True)
    return gathered
