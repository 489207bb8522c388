"""Why the rollout service ends a stream, and how a client tells that from a lost connection."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NoReturn

import grpc

from prestage.wire.errors import Unknown, abort_named, error_info


class RolloutReason(enum.Enum):
    """`google.rpc.ErrorInfo.reason`, domain `prestage`."""

    # The stream is at fault: sending the same again does not help.
    INVALID_REQUEST = "INVALID_REQUEST"  # INVALID_ARGUMENT
    OPEN_MISSING = "OPEN_MISSING"  # Something came before `open`, or `open` came twice.
    WRONG_RUN = "WRONG_RUN"
    OFFSET_GAP = "OFFSET_GAP"  # OUT_OF_RANGE
    UNAUTHENTICATED = "UNAUTHENTICATED"  # UNAUTHENTICATED: no token, or not one of the service's.
    PERMISSION_DENIED = "PERMISSION_DENIED"  # PERMISSION_DENIED: another role's token.
    # Another stream of this producer took over.
    SUPERSEDED = "SUPERSEDED"  # ABORTED
    # Come again: at once, or after a pause.
    OPEN_LATE = "OPEN_LATE"  # No `open` in time, or too many streams without one.
    IDLE = "IDLE"
    TOO_MANY_PRODUCERS = "TOO_MANY_PRODUCERS"
    TOO_MANY_WATCHERS = "TOO_MANY_WATCHERS"
    LOG_FAILED = "LOG_FAILED"  # ABORTED; what was not acknowledged may be durable or not.
    STOPPING = "STOPPING"  # The process stops; the run goes on in the next one.
    # Nothing more is taken.
    RUN_ENDED = "RUN_ENDED"


_SPECIAL: Final[Mapping[RolloutReason, grpc.StatusCode]] = MappingProxyType(
    {
        RolloutReason.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
        RolloutReason.OFFSET_GAP: grpc.StatusCode.OUT_OF_RANGE,
        RolloutReason.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
        RolloutReason.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
        RolloutReason.SUPERSEDED: grpc.StatusCode.ABORTED,
        RolloutReason.LOG_FAILED: grpc.StatusCode.ABORTED,
    }
)
CODE_OF_ROLLOUT_REASON: Final[Mapping[RolloutReason, grpc.StatusCode]] = MappingProxyType(
    {reason: _SPECIAL.get(reason, grpc.StatusCode.FAILED_PRECONDITION) for reason in RolloutReason}
)
RETRIED: Final = frozenset(
    {
        RolloutReason.OPEN_LATE,
        RolloutReason.IDLE,
        RolloutReason.TOO_MANY_PRODUCERS,
        RolloutReason.TOO_MANY_WATCHERS,
        RolloutReason.LOG_FAILED,
        RolloutReason.STOPPING,
    }
)
"""Reasons after which a client connects again. After the others it tells its user."""


@dataclass(frozen=True, kw_only=True)
class RolloutRefusal:
    """Why a stream was ended, or is about to be."""

    reason: RolloutReason
    message: str


def abort_rollout(context: grpc.ServicerContext, refusal: RolloutRefusal) -> NoReturn:
    """End the stream with the reason's status and ErrorInfo."""
    abort_named(
        context, CODE_OF_ROLLOUT_REASON[refusal.reason], refusal.reason.value, refusal.message
    )


def classify_rollout(error: grpc.RpcError) -> RolloutRefusal | Unknown:
    """Tell the service's refusals from the transport's failures. Total."""
    # Every error of a call is both an RpcError and a Call; the type stubs do not know it.
    call: object = error
    if not isinstance(call, grpc.Call):
        return Unknown(code=grpc.StatusCode.UNKNOWN, message=str(error))
    message = call.details() or ""
    info = error_info(call)
    if info is None:
        return Unknown(code=call.code(), message=message)
    try:
        return RolloutRefusal(reason=RolloutReason(info.reason), message=message)
    except ValueError:
        return RolloutRefusal(
            reason=RolloutReason.INVALID_REQUEST,
            message=f"{info.reason} (a reason this client does not know): {message}",
        )
