"""The gRPC face of the worker. RPC threads parse, hand a job to the device thread, and wait.

Every answer that is not OK carries ErrorInfo; see prestage/wire/errors.py.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, NoReturn, TypeAlias, TypeVar, cast

import grpc
import numpy as np

from prestage.microbatch import FIELDS, MicroBatch
from prestage.protocol import (
    FWD_BWD_CALLS,
    BatchRef,
    Call,
    Lifecycle,
    Reason,
    Refusal,
    Request,
    allowed_calls,
    check,
)
from prestage.state_proto import (
    lifecycle_to_proto,
    ref_from_proto,
    ref_to_proto,
    step_state_into_proto,
)
from prestage.tensor.v1 import tensor_pb2
from prestage.trace import TraceRecord, TraceWriter
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.trainer.v1 import trainer_pb2_grpc as pb_grpc
from prestage.wire.codec import check_run_id
from prestage.wire.errors import (
    REASON_OF_ERROR,
    CodecError,
    DamagedError,
    InvalidTensor,
    LimitError,
    WireError,
    abort_with,
)
from prestage.wire.layout import buffer_bytes_of
from prestage.wire.limits import WireLimits
from prestage.wire.shm_plane import WorkerSlots
from prestage.wire.store import MicroBatchStore, MissingError
from prestage.wire.stream_plane import Part, PutReceiver, parse_part
from prestage.wire.stream_slots import FIRST_S, SILENT_S, StreamSlots
from prestage.wire.validate import check_values
from trainer_worker import sessions
from trainer_worker.clock import Clock
from trainer_worker.device_thread import DeviceThread, Draining
from trainer_worker.engine import CompileSpec, ScoreResult, WeightExportEngine
from trainer_worker.epoch_file import EpochFile, StateFolderError
from trainer_worker.sessions import CallKey
from trainer_worker.worker import (
    BatchDamaged,
    BatchMissing,
    CallResult,
    StepSnapshot,
    Work,
    Worker,
    WorkerSnapshot,
)

log = logging.getLogger("prestage.worker")
T = TypeVar("T")
EXPORT_CHUNK_BYTES: Final = 1 << 20
FACTS_WAIT_S: Final = 5.0
DRAIN_LOOK_S: Final = 0.2
"""How often a drain looks at what the device thread runs."""
_ITEMSIZES: Final[Mapping[str, int]] = {
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "float32": 4,
    "bfloat16": 2,
    "int64": 8,
}
MAX_UPLOADS: Final = 12
"""At a time. Fewer than there are RPC threads: control never waits for bytes."""
MAX_WARM_BUFFERS: Final = 16
LEAST_WARM_BYTES: Final = 16 << 20
"""Fresh memory of less than this is touched soon enough by its first upload."""
PutObserver: TypeAlias = Callable[[str, int], None]
"""Takes the plane and the bytes of an upload that was stored."""
MethodHandler: TypeAlias = "grpc.RpcMethodHandler[object, object]"


class StorePort:
    """`worker.BatchStore` on top of the wire's store."""

    def __init__(self, store: MicroBatchStore) -> None:
        self._store = store

    def get(self, ref: BatchRef) -> MicroBatch:
        try:
            return self._store.get(ref)
        except MissingError as error:
            raise BatchMissing(str(error)) from error
        except DamagedError as error:
            raise BatchDamaged(str(error)) from error

    def release(self, ref: BatchRef) -> None:
        self._store.release(ref)

    def release_before(self, step: int) -> None:
        self._store.release_before(step)

    def clear(self) -> None:
        self._store.clear()

    def stored(self) -> tuple[tuple[BatchRef, ...], int, int]:
        stats = self._store.stats()
        return stats.refs, stats.stored_bytes, stats.limit_bytes


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """What the service tells in its capabilities."""

    staging_memory_bytes: int
    limits: WireLimits
    upload_first_s: float = FIRST_S  # A stream sends its header within this.
    upload_silent_s: float = SILENT_S  # From one message of an upload to the next.


class TrainerService(pb_grpc.TrainerWorkerServicer):
    """One worker behind gRPC."""

    def __init__(
        self,
        *,
        worker: Worker,
        store: MicroBatchStore,
        device: DeviceThread,
        epochs: EpochFile,
        clock: Clock,
        config: ServiceConfig,
        trace: TraceWriter | None = None,
        slots: WorkerSlots | None = None,
        on_put: PutObserver = lambda plane, stored_bytes: None,
    ) -> None:
        """`slots`: the shared-memory plane; None offers streams only. `on_put`: hears of uploads."""
        self._worker = worker
        self._store = store
        self._device = device
        self._epochs = epochs
        self._clock = clock
        self._config = config
        self._trace = trace
        self._on_put = on_put
        self._receiver = PutReceiver(
            store, config.limits, self._check_put, self._validate, shared_memory=slots
        )
        self._slots = slots
        self._compiling = False
        self._draining = False
        self._uploads = StreamSlots(
            MAX_UPLOADS, first_s=config.upload_first_s, silent_s=config.upload_silent_s
        )
        self._backgrounds: set[threading.Thread] = set()

    # -- lifecycle --------------------------------------------------------------------------------

    @property
    def compiling(self) -> bool:
        """Whether a compile runs, also while the worker drains."""
        return self._compiling

    @property
    def busy_with(self) -> str:
        """The call that the device thread runs; empty = none. Safe from any thread."""
        return self._device.busy_with

    @property
    def lifecycle(self) -> Lifecycle:
        if self._draining:
            return Lifecycle.DRAINING
        return Lifecycle.COMPILING if self._compiling else Lifecycle.SERVING

    def drain(self, timeout_s: float, *, abandon_compile: bool = False) -> bool:
        """No new call, finish the running one, make the last checkpoint durable. False: no time.

        `abandon_compile`: return at once while a compile runs, without its end (`compiling` tells).
        Only for a process that exits next: nothing is lost with a compile, and it may take an hour.
        """
        give_up_s = time.monotonic() + timeout_s

        def left_s() -> float:
            return max(0.0, give_up_s - time.monotonic())

        self._draining = True
        while not self._device.drain(min(DRAIN_LOOK_S, left_s())):
            if abandon_compile and self._compiling:
                return True
            if not left_s():
                return False
        backgrounds = list(self._backgrounds)
        for thread in backgrounds:
            thread.join(timeout=left_s())
        if any(thread.is_alive() for thread in backgrounds):
            return False
        return self._worker.close(left_s())

    def _background(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                self._backgrounds.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._backgrounds.add(thread)
        thread.start()

    # -- refusing ---------------------------------------------------------------------------------

    def _metadata(self, allowed: tuple[Call, ...] = ()) -> dict[str, str]:
        step = self._worker.snapshot().session.step
        names = allowed or allowed_calls(step.phase)
        return {
            "phase": step.phase.value,
            "step": str(step.step),
            "micro_step": str(step.micro_step),
            "train_step": str(step.train_step),
            "staged": "" if step.staged is None else str(step.staged),
            "allowed": ", ".join(call.value for call in names),
        }

    def _refuse(self, context: grpc.ServicerContext, refusal: Refusal) -> NoReturn:
        abort_with(context, refusal.reason, refusal.message, self._metadata(refusal.allowed))

    def _invalid(self, context: grpc.ServicerContext, message: str) -> NoReturn:
        abort_with(context, Reason.INVALID_REQUEST, message, self._metadata())

    def _run(
        self,
        context: grpc.ServicerContext,
        name: str,
        work: Callable[[], T],
        *,
        urgent: bool = False,
    ) -> T:
        """Run on the device thread and wait, whatever becomes of the caller."""
        try:
            future: Future[T] = self._device.submit(name, work, urgent=urgent)
        except Draining:
            abort_with(
                context,
                Reason.DRAINING,
                "the worker is shutting down: connect to its successor and open the run again",
                self._metadata(),
            )
        return future.result()

    def _sequenced(
        self,
        context: grpc.ServicerContext,
        proto_key: pb.CallKey,
        request: Request,
        work: Work | None = None,
    ) -> CallResult:
        key = CallKey(
            run_id=proto_key.run_id,
            incarnation=proto_key.incarnation,
            epoch=proto_key.epoch,
            seq=proto_key.seq,
            payload_digest=proto_key.payload_digest,
        )
        outcome = self._run(
            context, request.call.value, lambda: self._traced(key, request, work or Work())
        )
        if isinstance(outcome, Refusal):
            self._refuse(context, outcome)
        if outcome.error is not None:
            abort_with(context, outcome.error.reason, outcome.error.message, self._metadata())
        return outcome

    def _traced(self, key: CallKey, request: Request, work: Work) -> CallResult | Refusal:
        before = self._worker.snapshot().session
        started_s = self._clock.now()
        self._compiling = request.call is Call.COMPILE
        try:
            outcome = self._worker.call(key, request, work)
        finally:
            self._compiling = False
        after = self._worker.snapshot().session
        if isinstance(outcome, Refusal):
            result = outcome.reason.value
        elif after.last_seq == before.last_seq:
            result = "replayed"
        else:
            result = "ok" if outcome.error is None else outcome.error.reason.value
        used_staged = isinstance(outcome, CallResult) and outcome.used_staged_input
        self._write_trace(key, request, result, before, started_s, used_staged=used_staged)
        return outcome

    def _write_trace(
        self,
        key: CallKey,
        request: Request,
        result: str,
        before: sessions.SessionState[CallResult],
        started_s: float,
        *,
        used_staged: bool = False,
    ) -> None:
        """On the device thread, so that lines stand in the order in which calls took effect."""
        if self._trace is None:
            return
        after = self._worker.snapshot().session
        batch = request.batch
        self._trace.write(
            TraceRecord(
                side="worker",
                call=request.call.value,
                run_id=key.run_id,
                epoch=key.epoch,
                seq=key.seq,
                incarnation=key.incarnation,
                step=before.step.step if batch is None else batch.step,
                index=-1 if batch is None else batch.index,
                digest="" if batch is None else batch.digest,
                used_staged_input=used_staged,
                phase_before=before.step.phase.value,
                phase_after=after.step.phase.value,
                train_step_after=after.step.train_step,
                outcome=result,
                started_s=started_s,
                seconds=self._clock.now() - started_s,
            )
        )

    # -- always -----------------------------------------------------------------------------------

    def state(self, snapshot: WorkerSnapshot | None = None) -> pb.WorkerState:
        """The state now (or then); waits for nothing."""
        snapshot = snapshot or self._worker.snapshot()
        session = snapshot.session
        message = pb.WorkerState(
            lifecycle=lifecycle_to_proto(self.lifecycle),
            run_id=session.run_id,
            incarnation=session.incarnation,
            epoch=session.epoch,
            last_seq=session.last_seq,
            durable_step=snapshot.durable_step,
            compiled=session.compiled,
            background_failure=snapshot.background_failure,
            running_call=self._device.busy_with,
            seconds_since_progress=max(0.0, self._clock.now() - snapshot.progress_s),
            backend_compiles=snapshot.backend_compiles,
            idle_wait_seconds=snapshot.idle_wait_seconds,
            in_flight=self._worker.watcher.in_flight(),
        )
        step_state_into_proto(session.step, message)
        stats = self._store.stats()
        message.stored.extend(ref_to_proto(ref) for ref in stats.refs)
        message.stored_bytes = stats.stored_bytes
        message.store_limit_bytes = stats.limit_bytes
        return message

    def GetState(
        self, request: pb.GetStateRequest, context: grpc.ServicerContext
    ) -> pb.GetStateResponse:
        if not request.with_parameter_digest:
            return pb.GetStateResponse(state=self.state())
        digest = self._run(context, "parameter_digest", self._worker.parameter_digest)
        if isinstance(digest, Refusal):
            self._refuse(context, digest)
        state = self.state()
        state.parameter_digest = digest
        return pb.GetStateResponse(state=state)

    def GetCapabilities(
        self, request: pb.GetCapabilitiesRequest, context: grpc.ServicerContext
    ) -> pb.GetCapabilitiesResponse:
        del request, context
        parts = self._worker.parts
        able = parts.training.capabilities
        offer = None if self._slots is None else self._slots.offer
        return pb.GetCapabilitiesResponse(
            engine=able.engine,
            can_stage=able.can_stage,
            can_defer_update=able.can_defer_update,
            can_checkpoint=parts.checkpoint is not None,
            can_export_weights=parts.weights is not None,
            can_score=parts.scoring is not None,
            update_waits_for_device=able.update_waits_for_device,
            reports_drop_audit=able.reports_drop_audit,
            optional_fields=able.optional_fields,
            required_fields=able.required_fields,
            vocab_size=able.vocab_size,
            moe_layers=able.moe_layers,
            top_k=able.top_k,
            num_experts=able.num_experts,
            device_kind=able.device_kind,
            device_count=able.device_count,
            process_count=able.process_count,
            row_multiple=able.row_multiple,
            staging_memory_bytes=self._config.staging_memory_bytes,
            payload_planes=["stream"] if offer is None else ["shared-memory", "stream"],
            shared_memory_folder="" if offer is None else offer.folder,
            shared_memory_nonce="" if offer is None else offer.nonce,
            store_limit_bytes=self._store.stats().limit_bytes,
        )

    def OpenRun(
        self, request: pb.OpenRunRequest, context: grpc.ServicerContext
    ) -> pb.OpenRunResponse:
        try:
            check_run_id(request.run_id)
        except CodecError as error:
            self._invalid(context, str(error))

        opened = self._run(
            context, "open_run", lambda: self._open(request.run_id, context.is_active), urgent=True
        )
        if isinstance(opened, Refusal):
            self._refuse(context, opened)
        # Not the state now: by now the epoch may be another caller's.
        return pb.OpenRunResponse(state=self.state(opened))

    def _open(self, run_id: str, wanted: Callable[[], bool]) -> Refusal | WorkerSnapshot:
        before = self._worker.snapshot().session
        started_s = self._clock.now()
        outcome = self._judged_open(run_id, before, wanted)
        opened = before if isinstance(outcome, Refusal) else outcome.session
        key = CallKey(run_id=run_id, incarnation=opened.incarnation, epoch=opened.epoch, seq=0)
        result = outcome.reason.value if isinstance(outcome, Refusal) else "ok"
        self._write_trace(key, Request(call=Call.OPEN_RUN), result, before, started_s)
        return outcome

    def _judged_open(
        self,
        run_id: str,
        before: sessions.SessionState[CallResult],
        wanted: Callable[[], bool],
    ) -> Refusal | WorkerSnapshot:
        allowed = allowed_calls(before.step.phase)
        if not wanted():
            # Its caller waited for a running call and gave up: it must not fence off a later one.
            why = "open_run: the caller is gone"
            return Refusal(reason=Reason.STALE_EPOCH, message=why, allowed=allowed)
        # Judge first: a refused caller must not fence off the one that trains.
        judged = sessions.open_run(before, run_id, before.epoch + 1)
        if isinstance(judged, Refusal):
            return judged
        try:
            epoch = self._epochs.advance()
        except StateFolderError as error:
            log.error("open_run: %s", error)
            return Refusal(reason=Reason.EPOCH_NOT_DURABLE, message=str(error), allowed=allowed)
        return self._worker.open_run(run_id, epoch)

    # -- the step ---------------------------------------------------------------------------------

    def _batch(self, context: grpc.ServicerContext, message: pb.BatchRef) -> BatchRef:
        if not message.digest:
            self._invalid(context, "the call names no micro-batch (field batch, with its digest)")
        return ref_from_proto(message)

    def Compile(
        self, request: pb.CompileRequest, context: grpc.ServicerContext
    ) -> pb.CompileResponse:
        if request.rows < 1 or request.tokens_per_row < 2:
            self._invalid(
                context,
                f"compile: rows={request.rows} tokens_per_row={request.tokens_per_row};"
                " use at least 1 row of 2 tokens",
            )
        try:
            self._check_shape(request)
        except WireError as error:
            self._invalid(context, f"compile: {error}")
        routing = ",".join(str(size) for size in request.routing_shape)
        fields = tuple(sorted(request.fields))
        detail = (
            f"rows={request.rows} tokens_per_row={request.tokens_per_row}"
            f" fields={','.join(fields)} routing={routing}"
        )
        spec = CompileSpec(rows=request.rows, tokens_per_row=request.tokens_per_row, fields=fields)
        warming = self._warm_buffers(request)
        result = self._sequenced(
            context,
            request.key,
            Request(call=Call.COMPILE, detail=detail),
            Work(compile_spec=spec),
        )
        if warming is not None:
            warming.join()
        return pb.CompileResponse(
            seconds=result.seconds,
            programs=result.programs,
            idle_wait_seconds=result.idle_wait_seconds,
        )

    def _check_shape(self, request: pb.CompileRequest) -> None:
        """Whether such a micro-batch could ever be put here. Raises `WireError`."""
        limits, names = self._config.limits, list(request.fields)
        if request.rows > limits.max_rows or request.tokens_per_row > limits.max_tokens_per_row:
            raise LimitError(
                f"rows={request.rows} tokens_per_row={request.tokens_per_row}; at most"
                f" {limits.max_rows} and {limits.max_tokens_per_row} are taken"
            )
        if len(set(names)) != len(names):
            raise CodecError(f"fields are named twice: {str(sorted(names))[:300]}")
        trailing = {name: tuple(request.routing_shape) for name in names if name in FIELDS}
        for name, shape in trailing.items():
            dims = FIELDS[name].trailing_dims
            trailing[name] = shape if dims else ()
            if dims and (len(shape) != dims or not 1 <= math.prod(shape) <= limits.max_trailing):
                raise LimitError(
                    f"routing_shape is {str(list(shape))[:80]}; {name} has {dims} more axes, with"
                    f" at most {limits.max_trailing} values a token"
                )
        size = buffer_bytes_of(request.rows, request.tokens_per_row, trailing)
        if size > self._store.stats().limit_bytes:
            raise LimitError(
                f"a micro-batch of this shape takes {size} bytes; this worker keeps at most"
                f" {self._store.stats().limit_bytes} (--store_memory_bytes)"
            )

    def _warm_buffers(self, request: pb.CompileRequest) -> threading.Thread | None:
        """Touch the memory of the first uploads beside the compile. None: nothing to gain."""
        fields: dict[str, tuple[int, ...]] = {n: () for n in request.fields if n in FIELDS}
        if "routed_experts" in fields:
            fields["routed_experts"] = tuple(request.routing_shape)
        size = buffer_bytes_of(request.rows, request.tokens_per_row, fields)
        count = min(request.receive_buffers, MAX_WARM_BUFFERS)
        if not count or not LEAST_WARM_BYTES <= size <= self._store.stats().limit_bytes:
            return None
        thread = threading.Thread(
            target=self._receiver.warm, args=(size, count), name="warm", daemon=True
        )
        thread.start()
        return thread

    def FwdBwd(self, request: pb.FwdBwdRequest, context: grpc.ServicerContext) -> pb.FwdBwdResponse:
        if request.defer_update and not request.apply_optimizer:
            self._invalid(context, "fwd_bwd: defer_update needs apply_optimizer")
        call = Call.FWD_BWD
        if request.apply_optimizer:
            call = Call.FWD_BWD_DEFER if request.defer_update else Call.FWD_BWD_APPLY
        assert call in FWD_BWD_CALLS
        result = self._sequenced(
            context, request.key, Request(call=call, batch=self._batch(context, request.batch))
        )
        response = pb.FwdBwdResponse(
            state=self._state_of(request.key, result),
            dispatch_seconds=result.dispatch_seconds,
            used_staged_input=result.used_staged_input,
        )
        if result.updated:
            response.update.CopyFrom(self._outcome(result))
        return response

    def StageFwdBwd(
        self, request: pb.StageFwdBwdRequest, context: grpc.ServicerContext
    ) -> pb.StageFwdBwdResponse:
        result = self._sequenced(
            context,
            request.key,
            Request(call=Call.STAGE_FWD_BWD, batch=self._batch(context, request.batch)),
        )
        return pb.StageFwdBwdResponse(
            state=self._state_of(request.key, result),
            stage_seconds=result.seconds,
            device_bytes=result.device_bytes,
        )

    def ApplyDeferredUpdate(
        self, request: pb.ApplyDeferredUpdateRequest, context: grpc.ServicerContext
    ) -> pb.UpdateResponse:
        result = self._sequenced(context, request.key, Request(call=Call.APPLY_DEFERRED_UPDATE))
        return pb.UpdateResponse(
            state=self._state_of(request.key, result), update=self._outcome(result)
        )

    def Update(self, request: pb.UpdateRequest, context: grpc.ServicerContext) -> pb.UpdateResponse:
        result = self._sequenced(context, request.key, Request(call=Call.UPDATE))
        return pb.UpdateResponse(
            state=self._state_of(request.key, result), update=self._outcome(result)
        )

    def AbortStep(
        self, request: pb.AbortStepRequest, context: grpc.ServicerContext
    ) -> pb.AbortStepResponse:
        result = self._sequenced(context, request.key, Request(call=Call.ABORT_STEP))
        return pb.AbortStepResponse(state=self._state_of(request.key, result))

    def _state_of(self, key: pb.CallKey, result: CallResult) -> pb.WorkerState:
        """The state as it was after the call (a replay answers the first one's)."""
        snapshot = self._worker.snapshot()
        message = pb.WorkerState(
            lifecycle=lifecycle_to_proto(self.lifecycle),
            run_id=key.run_id,
            incarnation=key.incarnation,
            epoch=key.epoch,
            last_seq=key.seq,
            compiled=snapshot.session.compiled,
            durable_step=snapshot.durable_step,
            backend_compiles=snapshot.backend_compiles,
        )
        step_state_into_proto(result.state, message)
        return message

    def _outcome(self, result: CallResult) -> pb.UpdateOutcome:
        return pb.UpdateOutcome(
            applied=result.applied,
            dropless_replays=result.dropless_replays,
            update_seconds=result.update_seconds,
            device_wait_seconds=self._worker.watcher.facts(
                result.state.step - 1
            ).device_wait_seconds,
        )

    # -- reading ----------------------------------------------------------------------------------

    def GetMetrics(
        self, request: pb.GetMetricsRequest, context: grpc.ServicerContext
    ) -> pb.GetMetricsResponse:
        count = request.max_steps or 1
        if count > 128:
            self._invalid(context, f"get_metrics: max_steps is {count}; at most 128")
        response = pb.GetMetricsResponse()
        for step in range(request.from_step, request.from_step + count):
            kept = self._worker.metrics(request.run_id, request.epoch, step)
            if isinstance(kept, Refusal):
                if response.steps and kept.reason is Reason.METRICS_NOT_KEPT:
                    break
                self._refuse(context, kept)
            response.steps.append(self._step_metrics(context, kept))
        response.next_step = request.from_step + len(response.steps)
        return response

    def _step_metrics(self, context: grpc.ServicerContext, kept: StepSnapshot) -> pb.StepMetrics:
        try:
            values = kept.pending.result()
        except Exception as error:  # What the device raised in the update.
            abort_with(
                context,
                Reason.ENGINE_FAILED,
                f"the update of step {kept.step} failed on the device: {error}",
                self._metadata(),
            )
        # The update is computed, so the watcher is about to know: no reader should have to come again.
        self._worker.watcher.await_update(kept.step, FACTS_WAIT_S)
        facts = self._worker.watcher.facts(kept.step)
        return pb.StepMetrics(
            step=kept.step,
            train_step=kept.train_step,
            applied=kept.applied,
            values=dict(values),
            boundary_idle_seconds=facts.idle_seconds,
            device_wait_seconds=facts.device_wait_seconds,
            stage_seconds=facts.stage_seconds,
            boundary_idle_before_seconds=self._worker.watcher.facts(kept.step - 1).idle_seconds,
        )

    def ComputeLogprobs(
        self, request: pb.ComputeLogprobsRequest, context: grpc.ServicerContext
    ) -> pb.ComputeLogprobsResponse:
        scored, train_step = self._score(context, request, Call.COMPUTE_LOGPROBS)
        assert isinstance(scored, ScoreResult)
        rows, tokens = scored.logprobs.shape
        return pb.ComputeLogprobsResponse(
            logprobs=scored.logprobs.astype("<f4").tobytes(),
            rows=rows,
            tokens_per_row=tokens,
            train_step=train_step,
        )

    def Evaluate(
        self, request: pb.EvaluateRequest, context: grpc.ServicerContext
    ) -> pb.EvaluateResponse:
        values, train_step = self._score(context, request, Call.EVALUATE)
        assert not isinstance(values, ScoreResult)
        return pb.EvaluateResponse(values=dict(values), train_step=train_step)

    def _score(
        self,
        context: grpc.ServicerContext,
        request: pb.ComputeLogprobsRequest | pb.EvaluateRequest,
        call: Call,
    ) -> tuple[ScoreResult | Mapping[str, float], int]:
        """What the weights say of a micro-batch, and their policy version."""
        ref = self._batch(context, request.batch)
        outcome, train_step = self._run(
            context,
            call.value,
            lambda: self._traced_score(
                request.run_id, request.epoch, ref, call, release=request.release
            ),
        )
        if isinstance(outcome, Refusal):
            self._refuse(context, outcome)
        return outcome, train_step

    def _traced_score(
        self, run_id: str, epoch: int, ref: BatchRef, call: Call, *, release: bool
    ) -> tuple[ScoreResult | Mapping[str, float] | Refusal, int]:
        before = self._worker.snapshot().session
        started_s = self._clock.now()
        outcome = self._worker.score(run_id, epoch, ref, call, release=release)
        key = CallKey(run_id=run_id, incarnation=before.incarnation, epoch=epoch, seq=0)
        result = outcome.reason.value if isinstance(outcome, Refusal) else "ok"
        self._write_trace(key, Request(call=call, batch=ref), result, before, started_s)
        return outcome, before.step.train_step

    # -- checkpoints and weights ------------------------------------------------------------------

    def SaveCheckpoint(
        self, request: pb.SaveCheckpointRequest, context: grpc.ServicerContext
    ) -> pb.SaveCheckpointResponse:
        if len(request.data_cursor) > 1 << 20:
            self._invalid(context, "save_checkpoint: data_cursor is longer than 1 MiB")
        result = self._sequenced(
            context,
            request.key,
            Request(call=Call.SAVE_CHECKPOINT, detail=f"data_cursor={request.data_cursor}"),
            Work(data_cursor=request.data_cursor, background=self._background),
        )
        return pb.SaveCheckpointResponse(
            state=self._state_of(request.key, result),
            step=result.saved_step,
            snapshot_seconds=result.seconds,
        )

    def RestoreCheckpoint(
        self, request: pb.RestoreCheckpointRequest, context: grpc.ServicerContext
    ) -> pb.RestoreCheckpointResponse:
        result = self._sequenced(
            context,
            request.key,
            Request(call=Call.RESTORE_CHECKPOINT, detail=f"step={request.step}"),
            Work(restore_step=None if request.step < 0 else request.step),
        )
        response = pb.RestoreCheckpointResponse(state=self._state_of(request.key, result))
        if result.position is not None:
            response.data_cursor = result.position.data_cursor
            response.saved_run_id = result.position.run_id
            response.saved_epoch = result.position.epoch
            response.saved_last_seq = result.position.last_seq
        return response

    def PrepareWeightSync(
        self, request: pb.PrepareWeightSyncRequest, context: grpc.ServicerContext
    ) -> pb.PrepareWeightSyncResponse:
        result = self._sequenced(context, request.key, Request(call=Call.PREPARE_WEIGHT_SYNC))
        return pb.PrepareWeightSyncResponse(
            state=self._state_of(request.key, result),
            version=result.version,
            pinned_bytes=result.device_bytes,
        )

    def ReleaseWeightSync(
        self, request: pb.ReleaseWeightSyncRequest, context: grpc.ServicerContext
    ) -> pb.ReleaseWeightSyncResponse:
        result = self._sequenced(
            context,
            request.key,
            Request(call=Call.RELEASE_WEIGHT_SYNC, detail=f"version={request.version}"),
            Work(version=request.version),
        )
        return pb.ReleaseWeightSyncResponse(state=self._state_of(request.key, result))

    def ExportWeights(
        self, request: pb.ExportWeightsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ExportWeightsResponse]:
        chunk_bytes = request.chunk_bytes or EXPORT_CHUNK_BYTES
        if chunk_bytes > 4 << 20:
            self._invalid(context, f"export_weights: chunk_bytes is {chunk_bytes}; at most 4 MiB")
        refusal = self._worker.fence(
            request.run_id, request.epoch, Request(call=Call.EXPORT_WEIGHTS)
        )
        if refusal is not None:
            self._refuse(context, refusal)
        weights = self._worker.parts.weights
        if weights is None or not self._worker.pinned(request.version):
            abort_with(
                context,
                Reason.VERSION_NOT_PINNED,
                f"version {request.version} is not pinned: call prepare_weight_sync after its update",
                self._metadata(),
            )
        try:
            yield from _exported(weights, request.version, chunk_bytes)
        except _PinnedAnew:
            abort_with(
                context,
                Reason.VERSION_NOT_PINNED,
                f"version {request.version} was released and pinned with other weights while it was"
                " exported: export it again",
                self._metadata(),
            )
        except Exception as error:
            if not self._worker.pinned(request.version):
                abort_with(
                    context,
                    Reason.VERSION_NOT_PINNED,
                    f"version {request.version} was released while it was exported",
                    self._metadata(),
                )
            log.exception("the engine raised in the export of version %d", request.version)
            abort_with(
                context,
                Reason.ENGINE_FAILED,
                f"export of version {request.version}: {type(error).__name__}: {error}",
                self._metadata(),
            )

    # -- puts -------------------------------------------------------------------------------------

    def _check_put(self, header: tensor_pb2.PutMicroBatchHeader) -> None:
        session = self._worker.snapshot().session
        refusal = sessions.fence(
            session,
            run_id=header.manifest.id.run_id,
            epoch=header.epoch,
            incarnation=header.incarnation,
        ) or check(session.step, Request(call=Call.PUT_MICRO_BATCH))
        if refusal is not None:
            raise _PutRefused(refusal)
        if header.manifest.id.step < session.step.step:
            raise CodecError(
                f"micro-batch of step {header.manifest.id.step}, but step {session.step.step} is"
                " open: its step closed, so it is not needed"
            )

    def _validate(self, batch: MicroBatch) -> None:
        able = self._worker.parts.training.capabilities
        check_values(batch, vocab_size=able.vocab_size, num_experts=able.num_experts)
        missing = sorted(set(able.required_fields) - set(batch.arrays))
        if missing and not able.can_score:  # It may be put to be scored: a fwd_bwd is refused.
            raise InvalidTensor(
                f"micro-batch {batch.id}: field {missing[0]!r} is missing; engine {able.engine}"
                " insists on it"
            )
        self._worker.parts.bring(batch)

    def PutMicroBatch(
        self,
        request_iterator: Iterator[tensor_pb2.PutMicroBatchRequest],
        context: grpc.ServicerContext,
    ) -> tensor_pb2.PutMicroBatchResponse:
        """For a server that was not set up by `add_to_server`: the same, with one more copy."""
        messages = (request.SerializeToString() for request in request_iterator)
        return self.put(iter(_RawParts(messages)), context)

    def put(
        self, parts: Iterator[Part], context: grpc.ServicerContext
    ) -> tensor_pb2.PutMicroBatchResponse:
        """PutMicroBatch, behind its own raw (de)serialiser."""
        if self._draining:
            abort_with(context, Reason.DRAINING, "the worker is shutting down", self._metadata())
        slot = self._uploads.take(parts, context.cancel)
        if slot is None:
            abort_with(
                context,
                Reason.TOO_MANY_UPLOADS,
                f"put_micro_batch: {MAX_UPLOADS} uploads are under way: put fewer at a time",
                self._metadata(),
            )
        with slot:
            try:
                return self._take(slot, context)
            except _PutRefused as error:
                self._refuse(context, error.refusal)
            except (WireError, grpc.RpcError) as error:
                if slot.ended is not None:
                    why = f"the upload was ended: {slot.ended.value}"
                    abort_with(context, Reason.UPLOAD_SILENT, why, self._metadata())
                if not isinstance(error, WireError):  # The caller has left.
                    error = CodecError("the upload broke off before its header")
                abort_with(context, REASON_OF_ERROR[type(error)], str(error), self._metadata())

    def _take(
        self, parts: Iterator[Part], context: grpc.ServicerContext
    ) -> tensor_pb2.PutMicroBatchResponse:
        first = next(parts, None)
        shared = (
            isinstance(first, tensor_pb2.PutMicroBatchRequest)
            and first.HasField("header")
            and first.header.HasField("shared_memory")
        )
        if first is not None:
            parts = itertools.chain((first,), parts)
        response = self._receiver.take(parts, context.is_active)
        if response.stored and not response.duplicate:
            self._on_put("shared-memory" if shared else "stream", response.received_bytes)
        return response


def _exported(
    weights: WeightExportEngine, version: int, chunk_bytes: int
) -> Iterator[pb.ExportWeightsResponse]:
    """A pinned version as its manifest, chunks in manifest order, and the end."""
    manifest = pb.WeightManifest(version=version)
    infos = weights.export_manifest(version)
    for info in infos:
        itemsize = _ITEMSIZES[info.dtype]
        size = math.prod(info.shape) * itemsize
        manifest.tensors.add(
            name=info.name,
            dtype=tensor_pb2.DataType.Value(f"DATA_TYPE_{info.dtype.upper()}"),
            shape=info.shape,
            digest=info.digest,
            bytes=size,
        )
        manifest.total_bytes += size
    yield pb.ExportWeightsResponse(manifest=manifest)
    for info in infos:
        array = np.ascontiguousarray(weights.export_tensor(version, info.name))
        if weights.export_manifest(version) != infos:
            raise _PinnedAnew  # A restore brought the version's number back with other weights.
        flat = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(flat), chunk_bytes):
            yield pb.ExportWeightsResponse(chunk=bytes(flat[start : start + chunk_bytes]))
    yield pb.ExportWeightsResponse(end=pb.WeightsEnd(total_bytes=manifest.total_bytes))


class _PinnedAnew(Exception):
    """What is pinned under the version is not what its manifest said any more."""


class _PutRefused(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class _RawParts:
    """Parses lazily, so that a malformed message is answered like any other bad upload."""

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._messages = messages

    def __iter__(self) -> Iterator[Part]:
        return self

    def __next__(self) -> Part:
        return parse_part(next(self._messages))


class _Collector:
    """Stands in for the server while the generated code registers: keeps the handlers."""

    def __init__(self) -> None:
        self.handlers: dict[str, MethodHandler] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        del handlers  # The registered handlers below know every method.

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, MethodHandler]
    ) -> None:
        del service_name
        self.handlers.update(method_handlers)


def handlers_of(service: TrainerService) -> Mapping[str, MethodHandler]:
    """Every method's handler by name, with PutMicroBatch on its raw one."""

    def put(
        messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> tensor_pb2.PutMicroBatchResponse:
        return service.put(iter(_RawParts(messages)), context)

    collector = _Collector()
    pb_grpc.add_TrainerWorkerServicer_to_server(service, cast(grpc.Server, collector))
    raw: grpc.RpcMethodHandler[bytes, tensor_pb2.PutMicroBatchResponse] = (
        grpc.stream_unary_rpc_method_handler(
            put,
            request_deserializer=None,
            response_serializer=tensor_pb2.PutMicroBatchResponse.SerializeToString,
        )
    )
    return {**collector.handlers, "PutMicroBatch": cast(MethodHandler, raw)}
