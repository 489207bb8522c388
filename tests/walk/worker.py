"""The worker as a value: the real sessions and step table around a made-up engine.

`deliver(worker, message, how)` is pure: the worker after it, the answer, and the trace records of
what was done. The engine is a chain of what it applied, so a doubled, lost or reordered micro-batch
shows in it whatever the protocol state claims.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from orchestrator.calls import Done, Raised, Refused, WorkerView
from prestage import protocol
from prestage.protocol import (
    CLOSING_CALLS,
    FWD_BWD_CALLS,
    SEQUENCED_CALLS,
    BatchRef,
    Call,
    Reason,
    Refusal,
    Request,
    StepState,
)
from prestage.trace import TraceRecord
from trainer_worker import sessions
from trainer_worker.sessions import CallKey, Join, Replay, SessionState

RUN = "walk"
Reply = Done | Raised | Refused


@dataclass(frozen=True, kw_only=True)
class Message:
    """One request on its way to the worker."""

    call: Call
    step: int = -1
    index: int = -1
    digest: str = ""
    detail: str = ""
    seq: int = 0
    epoch: int = 0
    incarnation: str = ""

    @property
    def request(self) -> Request:
        batch = None
        if self.call in FWD_BWD_CALLS or self.call is Call.STAGE_FWD_BWD:
            batch = BatchRef(step=self.step, index=self.index, digest=self.digest)
        return Request(call=self.call, batch=batch, detail=self.detail)

    def __str__(self) -> str:
        text = self.call.value
        if self.step >= 0:
            text += f" step={self.step}"
        if self.index >= 0:
            text += f" index={self.index}"
        if self.seq:
            text += f" seq={self.seq}"
        return f"{text} epoch={self.epoch}"


class How(enum.Enum):
    """What the engine does with a delivered call."""

    WELL = "well"
    SLOWLY = "slowly"  # Admitted, but not finished before anything else arrives.
    RAISES = "raises"


Applied = tuple[tuple[int, int, str], ...]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Parameters are the chain of everything that was applied."""

    chain: tuple[Applied, ...] = ()  # One entry an update.
    open: Applied = ()
    prepared: tuple[int, int, str] | None = None

    @property
    def train_step(self) -> int:
        return len(self.chain)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One saved position, with the parameters."""

    step: int
    train_step: int
    chain: tuple[Applied, ...]


@dataclass(frozen=True, kw_only=True)
class Worker:
    """The worker process and its disk."""

    session: SessionState[Reply]
    engine: Engine = Engine()
    metrics: tuple[int, ...] = ()  # Closed steps whose metrics are kept.
    pinned: tuple[int, ...] = ()
    device_failed: str = ""  # Found by the next call.
    durable: tuple[Checkpoint, ...] = ()  # On disk.
    saving: Checkpoint | None = None  # Snapshot taken, not durable yet.


def fresh(process: int, *, epoch: int = 0, durable: tuple[Checkpoint, ...] = ()) -> Worker:
    """A worker process that just started, with what its disk holds."""
    return Worker(
        session=SessionState(incarnation=f"w{process}", epoch=epoch),
        durable=durable,
    )


def crashed(worker: Worker, *, save_was_durable: bool) -> Worker:
    """Another process takes the worker's place. The epoch and durable checkpoints survive."""
    durable = _with(worker.durable, worker.saving) if save_was_durable else worker.durable
    process = int(worker.session.incarnation[1:]) + 1
    return fresh(process, epoch=worker.session.epoch, durable=durable)


def _with(durable: tuple[Checkpoint, ...], saving: Checkpoint | None) -> tuple[Checkpoint, ...]:
    if saving is None:
        return durable
    return (*(item for item in durable if item.step != saving.step), saving)


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What a delivered message led to. `reply` None: the worker has not answered."""

    worker: Worker
    reply: Reply | None
    records: tuple[TraceRecord, ...] = ()
    broken: tuple[str, ...] = ()  # Rules that the model itself watches.


@dataclass
class _Desk:
    """Collects the records of one delivery."""

    message: Message
    records: list[TraceRecord] = field(default_factory=list)

    def add(
        self,
        worker_before: Worker,
        worker: Worker,
        outcome: str,
        *,
        staged: bool = False,
        message: Message | None = None,
    ) -> None:
        sent = message or self.message
        self.records.append(
            TraceRecord(
                side="worker",
                call=sent.call.value,
                run_id=RUN,
                epoch=worker.session.epoch if sent.call is Call.OPEN_RUN else sent.epoch,
                seq=sent.seq,
                incarnation=worker.session.incarnation,
                step=sent.step,
                index=sent.index,
                digest=sent.digest,
                used_staged_input=staged,
                phase_before=worker_before.session.step.phase.value,
                phase_after=worker.session.step.phase.value,
                train_step_after=worker.session.step.train_step,
                outcome=outcome,
            )
        )


def view(worker: Worker) -> WorkerView:
    session = worker.session
    return WorkerView(
        state=session.step,
        incarnation=session.incarnation,
        epoch=session.epoch,
        last_seq=session.last_seq,
        compiled=session.compiled,
        durable_step=max((item.step for item in worker.durable), default=-1),
    )


def deliver(worker: Worker, message: Message, how: How = How.WELL) -> Delivery:
    """The message arrives. Pure."""
    desk = _Desk(message)
    if message.call is Call.GET_STATE:  # Answered from a snapshot, whatever runs.
        return Delivery(worker=worker, reply=Done(view=view(worker)))
    broken = _joins(worker, message)
    if broken:
        return Delivery(worker=worker, reply=None, broken=broken)
    worker = _finish_running(worker, desk)
    if message.call in SEQUENCED_CALLS or message.call is Call.OPEN_RUN:
        worker = _find_device_failure(worker)
    if message.call is Call.OPEN_RUN:
        after, reply = _open_run(worker)
    elif message.call in SEQUENCED_CALLS:
        return _sequenced(worker, message, how, desk)
    else:
        after, reply = worker, _read(worker, message)
    desk.add(worker, after, _outcome(reply))
    return Delivery(worker=after, reply=reply, records=tuple(desk.records))


def _outcome(reply: Reply) -> str:
    if isinstance(reply, Refused):
        return reply.reason.value
    return "ok" if isinstance(reply, Done) else Reason.ENGINE_FAILED.value


def _refused(refusal: Refusal) -> Refused:
    return Refused(reason=refusal.reason, message=refusal.message)


def _open_run(worker: Worker) -> tuple[Worker, Reply]:
    opened = sessions.open_run(worker.session, RUN, worker.session.epoch + 1)
    if isinstance(opened, Refusal):
        return worker, _refused(opened)
    worker = replace(worker, session=opened)
    return worker, Done(view=view(worker))


def _read(worker: Worker, message: Message) -> Reply:
    refusal = sessions.fence(worker.session, run_id=RUN, epoch=message.epoch) or protocol.check(
        worker.session.step, Request(call=message.call)
    )
    if refusal is not None:
        return _refused(refusal)
    if message.call is Call.GET_METRICS and message.step not in worker.metrics:
        return Refused(
            reason=Reason.METRICS_NOT_KEPT, message=f"metrics of {message.step} are not kept"
        )
    return Done()


def _key(message: Message) -> CallKey:
    return CallKey(
        run_id=RUN,
        incarnation=message.incarnation,
        epoch=message.epoch,
        seq=message.seq,
        payload_digest=message.request.payload_digest,
    )


def _joins(worker: Worker, message: Message) -> tuple[str, ...]:
    """The same key while its call runs waits for that call; it is not judged anew."""
    session = worker.session
    running = session.running
    if running is None or message.call not in SEQUENCED_CALLS:
        return ()
    same = (message.incarnation, message.epoch, message.seq) == (
        session.incarnation,
        session.epoch,
        session.last_seq,
    ) and running.fingerprint == message.request.fingerprint
    joined = isinstance(sessions.admit(session, _key(message), message.request), Join)
    if joined != same:
        return (
            f"each-call-carried-out-once: {message} {'joined' if joined else 'did not join'}"
            f" {running.fingerprint}",
        )
    return ()


def _finish_running(worker: Worker, desk: _Desk) -> Worker:
    """One device thread: what runs ends before another call begins."""
    running = worker.session.running
    if running is None:
        return worker
    batch = running.batch
    late = Message(
        call=running.call,
        step=-1 if batch is None else batch.step,
        index=-1 if batch is None else batch.index,
        digest="" if batch is None else batch.digest,
        detail=running.detail,
        seq=worker.session.last_seq,
        epoch=worker.session.epoch,
        incarnation=worker.session.incarnation,
    )
    return _execute(worker, late, running, How.WELL, desk)[0]


def _find_device_failure(worker: Worker) -> Worker:
    if not worker.device_failed:
        return worker
    session = sessions.poisoned(worker.session, worker.device_failed)
    engine = replace(worker.engine, prepared=None)
    return replace(worker, session=session, engine=engine, device_failed="")


def _sequenced(worker: Worker, message: Message, how: How, desk: _Desk) -> Delivery:
    session = worker.session
    request = message.request
    admission = sessions.admit(session, _key(message), request)
    assert not isinstance(admission, Join), "what ran has ended before this was judged"
    if isinstance(admission, Replay):
        desk.add(worker, worker, "replayed")
        return Delivery(worker=worker, reply=admission.result, records=tuple(desk.records))
    began = worker
    refusal = admission if isinstance(admission, Refusal) else None
    if refusal is None:
        began = replace(worker, session=sessions.started(session, request))
        refusal = _cannot(worker, request)
        if refusal is not None:  # Found when it had begun, before anything changed.
            worker = replace(began, session=sessions.withdrawn(began.session))
    if refusal is not None:
        desk.add(worker, worker, refusal.reason.value)
        return Delivery(worker=worker, reply=_refused(refusal), records=tuple(desk.records))
    if how is How.SLOWLY:
        return Delivery(worker=began, reply=None, records=tuple(desk.records))
    after, reply = _execute(began, message, request, how, desk)
    return Delivery(worker=after, reply=reply, records=tuple(desk.records))


def _cannot(worker: Worker, request: Request) -> Refusal | None:
    call = request.call
    if (call in FWD_BWD_CALLS or call is Call.STAGE_FWD_BWD) and not worker.session.compiled:
        return Refusal(reason=Reason.NOT_COMPILED, message=f"{call.value} before compile")
    nothing_saved = not worker.durable and worker.saving is None
    if call is Call.RESTORE_CHECKPOINT and nothing_saved:
        return Refusal(reason=Reason.CHECKPOINT_MISSING, message="there is no checkpoint")
    if call is Call.RELEASE_WEIGHT_SYNC and not worker.pinned:
        return Refusal(reason=Reason.VERSION_NOT_PINNED, message="nothing is pinned")
    return None


def _execute(
    worker: Worker, message: Message, request: Request, how: How, desk: _Desk
) -> tuple[Worker, Reply]:
    if how is How.RAISES:
        reply: Reply = Raised(message="the engine raised")
        session = sessions.failed(worker.session, reply, f"{request.call.value} raised")
        after = replace(worker, session=session, engine=replace(worker.engine, prepared=None))
        desk.add(worker, after, Reason.ENGINE_FAILED.value, message=message)
        return after, reply
    staged = request.call in FWD_BWD_CALLS and worker.engine.prepared is not None
    after, step = _work(worker, request)
    reply = Done()
    if request.call is Call.RESTORE_CHECKPOINT:
        seen = replace(after, session=replace(after.session, step=step))
        reply = Done(view=view(seen))
        message = replace(message, step=step.step)
    after = replace(after, session=sessions.committed(after.session, reply, step))
    desk.add(worker, after, "ok", staged=staged, message=message)
    return after, reply


def _work(worker: Worker, request: Request) -> tuple[Worker, StepState]:
    """What the engine does for an admitted call, and the protocol state after it."""
    call, state, engine = request.call, worker.session.step, worker.engine
    if call is Call.RESTORE_CHECKPOINT:
        return _restore(worker)
    step = protocol.advance(state, request)
    if call in FWD_BWD_CALLS:
        assert request.batch is not None
        batch = (request.batch.step, request.batch.index, request.batch.digest)
        # The engine computes what was prepared for it.
        engine = replace(engine, open=(*engine.open, engine.prepared or batch), prepared=None)
    elif call is Call.STAGE_FWD_BWD:
        assert request.batch is not None
        prepared = (request.batch.step, request.batch.index, request.batch.digest)
        engine = replace(engine, prepared=prepared)
    elif call is Call.ABORT_STEP:
        engine = replace(engine, open=(), prepared=None)
    elif call is Call.COMPILE:
        worker = replace(worker, session=replace(worker.session, compiled=True))
    elif call is Call.SAVE_CHECKPOINT:
        # One save at a time: the one before is durable by now.
        snapshot = Checkpoint(step=state.step, train_step=state.train_step, chain=engine.chain)
        durable = _with(worker.durable, worker.saving)
        worker = replace(worker, durable=durable, saving=snapshot)
    elif call is Call.PREPARE_WEIGHT_SYNC:
        worker = replace(worker, pinned=(*worker.pinned, state.train_step))
    elif call is Call.RELEASE_WEIGHT_SYNC:
        worker = replace(worker, pinned=())
    if call in CLOSING_CALLS:
        engine = replace(engine, chain=(*engine.chain, engine.open), open=())
        worker = replace(worker, metrics=(*worker.metrics, state.step))
    return replace(worker, engine=engine), step


def _restore(worker: Worker) -> tuple[Worker, StepState]:
    durable = _with(worker.durable, worker.saving)
    newest = max(durable, key=lambda item: item.step)
    state = protocol.restored(worker.session.step, step=newest.step, train_step=newest.train_step)
    restored = replace(
        worker, engine=Engine(chain=newest.chain), metrics=(), durable=durable, saving=None
    )
    return restored, state
