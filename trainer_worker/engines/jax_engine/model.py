"""The model: a decoder in the Llama/Qwen shape, dense or with experts, in plain JAX.

Plain functions over a dictionary of arrays rather than a module library: parameters are what a
checkpoint, a weight export and a digest see, layers are one `lax.scan` over stacked arrays (so that
compile time does not grow with depth), and placement is a matter of a few named arrays. RMSNorm,
RoPE by `positions`, grouped-query attention within a segment, SwiGLU, tied or untied head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array, lax

from trainer_worker.engines.jax_engine.config import ModelConfig
from trainer_worker.engines.jax_engine.mesh import (
    TOKEN_AXES,
    TOKENS,
    WHOLE,
    constrain,
    has_mesh,
)
from trainer_worker.engines.jax_engine.moe import Buffers, moe_feed_forward
from trainer_worker.engines.jax_engine.precision import dense

Params = Mapping[str, Array | Mapping[str, Array]]
HostArray = npt.NDArray[np.float32]
HostParams = Mapping[str, HostArray | Mapping[str, HostArray]]

MASKED: Final = -1e30  # A score that softmax turns into 0; finite, so that no row becomes nan.


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the stacked parameters of the dense layers, `[layers, ...]`."""
    layers, hidden = config.dense_layers, config.hidden_size
    return {
        **_attention_shapes(config, layers),
        "w_gate": (layers, hidden, config.ffn_size),
        "w_up": (layers, hidden, config.ffn_size),
        "w_down": (layers, config.ffn_size, hidden),
    }


def moe_layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the stacked parameters of the MoE layers, `[moe_layers, ...]`."""
    assert config.moe is not None
    layers, hidden, moe = config.moe_layers, config.hidden_size, config.moe
    experts, width = moe.num_experts, moe.expert_ffn_size
    return {
        **_attention_shapes(config, layers),
        "router": (layers, hidden, experts),
        "expert_gate": (layers, experts, hidden, width),
        "expert_up": (layers, experts, hidden, width),
        "expert_down": (layers, experts, width, hidden),
    }


def _attention_shapes(config: ModelConfig, layers: int) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    return {
        "attn_norm": (layers, hidden),
        "wq": (layers, hidden, queries),
        "wk": (layers, hidden, keys),
        "wv": (layers, hidden, keys),
        "wo": (layers, queries, hidden),
        "ffn_norm": (layers, hidden),
    }


def init_params(config: ModelConfig, seed: int) -> HostParams:
    """Random f32 parameters on the host; the same for a seed on every machine."""
    rng = np.random.default_rng(seed)

    def matrix(shape: tuple[int, ...], fan_in: int) -> HostArray:
        return rng.standard_normal(shape, np.float32) * np.float32(fan_in**-0.5)

    def stacked(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, HostArray]:
        return {
            name: np.ones(shape, np.float32) if len(shape) == 2 else matrix(shape, shape[-2])
            for name, shape in shapes.items()
        }

    stacks: dict[str, Mapping[str, HostArray]] = {}
    if config.dense_layers:
        stacks["layers"] = stacked(layer_shapes(config))
    if config.moe is not None:
        stacks["moe_layers"] = stacked(moe_layer_shapes(config))
    hidden = config.hidden_size
    params: dict[str, HostArray | Mapping[str, HostArray]] = {
        "embed": matrix((config.vocab_size, hidden), hidden),
        **stacks,
        "final_norm": np.ones((hidden,), np.float32),
    }
    if not config.tied_head:
        params["head"] = matrix((config.vocab_size, hidden), hidden)
    return params


def head_table(params: Params) -> Array:
    """The vocabulary table `[V, D]` that scores tokens."""
    table = params["head"] if "head" in params else params["embed"]
    assert not isinstance(table, Mapping)
    return table


def final_norm(params: Params) -> Array:
    """Scale of the final RMSNorm `[D]`."""
    scale = params["final_norm"]
    assert not isinstance(scale, Mapping)
    return scale


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """x * scale / rms(x) over the last axis, in f32."""
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * inverse * scale.astype(jnp.float32)).astype(x.dtype)


def _rope(x: Array, positions: Array, theta: float) -> Array:
    """Rotate `[R, T, heads, head_dim]` by `positions` `[R, T]`; halves, not interleaved pairs."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle)[:, :, None, :], jnp.sin(angle)[:, :, None, :]
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def split_blocks(x: Array, block: int) -> Array:
    """`[R, T, ...]` -> `[blocks, R, block, ...]`, padded with zeros at the end."""
    rows, tokens = x.shape[:2]
    blocks = -(-tokens // block)
    x = jnp.pad(x, [(0, 0), (0, blocks * block - tokens)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(rows, blocks, block, *x.shape[2:]), 1, 0)


def join_blocks(x: Array, tokens: int) -> Array:
    """The inverse of `split_blocks`: `[R, tokens, ...]`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])[:, :tokens]


def _attend(q: Array, k: Array, v: Array, segment_ids: Array, block: int) -> Array:
    """Causal attention within segments. q `[R, T, H, d]`, k and v `[R, T, K, d]` -> `[R, T, H, d]`.

    On a mesh each device gathers the keys and values of its rows once and does its own queries.
    """
    if not has_mesh():
        start = jnp.zeros((), jnp.int32)
        return _attend_from(q, k, v, segment_ids, segment_ids, start, block)

    def local(q: Array, k: Array, v: Array, segments: Array) -> Array:
        start = lax.axis_index(TOKEN_AXES) * q.shape[1]
        k, v, every = (lax.all_gather(x, TOKEN_AXES, axis=1, tiled=True) for x in (k, v, segments))
        return _attend_from(q, k, v, segments, every, start, block)

    mapped: Array = jax.shard_map(
        local, in_specs=(TOKENS, TOKENS, TOKENS, TOKENS), out_specs=TOKENS
    )(q, k, v, segment_ids)
    return mapped


def _attend_from(
    q: Array, k: Array, v: Array, q_segments: Array, k_segments: Array, start: Array, block: int
) -> Array:
    """Attention of queries that begin at token `start` of rows whose keys are whole.

    A block of queries at a time: scores are `[R, H, block, T]`, never `[R, H, T, T]`, in the
    backward pass too. A padding query attends to padding keys: finite, and nobody reads it.
    """
    rows, tokens, heads, dim = q.shape
    kv_heads = k.shape[2]
    block = min(block, tokens)
    keys = jnp.arange(k.shape[1])
    scale = dim**-0.5

    @jax.checkpoint
    def one(k: Array, v: Array, queries: Array, segments: Array, index: Array) -> Array:
        scores = jnp.einsum("rqkgd,rtkd->rkgqt", queries, k, preferred_element_type=jnp.float32)
        same = segments[:, :, None] == k_segments[:, None, :]
        mask = same & (keys[None, :] <= index[:, None])[None]
        scores = jnp.where(mask[:, None, None], scores * scale, MASKED)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("rkgqt,rtkd->rqkgd", weights, v)

    grouped = split_blocks(q.reshape(rows, tokens, kv_heads, heads // kv_heads, dim), block)
    indices = start + jnp.arange(grouped.shape[0] * block).reshape(-1, block)

    def body(carry: None, part: tuple[Array, Array, Array]) -> tuple[None, Array]:
        return carry, one(k, v, *part)

    _, out = lax.scan(body, None, (grouped, split_blocks(q_segments, block), indices))
    return join_blocks(out, tokens).reshape(rows, tokens, heads, dim)


def feed_forward(config: ModelConfig, x: Array, layer: Mapping[str, Array]) -> Array:
    """SwiGLU."""
    after = config.cast_grads_after_all_reduce
    gate = jax.nn.silu(dense(x, layer["w_gate"], cast_after=after))
    up = dense(x, layer["w_up"], cast_after=after)
    return dense(gate * up, layer["w_down"], cast_after=after)


def _attention(
    config: ModelConfig, x: Array, layer: Mapping[str, Array], positions: Array, segments: Array
) -> Array:
    """`x` with the attention of its normed self added."""
    rows, tokens, _ = x.shape
    normed = rms_norm(x, layer["attn_norm"], config.norm_eps)

    after = config.cast_grads_after_all_reduce

    def heads(name: str, count: int) -> Array:
        product = dense(normed, layer[name], cast_after=after)
        return product.reshape(rows, tokens, count, config.head_dim)

    q = _rope(heads("wq", config.num_heads), positions, config.rope_theta)
    k = _rope(heads("wk", config.num_kv_heads), positions, config.rope_theta)
    v = heads("wv", config.num_kv_heads)
    mixed = _attend(q, k, v, segments, config.query_block).reshape(rows, tokens, -1)
    return x + dense(mixed, layer["wo"], cast_after=after)


class Decoded(NamedTuple):
    """What the layers make of a micro-batch."""

    hidden: Array  # [R, T, D] before the final norm, 0 at padding.
    dropped: Array  # int32 scalar: assignments that MoE buffers had no room for.
    experts: Array  # int32 [moe_layers, R, T, top_k] used; no layers for a dense model.


def decode(
    config: ModelConfig, params: Params, batch: Mapping[str, Array], buffers: Buffers
) -> Decoded:
    """Runs the layers over `tokens`, `positions`, `segment_ids` and, where there, `routed_experts`."""
    positions, segments = batch["positions"], batch["segment_ids"]
    embed = params["embed"]
    assert not isinstance(embed, Mapping)
    table = constrain(embed, WHOLE)
    x = constrain(table[batch["tokens"]].astype(jnp.dtype(config.compute_dtype)), TOKENS)

    def plain(x: Array, layer: Mapping[str, Array]) -> tuple[Array, None]:
        x = _attention(config, x, layer, positions, segments)
        normed = rms_norm(x, layer["ffn_norm"], config.norm_eps)
        return constrain(x + feed_forward(config, normed, layer), TOKENS), None

    if config.dense_layers:
        x, _ = lax.scan(jax.checkpoint(plain), x, params["layers"])
    dropped = jnp.zeros((), jnp.int32)
    experts = jnp.zeros((0, *segments.shape, 1), jnp.int32)
    if config.moe is not None:
        moe, recorded = config.moe, batch.get("routed_experts")

        def expert(
            x: Array, part: tuple[Mapping[str, Array], Array | None]
        ) -> tuple[Array, tuple[Array, Array]]:
            layer, replay = part
            x = _attention(config, x, layer, positions, segments)
            normed = rms_norm(x, layer["ffn_norm"], config.norm_eps)
            made = moe_feed_forward(moe, buffers, normed, layer, segments != 0, replay)
            return constrain(x + made.out, TOKENS), (made.dropped, made.experts)

        by_layer = None if recorded is None else jnp.moveaxis(recorded, 2, 0)
        stack = (params["moe_layers"], by_layer)
        x, (counts, experts) = lax.scan(jax.checkpoint(expert), x, stack)
        dropped = jnp.sum(counts)
    # What padding holds must not reach the head: a NaN there would make every gradient NaN.
    hidden = jnp.where((segments != 0)[..., None], x, jnp.zeros((), x.dtype))
    return Decoded(hidden=hidden, dropped=dropped, experts=experts)
