"""The feeder: packs steps on a thread of its own and brings their bytes to the worker.

Consumes: steps to pack, in the order that the runner asks for them. Waits for: the source (until
its groups are in) and the worker's store (until there is room). Answers with `Ready` events. A put
is harmless to repeat, so lost puts are simply sent again; everything else that goes wrong reaches
the runner as an event.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import grpc

from orchestrator.calls import Event, GaveUp, PutRefused, Ready, SourceEnded
from orchestrator.ports import StepSummary
from prestage.microbatch import MicroBatch
from prestage.protocol import Reason
from prestage.wire.errors import Refusal, classify

log = logging.getLogger("prestage.feeder")


PASSING: Final = (Reason.DRAINING, Reason.STARTING, Reason.TOO_MANY_UPLOADS)
"""Refusals that another worker process, or the same one later, will not give."""


ITS_STATE: Final = (
    Reason.STALE_INCARNATION,
    Reason.STALE_EPOCH,
    Reason.NO_RUN,
    Reason.STEP_FAILED,
)
"""Refusals that come from the worker's state, which only the runner's calls can settle."""


class SourceError(Exception):
    """The source cannot give a step; the message says why and what to do."""


class WorkerRefused(Exception):
    """The worker refused because of its state, which only the runner's calls can settle."""


class NotWanted(Exception):
    """What was being made for a step is not asked for any more."""


@dataclass(frozen=True, kw_only=True)
class StepFeed:
    """One packed step. `micro_batches` are made one after another, as they are asked for."""

    summary: StepSummary
    micro_batches: Iterator[MicroBatch]


def always() -> bool:
    """Whatever is made is wanted until the end."""
    return True


class StepSource(Protocol):
    """Gives the micro-batches of each step: the same ones whenever it is asked again."""

    def open_step(self, step: int, *, wanted: Callable[[], bool] = always) -> StepFeed | None:
        """Wait for the step's data. None: there is none and never will be, or it is not `wanted`
        any more. Raises `SourceError`.

        `wanted` may turn False while this waits: a restarted worker needs earlier steps again,
        and what is waited for may itself wait for those.
        """
        ...

    def first_micro_batch(
        self, step: int, *, wanted: Callable[[], bool] = always
    ) -> MicroBatch | None:
        """Wait until micro-batch (step, 0) is fixed, while later groups of the step are not in.

        None: it is not known before the whole step is, or not `wanted` any more; ask `open_step`.
        When it is given here, the `open_step` of this step that follows begins with (step, 1).
        Raises `SourceError`.
        """
        ...

    def data_cursor(self, next_step: int) -> str: ...

    def step_durable(self, step: int) -> None:
        """Steps before `step` are in a durable checkpoint: they will not be asked for again."""
        ...


class PutPort(Protocol):
    """Brings one micro-batch to the worker. Raises `grpc.RpcError`."""

    def put(self, batch: MicroBatch) -> int:
        """Returns the bytes sent; 0 when the worker held it already."""
        ...


@dataclass(kw_only=True)
class FeederCounters:
    """Counted for metrics. Monotonic."""

    put_bytes: int = 0
    put_retries: int = 0
    micro_batches: int = 0


class Feeder:
    """Implements `FeederPort`."""

    def __init__(
        self,
        source: StepSource,
        sender: PutPort,
        *,
        score: Callable[[StepFeed, Callable[[], bool]], StepFeed] | None = None,
        unreachable_s: float = 120.0,
    ) -> None:
        """`score`: completes a step's feed once its weights are in place; takes whether that is
        still wanted. Raises `NotWanted`, `WorkerRefused`, `SourceError`."""
        self._source = source
        self._sender = sender
        self._score = score
        self._attempts = max(1, int(unreachable_s / 0.5))
        self._events: queue.Queue[Event] = queue.Queue()
        self._jobs: queue.Queue[tuple[int, int] | None] = queue.Queue()
        self._generation = 0
        self._summaries: dict[int, StepSummary] = {}
        self._stopped = threading.Event()
        self._score_allowed = -1  # The newest step whose weights are in place, of this worker.
        self._allowed = threading.Condition()
        self.counters = FeederCounters()
        self._thread = threading.Thread(target=self._serve, name="feeder", daemon=True)
        self._thread.start()

    # -- FeederPort -------------------------------------------------------------------------------

    def start_step(self, step: int) -> None:
        self._jobs.put((self._generation, step))

    def next_event(self, timeout_s: float) -> Event | None:
        try:
            return self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get(False)
        except queue.Empty:
            return None

    def score_step(self, step: int) -> None:
        with self._allowed:
            self._score_allowed = step
            self._allowed.notify_all()

    def step_closed(self, step: int) -> None:
        for old in [known for known in self._summaries if known < step - 64]:
            del self._summaries[old]

    def forget_worker(self) -> None:
        """What is being put belongs to the worker's former process: stop it."""
        self._generation += 1
        self._score_allowed = -1  # Another process holds other weights until it is restored.
        while self.next_event(0.0) is not None:
            pass

    def summary(self, step: int) -> StepSummary | None:
        return self._summaries.get(step)

    def data_cursor(self, next_step: int) -> str:
        return self._source.data_cursor(next_step)

    def close(self) -> None:
        self._stopped.set()
        self._generation += 1
        self._jobs.put(None)
        self._thread.join(timeout=10)

    # -- the thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            generation, step = job
            if generation != self._generation:
                continue
            try:
                self._feed(generation, step)
            except SourceError as error:
                self._post(generation, GaveUp(why=str(error)))
            except WorkerRefused as error:
                self._post(generation, PutRefused(why=str(error)))
            except NotWanted as error:
                log.info("%s", error)
            except Exception as error:  # A bug here must end the run, not starve it.
                log.exception("the feeder failed at step %d", step)
                self._post(
                    generation,
                    GaveUp(
                        why=f"the feeder failed at step {step}: {type(error).__name__}: {error}"
                    ),
                )

    def _post(self, generation: int, event: Event) -> None:
        if generation == self._generation:
            self._events.put(event)

    def _feed(self, generation: int, step: int) -> None:
        def wanted() -> bool:
            return generation == self._generation

        # What is scored is scored whole, before its first micro-batch is put.
        first = None
        if self._score is None:
            first = self._source.first_micro_batch(step, wanted=wanted)
        if first is not None and not self._bring(generation, first, last=False):
            return
        feed = self._source.open_step(step, wanted=wanted)
        if feed is None:
            self._post(generation, SourceEnded(step=step))
            return
        self._summaries[step] = feed.summary
        if self._score is not None:
            if not self._may_score(generation, step):
                return
            feed = self._score(feed, wanted)
        last = feed.summary.micro_batches - 1
        for batch in feed.micro_batches:
            if not self._bring(generation, batch, last=batch.id.index == last):
                return

    def _bring(self, generation: int, batch: MicroBatch, *, last: bool) -> bool:
        """Put one micro-batch and say that it is ready. False: not wanted now."""
        if not self._put(generation, batch):
            return False
        self.counters.micro_batches += 1
        self._post(
            generation,
            Ready(step=batch.id.step, index=batch.id.index, digest=batch.digest, last=last),
        )
        return True

    def _may_score(self, generation: int, step: int) -> bool:
        """Wait until the step's weights are in place. False: something else is asked for now.

        They are once the runner has closed the step before and synced its weights.
        """
        while generation == self._generation and self._jobs.empty():
            with self._allowed:
                if self._allowed.wait_for(lambda: self._score_allowed >= step, timeout=0.2):
                    return True
        return False

    def _put(self, generation: int, batch: MicroBatch) -> bool:
        """Put one micro-batch, again and again when the transport fails. False: not wanted now."""
        for attempt in range(self._attempts):
            if generation != self._generation:
                return False
            try:
                self.counters.put_bytes += self._sender.put(batch)
                return True
            except grpc.RpcError as error:
                outcome = classify(error)
                if isinstance(outcome, Refusal) and outcome.reason not in PASSING:
                    return self._refused(generation, batch, outcome)
                self.counters.put_retries += 1
                if attempt == 0:
                    log.warning("put of micro-batch %s is repeated: %s", batch.id, outcome)
                self._stopped.wait(0.5)
        self._post(
            generation,
            GaveUp(why=f"micro-batch {batch.id} could not be brought to the worker: {outcome}"),
        )
        return False

    def _refused(self, generation: int, batch: MicroBatch, refusal: Refusal) -> bool:
        if refusal.reason in ITS_STATE:
            # The runner asks: it may be waiting for these very bytes and have no call to make.
            why = f"put of micro-batch {batch.id} was refused: {refusal.message}"
            self._post(generation, PutRefused(why=why))
            return False
        self._post(
            generation,
            GaveUp(why=f"put of micro-batch {batch.id} was refused: {refusal.message}"),
        )
        return False
