"""How the processes of one trainer are connected: the leader's gRPC server, a follower's connection.

Followers dial in, so only the leader needs an address. The transport's own pings are answered without
Python: a process that is stopped, or whose host is gone, is missed within `DEAD_S` seconds, and one that
only holds its interpreter for long is not. Consumes reports and commands; decides nothing.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import grpc

from prestage.hosts.v1 import hosts_pb2 as pb
from prestage.wire.channel import AddressError, ServerGuard, bind, make_server
from prestage.wire.errors import classify
from prestage.wire.security import Role, Security
from trainer_worker.hosts.errors import HostLost, JoinRefused, OutOfStep
from trainer_worker.hosts.group import HostGroup
from trainer_worker.hosts.shards import Offers

log = logging.getLogger("prestage.hosts")

PING_S: Final = 4
PING_TIMEOUT_S: Final = 4
DEAD_S: Final = 10
"""Within so many seconds a process that does not run any more is missed, however it ended."""
BEAT_S: Final = 1.0
SERVICE: Final = "prestage.hosts.v1.Hosts"
_FETCHES_EACH: Final = 4

# Pings that fit a group that must notice a death.
_LINK: Final[Mapping[str, int]] = {
    "grpc.keepalive_time_ms": PING_S * 1000,
    "grpc.keepalive_timeout_ms": PING_TIMEOUT_S * 1000,
    "grpc.http2.ping_timeout_ms": PING_TIMEOUT_S * 1000,
    "grpc.http2.min_ping_interval_without_data_ms": 1000,
    "grpc.http2.max_ping_strikes": 0,
}

Answer = Iterator[bytes]


class LeaderServer:
    """Serves the group on an address of its own."""

    def __init__(
        self,
        group: HostGroup,
        offers: Offers,
        address: str,
        guard: ServerGuard | None = None,
    ) -> None:
        """Binds at once. `guard`: certificates and tokens; None = none. Raises `AddressError`."""
        self._group = group
        self._offers = offers
        threads = (group.size - 1) * (1 + _FETCHES_EACH) + 2
        self._server = make_server(threads, name="hosts-rpc", guard=guard, changes=_LINK)
        join = grpc.stream_stream_rpc_method_handler(
            self._join,
            request_deserializer=pb.Report.FromString,
            response_serializer=pb.Command.SerializeToString,
        )
        fetch: grpc.RpcMethodHandler[pb.FetchShardRequest, bytes] = (
            grpc.unary_stream_rpc_method_handler(
                self._fetch,
                request_deserializer=pb.FetchShardRequest.FromString,
                response_serializer=None,
            )
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, {"Join": join}),
                grpc.method_handlers_generic_handler(SERVICE, {"FetchShard": fetch}),
            )
        )
        self.port = bind(self._server, "--hosts_address", address, guard=guard)
        self._stopped = threading.Event()
        self._clock = threading.Thread(target=self._look, name="hosts-clock", daemon=True)

    def start(self) -> None:
        self._server.start()
        self._clock.start()

    def _look(self) -> None:
        while not self._stopped.wait(BEAT_S / 4):
            self._group.look()

    def _join(
        self, reports: Iterator[pb.Report], context: grpc.ServicerContext
    ) -> Iterator[pb.Command]:
        first = next(reports, None)
        if first is None or not first.HasField("hello"):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a host says hello first")
        commands: queue.SimpleQueue[pb.Command | None] = queue.SimpleQueue()
        try:
            who = self._group.join(first.hello, commands.put)
        except (JoinRefused, HostLost) as error:
            log.error("a host was refused: %s", error)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error)[:900])

        def gone() -> None:
            self._group.closed(
                who, "its connection ended (the process ended, or cannot be reached)"
            )
            commands.put(None)

        if not context.add_callback(gone):
            gone()
        threading.Thread(
            target=self._listen, args=(who, reports, commands), name=f"host-{who}", daemon=True
        ).start()
        while (command := commands.get()) is not None:
            yield command

    def _listen(
        self, who: int, reports: Iterator[pb.Report], commands: queue.SimpleQueue[pb.Command | None]
    ) -> None:
        try:
            for report in reports:
                self._group.report(who, report)
        except Exception as error:  # gRPC's types for a call that ended are not public.
            self._group.closed(who, f"its connection broke ({type(error).__name__})")
        finally:
            self._group.closed(who, "it ended the connection")
            commands.put(None)

    def _fetch(self, request: pb.FetchShardRequest, context: grpc.ServicerContext) -> Answer:
        if request.incarnation != self._group.incarnation:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another group's host")
        if not 1 <= request.process_id < self._group.size:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"there is no host {request.process_id}"
            )
        try:
            yield from self._offers.upload(request.batch, request.process_id)
        except KeyError:
            context.abort(grpc.StatusCode.NOT_FOUND, "that micro-batch is not on offer")

    def stop(self, grace_s: float = 1.0) -> None:
        self._stopped.set()
        self._server.stop(grace_s).wait()


class FollowerLink:
    """A follower's connection. Commands come out of it, reports go in; any thread may report."""

    def __init__(self, address: str, security: Security) -> None:
        """Raises `AddressError`, `SecurityError`."""
        self._channel = security.open_channel("--hosts_address", address, Role.DRIVE, changes=_LINK)
        self._address = address
        self._reports: queue.SimpleQueue[pb.Report | None] = queue.SimpleQueue()
        self._join = self._channel.stream_stream(
            f"/{SERVICE}/Join",
            request_serializer=pb.Report.SerializeToString,
            response_deserializer=pb.Command.FromString,
        )
        self._fetch: grpc.UnaryStreamMultiCallable[pb.FetchShardRequest, bytes] = (
            self._channel.unary_stream(
                f"/{SERVICE}/FetchShard",
                request_serializer=pb.FetchShardRequest.SerializeToString,
                response_deserializer=None,
            )
        )
        self._commands: Iterator[pb.Command] = iter(())
        self._process_id = 0
        self._stopped = threading.Event()
        self.incarnation = ""

    def join(self, hello: pb.Hello, timeout_s: float) -> None:
        """Reach the leader and become one of its group. Raises `AddressError`, `JoinRefused`."""
        try:
            grpc.channel_ready_future(self._channel).result(timeout=timeout_s)
        except grpc.FutureTimeoutError as error:
            raise AddressError(
                f"no leader answered at {self._address} within {timeout_s:g} s: is process 0"
                " running, and is --coordinator_address right?"
            ) from error
        self._process_id = hello.process_id
        self.report(pb.Report(hello=hello))
        self._commands = self._join(iter(self._reports.get, None))
        try:
            welcome = next(self._commands)
        except grpc.RpcError as error:
            raise JoinRefused(f"the leader at {self._address} refused: {_why(error)}") from error
        except StopIteration:
            raise JoinRefused(f"the leader at {self._address} ended the connection") from None
        self.incarnation = welcome.welcome.incarnation

    def commands(self) -> Iterator[pb.Command]:
        """Until the connection ends; then raises `HostLost`."""
        try:
            yield from self._commands
        except grpc.RpcError as error:
            raise HostLost(f"the connection to the leader ended: {_why(error)}") from error
        raise HostLost("the leader ended the connection")

    def report(self, report: pb.Report) -> None:
        """Never waits."""
        self._reports.put(report)

    def fetch(self, ref: pb.MicroBatchRef) -> Iterator[bytes]:
        """This host's part, as upload messages. Raises `OutOfStep` when it cannot be had."""
        request = pb.FetchShardRequest(
            incarnation=self.incarnation, process_id=self._process_id, batch=ref
        )
        try:
            yield from self._fetch(request)
        except grpc.RpcError as error:
            raise OutOfStep(f"a part of micro-batch {ref.step}/{ref.index}: {error}") from error

    def start_beating(self, read: Callable[[], pb.Beat]) -> None:
        """Say every second that Python runs here, from a thread of its own."""

        def beat() -> None:
            while not stopped.wait(BEAT_S):
                self.report(pb.Report(beat=read()))

        stopped = self._stopped
        threading.Thread(target=beat, name="beat", daemon=True).start()

    def close(self) -> None:
        """After the last report is on its way."""
        self._stopped.set()
        self._reports.put(None)
        with contextlib.suppress(grpc.RpcError):
            for _ in self._commands:  # The leader ends its side when it has everything.
                pass
        self._channel.close()


def _why(error: grpc.RpcError) -> str:
    outcome = classify(error)
    return str(outcome)


__all__ = ["DEAD_S", "AddressError", "FollowerLink", "LeaderServer"]
