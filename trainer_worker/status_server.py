"""The status port: health and state on threads of their own, while the device computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from prestage.protocol import Reason
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.trainer.v1 import trainer_pb2_grpc as pb_grpc
from prestage.wire.channel import CONTROL_ONLY, ServerGuard, bind, make_server
from prestage.wire.errors import abort_with
from prestage.wire.stream_slots import StreamGate, StreamSlots
from trainer_worker.front import SERVICE

CHECKPOINTS: Final = "prestage.checkpoints"
"""Health name that is NOT_SERVING after a background save failed. Not the worker's own health: a full
disk is no reason to restart a trainer."""


class _Status(pb_grpc.TrainerStatusServicer):
    def __init__(self, state: Callable[[], pb.WorkerState]) -> None:
        self._state = state

    def GetState(
        self, request: pb.GetStateRequest, context: grpc.ServicerContext
    ) -> pb.GetStateResponse:
        if request.with_parameter_digest:
            abort_with(
                context,
                Reason.INVALID_REQUEST,
                "with_parameter_digest waits for the device: ask on the main port",
            )
        return pb.GetStateResponse(state=self._state())


class StatusServer:
    """Serves grpc.health.v1, TrainerStatus and reflection."""

    def __init__(
        self,
        state: Callable[[], pb.WorkerState],
        address: str,
        *,
        guard: ServerGuard | None = None,
    ) -> None:
        """Not serving until told otherwise. Raises `AddressError`."""
        # Streams of requests (reflection) get two of the threads at most: health has the others.
        gate = StreamGate(StreamSlots(2))
        self._server = make_server(
            4, name="status", guard=guard, interceptors=(gate,), changes=CONTROL_ONLY
        )
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        pb_grpc.add_TrainerStatusServicer_to_server(_Status(state), self._server)
        reflection.enable_server_reflection(
            (
                SERVICE,
                "prestage.trainer.v1.TrainerStatus",
                health.SERVICE_NAME,
                reflection.SERVICE_NAME,
            ),
            self._server,
        )
        self.set_serving(False)
        self.set_checkpoints(True)
        self.port = bind(self._server, "--health_listen", address, guard=guard)

    def start(self) -> None:
        self._server.start()

    def set_serving(self, serving: bool) -> None:
        for name in ("", SERVICE):
            self._health.set(name, _health(serving))

    def set_checkpoints(self, good: bool) -> None:
        """Whether the last background save was made durable."""
        self._health.set(CHECKPOINTS, _health(good))

    def stop(self, grace_s: float) -> threading.Event:
        return self._server.stop(grace_s)


def _health(good: bool) -> health_pb2.HealthCheckResponse.ServingStatus:
    status = health_pb2.HealthCheckResponse
    return status.SERVING if good else status.NOT_SERVING
