"""Model presets, and the engine that one of them makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from trainer_worker.engine import EngineParts
from trainer_worker.engines.jax_engine.config import EngineConfig, ModelConfig
from trainer_worker.engines.jax_engine.engine import JaxEngine
from trainer_worker.engines.jax_engine.model import init_params

PRESETS: Final = ("tiny", "smollm2-135m")

TINY: Final = ModelConfig(
    vocab_size=49_152,  # That of the recorded rollouts' tokenizer.
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=64,
)


def create(preset: str, config: EngineConfig) -> EngineParts:
    """An engine for a preset. `config.model` is replaced by the preset's."""
    if preset == "tiny":
        config = replace(config, model=TINY)
        engine = JaxEngine(config, init_params(TINY, config.seed), preset)
    else:
        from trainer_worker.engines.jax_engine.gguf_weights import load_smollm2

        model, params = load_smollm2()
        config = replace(config, model=model)
        engine = JaxEngine(config, params, preset)
    return EngineParts(training=engine, scoring=engine)
