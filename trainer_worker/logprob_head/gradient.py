"""The hand-written backward of one chunk: from cotangents of log-prob and entropy to the logits'.

Shared by both sharded heads, whose vocabulary may be the whole or a slice; holds no collective.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainer_worker.logprob_head.config import HeadConfig, TokenLogprobs
from trainer_worker.logprob_head.score import squash


class Saved(NamedTuple):
    """What the forward keeps per token, so that the backward needs no second log-sum-exp.

    lse: float32 [R, T], log of the sum of exp(logits) over the whole vocabulary.
    entropy: float32 [R, T].
    """

    lse: jax.Array
    entropy: jax.Array


def operand_gradients(
    *,
    x: jax.Array,
    table: jax.Array,
    raw: jax.Array,
    onehot: jax.Array,
    saved: Saved,
    cotangents: TokenLogprobs,
    config: HeadConfig,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of the operand x [R, C, D] and of the table [V, D], both summed in float32.

    raw: float32 [R, C, V]; onehot: bool [R, C, V], where the target is. The gradient of the logits
    is rounded to the compute dtype for the two matmuls, as the forward's operands are.
    """
    z = squash(raw, config)
    log_p = z - saved.lse[..., None]
    p = jnp.exp(log_p)
    pull = cotangents.logprobs[..., None] + cotangents.entropy[..., None] * (
        log_p + saved.entropy[..., None]
    )
    dz = jnp.where(onehot, cotangents.logprobs[..., None], 0.0) - p * pull
    if config.final_softcap is not None:
        bend = z * (config.temperature / config.final_softcap)
        dz = dz * (1.0 - bend * bend)
    draw = (dz / config.temperature).astype(table.dtype)
    dx = jnp.einsum("rcv,vd->rcd", draw, table, preferred_element_type=jnp.float32)
    dtable = jnp.einsum("rcv,rcd->vd", draw, x, preferred_element_type=jnp.float32)
    return dx, dtable


def known_only(cotangent: jax.Array, targets: jax.Array, vocab: int) -> jax.Array:
    """Cotangent of the log-probs, zero where the target is no id (there the log-prob is NaN)."""
    return jnp.where((targets >= 0) & (targets < vocab), cotangent, 0.0)
