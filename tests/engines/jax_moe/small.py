"""A MoE model small enough for tests, engines that share programs, and inputs with routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from prestage.microbatch import MicroBatch
from tests.engines.jax_engine.reference import F64, decoder
from tests.engines.jax_engine.small import (
    EVERY_FIELD,
    MODEL,
    ROWS,
    TOKENS,
    Trajectory,
    engine_config,
    pack,
)
from trainer_worker.engine import CompileSpec
from trainer_worker.engines.jax_engine.config import EngineConfig, MoeConfig
from trainer_worker.engines.jax_engine.engine import JaxEngine, named_leaves
from trainer_worker.engines.jax_engine.model import init_params
from trainer_worker.engines.jax_engine.programs import Programs

MOE = MoeConfig(num_experts=6, top_k=2, expert_ffn_size=12, dense_layers=1)
MOE_MODEL = replace(MODEL, num_layers=3, moe=MOE)
FIELDS = (*EVERY_FIELD, "routed_experts")
PLAIN = CompileSpec(rows=ROWS, tokens_per_row=TOKENS, fields=EVERY_FIELD)
REPLAY = replace(PLAIN, fields=FIELDS)
LENGTHS = [(3, 6), (2, 1), (4, 8), (1, 5), (5, 9), (2, 7), (6, 4)]


def moe_config(*, factor: float = -1, retry: bool = False) -> EngineConfig:
    return replace(
        engine_config(),
        model=MOE_MODEL,
        ragged_buffer_factor=factor,
        retry_when_tokens_dropped=retry,
    )


@cache
def programs_of(config: EngineConfig, spec: CompileSpec) -> Programs:
    engine = JaxEngine(config, init_params(MOE_MODEL, 3))
    engine.compile(spec)
    assert engine._programs is not None
    return engine._programs


def engine_of(config: EngineConfig, spec: CompileSpec = PLAIN) -> JaxEngine:
    """A fresh engine; its programs are compiled once for each config and shape."""
    engine = JaxEngine(config, init_params(MOE_MODEL, 3))
    engine._programs, engine._spec = programs_of(config, spec), spec
    return engine


def params64() -> dict[str, F64]:
    params = named_leaves(init_params(MOE_MODEL, 3))  # type: ignore[arg-type]
    return {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}


def with_routing(
    rows: Sequence[Sequence[Trajectory]], routing: Sequence[np.ndarray], **given: int
) -> MicroBatch:
    """Packed, with each trajectory's experts `[length, moe_layers, top_k]` in order."""
    batch = pack(rows, **given)  # type: ignore[arg-type]
    shape = (ROWS, TOKENS, MOE_MODEL.moe_layers, MOE.top_k)
    recorded, left = np.full(shape, -1, np.int16), iter(routing)
    for row, items in enumerate(rows):
        start = 0
        for item in items:
            recorded[row, start : start + item.length] = next(left)
            start += item.length
    return replace(batch, arrays={**batch.arrays, "routed_experts": recorded})


def reference(item: Trajectory, recorded: np.ndarray | None = None) -> tuple[F64, np.ndarray]:
    """The float64 decoder's log-probs and experts of one trajectory."""
    return decoder(MOE_MODEL, params64(), item.tokens, recorded)
