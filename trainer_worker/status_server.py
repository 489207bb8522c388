"""The status port: health and state on threads of their own, while the device computes."""

from __future__ import annotations

import threading
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.trainer.v1 import trainer_pb2_grpc as pb_grpc
from prestage.wire.channel import bind, make_server
from trainer_worker.service import TrainerService

SERVICE: Final = "prestage.trainer.v1.TrainerWorker"


class _Status(pb_grpc.TrainerStatusServicer):
    def __init__(self, service: TrainerService) -> None:
        self._service = service

    def GetState(
        self, request: pb.GetStateRequest, context: grpc.ServicerContext
    ) -> pb.GetStateResponse:
        if request.with_parameter_digest:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                "with_parameter_digest waits for the device: ask on the main port",
            )
        return pb.GetStateResponse(state=self._service.state())


class StatusServer:
    """Serves grpc.health.v1, TrainerStatus and reflection."""

    def __init__(self, service: TrainerService, address: str) -> None:
        """Raises `AddressError`."""
        self._server = make_server(4, name="status")
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        pb_grpc.add_TrainerStatusServicer_to_server(_Status(service), self._server)
        reflection.enable_server_reflection(
            (
                SERVICE,
                "prestage.trainer.v1.TrainerStatus",
                health.SERVICE_NAME,
                reflection.SERVICE_NAME,
            ),
            self._server,
        )
        self.port = bind(self._server, "--health_listen", address)

    def start(self) -> None:
        self._server.start()
        self.set_serving(True)

    def set_serving(self, serving: bool) -> None:
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", SERVICE):
            self._health.set(name, status)

    def stop(self, grace_s: float) -> threading.Event:
        return self._server.stop(grace_s)
