"""One SubmitTrajectories stream, and who holds which producer's name.

A stream has two threads. The reader takes one message at a time, decodes it and queues it in the
log, where it waits while the log is full: so a full log is felt by the producer through HTTP/2 flow
control, and nothing is queued here but `window` receipts. The handler (gRPC's own thread) answers
with the receipts, in order, as they become durable.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import grpc

from orchestrator.ingest.board import PolicyBoard
from orchestrator.ingest.counters import IngestCounters
from orchestrator.ingest.decode import (
    MAX_PRODUCER,
    MessageError,
    Rejected,
    TrajectoryParts,
    check_name,
    parse_request,
)
from orchestrator.ingest.limits import IngestLimits
from orchestrator.ingest.ports import IngestClosed, OffsetGap, Receipt, RolloutLog
from orchestrator.trajectory import Trajectory
from prestage.rollout.refusals import RolloutReason, RolloutRefusal, abort_rollout
from prestage.rollout.v1 import rollout_pb2 as pb

log = logging.getLogger("prestage.ingest")


@dataclass(frozen=True, kw_only=True)
class _Queued:
    """A trajectory in the log whose ack is owed."""

    receipt: Future[Receipt]
    tokens: int
    since_s: float


class _Ended(Exception):
    """The stream is over; carries why, unless the producer left."""

    def __init__(self, refusal: RolloutRefusal | None) -> None:
        super().__init__()
        self.refusal = refusal


def _ended(reason: RolloutReason, message: str) -> _Ended:
    return _Ended(RolloutRefusal(reason=reason, message=message))


class RecentNames:
    """The newest names of many: what is kept does not grow with the weeks."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._names: OrderedDict[str, None] = OrderedDict()

    def add(self, name: str) -> None:
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > self._most:
            self._names.popitem(last=False)

    def discard(self, name: str) -> None:
        self._names.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)


class Streams:
    """All streams of the service: who has not said a name yet, and who holds which name."""

    def __init__(
        self,
        rollout_log: RolloutLog,
        *,
        run_id: str,
        board: PolicyBoard,
        limits: IngestLimits,
        counters: IngestCounters,
    ) -> None:
        self.log = rollout_log
        self.run_id = run_id
        self.limits = limits
        self.counters = counters
        self.parts_in_hand = threading.BoundedSemaphore(limits.parts_in_hand)
        self._board = board
        self._lock = threading.Lock()
        self._unopened: OrderedDict[int, Stream] = OrderedDict()
        self._named: dict[str, Stream] = {}
        self._closing: RolloutRefusal | None = None
        self._closed: list[Stream] = []
        # Once the run has ended, producers that come back are still told so for a while.
        self._lingering = False
        self._told = threading.Condition(self._lock)
        self._away = RecentNames()  # Opened in this process, and lost since.
        self._parted = RecentNames()  # Left by themselves, or were told of the end.

    def serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """The gRPC handler."""
        stream = Stream(self, requests, context)
        with self._lock:
            closing = None if self._lingering else self._closing
            evicted = None
            if closing is None:
                self._unopened[id(stream)] = stream
                if len(self._unopened) > self.limits.max_unopened:
                    _, evicted = self._unopened.popitem(last=False)
        if evicted is not None:
            evicted.end(
                RolloutRefusal(
                    reason=RolloutReason.OPEN_LATE,
                    message=f"more than {self.limits.max_unopened} streams have not sent `open`;"
                    " this was the oldest: connect again and send it first",
                )
            )
        if closing is not None:
            self.counters.refused(closing.reason)
            abort_rollout(context, closing)
        try:
            yield from stream.answers()
        finally:
            self._forget(stream)

    def claim(self, producer: str, stream: Stream) -> Stream | None:
        """Make `stream` the one of this producer. Returns the older one, which is ended.

        Raises `_Ended` when there are too many producers.
        """
        with self._lock:
            if self._unopened.pop(id(stream), None) is None:
                raise _Ended(None)  # It is being ended already.
            if self._closing is not None:
                self._part(producer)
                raise _Ended(self._closing)
            older = self._named.get(producer)
            if older is None and len(self._named) >= self.limits.max_producers:
                raise _ended(
                    RolloutReason.TOO_MANY_PRODUCERS,
                    f"{len(self._named)} producers are connected, which is the limit; send through"
                    " fewer producers (one can carry many groups)",
                )
            self._named[producer] = stream
            stream.claimed = producer
            self._parted.discard(producer)
        if older is not None:
            older.end(
                RolloutRefusal(
                    reason=RolloutReason.SUPERSEDED,
                    message=f"a newer stream of producer {producer!r} took over; two processes"
                    " with one name take turns for ever: give each its own",
                )
            )
        return older

    def left(self, producer: str) -> None:
        """It closed its side and has every ack: it is not waited for."""
        with self._lock:
            self._part(producer)

    def _part(self, producer: str) -> None:
        self._parted.add(producer)
        self._away.discard(producer)
        self._told.notify_all()

    def _forget(self, stream: Stream) -> None:
        with self._lock:
            self._unopened.pop(id(stream), None)
            if self._named.get(stream.claimed) is stream:
                del self._named[stream.claimed]
                if stream.claimed not in self._parted:
                    self._away.add(stream.claimed)

    def close(self, refusal: RolloutRefusal, *, linger_s: float = 0.0) -> None:
        """End every stream, and every later one, with `refusal`.

        With `linger_s`, waits up to so long for producers that are between two connections, so that
        they hear it too.
        """
        with self._lock:
            self._closing, self._lingering = refusal, linger_s > 0
            streams = [*self._unopened.values(), *self._named.values()]
            for name in self._named:
                self._part(name)
            self._unopened.clear()
            self._closed = streams
        for stream in streams:
            stream.end(refusal)
        if linger_s > 0:
            durable = self.log.producers()
            with self._lock:
                self._told.wait_for(
                    lambda: not self._away and all(name in self._parted for name in durable),
                    linger_s,
                )
                self._lingering = False

    def settle(self) -> None:
        """After `close`: wait until nothing is on its way into the log."""
        for stream in self._closed:
            if not stream.settle():
                log.error("a stream of producer %r did not leave the log in time", stream.producer)
        self._closed = []

    @property
    def closed_refusal(self) -> RolloutRefusal:
        """What to answer when the log takes nothing any more."""
        if self._board.state.finished:
            return RolloutRefusal(
                reason=RolloutReason.RUN_ENDED,
                message=f"run {self.run_id!r} has ended; it takes nothing more",
            )
        return RolloutRefusal(
            reason=RolloutReason.STOPPING,
            message="the orchestrator is stopping; connect again once it is back",
        )

    def lag_seconds(self) -> float:
        """Age of the oldest trajectory that is queued in the log and not durable."""
        with self._lock:
            streams = list(self._named.values())
        now = time.monotonic()
        return max((stream.lag_seconds(now) for stream in streams), default=0.0)


class Stream:
    """One producer's connection."""

    def __init__(
        self, streams: Streams, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> None:
        self._streams = streams
        self._limits = streams.limits
        self._requests = requests
        self._context = context
        self._cond = threading.Condition()
        self._out: deque[bytes | _Queued] = deque()
        self._ending = False
        self._refusal: RolloutRefusal | None = None
        self._reader_done = False
        self._reading = False  # The reader waits for a message; else it works on one.
        self._heard_s = time.monotonic()
        self.claimed = ""  # The name that it holds; written by `Streams`.
        self._producer = ""  # The same, once the log has said from where.
        self._parts = TrajectoryParts(self._limits)
        self._holds_parts = False
        # Held while something is put into the log: who has it knows that nothing is on its way.
        self._append_lock = threading.Lock()
        self._newest: Future[Receipt] | None = None

    @property
    def producer(self) -> str:
        """Its name; empty until it has said so."""
        return self._producer

    # -- called from other streams' threads -----------------------------------------------------

    def end(self, refusal: RolloutRefusal | None) -> None:
        """End the stream soon, with this answer (None: the producer has left). First call wins."""
        with self._cond:
            if not self._ending:
                self._ending, self._refusal = True, refusal
            self._cond.notify_all()

    def settle(self) -> bool:
        """After `end`: wait until nothing of this stream is on its way into the log.

        False when that takes longer than `settle_s`.
        """
        if not self._append_lock.acquire(timeout=self._limits.settle_s):
            return False
        newest = self._newest
        self._append_lock.release()
        if newest is None:
            return True
        # Receipts of one producer come in order: the newest is the last.
        try:
            newest.exception(timeout=self._limits.settle_s)
        except TimeoutError:
            return False
        return True

    def lag_seconds(self, now_s: float) -> float:
        with self._cond:
            waiting = (item for item in self._out if isinstance(item, _Queued))
            first = next((item for item in waiting if not item.receipt.done()), None)
        return 0.0 if first is None else now_s - first.since_s

    # -- the handler's thread -------------------------------------------------------------------

    def answers(self) -> Iterator[bytes]:
        """What the producer is answered. Ends with an abort when the stream is ended by us."""
        if not self._context.add_callback(lambda: self.end(None)):
            return
        threading.Thread(target=self._read, name="ingest-reader", daemon=True).start()
        try:
            while (answer := self._next_answer()) is not None:
                yield answer
            self._streams.left(self._producer)
        except _Ended as ended:
            self.end(ended.refusal)
        finally:
            self.end(None)
            with self._cond:
                if self._producer:
                    self._streams.counters.producers(-1)
        refusal = self._refusal
        if refusal is not None:
            self._streams.counters.refused(refusal.reason)
            log.info("stream of producer %r ended: %s", self._producer, refusal.message)
            abort_rollout(self._context, refusal)

    def _next_answer(self) -> bytes | None:
        """Waits for it. None: the producer closed its side and has every ack."""
        with self._cond:
            while True:
                if self._ending:
                    raise _Ended(self._refusal)
                if self._out:
                    first = self._out[0]
                    if isinstance(first, bytes) or first.receipt.done():
                        self._out.popleft()
                        self._cond.notify_all()  # There is room in the window.
                        break
                elif self._reader_done:
                    return None
                self._cond.wait(self._patience_s())
        return first if isinstance(first, bytes) else self._ack(first)

    def _patience_s(self) -> float | None:
        """Seconds to wait before the stream counts as idle; None: it is not for it to speak."""
        if self._out or not self._reading:
            return None
        if not self._producer:
            allowed, reason = self._limits.open_s, RolloutReason.OPEN_LATE
        elif self._parts.open:
            allowed, reason = self._limits.part_s, RolloutReason.IDLE
        else:
            allowed, reason = self._limits.idle_s, RolloutReason.IDLE
        left = self._heard_s + allowed - time.monotonic()
        if left <= 0:
            what = "no `open`" if reason is RolloutReason.OPEN_LATE else "no message"
            raise _ended(reason, f"{what} within {allowed:g} s; connect again when there is one")
        return left

    def _ack(self, queued: _Queued) -> bytes:
        if queued.receipt.cancelled():
            raise _Ended(self._streams.closed_refusal)
        error = queued.receipt.exception()
        if isinstance(error, IngestClosed):
            raise _Ended(self._streams.closed_refusal)
        if error is not None:
            log.error("the log failed: %s", error, exc_info=error)
            raise _ended(
                RolloutReason.LOG_FAILED,
                f"the log failed ({type(error).__name__}: {error}); connect again, and send from"
                " next_offset",
            )
        receipt = queued.receipt.result()
        self._streams.counters.acknowledged(receipt, queued.tokens)
        return pb.SubmitTrajectoriesResponse(
            ack=pb.Ack(
                offset=receipt.offset,
                accepted=receipt.accepted,
                duplicate=receipt.duplicate,
                reason=receipt.reason,
                message=receipt.message,
                verdict_lost=not receipt.verdict_known,
            )
        ).SerializeToString()

    # -- the reader's thread --------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while (data := self._next_message()) is not None:
                self._take(data)
        except _Ended as ended:
            self.end(ended.refusal)
        except MessageError as error:
            self.end(RolloutRefusal(reason=RolloutReason.INVALID_REQUEST, message=str(error)))
        except IngestClosed:
            self.end(self._streams.closed_refusal)
        except OffsetGap as error:
            self.end(RolloutRefusal(reason=RolloutReason.OFFSET_GAP, message=str(error)))
        except Exception as error:  # A fault here must end the stream, not leave it silent.
            log.exception("the stream of producer %r failed", self._producer)
            self.end(
                RolloutRefusal(
                    reason=RolloutReason.LOG_FAILED,
                    message=f"the service failed ({type(error).__name__}: {error}); connect again",
                )
            )
        finally:
            if self._holds_parts:
                self._streams.parts_in_hand.release()
            with self._cond:
                self._reader_done = True
                self._cond.notify_all()

    def _next_message(self) -> bytes | None:
        with self._cond:
            self._cond.wait_for(lambda: self._ending or len(self._out) < self._limits.window)
            if self._ending:
                return None
            self._reading, self._heard_s = True, time.monotonic()
            self._cond.notify_all()  # The handler's patience begins.
        try:
            return next(self._requests, None)
        except grpc.RpcError:
            raise _Ended(None) from None  # The producer has gone.
        finally:
            with self._cond:
                self._reading = False

    def _take(self, data: bytes) -> None:
        request = parse_request(data, self._limits)
        if request.WhichOneof("part") == "open":
            self._open(request.open)
        elif not self._producer:
            raise _ended(RolloutReason.OPEN_MISSING, "`submit` came before `open`; open first")
        else:
            self._submit(request.submit)

    def _open(self, opening: pb.OpenProducer) -> None:
        if self._producer:
            raise _ended(RolloutReason.OPEN_MISSING, "`open` came twice; it comes once, first")
        check_name("producer", opening.producer, MAX_PRODUCER)
        if opening.run_id != self._streams.run_id:
            raise _ended(
                RolloutReason.WRONG_RUN,
                f"run_id is {opening.run_id[:64]!r}; this orchestrator serves run"
                f" {self._streams.run_id!r}",
            )
        older = self._streams.claim(opening.producer, self)
        if older is not None and not older.settle():
            raise _ended(
                RolloutReason.STOPPING,
                f"an older stream of producer {opening.producer!r} still has trajectories on their"
                " way into the log; connect again",
            )
        next_offset = self._streams.log.open_producer(opening.producer)
        with self._cond:
            if self._ending:  # The handler may be gone: nobody would count it out again.
                raise _Ended(None)
            self._producer = opening.producer
            self._streams.counters.producers(1)
        log.info("producer %r sends from offset %d", opening.producer, next_offset)
        opened = pb.ProducerOpened(next_offset=next_offset, window=self._limits.window)
        self._queue(pb.SubmitTrajectoriesResponse(opened=opened).SerializeToString())

    def _submit(self, submit: pb.Submit) -> None:
        if submit.offset >= 2**63:
            raise MessageError(f"offset is {submit.offset}; offsets count from 0 without a gap")
        if submit.more and not self._holds_parts:
            self._hold_parts()
        whole = self._parts.add(submit)
        if whole is None:
            return
        try:
            self._append(submit.offset, whole)
        finally:
            if self._holds_parts:
                self._holds_parts = False
                self._streams.parts_in_hand.release()

    def _hold_parts(self) -> None:
        """Large trajectories wait for one another: each is held whole in memory."""
        with self._streams.counters.waiting():
            while not self._streams.parts_in_hand.acquire(timeout=0.2):
                if self._ending:
                    raise _Ended(None)
        self._holds_parts = True

    def _append(self, offset: int, what: Trajectory | Rejected) -> None:
        with self._append_lock, self._streams.counters.waiting():
            if self._ending:
                raise _Ended(None)
            if isinstance(what, Rejected):
                receipt = self._streams.log.reject(
                    self._producer, offset, what.reason.value, what.message
                )
            else:
                receipt = self._streams.log.append(
                    self._producer, offset, what, cancelled=lambda: self._ending
                )
            if receipt.cancelled():
                raise _Ended(None)  # It waited for room, and nothing was queued.
            self._newest = receipt
        tokens = what.total_tokens if isinstance(what, Trajectory) else 0
        self._queue(_Queued(receipt=receipt, tokens=tokens, since_s=time.monotonic()))
        receipt.add_done_callback(self._wake)

    def _queue(self, item: bytes | _Queued) -> None:
        with self._cond:
            self._out.append(item)
            self._cond.notify_all()

    def _wake(self, receipt: Future[Receipt]) -> None:
        del receipt
        with self._cond:
            self._cond.notify_all()
