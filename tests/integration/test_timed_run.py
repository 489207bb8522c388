"""Whole runs over a real unix socket, on the timed engine."""

from __future__ import annotations

import pytest

from orchestrator.bench.synthetic import SyntheticShape
from orchestrator.plan import RunPlan
from prestage.trace import call_lines
from tests.support.rig import address_of, run_against, served
from trainer_worker.clock import RealClock
from trainer_worker.engines.timed import TimedConfig, create_timed

ARMS = {
    "stock": {},
    "pipelined": {"pipeline": True},
    "staged": {"pipeline": True, "stage": True},
    "staged_after": {"pipeline": True, "stage": True, "stage_before_update": False},
    "zero_gap": {"pipeline": True, "stage": True, "dispatch_before_metrics": True},
}


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_every_arm_ends_with_the_same_parameters(micro_batches: int) -> None:
    digests = {}
    for arm, flags in ARMS.items():
        slow = TimedConfig(fwd_bwd_seconds=0.04, update_seconds=0.01, copy_seconds=0.01)
        with served(create_timed(slow, RealClock())) as server:
            plan = RunPlan(num_steps=4, latch_after=1000, **flags)  # type: ignore[arg-type]
            result = run_against(
                address_of(server), plan, shape=SyntheticShape(micro_batches=micro_batches)
            )
            digests[arm] = result.digest
            records = result.book.records()
            assert [record.step for record in records] == [0, 1, 2, 3]
            assert all(record.micro_steps == micro_batches for record in records)
            assert [record.train_step for record in records] == [1, 2, 3, 4]
            calls = list(call_lines(result.recorder.records))
            staged = sum(call.startswith("stage_fwd_bwd") for call in calls)
            used = sum(record.staged_input_used for record in records)
            assert staged == used
            if "stage" in flags and micro_batches == 3:
                assert staged == 3, calls
    assert len(set(digests.values())) == 1, digests
