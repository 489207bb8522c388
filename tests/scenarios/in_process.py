"""A scenario's worker: the real `Worker` around the `timed` engine on a virtual clock. No gRPC.

Every call's record goes through the checker of histories, as the service would write it.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.bench.synthetic import SyntheticShape, make_batch
from orchestrator.calls import Done, Raised, Refused, Send, WorkerView
from orchestrator.invariants import FROM_SCRATCH, Expectation, Ledger, new_process, observe
from prestage.microbatch import MicroBatch
from prestage.protocol import FWD_BWD_CALLS, BatchRef, Call, Refusal, Request
from prestage.trace import TraceRecord
from tests.scenarios.play import Key, Reply
from tests.scenarios.script import Scenario
from trainer_worker.clock import VirtualClock
from trainer_worker.engine import CompileSpec, EngineError, EngineParts, PreparedInput, UpdateResult
from trainer_worker.engines.timed import TimedConfig, TimedEngine
from trainer_worker.sessions import CallKey
from trainer_worker.watcher import InlineWatcher
from trainer_worker.worker import BatchMissing, CallResult, Work, Worker

RUN = "scenario"


class FailingEngine(TimedEngine):
    """Raises once, in the next thing it is asked for, when it is told to."""

    fails = False

    def _maybe(self) -> None:
        if self.fails:
            self.fails = False
            raise EngineError("planned failure")

    def prepare_fwd_bwd_input(self, batch: MicroBatch):  # type: ignore[no-untyped-def]
        self._maybe()
        return super().prepare_fwd_bwd_input(batch)

    def fwd_bwd(self, prepared: PreparedInput):  # type: ignore[no-untyped-def]
        self._maybe()
        return super().fwd_bwd(prepared)

    def update(self) -> UpdateResult:
        self._maybe()
        return super().update()


@dataclass
class Store:
    """Put micro-batches, by id and digest."""

    batches: dict[BatchRef, MicroBatch] = field(default_factory=dict)

    def get(self, ref: BatchRef) -> MicroBatch:
        if ref not in self.batches:
            raise BatchMissing(f"{ref} is not here")
        return self.batches[ref]

    def release(self, ref: BatchRef) -> None:
        self.batches.pop(ref, None)

    def release_before(self, step: int) -> None:
        self.batches = {ref: item for ref, item in self.batches.items() if ref.step >= step}

    def clear(self) -> None:
        self.batches.clear()

    def stored(self) -> tuple[tuple[BatchRef, ...], int, int]:
        return tuple(self.batches), 0, 0


@dataclass
class WorkerBackend:
    """The real worker, one process after another."""

    scenario: Scenario
    expected_digest: str
    ledger: Ledger = FROM_SCRATCH
    found: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ps-")
        self._shape = SyntheticShape(micro_batches=self.scenario.micro_batches)
        self._epoch = 0
        self._process = 0
        self._start()

    def _start(self) -> None:
        self._process += 1
        clock = VirtualClock()
        self._engine = FailingEngine(TimedConfig(), clock, Path(self._folder.name))
        self._store = Store()
        self._worker = Worker(
            parts=EngineParts(
                training=self._engine,
                scoring=self._engine,
                checkpoint=self._engine,
                weights=self._engine,
            ),
            store=self._store,
            watcher=InlineWatcher(),
            clock=clock,
            incarnation=f"w{self._process}",
            first_epoch=self._epoch,
        )
        self.ledger = new_process(self.ledger, f"w{self._process}")

    # -- Backend --------------------------------------------------------------------------------------

    def put(self, step: int, index: int, key: Key) -> str:
        batch = make_batch(self._shape, RUN, step, index)
        self._store.batches[BatchRef(step=step, index=index, digest=batch.digest)] = batch
        return batch.digest

    def call(self, send: Send, key: Key, *, raises: bool = False) -> Reply:
        self._engine.fails = raises
        if send.call is Call.GET_STATE:
            return Done(view=self._view())
        if send.call is Call.OPEN_RUN:
            self._epoch += 1
            opened = self._worker.open_run(RUN, self._epoch)
            if isinstance(opened, Refusal):
                return Refused(reason=opened.reason, message=opened.message)
            return Done(view=self._view())
        if send.call is Call.GET_METRICS:
            return self._metrics(send, key)
        return self._sequenced(send, key)

    def _metrics(self, send: Send, key: Key) -> Reply:
        kept = self._worker.metrics(RUN, key.epoch, send.step)
        if isinstance(kept, Refusal):
            return Refused(reason=kept.reason, message=kept.message)
        count = kept.pending.result()["micro_batches"]
        if count != self.scenario.micro_batches:
            self.found.append(f"metrics of step {send.step} count {count:g} micro-batches")
        return Done()

    def _sequenced(self, send: Send, key: Key) -> Reply:
        batch = None
        if send.call in FWD_BWD_CALLS or send.call is Call.STAGE_FWD_BWD:
            batch = BatchRef(step=send.step, index=send.index, digest=send.digest)
        request = Request(call=send.call, batch=batch)
        before = self._worker.snapshot().session
        result = self._worker.call(
            CallKey(run_id=RUN, incarnation=key.incarnation, epoch=key.epoch, seq=send.seq),
            request,
            Work(compile_spec=CompileSpec(rows=2, tokens_per_row=64, fields=())),
        )
        after = self._worker.snapshot().session
        if isinstance(result, Refusal):
            outcome = result.reason.value
            if after != before:
                self.found.append(f"a-refusal-changes-nothing: {outcome} changed the worker")
        elif result.error is not None:
            outcome = result.error.reason.value
        else:
            outcome = "ok" if after.last_seq != before.last_seq else "replayed"
        self._observe(send, key, before.step.phase.value, outcome, result)
        if isinstance(result, Refusal):
            return Refused(reason=result.reason, message=result.message)
        if result.error is not None:
            return Raised(message=result.error.message)
        view = self._view() if send.call is Call.RESTORE_CHECKPOINT else None
        return Done(view=view, update_applied=result.applied)

    def _observe(
        self, send: Send, key: Key, phase_before: str, outcome: str, result: CallResult | Refusal
    ) -> None:
        step = self._worker.snapshot().session.step
        record = TraceRecord(
            side="worker",
            call=send.call.value,
            run_id=RUN,
            epoch=key.epoch,
            seq=send.seq,
            incarnation=key.incarnation,
            step=send.step,
            index=send.index,
            digest=send.digest,
            used_staged_input=isinstance(result, CallResult) and result.used_staged_input,
            phase_before=phase_before,
            phase_after=step.phase.value,
            train_step_after=step.train_step,
            outcome=outcome,
        )
        expect = Expectation(
            plan=self.scenario.plan,
            micro_batches=self.scenario.micro_batches,
            may_skip_updates=False,
        )
        self.ledger, violations = observe(self.ledger, record, expect)
        self.found.extend(str(item) for item in violations)

    def _view(self) -> WorkerView:
        snapshot = self._worker.snapshot()
        session = snapshot.session
        return WorkerView(
            state=session.step,
            incarnation=session.incarnation,
            epoch=session.epoch,
            last_seq=session.last_seq,
            compiled=session.compiled,
            durable_step=snapshot.durable_step,
        )

    def crash(self) -> None:
        self._start()

    def new_caller(self) -> None:
        return

    def parameters_are_right(self, num_steps: int, micro_batches: int) -> bool:
        del num_steps, micro_batches
        return self._engine.parameter_digest() == self.expected_digest

    def broken(self) -> list[str]:
        return self.found


def undisturbed(scenario: Scenario) -> str:
    """The parameters of a plain run of the same steps, from an engine of its own."""
    engine = TimedEngine(TimedConfig(), VirtualClock())
    shape = SyntheticShape(micro_batches=scenario.micro_batches)
    for step in range(scenario.steps_trained):
        for index in range(scenario.micro_batches):
            engine.fwd_bwd(engine.prepare_fwd_bwd_input(make_batch(shape, RUN, step, index)))
        engine.update()
    return engine.parameter_digest()
