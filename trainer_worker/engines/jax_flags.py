"""Flags of the jax engine. Imports JAX only when an engine is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from absl import flags

from prestage.strict_flags import define_finite_float, define_strict_bool
from trainer_worker.engine import EngineParts
from trainer_worker.engines.errors import EngineConfigError
from trainer_worker.engines.processes import Processes

_PRESET = flags.DEFINE_enum("preset", "tiny", ("tiny", "tiny-moe", "smollm2-135m"), "Model preset.")
_RATE = define_finite_float("learning_rate", 1e-4, "AdamW learning rate.")
_WARMUP = flags.DEFINE_integer("warmup_steps", 0, "Linear warm-up, steps.")
_DECAY = define_finite_float("weight_decay", 0.0, "AdamW weight decay.")
_CLIP = define_finite_float("max_grad_norm", 1.0, "Global-norm clip; 0 = off.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the initial weights.")
_CHUNK = flags.DEFINE_integer(
    "compute_logps_chunk_size",
    None,
    "Tokens of each row whose logits exist at a time; default: the preset's. Not a switch.",
)
_HEAD = flags.DEFINE_enum(
    "logps_sharded_head", "off", ("off", "local", "vocab", "auto"), "Sharded log-prob head."
)
_DTYPE = flags.DEFINE_enum(
    "dtype",
    "float32",
    ("float32", "bfloat16"),
    "Dtype of activations and products; master weights and optimizer state are f32 in any case.",
)
_CAST = define_strict_bool(
    "cast_grads_after_all_reduce",
    False,
    "With --dtype=bfloat16: sum the gradients of dense products over tokens and devices in bfloat16"
    " and cast them to f32 then.",
)
_PRECISION = flags.DEFINE_enum(
    "matmul_precision",
    "highest",
    ("default", "high", "highest"),
    "Precision of f32 products where the device has several; a CPU has one.",
)
_FSDP = flags.DEFINE_integer(
    "mesh_fsdp", 1, "Devices that share rows and parameters out between them.", lower_bound=1
)
_CONTEXT = flags.DEFINE_integer(
    "mesh_context", 1, "Devices that share the tokens of each row out between them.", lower_bound=1
)
_EXPERT = flags.DEFINE_integer(
    "mesh_expert",
    1,
    "Devices that share rows and experts out between them. The product of the three is the number of"
    " devices; 1 x 1 x 1 uses the first device.",
    lower_bound=1,
)
_BUFFERS = flags.DEFINE_string(
    "ragged_buffer_factor",
    "-1",
    "Room of MoE buffers as a factor of the even load; -1 = room for every token, none is dropped.",
)
_RETRY = define_strict_bool(
    "retry_when_tokens_dropped",
    False,
    "Run a micro-batch whose MoE buffers overflowed again, with room for every token.",
)
_NO_PADDING = define_strict_bool(
    "exclude_padding_from_routing", True, "Padding tokens go to no expert and take no room."
)
_AGG = flags.DEFINE_string("loss_agg_mode", "token-mean", "How token losses are aggregated.")
_OLD = flags.DEFINE_enum(
    "loss_old_logprobs",
    "current",
    ("current", "sampler", "trainer"),
    "The importance ratio's denominator.",
)
_LOW = define_finite_float("epsilon_low", 0.2, "Lower clip of the ratio.")
_HIGH = define_finite_float("epsilon_high", 0.2, "Upper clip of the ratio.")
_DUAL = define_finite_float("dual_clip", 0.0, "Dual clip factor; 0 = off.")
_KL = define_finite_float("kl_coefficient", 0.0, "KL penalty; 0 = off.")
_KL_KIND = flags.DEFINE_string("kl_estimator", "low_var_kl", "kl, mse_kl or low_var_kl.")
_TIS = define_finite_float("tis_cap", 0.0, "Truncated importance sampling cap; 0 = off.")
_GATE = define_finite_float(
    "logp_gate", 0.0, "Drop sequences whose mean log-prob gap is above this; 0 = off."
)
_NORM = flags.DEFINE_integer("norm_tokens", 0, "Divisor of sequence-mean-token-sum-norm.")
_KEEP = flags.DEFINE_integer(
    "checkpoint_keep", 2, "Complete checkpoints kept; older ones are removed.", lower_bound=1
)


def _is_factor(text: str) -> bool:
    from trainer_worker.engines.jax_engine.config import EngineConfigInvalid, ragged_buffer_factor

    try:
        ragged_buffer_factor(text)
    except EngineConfigInvalid as error:
        raise flags.ValidationError(str(error)) from error
    return True


flags.register_validator("ragged_buffer_factor", _is_factor)  # type: ignore[no-untyped-call]


def create_from_flags(
    *, max_inflight: int, checkpoint_dir: Path | None, processes: Processes | None = None
) -> EngineParts:
    """Build the engine that the flags describe; as one of `processes`. Raises `EngineConfigError`."""
    from trainer_worker.engines.jax_engine import config as c
    from trainer_worker.engines.jax_engine.presets import LOGPROB_CHUNK, create, model_of
    from trainer_worker.engines.jax_engine.processes import start

    preset = _PRESET.value or ""
    try:
        loss = c.LossConfig(
            loss_agg_mode=c.loss_agg_mode(_AGG.value or ""),
            old_logprobs=c.old_logprobs(_OLD.value or ""),
            epsilon_low=_LOW.value,
            epsilon_high=_HIGH.value,
            dual_clip=_DUAL.value,
            kl_coefficient=_KL.value,
            kl_estimator=c.kl_estimator(_KL_KIND.value or ""),
            tis_cap=_TIS.value,
            logp_gate=_GATE.value,
            norm_tokens=_NORM.value,
        )
        optimizer = c.OptimizerConfig(
            learning_rate=_RATE.value,
            warmup_steps=_WARMUP.value,
            weight_decay=_DECAY.value,
            max_grad_norm=_CLIP.value,
        )
        config = c.EngineConfig(
            model=replace(
                model_of(preset),
                compute_dtype=c.dtype(_DTYPE.value or ""),
                cast_grads_after_all_reduce=bool(_CAST.value),
            ),
            matmul_precision=c.matmul_precision(_PRECISION.value or ""),
            ragged_buffer_factor=c.ragged_buffer_factor(_BUFFERS.value or ""),
            retry_when_tokens_dropped=bool(_RETRY.value),
            exclude_padding_from_routing=bool(_NO_PADDING.value),
            mesh=c.MeshShape(
                fsdp=_FSDP.value or 1, context=_CONTEXT.value or 1, expert=_EXPERT.value or 1
            ),
            loss=loss,
            optimizer=optimizer,
            max_inflight=max_inflight,
            logprob_chunk=LOGPROB_CHUNK[preset] if _CHUNK.value is None else _CHUNK.value,
            head_mode=c.head_mode(_HEAD.value or ""),
            seed=_SEED.value,
        )
        if processes is not None:
            start(processes)
        return create(preset, config, checkpoint_dir=checkpoint_dir, keep=_KEEP.value)
    except (c.EngineConfigInvalid, ImportError) as error:
        raise EngineConfigError(f"engine jax: {error}") from error
