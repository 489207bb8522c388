"""What the device does after a call was answered: late failures, times, and what an abort gives up."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from orchestrator.bench.conformance.driver import Driver, Refused
from orchestrator.bench.synthetic import make_batch
from prestage.microbatch import MicroBatch, MicroBatchId
from prestage.protocol import Call, Phase, Reason
from prestage.trace import DeviceRecord
from prestage.trainer.v1 import trainer_pb2 as pb
from tests.support.rig import FAST, address_of, served
from tests.worker.test_exactly_once import ready
from trainer_worker.clock import RealClock
from trainer_worker.engine import DeviceFailure, DeviceSpan, EngineParts
from trainer_worker.engines.timed import TimedConfig, TimedEngine, create_timed
from trainer_worker.watcher import UPDATE, InlineWatcher, LateFailure, ThreadWatcher


class Handle:
    """Work on a device that ends when the test says so. Both an input's copy and a computation."""

    def __init__(self, span: DeviceSpan | None = None, error: Exception | None = None) -> None:
        self.gate = threading.Event()
        self.span = span or DeviceSpan()
        self.error = error
        self.batch_id = MicroBatchId(run_id="run", step=0, index=0)
        self.digest = "d"
        self.device_bytes = 0

    def wait(self) -> DeviceSpan:
        assert self.gate.wait(30)
        return self.peek()

    wait_ready = wait

    def peek(self) -> DeviceSpan:
        if self.error is not None:
            raise self.error
        return self.span

    def end(self) -> Handle:
        self.gate.set()
        return self


def source() -> MicroBatch:
    return make_batch(Driver(address="unix:///none").shape, "run", 0, 0)


@pytest.fixture
def watcher() -> Iterator[ThreadWatcher]:
    made = ThreadWatcher(RealClock())
    yield made
    assert made.close(10)


def watch_step(watcher: ThreadWatcher, step: int, *errors: Exception | None) -> list[Handle]:
    """Hand over micro-batches of a step; `errors`: how each of them ends."""
    handles = []
    for index, error in enumerate(errors):
        handle = Handle(error=error)
        watcher.copying(step, index, Handle().end(), source(), now_s=0.0)
        watcher.computing(step, index, handle, now_s=0.0)
        handles.append(handle)
    return handles


# -- the watcher by itself ------------------------------------------------------------------------


def test_any_exception_is_a_failure_that_names_its_micro_batch(watcher: ThreadWatcher) -> None:
    """An engine's own exception types must not end the thread that watches."""
    for handle in watch_step(watcher, 3, None, RuntimeError("XLA says no"), None):
        handle.end()
    broken = Handle(error=RuntimeError("out of memory")).end()
    watcher.updating(3, broken, now_s=0.0)
    watcher.settle()
    assert watcher.failures() == (
        LateFailure(step=3, index=1, cause="XLA says no"),
        LateFailure(step=3, index=UPDATE, cause="out of memory"),
    )
    assert [str(failure) for failure in watcher.failures()] == [
        "micro-batch (3, 1) failed on the device: XLA says no",
        "the update of step 3 failed on the device: out of memory",
    ]
    watcher.take(watcher.failures()[:1])
    assert [failure.index for failure in watcher.failures()] == [UPDATE]


def test_an_input_copy_that_fails_is_named_and_holds_nothing_up(watcher: ThreadWatcher) -> None:
    watcher.copying(1, 0, Handle(error=ValueError("bus error")).end(), source(), now_s=0.0)
    watcher.computing(1, 0, Handle().end(), now_s=0.0)
    watcher.settle()
    assert watcher.failures() == (LateFailure(step=1, index=0, cause="input copy: bus error"),)


def test_what_an_abort_gave_up_is_forgotten_but_an_earlier_update_is_not(
    watcher: ThreadWatcher,
) -> None:
    update = Handle(error=RuntimeError("the update failed"))
    watcher.updating(1, update, now_s=0.0)
    given_up = watch_step(watcher, 2, RuntimeError("given up"))
    watcher.forget(from_step=2)
    again = watch_step(watcher, 2, None)
    for handle in (update, *given_up, *again):
        handle.end()
    watcher.settle()
    assert [(failure.step, failure.index) for failure in watcher.failures()] == [(1, UPDATE)]


def test_a_failure_that_nobody_took_goes_with_the_abort(watcher: ThreadWatcher) -> None:
    for handle in watch_step(watcher, 2, RuntimeError("x")):
        handle.end()
    watcher.settle()
    watcher.forget(from_step=2)
    assert watcher.failures() == ()


def test_the_boundary_of_a_repeated_step_is_made_of_what_counted(watcher: ThreadWatcher) -> None:
    def span(started_s: float, finished_s: float) -> Handle:
        return Handle(DeviceSpan(started_s=started_s, finished_s=finished_s)).end()

    watcher.copying(0, 0, Handle().end(), source(), now_s=0.0)
    watcher.computing(0, 0, span(0.0, 1.0), now_s=0.0)
    watcher.updating(0, span(1.0, 1.25), now_s=0.0)
    watcher.computing(1, 0, span(1.5, 2.5), now_s=0.0)
    watcher.settle()
    assert watcher.facts(0).idle_seconds == 0.25
    watcher.forget(from_step=1)
    assert watcher.facts(0).idle_seconds == -1, "no next step has started now"
    watcher.computing(1, 0, span(3.25, 4.25), now_s=0.0)
    watcher.settle()
    assert watcher.facts(0).idle_seconds == 2.0


def test_an_input_stays_alive_until_its_copy_is_done(watcher: ThreadWatcher) -> None:
    """Its memory is a shared-memory slot, which the sender writes again once nobody refers to it."""
    batch, copy = source(), Handle()
    alive = weakref.ref(batch)
    watcher.copying(0, 0, copy, batch, now_s=0.0)
    watcher.computing(0, 0, Handle().end(), now_s=0.0)
    del batch
    gc.collect()
    assert alive() is not None, "let go while the copy reads it"
    copy.end()
    watcher.settle()
    gc.collect()
    assert alive() is None, "kept although the copy is done"


def test_without_exact_spans_a_micro_batch_starts_when_device_input_and_dispatch_allow() -> None:
    clock = RealClock()
    records: list[DeviceRecord] = []
    watcher = ThreadWatcher(clock, records.append)
    zero_s = clock.now()
    copied = Handle(DeviceSpan(started_s=zero_s - 3.0, finished_s=zero_s - 2.0)).end()
    watcher.copying(0, 0, copied, source(), now_s=zero_s - 3.0)
    watcher.computing(0, 0, Handle().end(), now_s=zero_s - 2.5)
    watcher.settle()
    [compute] = [record for record in records if record.kind == "fwd_bwd"]
    assert compute.started_s == zero_s - 2.0, "it cannot start before its input is there"
    assert compute.finished_s >= zero_s
    watcher.computing(0, 1, Handle().end(), now_s=zero_s - 2.5)
    assert watcher.close(10)
    second = records[-1]
    assert second.started_s == compute.finished_s, "it cannot start before the device is free"


def test_metrics_wait_until_the_boundary_is_known(watcher: ThreadWatcher) -> None:
    update = Handle(DeviceSpan(started_s=1.0, finished_s=2.0))
    watcher.updating(0, update, now_s=0.0)
    threading.Timer(0.05, update.end).start()
    watcher.await_update(0, 30.0)
    assert watcher.facts(0).update_finished_s == 2.0
    watcher.await_update(7, 30.0)  # Nothing of it is watched: returns at once.


def test_a_device_that_does_not_answer_does_not_hold_up_the_end() -> None:
    watcher = ThreadWatcher(RealClock())
    handle = Handle()
    watcher.computing(0, 0, handle, now_s=0.0)
    assert not watcher.close(0.05)
    handle.end()


def test_e10_the_watcher_keeps_nothing_of_ten_thousand_steps(watcher: ThreadWatcher) -> None:
    batch, done = source(), Handle().end()

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            watcher.copying(step, 0, done, batch, now_s=0.0)
            watcher.computing(step, 0, done, now_s=0.0)
            watcher.updating(step, done, now_s=0.0)
            if step % 100 == 0:
                watcher.settle()
        watcher.settle()

    steps(0, 1000)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    steps(1000, 10_000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 200_000, f"{after - before} bytes grew over 9,000 steps"


def test_the_inline_watcher_hears_of_failed_updates_too() -> None:
    watcher = InlineWatcher()
    watcher.updating(0, Handle(error=RuntimeError("no")), now_s=0.0)
    assert [failure.index for failure in watcher.failures()] == [UPDATE]
    watcher.forget(from_step=1)
    assert watcher.failures()
    watcher.forget(from_step=0)
    assert not watcher.failures()


# -- what the worker makes of it, over gRPC -------------------------------------------------------


class FailsOnDevice(TimedEngine):
    """The n-th fwd_bwd (or update) of this process fails on the device; made to order."""

    def __init__(self, config: TimedConfig, *, fwd_bwd: int = -1, update: int = -1) -> None:
        super().__init__(config, RealClock())
        self._fails = {"fwd_bwd": fwd_bwd, "update": update}
        self.gate = threading.Event()

    def _due(self, what: str) -> bool:
        self._fails[what] -= 1
        return self._fails[what] == -1

    def _failing(self, wait: Callable[[], DeviceSpan], batch_id: MicroBatchId | None) -> object:
        def failing() -> DeviceSpan:
            assert self.gate.wait(30)
            wait()
            raise DeviceFailure(batch_id, "planned")

        return failing

    def fwd_bwd(self, prepared):  # type: ignore[no-untyped-def]
        work = super().fwd_bwd(prepared)
        if self._due("fwd_bwd"):
            work.wait = self._failing(work.wait, prepared.batch_id)
        return work

    def update(self):  # type: ignore[no-untyped-def]
        result = super().update()
        if self._due("update"):
            result.completion.wait = self._failing(result.completion.wait, None)
        return result


def test_get_state_reports_a_late_failure_without_another_call() -> None:
    config = TimedConfig(fwd_bwd_seconds=0.001, copy_seconds=0.0, fail_device=frozenset({(0, 0)}))
    with served(create_timed(config, RealClock())) as server:
        driver = ready(Driver(address=address_of(server)))
        driver.call(Call.FWD_BWD, 0, 0)
        server.service._worker.watcher.settle()
        state = driver.state()
        assert driver.phase is Phase.FAILED
        assert state.failure.startswith("micro-batch (0, 0) failed on the device")
        assert not state.parameters_suspect
        assert server.service._worker.snapshot().session.step.phase is Phase.FAILED
        with pytest.raises(Refused) as refused:
            driver.put(driver.batch(0, 2))
        assert refused.value.reason is Reason.STEP_FAILED
        driver.close()


def test_a_failure_of_an_aborted_step_does_not_poison_its_repetition() -> None:
    engine = FailsOnDevice(FAST, fwd_bwd=0)
    with served(EngineParts(training=engine)) as server:
        driver = ready(Driver(address=address_of(server)))
        driver.call(Call.FWD_BWD, 0, 0)
        driver.call(Call.ABORT_STEP)
        engine.gate.set()
        server.service._worker.watcher.settle()
        driver.call(Call.FWD_BWD, 0, 0)
        driver.call(Call.FWD_BWD_APPLY, 0, 1)
        assert (driver.phase, driver.state().train_step) == (Phase.CLOSED, 1)
        driver.close()


@pytest.mark.parametrize("what", ["its update", "a micro-batch that its update was made of"])
def test_a_late_failure_of_a_closed_step_makes_the_parameters_suspect(what: str) -> None:
    update = 0 if what == "its update" else -1
    engine = FailsOnDevice(FAST, update=update, fwd_bwd=-1 if update == 0 else 0)
    with served(EngineParts(training=engine)) as server:
        driver = ready(Driver(address=address_of(server)), steps=2)
        driver.call(Call.FWD_BWD_APPLY, 0, 0)
        driver.call(Call.FWD_BWD, 1, 0)
        driver.call(Call.ABORT_STEP)  # Gives up step 1, not the update of step 0.
        engine.gate.set()
        server.service._worker.watcher.settle()
        assert driver.state().parameters_suspect
        with pytest.raises(Refused) as refused:
            driver.call(Call.ABORT_STEP)
        assert refused.value.reason is Reason.PARAMETERS_SUSPECT
        driver.close()


def test_the_first_cause_is_kept_when_later_work_fails_because_of_it() -> None:
    config = replace(FAST, fail_device=frozenset({(0, 0), (0, 1)}))
    with served(create_timed(config, RealClock())) as server:
        driver = ready(Driver(address=address_of(server)))
        driver.call(Call.FWD_BWD, 0, 0)
        server.service._worker.watcher.settle()
        first = driver.state().failure
        watcher = server.service._worker.watcher  # The next one was dispatched already.
        watcher.computing(0, 1, Handle(error=RuntimeError("follows from it")).end(), now_s=0.0)
        watcher.settle()
        assert len(watcher.failures()) == 2
        with pytest.raises(Refused):
            driver.call(Call.FWD_BWD, 0, 1)
        assert driver.state().failure == first
        driver.close()


def test_staged_boundary_times_come_with_the_first_read_of_the_metrics() -> None:
    """No later read is needed to learn how long the last micro-batch still computed."""
    with served(create_timed(replace(FAST, update_seconds=0.0), RealClock())) as server:
        driver = ready(Driver(address=address_of(server)), steps=9)
        for step in range(8):
            driver.call(Call.FWD_BWD_DEFER, step, 0)
            driver.call(Call.STAGE_FWD_BWD, step + 1, 0)
            driver.call(Call.APPLY_DEFERRED_UPDATE)
            metrics = driver.read(Call.GET_METRICS, step)
            assert isinstance(metrics, pb.GetMetricsResponse)
            [facts] = metrics.steps
            assert facts.stage_seconds >= 0
            assert facts.device_wait_seconds >= 0
        driver.close()
