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
MatmulPrecision = Literal["default", "high", "highest"]


class EngineConfigInvalid(ValueError):
    """A setting that cannot be used; names it, its value and the fix."""


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise EngineConfigInvalid(text)


DROPLESS: Final = -1.0
"""The buffer factor that gives every assignment room."""


def ragged_buffer_factor(text: str) -> float:
    """Parse a MoE buffer factor; every spelling of minus one is `DROPLESS`.

    Raises `EngineConfigInvalid`.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    _require(
        value == DROPLESS or (math.isfinite(value) and value > 0),
        f"ragged_buffer_factor is {text!r}; use a number above 0, or -1 for buffers that drop nothing",
    )
    return value


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Mixture-of-experts layers in the Qwen3-MoE shape."""

    num_experts: int
    top_k: int
    expert_ffn_size: int
    dense_layers: int = 0  # The first layers, which have no experts.

    def __post_init__(self) -> None:
        for name, value in (
            ("top_k", self.top_k),
            ("num_experts", self.num_experts),
            ("expert_ffn_size", self.expert_ffn_size),
        ):
            _require(value >= 1, f"{name} is {value}; use 1 or more")
        _require(self.dense_layers >= 0, f"dense_layers is {self.dense_layers}; use 0 or more")
        _require(
            self.top_k <= self.num_experts,
            f"top_k is {self.top_k}, but there are {self.num_experts} experts",
        )


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
    compute_dtype: Dtype = "float32"  # Of activations and products; master weights are f32.
    # Sum the gradients of dense products over tokens and devices in compute_dtype, cast then.
    cast_grads_after_all_reduce: bool = False
    query_block: int = 256  # Queries whose scores exist at a time.
    moe: MoeConfig | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_layers", self.num_layers),
            ("num_heads", self.num_heads),
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("ffn_size", self.ffn_size),
            ("query_block", self.query_block),
        ):
            _require(value >= 1, f"{name} is {value}; use 1 or more")
        _one_of("compute_dtype", self.compute_dtype, get_args(Dtype))
        _require(
            not self.cast_grads_after_all_reduce or self.compute_dtype != "float32",
            "cast_grads_after_all_reduce does nothing with dtype float32, whose gradients are f32"
            " already: leave it out, or use dtype bfloat16",
        )
        _require(
            math.isfinite(self.rope_theta) and self.rope_theta > 0,
            f"rope_theta is {self.rope_theta}; use a number above 0",
        )
        _require(
            math.isfinite(self.norm_eps) and self.norm_eps > 0,
            f"norm_eps is {self.norm_eps}; use a number above 0",
        )
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads is {self.num_heads}: it must be a multiple of num_kv_heads"
            f" ({self.num_kv_heads})",
        )
        _require(self.head_dim % 2 == 0, f"head_dim is {self.head_dim}: RoPE needs an even number")
        if self.moe is not None:
            _require(
                self.moe.dense_layers < self.num_layers,
                f"dense_layers is {self.moe.dense_layers} of num_layers {self.num_layers}: none is"
                " left to have experts",
            )

    @property
    def moe_layers(self) -> int:
        """Layers with experts: what `routed_experts` counts."""
        return 0 if self.moe is None else self.num_layers - self.moe.dense_layers

    @property
    def dense_layers(self) -> int:
        return self.num_layers - self.moe_layers


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
    tis_cap: float = 0.0  # Truncated importance sampling: cap on old policy / sampler; 0 = off.
    logp_gate: float = 0.0  # Mean |log-prob gap| above which a sequence is dropped; 0 = off.
    norm_tokens: int = 0  # sequence-mean-token-sum-norm: the constant that sums are divided by.
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        _one_of("loss_agg_mode", self.loss_agg_mode, get_args(LossAggMode))
        _one_of("old_logprobs", self.old_logprobs, get_args(OldLogprobs))
        _one_of("kl_estimator", self.kl_estimator, get_args(KlEstimator))
        _require(
            0 <= self.epsilon_low < 1,
            f"epsilon_low is {self.epsilon_low}; use a number from 0 to below 1",
        )
        _require(
            self.dual_clip == 0 or (math.isfinite(self.dual_clip) and self.dual_clip > 1),
            f"dual_clip is {self.dual_clip}; use a factor above 1, or 0 for off",
        )
        for name, value in (
            ("epsilon_high", self.epsilon_high),
            ("kl_coefficient", self.kl_coefficient),
            ("tis_cap", self.tis_cap),
            ("logp_gate", self.logp_gate),
        ):
            _require(value >= 0 and math.isfinite(value), f"{name} is {value}; use 0 (off) or more")
        _require(
            math.isfinite(self.entropy_coefficient),
            f"entropy_coefficient is {self.entropy_coefficient}; use a finite number",
        )
        _require(
            not (self.tis_cap and self.old_logprobs == "sampler"),
            f"tis_cap is {self.tis_cap} with old_logprobs sampler: that ratio is against the sampler"
            " already, so nothing is left to correct; use old_logprobs current or trainer",
        )
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
        for name, value in (
            ("learning_rate", self.learning_rate),
            ("warmup_steps", self.warmup_steps),
            ("weight_decay", self.weight_decay),
            ("max_grad_norm", self.max_grad_norm),
        ):
            _require(value >= 0 and math.isfinite(value), f"{name} is {value}; use 0 or more")
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            _require(0 <= value < 1, f"{name} is {value}; use a number from 0 to below 1")
        _require(self.epsilon > 0, f"epsilon is {self.epsilon}; use a number above 0")


MESH_AXES: Final = ("fsdp", "context", "expert")


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Devices by axis. Rows lie over fsdp x expert, the tokens of a row over context.

    All ones: one device, the first. `order`: of the axes in the device array, slowest first.
    """

    fsdp: int = 1
    context: int = 1
    expert: int = 1
    order: tuple[str, ...] = MESH_AXES

    def __post_init__(self) -> None:
        for name in MESH_AXES:
            value = self.size(name)
            _require(value >= 1, f"mesh_{name} is {value}; use 1 or more devices")
        _require(
            sorted(self.order) == sorted(MESH_AXES),
            f"order is {self.order}; name each of {', '.join(MESH_AXES)} once",
        )

    def size(self, axis: str) -> int:
        return {"fsdp": self.fsdp, "context": self.context, "expert": self.expert}[axis]

    @property
    def devices(self) -> int:
        return self.fsdp * self.context * self.expert

    @property
    def row_ranks(self) -> int:
        """Into how many parts the rows of a micro-batch are split."""
        return self.fsdp * self.expert


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One JAX engine."""

    model: ModelConfig
    mesh: MeshShape = field(default_factory=MeshShape)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    max_inflight: int = 2  # Micro-batches dispatched and not yet computed.
    head_mode: HeadMode = "off"
    logprob_chunk: int = 256  # Tokens of each row whose logits exist at a time.
    matmul_precision: MatmulPrecision = "highest"  # Of f32 products; TPU and GPU round otherwise.
    # Leave chunks without a trained token out of the head; None = not on GPUs, where a branch in a
    # program makes its dispatch wait for the device, nor on several devices (tokens of a row would
    # change devices), nor with a sharded head.
    skips_prompts: bool | None = None
    # MoE buffers as a factor of the even load, or DROPLESS. A finite one can drop assignments.
    ragged_buffer_factor: float = DROPLESS
    retry_when_tokens_dropped: bool = False  # Run such a micro-batch again, dropless.
    exclude_padding_from_routing: bool = True
    seed: int = 0  # Of the initial weights.

    def __post_init__(self) -> None:
        _require(self.max_inflight >= 1, f"max_inflight is {self.max_inflight}; use 1 or more")
        _require(
            self.logprob_chunk >= 1,
            f"logprob_chunk is {self.logprob_chunk}: it is a number of tokens, not a switch;"
            " use 1 or more",
        )
        _require(
            not self.skips_prompts or self.head_mode == "off",
            f"skips_prompts with head_mode {self.head_mode}: only the unsharded head can skip",
        )
        ragged_buffer_factor(str(self.ragged_buffer_factor))
        _require(
            self.may_drop or not self.retry_when_tokens_dropped,
            "retry_when_tokens_dropped does nothing: ragged_buffer_factor is"
            f" {self.ragged_buffer_factor:g}, and the model has {self.model.moe_layers} MoE layers;"
            " leave it out, or use a finite factor and a MoE model",
        )
        moe = self.model.moe
        _require(
            moe is not None or self.ragged_buffer_factor == DROPLESS,
            f"ragged_buffer_factor is {self.ragged_buffer_factor:g}, but the model has no experts:"
            " leave it out",
        )
        _require(
            moe is None or moe.num_experts % self.mesh.expert == 0,
            f"mesh_expert is {self.mesh.expert}: it must divide the"
            f" {1 if moe is None else moe.num_experts} experts",
        )
        _one_of("head_mode", self.head_mode, get_args(HeadMode))
        _one_of("matmul_precision", self.matmul_precision, get_args(MatmulPrecision))

    @property
    def may_drop(self) -> bool:
        """Whether a micro-batch's MoE buffers can overflow."""
        return self.model.moe is not None and self.ragged_buffer_factor != DROPLESS


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


def dtype(text: str) -> Dtype:
    return cast(Dtype, _one_of("dtype", text, get_args(Dtype)))


def matmul_precision(text: str) -> MatmulPrecision:
    return cast(MatmulPrecision, _one_of("matmul_precision", text, get_args(MatmulPrecision)))


def head_mode(text: str) -> HeadMode:
    return cast(HeadMode, _one_of("logps_sharded_head", text, get_args(HeadMode)))
