"""Independent float64 NumPy references: the loss family token by token, and the decoder naively.

Written from the definitions, one sequence at a time; shares no code with the engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trainer_worker.engines.jax_engine.config import LossConfig, ModelConfig

F64 = npt.NDArray[np.float64]


@dataclass(kw_only=True)
class Scored:
    """One sequence's trained tokens."""

    new: F64
    entropy: F64
    advantages: F64
    sampling: F64
    old: F64
    ref: F64


@dataclass(kw_only=True)
class Reference:
    """Sums, and the gradient of the loss sum by each trained token's log-prob and entropy."""

    loss: float = 0.0
    denominator: float = 0.0
    gap: float = 0.0
    tokens: int = 0
    kept: int = 0
    clipped: int = 0
    kl: float = 0.0
    by_logprob: list[F64] = field(default_factory=list)
    by_entropy: list[F64] = field(default_factory=list)


def reference_loss(config: LossConfig, sequences: Sequence[Scored]) -> Reference:
    total = Reference()
    for one in sequences:
        count = len(one.new)
        total.tokens += count
        total.gap += float(np.abs(one.new - one.sampling).sum())
        gradient, entropy_gradient = np.zeros(count), np.zeros(count)
        total.by_logprob.append(gradient)
        total.by_entropy.append(entropy_gradient)
        if count == 0:
            continue
        if config.logp_gate and np.abs(one.new - one.sampling).mean() > config.logp_gate:
            continue
        total.kept += count
        scale = {
            "token-mean": 1.0,
            "sequence-mean-token-mean": 1.0 / count,
            "sequence-mean-token-sum": 1.0,
            "sequence-mean-token-sum-norm": 1.0 / max(config.norm_tokens, 1),
        }[config.loss_agg_mode]
        total.denominator += count if config.loss_agg_mode == "token-mean" else 1
        for i in range(count):
            loss, slope, clipped, kl = _token(config, one, i)
            total.loss += scale * loss
            total.clipped += clipped
            total.kl += kl
            gradient[i] = scale * slope
            entropy_gradient[i] = -scale * config.entropy_coefficient
    return total


def _token(config: LossConfig, one: Scored, i: int) -> tuple[float, float, bool, float]:
    """(loss, d loss / d log-prob, whether clipped, kl) of one token."""
    new, advantage = float(one.new[i]), float(one.advantages[i])
    old = {"current": new, "sampler": float(one.sampling[i]), "trainer": float(one.old[i])}[
        config.old_logprobs
    ]
    ratio = math.exp(new - old)
    low, high = 1 - config.epsilon_low, 1 + config.epsilon_high
    loss, slope, clipped = -advantage * ratio, -advantage * ratio, False
    pinned = min(max(ratio, low), high)
    if -advantage * pinned > loss:
        loss, slope, clipped = -advantage * pinned, 0.0, True
    if config.dual_clip and advantage < 0 and -advantage * config.dual_clip < loss:
        loss, slope, clipped = -advantage * config.dual_clip, 0.0, True
    if config.tis_cap:
        weight = min(math.exp(old - float(one.sampling[i])), config.tis_cap)
        loss, slope = loss * weight, slope * weight
    kl = 0.0
    if config.kl_coefficient:
        behind = float(one.ref[i]) - new
        if config.kl_estimator == "kl":
            kl, kl_slope = -behind, 1.0
        elif config.kl_estimator == "mse_kl":
            kl, kl_slope = behind**2 / 2, -behind
        else:
            kl, kl_slope = math.exp(behind) - behind - 1, 1 - math.exp(behind)
        loss += config.kl_coefficient * kl
        slope += config.kl_coefficient * kl_slope
    loss -= config.entropy_coefficient * float(one.entropy[i])
    return loss, slope, clipped, kl


def decoder_logprobs(
    config: ModelConfig, params: Mapping[str, F64], tokens: npt.NDArray[np.int32]
) -> F64:
    """Log-prob of each token of one sequence given those before it; 0 for the first. Float64."""
    return decoder(config, params, tokens)[0]


def chosen_experts(logits: F64, top_k: int) -> npt.NDArray[np.int16]:
    """The router: the `top_k` highest of each token, the lower id first where two are equal."""
    return np.argsort(-logits, axis=-1, kind="stable")[:, :top_k].astype(np.int16)


def decoder(
    config: ModelConfig,
    params: Mapping[str, F64],
    tokens: npt.NDArray[np.int32],
    recorded: npt.NDArray[np.int16] | None = None,
    *,
    scores: bool = True,
) -> tuple[F64, npt.NDArray[np.int16]]:
    """(log-probs as above, experts `[length, moe_layers, top_k]` that each token used).

    `recorded`, of the same shape: experts to use instead; a token with -1 uses its own router.
    `scores`: False leaves the log-probs out (all 0), which a large vocabulary makes slow.
    """
    used: list[npt.NDArray[np.int16]] = []
    length, dim = len(tokens), config.head_dim
    x = params["embed"][tokens]

    def norm(x: F64, scale: F64) -> F64:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale

    def rotated(x: F64) -> F64:
        """`[length, heads, dim]`; element i is paired with i + dim / 2."""
        out = np.empty_like(x)
        for position in range(length):
            for i in range(dim // 2):
                angle = position * config.rope_theta ** (-2 * i / dim)
                c, s = math.cos(angle), math.sin(angle)
                a, b = x[position, :, i], x[position, :, i + dim // 2]
                out[position, :, i], out[position, :, i + dim // 2] = a * c - b * s, b * c + a * s
        return out

    def experts_of(n: F64, w: Mapping[str, F64]) -> F64:
        assert config.moe is not None
        logits = n @ w["router"]
        chosen = chosen_experts(logits, config.moe.top_k)
        if recorded is not None:
            replay = recorded[:, len(used)]
            chosen = np.where((replay < 0).any(-1, keepdims=True), chosen, replay)
        used.append(chosen)
        out = np.zeros_like(n)
        for t in range(length):
            share = np.exp(logits[t, chosen[t]] - logits[t].max())
            for e, part in zip(chosen[t], share / share.sum(), strict=True):
                gate = n[t] @ w["expert_gate"][e]
                inner = gate / (1 + np.exp(-gate)) * (n[t] @ w["expert_up"][e])
                out[t] += part * (inner @ w["expert_down"][e])
        return out

    for layer in range(config.num_layers):
        dense = layer < config.dense_layers
        prefix = "layers/" if dense else "moe_layers/"
        w = {
            name.removeprefix(prefix): value[layer if dense else layer - config.dense_layers]
            for name, value in params.items()
            if name.startswith(prefix)
        }
        n = norm(x, w["attn_norm"])
        q = rotated((n @ w["wq"]).reshape(length, config.num_heads, dim))
        k = rotated((n @ w["wk"]).reshape(length, config.num_kv_heads, dim))
        v = (n @ w["wv"]).reshape(length, config.num_kv_heads, dim)
        mixed = np.zeros((length, config.num_heads, dim))
        for head in range(config.num_heads):
            shared = head // (config.num_heads // config.num_kv_heads)
            for t in range(length):
                score = k[: t + 1, shared] @ q[t, head] / math.sqrt(dim)
                weights = np.exp(score - score.max())
                mixed[t, head] = (weights / weights.sum()) @ v[: t + 1, shared]
        x = x + mixed.reshape(length, -1) @ w["wo"]
        n = norm(x, w["ffn_norm"])
        if not dense:
            x = x + experts_of(n, w)
            continue
        gate = n @ w["w_gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (n @ w["w_up"])) @ w["w_down"]
    found = np.zeros(length)
    top_k = 0 if config.moe is None else config.moe.top_k
    experts = np.stack(used, axis=1) if used else np.zeros((length, 0, top_k), np.int16)
    if not scores:
        return found, experts
    logits = norm(x, params["final_norm"]) @ params.get("head", params["embed"]).T
    peak = logits.max(-1, keepdims=True)
    logp = logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))
    found[1:] = logp[np.arange(length - 1), tokens[1:]]
    return found, experts
