"""Bounds the client streams of a server that have a thread each: in number, and in how long they say nothing.

A stream that has not sent its first message is worth least: a newer one ends the oldest of them. One
that has begun is ended when it stays silent. Ending is a cancel: the client learns that the outcome
is unknown, which for an upload means to go on from where it was.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Generic, TypeAlias, TypeVar, cast

import grpc

from prestage.protocol import Reason
from prestage.wire.errors import abort_with

T = TypeVar("T")
Q = TypeVar("Q")
P = TypeVar("P")
_Behavior: TypeAlias = Callable[[Iterator[object], grpc.ServicerContext], Iterator[object]]

FIRST_S: Final = 10.0
SILENT_S: Final = 60.0


class Ended(enum.Enum):
    """Why a stream was ended."""

    FIRST_LATE = "no first message in time"
    REPLACED = "no first message yet, and a newer stream took its place"
    SILENT = "nothing came for too long"


class Slot(Generic[T]):
    """One stream's place, and its messages. Leave it with `with`."""

    def __init__(
        self,
        slots: StreamSlots,
        messages: Iterator[T],
        end: Callable[[], object],
        now_s: float,
    ) -> None:
        self._slots = slots
        self._messages = messages
        self.end = end
        self.begun = False
        self.waits_since_s: float | None = now_s  # None: the server has something to do.
        self.ended: Ended | None = None

    def __enter__(self) -> Slot[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._slots.leave(self)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        self.waits_since_s = self._slots.now()
        try:
            message = next(self._messages)
        finally:
            self.waits_since_s = None
        self.begun = True
        return message


class StreamSlots:
    """The places of one kind of stream. Safe from any thread."""

    def __init__(
        self,
        limit: int,
        *,
        first_s: float = FIRST_S,
        silent_s: float = SILENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._first_s = first_s
        self._silent_s = silent_s
        self.now = clock
        self._changed = threading.Condition()
        self._slots: dict[int, Slot[object]] = {}  # Oldest first.
        self._looking = False
        self.ended: Counter[Ended] = Counter()

    def take(self, messages: Iterator[T], end: Callable[[], object]) -> Slot[T] | None:
        """A place for a stream, or None where all are taken by streams that have begun.

        `end` ends the stream, from any thread.
        """
        slot = Slot(self, messages, end, self.now())
        with self._changed:
            if len(self._slots) >= self._limit:
                oldest = next((item for item in self._slots.values() if not item.begun), None)
                if oldest is None:
                    return None
                self._end(oldest, Ended.REPLACED)
                del self._slots[id(oldest)]
            self._slots[id(slot)] = cast("Slot[object]", slot)
            if not self._looking:
                self._looking = True
                threading.Thread(target=self._look, name="stream-slots", daemon=True).start()
        return slot

    def leave(self, slot: Slot[T]) -> None:
        with self._changed:
            self._slots.pop(id(slot), None)
            self._changed.notify_all()

    def _end(self, slot: Slot[object], why: Ended) -> None:
        slot.ended = why
        self.ended[why] += 1
        slot.end()

    def _look(self) -> None:
        pause_s = min(self._first_s, self._silent_s, 4.0) / 4
        with self._changed:
            while self._slots:
                self.end_silent()
                self._changed.wait(pause_s)
            self._looking = False

    def end_silent(self) -> None:
        """End what has been silent for too long. Called by a thread of its own."""
        with self._changed:
            for slot in list(self._slots.values()):
                since_s = slot.waits_since_s
                if since_s is None or slot.ended is not None:
                    continue
                silent_s = self.now() - since_s
                if silent_s > (self._silent_s if slot.begun else self._first_s):
                    self._end(slot, Ended.SILENT if slot.begun else Ended.FIRST_LATE)


class StreamGate(grpc.ServerInterceptor):
    """Puts every stream of requests of a server into slots. For servers whose handlers do not."""

    def __init__(self, slots: StreamSlots) -> None:
        self._slots = slots

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Q, P] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Q, P] | None:
        handler = continuation(handler_call_details)
        if handler is None or not handler.request_streaming or not handler.response_streaming:
            return handler
        behavior = cast(_Behavior, handler.stream_stream)
        slots = self._slots

        def serve(requests: Iterator[object], context: grpc.ServicerContext) -> Iterator[object]:
            slot = slots.take(requests, context.cancel)
            if slot is None:
                abort_with(
                    context,
                    Reason.TOO_MANY_STREAMS,
                    "too many streams are open: close some, or ask again later",
                )
            with slot:
                yield from behavior(slot, context)

        made: object = grpc.stream_stream_rpc_method_handler(
            serve,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return cast("grpc.RpcMethodHandler[Q, P]", made)
