"""Watches the device: waits for each dispatched piece of work and records when it was done.

Consumes: handles in dispatch order. Waits for: the device, on threads of its own, so the device
thread never does. A failure found here names its micro-batch and is handed to the worker, which
poisons the step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from prestage.trace import DeviceRecord
from trainer_worker.clock import Clock
from trainer_worker.engine import Dispatched, EngineError, PreparedInput
from trainer_worker.timeline import BoundaryFacts, DeviceTimeline

COPIES_KEPT: Final = 64
Sink = Callable[[DeviceRecord], None]


@dataclass(frozen=True, kw_only=True)
class LateFailure:
    """A computation that failed after its call was answered."""

    step: int
    index: int  # -1: the update.
    cause: str


class Watcher(Protocol):
    """What the worker tells and asks."""

    def copying(self, step: int, index: int, prepared: PreparedInput, *, now_s: float) -> None: ...

    def computing(self, step: int, index: int, work: Dispatched, *, now_s: float) -> None: ...

    def updating(self, step: int, work: Dispatched, *, now_s: float) -> None: ...

    def staged(self, boundary_step: int, seconds: float, ended_s: float) -> None: ...

    def restarted(self) -> None: ...

    def facts(self, step: int) -> BoundaryFacts: ...

    def settle(self) -> None:
        """Return when everything that was handed over so far is done (or failed)."""
        ...

    def take_failure(self) -> LateFailure | None: ...

    def close(self) -> None: ...


class InlineWatcher:
    """For engines with exact spans on a virtual clock: records at once, waits for nothing."""

    def __init__(self, sink: Sink | None = None) -> None:
        self._timeline = DeviceTimeline()
        self._sink = sink
        self._failure: LateFailure | None = None

    def copying(self, step: int, index: int, prepared: PreparedInput, *, now_s: float) -> None:
        del step, index, prepared, now_s

    def computing(self, step: int, index: int, work: Dispatched, *, now_s: float) -> None:
        try:
            span = work.peek()
        except EngineError as error:
            self._failure = self._failure or LateFailure(step=step, index=index, cause=str(error))
            return
        self._out(self._timeline.computed(step, index, span, seen_s=now_s, earliest_s=now_s))

    def updating(self, step: int, work: Dispatched, *, now_s: float) -> None:
        self._out(self._timeline.updated(step, work.peek(), seen_s=now_s, earliest_s=now_s))

    def _out(self, record: DeviceRecord) -> None:
        if self._sink is not None:
            self._sink(record)

    def staged(self, boundary_step: int, seconds: float, ended_s: float) -> None:
        self._timeline.staged(boundary_step, seconds, ended_s)

    def restarted(self) -> None:
        self._timeline.restarted()

    def facts(self, step: int) -> BoundaryFacts:
        return self._timeline.facts(step)

    def settle(self) -> None:
        return

    def take_failure(self) -> LateFailure | None:
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        return


class ThreadWatcher:
    """Two threads: one waits for input copies, one for compute."""

    def __init__(self, clock: Clock, sink: Sink | None = None) -> None:
        self._clock = clock
        self._sink = sink
        self._timeline = DeviceTimeline()
        self._lock = threading.Lock()
        self._ready_s: dict[tuple[int, int], float] = {}
        self._copied = threading.Condition(self._lock)
        self._failure: LateFailure | None = None
        self._copies: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._threads = [
            threading.Thread(target=_serve, args=(jobs,), name=name, daemon=True)
            for name, jobs in (("watch-copies", self._copies), ("watch-compute", self._work))
        ]
        for thread in self._threads:
            thread.start()

    def copying(self, step: int, index: int, prepared: PreparedInput, *, now_s: float) -> None:
        self._copies.put(lambda: self._wait_copy(step, index, prepared, now_s))

    def _wait_copy(self, step: int, index: int, prepared: PreparedInput, now_s: float) -> None:
        try:
            span = prepared.wait_ready()
            seen_s = self._clock.now()
        except EngineError as error:
            self._fail(LateFailure(step=step, index=index, cause=f"input copy: {error}"))
            span, seen_s = None, self._clock.now()
        finished_s = seen_s
        if span is not None and span.finished_s is not None:
            finished_s = span.finished_s
        with self._copied:
            self._ready_s[step, index] = finished_s
            while len(self._ready_s) > COPIES_KEPT:  # Staged inputs that an abort dropped.
                del self._ready_s[next(iter(self._ready_s))]
            self._copied.notify_all()
        started_s = now_s if span is None or span.started_s is None else span.started_s
        self._out(
            DeviceRecord(
                kind="copy", step=step, index=index, started_s=started_s, finished_s=finished_s
            )
        )

    def computing(self, step: int, index: int, work: Dispatched, *, now_s: float) -> None:
        self._work.put(lambda: self._wait_compute(step, index, work, now_s))

    def _wait_compute(self, step: int, index: int, work: Dispatched, now_s: float) -> None:
        try:
            span = work.wait()
        except EngineError as error:
            self._fail(LateFailure(step=step, index=index, cause=str(error)))
            return
        seen_s = self._clock.now()
        with self._copied:
            # Every dispatched micro-batch had its input handed over before.
            self._copied.wait_for(lambda: (step, index) in self._ready_s, timeout=60)
            earliest_s = max(now_s, self._ready_s.pop((step, index), now_s))
            record = self._timeline.computed(
                step, index, span, seen_s=seen_s, earliest_s=earliest_s
            )
        self._out(record)

    def updating(self, step: int, work: Dispatched, *, now_s: float) -> None:
        self._work.put(lambda: self._wait_update(step, work, now_s))

    def _wait_update(self, step: int, work: Dispatched, now_s: float) -> None:
        try:
            span = work.wait()
        except EngineError as error:
            self._fail(LateFailure(step=step, index=-1, cause=str(error)))
            return
        seen_s = self._clock.now()
        with self._lock:
            record = self._timeline.updated(step, span, seen_s=seen_s, earliest_s=now_s)
        self._out(record)

    def _fail(self, failure: LateFailure) -> None:
        with self._lock:
            self._failure = self._failure or failure

    def _out(self, record: DeviceRecord) -> None:
        if self._sink is not None:
            self._sink(record)

    def staged(self, boundary_step: int, seconds: float, ended_s: float) -> None:
        with self._lock:
            self._timeline.staged(boundary_step, seconds, ended_s)

    def restarted(self) -> None:
        with self._lock:
            self._timeline.restarted()

    def facts(self, step: int) -> BoundaryFacts:
        with self._lock:
            return self._timeline.facts(step)

    def settle(self) -> None:
        for jobs in (self._copies, self._work):
            reached = threading.Event()
            jobs.put(reached.set)
            reached.wait()

    def take_failure(self) -> LateFailure | None:
        with self._lock:
            failure, self._failure = self._failure, None
            return failure

    def close(self) -> None:
        for jobs in (self._copies, self._work):
            jobs.put(None)
        for thread in self._threads:
            thread.join(timeout=30)


def _serve(jobs: queue.Queue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
