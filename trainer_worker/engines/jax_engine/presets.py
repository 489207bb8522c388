"""Model presets, and the engine that one of them makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from trainer_worker.engine import EngineParts
from trainer_worker.engines.jax_engine.checkpoints import JaxCheckpoints
from trainer_worker.engines.jax_engine.config import (
    EngineConfig,
    EngineConfigInvalid,
    ModelConfig,
    MoeConfig,
)
from trainer_worker.engines.jax_engine.engine import JaxEngine
from trainer_worker.engines.jax_engine.model import HostParams, init_params
from trainer_worker.engines.jax_engine.processes import JaxShards, many
from trainer_worker.engines.jax_engine.weights import JaxWeights

PRESETS: Final = ("tiny", "tiny-moe", "smollm2-135m")

TINY: Final = ModelConfig(
    vocab_size=49_152,  # That of the recorded rollouts' tokenizer.
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=64,
    query_block=64,
)


TINY_MOE: Final = replace(
    TINY,
    num_layers=3,
    moe=MoeConfig(num_experts=8, top_k=2, expert_ffn_size=32, dense_layers=1),
)

LOGPROB_CHUNK: Final[Mapping[str, int]] = MappingProxyType(
    {"tiny": 16, "tiny-moe": 16, "smollm2-135m": 64}
)
"""Default tokens of each row whose logits exist at a time: what a CPU's caches like."""


def model_of(preset: str) -> ModelConfig:
    """The model of a preset with random weights; `TINY` for one that brings its own."""
    return TINY_MOE if preset == "tiny-moe" else TINY


def create(
    preset: str, config: EngineConfig, *, checkpoint_dir: Path | None = None, keep: int = 2
) -> EngineParts:
    """An engine for a preset, on the first device. `config.model` is replaced by the preset's, but
    for its precision.

    Raises `EngineConfigInvalid` for an unknown preset and for weights that are not installed.
    """
    if preset in ("tiny", "tiny-moe"):
        model = model_of(preset)
        params = init_params(model, config.seed)
    elif preset == "smollm2-135m":
        from trainer_worker.engines.jax_engine.gguf_weights import load_smollm2

        model, params = load_smollm2()
    else:
        raise EngineConfigInvalid(f"preset is {preset!r}; use one of {', '.join(PRESETS)}")
    model = replace(
        model,
        compute_dtype=config.model.compute_dtype,
        cast_grads_after_all_reduce=config.model.cast_grads_after_all_reduce,
    )
    return engine_parts(
        replace(config, model=model), params, checkpoint_dir=checkpoint_dir, keep=keep
    )


def engine_parts(
    config: EngineConfig,
    params: HostParams,
    *,
    checkpoint_dir: Path | None = None,
    keep: int = 2,
) -> EngineParts:
    """An engine of any model, with its initial parameters on the host.

    Without `checkpoint_dir` it keeps no checkpoints; `keep`: complete checkpoints kept there.
    """
    engine = JaxEngine(
        config, params, can_checkpoint=checkpoint_dir is not None, can_export_weights=True
    )
    return EngineParts(
        training=engine,
        scoring=engine,
        checkpoint=(
            None if checkpoint_dir is None else JaxCheckpoints(engine, checkpoint_dir, keep=keep)
        ),
        weights=JaxWeights(engine),
        shards=JaxShards(engine) if many() else None,
    )
