"""The policy loss of one micro-batch: an unreduced sum and its denominator, kept apart.

Sums are accumulated over micro-batches and divided once, by the step's total denominator, so that
loss and gradient do not depend on how tokens were split. Inputs are token-aligned; the shift to
"position t predicts token t + 1" happens here, once. Masked values are replaced before any exp or
log, so that nothing at a masked position can leak (0 * nan is nan).

GRPO: clipped importance ratio (Shao et al. 2024, arXiv 2402.03300); asymmetric clip as in DAPO
(arXiv 2503.14476); dual clip (arXiv 1912.09729); KL estimators after Schulman's note on
approximating KL: `kl` = log p - log q, `mse_kl` = its square / 2, `low_var_kl` = exp(d) - d - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from trainer_worker.engines.jax_engine.config import LossConfig

LOG_CLIP: Final = 20.0  # Log-ratios beyond this are clipped before exp.
SUM_NAMES: Final = (
    "loss",
    "denominator",
    "entropy",
    "logprob_gap",
    "tokens",
    "kept_tokens",
    "clipped_tokens",
    "kl",
    "sequences",
)
"""Names of the sums, in the order of the accumulated vector."""


def shifted(array: Array) -> Array:
    """What belongs to the token that each position predicts: `[r, t] = array[r, t + 1]`."""
    return jnp.roll(array, -1, axis=1)


def target_weights(batch: Mapping[str, Array]) -> Array:
    """f32 `[R, T]`: 1 where position t predicts a trained token of its own segment."""
    segments = batch["segment_ids"]
    inside = (shifted(segments) == segments) & (segments != 0)
    inside = inside.at[:, -1].set(False)
    return (inside & (shifted(batch["loss_mask"]) == 1)).astype(jnp.float32)


def host_denominator(config: LossConfig, arrays: Mapping[str, np.ndarray]) -> float:
    """The denominator as the host knows it (log-prob gates may lower it on the device)."""
    mask = arrays["loss_mask"] == 1
    if config.loss_agg_mode == "token-mean":
        return float(np.count_nonzero(mask))
    rows = np.arange(mask.shape[0])[:, None] * (int(arrays["segment_ids"].max(initial=0)) + 1)
    return float(np.unique((rows + arrays["segment_ids"])[mask]).size)


def _per_segment(values: Array, segments: Array) -> Array:
    """Sum of `values` over each position's own segment, `[R, T]`. Segments hold >= 2 tokens."""
    count = segments.shape[1] // 2 + 2
    index = jnp.clip(segments, 0, count - 1)

    def row(value: Array, segment: Array) -> Array:
        return jax.ops.segment_sum(value, segment, num_segments=count)[segment]

    return jax.vmap(row)(values, index)


def _masked(values: Array, weights: Array) -> Array:
    return jnp.where(weights > 0, values, 0.0)


def loss_sums(
    config: LossConfig, logprobs: Array, entropy: Array, batch: Mapping[str, Array]
) -> tuple[Array, Array]:
    """(loss sum to differentiate, f32 vector of sums in the order of `SUM_NAMES`).

    `logprobs` and `entropy` `[R, T]` are of the predicted token.
    """
    weights = target_weights(batch)
    new = _masked(logprobs, weights)
    entropy = _masked(entropy, weights)
    advantages = _masked(shifted(batch["advantages"]), weights)
    segments = batch["segment_ids"]
    trained = weights
    gap = jnp.zeros_like(new)
    if "sampling_logprobs" in batch:
        sampled = _masked(shifted(batch["sampling_logprobs"]), weights)
        gap = jnp.abs(jax.lax.stop_gradient(new) - sampled)
        if config.logp_gate:
            mean_gap = _per_segment(gap, segments) / jnp.maximum(
                _per_segment(trained, segments), 1.0
            )
            weights = jnp.where(mean_gap <= config.logp_gate, weights, 0.0)
    ratio_log = new - jax.lax.stop_gradient(_old(config, new, batch, trained))
    ratio = jnp.exp(jnp.clip(_masked(ratio_log, weights), -LOG_CLIP, LOG_CLIP))
    clipped = jnp.clip(ratio, 1.0 - config.epsilon_low, 1.0 + config.epsilon_high)
    plain, bounded = -advantages * ratio, -advantages * clipped
    token_loss = jnp.maximum(plain, bounded)
    if config.dual_clip:
        floor = -advantages * config.dual_clip
        token_loss = jnp.where(advantages < 0, jnp.minimum(token_loss, floor), token_loss)
    was_clipped = (bounded > plain).astype(jnp.float32)
    if config.tis_cap:
        sampled = _masked(shifted(batch["sampling_logprobs"]), trained)
        mismatch = jnp.clip(jax.lax.stop_gradient(new) - sampled, -LOG_CLIP, LOG_CLIP)
        token_loss = token_loss * jnp.minimum(jnp.exp(mismatch), config.tis_cap)
    kl = jnp.zeros_like(new)
    if config.kl_coefficient:
        kl = _kl(config, new, _masked(shifted(batch["ref_logprobs"]), trained))
        token_loss = token_loss + config.kl_coefficient * kl
    if config.entropy_coefficient:
        token_loss = token_loss - config.entropy_coefficient * entropy
    scale, denominator = _aggregate(config, weights, segments)
    loss = jnp.sum(_masked(token_loss, weights) * scale)
    sums = (
        jax.lax.stop_gradient(loss),
        denominator,
        jnp.sum(entropy),
        jnp.sum(gap),
        jnp.sum(trained),
        jnp.sum(weights),
        jnp.sum(_masked(was_clipped, weights)),
        jnp.sum(_masked(kl, weights)),
        _sequences(weights, segments),
    )
    return loss, jnp.stack([jnp.asarray(value, jnp.float32) for value in sums])


def _old(config: LossConfig, new: Array, batch: Mapping[str, Array], weights: Array) -> Array:
    if config.old_logprobs == "current":
        return new
    name = "sampling_logprobs" if config.old_logprobs == "sampler" else "old_logprobs"
    return _masked(shifted(batch[name]), weights)


def _kl(config: LossConfig, new: Array, ref: Array) -> Array:
    difference = jnp.clip(ref - new, -LOG_CLIP, LOG_CLIP)
    if config.kl_estimator == "kl":
        return new - ref
    if config.kl_estimator == "mse_kl":
        return 0.5 * (new - ref) ** 2
    return jnp.exp(difference) - difference - 1.0


def _sequences(weights: Array, segments: Array) -> Array:
    """How many sequences have a weighted token."""
    counts = _per_segment(weights, segments)
    return jnp.sum(jnp.where(weights > 0, 1.0 / jnp.maximum(counts, 1.0), 0.0))


def _aggregate(config: LossConfig, weights: Array, segments: Array) -> tuple[Array, Array]:
    """(factor of each token's loss, the micro-batch's denominator)."""
    if config.loss_agg_mode == "token-mean":
        return weights, jnp.sum(weights)
    # Rounded: a sum of 1/n over n tokens is a whole number but for rounding.
    sequences = jnp.round(_sequences(weights, segments))
    if config.loss_agg_mode == "sequence-mean-token-mean":
        return weights / jnp.maximum(_per_segment(weights, segments), 1.0), sequences
    if config.loss_agg_mode == "sequence-mean-token-sum":
        return weights, sequences
    return weights / config.norm_tokens, sequences
