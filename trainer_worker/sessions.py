"""Sessions: which call of which caller is carried out, answered again, or refused. Pure.

One run is open at a time. OpenRun gives its caller a new epoch, which fences off every earlier
one. A sequenced call is carried out once: its key (incarnation, epoch, seq) is remembered with the
payload's fingerprint and the first result. Standard library and the protocol table only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, Generic, TypeVar

from prestage import protocol
from prestage.protocol import Reason, Refusal, Request, StepState, allowed_calls

ResultT = TypeVar("ResultT")

RESULTS_KEPT: Final = 16
"""A caller has one call outstanding; the newest result is enough, a few more cost nothing."""


@dataclass(frozen=True, kw_only=True)
class CallKey:
    """Identifies one sequenced call. `payload_digest` is `Request.payload_digest`, or empty."""

    run_id: str
    incarnation: str
    epoch: int
    seq: int
    payload_digest: str = ""


@dataclass(frozen=True, kw_only=True)
class Remembered(Generic[ResultT]):
    """A sequenced call that was carried out, and what it answered."""

    seq: int
    fingerprint: str
    result: ResultT


@dataclass(frozen=True, kw_only=True)
class SessionState(Generic[ResultT]):
    """The worker's session and protocol state. A value: calls make new ones."""

    incarnation: str
    run_id: str = ""
    epoch: int = 0
    last_seq: int = 0  # Last seq admitted in this epoch.
    running: Request | None = None  # The admitted call with seq `last_seq`, while it runs.
    results: tuple[Remembered[ResultT], ...] = ()  # Oldest first.
    step: StepState = field(default_factory=StepState)
    compiled: bool = False


@dataclass(frozen=True, kw_only=True)
class Replay(Generic[ResultT]):
    """The call was carried out before: answer its first result."""

    result: ResultT


@dataclass(frozen=True, kw_only=True)
class Join:
    """The same call is running: wait for its result."""

    seq: int


@dataclass(frozen=True, kw_only=True)
class Execute:
    """Carry it out, then call `committed` or `failed`."""


Admission = Replay[ResultT] | Join | Refusal | Execute


def _refuse(state: SessionState[ResultT], reason: Reason, message: str) -> Refusal:
    return Refusal(reason=reason, message=message, allowed=allowed_calls(state.step.phase))


def fence(
    state: SessionState[ResultT], *, run_id: str, epoch: int, incarnation: str | None = None
) -> Refusal | None:
    """Judge who calls: the open run, this process, and the newest epoch. None: the right one."""
    if not state.run_id:
        return _refuse(state, Reason.NO_RUN, "no run is open: call open_run first")
    if run_id != state.run_id:
        return _refuse(state, Reason.WRONG_RUN, f"run {run_id!r} is not open; {state.run_id!r} is")
    if incarnation is not None and incarnation != state.incarnation:
        return _refuse(
            state,
            Reason.STALE_INCARNATION,
            f"the call is for incarnation {incarnation!r}, this worker is {state.incarnation!r}:"
            " it restarted, so open the run again",
        )
    if epoch != state.epoch:
        return _refuse(
            state,
            Reason.STALE_EPOCH,
            f"epoch {epoch} is fenced off: another caller opened epoch {state.epoch} of run"
            f" {state.run_id!r}",
        )
    return None


def admit(
    state: SessionState[ResultT], key: CallKey, request: Request
) -> Replay[ResultT] | Join | Refusal | Execute:
    """Judge one sequenced call. Changes nothing; a refusal consumes no seq."""
    refusal = fence(state, run_id=key.run_id, epoch=key.epoch, incarnation=key.incarnation)
    if refusal is not None:
        return refusal
    if key.payload_digest and key.payload_digest != request.payload_digest:
        return _refuse(
            state,
            Reason.DIGEST_MISMATCH,
            f"the call's payload digest is {key.payload_digest}, but its content gives"
            f" {request.payload_digest}: it was damaged, or another version made it",
        )
    if key.seq <= state.last_seq:
        return _seen(state, key, request)
    if key.seq > state.last_seq + 1:
        return _refuse(
            state,
            Reason.SEQUENCE_GAP,
            f"seq {key.seq} came, but {state.last_seq + 1} is next: an earlier call never arrived",
        )
    return protocol.check(state.step, request) or Execute()


def _seen(
    state: SessionState[ResultT], key: CallKey, request: Request
) -> Replay[ResultT] | Join | Refusal:
    running = state.running if key.seq == state.last_seq else None
    if running is not None:
        if running.fingerprint == request.fingerprint:
            return Join(seq=key.seq)
        return _reused(state, key, running.fingerprint, request)
    for remembered in state.results:
        if remembered.seq == key.seq:
            if remembered.fingerprint == request.fingerprint:
                return Replay(result=remembered.result)
            return _reused(state, key, remembered.fingerprint, request)
    return _refuse(
        state,
        Reason.RESULT_EXPIRED if key.seq >= 1 else Reason.INVALID_REQUEST,
        f"seq {key.seq} was carried out, but its result is no longer kept (the last"
        f" {RESULTS_KEPT} are)"
        if key.seq >= 1
        else f"seq is {key.seq}; it counts from 1",
    )


def _reused(state: SessionState[ResultT], key: CallKey, first: str, request: Request) -> Refusal:
    return _refuse(
        state,
        Reason.KEY_REUSED,
        f"seq {key.seq} was used for [{first}] and now comes with [{request.fingerprint}]",
    )


def started(state: SessionState[ResultT], request: Request) -> SessionState[ResultT]:
    """An admitted call begins: it takes its seq."""
    return replace(state, last_seq=state.last_seq + 1, running=request)


def _remember(state: SessionState[ResultT], result: ResultT) -> SessionState[ResultT]:
    assert state.running is not None
    entry = Remembered(seq=state.last_seq, fingerprint=state.running.fingerprint, result=result)
    return replace(state, running=None, results=(*state.results, entry)[-RESULTS_KEPT:])


def committed(
    state: SessionState[ResultT], result: ResultT, step: StepState
) -> SessionState[ResultT]:
    """The running call was carried out; `step` is the protocol state after it."""
    return replace(_remember(state, result), step=step)


def failed(state: SessionState[ResultT], result: ResultT, why: str) -> SessionState[ResultT]:
    """The engine raised in the running call: `result` (the error) is its result for good."""
    assert state.running is not None
    step = protocol.fail(state.step, state.running, why)
    return replace(_remember(state, result), step=step)


def poisoned(state: SessionState[ResultT], why: str) -> SessionState[ResultT]:
    """A dispatched computation failed later, on the device: the open step is lost."""
    return replace(state, step=protocol.fail(state.step, None, why))


def withdrawn(state: SessionState[ResultT]) -> SessionState[ResultT]:
    """The running call turned out to be refusable before anything changed: it gives its seq back."""
    assert state.running is not None
    return replace(state, last_seq=state.last_seq - 1, running=None)


def open_run(
    state: SessionState[ResultT], run_id: str, epoch: int
) -> SessionState[ResultT] | Refusal:
    """A caller takes over: `epoch` must be newer than any before. The step state stays."""
    if epoch <= state.epoch:
        raise ValueError(f"open_run: epoch {epoch} is not newer than {state.epoch}")
    fresh = state.step == StepState()
    if state.run_id and run_id != state.run_id and not fresh:
        return _refuse(
            state,
            Reason.WRONG_RUN,
            f"run {state.run_id!r} is at step {state.step.step} on this worker: to train"
            f" {run_id!r}, start a fresh worker (or use the same run_id to go on)",
        )
    return replace(state, run_id=run_id, epoch=epoch, last_seq=0, running=None, results=())
