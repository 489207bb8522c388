"""Scoring and evaluation over gRPC: puts a micro-batch and asks what the weights say of it.

Both are reads: they are sent again after a transport failure, and only a refusal that comes from
the worker's state goes back to the runner, whose calls alone can settle it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import grpc
import numpy as np

from orchestrator.feeder import ITS_STATE, PASSING, NotWanted, PutPort, SourceError, WorkerRefused
from orchestrator.scoring import Scored, Wanted
from prestage.microbatch import MicroBatch
from prestage.protocol import BatchRef, Reason
from prestage.state_proto import ref_to_proto
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.trainer.v1 import trainer_pb2_grpc as pb_grpc
from prestage.wire.errors import Refusal, classify

log = logging.getLogger("prestage.scoring")

_PUT_AGAIN: Final = (Reason.MICRO_BATCH_MISSING, Reason.DIGEST_MISMATCH, *PASSING)
_PUTS: Final = 3
_PAUSE_S: Final = 0.5


class ScoreClient:
    """Implements `ScorePort`. Its counters are monotonic."""

    def __init__(
        self,
        channel: grpc.Channel,
        sender: PutPort,
        run_id: str,
        epoch: Callable[[], int],
        *,
        metadata: Sequence[tuple[str, str]] = (),
        timeout_s: float = 900.0,
        unreachable_s: float = 120.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`epoch`: the run's, at the time of a call."""
        self._stub = pb_grpc.TrainerWorkerStub(channel)
        self._sender = sender
        self._run_id = run_id
        self._epoch = epoch
        self._metadata = tuple(metadata)
        self._timeout_s = timeout_s
        self._attempts = max(1, int(unreachable_s / _PAUSE_S))
        self._sleep = sleep
        self.scored = 0  # Micro-batches.
        self.retries = 0

    def logprobs(self, batch: MicroBatch, wanted: Wanted) -> Scored:
        """Raises `NotWanted`, `WorkerRefused`, `SourceError`."""
        for attempt in range(self._attempts):
            if not wanted():
                raise NotWanted(f"scores of {batch.id} are not wanted any more")
            try:
                scored = self._logprobs(batch)
            except grpc.RpcError as error:
                outcome = classify(error)
                if isinstance(outcome, Refusal):
                    _give_back(batch, outcome)
                self.retries += 1
                if attempt == 0:
                    log.warning("scoring of micro-batch %s is repeated: %s", batch.id, outcome)
                self._sleep(_PAUSE_S)
                continue
            self.scored += 1
            return scored
        raise SourceError(
            f"micro-batch {batch.id} could not be scored in {self._attempts} attempts: {outcome}"
        )

    def _logprobs(self, batch: MicroBatch) -> Scored:
        self._sender.put(batch)
        response = self._stub.ComputeLogprobs(
            pb.ComputeLogprobsRequest(
                run_id=self._run_id, epoch=self._epoch(), batch=_ref(batch), release=True
            ),
            timeout=self._timeout_s,
            metadata=self._metadata,
        )
        values = np.frombuffer(response.logprobs, "<f4").astype(np.float32)
        return Scored(
            values=values.reshape(response.rows, response.tokens_per_row),
            train_step=response.train_step,
        )

    def evaluate(self, batch: MicroBatch) -> Mapping[str, float]:
        """The weights' metrics of one micro-batch. Raises `grpc.RpcError`."""
        for last in (*(False,) * (_PUTS - 1), True):
            self._sender.put(batch)
            try:
                response = self._stub.Evaluate(
                    pb.EvaluateRequest(
                        run_id=self._run_id, epoch=self._epoch(), batch=_ref(batch), release=True
                    ),
                    timeout=self._timeout_s,
                    metadata=self._metadata,
                )
            except grpc.RpcError as error:
                outcome = classify(error)
                missing = isinstance(outcome, Refusal) and outcome.reason in _PUT_AGAIN[:2]
                if last or not missing:
                    raise
                self.retries += 1
                continue
            return dict(response.values)
        raise AssertionError("the last attempt answers or raises")


def _give_back(batch: MicroBatch, refusal: Refusal) -> None:
    """Raise unless the call may simply be made again."""
    if refusal.reason in _PUT_AGAIN:
        return
    why = f"scoring of micro-batch {batch.id} was refused: {refusal.message}"
    if refusal.reason in ITS_STATE or refusal.reason is Reason.ENGINE_FAILED:
        raise WorkerRefused(why)
    raise SourceError(why)


def _ref(batch: MicroBatch) -> pb.BatchRef:
    return ref_to_proto(BatchRef(step=batch.id.step, index=batch.id.index, digest=batch.digest))
