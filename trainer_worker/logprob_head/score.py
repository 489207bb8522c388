"""The arithmetic of one chunk, shared by all heads so that they differ in layout only.

Works on whatever tokens it is given; knows no mesh, no chunking and no collective.
"""

import jax
import jax.numpy as jnp

from trainer_worker.logprob_head.config import HeadConfig, TokenLogprobs


def normed(hidden: jax.Array, norm_scale: jax.Array | None, config: HeadConfig) -> jax.Array:
    """The head's operand [R, C, D] in float32: RMSNorm when a scale [D] is given.

    Callers cast it to the compute dtype for the matmul.
    """
    x = hidden.astype(jnp.float32)
    if norm_scale is None:
        return x
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + config.norm_eps) * norm_scale.astype(jnp.float32)


def squash(raw: jax.Array, config: HeadConfig) -> jax.Array:
    """Soft-cap, then temperature, on raw float32 logits."""
    if config.final_softcap is not None:
        raw = config.final_softcap * jnp.tanh(raw / config.final_softcap)
    return raw / config.temperature if config.temperature != 1.0 else raw


def raw_logits(x: jax.Array, table: jax.Array) -> jax.Array:
    """float32 [R, C, V] from the operand [R, C, D] and the table [V, D], both in compute dtype."""
    return jnp.einsum("rcd,vd->rcv", x, table, preferred_element_type=jnp.float32)


def all_finite(raw: jax.Array) -> jax.Array:
    """bool [R, C]: whether every raw logit [R, C, V] of the token is finite.

    The soft-cap maps an infinite logit to a finite one, and a sum of exponentials drops one at
    minus infinity: without this guard a broken hidden state could pass for a healthy one.
    """
    return jnp.isfinite(jnp.max(jnp.abs(raw), axis=-1))


def score_and_lse(
    raw: jax.Array, targets: jax.Array, config: HeadConfig
) -> tuple[TokenLogprobs, jax.Array]:
    """Log-prob of targets [R, C], entropy, and log-sum-exp of the final logits, from raw [R, C, V].

    A token with a non-finite raw logit gives NaN for log-prob and entropy; a target outside [0, V)
    gives a NaN log-prob.
    """
    vocab = raw.shape[-1]
    z = squash(raw, config)
    peak = jax.lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True))
    shifted = z - peak
    weights = jnp.exp(shifted)
    total = jnp.sum(weights, axis=-1)
    log_total = jnp.log(total)
    known = (targets >= 0) & (targets < vocab)
    index = jnp.where(known, targets, 0)[..., None]
    logprobs = jnp.take_along_axis(shifted, index, axis=-1)[..., 0] - log_total
    entropy = log_total - jnp.sum(weights * shifted, axis=-1) / total
    finite = all_finite(raw)
    scored = TokenLogprobs(
        logprobs=jnp.where(finite & known, logprobs, jnp.nan),
        entropy=jnp.where(finite, entropy, jnp.nan),
    )
    return scored, peak[..., 0] + log_total
