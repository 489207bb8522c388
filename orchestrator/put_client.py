"""The feeder's sender: puts micro-batches on the plane that the worker offers."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from prestage.microbatch import MicroBatch
from prestage.wire.stream_plane import StreamSender


class StreamPut:
    """`PutPort` on the stream plane. `session` gives (epoch, incarnation) at the time of a put."""

    def __init__(
        self,
        channel: grpc.Channel,
        session: Callable[[], tuple[int, str]],
        *,
        timeout_s: float = 900.0,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._sender = StreamSender(channel, metadata)
        self._session = session
        self._timeout_s = timeout_s

    def put(self, batch: MicroBatch) -> int:
        epoch, incarnation = self._session()
        response = self._sender.put(
            batch, epoch=epoch, incarnation=incarnation, timeout_s=self._timeout_s
        )
        return 0 if response.duplicate else int(response.received_bytes)
