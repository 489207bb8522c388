"""Drives a worker call by call, with every key made by hand: what no orderly client would do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import grpc

from orchestrator.bench.synthetic import SyntheticShape, make_batch
from prestage.microbatch import MicroBatch
from prestage.protocol import FWD_BWD_CALLS, BatchRef, Call, Phase, Reason, Request
from prestage.state_proto import phase_from_proto, ref_to_proto
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.trainer.v1 import trainer_pb2_grpc as pb_grpc
from prestage.wire.channel import open_channel
from prestage.wire.errors import Refusal, classify
from prestage.wire.stream_plane import StreamSender

SHAPE: Final = SyntheticShape(rows=1, tokens_per_row=16, real_length=12, micro_batches=3)
FIELDS: Final = (
    "advantages",
    "loss_mask",
    "positions",
    "sampling_logprobs",
    "segment_ids",
    "tokens",
)


class Refused(Exception):
    """The worker refused (or its engine failed)."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.reason.value}: {refusal.message}")
        self.refusal = refusal

    @property
    def reason(self) -> Reason:
        return self.refusal.reason


T = TypeVar("T")


def answer_of(call: Callable[[], T]) -> T:
    """Make a call; a refusal becomes `Refused`, anything else is the transport's."""
    try:
        return call()
    except grpc.RpcError as error:
        outcome = classify(error)
        if isinstance(outcome, Refusal):
            raise Refused(outcome) from error
        raise


@dataclass(kw_only=True)
class Driver:
    """One caller. `seq` is the last one used."""

    address: str
    run_id: str = "run"
    seq: int = 0
    epoch: int = 0
    incarnation: str = ""
    timeout_s: float = 30.0
    shape: SyntheticShape = SHAPE
    connect: Callable[[str], grpc.Channel] = open_channel
    channel: grpc.Channel = field(init=False)

    def __post_init__(self) -> None:
        self.channel = self.connect(self.address)
        self.stub = pb_grpc.TrainerWorkerStub(self.channel)
        self._sender = StreamSender(self.channel)

    def close(self) -> None:
        self.channel.close()

    def open(self) -> pb.WorkerState:
        response = answer_of(
            lambda: self.stub.OpenRun(pb.OpenRunRequest(run_id=self.run_id), timeout=30)
        )
        self.epoch, self.incarnation = response.state.epoch, response.state.incarnation
        self.seq = 0
        return response.state

    def state(self) -> pb.WorkerState:
        return self.stub.GetState(pb.GetStateRequest(), timeout=30).state

    @property
    def phase(self) -> Phase:
        return phase_from_proto(self.state().phase)

    def digest(self) -> str:
        request = pb.GetStateRequest(with_parameter_digest=True)
        return self.stub.GetState(request, timeout=30).state.parameter_digest

    def batch(self, step: int, index: int) -> MicroBatch:
        return make_batch(self.shape, self.run_id, step, index)

    def put(self, batch: MicroBatch) -> object:
        return answer_of(
            lambda: self._sender.put(
                batch, epoch=self.epoch, incarnation=self.incarnation, timeout_s=self.timeout_s
            )
        )

    def key(self, request: Request, seq: int | None = None) -> pb.CallKey:
        return pb.CallKey(
            run_id=self.run_id,
            incarnation=self.incarnation,
            epoch=self.epoch,
            seq=self.seq + 1 if seq is None else seq,
            payload_digest=request.payload_digest,
        )

    def call(
        self, call: Call, step: int = 0, index: int = 0, *, seq: int | None = None, digest: str = ""
    ) -> object:
        """Make one sequenced call. The seq advances only when it was carried out."""
        batch = None
        if call in FWD_BWD_CALLS or call is Call.STAGE_FWD_BWD:
            batch = BatchRef(
                step=step, index=index, digest=digest or self.batch(step, index).digest
            )
        details = {
            Call.COMPILE: f"rows={self.shape.rows} tokens_per_row={self.shape.tokens_per_row}"
            f" fields={','.join(sorted(FIELDS))} routing=",
            Call.SAVE_CHECKPOINT: "data_cursor=c",
            Call.RESTORE_CHECKPOINT: "step=-1",
            Call.RELEASE_WEIGHT_SYNC: "version=0",
        }
        request = Request(call=call, batch=batch, detail=details.get(call, ""))
        key = self.key(request, seq)
        ref = None if batch is None else ref_to_proto(batch)
        response = answer_of(lambda: self._send(call, key, ref))
        if seq is None:
            self.seq += 1
        return response

    def _send(self, call: Call, key: pb.CallKey, ref: pb.BatchRef | None) -> object:
        stub, timeout = self.stub, self.timeout_s
        match call:
            case Call.FWD_BWD | Call.FWD_BWD_APPLY | Call.FWD_BWD_DEFER:
                return stub.FwdBwd(
                    pb.FwdBwdRequest(
                        key=key,
                        batch=ref,
                        apply_optimizer=call is not Call.FWD_BWD,
                        defer_update=call is Call.FWD_BWD_DEFER,
                    ),
                    timeout=timeout,
                )
            case Call.STAGE_FWD_BWD:
                return stub.StageFwdBwd(pb.StageFwdBwdRequest(key=key, batch=ref), timeout=timeout)
            case Call.APPLY_DEFERRED_UPDATE:
                return stub.ApplyDeferredUpdate(
                    pb.ApplyDeferredUpdateRequest(key=key), timeout=timeout
                )
            case Call.UPDATE:
                return stub.Update(pb.UpdateRequest(key=key), timeout=timeout)
            case Call.COMPILE:
                return stub.Compile(
                    pb.CompileRequest(
                        key=key,
                        rows=self.shape.rows,
                        tokens_per_row=self.shape.tokens_per_row,
                        fields=sorted(FIELDS),
                    ),
                    timeout=max(timeout, 1800.0),
                )
            case Call.SAVE_CHECKPOINT:
                return stub.SaveCheckpoint(
                    pb.SaveCheckpointRequest(key=key, data_cursor="c"), timeout=timeout
                )
            case Call.RESTORE_CHECKPOINT:
                return stub.RestoreCheckpoint(
                    pb.RestoreCheckpointRequest(key=key, step=-1), timeout=timeout
                )
            case Call.ABORT_STEP:
                return stub.AbortStep(pb.AbortStepRequest(key=key), timeout=timeout)
            case Call.PREPARE_WEIGHT_SYNC:
                return stub.PrepareWeightSync(pb.PrepareWeightSyncRequest(key=key), timeout=timeout)
            case Call.RELEASE_WEIGHT_SYNC:
                return stub.ReleaseWeightSync(pb.ReleaseWeightSyncRequest(key=key), timeout=timeout)
            case _:
                raise ValueError(call)

    def read(self, call: Call, step: int = 0, index: int = 0) -> object:
        """Make one unsequenced call."""
        ref = pb.BatchRef(step=step, index=index, digest=self.batch(step, index).digest)
        run_id, epoch = self.run_id, self.epoch
        match call:
            case Call.GET_METRICS:
                request = pb.GetMetricsRequest(from_step=step, run_id=run_id, epoch=epoch)
                return answer_of(lambda: self.stub.GetMetrics(request, timeout=self.timeout_s))
            case Call.COMPUTE_LOGPROBS:
                logprobs = pb.ComputeLogprobsRequest(batch=ref, run_id=run_id, epoch=epoch)
                return answer_of(
                    lambda: self.stub.ComputeLogprobs(logprobs, timeout=self.timeout_s)
                )
            case Call.EVALUATE:
                evaluate = pb.EvaluateRequest(batch=ref, run_id=run_id, epoch=epoch)
                return answer_of(lambda: self.stub.Evaluate(evaluate, timeout=self.timeout_s))
            case Call.EXPORT_WEIGHTS:
                export = pb.ExportWeightsRequest(version=0, run_id=run_id, epoch=epoch)
                return answer_of(lambda: list(self.stub.ExportWeights(export, timeout=30)))
            case Call.GET_STATE:
                return self.state()
            case Call.GET_CAPABILITIES:
                return self.stub.GetCapabilities(pb.GetCapabilitiesRequest(), timeout=30)
            case _:
                raise ValueError(call)
