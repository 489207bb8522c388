"""Staging turns itself off when stages hide nothing, measured against the idle device's own wait.

A fixed bound (0.05 s) cannot tell on a runtime whose wait reads 2.8 s on an idle device: there it
never fires. The baseline is measured at warm-up by the same wait that is judged later.
"""

from __future__ import annotations

import pytest

from orchestrator.boundary import BoundaryState
from orchestrator.calls import NoteKind
from orchestrator.plan import RunPlan
from tests.support.direct import DirectRun, run_direct
from tests.support.rig import address_of, run_against, served
from trainer_worker.clock import RealClock
from trainer_worker.engines.timed import TimedConfig, create_timed

PLAN = RunPlan(num_steps=8, pipeline=True, stage=True, latch_after=3)


def run(*, idle_wait_s: float, stage_call_s: float) -> DirectRun:
    config = TimedConfig(
        fwd_bwd_seconds=1.0,
        update_seconds=0.2,
        copy_seconds=0.1,
        idle_wait_seconds=idle_wait_s,
        stage_call_seconds=stage_call_s,
    )
    return run_direct(PLAN, config)


def stages(done: DirectRun) -> int:
    return sum(line.startswith("stage_fwd_bwd") for line in done.listener.lines)


@pytest.mark.parametrize("idle_wait_s", [0.0, 2.8])
def test_stages_that_hide_keep_staging_on(idle_wait_s: float) -> None:
    done = run(idle_wait_s=idle_wait_s, stage_call_s=0.01)
    assert stages(done) == 7
    assert not done.listener.latched
    kinds = {note.kind for note in done.listener.notes}
    assert NoteKind.STAGE_OUTLASTED not in kinds


@pytest.mark.parametrize("idle_wait_s", [0.0, 2.8])
def test_stages_that_hide_nothing_turn_staging_off_once_with_a_warning(idle_wait_s: float) -> None:
    # The stage call outlasts all that is in flight, so the update waits for it.
    done = run(idle_wait_s=idle_wait_s, stage_call_s=4.0)
    assert stages(done) == PLAN.latch_after
    assert done.listener.latched
    kinds = [note.kind for note in done.listener.notes]
    assert kinds.count(NoteKind.LATCHED_NOTHING_HIDDEN) == 1
    assert kinds.count(NoteKind.STAGE_OUTLASTED) == PLAN.latch_after
    warning = next(n for n in done.listener.notes if n.kind is NoteKind.STAGE_OUTLASTED)
    assert "the update waited for the stage" in warning.text


def test_a_fixed_bound_would_not_fire_on_the_slow_runtime() -> None:
    done = run(idle_wait_s=2.8, stage_call_s=2.5)
    waits = [r.device_wait_seconds for r in done.records if r.device_wait_seconds >= 0]
    assert min(waits) > 0.05, "the old rule compares the raw wait with 0.05 s"
    assert done.listener.latched


def test_a_new_orchestrator_on_a_compiled_worker_knows_the_idle_baseline() -> None:
    """It does not compile again, so the worker's state says what was measured."""
    config = TimedConfig(fwd_bwd_seconds=0.001, idle_wait_seconds=0.05)
    with served(create_timed(config, RealClock())) as server:
        first = RunPlan(num_steps=1)
        run_against(address_of(server), first)
        seen: list[float] = []

        class Watch:
            def on_call(self, record: object, answer: object) -> None:
                return

            def on_note(self, note: object) -> None:
                return

            def on_state(self, state: BoundaryState) -> None:
                seen.append(state.idle_wait_seconds)

        second = run_against(address_of(server), RunPlan(num_steps=2), observers=(Watch(),))
    assert "compile" not in [record.call for record in second.recorder.records]
    assert seen[-1] >= 0.05
