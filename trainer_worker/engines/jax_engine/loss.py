"""The policy loss of one micro-batch: an unreduced sum and its denominator, kept apart.

Sums are accumulated over micro-batches and divided once, by the step's total denominator, so that
loss and gradient do not depend on how tokens were split. Inputs are token-aligned; the shift to
"position t predicts token t + 1" happens here, once. Masked values are replaced before any exp or
log, so that nothing at a masked position can leak (0 * nan is nan).

GRPO: clipped importance ratio (Shao et al. 2024, arXiv 2402.03300); asymmetric clip as in DAPO
(arXiv 2503.14476); dual clip (arXiv 1912.09729); KL estimators after Schulman's note on
approximating KL, with q the reference and p the policy: `kl` = log p - log q, `mse_kl` = its
square / 2, `low_var_kl` = exp(d) - d - 1 with d = log q - log p.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

from trainer_worker.engines.jax_engine.config import LossConfig

LOG_CLIP: Final = 20.0  # Log-ratios beyond this are clipped before exp.
SUM_NAMES: Final = (
    "loss",  # Of the tokens' weighted losses, nats.
    "denominator",  # Tokens or sequences, by loss_agg_mode.
    "entropy",  # Nats, over trained tokens.
    "logprob_gap",  # |trainer - sampler|, nats, over trained tokens.
    "tokens",  # Trained tokens, before the gates.
    "kept_tokens",  # Trained tokens that the gates kept.
    "clipped_tokens",  # Kept tokens whose ratio was clipped.
    "kl",  # Nats, over kept tokens.
    "sequences",  # Sequences with a trained token.
    "kept_sequences",  # Of these, kept by the gates.
)
"""Names of the sums, in the order of the accumulated vector."""


def shifted(array: Array) -> Array:
    """What belongs to the token that each position predicts: `[r, t] = array[r, t + 1]`."""
    return jnp.roll(array, -1, axis=1)


def predicts(segment_ids: Array) -> Array:
    """bool `[R, T]`: position t predicts a token of its own segment."""
    inside = (shifted(segment_ids) == segment_ids) & (segment_ids != 0)
    return inside.at[:, -1].set(False)


def target_weights(batch: Mapping[str, Array]) -> Array:
    """f32 `[R, T]`: 1 where position t predicts a trained token of its own segment."""
    trained = predicts(batch["segment_ids"]) & (shifted(batch["loss_mask"]) == 1)
    return trained.astype(jnp.float32)


def segment_limit(tokens_per_row: int) -> int:
    """The highest segment id that the per-sequence sums have room for."""
    return tokens_per_row


def host_denominator(config: LossConfig, arrays: Mapping[str, npt.NDArray[np.generic]]) -> float:
    """The denominator as the host knows it (log-prob gates may lower it on the device)."""
    mask = arrays["loss_mask"] == 1
    if config.loss_agg_mode == "token-mean":
        return float(np.count_nonzero(mask))
    segments = arrays["segment_ids"].astype(np.int64)
    rows = np.arange(mask.shape[0])[:, None] * (int(segments.max(initial=0)) + 1)
    return float(np.unique((rows + segments)[mask]).size)


def _by_segment(values: Array, segments: Array) -> Array:
    """Sums of `values` `[R, T]` over each segment: `[R, segments]`, slot 0 is padding."""
    count = segment_limit(segments.shape[1]) + 1

    def row(value: Array, segment: Array) -> Array:
        return jax.ops.segment_sum(value, segment, num_segments=count)

    return jax.vmap(row)(values, segments)


def _per_segment(values: Array, segments: Array) -> Array:
    """Sum of `values` over each position's own segment, `[R, T]`."""
    return jnp.take_along_axis(_by_segment(values, segments), segments, axis=1)


def _sequences(weights: Array, segments: Array) -> Array:
    """How many sequences have a weighted token."""
    return jnp.sum(_by_segment(weights, segments) > 0).astype(jnp.float32)


def _masked(values: Array, weights: Array) -> Array:
    return jnp.where(weights > 0, values, 0.0)


def loss_sums(
    config: LossConfig, logprobs: Array, entropy: Array, batch: Mapping[str, Array]
) -> tuple[Array, Array]:
    """(loss sum to differentiate, f32 vector of sums in the order of `SUM_NAMES`).

    `logprobs` and `entropy` f32 `[R, T]`, in nats, are of the predicted token.
    """
    segments = batch["segment_ids"]
    trained = target_weights(batch)
    new = _masked(logprobs, trained)
    entropy = _masked(entropy, trained)
    advantages = _masked(shifted(batch["advantages"]), trained)
    sampled: Array | None = None
    gap = jnp.zeros_like(new)
    if "sampling_logprobs" in batch:
        sampled = _masked(shifted(batch["sampling_logprobs"]), trained)
        gap = jnp.abs(jax.lax.stop_gradient(new) - sampled)
    weights = _gated(config, gap, trained, segments)

    old = jax.lax.stop_gradient(_old(config, new, batch, trained))
    ratio = jnp.exp(jnp.clip(new - old, -LOG_CLIP, LOG_CLIP))
    low, high = 1.0 - config.epsilon_low, 1.0 + config.epsilon_high
    # Selected, not `clip` and `maximum`: where two arguments are equal JAX gives each half of the
    # gradient, and with an epsilon of 0 a ratio of 1 lies on the bound.
    clipped = jnp.where(ratio < low, low, jnp.where(ratio > high, high, ratio))
    plain, bounded = -advantages * ratio, -advantages * clipped
    was_clipped = bounded > plain
    token_loss = jnp.where(was_clipped, bounded, plain)
    if config.dual_clip:
        bound = -advantages * config.dual_clip
        was_clipped |= (advantages < 0) & (bound < token_loss)
        token_loss = jnp.where(advantages < 0, jnp.minimum(token_loss, bound), token_loss)
    if config.tis_cap:
        assert sampled is not None
        mismatch = jnp.exp(jnp.clip(old - sampled, -LOG_CLIP, LOG_CLIP))
        token_loss = token_loss * jnp.minimum(mismatch, config.tis_cap)
    kl = jnp.zeros_like(new)
    if config.kl_coefficient:
        kl = _kl(config, new, _masked(shifted(batch["ref_logprobs"]), trained))
        token_loss = token_loss + config.kl_coefficient * kl
    if config.entropy_coefficient:
        token_loss = token_loss - config.entropy_coefficient * entropy

    scale, denominator = _aggregate(config, weights, segments)
    loss = jnp.sum(_masked(token_loss, weights) * scale)
    sums = {
        "loss": loss,
        "denominator": denominator,
        "entropy": jnp.sum(entropy),
        "logprob_gap": jnp.sum(gap),
        "tokens": jnp.sum(trained),
        "kept_tokens": jnp.sum(weights),
        "clipped_tokens": jnp.sum(_masked(was_clipped.astype(jnp.float32), weights)),
        "kl": jnp.sum(_masked(kl, weights)),
        "sequences": _sequences(trained, segments),
        "kept_sequences": _sequences(weights, segments),
    }
    return loss, jax.lax.stop_gradient(jnp.stack([sums[name] for name in SUM_NAMES]))


def _gated(config: LossConfig, gap: Array, trained: Array, segments: Array) -> Array:
    """Weights without the sequences whose mean log-prob gap is above the gate (or not a number)."""
    if not config.logp_gate:
        return trained
    mean_gap = _per_segment(gap, segments) / jnp.maximum(_per_segment(trained, segments), 1.0)
    return jnp.where(mean_gap <= config.logp_gate, trained, 0.0)


def _old(config: LossConfig, new: Array, batch: Mapping[str, Array], trained: Array) -> Array:
    """Log-prob under the policy that the importance ratio is against."""
    if config.old_logprobs == "current":
        return new
    name = "sampling_logprobs" if config.old_logprobs == "sampler" else "old_logprobs"
    return _masked(shifted(batch[name]), trained)


def _kl(config: LossConfig, new: Array, ref: Array) -> Array:
    if config.kl_estimator == "kl":
        return new - ref
    if config.kl_estimator == "mse_kl":
        return 0.5 * (new - ref) ** 2
    difference = jnp.clip(ref - new, -LOG_CLIP, LOG_CLIP)
    return jnp.exp(difference) - difference - 1.0


def _aggregate(config: LossConfig, weights: Array, segments: Array) -> tuple[Array, Array]:
    """(factor of each token's loss, the micro-batch's denominator)."""
    if config.loss_agg_mode == "token-mean":
        return weights, jnp.sum(weights)
    sequences = _sequences(weights, segments)
    if config.loss_agg_mode == "sequence-mean-token-mean":
        return weights / jnp.maximum(_per_segment(weights, segments), 1.0), sequences
    if config.loss_agg_mode == "sequence-mean-token-sum":
        return weights, sequences
    return weights / config.norm_tokens, sequences
