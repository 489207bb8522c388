"""The RolloutIngest server: its own port, pool and limits, so that producers starve nobody else.

Streams that say nothing are bounded in number and in time; connections that do not finish their
handshake are ended by gRPC.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import grpc

from orchestrator.ingest.board import PolicyBoard
from orchestrator.ingest.counters import IngestCounters, IngestCounts
from orchestrator.ingest.limits import IngestLimits
from orchestrator.ingest.ports import RolloutLog
from orchestrator.ingest.streams import Streams
from orchestrator.ingest.watching import Watchers
from prestage.wire.channel import ServerGuard, bind, make_server

log = logging.getLogger("prestage.ingest")

SERVICE: Final = "prestage.rollout.v1.RolloutIngest"
_SPARE_THREADS: Final = 16
_STREAMS_PER_CONNECTION: Final = 128
_HANDSHAKE_MS: Final = 10_000
_MESSAGE_SLACK: Final = 64 << 10  # A little over the limit is refused by us, with the reason.


class IngestServer:
    """Serves `log` to producers and `board` to samplers."""

    def __init__(
        self,
        rollout_log: RolloutLog,
        *,
        run_id: str,
        listen: str,
        board: PolicyBoard | None = None,
        limits: IngestLimits | None = None,
        guard: ServerGuard | None = None,
        on_refused: Callable[[str, str], None] = lambda service, reason: None,
    ) -> None:
        """Binds `listen` (unix:///path or host:port). Raises `AddressError`.

        `on_refused`: hears the service and the reason of every stream that it ended.
        """
        limits = limits or IngestLimits()
        self._limits = limits
        self.board = board or PolicyBoard()
        self._counters = IngestCounters(lambda reason: on_refused(SERVICE, reason.value))
        self._streams = Streams(
            rollout_log,
            run_id=run_id,
            board=self.board,
            limits=limits,
            counters=self._counters,
        )
        self._watchers = Watchers(
            rollout_log,
            run_id=run_id,
            board=self.board,
            limits=limits,
            counters=self._counters,
        )
        threads = limits.max_producers + limits.max_unopened + limits.max_watchers + _SPARE_THREADS
        self._server = make_server(
            threads,
            name="ingest",
            guard=guard,
            max_calls=threads,  # What has no thread is refused, not queued.
            changes=_options(limits),
        )
        # Bytes in and out: messages are bounded and scanned before they are parsed.
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "SubmitTrajectories": grpc.stream_stream_rpc_method_handler(self._streams.serve),
            "WatchPolicy": grpc.unary_stream_rpc_method_handler(self._watchers.serve),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        self.port = bind(self._server, "--listen", listen, guard=guard)
        self._listen = listen

    def start(self) -> None:
        self._server.start()
        log.info("rollouts are taken at %s", self._listen)

    def counts(self) -> IngestCounts:
        """What was counted so far."""
        return self._counters.read(lag_seconds=self._streams.lag_seconds())

    def stop(self, *, finished: bool, grace_s: float = 5.0) -> None:
        """End every stream. `finished`: the run has ended, and samplers are told so; producers that
        are between two connections are waited for a little.

        Nothing is on its way into the log once this returns. Idempotent.
        """
        if finished:
            self.board.finish()
        refusal = self._streams.closed_refusal
        self._watchers.close(refusal)
        self._streams.close(refusal, linger_s=self._limits.linger_s if finished else 0.0)
        self._server.stop(grace_s).wait()
        self._streams.settle()


def _options(limits: IngestLimits) -> dict[str, int]:
    return {
        "grpc.max_receive_message_length": limits.max_message_bytes + _MESSAGE_SLACK,
        "grpc.max_concurrent_streams": _STREAMS_PER_CONNECTION,
        "grpc.server_handshake_timeout_ms": _HANDSHAKE_MS,
    }
