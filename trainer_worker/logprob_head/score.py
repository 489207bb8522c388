"""The arithmetic of one chunk, shared by all heads so that they differ in layout only.

Works on whatever tokens it is given; knows no mesh, no chunking and no collective.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainer_worker.logprob_head.config import HeadConfig, TokenLogprobs


class Logits(NamedTuple):
    """Logits of one chunk over some part of the vocabulary.

    z: float32 [R, C, V], after soft-cap and temperature.
    finite: bool [R, C], whether every raw logit of the token was finite. The soft-cap maps an
        infinite logit to a finite one, and log-sum-exp drops one at minus infinity, so a broken
        hidden state could pass for a healthy one without it.
    """

    z: jax.Array
    finite: jax.Array


def normed(hidden: jax.Array, norm_scale: jax.Array | None, config: HeadConfig) -> jax.Array:
    """The matmul operand [R, C, D] in compute dtype: RMSNorm in float32 when a scale [D] is given."""
    if norm_scale is not None:
        x = hidden.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(mean_square + config.norm_eps)
        hidden = x * norm_scale.astype(jnp.float32)
    return hidden.astype(config.compute_dtype)


def squash(raw: jax.Array, config: HeadConfig) -> jax.Array:
    """Soft-cap, then temperature, on raw float32 logits."""
    if config.final_softcap is not None:
        raw = config.final_softcap * jnp.tanh(raw / config.final_softcap)
    return raw / config.temperature if config.temperature != 1.0 else raw


def raw_logits(x: jax.Array, table: jax.Array) -> jax.Array:
    """float32 [R, C, V] from the operand [R, C, D] and the table [V, D], both in compute dtype."""
    return jnp.einsum("rcd,vd->rcv", x, table, preferred_element_type=jnp.float32)


def logits_of(raw: jax.Array, config: HeadConfig) -> Logits:
    """Final logits and the non-finite guard from raw float32 logits [R, C, V]."""
    finite = jnp.isfinite(jnp.max(jnp.abs(raw), axis=-1))
    return Logits(z=squash(raw, config), finite=finite)


def score(logits: Logits, targets: jax.Array) -> TokenLogprobs:
    """Log-prob of targets [R, C] and entropy over the whole vocabulary.

    A token with a non-finite logit gives NaN for both; a target outside [0, V) gives a NaN log-prob.
    """
    vocab = logits.z.shape[-1]
    peak = jax.lax.stop_gradient(jnp.max(logits.z, axis=-1, keepdims=True))
    shifted = logits.z - peak
    weights = jnp.exp(shifted)
    total = jnp.sum(weights, axis=-1)
    log_total = jnp.log(total)
    known = (targets >= 0) & (targets < vocab)
    index = jnp.where(known, targets, 0)[..., None]
    picked = jnp.take_along_axis(shifted, index, axis=-1)[..., 0]
    logprobs = picked - log_total
    entropy = log_total - jnp.sum(weights * shifted, axis=-1) / total
    return TokenLogprobs(
        logprobs=jnp.where(logits.finite & known, logprobs, jnp.nan),
        entropy=jnp.where(logits.finite, entropy, jnp.nan),
    )
