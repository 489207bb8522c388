"""A producer's connection: every rollout reaches the log once, over any number of connections.

Rollouts wait here until they are acknowledged. After a lost connection the service says which
offset it has not got (`next_offset`), and sending goes on from there: what is durable is not sent
again, what is not is. One background thread; callbacks of futures run on it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Final

import grpc

from orchestrator.client.errors import (
    ProducerClosed,
    ProducerError,
    ProducerRefused,
    ProducerUnreachable,
    RunEnded,
)
from orchestrator.client.rollout import Encoded, Finish, Rollout, encode
from orchestrator.client.watcher import Cancellable, PolicyWatcher
from orchestrator.ingest.ports import Receipt
from orchestrator.trajectory import Trajectory
from prestage.rollout.refusals import RETRIED, RolloutReason, RolloutRefusal, classify_rollout
from prestage.rollout.v1 import rollout_pb2 as pb
from prestage.rollout.v1.rollout_pb2_grpc import RolloutIngestStub
from prestage.wire.channel import check_address, open_channel
from prestage.wire.errors import Unknown
from prestage.wire.security import Role, Security

log = logging.getLogger("prestage.client")

Metadata = Sequence[tuple[str, str]]

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0


@dataclass(kw_only=True)
class _Entry:
    """A rollout that is not acknowledged."""

    encoded: Encoded
    receipt: Future[Receipt]


class _Connection:
    """One stream's sending side; guarded by the producer's lock."""

    def __init__(self) -> None:
        self.opened = False
        self.window = 0
        self.sent = 0  # Of the unacknowledged entries, from the oldest.
        self.over = False


class RolloutProducer:
    """Sends rollouts to an orchestrator. Safe from any thread.

    `producer`: a name of its own for each process; a restarted one keeps its name. `run_id`: the
    orchestrator's. `submit` waits while `max_pending` rollouts or `max_pending_bytes` are not
    acknowledged: that is how a slow trainer is felt.
    """

    def __init__(
        self,
        address: str,
        *,
        producer: str,
        run_id: str,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
        security: Security | None = None,
        max_pending: int = 512,
        max_pending_bytes: int = 256 << 20,
        unreachable_s: float = 600.0,
    ) -> None:
        """Begins to connect. Refusals show in `submit` and in futures.

        `security`: certificate and token of the role submit, followed as their files change;
        `credentials` and `metadata` are for those who have their own. Raises `AddressError`,
        `SecurityError`.
        """
        check_address("address", address)
        if max_pending < 1 or max_pending_bytes < 1:
            raise ValueError(
                f"max_pending is {max_pending} and max_pending_bytes {max_pending_bytes}; use 1 or"
                " more"
            )
        self._address = address
        self._name = producer
        self._run_id = run_id
        self._metadata = tuple(metadata)
        self._max_pending = max_pending
        self._max_pending_bytes = max_pending_bytes
        self._unreachable_s = unreachable_s
        if security is None:
            self._channel = open_channel(address, credentials)
        else:
            self._channel = security.open_channel("address", address, Role.SUBMIT)
        self._stub = RolloutIngestStub(self._channel)
        self._cond = threading.Condition()
        self._entries: deque[_Entry] = deque()  # Oldest first.
        self._pending_bytes = 0
        self._first: int | None = None  # Offset of the oldest entry, once the service said it.
        self._closing = False
        self._lost = 0  # Entries that a failure took.
        self._failure: ProducerError | None = None
        self._heard_s = time.monotonic()
        self._connections = 0
        self._told = -1  # Connections when an outage was last logged: each once.
        self._call: Cancellable | None = None
        self._watchers: list[PolicyWatcher] = []
        self._thread = threading.Thread(
            target=self._serve, name=f"rollout-producer-{producer}", daemon=True
        )
        self._thread.start()

    # -- for its user -------------------------------------------------------------------------

    def submit(
        self, rollout: Rollout | Trajectory, *, timeout_s: float | None = None
    ) -> Future[Receipt]:
        """Queue a rollout; its receipt comes once it is durable at the orchestrator.

        Waits while too much is not acknowledged. Raises `RolloutValueError` (it cannot be sent),
        `TimeoutError` (not taken within `timeout_s`), `ProducerError` (nothing is taken any more).
        """
        encoded = encode(rollout if isinstance(rollout, Rollout) else Rollout.of(rollout))
        entry = _Entry(encoded=encoded, receipt=Future())
        with self._cond:
            if not self._cond.wait_for(self._has_room, timeout_s):
                raise TimeoutError(
                    f"{len(self._entries)} rollouts ({self._pending_bytes} bytes) are not"
                    f" acknowledged after {timeout_s:g} s: the trainer is slower than the samplers,"
                    f" or {self._address} does not answer"
                )
            if self._failure is not None:
                raise self._failure
            if self._closing:
                raise ProducerClosed(f"producer {self._name!r} is closed")
            self._entries.append(entry)
            self._pending_bytes += encoded.payload_bytes
            self._cond.notify_all()
        return entry.receipt

    def fail(self, group_id: str, index: int, *, timeout_s: float | None = None) -> Future[Receipt]:
        """Say that this completion will never come, so that its group does not wait for it.

        Its group goes on with the others if enough of them are left, and is dropped at once if not.
        As `submit` otherwise.
        """
        return self.submit(
            Rollout(
                group_id=group_id,
                index=index,
                segments=(),
                reward=0.0,
                dispatched_version=0,
                finish=Finish.FAILED,
            ),
            timeout_s=timeout_s,
        )

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything that was submitted is acknowledged. Raises as `submit`.

        A run that has ended is no error here as long as it took everything.
        """
        with self._cond:
            if not self._cond.wait_for(lambda: not self._entries or self._failure, timeout_s):
                raise TimeoutError(
                    f"{len(self._entries)} rollouts are not acknowledged after {timeout_s:g} s"
                )
            failure = self._failure
            if failure is not None and (self._lost or not isinstance(failure, RunEnded)):
                raise failure

    def next_offset(self, timeout_s: float | None = None) -> int:
        """How many rollouts of this producer, of former processes too, are durable.

        Waits for the connection; a producer that replays a fixed list goes on from there. Raises
        `TimeoutError`, `ProducerError`.
        """
        with self._cond:
            known = self._cond.wait_for(
                lambda: self._first is not None or self._failure is not None, timeout_s
            )
            if self._failure is not None:
                raise self._failure
            if not known or self._first is None:
                raise TimeoutError(f"{self._address} did not answer within {timeout_s:g} s")
            return self._first

    def watch(self) -> PolicyWatcher:
        """The policy version and finished groups, as they change. Closed with the producer."""
        watcher = PolicyWatcher(
            self._stub,
            run_id=self._run_id,
            metadata=self._metadata,
            unreachable_s=self._unreachable_s,
        )
        with self._cond:
            self._watchers.append(watcher)
        return watcher

    @property
    def reconnections(self) -> int:
        """Connections made after the first one."""
        with self._cond:
            return max(0, self._connections - 1)

    def close(self, timeout_s: float | None = 60.0) -> None:
        """Flush, then leave. Idempotent. Raises as `flush`; the producer is closed even so."""
        try:
            self.flush(timeout_s)
        finally:
            with self._cond:
                self._closing = True
                watchers, abandoned, call = list(self._watchers), bool(self._entries), self._call
                self._cond.notify_all()
            for watcher in watchers:
                watcher.close()
            if abandoned:
                self._fail(ProducerClosed(f"producer {self._name!r} was closed before this ack"))
                if call is not None:
                    call.cancel()
            self._thread.join(timeout=5)
            self._channel.close()

    def __enter__(self) -> RolloutProducer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        # The error that ends the block is the one to tell.
        with contextlib.suppress(ProducerError, TimeoutError):
            self.close(timeout_s=0.0)

    # -- the thread -----------------------------------------------------------------------------

    def _has_room(self) -> bool:
        if self._failure is not None or self._closing or not self._entries:
            return True
        return (
            len(self._entries) < self._max_pending and self._pending_bytes < self._max_pending_bytes
        )

    def _serve(self) -> None:
        pause_s = _FIRST_PAUSE_S
        self._heard_s = time.monotonic()
        while True:
            with self._cond:
                if self._failure is not None or (self._closing and not self._entries):
                    return
            opened, ended = self._connect()
            if opened:
                with self._cond:
                    self._heard_s = time.monotonic()  # A full log may have been silent for long.
            pause_s = _FIRST_PAUSE_S if opened else min(_LONGEST_PAUSE_S, 2 * pause_s)
            failure = self._judge(ended)
            if failure is not None:
                self._fail(failure)
                return
            with self._cond:
                if isinstance(ended, RolloutRefusal) and ended.reason is RolloutReason.IDLE:
                    self._cond.wait_for(lambda: self._entries or self._closing)
                    self._heard_s = time.monotonic()
                elif not (self._closing and not self._entries):
                    self._cond.wait_for(lambda: self._closing and not self._entries, pause_s)

    def _judge(self, ended: RolloutRefusal | Unknown | None) -> ProducerError | None:
        """Whether to give up after a connection that ended so."""
        where = f"producer {self._name!r} at {self._address}"
        if isinstance(ended, RolloutRefusal):
            if ended.reason is RolloutReason.RUN_ENDED:
                return RunEnded(f"{where}: {ended.message}")
            if ended.reason not in RETRIED:
                return ProducerRefused(f"{where}: {ended.reason.value}: {ended.message}")
        with self._cond:
            silent_s = time.monotonic() - self._heard_s
            closing = self._closing and not self._entries
        why = ended.message if isinstance(ended, RolloutRefusal) else str(ended)
        if ended is not None and not closing:
            if silent_s > self._unreachable_s:
                return ProducerUnreachable(
                    f"{where}: no connection for {silent_s:.0f} s ({why}); what was not"
                    " acknowledged may be durable: a producer of the same name goes on from there"
                )
            level = logging.INFO if self._connections > self._told else logging.DEBUG
            self._told = self._connections
            log.log(level, "%s: no connection, trying again: %s", where, why)
        return None

    def _connect(self) -> tuple[bool, RolloutRefusal | Unknown | None]:
        """One stream to its end: whether it was opened, and why it ended (None: we closed it)."""
        connection = _Connection()
        call = self._stub.SubmitTrajectories(self._requests(connection), metadata=self._metadata)
        with self._cond:
            self._call = call
            if self._failure is not None:  # Closed between the lines above.
                call.cancel()
        try:
            for answer in call:
                if answer.WhichOneof("part") == "opened":
                    self._opened(connection, answer.opened)
                else:
                    self._acknowledged(connection, answer.ack)
            return connection.opened, None
        except grpc.RpcError as error:
            return connection.opened, classify_rollout(error)
        except ProducerError as error:
            self._fail(error)
            return True, None
        finally:
            with self._cond:
                connection.over = True
                self._cond.notify_all()
            call.cancel()

    def _requests(self, connection: _Connection) -> Iterator[pb.SubmitTrajectoriesRequest]:
        """What the stream sends. Runs on a thread of gRPC's."""
        yield pb.SubmitTrajectoriesRequest(
            open=pb.OpenProducer(producer=self._name, run_id=self._run_id)
        )
        while (following := self._following(connection)) is not None:
            offset, encoded = following
            yield from encoded.requests(offset)

    def _following(self, connection: _Connection) -> tuple[int, Encoded] | None:
        """The next rollout to send, with its offset; None: the stream is to end."""

        def may_send() -> bool:
            return connection.opened and connection.sent < min(
                len(self._entries), connection.window
            )

        with self._cond:
            self._cond.wait_for(
                lambda: (
                    connection.over
                    or may_send()
                    or self._failure is not None
                    or (self._closing and not self._entries)
                )
            )
            if connection.over or not may_send():
                return None
            entry = self._entries[connection.sent]
            offset = (self._first or 0) + connection.sent
            connection.sent += 1
            return offset, entry.encoded

    def _opened(self, connection: _Connection, opened: pb.ProducerOpened) -> None:
        """The service says from where to send. Raises `ProducerRefused` when that cannot be."""
        settled: list[tuple[int, _Entry]] = []
        with self._cond:
            self._connections += 1
            if self._first is None:
                self._first = opened.next_offset
            durable = opened.next_offset - self._first
            if not 0 <= durable <= len(self._entries):
                raise ProducerRefused(
                    f"producer {self._name!r} at {self._address}: the service goes on from offset"
                    f" {opened.next_offset}, and {self._first} to"
                    f" {self._first + len(self._entries)} is what can be sent: "
                    + (
                        "its journal has lost what it acknowledged (was it replaced?)"
                        if durable < 0
                        else "another process sends under this name; give each its own"
                    )
                )
            for _ in range(durable):
                settled.append((self._first, self._pop()))
            connection.window = max(1, opened.window)
            connection.opened = True
            self._heard_s = time.monotonic()
            self._cond.notify_all()
        for offset, entry in settled:
            entry.receipt.set_result(
                Receipt(
                    offset=offset,
                    accepted=True,
                    duplicate=True,
                    message="durable; its connection was lost before the ack that says whether it"
                    " was kept",
                    verdict_known=False,
                )
            )

    def _acknowledged(self, connection: _Connection, ack: pb.Ack) -> None:
        with self._cond:
            if not connection.sent or ack.offset != self._first:
                raise ProducerRefused(
                    f"producer {self._name!r} at {self._address}: the service acknowledged offset"
                    f" {ack.offset}, and {self._first} was the next one: it is not an orchestrator"
                    " of this version"
                )
            entry = self._pop()
            connection.sent -= 1
            self._heard_s = time.monotonic()
            self._cond.notify_all()
        entry.receipt.set_result(
            Receipt(
                offset=ack.offset,
                accepted=ack.accepted,
                duplicate=ack.duplicate,
                reason=ack.reason,
                message=ack.message,
                verdict_known=not ack.verdict_lost,
            )
        )

    def _pop(self) -> _Entry:
        """Take the oldest entry out; the lock is held."""
        entry = self._entries.popleft()
        self._pending_bytes -= entry.encoded.payload_bytes
        self._first = (self._first or 0) + 1
        return entry

    def _fail(self, failure: ProducerError) -> None:
        """Nothing is sent any more: everybody who waits is told why."""
        with self._cond:
            if self._failure is None:
                self._failure = failure
            lost, self._entries = list(self._entries), deque()
            self._lost += len(lost)
            self._pending_bytes = 0
            self._cond.notify_all()
        for entry in lost:
            entry.receipt.set_exception(failure)
