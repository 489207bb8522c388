"""The step boundary: a pure state machine from events to the next action.

`advance(state, event) -> (state, action)`. At most one trainer call is outstanding, so the state
holds everything: what the trainer's protocol state must be (a mirror, moved by the same table that
the worker refuses by), which micro-batches are ready, what a closed step still owes, and the latch.
No clock, socket, thread or array here: the live runner, the simulator, the frozen sequences and the
exhaustive walk all drive this one function.

How a lost call is settled. A timeout, a cancel or a broken connection says nothing about whether
the worker carried the call out. The state is read; then

- another incarnation: the run is opened again, and the worker's position decides;
- the call was admitted: the same key is sent again, which returns (or joins) the first result;
- it was not, and it is a stage: staging latches off, and the next call takes the seq of the stage,
  so that a stage that is still on its way is refused when it arrives; if it arrives before that call
  after all, the call is refused (its key is used), the stage counts as done and the call goes again;
- it was not, and it is anything else: the same key is sent again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Final

from orchestrator.calls import (
    Action,
    Await,
    Done,
    Event,
    Fail,
    Finish,
    GaveUp,
    Local,
    LocalDone,
    LocalKind,
    Lost,
    Note,
    NoteKind,
    PutRefused,
    Raised,
    Ready,
    Refused,
    Send,
    SourceEnded,
    Start,
    WorkerView,
)
from orchestrator.plan import Duty, Ineligible, RunPlan
from prestage.protocol import (
    CLOSING_CALLS,
    FWD_BWD_CALLS,
    SEQUENCED_CALLS,
    BatchRef,
    Call,
    Phase,
    Reason,
    Request,
    StepState,
)
from prestage.protocol import advance as protocol_advance
from prestage.protocol import check as protocol_check

# ---------------------------------------------------------------------------------------------
# State.


class Mode(enum.Enum):
    CONNECT = "connect"  # Open the run, compile, take up the worker's position.
    RUN = "run"
    SETTLE = "settle"  # A call was lost: read the state.
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class BoundaryState:
    """Everything the orchestrator knows at a point of the run."""

    plan: RunPlan
    mode: Mode = Mode.CONNECT
    mirror: StepState = field(default_factory=StepState)
    incarnation: str = ""
    epoch: int = 0
    next_seq: int = 1
    compiled: bool = False
    ready: tuple[Ready, ...] = ()  # Of the open and the next step, in order.
    packing: int = -1  # The newest step whose packing was started.
    clocked: int = -1  # The newest step whose clock was started.
    scored: int = -1  # The newest step with trainer-computed log-probs.
    owed: tuple[Duty, ...] = ()  # What the closed step `mirror.step - 1` still owes.
    unbooked: tuple[int, ...] = ()  # Closed steps whose bookkeeping is still to do, oldest first.
    latched: bool = False
    hid_nothing: int = 0  # Boundaries in a row whose stage hid nothing.
    idle_wait_seconds: float = 0.0
    stage_decided: int = -1  # The newest step whose boundary's stage was decided on.
    must_open: bool = True  # Open the run (a new epoch) before anything else.
    must_restore: bool = False  # The worker's weights are not this run's position: restore.
    outstanding: Send | Local | None = None
    lost: Send | None = None  # The call being settled.
    given_up: Send | None = None  # A lost, unseen stage whose seq the next call takes.
    put_refused: str = ""  # Why the worker did not take bytes that are waited for; asked about.
    failure: str = ""
    notes: tuple[Note, ...] = ()  # Of the last event only.

    @property
    def step(self) -> int:
        return self.mirror.step


FRESH: Final = -1


def initial(plan: RunPlan) -> BoundaryState:
    """The state before anything happened."""
    return BoundaryState(plan=plan)


def advance(state: BoundaryState, event: Event) -> tuple[BoundaryState, Action]:
    """Take in one event and say what to do next.

    Raises `ValueError` for an event that cannot happen in this state (a bug of the runner).
    """
    state = _take(replace(state, notes=()), event)
    if state.outstanding is not None and isinstance(event, Ready | SourceEnded | PutRefused):
        return state, Await(step=state.outstanding.step, index=-1)
    return _decide(state)


# ---------------------------------------------------------------------------------------------
# Events in.


def _note(state: BoundaryState, kind: NoteKind, step: int, text: str) -> BoundaryState:
    return replace(state, notes=(*state.notes, Note(kind=kind, step=step, text=text)))


def _take(state: BoundaryState, event: Event) -> BoundaryState:
    if state.mode in (Mode.FAILED, Mode.FINISHED):
        return replace(state, outstanding=None)  # What still comes in changes nothing.
    match event:
        case Start():
            return state
        case Ready():
            return _on_ready(state, event)
        case SourceEnded(step=step):
            if step < 1:
                return _failed(state, "the source has no data, not even for step 0")
            return replace(state, plan=replace(state.plan, num_steps=step))
        case PutRefused(why=why):
            return replace(state, put_refused=why)
        case GaveUp(why=why):
            return _failed(replace(state, outstanding=None), why)
        case LocalDone():
            if not isinstance(state.outstanding, Local):
                raise ValueError(f"LocalDone without a local action ({state.outstanding})")
            return _on_local_done(replace(state, outstanding=None), state.outstanding)
        case Done() | Lost() | Refused() | Raised():
            sent = state.outstanding
            if not isinstance(sent, Send):
                raise ValueError(f"{type(event).__name__} without an outstanding call")
            state = replace(state, outstanding=None)
            if isinstance(event, Done):
                return _on_done(state, sent, event)
            if isinstance(event, Lost):
                return _on_lost(state, sent)
            if isinstance(event, Refused):
                return _on_refused(state, sent, event)
            return _failed(state, f"{sent.line}: the engine raised: {event.message}")


def _failed(state: BoundaryState, why: str) -> BoundaryState:
    return replace(state, mode=Mode.FAILED, failure=why)


def _on_ready(state: BoundaryState, event: Ready) -> BoundaryState:
    if event.step < state.mirror.step or event in state.ready:
        return state  # Of a step that closed meanwhile, or put again.
    kept = tuple(r for r in state.ready if (r.step, r.index) != (event.step, event.index))
    return replace(state, ready=tuple(sorted((*kept, event), key=lambda r: (r.step, r.index))))


def _on_local_done(state: BoundaryState, local: Local) -> BoundaryState:
    match local.kind:
        case LocalKind.PACK:
            return replace(state, packing=local.step)
        case LocalKind.CLOCK:
            return replace(state, clocked=local.step)
        case LocalKind.BOOKKEEPING:
            return replace(state, unbooked=state.unbooked[1:])
        case LocalKind.SCORE:
            return replace(state, scored=local.step)


def _request(sent: Send) -> Request:
    batch = None
    if sent.call in FWD_BWD_CALLS or sent.call is Call.STAGE_FWD_BWD:
        batch = BatchRef(step=sent.step, index=sent.index, digest=sent.digest)
    return Request(call=sent.call, batch=batch)


def _on_done(state: BoundaryState, sent: Send, done: Done) -> BoundaryState:
    if sent.seq:
        state = replace(state, next_seq=max(state.next_seq, sent.seq + 1), given_up=None)
    match sent.call:
        case Call.OPEN_RUN:
            assert done.view is not None
            return _on_opened(state, done.view)
        case Call.GET_STATE:
            assert done.view is not None
            return _on_settled(state, done.view)
        case Call.COMPILE:
            return replace(state, compiled=True, idle_wait_seconds=done.idle_wait_seconds)
        case Call.RESTORE_CHECKPOINT:
            assert done.view is not None
            return _at_position(replace(state, must_restore=False), done.view.state)
        case Call.ABORT_STEP:
            mirror = protocol_advance(state.mirror, _request(sent))
            return replace(state, mirror=mirror)
        case Call.GET_METRICS:
            return _paid(_judge_stage(state, sent.step, done), Duty.GET_METRICS)
        case Call.SAVE_CHECKPOINT:
            return _paid(state, Duty.SAVE_CHECKPOINT)
        case Call.RELEASE_WEIGHT_SYNC:
            return _paid(state, Duty.RELEASE_WEIGHT_SYNC)
        case Call.PREPARE_WEIGHT_SYNC:
            return _paid(state, Duty.PREPARE_WEIGHT_SYNC)
        case Call.EVALUATE:
            return _paid(state, Duty.EVALUATE)
        case _:
            return _on_trained(state, sent, done)


def _paid(state: BoundaryState, duty: Duty) -> BoundaryState:
    return replace(state, owed=tuple(owed for owed in state.owed if owed is not duty))


def _on_trained(state: BoundaryState, sent: Send, done: Done) -> BoundaryState:
    mirror = protocol_advance(state.mirror, _request(sent), applied=done.update_applied)
    state = replace(state, mirror=mirror)
    if sent.call in CLOSING_CALLS:
        closed = mirror.step - 1
        state = replace(
            state,
            owed=state.plan.duties(closed),
            unbooked=(*state.unbooked, closed),
            ready=tuple(r for r in state.ready if r.step >= mirror.step),
        )
    return state


def _judge_stage(state: BoundaryState, step: int, done: Done) -> BoundaryState:
    """The latch: staging turns itself off when stages hide nothing against the idle baseline."""
    if done.device_wait_seconds < 0:
        return state
    hidden = done.device_wait_seconds - state.idle_wait_seconds
    if hidden >= state.plan.latch_hidden_seconds:
        return replace(state, hid_nothing=0)
    state = replace(state, hid_nothing=state.hid_nothing + 1)
    state = _note(
        state,
        NoteKind.STAGE_OUTLASTED,
        step,
        f"the stage after step {step} took {done.stage_seconds:.3f} s and the device was already"
        f" idle (waited {done.device_wait_seconds:.3f} s, idle baseline"
        f" {state.idle_wait_seconds:.3f} s): "
        + (
            "the update waited for the stage"
            if state.plan.stage_before_update
            else "it hid nothing"
        ),
    )
    if state.hid_nothing >= state.plan.latch_after and not state.latched:
        state = _latch(
            state,
            NoteKind.LATCHED_NOTHING_HIDDEN,
            step,
            f"staging is off for the rest of the run: {state.hid_nothing} stages in a row hid less"
            f" than {state.plan.latch_hidden_seconds} s against the idle device's baseline",
        )
    return state


def _latch(state: BoundaryState, kind: NoteKind, step: int, text: str) -> BoundaryState:
    return _note(replace(state, latched=True), kind, step, text)


def _on_lost(state: BoundaryState, sent: Send) -> BoundaryState:
    if sent.call is Call.OPEN_RUN:
        return replace(state, mode=Mode.CONNECT)
    if sent.call not in SEQUENCED_CALLS and sent.call is not Call.GET_STATE:
        return state  # A read: it is simply made again.
    if sent.call is Call.GET_STATE:
        return replace(state, mode=Mode.SETTLE)
    return replace(state, mode=Mode.SETTLE, lost=sent)


def _on_settled(state: BoundaryState, view: WorkerView) -> BoundaryState:
    lost = state.lost
    if view.incarnation != state.incarnation:
        return _reconnect(state)
    if view.epoch != state.epoch:
        return _failed(
            state,
            f"another orchestrator opened epoch {view.epoch} of this run (ours is {state.epoch}):"
            " this one is fenced off and ends",
        )
    state = replace(state, mode=Mode.CONNECT)
    if lost is None:
        return _on_put_settled(state, view)
    if lost.call is Call.STAGE_FWD_BWD:
        state = _latch(
            state,
            NoteKind.STAGE_LOST,
            lost.step - 1,
            f"the stage of micro-batch ({lost.step}, 0) failed on its way:"
            " staging is off for the rest of the run",
        )
        if view.last_seq < lost.seq:
            # Unseen: the next call takes its seq.
            return replace(state, lost=None, given_up=lost)
    return _note(
        state, NoteKind.RESENT, lost.step, f"{lost.line} (seq {lost.seq}) is sent again, same key"
    )


def _on_put_settled(state: BoundaryState, view: WorkerView) -> BoundaryState:
    """The worker was asked why it refused bytes: its step failed, or they are put again."""
    why, state = state.put_refused, replace(state, put_refused="")
    if view.state.phase is Phase.FAILED:
        return _failed(state, f"step {view.state.step} failed: {view.state.failure}")
    step = state.mirror.step
    state = _note(
        state, NoteKind.RESENT, step, f"step {step} is put again, as the worker is well now: {why}"
    )
    return replace(state, ready=(), packing=step - 1)


def _reconnect(state: BoundaryState) -> BoundaryState:
    """The worker is another process now: all that it held is gone."""
    state = _note(
        state,
        NoteKind.WORKER_RESTARTED,
        state.mirror.step,
        f"the worker restarted (it was incarnation {state.incarnation}): its open step is lost",
    )
    return replace(
        state,
        mode=Mode.CONNECT,
        lost=None,
        put_refused="",
        ready=(),
        packing=FRESH,
        compiled=False,
        must_open=True,
        must_restore=True,
    )


def _on_opened(state: BoundaryState, view: WorkerView) -> BoundaryState:
    restarted = bool(state.incarnation) and view.incarnation != state.incarnation
    if restarted and not state.must_restore:
        state = _reconnect(state)
    state = replace(
        state,
        incarnation=view.incarnation,
        epoch=view.epoch,
        next_seq=1,
        must_open=False,
        compiled=view.compiled,
        idle_wait_seconds=view.idle_wait_seconds,
        lost=None,
        given_up=None,
    )
    if view.durable_step > view.state.step:
        # A new worker process: the run's position is its newest checkpoint, whoever asks.
        state = replace(state, must_restore=True)
    if view.state.phase is Phase.FAILED or state.must_restore:
        # Nothing is assumed about what the worker holds until it aborted or restored.
        return replace(
            state,
            mirror=view.state,
            must_restore=state.must_restore or view.state.parameters_suspect,
        )
    return _at_position(state, view.state)


def _at_position(state: BoundaryState, worker: StepState) -> BoundaryState:
    """Go on from where the worker stands."""
    closed = worker.step - 1
    moved_back = worker.step < state.mirror.step or state.packing == FRESH
    owed: tuple[Duty, ...] = ()
    if closed >= 0 and worker.phase is Phase.CLOSED:
        # What a closed step owed may have been done by an earlier process. All of it can be done
        # again: metrics are read by cursor and a re-save of a committed step is a no-op.
        owed = state.plan.duties(closed)
    elif closed >= 0 and worker.phase is Phase.ACCUMULATING and state.plan.pipeline:
        owed = (Duty.GET_METRICS,)  # Zero-gap order may not have read them yet.
    return replace(
        state,
        mirror=worker,
        owed=owed,
        unbooked=(closed,) if owed else (),
        ready=() if moved_back else tuple(r for r in state.ready if r.step >= worker.step),
        packing=worker.step - 1 if moved_back else state.packing,
        scored=min(state.scored, worker.step - 1),
        stage_decided=min(state.stage_decided, worker.step - 1),
    )


_SKIP_ON_REFUSAL: Final = {
    Call.GET_METRICS: (Reason.METRICS_NOT_KEPT, Duty.GET_METRICS),
    Call.RELEASE_WEIGHT_SYNC: (Reason.VERSION_NOT_PINNED, Duty.RELEASE_WEIGHT_SYNC),
}


def _on_refused(state: BoundaryState, sent: Send, event: Refused) -> BoundaryState:
    reason = event.reason
    if reason in (Reason.STALE_INCARNATION, Reason.NO_RUN):
        return _reconnect(state)
    late_stage = state.given_up
    if late_stage is not None and reason is Reason.KEY_REUSED and sent.seq == late_stage.seq:
        return _on_late_stage(state, late_stage)
    if sent.call is Call.STAGE_FWD_BWD and reason is Reason.STAGING_MEMORY:
        return _latch(
            replace(state, lost=None, mode=Mode.RUN),
            NoteKind.STAGE_REFUSED,
            sent.step - 1,
            f"staging is off for the rest of the run: {event.message}",
        )
    if sent.call is Call.RESTORE_CHECKPOINT and reason is Reason.CHECKPOINT_MISSING:
        return _on_no_checkpoint(state)
    skip = _SKIP_ON_REFUSAL.get(sent.call)
    if skip is not None and skip[0] is reason:
        return _paid(_note(state, NoteKind.METRICS_LOST, sent.step, event.message), skip[1])
    return _failed(state, f"{sent.line} was refused: {reason.value}: {event.message}")


def _on_late_stage(state: BoundaryState, stage: Send) -> BoundaryState:
    """A stage that was given up arrived before the call that was to take its seq."""
    state = _note(
        state,
        NoteKind.STAGE_ARRIVED,
        stage.step - 1,
        f"the stage of micro-batch ({stage.step}, 0) arrived late: it is used, and the call that"
        " had taken its seq is sent with the next one",
    )
    return replace(
        state,
        mirror=protocol_advance(state.mirror, _request(stage)),
        next_seq=stage.seq + 1,
        given_up=None,
    )


def _on_no_checkpoint(state: BoundaryState) -> BoundaryState:
    worker = state.mirror
    if worker.phase is not Phase.CLOSED or worker.step or worker.train_step:
        return _failed(
            state,
            "the worker holds no checkpoint and its weights are not the initial ones: restart it"
            " (it then begins at step 0), or give it the folder with this run's checkpoints",
        )
    state = _note(
        replace(state, must_restore=False),
        NoteKind.RESTARTED_FROM_SCRATCH,
        0,
        "the restarted worker has no checkpoint: the run is replayed from step 0",
    )
    return _at_position(replace(state, packing=FRESH), worker)


# ---------------------------------------------------------------------------------------------
# Decisions out.


def _send(state: BoundaryState, sent: Send) -> tuple[BoundaryState, Action]:
    if sent.call in SEQUENCED_CALLS and not sent.resend:
        sent = replace(sent, seq=state.next_seq)
    return replace(state, outstanding=sent), sent


def _local(state: BoundaryState, kind: LocalKind, step: int) -> tuple[BoundaryState, Action]:
    local = Local(kind=kind, step=step)
    return replace(state, outstanding=local), local


def _decide(state: BoundaryState) -> tuple[BoundaryState, Action]:
    if state.mode is Mode.FAILED:
        return state, Fail(why=state.failure)
    if state.mode is Mode.FINISHED:
        return state, Finish()
    if state.mode is Mode.SETTLE:
        return _send(state, Send(call=Call.GET_STATE))
    if state.lost is not None:
        lost = state.lost
        return _send(replace(state, lost=None), replace(lost, resend=True))
    if state.mode is Mode.CONNECT:
        return _connect(state)
    return _run(state)


def _connect(state: BoundaryState) -> tuple[BoundaryState, Action]:
    if state.must_open:
        return _send(state, Send(call=Call.OPEN_RUN))
    if state.must_restore:
        return _send(state, Send(call=Call.RESTORE_CHECKPOINT))
    if state.mirror.phase is Phase.FAILED:
        state = _note(
            state,
            NoteKind.ABORTED,
            state.mirror.step,
            f"step {state.mirror.step} had failed ({state.mirror.failure}): it is aborted and"
            " trained again",
        )
        return _send(replace(state, packing=FRESH), Send(call=Call.ABORT_STEP))
    if not state.compiled:
        return _send(state, Send(call=Call.COMPILE))
    if state.packing == FRESH:
        state = _at_position(state, state.mirror)
    return _run(replace(state, mode=Mode.RUN))


def _find(state: BoundaryState, step: int, index: int) -> Ready | None:
    for ready in state.ready:
        if (ready.step, ready.index) == (step, index):
            return ready
    return None


def _run(state: BoundaryState) -> tuple[BoundaryState, Action]:
    ahead = _pack_ahead(state)
    if ahead is not None:
        return _local(state, LocalKind.PACK, ahead)
    match state.mirror.phase:
        case Phase.UPDATE_DEFERRED:
            return _deferred(state)
        case Phase.ACCUMULATING:
            return _accumulating(state)
        case Phase.CLOSED:
            return _closed(state)
        case Phase.FAILED:
            return _decide(_failed(state, state.mirror.failure or "the step failed"))


def _pack_ahead(state: BoundaryState) -> int | None:
    """The next step, once the open step is packed whole: its bytes travel while this one trains."""
    step = state.mirror.step
    if not state.plan.pipeline or state.packing != step or step + 1 >= state.plan.num_steps:
        return None
    whole = any(ready.step == step and ready.last for ready in state.ready)
    return step + 1 if whole else None


def _deferred(state: BoundaryState) -> tuple[BoundaryState, Action]:
    """Step k's update is held back: stage (k + 1, 0) once, if it is ready, then apply."""
    step = state.mirror.step
    if state.mirror.staged is None and state.stage_decided < step and not state.latched:
        state = replace(state, stage_decided=step)
        ready = _find(state, step + 1, 0)
        if ready is not None and state.plan.staging_refused(step, latched=False) is None:
            return _send(
                state,
                Send(call=Call.STAGE_FWD_BWD, step=step + 1, index=0, digest=ready.digest),
            )
        state = _late(state, step)
    if state.unbooked:
        return _local(state, LocalKind.BOOKKEEPING, state.unbooked[0])
    return _send(state, Send(call=Call.APPLY_DEFERRED_UPDATE, step=step))


def _late(state: BoundaryState, step: int) -> BoundaryState:
    return _note(
        state,
        NoteKind.LATE,
        step,
        f"step {step + 1}'s first micro-batch was not ready in time: step {step}'s update is"
        " applied without waiting and nothing is staged",
    )


def _accumulating(state: BoundaryState) -> tuple[BoundaryState, Action]:
    step = state.mirror.step
    if state.owed:  # Zero-gap order: the step before still owes its metrics.
        return _pay(state, step - 1)
    if state.unbooked:
        return _local(state, LocalKind.BOOKKEEPING, state.unbooked[0])
    if step >= state.plan.num_steps:
        state = _note(
            state,
            NoteKind.ABORTED,
            step,
            f"the source ended before step {step} was whole: what was trained of it is dropped, and"
            f" the run ends with step {step - 1}",
        )
        return _send(state, Send(call=Call.ABORT_STEP))
    for done, ref in enumerate(state.mirror.trained):
        ready = _find(state, step, done)
        if ready is not None and ready.digest != ref.digest:
            state = _note(
                state,
                NoteKind.ABORTED,
                step,
                f"micro-batch ({step}, {done}) was trained with digest {ref.digest}, but is packed"
                f" with {ready.digest} now: the step is aborted and trained again",
            )
            return _send(state, Send(call=Call.ABORT_STEP))
    if state.packing < step:
        return _local(state, LocalKind.PACK, step)
    if state.plan.trainer_logprobs and state.scored < step:
        # Taken up within a step: its weights are those that it began with.
        return _local(state, LocalKind.SCORE, step)
    return _train(state, step, state.mirror.micro_step)


def _closed(state: BoundaryState) -> tuple[BoundaryState, Action]:
    step = state.mirror.step
    if step > 0 and not state.plan.stage_before_update:
        staged_after = _stage_after_update(state, step)
        if isinstance(staged_after, Send):
            return _send(replace(state, stage_decided=step - 1), staged_after)
        state = staged_after
    if len(state.unbooked) > 1:
        return _local(state, LocalKind.BOOKKEEPING, state.unbooked[0])
    if state.owed and not _dispatch_first(state, step):
        return _pay(state, step - 1)
    return _next_step(state, step)


def _stage_after_update(state: BoundaryState, step: int) -> BoundaryState | Send:
    """--nostage_before_update: the stage follows the update, before anything else."""
    boundary = step - 1
    if state.stage_decided >= boundary or state.mirror.staged is not None:
        return state
    if state.plan.staging_refused(boundary, latched=state.latched) is not None:
        return state
    ready = _find(state, step, 0)
    if ready is None:
        return _late(replace(state, stage_decided=boundary), boundary)
    return Send(call=Call.STAGE_FWD_BWD, step=step, index=0, digest=ready.digest)


def _dispatch_first(state: BoundaryState, step: int) -> bool:
    """Zero-gap order: the staged micro-batch goes before step k's metrics.

    Only when the metrics are all that step k owes, and the micro-batch does not end its step:
    metrics cannot be read while an update is deferred.
    """
    if not state.plan.dispatch_before_metrics or state.mirror.staged is None:
        return False
    ready = _find(state, step, 0)
    return state.owed == (Duty.GET_METRICS,) and ready is not None and not ready.last


def _pay(state: BoundaryState, step: int) -> tuple[BoundaryState, Action]:
    duty = state.owed[0]
    call = Call(duty.value)
    about = state.plan.synced_before(step) if duty is Duty.RELEASE_WEIGHT_SYNC else step
    return _send(state, Send(call=call, step=about))


def _next_step(state: BoundaryState, step: int) -> tuple[BoundaryState, Action]:
    over = step >= state.plan.num_steps
    first = None if over else _find(state, step, 0)
    needs_scores = state.plan.trainer_logprobs and state.scored < step
    book_first = over or not state.plan.pipeline or first is None or needs_scores
    if book_first and state.unbooked:
        return _local(state, LocalKind.BOOKKEEPING, state.unbooked[0])
    if over:
        return _decide(replace(state, mode=Mode.FINISHED))
    if state.clocked < step:
        return _local(state, LocalKind.CLOCK, step)
    if state.packing < step:
        return _local(state, LocalKind.PACK, step)
    if needs_scores:
        return _local(state, LocalKind.SCORE, step)
    return _train(state, step, 0)


def _train(state: BoundaryState, step: int, index: int) -> tuple[BoundaryState, Action]:
    ready = _find(state, step, index)
    if ready is None and state.put_refused:
        # It will not become ready, and no call of ours is due that would learn why.
        return _decide(replace(state, mode=Mode.SETTLE))
    if ready is None:
        return state, Await(step=step, index=index)
    call = Call.FWD_BWD
    if ready.last:
        call = Call.FWD_BWD_APPLY
        why_not = state.plan.staging_refused(step, latched=state.latched)
        if why_not is None and state.plan.stage_before_update:
            call = Call.FWD_BWD_DEFER
        elif why_not not in (None, Ineligible.SWITCH_OFF, Ineligible.LATCHED):
            state = _note(
                state,
                NoteKind.INELIGIBLE,
                step,
                f"the boundary after step {step} is not staged: {why_not.value}",
            )
    sent = Send(call=call, step=step, index=index, digest=ready.digest)
    refusal = protocol_check(state.mirror, _request(sent))
    if refusal is not None:
        return _decide(_failed(state, f"planned an illegal call: {refusal.message}"))
    return _send(state, sent)
