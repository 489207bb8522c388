"""Whole runs of the real jax engine over a real unix socket: what the flags may change is time.

1. Every arm ends with the same parameters, bit for bit, for M in {1, 3, 9}; weights moved.
2. No step compiles anything, staged or not.
3. The stages that were made were consumed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from orchestrator.bench.synthetic import SyntheticShape
from orchestrator.plan import RunPlan
from prestage.protocol import Call
from tests.support.rig import address_of, run_against, served
from trainer_worker.engine import EngineParts
from trainer_worker.engines.jax_engine import engine as jax_engine
from trainer_worker.engines.jax_engine.config import EngineConfig, ModelConfig, OptimizerConfig
from trainer_worker.engines.jax_engine.engine import JaxEngine
from trainer_worker.engines.jax_engine.model import init_params

MODEL = ModelConfig(
    vocab_size=128,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=64,
    query_block=32,
)
ARMS = {
    "stock": {},
    "pipelined": {"pipeline": True},
    "staged": {"pipeline": True, "stage": True},
    "staged_after": {"pipeline": True, "stage": True, "stage_before_update": False},
    "zero_gap": {"pipeline": True, "stage": True, "dispatch_before_metrics": True},
}


@pytest.fixture(scope="module", autouse=True)
def compile_once() -> Iterator[None]:
    """Every arm runs the same executables, as every run of one build would: compile them once."""
    made: dict[object, object] = {}
    original = jax_engine.compile_programs

    def compile_programs(config, state, spec):  # type: ignore[no-untyped-def]
        key = (config, spec)
        if key not in made:
            made[key] = original(config, state, spec)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_engine, "compile_programs", compile_programs)
        yield


def engine() -> EngineParts:
    config = EngineConfig(
        model=MODEL, optimizer=OptimizerConfig(learning_rate=1e-2), logprob_chunk=32
    )
    made = JaxEngine(config, init_params(MODEL, 0))
    return EngineParts(training=made, scoring=made)


def shape(micro_batches: int) -> SyntheticShape:
    return SyntheticShape(
        rows=2,
        tokens_per_row=256,
        real_length=240,
        segments_per_row=6,
        micro_batches=micro_batches,
        vocab_size=128,
        padding_rows=1,
    )


@pytest.mark.parametrize("micro_batches", [1, 3, pytest.param(9, marks=pytest.mark.slow)])
def test_five_steps_end_with_the_same_parameters_in_every_arm(micro_batches: int) -> None:
    digests = {}
    for arm, flags in ARMS.items():
        with served(engine()) as server:
            plan = RunPlan(num_steps=5, latch_after=1000, **flags)  # type: ignore[arg-type]
            result = run_against(address_of(server), plan, shape=shape(micro_batches))
            digests[arm] = result.digest
            records = result.book.records()
        assert [record.train_step for record in records] == [1, 2, 3, 4, 5]
        for record in records:
            assert np.isfinite(record.metrics["loss"])
            assert record.metrics["grad_norm"] > 0
            assert record.metrics["update_norm"] > 0
        calls = [record.call for record in result.recorder.records]
        staged = calls.count(Call.STAGE_FWD_BWD.value)
        assert staged == sum(record.staged_input_used for record in records)
        compiled = calls.index(Call.COMPILE.value)
        assert compiled >= 0
    assert len(set(digests.values())) == 1, digests


def test_no_step_compiles() -> None:
    with served(engine()) as server:
        plan = RunPlan(num_steps=1, pipeline=True, stage=True, latch_after=1000)
        first = run_against(address_of(server), plan, shape=shape(3))
        assert first.digest
        before = server.service.state().backend_compiles
        assert before > 0
        plan = RunPlan(num_steps=4, pipeline=True, stage=True, latch_after=1000)
        result = run_against(address_of(server), plan, shape=shape(3))
        assert [record.step for record in result.book.records()][-3:] == [1, 2, 3]
        assert server.service.state().backend_compiles == before
