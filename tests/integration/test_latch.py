"""Staging turns itself off when stages hide nothing, measured against the idle device's own wait.

A fixed bound (0.05 s) cannot tell on a runtime whose wait reads 2.8 s on an idle device: there it
never fires. The baseline is measured at warm-up by the same kind of wait that is judged later. Two
such runtimes are modelled: `late` learns everything 2.8 s late, on `least` no wait takes less.
"""

from __future__ import annotations

import pytest

from orchestrator.boundary import BoundaryState
from orchestrator.calls import NoteKind
from orchestrator.plan import RunPlan
from tests.support.direct import DirectRun, run_direct
from tests.support.rig import address_of, run_against, served
from trainer_worker.clock import RealClock, VirtualClock
from trainer_worker.engine import DeviceSpan
from trainer_worker.engines.timed import IdleWait, TimedConfig, TimedEngine, create_timed
from trainer_worker.timeline import DeviceTimeline

STEPS = 8
PLAN = RunPlan(num_steps=STEPS, pipeline=True, stage=True, latch_after=3)
RUNTIMES = [(0.0, IdleWait.LATE), (2.8, IdleWait.LATE), (2.8, IdleWait.LEAST)]
OLD_BOUND_S = 0.05


def rig(
    runtime: tuple[float, IdleWait], *, stage_call_s: float, fwd_bwd_s: float = 1.0
) -> TimedConfig:
    return TimedConfig(
        fwd_bwd_seconds=fwd_bwd_s,
        update_seconds=0.2,
        copy_seconds=0.1,
        idle_wait_seconds=runtime[0],
        idle_wait=runtime[1],
        stage_call_seconds=stage_call_s,
    )


def stages(done: DirectRun) -> int:
    return sum(line.startswith("stage_fwd_bwd") for line in done.listener.lines)


def latched_as_it_should(done: DirectRun) -> bool:
    kinds = [note.kind for note in done.listener.notes]
    warnings = [n for n in done.listener.notes if n.kind is NoteKind.STAGE_OUTLASTED]
    return (
        stages(done) == PLAN.latch_after
        and done.listener.latched
        and kinds.count(NoteKind.LATCHED_NOTHING_HIDDEN) == 1
        and len(warnings) == PLAN.latch_after
        and "the update waited for the stage" in warnings[0].text
    )


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("stage_call_s", [0.01, 1.0])
def test_stages_that_hide_keep_staging_on(
    runtime: tuple[float, IdleWait], stage_call_s: float
) -> None:
    done = run_direct(PLAN, rig(runtime, stage_call_s=stage_call_s, fwd_bwd_s=6.0))
    assert stages(done) == STEPS - 1
    assert not done.listener.latched
    kinds = {note.kind for note in done.listener.notes}
    assert NoteKind.STAGE_OUTLASTED not in kinds


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("fwd_bwd_s", [1.0, 6.0])
def test_stages_that_hide_nothing_turn_staging_off_once_with_a_warning(
    runtime: tuple[float, IdleWait], fwd_bwd_s: float
) -> None:
    # The stage call outlasts all that is in flight, so the update waits for it.
    done = run_direct(PLAN, rig(runtime, stage_call_s=15.0, fwd_bwd_s=fwd_bwd_s))
    assert latched_as_it_should(done)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_micro_batches_shorter_than_the_stage_call_turn_staging_off(
    runtime: tuple[float, IdleWait],
) -> None:
    """The device has been idle for a moment only, so that a raw wait may still read up to 2.8 s."""
    done = run_direct(PLAN, rig(runtime, stage_call_s=2.5))
    assert latched_as_it_should(done)


def test_the_old_bound_would_not_fire_on_such_a_runtime() -> None:
    for runtime in RUNTIMES[1:]:
        engine = TimedEngine(rig(runtime, stage_call_s=2.5), VirtualClock())
        assert engine.wait_for_device() > OLD_BOUND_S, "of a device that is idle"
    done = run_direct(PLAN, rig(RUNTIMES[1], stage_call_s=2.5))
    waits = [r.device_wait_seconds for r in done.records if r.device_wait_seconds >= 0]
    assert min(waits) > OLD_BOUND_S, "the old rule compares the raw wait with 0.05 s"
    assert done.listener.latched


def test_a_hidden_time_below_the_baseline_counts_as_nothing_where_no_wait_can_tell() -> None:
    """`least`: 1.0 s of hidden time and none both read 2.8 s. Staging off costs time only."""
    done = run_direct(PLAN, rig(RUNTIMES[2], stage_call_s=0.01))
    assert done.listener.latched
    late = run_direct(PLAN, rig(RUNTIMES[1], stage_call_s=0.01))
    assert not late.listener.latched, "where every answer is equally late, it can be told"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_stage_behind_an_update_that_waited_hides_behind_the_update(
    runtime: tuple[float, IdleWait],
) -> None:
    """With a dropless retry, update() returns once the last micro-batch is done: a stage after it
    still hides behind the update itself, and must not count as having hidden nothing."""
    config = TimedConfig(
        fwd_bwd_seconds=6.0,
        update_seconds=4.0,
        copy_seconds=0.1,
        idle_wait_seconds=runtime[0],
        idle_wait=runtime[1],
        replays=frozenset({(0, 0)}),
    )
    after = RunPlan(
        num_steps=STEPS, pipeline=True, stage=True, stage_before_update=False, latch_after=3
    )
    done = run_direct(after, config)
    assert stages(done) == STEPS - 1
    assert not done.listener.latched


# -- what is measured -----------------------------------------------------------------------------


def computed(timeline: DeviceTimeline, index: int, finished_s: float, heard_s: float) -> None:
    span = DeviceSpan(started_s=finished_s - 1.0, finished_s=finished_s)
    timeline.computed(0, index, span, seen_s=heard_s, earliest_s=0.0)


def staged_step() -> DeviceTimeline:
    """Two micro-batches are dispatched and the stage has ended at 1.0 s."""
    timeline = DeviceTimeline()
    timeline.dispatched(0, 0)
    timeline.dispatched(0, 1)
    timeline.staged(0, 0.25, 1.0)
    return timeline


def test_the_wait_is_not_known_by_an_earlier_micro_batch() -> None:
    timeline = staged_step()
    computed(timeline, 0, finished_s=1.5, heard_s=1.5)
    assert timeline.facts(0).device_wait_seconds == -1.0
    computed(timeline, 1, finished_s=2.5, heard_s=2.75)
    assert timeline.facts(0).device_wait_seconds == 1.75, "as heard, like the idle baseline"
    assert timeline.facts(0).last_finished_s == 2.5, "idle time goes by the device's own clock"


def test_whoever_holds_the_metrics_knows_that_the_micro_batches_are_done() -> None:
    timeline = staged_step()
    timeline.update_dispatched(0)
    timeline.known(0, 3.0)
    assert timeline.facts(0).device_wait_seconds == 2.0
    computed(timeline, 1, finished_s=2.5, heard_s=9.0)
    assert timeline.facts(0).device_wait_seconds == 2.0, "a watcher that lags changes nothing"
    timeline.known(0, 50.0)
    assert timeline.facts(0).device_wait_seconds == 2.0, "read again: the first time counts"


def test_a_stage_that_came_too_late_waited_for_nothing() -> None:
    timeline = DeviceTimeline()
    timeline.dispatched(0, 0)
    computed(timeline, 0, finished_s=1.0, heard_s=1.0)
    timeline.staged(0, 2.0, 3.0)
    assert timeline.facts(0).device_wait_seconds == 0.0
    assert DeviceTimeline().facts(0).device_wait_seconds == -1.0


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
