"""A channel that sends a role's token with each call and is opened again when its certificate changes.

A plain gRPC channel keeps the certificate that it was made with: a run that outlives it could not
connect again. Stubs stay valid over the change; calls that run then end where they began.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, Protocol, TypeAlias, TypeVar, cast

import grpc

Q = TypeVar("Q")
P = TypeVar("P")
Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]
Encode: TypeAlias = Callable[[Q], bytes]
Decode: TypeAlias = Callable[[bytes], P]

_KEPT: Final = 2
"""Former channels: a call that runs since before two renewals is nobody's."""


class _Link:
    """The channel that is open now, and what every call carries."""

    def __init__(
        self,
        open_now: Callable[[], tuple[int, grpc.Channel]],
        generation: Callable[[], int],
        metadata: Callable[[], Metadata],
    ) -> None:
        self._open_now = open_now
        self._generation = generation
        self._metadata = metadata
        self._lock = threading.Lock()
        self._former: deque[grpc.Channel] = deque()
        self._callbacks: dict[int, tuple[Callable[[grpc.ChannelConnectivity], None], bool]] = {}
        self._opened, self._channel = open_now()

    def now(self) -> tuple[int, grpc.Channel]:
        with self._lock:
            if self._generation() != self._opened:
                self._former.append(self._channel)
                self._opened, self._channel = self._open_now()
                for callback, connect in self._callbacks.values():
                    self._channel.subscribe(callback, try_to_connect=connect)
                while len(self._former) > _KEPT:
                    self._former.popleft().close()
            return self._opened, self._channel

    def subscribe(
        self, callback: Callable[[grpc.ChannelConnectivity], None], connect: bool
    ) -> None:
        _, channel = self.now()
        with self._lock:
            self._callbacks[id(callback)] = callback, connect
        channel.subscribe(callback, try_to_connect=connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        with self._lock:
            self._callbacks.pop(id(callback), None)
            channels = [self._channel, *self._former]
        for channel in channels:
            channel.unsubscribe(callback)

    def metadata(self, given: Metadata | None) -> Metadata:
        return (*(given or ()), *self._metadata())

    def close(self) -> None:
        with self._lock:
            channels = [self._channel, *self._former]
            self._former.clear()
        for channel in channels:
            channel.close()


class _Inner(Protocol):
    """One method's callable of a plain channel, of any of the four shapes."""

    def __call__(self, request: object, **options: object) -> object: ...
    def with_call(self, request: object, **options: object) -> object: ...
    def future(self, request: object, **options: object) -> object: ...


class _Method:
    """One method's callable, on the channel that is open now."""

    def __init__(self, link: _Link, make: Callable[[grpc.Channel], object]) -> None:
        self._link = link
        self._make = make
        self._made: tuple[int, _Inner] | None = None

    def _now(self) -> _Inner:
        opened, channel = self._link.now()
        made = self._made
        if made is None or made[0] != opened:
            made = self._made = opened, cast(_Inner, self._make(channel))
        return made[1]

    def _options(
        self,
        timeout: float | None,
        metadata: Metadata | None,
        wait_for_ready: bool | None,
        compression: grpc.Compression | None,
    ) -> dict[str, object]:
        return {
            "timeout": timeout,
            "metadata": self._link.metadata(metadata),
            "wait_for_ready": wait_for_ready,
            "compression": compression,
        }

    def __call__(
        self,
        request: object,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> object:
        return self._now()(request, **self._options(timeout, metadata, wait_for_ready, compression))

    def with_call(
        self,
        request: object,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> object:
        return self._now().with_call(
            request, **self._options(timeout, metadata, wait_for_ready, compression)
        )

    def future(
        self,
        request: object,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> object:
        return self._now().future(
            request, **self._options(timeout, metadata, wait_for_ready, compression)
        )


class SecureChannel(grpc.Channel):
    """Made by `Security.open_channel`. Safe from any thread."""

    def __init__(
        self,
        open_now: Callable[[], tuple[int, grpc.Channel]],
        generation: Callable[[], int],
        metadata: Callable[[], Metadata],
    ) -> None:
        """`open_now` opens a channel and says of which generation; `metadata` goes with each call."""
        self._link = _Link(open_now, generation, metadata)

    def subscribe(
        self,
        callback: Callable[[grpc.ChannelConnectivity], None],
        try_to_connect: bool | None = False,
    ) -> None:
        self._link.subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        self._link.unsubscribe(callback)

    def unary_unary(
        self,
        method: str,
        request_serializer: Encode[Q] | None = None,
        response_deserializer: Decode[P] | None = None,
        _registered_method: bool | None = False,
    ) -> grpc.UnaryUnaryMultiCallable[Q, P]:
        made = _Method(
            self._link,
            lambda channel: channel.unary_unary(method, request_serializer, response_deserializer),
        )
        return cast("grpc.UnaryUnaryMultiCallable[Q, P]", made)

    def unary_stream(
        self,
        method: str,
        request_serializer: Encode[Q] | None = None,
        response_deserializer: Decode[P] | None = None,
        _registered_method: bool | None = False,
    ) -> grpc.UnaryStreamMultiCallable[Q, P]:
        made = _Method(
            self._link,
            lambda channel: channel.unary_stream(method, request_serializer, response_deserializer),
        )
        return cast("grpc.UnaryStreamMultiCallable[Q, P]", made)

    def stream_unary(
        self,
        method: str,
        request_serializer: Encode[Q] | None = None,
        response_deserializer: Decode[P] | None = None,
        _registered_method: bool | None = False,
    ) -> grpc.StreamUnaryMultiCallable[Q, P]:
        made = _Method(
            self._link,
            lambda channel: channel.stream_unary(method, request_serializer, response_deserializer),
        )
        return cast("grpc.StreamUnaryMultiCallable[Q, P]", made)

    def stream_stream(
        self,
        method: str,
        request_serializer: Encode[Q] | None = None,
        response_deserializer: Decode[P] | None = None,
        _registered_method: bool | None = False,
    ) -> grpc.StreamStreamMultiCallable[Q, P]:
        made = _Method(
            self._link,
            lambda channel: channel.stream_stream(
                method, request_serializer, response_deserializer
            ),
        )
        return cast("grpc.StreamStreamMultiCallable[Q, P]", made)

    def close(self) -> None:
        self._link.close()

    def __enter__(self) -> SecureChannel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
