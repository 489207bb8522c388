"""The gRPC adapter of `TrainerPort`: one call in, one `Answer` out.

Never retries and never invents a key: a failed call is `Lost`, and the core settles it. A status
with the worker's ErrorInfo is the worker's own answer (`Refused`, `Raised`); one without came from
the transport.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc

from orchestrator.calls import Done, Lost, Raised, Refused, Send, WorkerView
from orchestrator.ports import Answer, StepFacts
from prestage.protocol import FWD_BWD_CALLS, BatchRef, Call, Reason, Request
from prestage.state_proto import ref_to_proto, step_state_from_proto
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.trainer.v1 import trainer_pb2_grpc as pb_grpc
from prestage.wire.errors import Refusal, classify


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds until a call counts as lost. A lost call is settled, never blindly repeated."""

    train_s: float = 900.0  # FwdBwd, Update: one micro-batch may have to finish first.
    compile_s: float = 7200.0
    save_s: float = 1800.0
    read_s: float = 900.0  # GetMetrics waits for the update.
    state_s: float = 10.0


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """The one micro-batch shape of a run, as Compile takes it."""

    rows: int
    tokens_per_row: int
    fields: tuple[str, ...]
    routing_shape: tuple[int, ...] = ()
    receive_buffers: int = 0  # Of the worker, for uploads by stream: made ready while it compiles.

    @property
    def detail(self) -> str:
        """Canonical text for the compile call's fingerprint."""
        return (
            f"rows={self.rows} tokens_per_row={self.tokens_per_row}"
            f" fields={','.join(sorted(self.fields))}"
            f" routing={','.join(str(size) for size in self.routing_shape)}"
        )


class Evaluator(Protocol):
    """Puts the evaluation micro-batches and evaluates each; returns merged metrics."""

    def evaluate(self, step: int) -> Mapping[str, float]: ...


class TrainerClient:
    """Drives one TrainerWorker. Used by the runner's thread only."""

    def __init__(
        self,
        channel: grpc.Channel,
        *,
        run_id: str,
        shape: RunShape,
        deadlines: Deadlines | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        evaluator: Evaluator | None = None,
    ) -> None:
        self._stub = pb_grpc.TrainerWorkerStub(channel)
        self._run_id = run_id
        self._shape = shape
        self._deadlines = deadlines or Deadlines()
        self._metadata = tuple(metadata)
        self._evaluator = evaluator
        self._incarnation = ""
        self._epoch = 0
        self._pinned: dict[int, int] = {}  # Step to the version that it pinned.

    @property
    def incarnation(self) -> str:
        """The worker process that the run is open on; empty before OpenRun."""
        return self._incarnation

    @property
    def epoch(self) -> int:
        """This caller's epoch; 0 before OpenRun."""
        return self._epoch

    def capabilities(self) -> pb.GetCapabilitiesResponse:
        """What the worker can do. Raises `grpc.RpcError` when it cannot be reached."""
        return self._stub.GetCapabilities(
            pb.GetCapabilitiesRequest(),
            timeout=self._deadlines.state_s,
            metadata=self._metadata,
            wait_for_ready=False,
        )

    def worker_state(self, *, with_parameter_digest: bool = False) -> pb.WorkerState:
        """What the worker says of itself; with the digest, once the device is done."""
        response = self._stub.GetState(
            pb.GetStateRequest(with_parameter_digest=with_parameter_digest),
            timeout=self._deadlines.read_s if with_parameter_digest else self._deadlines.state_s,
            metadata=self._metadata,
        )
        return response.state

    def parameter_digest(self) -> str:
        """Hex digest of the parameters; waits for the device."""
        return self.worker_state(with_parameter_digest=True).parameter_digest

    def backend_compiles(self) -> int:
        """Programs that the worker's backend compiled so far."""
        return self.worker_state().backend_compiles

    def durability(self) -> tuple[int, str]:
        """(step of the newest durable checkpoint or -1, why a background save failed or "")."""
        state = self.worker_state()
        return state.durable_step, state.background_failure

    # -- TrainerPort ------------------------------------------------------------------------------

    def call(self, send: Send, *, data_cursor: str) -> Answer:
        try:
            return self._dispatch(send, data_cursor)
        except grpc.RpcError as error:
            outcome = classify(error)
            if not isinstance(outcome, Refusal):
                return Answer(event=Lost(why=str(outcome)))
            if outcome.reason in (Reason.DRAINING, Reason.STARTING):
                # Not carried out here; this process's successor, or its own start, decides.
                return Answer(event=Lost(why=outcome.message))
            if outcome.reason is Reason.ENGINE_FAILED:
                return Answer(event=Raised(message=outcome.message))
            return Answer(event=Refused(reason=outcome.reason, message=outcome.message))

    def read_metrics(self, from_step: int, count: int) -> tuple[StepFacts, ...]:
        try:
            return self._metrics(from_step, count)
        except grpc.RpcError as error:
            if isinstance(classify(error), Refusal):
                return ()
            raise

    def in_flight(self) -> int:
        try:
            response = self._stub.GetState(
                pb.GetStateRequest(), timeout=self._deadlines.state_s, metadata=self._metadata
            )
        except grpc.RpcError:
            return 0  # Only asked to wait longer: the call that follows finds out what is wrong.
        return response.state.in_flight

    # -- one method a call ------------------------------------------------------------------------

    def _dispatch(self, send: Send, data_cursor: str) -> Answer:
        call = send.call
        if call in FWD_BWD_CALLS:
            return self._fwd_bwd(send)
        match call:
            case Call.OPEN_RUN:
                return self._open_run()
            case Call.GET_STATE:
                return self._get_state()
            case Call.COMPILE:
                return self._compile(send)
            case Call.STAGE_FWD_BWD:
                return self._stage(send)
            case Call.APPLY_DEFERRED_UPDATE:
                request = pb.ApplyDeferredUpdateRequest(key=self._key(send))
                return _updated(
                    self._stub.ApplyDeferredUpdate(
                        request, timeout=self._deadlines.train_s, metadata=self._metadata
                    )
                )
            case Call.GET_METRICS:
                return self._get_metrics(send)
            case Call.SAVE_CHECKPOINT:
                return self._save(send, data_cursor)
            case Call.RESTORE_CHECKPOINT:
                return self._restore(send)
            case Call.ABORT_STEP:
                self._stub.AbortStep(
                    pb.AbortStepRequest(key=self._key(send)),
                    timeout=self._deadlines.train_s,
                    metadata=self._metadata,
                )
                return Answer(event=Done())
            case Call.PREPARE_WEIGHT_SYNC:
                return self._pin(send)
            case Call.RELEASE_WEIGHT_SYNC:
                return self._release(send)
            case Call.EVALUATE:
                return self._evaluate(send)
            case _:
                raise ValueError(f"{call.value} is not a call that the runner makes")

    def _key(self, send: Send, detail: str = "") -> pb.CallKey:
        batch = None
        if send.call in FWD_BWD_CALLS or send.call is Call.STAGE_FWD_BWD:
            batch = BatchRef(step=send.step, index=send.index, digest=send.digest)
        request = Request(call=send.call, batch=batch, detail=detail)
        return pb.CallKey(
            run_id=self._run_id,
            incarnation=self._incarnation,
            epoch=self._epoch,
            seq=send.seq,
            payload_digest=request.payload_digest,
        )

    def _open_run(self) -> Answer:
        response = self._stub.OpenRun(
            pb.OpenRunRequest(run_id=self._run_id),
            timeout=self._deadlines.train_s,
            metadata=self._metadata,
        )
        self._incarnation = response.state.incarnation
        self._epoch = response.state.epoch
        return Answer(event=Done(view=_view(response.state)))

    def _get_state(self) -> Answer:
        response = self._stub.GetState(
            pb.GetStateRequest(), timeout=self._deadlines.state_s, metadata=self._metadata
        )
        return Answer(event=Done(view=_view(response.state)))

    def _compile(self, send: Send) -> Answer:
        response = self._stub.Compile(
            pb.CompileRequest(
                key=self._key(send, self._shape.detail),
                rows=self._shape.rows,
                tokens_per_row=self._shape.tokens_per_row,
                fields=sorted(self._shape.fields),
                routing_shape=self._shape.routing_shape,
                receive_buffers=self._shape.receive_buffers,
            ),
            timeout=self._deadlines.compile_s,
            metadata=self._metadata,
        )
        waits = response.idle_wait_seconds
        return Answer(event=Done(idle_wait_seconds=statistics.median(waits) if waits else 0.0))

    def _fwd_bwd(self, send: Send) -> Answer:
        response = self._stub.FwdBwd(
            pb.FwdBwdRequest(
                key=self._key(send),
                batch=_ref(send),
                apply_optimizer=send.call is not Call.FWD_BWD,
                defer_update=send.call is Call.FWD_BWD_DEFER,
            ),
            timeout=self._deadlines.train_s,
            metadata=self._metadata,
        )
        applied = response.update.applied if response.HasField("update") else True
        return Answer(
            event=Done(update_applied=applied),
            used_staged_input=response.used_staged_input,
            dispatch_seconds=response.dispatch_seconds,
            train_step=response.state.train_step,
            dropless_replays=response.update.dropless_replays,
        )

    def _stage(self, send: Send) -> Answer:
        response = self._stub.StageFwdBwd(
            pb.StageFwdBwdRequest(key=self._key(send), batch=_ref(send)),
            timeout=self._deadlines.train_s,
            metadata=self._metadata,
        )
        return Answer(
            event=Done(),
            stage_seconds=response.stage_seconds,
            train_step=response.state.train_step,
        )

    def _get_metrics(self, send: Send) -> Answer:
        facts = self._metrics(send.step, 1)
        first = next((item for item in facts if item.step == send.step), None)
        return Answer(
            event=Done(
                stage_seconds=-1.0 if first is None else first.stage_seconds,
                device_wait_seconds=-1.0 if first is None else first.device_wait_seconds,
            ),
            metrics=facts,
            train_step=-1 if first is None else first.train_step,
        )

    def _metrics(self, from_step: int, count: int) -> tuple[StepFacts, ...]:
        response = self._stub.GetMetrics(
            pb.GetMetricsRequest(
                run_id=self._run_id, epoch=self._epoch, from_step=from_step, max_steps=count
            ),
            timeout=self._deadlines.read_s,
            metadata=self._metadata,
        )
        before = tuple(
            StepFacts(
                step=item.step - 1,
                train_step=-1,
                applied=True,
                boundary_idle_seconds=item.boundary_idle_before_seconds,
            )
            for item in response.steps[:1]
            if item.step > 0 and item.boundary_idle_before_seconds >= 0
        )
        return before + tuple(
            StepFacts(
                step=item.step,
                train_step=item.train_step,
                applied=item.applied,
                values=dict(item.values),
                boundary_idle_seconds=item.boundary_idle_seconds,
                device_wait_seconds=item.device_wait_seconds,
                stage_seconds=item.stage_seconds,
            )
            for item in response.steps
        )

    def _save(self, send: Send, data_cursor: str) -> Answer:
        self._stub.SaveCheckpoint(
            pb.SaveCheckpointRequest(
                key=self._key(send, f"data_cursor={data_cursor}"), data_cursor=data_cursor
            ),
            timeout=self._deadlines.save_s,
            metadata=self._metadata,
        )
        return Answer(event=Done())

    def _restore(self, send: Send) -> Answer:
        response = self._stub.RestoreCheckpoint(
            pb.RestoreCheckpointRequest(key=self._key(send, "step=-1"), step=-1),
            timeout=self._deadlines.save_s,
            metadata=self._metadata,
        )
        return Answer(event=Done(view=_view(response.state)))

    def _pin(self, send: Send) -> Answer:
        response = self._stub.PrepareWeightSync(
            pb.PrepareWeightSyncRequest(key=self._key(send)),
            timeout=self._deadlines.train_s,
            metadata=self._metadata,
        )
        self._pinned[send.step] = response.version
        return Answer(event=Done(), train_step=response.version)

    def _release(self, send: Send) -> Answer:
        # 0 = whatever is pinned: an earlier process pinned it and took its number with it.
        # Kept until a later step is released: a resend must carry the same payload.
        version = self._pinned.get(send.step, 0)
        self._pinned = {step: pin for step, pin in self._pinned.items() if step >= send.step}
        self._stub.ReleaseWeightSync(
            pb.ReleaseWeightSyncRequest(key=self._key(send, f"version={version}"), version=version),
            timeout=self._deadlines.train_s,
            metadata=self._metadata,
        )
        return Answer(event=Done())

    def _evaluate(self, send: Send) -> Answer:
        if self._evaluator is None:
            raise ValueError("evaluation is planned, but no evaluation data was given")
        values = self._evaluator.evaluate(send.step)
        return Answer(
            event=Done(),
            metrics=(
                StepFacts(
                    step=send.step,
                    train_step=-1,
                    applied=True,
                    values={f"eval/{name}": value for name, value in values.items()},
                ),
            ),
        )


def _ref(send: Send) -> pb.BatchRef:
    return ref_to_proto(BatchRef(step=send.step, index=send.index, digest=send.digest))


def _view(state: pb.WorkerState) -> WorkerView:
    return WorkerView(
        state=step_state_from_proto(state),
        incarnation=state.incarnation,
        epoch=state.epoch,
        last_seq=state.last_seq,
        compiled=state.compiled,
        durable_step=state.durable_step,
        idle_wait_seconds=state.idle_wait_seconds,
    )


def _updated(response: pb.UpdateResponse) -> Answer:
    return Answer(
        event=Done(update_applied=response.update.applied),
        train_step=response.state.train_step,
        dropless_replays=response.update.dropless_replays,
    )
