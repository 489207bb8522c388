"""The simulator against real runs of the timed engine, on shapes that it was not tuned for."""

from __future__ import annotations

import pytest

from orchestrator.bench.sim.model import Shape
from orchestrator.bench.sim.run import plan_for, simulate
from orchestrator.bench.synthetic import SyntheticShape
from orchestrator.plan import RunPlan
from tests.support.rig import address_of, run_against, served
from trainer_worker.clock import RealClock
from trainer_worker.engines.timed import TimedConfig, create_timed


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["stock", "staged_before"])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(micro_batches=3, fwd_bwd_s=0.9, update_s=0.11, copy_s=0.67),
        Shape(micro_batches=4, fwd_bwd_s=0.6, update_s=0.25, copy_s=0.31),
    ],
)
def test_the_timed_engine_takes_as_long_as_predicted(shape: Shape, setting: str) -> None:
    plan = plan_for(setting, RunPlan(num_steps=5))
    predicted = simulate(shape, plan)
    config = TimedConfig(
        fwd_bwd_seconds=shape.fwd_bwd_s,
        update_seconds=shape.update_s,
        copy_seconds=shape.copy_s,
    )
    with served(create_timed(config, RealClock())) as server:
        got = run_against(
            address_of(server), plan, shape=SyntheticShape(micro_batches=shape.micro_batches)
        )
    # A busy machine only ever adds time, so the quickest step is the undisturbed one. The last
    # step has no boundary after it.
    seconds = min(record.seconds for record in got.book.records()[1:-1])
    ratio = seconds / predicted.step_seconds
    print(
        f"{setting}: measured {seconds:.4f} s, predicted {predicted.step_seconds:.4f} s ({ratio:.4f})"
    )
    # How close it comes from above is the machine's business: `-s` shows it.
    assert ratio >= 0.99
    staged = sum(record.staged_input_used for record in got.book.records())
    assert staged == predicted.staged_boundaries
