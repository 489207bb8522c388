"""The main port's front door: answers STARTING from the first moment on, then hands every call on.

An address is taken before minutes go into loading an engine, so that a second worker on it fails at
once and an early caller learns that the worker is on its way. Knows no engine and no session.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, cast

import grpc

from prestage.protocol import Call, Lifecycle, Reason
from prestage.state_proto import lifecycle_to_proto
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.wire.errors import abort_with
from trainer_worker.service import MethodHandler

SERVICE: Final = "prestage.trainer.v1.TrainerWorker"
_ALLOWED: Final = ", ".join(call.value for call in (Call.GET_STATE, Call.HEALTH))


def _refuse(request: object, context: grpc.ServicerContext) -> Iterator[bytes]:
    del request
    abort_with(
        context,
        Reason.STARTING,
        "the worker is starting: its engine is not loaded yet, so ask again",
        {"allowed": _ALLOWED},
    )


class FrontDoor(grpc.GenericRpcHandler):
    """Handles the methods of `TrainerWorker`. Safe from any thread."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._handlers: Mapping[str, MethodHandler] | None = None
        # Bytes in, a stream out: fits a method of any shape, since all it does is to end the call.
        self._refusal = cast(MethodHandler, grpc.stream_stream_rpc_method_handler(_refuse))
        state = grpc.unary_unary_rpc_method_handler(
            self._get_state,
            request_deserializer=pb.GetStateRequest.FromString,
            response_serializer=pb.GetStateResponse.SerializeToString,
        )
        self._starting_state = cast(MethodHandler, state)

    def open(self, handlers: Mapping[str, MethodHandler]) -> None:
        """The worker is there: from now on these answer, by method name."""
        self._handlers = handlers

    def state(self) -> pb.WorkerState:
        """What can be said before the worker is there."""
        return pb.WorkerState(
            lifecycle=lifecycle_to_proto(Lifecycle.STARTING),
            phase=pb.PHASE_CLOSED,
            incarnation=self._incarnation,
            durable_step=-1,
        )

    def _get_state(
        self, request: pb.GetStateRequest, context: grpc.ServicerContext
    ) -> pb.GetStateResponse:
        del request, context
        return pb.GetStateResponse(state=self.state())

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> MethodHandler | None:
        service, _, method = handler_call_details.method.removeprefix("/").partition("/")
        if service != SERVICE:
            return None
        if self._handlers is not None:
            return self._handlers.get(method)
        return self._starting_state if method == "GetState" else self._refusal
