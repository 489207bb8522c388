"""The main port's front door: answers STARTING from the first moment on, then hands every call on.

An address is taken before minutes go into loading an engine, so that a second worker on it fails at
once and an early caller learns that the worker is on its way. Knows no engine and no session.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from prestage.protocol import Call, Lifecycle, Reason
from prestage.state_proto import lifecycle_to_proto
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.wire.errors import DOMAIN, abort_with
from prestage.wire.limits import MAX_CONTROL_BYTES, MAX_CONTROL_FIELDS
from prestage.wire.scan import ScanError, count_fields
from trainer_worker.service import MethodHandler

SERVICE: Final = "prestage.trainer.v1.TrainerWorker"
Behavior: TypeAlias = Callable[[object, grpc.ServicerContext], object]
_ALLOWED: Final = ", ".join(call.value for call in (Call.GET_STATE, Call.HEALTH))


def _refuse(request: object, context: grpc.ServicerContext) -> Iterator[bytes]:
    del request
    abort_with(
        context,
        Reason.STARTING,
        "the worker is starting: its engine is not loaded yet, so ask again",
        {"allowed": _ALLOWED},
    )


class _Answered(Protocol):
    """What a server's context knows beyond its type stub."""

    def code(self) -> grpc.StatusCode | None: ...


Observe: TypeAlias = Callable[[str, str, str, float], None]
"""Takes a call's name, its gRPC code, the reason of its refusal (or ""), and seconds to its answer."""
_DETAILS: Final = "grpc-status-details-bin"


def _reason(context: grpc.ServicerContext) -> str:
    """The reason in the ErrorInfo that the answer carries, or empty."""
    for key, value in context.trailing_metadata() or ():
        if key != _DETAILS or not isinstance(value, bytes):
            continue
        for detail in status_pb2.Status.FromString(value).details:
            info = error_details_pb2.ErrorInfo()
            if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
                return str(info.reason)
    return ""


def call_name(method: str) -> str:
    """`FwdBwd` as `fwd_bwd`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", method).lower()


def observed(handlers: Mapping[str, MethodHandler], observe: Observe) -> dict[str, MethodHandler]:
    """The same handlers; `observe` hears of every answer, from its RPC thread."""
    return {
        name: _observed(call_name(name), handler, observe) for name, handler in handlers.items()
    }


def _parsed(
    name: str, raw: object, context: grpc.ServicerContext, parse: Callable[[bytes], object]
) -> object:
    """The request; a malformed one is answered like any other bad request, before it takes memory."""
    assert isinstance(raw, bytes)
    try:
        if len(raw) > MAX_CONTROL_BYTES:
            raise ScanError(f"it has {len(raw)} bytes; at most {MAX_CONTROL_BYTES} are read")
        count_fields(raw, {}, most=MAX_CONTROL_FIELDS)
        return parse(raw)
    except (ScanError, DecodeError) as error:
        abort_with(context, Reason.INVALID_REQUEST, f"{name}: not a request of this call: {error}")


def _observed(name: str, handler: MethodHandler, observe: Observe) -> MethodHandler:
    # Requests of streams are parsed by their handlers, one by one.
    own = handler.request_deserializer
    parse = None if handler.request_streaming or own is None else own

    def tell(context: grpc.ServicerContext, started_s: float, failed: bool) -> None:
        code = cast(_Answered, context).code() or (
            grpc.StatusCode.UNKNOWN if failed else grpc.StatusCode.OK
        )
        reason = "" if code is grpc.StatusCode.OK else _reason(context)
        observe(name, code.name, reason, time.monotonic() - started_s)

    def one(request: object, context: grpc.ServicerContext) -> object:
        started_s, failed = time.monotonic(), True
        try:
            if parse is not None:
                request = _parsed(name, request, context, parse)
            response = behavior(request, context)
            failed = False
            return response
        finally:
            tell(context, started_s, failed)

    def many(request: object, context: grpc.ServicerContext) -> Iterator[object]:
        started_s, failed = time.monotonic(), True
        try:
            if parse is not None:
                request = _parsed(name, request, context, parse)
            yield from cast(Iterator[object], behavior(request, context))
            failed = False
        finally:
            tell(context, started_s, failed)

    if handler.response_streaming:
        behavior = cast(Behavior, handler.stream_stream or handler.unary_stream)
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_stream_rpc_method_handler
        )
        made: object = make(
            many,
            request_deserializer=None if parse is not None else own,
            response_serializer=handler.response_serializer,
        )
    else:
        behavior = cast(Behavior, handler.stream_unary or handler.unary_unary)
        make_one = (
            grpc.stream_unary_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        made = make_one(
            one,
            request_deserializer=None if parse is not None else own,
            response_serializer=handler.response_serializer,
        )
    return cast(MethodHandler, made)


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
