"""Experts over devices: what one device computes, retried or not; and checkpoints of a sharded state."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from prestage.microbatch import MicroBatch
from tests.engines.jax_engine.small import engine_config, pack, sequences
from tests.engines.jax_mesh.test_mesh import (
    ONE,
    ROWS,
    SPEC,
    TOKENS,
    assert_close,
    gradients,
    parameters,
)
from tests.engines.jax_moe.small import MOE, MOE_MODEL
from trainer_worker.engine import RunPosition
from trainer_worker.engines.jax_engine.checkpoints import JaxCheckpoints
from trainer_worker.engines.jax_engine.config import EngineConfig, MeshShape
from trainer_worker.engines.jax_engine.engine import JaxEngine
from trainer_worker.engines.jax_engine.model import init_params
from trainer_worker.engines.jax_engine.programs import Programs

REPLAYED = replace(SPEC, fields=(*SPEC.fields, "routed_experts"))
LENGTHS = [(3, 6), (2, 1), (4, 8), (1, 5), (5, 9), (2, 7), (6, 4), (1, 20), (9, 2), (3, 3)]
CUBE = MeshShape(fsdp=2, context=2, expert=2, order=("context", "expert", "fsdp"))


def config_on(mesh: MeshShape, factor: float) -> EngineConfig:
    return replace(
        engine_config(),
        model=MOE_MODEL,
        mesh=mesh,
        ragged_buffer_factor=factor,
        retry_when_tokens_dropped=factor != -1,
    )


@cache
def programs_of(config: EngineConfig) -> Programs:
    engine = JaxEngine(config, init_params(config.model, 3))
    engine.compile(REPLAYED)
    assert engine._programs is not None
    return engine._programs


def engine_of(config: EngineConfig) -> JaxEngine:
    programs = programs_of(config)
    engine = JaxEngine(config, init_params(config.model, 3))
    engine._programs, engine._spec = programs, REPLAYED
    return engine


def batch(seed: int, index: int = 0, step: int = 0) -> MicroBatch:
    """Most tokens go to experts 0 and 1, which one device of the expert axis holds."""
    a, b, c, d, e, f, g, h, i, j = sequences(seed, LENGTHS)
    rows = [[a, b], [c, d], [e, f], [g], [h], [i, j], [a]]
    made = pack(rows, index=index, step=step, shape=(ROWS, TOKENS))
    routing = np.full((ROWS, TOKENS, MOE_MODEL.moe_layers, MOE.top_k), -1, np.int16)
    busy = (made.arrays["segment_ids"] > 0) & (made.arrays["tokens"] % 4 > 0)
    routing[busy] = [0, 1]
    return replace(made, arrays={**made.arrays, "routed_experts": routing})


def train(engine: JaxEngine, step: int) -> None:
    for index in range(2):
        one = batch(2 * step + index, index, step)
        engine.check(one)
        engine.fwd_bwd(engine.prepare_fwd_bwd_input(one))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_experts_over_devices_compute_what_one_device_computes() -> None:
    """With buffers that overflow on the device of the busy experts, and every micro-batch retried."""
    wanted, engine = engine_of(config_on(ONE, -1)), engine_of(config_on(CUBE, 1.0))
    for one in (wanted, engine):
        train(one, 0)
        one._settle()
    assert_close(gradients(engine), gradients(wanted))
    result = engine.update()
    wanted.update()
    assert result.dropless_replays == 2
    metrics = result.metrics.result()
    assert metrics["moe_dropped_assignments"] > 0
    assert metrics["dropped_assignments_used"] == 0
    assert_close(parameters(engine), parameters(wanted))
    shard = engine.state.params["moe_layers"]["expert_up"].addressable_shards[0].data.shape  # type: ignore[index,call-overload]
    assert shard == (2, MOE.num_experts // 2, 16, 6)  # Over expert, and over fsdp.


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sharded_state_is_saved_and_restored_bit_for_bit(tmp_path: Path) -> None:
    """Restored and gone on equals never stopped, on the same mesh; the file fits any mesh."""
    config = config_on(CUBE, 1.0)
    engine = engine_of(config)
    train(engine, 0)
    engine.update()
    position = RunPosition(run_id="r", step=1, train_step=1, epoch=1, last_seq=9, data_cursor="{}")
    JaxCheckpoints(engine, tmp_path).begin_save(position).wait()
    saved = engine.parameter_digest()
    train(engine, 1)
    engine.update()

    again = engine_of(config)
    assert JaxCheckpoints(again, tmp_path).restore(None) == position
    assert (again.parameter_digest(), again.train_step) == (saved, 1)
    train(again, 1)
    again.update()
    assert again.parameter_digest() == engine.parameter_digest() != saved

    alone = engine_of(config_on(ONE, -1))
    assert JaxCheckpoints(alone, tmp_path).restore(None) == position
    assert alone.parameter_digest() == saved
