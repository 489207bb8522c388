"""The worker: carries out one protocol call at a time against the engine. No gRPC, no threads.

Everything here runs on one thread (the device thread), except `snapshot`, `metrics` and
`weights`, which say that they are safe from any. Judging is `sessions`' and `protocol`'s; this
module does the work between "admitted" and "committed", and refuses what only it can know (bytes
that are missing, memory that is short, an engine that cannot) before anything changed.
"""

from __future__ import annotations

import logging
import statistics
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from prestage.microbatch import MicroBatch
from prestage.protocol import (
    BatchRef,
    Call,
    Phase,
    Reason,
    Refusal,
    Request,
    StepState,
    advance,
    allowed_calls,
    check,
    restored,
)
from trainer_worker import sessions
from trainer_worker.clock import Clock
from trainer_worker.engine import (
    CompileSpec,
    EngineError,
    EngineParts,
    InvalidBatch,
    PendingMetrics,
    PendingSave,
    PreparedInput,
    RunPosition,
    ScoreResult,
    UpdateResult,
)
from trainer_worker.sessions import CallKey, Join, Replay, SessionState
from trainer_worker.watcher import UPDATE, LateFailure, Watcher

log = logging.getLogger("prestage.worker")

METRICS_KEPT: Final = 128


class BatchMissing(Exception):
    """The store holds no micro-batch of this id and digest."""


class BatchDamaged(Exception):
    """The stored bytes do not give the digest they were announced with."""


class BatchStore(Protocol):
    """Put micro-batches, bounded in bytes. Safe from any thread."""

    def get(self, ref: BatchRef) -> MicroBatch:
        """The verified micro-batch. Raises `BatchMissing`, `BatchDamaged`."""
        ...

    def release(self, ref: BatchRef) -> None:
        """Drop the bytes of one micro-batch, if they are there."""
        ...

    def release_before(self, step: int) -> None:
        """Drop the bytes of every step before `step`."""
        ...

    def clear(self) -> None: ...

    def stored(self) -> tuple[tuple[BatchRef, ...], int, int]:
        """(micro-batches, bytes kept, limit in bytes)."""
        ...


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Limits. Bytes."""

    staging_memory_bytes: int = 1 << 30
    weight_sync_memory_bytes: int = 8 << 30


@dataclass(frozen=True, kw_only=True)
class CallError:
    """The engine raised: the call's result for good."""

    reason: Reason
    message: str


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """What a call that was carried out answers. Unused fields keep their defaults."""

    state: StepState = field(default_factory=StepState)
    error: CallError | None = None
    seconds: float = 0.0  # On the device thread.
    dispatch_seconds: float = 0.0  # Of a fwd_bwd: until it was dispatched.
    update_seconds: float = 0.0  # Of an update: of the engine's update() call.
    used_staged_input: bool = False
    applied: bool = True
    updated: bool = False  # The call made an update (or skipped it).
    dropless_replays: int = 0
    device_bytes: int = 0
    programs: int = 0
    idle_wait_seconds: tuple[float, ...] = ()
    position: RunPosition | None = None
    saved_step: int = -1
    version: int = -1


@dataclass(kw_only=True)
class WorkerCounters:
    """Counted for metrics. Monotonic; written by the device thread."""

    updates: int = 0
    skipped_updates: int = 0  # Steps that closed with a summed denominator of 0.
    dropless_replays: int = 0
    moe_dropped_assignments: int = 0  # Left out of gradients that were applied.
    late_failures: int = 0  # Failures that were found after their call was answered.
    engine_failures: int = 0  # Times that the engine raised, late or not.
    warm_up_compiles: int = 0  # Of the backend, up to the end of the last compile call.
    compile_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepSnapshot:
    """A closed step's metrics, taken at its update."""

    step: int
    train_step: int
    applied: bool
    pending: PendingMetrics


@dataclass(frozen=True, kw_only=True)
class WorkerSnapshot:
    """The worker's state at one moment, for GetState."""

    session: SessionState[CallResult]
    durable_step: int
    background_failure: str
    progress_s: float  # Monotonic time of the device thread's last progress.
    backend_compiles: int
    staged_bytes: int  # Device memory of the staged input.
    idle_wait_seconds: float  # Median of a wait on the idle device at warm-up.


class ParametersMoved(EngineError):
    """The engine updated where the protocol has no update: no version names its parameters."""


class Worker:
    """One trainer behind the step protocol."""

    def __init__(
        self,
        *,
        parts: EngineParts,
        store: BatchStore,
        watcher: Watcher,
        clock: Clock,
        incarnation: str,
        config: WorkerConfig | None = None,
        first_epoch: int = 0,
        on_save: Callable[[bool, float], None] = lambda durable, seconds: None,
    ) -> None:
        """`on_save`: hears, on some thread, whether a save became durable, and after how long."""
        self.counters = WorkerCounters()
        self._on_save = on_save
        self._parts = parts
        self._engine = parts.training
        self._store = store
        self._watcher = watcher
        self._clock = clock
        self._config = config or WorkerConfig()
        self._lock = threading.Lock()
        self._saving = threading.Lock()  # Held while a save is made durable.
        self._session: SessionState[CallResult] = SessionState(
            incarnation=incarnation, epoch=first_epoch
        )
        self._staged: PreparedInput | None = None
        self._metrics: OrderedDict[int, StepSnapshot] = OrderedDict()
        self._pinned: dict[int, int] = {}  # Version to bytes.
        self._save: PendingSave | None = None
        self._save_started_s = 0.0
        self._save_failure = ""  # Not reported by a call yet.
        self._background_failure = ""
        self._durable_step = -1
        self._progress_s = clock.now()
        self._idle_wait_s = 0.0
        if parts.checkpoint is not None:
            durable = parts.checkpoint.durable_step()
            self._durable_step = -1 if durable is None else durable

    # -- any thread -------------------------------------------------------------------------------

    def snapshot(self) -> WorkerSnapshot:
        """The state now. Never waits for the device. Safe from any thread."""
        with self._lock:
            session = self._with_late_failures()
            durable, failure = self._durable_step, self._background_failure
            progress_s = self._progress_s
            staged = self._staged
        return WorkerSnapshot(
            session=session,
            durable_step=durable,
            background_failure=failure,
            progress_s=progress_s,
            backend_compiles=self._engine.backend_compiles,
            staged_bytes=0 if staged is None else staged.device_bytes,
            idle_wait_seconds=self._idle_wait_s,
        )

    def metrics(self, run_id: str, epoch: int, from_step: int) -> Refusal | StepSnapshot:
        """One closed step's metrics; `pending.result()` may wait. Safe from any thread."""
        with self._lock:
            session = self._with_late_failures()
            kept = self._metrics.get(from_step)
            steps = list(self._metrics)
        refusal = sessions.fence(session, run_id=run_id, epoch=epoch) or check(
            session.step, Request(call=Call.GET_METRICS)
        )
        if refusal is not None:
            return refusal
        if kept is None:
            known = f"steps {steps[0]} to {steps[-1]} are kept" if steps else "none is kept"
            return Refusal(
                reason=Reason.METRICS_NOT_KEPT,
                message=f"metrics of step {from_step} are not kept: {known}"
                f" (closed so far: {session.step.step})",
                allowed=allowed_calls(session.step.phase),
            )
        return kept

    @property
    def watcher(self) -> Watcher:
        return self._watcher

    @property
    def parts(self) -> EngineParts:
        return self._parts

    @property
    def config(self) -> WorkerConfig:
        return self._config

    def pinned(self, version: int) -> bool:
        with self._lock:
            return version in self._pinned

    def fence(self, run_id: str, epoch: int, request: Request) -> Refusal | None:
        """Judge an unsequenced call. Safe from any thread."""
        with self._lock:
            session = self._with_late_failures()
        return sessions.fence(session, run_id=run_id, epoch=epoch) or check(session.step, request)

    # -- the device thread ------------------------------------------------------------------------

    def open_run(self, run_id: str, epoch: int) -> WorkerSnapshot | Refusal:
        self._take_late_failures()
        opened = sessions.open_run(self._session, run_id, epoch)
        if isinstance(opened, Refusal):
            return opened
        self._become(opened)
        return self.snapshot()

    def call(self, key: CallKey, request: Request, work: Work) -> CallResult | Refusal:
        """Carry out one sequenced call once. `work` holds its arguments."""
        self._take_late_failures()
        admission = sessions.admit(self._session, key, request)
        if isinstance(admission, Replay):
            return admission.result
        if isinstance(admission, Refusal):
            return admission
        assert not isinstance(admission, Join), "one thread: nothing can be running"
        refusal = self._cannot(request, work)
        if refusal is not None:
            return refusal
        self._become(sessions.started(self._session, request))
        started_s = self._clock.now()
        try:
            result = self._carry_out(request, work, started_s)
        except WithdrawnError as error:
            self._become(sessions.withdrawn(self._session))
            return error.refusal
        except EngineError as error:
            suspect = isinstance(error, ParametersMoved)
            return self._engine_failed(request, str(error), suspect=suspect)
        except Exception as error:  # An engine's own exception types end the step all the same.
            log.exception("the engine raised in %s", request.fingerprint)
            return self._engine_failed(request, f"{type(error).__name__}: {error}")
        result = replace(result, seconds=self._clock.now() - started_s)
        self._become(sessions.committed(self._session, result, result.state))
        return result

    def score(
        self, run_id: str, epoch: int, ref: BatchRef, call: Call, *, release: bool = False
    ) -> ScoreResult | Mapping[str, float] | Refusal:
        """ComputeLogprobs and Evaluate: leave accumulation and staged input untouched.

        The micro-batch need not have the fields that training takes: the engine judges it. With
        `release` its bytes are let go once it is answered.
        """
        self._take_late_failures()
        request = Request(call=call, batch=ref)
        refusal = sessions.fence(self._session, run_id=run_id, epoch=epoch) or check(
            self._session.step, request
        )
        if refusal is not None:
            return refusal
        if self._parts.scoring is None:
            return self._refuse(
                Reason.CAPABILITY_MISSING, f"engine {self._name()} cannot {call.value}"
            )
        if not self._session.compiled:
            return self._refuse(Reason.NOT_COMPILED, f"{call.value} before compile")
        batch = self._stored(ref)
        if isinstance(batch, Refusal):
            return batch
        answer: ScoreResult | Mapping[str, float]
        try:
            if call is Call.EVALUATE:
                answer = self._parts.scoring.evaluate(batch)
            else:
                answer = self._parts.scoring.compute_logprobs(batch)
        except InvalidBatch as error:
            return self._refuse(Reason.INVALID_BATCH, str(error))
        except Exception as error:
            return self._read_failed(f"{call.value} of {ref}", error)
        if release:
            self._store.release(ref)
        return answer

    def parameter_digest(self) -> str | Refusal:
        """Waits for the device."""
        try:
            return self._engine.parameter_digest()
        except Exception as error:
            return self._read_failed("parameter_digest", error)

    def _read_failed(self, what: str, error: Exception) -> Refusal:
        """A read found the device broken: the open step is lost with it."""
        why = f"{what}: {type(error).__name__}: {error}"
        log.error("the engine raised in %s", why, exc_info=error)
        self.counters.engine_failures += 1
        self._staged = None
        self._become(sessions.poisoned(self._session, why))
        return self._refuse(Reason.ENGINE_FAILED, why)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Finish the background save, then let go of the device. False: it does not answer."""
        save = self._save
        if save is not None:
            self._wait_save(save)
        if not self._watcher.close(timeout_s):
            return False
        self._engine.close()
        return True

    # -- inside -----------------------------------------------------------------------------------

    def _name(self) -> str:
        return self._engine.capabilities.engine

    def _become(self, session: SessionState[CallResult]) -> None:
        with self._lock:
            self._session = session
            self._progress_s = self._clock.now()

    def _refuse(self, reason: Reason, message: str) -> Refusal:
        return Refusal(
            reason=reason, message=message, allowed=allowed_calls(self._session.step.phase)
        )

    def _with_late_failures(self) -> SessionState[CallResult]:
        """The session as the next call will find it. Holding the lock, or on the device thread."""
        session = self._session
        for failure in self._watcher.failures():
            session = _with_late_failure(session, failure)
        return self._with_loss(session)

    def _with_loss(self, session: SessionState[CallResult]) -> SessionState[CallResult]:
        """An engine that is gone for good fails whatever is open; only a restart helps."""
        lost = self._parts.lost()
        if not lost or (session.step.phase is Phase.FAILED and session.step.parameters_suspect):
            return session
        poisoned = sessions.poisoned(session, lost)
        return replace(poisoned, step=replace(poisoned.step, parameters_suspect=True))

    def _take_late_failures(self) -> None:
        failures = self._watcher.failures()
        session = self._session
        for failure in failures:
            log.error("%s: the step is lost", failure)
            self.counters.late_failures += 1
            self.counters.engine_failures += 1
            session = _with_late_failure(session, failure)
        session = self._with_loss(session)
        if failures or session is not self._session:
            self._staged = None
            self._become(session)
            self._watcher.take(failures)  # After: whoever asks in between must hear of them too.

    def _engine_failed(self, request: Request, why: str, *, suspect: bool = False) -> CallResult:
        self._staged = None
        self.counters.engine_failures += 1
        session = self._session
        failing = f"{request.call.value} of step {session.step.step}: {why}"
        result = CallResult(
            state=session.step, error=CallError(reason=Reason.ENGINE_FAILED, message=failing)
        )
        step = sessions.failed(session, result, failing).step
        if suspect:
            step = replace(step, parameters_suspect=True)
        result = replace(result, state=step)
        self._become(replace(sessions.failed(session, result, failing), step=step))
        return result

    def _stored(self, ref: BatchRef) -> MicroBatch | Refusal:
        try:
            return self._store.get(ref)
        except BatchMissing as error:
            return self._refuse(Reason.MICRO_BATCH_MISSING, str(error))
        except BatchDamaged as error:
            return self._refuse(Reason.DIGEST_MISMATCH, str(error))

    def _fetch(self, ref: BatchRef) -> MicroBatch | Refusal:
        batch = self._stored(ref)
        if isinstance(batch, Refusal):
            return batch
        try:
            self._engine.check(batch)
        except InvalidBatch as error:
            return self._refuse(Reason.INVALID_BATCH, str(error))
        return batch

    def _cannot(self, request: Request, work: Work) -> Refusal | None:
        """What only the worker can refuse, before the call takes its seq."""
        call = request.call
        capabilities = self._engine.capabilities
        if self._save_failure and call not in (Call.ABORT_STEP, Call.RESTORE_CHECKPOINT):
            failure, self._save_failure = self._save_failure, ""
            return self._refuse(Reason.CHECKPOINT_FAILED, failure)
        trains = call in (Call.FWD_BWD, Call.FWD_BWD_APPLY, Call.FWD_BWD_DEFER)
        if (trains or call is Call.STAGE_FWD_BWD) and not self._session.compiled:
            return self._refuse(Reason.NOT_COMPILED, f"{call.value} before compile")
        if call is Call.FWD_BWD_DEFER and not capabilities.can_defer_update:
            return self._refuse(
                Reason.CAPABILITY_MISSING,
                f"engine {self._name()} cannot hold an update back (defer_update)",
            )
        if call is Call.STAGE_FWD_BWD and not capabilities.can_stage:
            return self._refuse(
                Reason.CAPABILITY_MISSING,
                f"engine {self._name()} cannot stage (prepare_fwd_bwd_input)",
            )
        checkpoints = call in (Call.SAVE_CHECKPOINT, Call.RESTORE_CHECKPOINT)
        if checkpoints and self._parts.checkpoint is None:
            return self._refuse(
                Reason.CHECKPOINT_MISSING
                if call is Call.RESTORE_CHECKPOINT
                else Reason.CAPABILITY_MISSING,
                "this worker keeps no checkpoints: start it with --checkpoint_dir",
            )
        weights = call in (Call.PREPARE_WEIGHT_SYNC, Call.RELEASE_WEIGHT_SYNC)
        if weights and self._parts.weights is None:
            return self._refuse(
                Reason.CAPABILITY_MISSING, f"engine {self._name()} cannot export weights"
            )
        if call is Call.RELEASE_WEIGHT_SYNC and work.version and work.version not in self._pinned:
            return self._refuse(
                Reason.VERSION_NOT_PINNED,
                f"version {work.version} is not pinned; pinned: {sorted(self._pinned)}",
            )
        return None

    def _carry_out(self, request: Request, work: Work, started_s: float) -> CallResult:
        match request.call:
            case Call.FWD_BWD | Call.FWD_BWD_APPLY | Call.FWD_BWD_DEFER:
                return self._fwd_bwd(request, started_s)
            case Call.STAGE_FWD_BWD:
                return self._stage(request, started_s)
            case Call.APPLY_DEFERRED_UPDATE | Call.UPDATE:
                return self._update(request)
            case Call.COMPILE:
                return self._compile(work)
            case Call.ABORT_STEP:
                return self._abort(request)
            case Call.SAVE_CHECKPOINT:
                return self._save_checkpoint(request, work)
            case Call.RESTORE_CHECKPOINT:
                return self._restore(work)
            case Call.PREPARE_WEIGHT_SYNC:
                return self._pin(request)
            case Call.RELEASE_WEIGHT_SYNC:
                return self._unpin(request, work)
            case _:
                raise ValueError(f"{request.call.value} is not a sequenced call")

    def _compile(self, work: Work) -> CallResult:
        assert work.compile_spec is not None
        before = self._engine.backend_compiles
        try:
            report = self._engine.compile(work.compile_spec)
        except InvalidBatch as error:
            raise WithdrawnError(self._refuse(Reason.INVALID_REQUEST, str(error))) from error
        first = not self._session.compiled  # What was compiled before it is warm-up too.
        self.counters.warm_up_compiles += self._engine.backend_compiles - (0 if first else before)
        self.counters.compile_seconds += report.seconds
        if report.idle_wait_seconds:
            self._idle_wait_s = statistics.median(report.idle_wait_seconds)
        self._become(replace(self._session, compiled=True))
        return CallResult(
            state=self._session.step,
            programs=report.programs,
            idle_wait_seconds=report.idle_wait_seconds,
        )

    def _need(self, ref: BatchRef) -> MicroBatch:
        batch = self._fetch(ref)
        if isinstance(batch, Refusal):
            raise WithdrawnError(batch)
        return batch

    def _stage(self, request: Request, started_s: float) -> CallResult:
        assert request.batch is not None
        ref = request.batch
        state = self._session.step
        self._guard_fused(state)
        batch = self._need(ref)
        need = self._engine.input_bytes(batch)
        if need > self._config.staging_memory_bytes:
            raise WithdrawnError(
                self._refuse(
                    Reason.STAGING_MEMORY,
                    f"staging micro-batch {ref} takes {need} bytes of device memory; the limit is"
                    f" {self._config.staging_memory_bytes} (--staging_memory_bytes)",
                )
            )
        prepared = self._engine.prepare_fwd_bwd_input(batch)
        self._staged = prepared
        ended_s = self._clock.now()
        self._watcher.copying(ref.step, ref.index, prepared, batch, now_s=started_s)
        boundary = ref.step - 1
        if boundary >= 0:
            self._watcher.staged(boundary, ended_s - started_s, ended_s)
        return CallResult(state=advance(state, request), device_bytes=prepared.device_bytes)

    def _guard_fused(self, state: StepState) -> None:
        if self._engine.train_step != state.train_step:
            raise WithdrawnError(
                self._refuse(
                    Reason.UPDATE_FUSED,
                    f"engine {self._name()} updated inside a fwd_bwd (its train_step is"
                    f" {self._engine.train_step}, {state.train_step} was expected): it cannot"
                    " defer, so run without --stage_next_microbatch",
                )
            )

    def _fwd_bwd(self, request: Request, started_s: float) -> CallResult:
        assert request.batch is not None
        ref, state = request.batch, self._session.step
        prepared, staged = self._staged, True
        if prepared is None or state.staged is None:
            batch = self._need(ref)
            prepared, staged = self._engine.prepare_fwd_bwd_input(batch), False
            self._watcher.copying(ref.step, ref.index, prepared, batch, now_s=started_s)
        self._staged = None
        work = self._engine.fwd_bwd(prepared)
        dispatched_s = self._clock.now()
        self._watcher.computing(ref.step, ref.index, work, now_s=dispatched_s)
        result = CallResult(used_staged_input=staged, dispatch_seconds=dispatched_s - started_s)
        if request.call is Call.FWD_BWD_DEFER and self._engine.train_step != state.train_step:
            raise ParametersMoved(
                f"{Reason.UPDATE_FUSED.value}: engine {self._name()} updated inside its last"
                " fwd_bwd, so no update is left to defer: run without --stage_next_microbatch"
            )
        if request.call is Call.FWD_BWD_APPLY:
            return self._close_step(request, result)
        return replace(result, state=advance(state, request))

    def _update(self, request: Request) -> CallResult:
        if request.call is Call.APPLY_DEFERRED_UPDATE:
            self._guard_fused(self._session.step)
        return self._close_step(request, CallResult())

    def _close_step(self, request: Request, result: CallResult) -> CallResult:
        """Update, and what follows from it; fills in what `result` says of the update."""
        state, started_s = self._session.step, self._clock.now()
        update = self._engine.update()
        ended_s = self._clock.now()
        self._watcher.updating(state.step, update.completion, now_s=ended_s)
        after = advance(state, request, applied=update.applied)
        self._closed(after, update)
        return replace(
            result,
            state=after,
            updated=True,
            applied=update.applied,
            dropless_replays=update.dropless_replays,
            update_seconds=ended_s - started_s,
        )

    def _closed(self, after: StepState, result: UpdateResult) -> None:
        if self._engine.train_step != after.train_step:
            raise EngineError(
                f"the engine's train_step is {self._engine.train_step} after the update, but"
                f" {after.train_step} was expected: an update was lost or doubled"
            )
        closed = after.step - 1
        snapshot = StepSnapshot(
            step=closed,
            train_step=after.train_step,
            applied=result.applied,
            pending=result.metrics,
        )
        self.counters.dropless_replays += result.dropless_replays
        self.counters.moe_dropped_assignments += result.dropped_assignments
        if result.applied:
            self.counters.updates += 1
        else:
            self.counters.skipped_updates += 1
            log.warning("step %d was skipped: its summed denominator is 0", closed)
        with self._lock:
            self._metrics[closed] = snapshot
            self._metrics.move_to_end(closed)
            while len(self._metrics) > METRICS_KEPT:
                self._metrics.popitem(last=False)
        self._store.release_before(after.step)

    def _abort(self, request: Request) -> CallResult:
        self._engine.abort_step()
        self._staged = None
        self._watcher.forget(from_step=self._session.step.step)
        return CallResult(state=advance(self._session.step, request))

    # -- checkpoints ------------------------------------------------------------------------------

    def _save_checkpoint(self, request: Request, work: Work) -> CallResult:
        assert self._parts.checkpoint is not None
        session = self._session
        if self._save is not None:
            self._wait_save(self._save)  # One at a time: the one before must be durable first.
            if self._save_failure:
                failure, self._save_failure = self._save_failure, ""
                raise WithdrawnError(self._refuse(Reason.CHECKPOINT_FAILED, failure))
        position = RunPosition(
            run_id=session.run_id,
            step=session.step.step,
            train_step=session.step.train_step,
            epoch=session.epoch,
            last_seq=session.last_seq,
            data_cursor=work.data_cursor,
        )
        self._save_started_s = self._clock.now()
        save = self._parts.checkpoint.begin_save(position)
        self._save = save
        if work.background is not None:
            work.background(lambda: self._wait_save(save))
        else:
            self._wait_save(save)
        return CallResult(state=advance(session.step, request), saved_step=position.step)

    def _wait_save(self, save: PendingSave) -> None:
        """Make `save` durable (or learn that it failed). Any thread; the second caller waits."""
        with self._saving:
            with self._lock:
                if self._save is not save:
                    return  # Another thread has seen to it.
            why = ""
            try:
                save.wait()
            except Exception as error:
                why = f"the checkpoint of step {save.step} could not be written: {error}"
                log.error("%s", why)
            with self._lock:
                self._save = None
                self._background_failure = why
                if why:
                    self._save_failure = why
                else:
                    self._durable_step = max(self._durable_step, save.step)
            self._on_save(not why, self._clock.now() - self._save_started_s)

    def _restore(self, work: Work) -> CallResult:
        assert self._parts.checkpoint is not None
        if self._save is not None:
            self._wait_save(self._save)
        self._refuse_another_run(self._parts.checkpoint.saved_run(work.restore_step))
        position = self._parts.checkpoint.restore(work.restore_step)
        if position is None:
            wanted = "any step" if work.restore_step is None else f"step {work.restore_step}"
            raise WithdrawnError(
                self._refuse(
                    Reason.CHECKPOINT_MISSING, f"there is no complete checkpoint of {wanted}"
                )
            )
        if position.run_id != self._session.run_id:
            raise EngineError(
                f"the checkpoint is of run {position.run_id!r}, not {self._session.run_id!r}: give"
                " each run a --checkpoint_dir of its own"
            )
        self._staged = None
        self._save_failure = ""
        self._watcher.forget(from_step=0)
        with self._lock:
            self._metrics.clear()
        state = restored(self._session.step, step=position.step, train_step=position.train_step)
        return CallResult(state=state, position=position)

    def _refuse_another_run(self, saved: str | None) -> None:
        """Before anything is loaded, where the engine can tell."""
        if saved is None or saved == self._session.run_id:
            return
        raise WithdrawnError(
            self._refuse(
                Reason.WRONG_RUN,
                f"the checkpoint is of run {saved!r}, not {self._session.run_id!r}: give each run a"
                " --checkpoint_dir of its own, or go on with that run's --run_id",
            )
        )

    # -- weights ----------------------------------------------------------------------------------

    def _pin(self, request: Request) -> CallResult:
        assert self._parts.weights is not None
        state = self._session.step
        version = state.train_step
        others = sum(size for other, size in self._pinned.items() if other != version)
        limit = self._config.weight_sync_memory_bytes
        try:
            pinned = self._parts.weights.prepare_weight_sync(max(0, limit - others))
        except MemoryError as error:
            raise WithdrawnError(
                self._refuse(
                    Reason.WEIGHT_SYNC_MEMORY,
                    f"{error} ({others} of {limit} bytes hold versions that were not released:"
                    " release_weight_sync, or a larger --weight_sync_memory_bytes)",
                )
            ) from error
        with self._lock:
            self._pinned[version] = pinned
        return CallResult(state=advance(state, request), device_bytes=pinned, version=version)

    def _unpin(self, request: Request, work: Work) -> CallResult:
        assert self._parts.weights is not None
        versions = [work.version] if work.version else sorted(self._pinned)
        for version in versions:
            self._parts.weights.release_weight_sync(version)
            with self._lock:
                self._pinned.pop(version, None)
        return CallResult(state=advance(self._session.step, request))


def _with_late_failure(
    session: SessionState[CallResult], failure: LateFailure
) -> SessionState[CallResult]:
    """The open step is lost; the parameters too, if its update was made of it already."""
    step = session.step
    suspect = failure.index == UPDATE or failure.step < step.step
    if step.phase is Phase.FAILED and (step.parameters_suspect or not suspect):
        return session  # What follows from the first failure says nothing new.
    lost = sessions.poisoned(session, str(failure))
    if not suspect:
        return lost
    return replace(lost, step=replace(lost.step, parameters_suspect=True))


class WithdrawnError(Exception):
    """Found refusable before anything changed: the call gives its seq back."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass(frozen=True, kw_only=True)
class Work:
    """Arguments of a sequenced call that the protocol does not judge."""

    compile_spec: CompileSpec | None = None
    data_cursor: str = ""
    restore_step: int | None = None
    version: int = 0  # Weights; 0 = every pinned one.
    background: Callable[[Callable[[], None]], None] | None = None  # Runs a save's end elsewhere.
