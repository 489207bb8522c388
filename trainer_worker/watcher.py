"""Watches the device: waits for each dispatched piece of work and records when it was done.

Consumes: handles in dispatch order. Waits for: the device, on threads of its own, so the device
thread never does. A failure found here names its micro-batch and is handed to the worker, which
poisons the step. What an abort or a restore gave up is forgotten, also when it fails later.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from prestage.microbatch import MicroBatch
from prestage.trace import DeviceRecord
from trainer_worker.clock import Clock
from trainer_worker.engine import DeviceSpan, Dispatched, PreparedInput
from trainer_worker.timeline import BoundaryFacts, DeviceTimeline

UPDATE: Final = -1
"""The index that stands for a step's update."""
Sink = Callable[[DeviceRecord], None]


@dataclass(frozen=True, kw_only=True)
class LateFailure:
    """A computation that failed after its call was answered."""

    step: int
    index: int  # `UPDATE`: the update.
    cause: str

    def __str__(self) -> str:
        what = (
            f"the update of step {self.step}"
            if self.index == UPDATE
            else f"micro-batch ({self.step}, {self.index})"
        )
        return f"{what} failed on the device: {self.cause}"


class Watcher(Protocol):
    """What the worker tells and asks."""

    def copying(
        self, step: int, index: int, prepared: PreparedInput, source: MicroBatch, *, now_s: float
    ) -> None:
        """An input's copy began. `source` is kept alive until it is done."""
        ...

    def computing(self, step: int, index: int, work: Dispatched, *, now_s: float) -> None: ...

    def updating(self, step: int, work: Dispatched, *, now_s: float) -> None: ...

    def staged(self, boundary_step: int, seconds: float, ended_s: float) -> None: ...

    def forget(self, *, from_step: int) -> None:
        """The work of `from_step` and later steps was given up: how it ends means nothing."""
        ...

    def facts(self, step: int) -> BoundaryFacts: ...

    def await_update(self, step: int, timeout_s: float) -> None:
        """Return when `facts` knows the end of the step's update, if it is being watched.

        Called by whoever holds the step's metrics: from then on all of the step is computed.
        """
        ...

    def in_flight(self) -> int:
        """Micro-batches that were dispatched and are not computed. Safe from any thread."""
        ...

    def settle(self) -> None:
        """Return when everything that was handed over so far is done (or failed)."""
        ...

    def failures(self) -> tuple[LateFailure, ...]:
        """Those that were not taken, oldest first. Safe from any thread."""
        ...

    def take(self, failures: tuple[LateFailure, ...]) -> None:
        """These were dealt with."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Let go. False: the device did not answer in time."""
        ...


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__


def _at_once(finished_s: float, asked_s: float) -> float:
    return max(finished_s, asked_s)


class InlineWatcher:
    """For engines with exact spans on a virtual clock: records at once, waits for nothing.

    `hears`: when a wait that is begun at `asked_s` hears of the end at `finished_s`. It stands for
    the thread that would wait for one piece of work after the other.
    """

    def __init__(
        self,
        sink: Sink | None = None,
        *,
        hears: Callable[[float, float], float] = _at_once,
        clock: Clock | None = None,
    ) -> None:
        self._timeline = DeviceTimeline()
        self._sink = sink
        self._hears = hears
        self._clock = clock
        self._heard_s = 0.0
        self._failures: list[LateFailure] = []

    def copying(
        self, step: int, index: int, prepared: PreparedInput, source: MicroBatch, *, now_s: float
    ) -> None:
        del step, index, prepared, source, now_s

    def computing(self, step: int, index: int, work: Dispatched, *, now_s: float) -> None:
        self._timeline.dispatched(step, index)
        span = self._span(step, index, work)
        if span is not None:
            seen_s = self._seen_s(span, now_s)
            self._out(self._timeline.computed(step, index, span, seen_s=seen_s, earliest_s=now_s))

    def updating(self, step: int, work: Dispatched, *, now_s: float) -> None:
        self._timeline.update_dispatched(step)
        span = self._span(step, UPDATE, work)
        if span is not None:
            seen_s = self._seen_s(span, now_s)
            self._out(self._timeline.updated(step, span, seen_s=seen_s, earliest_s=now_s))

    def _seen_s(self, span: DeviceSpan, now_s: float) -> float:
        finished_s = now_s if span.finished_s is None else span.finished_s
        self._heard_s = self._hears(finished_s, max(self._heard_s, now_s))
        return self._heard_s

    def _span(self, step: int, index: int, work: Dispatched) -> DeviceSpan | None:
        try:
            return work.peek()
        except Exception as error:  # Engines raise types of their own; here they mean the same.
            self._failures.append(LateFailure(step=step, index=index, cause=_why(error)))
            return None

    def _out(self, record: DeviceRecord) -> None:
        if self._sink is not None:
            self._sink(record)

    def staged(self, boundary_step: int, seconds: float, ended_s: float) -> None:
        self._timeline.staged(boundary_step, seconds, ended_s)

    def forget(self, *, from_step: int) -> None:
        self._timeline.forget(from_step=from_step)
        self._failures = [failure for failure in self._failures if failure.step < from_step]

    def facts(self, step: int) -> BoundaryFacts:
        return self._timeline.facts(step)

    def await_update(self, step: int, timeout_s: float) -> None:
        del timeout_s
        if self._clock is not None:
            self._timeline.known(step, self._clock.now())

    def in_flight(self) -> int:
        return 0

    def settle(self) -> None:
        return

    def failures(self) -> tuple[LateFailure, ...]:
        return tuple(self._failures)

    def take(self, failures: tuple[LateFailure, ...]) -> None:
        del self._failures[: len(failures)]

    def close(self, timeout_s: float) -> bool:
        del timeout_s
        return True


@dataclass(kw_only=True, eq=False)
class _Watched:
    """One piece of work that was handed over."""

    step: int
    index: int
    now_s: float  # When it was dispatched.
    computes: bool = True  # False: the copy of an input.
    forgotten: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    source: MicroBatch | None = None  # Of a copy: what it reads, until it is done.
    finished_s: float = 0.0  # Of a copy; set before `done`.


class ThreadWatcher:
    """Two threads: one waits for input copies, one for compute. Both outlive any failure."""

    def __init__(self, clock: Clock, sink: Sink | None = None) -> None:
        self._clock = clock
        self._sink = sink
        self._timeline = DeviceTimeline()
        self._lock = threading.Lock()
        self._failures: list[LateFailure] = []
        self._open: list[_Watched] = []  # Handed over and not done: bounded by the work in flight.
        self._inputs: dict[tuple[int, int], _Watched] = {}  # Copies whose compute has not come.
        self._copies: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._threads = [
            threading.Thread(target=_serve, args=(jobs,), name=name, daemon=True)
            for name, jobs in (("watch-copies", self._copies), ("watch-compute", self._work))
        ]
        for thread in self._threads:
            thread.start()

    def _watch(
        self, step: int, index: int, now_s: float, source: MicroBatch | None = None
    ) -> _Watched:
        watched = _Watched(
            step=step, index=index, now_s=now_s, computes=source is None, source=source
        )
        with self._lock:
            self._open.append(watched)
        return watched

    def _done(self, watched: _Watched) -> None:
        with self._lock:
            self._open.remove(watched)
        watched.source = None
        watched.done.set()

    def _failed(self, watched: _Watched, cause: str) -> None:
        with self._lock:
            if not watched.forgotten:
                failure = LateFailure(step=watched.step, index=watched.index, cause=cause)
                self._failures.append(failure)

    # -- copies -----------------------------------------------------------------------------------

    def copying(
        self, step: int, index: int, prepared: PreparedInput, source: MicroBatch, *, now_s: float
    ) -> None:
        watched = self._watch(step, index, now_s, source)
        self._inputs[step, index] = watched
        self._copies.put(lambda: self._wait_copy(watched, prepared))

    def _wait_copy(self, watched: _Watched, prepared: PreparedInput) -> None:
        span = DeviceSpan()
        try:
            span = prepared.wait_ready()
        except Exception as error:
            self._failed(watched, f"input copy: {_why(error)}")
        seen_s = self._clock.now()
        watched.finished_s = seen_s if span.finished_s is None else span.finished_s
        self._done(watched)
        self._out(
            DeviceRecord(
                kind="copy",
                step=watched.step,
                index=watched.index,
                started_s=watched.now_s if span.started_s is None else span.started_s,
                finished_s=watched.finished_s,
            )
        )

    # -- compute ----------------------------------------------------------------------------------

    def computing(self, step: int, index: int, work: Dispatched, *, now_s: float) -> None:
        copy = self._inputs.pop((step, index), None)
        watched = self._watch(step, index, now_s)
        with self._lock:
            self._timeline.dispatched(step, index)
        self._work.put(lambda: self._wait_compute(watched, work, copy))

    def _wait_compute(self, watched: _Watched, work: Dispatched, copy: _Watched | None) -> None:
        try:
            span = work.wait()
        except Exception as error:
            self._failed(watched, _why(error))
            self._done(watched)
            return
        seen_s = self._clock.now()
        earliest_s = watched.now_s
        if copy is not None:
            copy.done.wait()  # Computed, so its input is there: the copies' thread says so soon.
            earliest_s = max(earliest_s, copy.finished_s)
        with self._lock:
            record = self._timeline.computed(
                watched.step,
                watched.index,
                span,
                seen_s=seen_s,
                earliest_s=earliest_s,
                counts=not watched.forgotten,
            )
        self._done(watched)
        self._out(record)

    def updating(self, step: int, work: Dispatched, *, now_s: float) -> None:
        watched = self._watch(step, UPDATE, now_s)
        with self._lock:
            self._timeline.update_dispatched(step)
        self._work.put(lambda: self._wait_update(watched, work))

    def _wait_update(self, watched: _Watched, work: Dispatched) -> None:
        try:
            span = work.wait()
        except Exception as error:
            self._failed(watched, _why(error))
            self._done(watched)
            return
        seen_s = self._clock.now()
        with self._lock:
            record = self._timeline.updated(
                watched.step,
                span,
                seen_s=seen_s,
                earliest_s=watched.now_s,
                counts=not watched.forgotten,
            )
        self._done(watched)
        self._out(record)

    def _out(self, record: DeviceRecord) -> None:
        if self._sink is not None:
            self._sink(record)

    # -- asking -----------------------------------------------------------------------------------

    def staged(self, boundary_step: int, seconds: float, ended_s: float) -> None:
        with self._lock:
            self._timeline.staged(boundary_step, seconds, ended_s)

    def forget(self, *, from_step: int) -> None:
        for key in [key for key in self._inputs if key[0] >= from_step]:
            del self._inputs[key]
        with self._lock:
            for watched in self._open:
                watched.forgotten = watched.forgotten or watched.step >= from_step
            self._failures = [failure for failure in self._failures if failure.step < from_step]
            self._timeline.forget(from_step=from_step)

    def facts(self, step: int) -> BoundaryFacts:
        with self._lock:
            return self._timeline.facts(step)

    def await_update(self, step: int, timeout_s: float) -> None:
        with self._lock:
            self._timeline.known(step, self._clock.now())
            found = next((w for w in self._open if (w.step, w.index) == (step, UPDATE)), None)
        if found is not None:
            found.done.wait(timeout_s)

    def in_flight(self) -> int:
        with self._lock:
            return sum(w.computes and w.index != UPDATE for w in self._open)

    def settle(self) -> None:
        with self._lock:
            outstanding = list(self._open)
        for watched in outstanding:
            watched.done.wait()

    def failures(self) -> tuple[LateFailure, ...]:
        with self._lock:
            return tuple(self._failures)

    def take(self, failures: tuple[LateFailure, ...]) -> None:
        with self._lock:
            del self._failures[: len(failures)]  # New ones only ever join at the end.

    def close(self, timeout_s: float) -> bool:
        give_up_s = time.monotonic() + timeout_s
        for jobs in (self._copies, self._work):
            jobs.put(None)
        for thread in self._threads:
            thread.join(timeout=max(0.0, give_up_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _serve(jobs: queue.Queue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # It holds device memory and an input's bytes: not until the next one comes.
