"""Configuration of the JAX engine. Frozen values that refuse contradictions when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal, cast, get_args

Dtype = Literal["float32", "bfloat16"]
LossAggMode = Literal[
    "token-mean",
    "sequence-mean-token-mean",
    "sequence-mean-token-sum",
    "sequence-mean-token-sum-norm",
]
OldLogprobs = Literal["current", "sampler", "trainer"]
KlEstimator = Literal["kl", "mse_kl", "low_var_kl"]
HeadMode = Literal["off", "local", "vocab", "auto"]
LOSS_AGG_MODES: Final[tuple[str, ...]] = (
    "token-mean",
    "sequence-mean-token-mean",
    "sequence-mean-token-sum",
    "sequence-mean-token-sum-norm",
)


class EngineConfigInvalid(ValueError):
    """A setting that cannot be used; names it, its value and the fix."""


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise EngineConfigInvalid(text)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only model in the Llama/Qwen shape."""

    vocab_size: int
    hidden_size: int  # D
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied_head: bool = True
    compute_dtype: Dtype = "float32"
    query_block: int = 256  # Queries whose scores exist at a time.

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "ffn_size"):
            value = int(self.__dict__[name])
            _require(value >= 1, f"{name} is {value}; use 1 or more")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads is {self.num_heads}: it must be a multiple of num_kv_heads"
            f" ({self.num_kv_heads})",
        )
        _require(self.head_dim % 2 == 0, f"head_dim is {self.head_dim}: RoPE needs an even number")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The policy loss. Log-probs in nats."""

    loss_agg_mode: LossAggMode = "token-mean"
    old_logprobs: OldLogprobs = "current"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    dual_clip: float = 0.0  # 0 = off; else the lower bound's factor, > 1.
    kl_coefficient: float = 0.0
    kl_estimator: KlEstimator = "low_var_kl"
    tis_cap: float = 0.0  # Truncated importance sampling: cap on trainer/sampler; 0 = off.
    logp_gate: float = 0.0  # Mean |log-prob gap| above which a sequence is dropped; 0 = off.
    norm_tokens: int = 0  # sequence-mean-token-sum-norm: the constant that sums are divided by.
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        _require(
            self.loss_agg_mode in LOSS_AGG_MODES,
            f"loss_agg_mode is {self.loss_agg_mode!r}; known: {', '.join(LOSS_AGG_MODES)}",
        )
        _require(
            0 <= self.epsilon_low < 1,
            f"epsilon_low is {self.epsilon_low}; use a number from 0 to below 1",
        )
        _require(self.epsilon_high >= 0, f"epsilon_high is {self.epsilon_high}; use 0 or more")
        _require(
            self.dual_clip == 0 or self.dual_clip > 1,
            f"dual_clip is {self.dual_clip}; use a factor above 1, or 0 for off",
        )
        for name in ("tis_cap", "logp_gate", "kl_coefficient"):
            value = float(self.__dict__[name])
            _require(value >= 0 and math.isfinite(value), f"{name} is {value}; use 0 (off) or more")
        norm = self.loss_agg_mode == "sequence-mean-token-sum-norm"
        _require(
            not norm or self.norm_tokens > 0,
            "loss_agg_mode sequence-mean-token-sum-norm needs norm_tokens > 0 (the longest"
            " completion, in tokens)",
        )

    @property
    def required_fields(self) -> tuple[str, ...]:
        """Optional micro-batch fields that this loss reads."""
        fields = []
        if self.old_logprobs == "trainer":
            fields.append("old_logprobs")
        if self.kl_coefficient:
            fields.append("ref_logprobs")
        if self.old_logprobs == "sampler" or self.tis_cap or self.logp_gate:
            fields.append("sampling_logprobs")
        return tuple(fields)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with f32 master weights."""

    learning_rate: float = 1e-4
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0  # 0 = no clipping.

    def __post_init__(self) -> None:
        _require(self.learning_rate >= 0, f"learning_rate is {self.learning_rate}; use 0 or more")
        _require(self.warmup_steps >= 0, f"warmup_steps is {self.warmup_steps}; use 0 or more")
        _require(self.max_grad_norm >= 0, f"max_grad_norm is {self.max_grad_norm}; use 0 or more")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One JAX engine."""

    model: ModelConfig
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    max_inflight: int = 2
    head_mode: HeadMode = "off"
    logprob_chunk: int = 256  # Tokens whose logits exist at a time.
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.max_inflight >= 1, f"max_inflight is {self.max_inflight}; use 1 or more")
        _require(
            self.logprob_chunk >= 1,
            f"logprob_chunk is {self.logprob_chunk}: it is a number of tokens, not a switch;"
            " use 1 or more",
        )


def _one_of(name: str, text: str, known: tuple[str, ...]) -> str:
    _require(text in known, f"{name} is {text!r}; use one of {', '.join(known)}")
    return text


def loss_agg_mode(text: str) -> LossAggMode:
    """Parse a loss aggregation mode. Raises `EngineConfigInvalid`."""
    return cast(LossAggMode, _one_of("loss_agg_mode", text, get_args(LossAggMode)))


def old_logprobs(text: str) -> OldLogprobs:
    return cast(OldLogprobs, _one_of("old_logprobs", text, get_args(OldLogprobs)))


def kl_estimator(text: str) -> KlEstimator:
    return cast(KlEstimator, _one_of("kl_estimator", text, get_args(KlEstimator)))


def head_mode(text: str) -> HeadMode:
    return cast(HeadMode, _one_of("logps_sharded_head", text, get_args(HeadMode)))
