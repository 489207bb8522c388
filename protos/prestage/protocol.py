"""The step protocol: one table of every legal move, and the pure functions that read it.

The worker refuses by this table and the orchestrator plans by it; the docs' state diagram, the
conformance suite and the tests are generated from it. Standard library only: no clock, no socket.

How to read it. `TABLE[call][phase]` is the phase after the call, or the `Reason` it is refused for.
What a phase cannot say is a guard, checked in this order after the table:

1. identity: a FwdBwd names (`step`, `micro_step`); a stage names (`step` + 1, 0) while the update is
   deferred and (`step`, 0) when the step is closed;
2. staging: nothing may be staged already when a stage or a compile comes, and with something staged
   the next FwdBwd must be exactly that micro-batch;
3. suspicion: after a failure inside an update or a restore the parameters are suspect and AbortStep
   is refused; only RestoreCheckpoint (or a restart) leaves that state.

A refusal changes nothing. Only `advance` and `fail` make a new state.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final


class Phase(enum.Enum):
    """Where the open step stands."""

    CLOSED = "CLOSED"
    ACCUMULATING = "ACCUMULATING"
    UPDATE_DEFERRED = "UPDATE_DEFERRED"
    FAILED = "FAILED"


class Lifecycle(enum.Enum):
    """Where the worker process stands, around the phases."""

    STARTING = "STARTING"
    COMPILING = "COMPILING"
    SERVING = "SERVING"
    DRAINING = "DRAINING"


class Call(enum.Enum):
    """Every call of the protocol. The three FwdBwd forms are separate moves of one rpc."""

    PUT_MICRO_BATCH = "put_micro_batch"
    FWD_BWD = "fwd_bwd"
    FWD_BWD_APPLY = "fwd_bwd apply_optimizer"
    FWD_BWD_DEFER = "fwd_bwd apply_optimizer defer_update"
    STAGE_FWD_BWD = "stage_fwd_bwd"
    APPLY_DEFERRED_UPDATE = "apply_deferred_update"
    UPDATE = "update"
    GET_METRICS = "get_metrics"
    SAVE_CHECKPOINT = "save_checkpoint"
    PREPARE_WEIGHT_SYNC = "prepare_weight_sync"
    COMPUTE_LOGPROBS = "compute_logprobs"
    EVALUATE = "evaluate"
    RESTORE_CHECKPOINT = "restore_checkpoint"
    ABORT_STEP = "abort_step"
    OPEN_RUN = "open_run"
    GET_STATE = "get_state"
    GET_CAPABILITIES = "get_capabilities"
    HEALTH = "health"
    COMPILE = "compile"
    EXPORT_WEIGHTS = "export_weights"
    RELEASE_WEIGHT_SYNC = "release_weight_sync"


class Reason(enum.Enum):
    """Why the worker refused or failed a call: `google.rpc.ErrorInfo.reason`, domain `prestage`."""

    # Refused by the table (FAILED_PRECONDITION).
    UPDATE_DEFERRED = "UPDATE_DEFERRED"
    STEP_OPEN = "STEP_OPEN"
    STEP_FAILED = "STEP_FAILED"
    NOTHING_DEFERRED = "NOTHING_DEFERRED"
    NOTHING_ACCUMULATED = "NOTHING_ACCUMULATED"
    # Refused by a guard (FAILED_PRECONDITION).
    WRONG_MICRO_BATCH = "WRONG_MICRO_BATCH"
    STAGED_MISMATCH = "STAGED_MISMATCH"
    ALREADY_STAGED = "ALREADY_STAGED"
    PARAMETERS_SUSPECT = "PARAMETERS_SUSPECT"
    STAGING_MEMORY = "STAGING_MEMORY"
    WEIGHT_SYNC_MEMORY = "WEIGHT_SYNC_MEMORY"
    UPDATE_FUSED = "UPDATE_FUSED"
    CAPABILITY_MISSING = "CAPABILITY_MISSING"
    NOT_COMPILED = "NOT_COMPILED"
    METRICS_NOT_KEPT = "METRICS_NOT_KEPT"
    VERSION_NOT_PINNED = "VERSION_NOT_PINNED"
    CHECKPOINT_FAILED = "CHECKPOINT_FAILED"
    STARTING = "STARTING"
    DRAINING = "DRAINING"
    TOO_MANY_UPLOADS = "TOO_MANY_UPLOADS"
    TOO_MANY_STREAMS = "TOO_MANY_STREAMS"
    UPLOAD_SILENT = "UPLOAD_SILENT"
    EPOCH_NOT_DURABLE = "EPOCH_NOT_DURABLE"
    # Refused by the session.
    NO_RUN = "NO_RUN"
    WRONG_RUN = "WRONG_RUN"
    STALE_EPOCH = "STALE_EPOCH"
    STALE_INCARNATION = "STALE_INCARNATION"
    RESULT_EXPIRED = "RESULT_EXPIRED"
    SEQUENCE_GAP = "SEQUENCE_GAP"  # OUT_OF_RANGE
    KEY_REUSED = "KEY_REUSED"  # ALREADY_EXISTS
    # Refused before the call is looked at.
    UNAUTHENTICATED = "UNAUTHENTICATED"  # UNAUTHENTICATED
    PERMISSION_DENIED = "PERMISSION_DENIED"  # PERMISSION_DENIED
    # Payloads.
    MICRO_BATCH_MISSING = "MICRO_BATCH_MISSING"  # NOT_FOUND
    CHECKPOINT_MISSING = "CHECKPOINT_MISSING"  # NOT_FOUND
    DIGEST_MISMATCH = "DIGEST_MISMATCH"  # DATA_LOSS
    INVALID_BATCH = "INVALID_BATCH"  # INVALID_ARGUMENT
    INVALID_REQUEST = "INVALID_REQUEST"  # INVALID_ARGUMENT
    # The engine raised (ABORTED).
    ENGINE_FAILED = "ENGINE_FAILED"


_C, _A, _D, _F = Phase.CLOSED, Phase.ACCUMULATING, Phase.UPDATE_DEFERRED, Phase.FAILED
_OPEN, _DEFERRED, _FAILED = Reason.STEP_OPEN, Reason.UPDATE_DEFERRED, Reason.STEP_FAILED

Cell = Phase | Reason


def _row(closed: Cell, accumulating: Cell, deferred: Cell, failed: Cell) -> Mapping[Phase, Cell]:
    return MappingProxyType({_C: closed, _A: accumulating, _D: deferred, _F: failed})


_ALWAYS = _row(_C, _A, _D, _F)

TABLE: Final[Mapping[Call, Mapping[Phase, Cell]]] = MappingProxyType(
    {
        #                                CLOSED      ACCUMULATING  UPDATE_DEFERRED  FAILED
        Call.PUT_MICRO_BATCH: _row(_C, _A, _D, _FAILED),
        Call.FWD_BWD: _row(_A, _A, _DEFERRED, _FAILED),
        Call.FWD_BWD_APPLY: _row(_C, _C, _DEFERRED, _FAILED),
        Call.FWD_BWD_DEFER: _row(_D, _D, _DEFERRED, _FAILED),
        Call.STAGE_FWD_BWD: _row(_C, _OPEN, _D, _FAILED),
        Call.APPLY_DEFERRED_UPDATE: _row(
            Reason.NOTHING_DEFERRED, Reason.NOTHING_DEFERRED, _C, _FAILED
        ),
        Call.UPDATE: _row(Reason.NOTHING_ACCUMULATED, _C, _DEFERRED, _FAILED),
        Call.GET_METRICS: _row(_C, _A, _DEFERRED, _FAILED),
        Call.SAVE_CHECKPOINT: _row(_C, _OPEN, _DEFERRED, _FAILED),
        Call.PREPARE_WEIGHT_SYNC: _row(_C, _OPEN, _DEFERRED, _FAILED),
        Call.COMPUTE_LOGPROBS: _row(_C, _A, _DEFERRED, _FAILED),
        Call.EVALUATE: _row(_C, _A, _DEFERRED, _FAILED),
        Call.RESTORE_CHECKPOINT: _row(_C, _C, _C, _C),
        Call.ABORT_STEP: _row(_C, _C, _C, _C),
        Call.OPEN_RUN: _ALWAYS,
        Call.GET_STATE: _ALWAYS,
        Call.GET_CAPABILITIES: _ALWAYS,
        Call.HEALTH: _ALWAYS,
        Call.COMPILE: _row(_C, _OPEN, _DEFERRED, _FAILED),
        Call.EXPORT_WEIGHTS: _row(_C, _A, _D, _FAILED),
        Call.RELEASE_WEIGHT_SYNC: _row(_C, _A, _D, _FAILED),
    }
)

FWD_BWD_CALLS: Final = frozenset({Call.FWD_BWD, Call.FWD_BWD_APPLY, Call.FWD_BWD_DEFER})
# Calls that end an optimizer step: `step` moves, and `train_step` unless the update was skipped.
CLOSING_CALLS: Final = frozenset({Call.FWD_BWD_APPLY, Call.APPLY_DEFERRED_UPDATE, Call.UPDATE})
# Calls that carry (run_id, incarnation, epoch, seq): each is executed exactly once.
SEQUENCED_CALLS: Final = frozenset(
    {
        *FWD_BWD_CALLS,
        Call.STAGE_FWD_BWD,
        Call.APPLY_DEFERRED_UPDATE,
        Call.UPDATE,
        Call.SAVE_CHECKPOINT,
        Call.PREPARE_WEIGHT_SYNC,
        Call.RELEASE_WEIGHT_SYNC,
        Call.RESTORE_CHECKPOINT,
        Call.ABORT_STEP,
        Call.COMPILE,
    }
)
# Calls that are answered whatever the lifecycle.
ALWAYS_CALLS: Final = frozenset({Call.OPEN_RUN, Call.GET_STATE, Call.GET_CAPABILITIES, Call.HEALTH})
# Calls that read a micro-batch.
BATCH_CALLS: Final = frozenset(
    {*FWD_BWD_CALLS, Call.STAGE_FWD_BWD, Call.COMPUTE_LOGPROBS, Call.EVALUATE}
)


@dataclass(frozen=True, kw_only=True, order=True)
class BatchRef:
    """One micro-batch as the protocol sees it. `digest`: hex content digest."""

    step: int
    index: int
    digest: str

    def __str__(self) -> str:
        return f"({self.step}, {self.index}) digest {self.digest or 'none'}"


@dataclass(frozen=True, kw_only=True)
class StepState:
    """The worker's protocol state. A value: calls make new ones."""

    phase: Phase = Phase.CLOSED
    step: int = 0  # The open or next step: steps closed so far.
    micro_step: int = 0  # Micro-batches of the open step that were accepted.
    train_step: int = 0  # Updates applied = policy version.
    staged: BatchRef | None = None
    trained: tuple[BatchRef, ...] = ()  # The open step's micro-batches, in order.
    parameters_suspect: bool = False
    failure: str = ""  # Why the phase is FAILED.


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call as the protocol sees it. `batch` for BATCH_CALLS, `step` for a restore target."""

    call: Call
    batch: BatchRef | None = None
    detail: str = ""  # Canonical text of further arguments; part of the fingerprint only.

    @property
    def fingerprint(self) -> str:
        """Canonical text: two requests are the same payload exactly when these are equal."""
        text = self.call.value
        if self.batch is not None:
            text += f" step={self.batch.step} index={self.batch.index} digest={self.batch.digest}"
        if self.detail:
            text += f" {self.detail}"
        return text

    @property
    def payload_digest(self) -> str:
        """Hex BLAKE2b-128 of the fingerprint; what `CallKey.payload_digest` carries."""
        return hashlib.blake2b(self.fingerprint.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a call is refused, in words for a person, and what would be allowed."""

    reason: Reason
    message: str
    allowed: tuple[Call, ...] = ()


_WHY: Final[Mapping[Reason, str]] = MappingProxyType(
    {
        Reason.UPDATE_DEFERRED: "the update of step {step} is deferred: apply or abort it first",
        Reason.STEP_OPEN: "step {step} is open with {micro_step} micro-batch(es): close or abort it",
        Reason.STEP_FAILED: "step {step} failed ({failure}): abort the step or restore a checkpoint",
        Reason.NOTHING_DEFERRED: "no update is deferred (phase {phase})",
        Reason.NOTHING_ACCUMULATED: "step {step} has accumulated nothing: an empty update is refused",
    }
)


def allowed_calls(phase: Phase) -> tuple[Call, ...]:
    """Calls that the table lets through in this phase, in table order."""
    return tuple(call for call in Call if isinstance(TABLE[call][phase], Phase))


def _refuse(state: StepState, reason: Reason, message: str) -> Refusal:
    return Refusal(reason=reason, message=message, allowed=allowed_calls(state.phase))


def expected_batch(state: StepState, call: Call) -> tuple[int, int] | None:
    """(step, index) that a FwdBwd or StageFwdBwd must name now; None for other calls."""
    if call in FWD_BWD_CALLS:
        return state.step, state.micro_step
    if call is Call.STAGE_FWD_BWD:
        return (state.step + 1 if state.phase is Phase.UPDATE_DEFERRED else state.step), 0
    return None


def check(state: StepState, request: Request) -> Refusal | None:
    """Judge one call. None: legal. Pure; changes nothing."""
    call = request.call
    cell = TABLE[call][state.phase]
    if isinstance(cell, Reason):
        why = _WHY[cell].format(
            step=state.step,
            micro_step=state.micro_step,
            failure=state.failure,
            phase=state.phase.value,
        )
        return _refuse(state, cell, f"{call.value} refused: {why}")
    if call is Call.ABORT_STEP and state.parameters_suspect:
        return _refuse(
            state,
            Reason.PARAMETERS_SUSPECT,
            f"abort_step refused: {state.failure}; the parameters are suspect, so only"
            " restore_checkpoint (or a restart of the worker) leaves this state",
        )
    expected = expected_batch(state, call)
    if expected is not None:
        if request.batch is None:
            return _refuse(state, Reason.INVALID_REQUEST, f"{call.value} names no micro-batch")
        named = (request.batch.step, request.batch.index)
        if named != expected:
            return _refuse(
                state,
                Reason.WRONG_MICRO_BATCH,
                f"{call.value} names micro-batch {named}, but {expected} is next"
                f" (step {state.step}, micro_step {state.micro_step}, {state.phase.value})",
            )
    if state.staged is not None:
        if call in (Call.STAGE_FWD_BWD, Call.COMPILE):
            return _refuse(
                state,
                Reason.ALREADY_STAGED,
                f"{call.value} refused: micro-batch {state.staged} is staged already",
            )
        if call in FWD_BWD_CALLS and request.batch != state.staged:
            return _refuse(
                state,
                Reason.STAGED_MISMATCH,
                f"{call.value} names micro-batch {request.batch}, but {state.staged} is staged:"
                " the next fwd_bwd must be the staged one (abort_step drops it)",
            )
    return None


def advance(state: StepState, request: Request, *, applied: bool = True) -> StepState:
    """The state after a legal call that the engine carried out.

    `applied`: for closing calls, False when the update was skipped (summed denominator 0): the
    step closes, `train_step` stays. Raises ValueError for a refused call, and for
    RestoreCheckpoint, whose position comes from the checkpoint (`restored`).
    """
    refusal = check(state, request)
    if refusal is not None:
        raise ValueError(f"advance: {refusal.message}")
    call = request.call
    if call is Call.RESTORE_CHECKPOINT:
        raise ValueError("advance: a restore's position comes from the checkpoint: use restored()")
    cell = TABLE[call][state.phase]
    assert isinstance(cell, Phase)
    if call in FWD_BWD_CALLS:
        assert request.batch is not None
        state = replace(
            state,
            micro_step=state.micro_step + 1,
            trained=(*state.trained, request.batch),
            staged=None,
        )
    elif call is Call.STAGE_FWD_BWD:
        state = replace(state, staged=request.batch)
    elif call is Call.ABORT_STEP:
        return replace(state, phase=Phase.CLOSED, micro_step=0, trained=(), staged=None, failure="")
    if call in CLOSING_CALLS:
        state = replace(
            state,
            step=state.step + 1,
            micro_step=0,
            trained=(),
            train_step=state.train_step + (1 if applied else 0),
        )
    return replace(state, phase=cell)


def restored(state: StepState, *, step: int, train_step: int) -> StepState:
    """The state after a checkpoint of (`step`, `train_step`) was loaded."""
    del state  # Nothing of the state before a restore survives it.
    return StepState(step=step, train_step=train_step)


def fail(state: StepState, request: Request | None, why: str) -> StepState:
    """The state after the engine raised inside `request` (None: later, on the device).

    The open step is poisoned. After a failure inside an update or a restore the parameters are
    suspect too; a device failure found later is reported with the call that it happened in.
    """
    suspect = request is not None and (
        request.call in CLOSING_CALLS or request.call is Call.RESTORE_CHECKPOINT
    )
    return replace(
        state,
        phase=Phase.FAILED,
        staged=None,
        parameters_suspect=state.parameters_suspect or suspect,
        failure=why,
    )
