"""The real runner, core and worker in one thread on a virtual clock: no socket, no sleeping.

Time moves only where somebody waits for the device, so what is measured is exact.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from dataclasses import dataclass

from orchestrator.bench.synthetic import SyntheticShape, make_batch
from orchestrator.boundary import BoundaryState
from orchestrator.calls import Done, Event, Note, Raised, Ready, Refused, Send, WorkerView
from orchestrator.plan import RunPlan
from orchestrator.ports import Answer, StepFacts, StepSummary
from orchestrator.runner import Runner
from orchestrator.steps import StepRecord
from prestage.microbatch import MicroBatch
from prestage.protocol import FWD_BWD_CALLS, BatchRef, Call, Refusal, Request
from prestage.trace import TraceRecord
from trainer_worker.clock import VirtualClock
from trainer_worker.engine import CompileSpec
from trainer_worker.engines.timed import TimedConfig, TimedEngine, create_timed
from trainer_worker.sessions import CallKey
from trainer_worker.watcher import InlineWatcher
from trainer_worker.worker import BatchMissing, CallResult, Work, Worker

RUN, INCARNATION = "run", "direct"


class DirectStore:
    """`worker.BatchStore` as a dictionary."""

    def __init__(self) -> None:
        self.batches: dict[BatchRef, MicroBatch] = {}

    def get(self, ref: BatchRef) -> MicroBatch:
        if ref not in self.batches:
            raise BatchMissing(str(ref))
        return self.batches[ref]

    def release(self, ref: BatchRef) -> None:
        self.batches.pop(ref, None)

    def release_before(self, step: int) -> None:
        for ref in [ref for ref in self.batches if ref.step < step]:
            del self.batches[ref]

    def clear(self) -> None:
        self.batches.clear()

    def stored(self) -> tuple[tuple[BatchRef, ...], int, int]:
        return tuple(self.batches), 0, 1


class DirectFeeder:
    """`FeederPort` whose micro-batches are ready at once; `late` steps only when they are waited for."""

    def __init__(
        self, shape: SyntheticShape, store: DirectStore, late: frozenset[int] = frozenset()
    ) -> None:
        self._shape = shape
        self._store = store
        self._late = late
        self._events: deque[Event] = deque()
        self._held: deque[Event] = deque()

    def start_step(self, step: int) -> None:
        for index in range(self._shape.micro_batches):
            batch = make_batch(self._shape, RUN, step, index)
            self._store.batches[BatchRef(step=step, index=index, digest=batch.digest)] = batch
            ready = Ready(
                step=step,
                index=index,
                digest=batch.digest,
                last=index == self._shape.micro_batches - 1,
            )
            (self._held if step in self._late else self._events).append(ready)

    def next_event(self, timeout_s: float) -> Event | None:
        if not self._events and timeout_s > 0:
            self._events, self._held = self._held, deque()
        return self._events.popleft() if self._events else None

    def score_step(self, step: int) -> None:
        raise AssertionError(step)

    def step_closed(self, step: int) -> None:
        del step

    def forget_worker(self) -> None:
        self._events.clear()

    def summary(self, step: int) -> StepSummary | None:
        del step
        return None

    def data_cursor(self, next_step: int) -> str:
        return str(next_step)


class DirectTrainer:
    """`TrainerPort` over a `Worker` in this thread."""

    def __init__(self, worker: Worker, clock: VirtualClock) -> None:
        self._worker = worker
        self._clock = clock
        self._epoch = 0

    def call(self, send: Send, *, data_cursor: str) -> Answer:
        call = send.call
        if call is Call.OPEN_RUN:
            self._epoch += 1
            self._worker.open_run(RUN, self._epoch)
            return Answer(event=Done(view=self._view()))
        if call is Call.GET_STATE:
            return Answer(event=Done(view=self._view()))
        if call is Call.GET_METRICS:
            return self._metrics(send.step)
        batch = None
        if call in FWD_BWD_CALLS or call is Call.STAGE_FWD_BWD:
            batch = BatchRef(step=send.step, index=send.index, digest=send.digest)
        key = CallKey(run_id=RUN, incarnation=INCARNATION, epoch=self._epoch, seq=send.seq)
        work = Work(
            compile_spec=CompileSpec(rows=2, tokens_per_row=64, fields=()), data_cursor=data_cursor
        )
        outcome = self._worker.call(key, Request(call=call, batch=batch), work)
        if isinstance(outcome, Refusal):
            return Answer(event=Refused(reason=outcome.reason, message=outcome.message))
        if outcome.error is not None:
            return Answer(event=Raised(message=outcome.error.message))
        return self._answer(outcome)

    def _answer(self, outcome: CallResult) -> Answer:
        waits = outcome.idle_wait_seconds
        return Answer(
            event=Done(
                update_applied=outcome.applied,
                idle_wait_seconds=statistics.median(waits) if waits else 0.0,
            ),
            used_staged_input=outcome.used_staged_input,
            stage_seconds=-1.0,
            train_step=outcome.state.train_step,
            dropless_replays=outcome.dropless_replays,
        )

    def _view(self) -> WorkerView:
        session = self._worker.snapshot().session
        return WorkerView(
            state=session.step,
            incarnation=INCARNATION,
            epoch=session.epoch,
            last_seq=session.last_seq,
            compiled=session.compiled,
        )

    def _metrics(self, step: int) -> Answer:
        kept = self._worker.metrics(RUN, self._epoch, step)
        if isinstance(kept, Refusal):
            return Answer(event=Refused(reason=kept.reason, message=kept.message))
        values = kept.pending.result()
        self._worker.watcher.await_update(step, 0.0)
        facts = self._worker.watcher.facts(step)
        found = StepFacts(
            step=step,
            train_step=kept.train_step,
            applied=kept.applied,
            values=values,
            boundary_idle_seconds=facts.idle_seconds,
            device_wait_seconds=facts.device_wait_seconds,
            stage_seconds=facts.stage_seconds,
        )
        return Answer(
            event=Done(
                stage_seconds=facts.stage_seconds, device_wait_seconds=facts.device_wait_seconds
            ),
            metrics=(found,),
            train_step=kept.train_step,
        )

    def in_flight(self) -> int:
        return 0  # One thread: nothing becomes ready while it would wait.

    def read_metrics(self, from_step: int, count: int) -> tuple[StepFacts, ...]:
        del count
        return self._metrics(from_step).metrics


@dataclass(kw_only=True)
class Listener:
    """Keeps notes, states and call lines."""

    notes: list[Note]
    lines: list[str]
    latched: bool = False

    def on_call(self, record: TraceRecord, answer: Answer) -> None:
        del answer
        self.lines.append(f"{record.call} {record.step} {record.index}")

    def on_note(self, note: Note) -> None:
        self.notes.append(note)

    def on_state(self, state: BoundaryState) -> None:
        self.latched = state.latched


@dataclass(frozen=True, kw_only=True)
class DirectRun:
    records: tuple[StepRecord, ...]
    idle: tuple[float, ...]  # Of each boundary, exact.
    digest: str
    listener: Listener
    seconds: float  # Virtual.


def run_direct(
    plan: RunPlan,
    config: TimedConfig,
    *,
    micro_batches: int = 3,
    late: frozenset[int] = frozenset(),
) -> DirectRun:
    """One run on a virtual clock."""
    clock = VirtualClock()
    store = DirectStore()
    parts = create_timed(config, clock)
    worker = Worker(
        parts=parts,
        store=store,
        watcher=InlineWatcher(hears=config.heard_s, clock=clock),
        clock=clock,
        incarnation=INCARNATION,
    )
    engine = parts.training
    assert isinstance(engine, TimedEngine)
    listener = Listener(notes=[], lines=[])
    shape = SyntheticShape(micro_batches=micro_batches)
    trainer = DirectTrainer(worker, clock)
    runner = Runner(
        run_id=RUN,
        plan=plan,
        trainer=trainer,
        feeder=DirectFeeder(shape, store, late),
        clock=clock,
        observers=(listener,),
    )
    book = runner.run()
    idle = tuple(worker.watcher.facts(step).idle_seconds for step in range(len(book.records()) - 1))
    return DirectRun(
        records=tuple(dataclasses.replace(record) for record in book.records()),
        idle=idle,
        digest=engine.parameter_digest(),
        listener=listener,
        seconds=clock.now(),
    )
