"""Refusals on the wire, and how a client tells them from transport failures.

    WireError
    ├── CodecError        a manifest or upload that is not what it says    INVALID_REQUEST
    │   └── LimitError    larger than this side accepts                    INVALID_REQUEST
    ├── SupersededError   an upload that another took over or that ended   INVALID_REQUEST
    ├── MissingError      a micro-batch that the store does not hold       MICRO_BATCH_MISSING
    ├── DamagedError      bytes that do not give their digest              DIGEST_MISMATCH
    └── InvalidTensor     a tensor that cannot be trained                  INVALID_BATCH

Every answer of a worker carries `google.rpc.ErrorInfo` (domain `prestage`). A status without one
came from the transport: the outcome is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NoReturn

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from prestage.protocol import Reason

DOMAIN: Final = "prestage"
# Trailers over 8 KiB may be lost. The message is in them up to three times, once with each byte
# outside ASCII written as three, twice in base64.
MAX_MESSAGE_BYTES: Final = 900


class WireError(Exception):
    """Something on the wire is wrong; the message names it, its value and the fix."""


class CodecError(WireError):
    """A manifest or an upload that is not what it says."""


class LimitError(CodecError):
    """Larger than this side accepts."""


class SupersededError(WireError):
    """An upload that another stream took over, or whose micro-batch was dropped meanwhile."""


class MissingError(WireError):
    """The store holds no micro-batch of this id and digest."""


class DamagedError(WireError):
    """Bytes that do not give their digest."""


class InvalidTensor(WireError):
    """A tensor that cannot be trained: name, dtype, shape, range or a non-finite value."""


REASON_OF_ERROR: Final[Mapping[type[WireError], Reason]] = MappingProxyType(
    {
        WireError: Reason.INVALID_REQUEST,
        CodecError: Reason.INVALID_REQUEST,
        LimitError: Reason.INVALID_REQUEST,
        SupersededError: Reason.INVALID_REQUEST,
        MissingError: Reason.MICRO_BATCH_MISSING,
        DamagedError: Reason.DIGEST_MISMATCH,
        InvalidTensor: Reason.INVALID_BATCH,
    }
)

_SPECIAL: Final[Mapping[Reason, grpc.StatusCode]] = MappingProxyType(
    {
        Reason.SEQUENCE_GAP: grpc.StatusCode.OUT_OF_RANGE,
        Reason.KEY_REUSED: grpc.StatusCode.ALREADY_EXISTS,
        Reason.MICRO_BATCH_MISSING: grpc.StatusCode.NOT_FOUND,
        Reason.CHECKPOINT_MISSING: grpc.StatusCode.NOT_FOUND,
        Reason.DIGEST_MISMATCH: grpc.StatusCode.DATA_LOSS,
        Reason.INVALID_BATCH: grpc.StatusCode.INVALID_ARGUMENT,
        Reason.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
        Reason.ENGINE_FAILED: grpc.StatusCode.ABORTED,
        Reason.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
        Reason.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    }
)
CODE_OF_REASON: Final[Mapping[Reason, grpc.StatusCode]] = MappingProxyType(
    {reason: _SPECIAL.get(reason, grpc.StatusCode.FAILED_PRECONDITION) for reason in Reason}
)


def abort_with(
    context: grpc.ServicerContext,
    reason: Reason,
    message: str,
    metadata: Mapping[str, str] | None = None,
) -> NoReturn:
    """End the call with the reason's status, ErrorInfo and PreconditionFailure."""
    abort_named(context, CODE_OF_REASON[reason], reason.value, message, metadata)


def abort_named(
    context: grpc.ServicerContext,
    code: grpc.StatusCode,
    reason: str,
    message: str,
    metadata: Mapping[str, str] | None = None,
) -> NoReturn:
    """End the call of any service of ours: the reason's name goes into ErrorInfo.

    The message is cut to `MAX_MESSAGE_BYTES`, so that the status fits in its trailers.
    """
    encoded = message.encode()
    if len(encoded) > MAX_MESSAGE_BYTES:
        message = encoded[: MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "…"
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=dict(metadata or {}))
    details = [info]
    packed = []
    for detail in details:
        wrapper = any_pb2.Any()
        wrapper.Pack(detail)
        packed.append(wrapper)
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        failure = error_details_pb2.PreconditionFailure()
        failure.violations.add(type=reason, subject=DOMAIN, description=message)
        wrapper = any_pb2.Any()
        wrapper.Pack(failure)
        packed.append(wrapper)
    number: int = code.value[0]
    status = status_pb2.Status(code=number, message=message, details=packed)
    context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status raises")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The worker's own answer: it carried nothing out (or its engine failed)."""

    code: grpc.StatusCode
    reason: Reason
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """The transport failed: whether the worker carried the call out is unknown."""

    code: grpc.StatusCode
    message: str

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


def classify(error: grpc.RpcError) -> Refusal | Unknown:
    """Tell the worker's answers from the transport's. Total."""
    # Every error of a call is both an RpcError and a Call; the type stubs do not know it.
    call: object = error
    if not isinstance(call, grpc.Call):
        return Unknown(code=grpc.StatusCode.UNKNOWN, message=str(error))
    code = call.code()
    message = call.details() or ""
    info = error_info(call)
    if info is None:
        return Unknown(code=code, message=message)
    try:
        reason = Reason(info.reason)
    except ValueError:
        message = f"{info.reason} (a reason this client does not know): {message}"
        reason = Reason.INVALID_REQUEST
    return Refusal(code=code, reason=reason, message=message, metadata=dict(info.metadata))


def error_info(call: grpc.Call) -> error_details_pb2.ErrorInfo | None:
    """Our ErrorInfo in a call's status; None when the status came from the transport."""
    try:
        status = rpc_status.from_call(call)
        for detail in status.details if status is not None else ():
            info = error_details_pb2.ErrorInfo()
            if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
                return info
    except (ValueError, DecodeError):  # Damaged, or contradicting the status: not the worker's.
        return None
    return None
