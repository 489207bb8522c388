"""The leader's view of its followers: numbers commands, compares answers, and says when one is lost.

Knows no gRPC and no engine: a follower is a function that takes commands, and reports come in from
wherever. The first fault decides: `lost` is set once, with the reason, and nothing is sent any more.
Everything here is safe from any thread and never waits, except the two methods that say so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Final, TypeVar, cast

from prestage.hosts.v1 import hosts_pb2 as pb
from trainer_worker.engine import InvalidBatch
from trainer_worker.hosts.chain import FAILED, Chain, kind_of
from trainer_worker.hosts.errors import HostLost, JoinRefused

log = logging.getLogger("prestage.hosts")

KNOWN_S: Final = 0.05
ALONE_S: Final = 10.0
"""One host's work failed: the others must fail, too, or they wait in a collective for ever."""

T = TypeVar("T")
Send = Callable[[pb.Command], None]

LOSS_EXPLAINS_S: Final = 1.0
"""A collective that fails because a host died fails before or after the host is missed."""


@dataclass(frozen=True, kw_only=True)
class HostBudgets:
    """What may take how long before it counts as a fault. Seconds."""

    join_s: float = 600.0  # From the leader's start until every follower has joined.
    compile_s: float = 7200.0  # Loading the engine; a compile.
    stall_s: float = 1800.0  # Any other command, until a follower reports it done.
    silence_s: float = 300.0  # A follower's Python not running at all; more while it compiles.

    def of(self, command: pb.Command) -> float:
        return self.compile_s if command.HasField("compile") else self.stall_s


@dataclass(kw_only=True)
class _Follower:
    """What the leader knows of one."""

    send: Send
    heard_s: float
    ready: bool = False
    last_done: int = 0
    shard_bytes: int = 0
    closed: bool = False


@dataclass(kw_only=True)
class _Sent:
    """A command that not everybody has reported done."""

    command: pb.Command
    sent_s: float
    missing: set[int]
    chain: bytes | None = None  # The leader's own link, once it executed it.
    outcome: str = ""
    links: dict[int, pb.Done] = field(default_factory=dict)
    finished: Future[None] = field(default_factory=Future)


@dataclass(kw_only=True)
class _Holding:
    """A micro-batch on its way to the hosts."""

    asked_s: float
    missing: set[int]
    finished: Future[int] = field(default_factory=Future)  # Bytes that were sent.
    sent_bytes: int = 0


@dataclass(kw_only=True)
class _Work:
    """Dispatched work that not every host knows the end of."""

    digests: dict[int, bytes] = field(default_factory=dict)
    error: str = ""
    error_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class GroupFacts:
    """For metrics and logs."""

    shard_bytes: Mapping[int, int]  # Bytes that each follower received, by process.
    commands: int
    lost: str


def batch_key(ref: pb.MicroBatchRef) -> tuple[str, int, int, str]:
    return ref.run_id, ref.step, ref.index, ref.digest


class HostGroup:
    """See the module."""

    def __init__(
        self,
        *,
        num_processes: int,
        incarnation: str,
        settings: Mapping[str, str],
        budgets: HostBudgets | None = None,
        now: Callable[[], float] = time.monotonic,
        on_lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`settings`: flags that every process must share. `on_lost` hears of the first fault."""
        if num_processes < 2:
            raise ValueError(f"num_processes is {num_processes}: a group has at least 2")
        self.incarnation = incarnation
        self.size = num_processes
        self.budgets = budgets or HostBudgets()
        self.lost: Future[str] = Future()
        self._settings = dict(settings)
        self._now = now
        self._on_lost = on_lost
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._followers: dict[int, _Follower] = {}
        self._engine: dict[str, str] | None = None
        self._chain = Chain(incarnation)
        self._next = 1
        self._sent: dict[int, _Sent] = {}
        self._holding: dict[tuple[str, int, int, str], _Holding] = {}
        self._work: dict[int, _Work] = {}
        self._started_s = now()
        self._closing = False

    # -- coming together --------------------------------------------------------------------------

    def join(self, hello: pb.Hello, send: Send) -> int:
        """A follower came. Returns its process id. Raises `JoinRefused`, `HostLost`."""
        with self._changed:
            self._check_lost()
            who = hello.process_id
            if hello.num_processes != self.size:
                raise JoinRefused(
                    f"process {who} was started with --num_processes={hello.num_processes}; the"
                    f" leader has {self.size}"
                )
            if not 1 <= who < self.size:
                raise JoinRefused(
                    f"process_id is {who}: followers of this group are 1 to {self.size - 1}"
                )
            if who in self._followers:
                raise JoinRefused(
                    f"process {who} has joined already: each process has an id of its own, and one"
                    " that ended does not come back (the group restarts as a whole)"
                )
            for name in sorted(set(self._settings) | set(hello.settings)):
                ours, theirs = self._settings.get(name), hello.settings.get(name)
                if ours != theirs:
                    raise JoinRefused(
                        f"process {who} was started with --{name}={theirs}, the leader with"
                        f" --{name}={ours}: all processes need the same engine flags"
                    )
            self._followers[who] = _Follower(send=send, heard_s=self._now())
            send(pb.Command(welcome=pb.Welcome(incarnation=self.incarnation)))
            self._changed.notify_all()
            log.info("host %d of %d has joined", who, self.size)
            return who

    def await_joined(self) -> None:
        """Wait for every follower, then tell them to load their engines. Raises `HostLost`."""
        with self._changed:
            limit_s = self._started_s + self.budgets.join_s
            while len(self._followers) < self.size - 1:
                self._check_lost()
                left_s = limit_s - self._now()
                if left_s <= 0:
                    missing = sorted(set(range(1, self.size)) - set(self._followers))
                    self.fail(
                        f"processes {missing} of {self.size} did not join within"
                        f" {self.budgets.join_s:g} s: are they running, and can they reach the leader?"
                    )
                    self._check_lost()
                self._changed.wait(timeout=min(left_s, 1.0))
            self._check_lost()
            for follower in self._followers.values():
                follower.heard_s = self._now()
                follower.send(pb.Command(start=pb.Start()))

    def await_ready(self, engine: Mapping[str, str]) -> None:
        """Wait until every follower has loaded its engine. Raises `HostLost`.

        `engine`: what the leader's is; one that differs is a fault.
        """
        with self._changed:
            if self._engine is not None and self._engine != dict(engine):
                self.fail(f"a host's engine is {self._engine}, the leader's is {dict(engine)}")
            self._engine = dict(engine)
            while not all(follower.ready for follower in self._followers.values()):
                self._check_lost()
                self._changed.wait(timeout=1.0)
            self._check_lost()

    # -- commands ---------------------------------------------------------------------------------

    def command(self, command: pb.Command) -> int:
        """Number and send one. The caller executes it itself too. Raises `HostLost`."""
        with self._changed:
            self._check_lost()
            number = self._next
            self._next += 1
            command.number = number
            self._sent[number] = _Sent(
                command=command, sent_s=self._now(), missing=set(self._followers)
            )
            for follower in self._followers.values():
                follower.send(command)
            return number

    def executed(self, number: int, outcome: str) -> None:
        """The leader itself carried out a command, with this outcome. In order."""
        with self._changed:
            sent = self._sent[number]
            assert self._chain.length == number - 1, "the leader executes in order, too"
            sent.chain = self._chain.add(sent.command, outcome)
            sent.outcome = outcome
            for who, done in list(sent.links.items()):
                self._compare(who, sent, done)
            self._retire(number, sent)

    def await_done(self, number: int) -> None:
        """Wait until every follower has carried out a command. Raises `HostLost`."""
        with self._lock:
            sent = self._sent.get(number)
            self._check_lost()
        if sent is not None:
            self.guarded(sent.finished)

    def guarded(self, future: Future[T]) -> T:
        """Its result, unless a host is lost first: then `HostLost`, without waiting any longer."""
        if self.lost.done():
            wait([future], timeout=KNOWN_S)  # What is known already is still given out.
        either = cast(list[Future[object]], [future, self.lost])
        wait(either, return_when=FIRST_COMPLETED)
        if future.done() and future.exception() is None:
            return future.result()
        if future.done():
            # Whoever was in a collective with a host that died fails too: name the cause.
            wait([self.lost], timeout=LOSS_EXPLAINS_S if _may_be_a_loss(future) else 0)
        if self.lost.done():
            raise HostLost(self.lost.result()) from (future.exception() if future.done() else None)
        return future.result()

    # -- shards -----------------------------------------------------------------------------------

    def hold(self, ref: pb.MicroBatchRef, shards: Mapping[int, pb.Command]) -> Future[int]:
        """Ask every follower to hold its part; the future says how many bytes went out.

        `shards`: the hold command of each follower. Asking again joins the first asking.
        """
        with self._changed:
            self._check_lost()
            key = batch_key(ref)
            holding = self._holding.get(key)
            if holding is None:
                holding = _Holding(asked_s=self._now(), missing=set(shards))
                self._holding[key] = holding
                for who, command in shards.items():
                    self._followers[who].send(command)
            return holding.finished

    # -- what comes in ----------------------------------------------------------------------------

    def report(self, who: int, report: pb.Report) -> None:
        """A follower's report."""
        with self._changed:
            if self.lost.done():
                return
            follower = self._followers[who]
            follower.heard_s = self._now()
            match report.WhichOneof("what"):
                case "beat":
                    follower.shard_bytes = report.beat.shard_bytes
                case "done":
                    self._done(who, follower, report.done)
                case "settled":
                    told = report.settled
                    self.settled(who, told.number, told.digest, told.error)
                case "held":
                    self._held(who, follower, report.held)
                case "ready":
                    self._is_ready(who, follower, dict(report.ready.engine))
                case "failed":
                    self.fail(f"host {who} cannot go on: {report.failed.reason}")
                case other:
                    self.fail(f"host {who} reported {other!r}, which means nothing here")
            self._changed.notify_all()

    def _is_ready(self, who: int, follower: _Follower, engine: dict[str, str]) -> None:
        ours = self._engine
        if ours is None:
            # The leader still loads: compared with the next one that comes, and then its own.
            ours = self._engine = engine
        for name in sorted(set(ours) | set(engine)):
            if ours.get(name) != engine.get(name):
                self.fail(
                    f"host {who}'s engine has {name} {engine.get(name)}, another's"
                    f" {ours.get(name)}: every host needs the same devices and model"
                )
                return
        follower.ready = True

    def _done(self, who: int, follower: _Follower, done: pb.Done) -> None:
        if done.number != follower.last_done + 1:
            self.fail(
                f"host {who} reported command {done.number} done after command"
                f" {follower.last_done}: one was lost, doubled or reordered"
            )
            return
        sent = self._sent.get(done.number)
        if sent is None or who not in sent.missing:
            self.fail(f"host {who} reported command {done.number} done, which was not sent to it")
            return
        follower.last_done = done.number
        sent.links[who] = done
        if sent.chain is not None:
            self._compare(who, sent, done)
        self._retire(done.number, sent)

    def _compare(self, who: int, sent: _Sent, done: pb.Done) -> None:
        sent.missing.discard(who)
        if done.chain == sent.chain:
            return
        what = f"command {done.number} ({kind_of(sent.command)})"
        if done.outcome != sent.outcome:
            detail = f": {done.error}" if done.error else ""
            self.fail(
                f"host {who} diverged at {what}: it came to {done.outcome!r}{detail}, the leader to"
                f" {sent.outcome!r}"
            )
        else:
            self.fail(
                f"host {who} diverged at {what}: it executed another command, or others before"
            )

    def _retire(self, number: int, sent: _Sent) -> None:
        if sent.chain is not None and not sent.missing and not self.lost.done():
            self._sent.pop(number, None)
            if not sent.finished.done():
                sent.finished.set_result(None)

    def settled(self, who: int, number: int, digest: bytes, error: str = "") -> None:
        """What dispatched work came to became known on a host (0: the leader itself)."""
        with self._changed:
            if self.lost.done():
                return
            work = self._work.setdefault(number, _Work())
            work.digests[who] = digest
            if error and not work.error:
                work.error, work.error_s = f"host {who}: {error}", self._now()
            if len(set(work.digests.values())) > 1:
                if FAILED in work.digests.values():
                    self.fail(
                        f"command {number} failed on one host and not on another: {work.error}"
                    )
                else:
                    odd = sorted(w for w, d in work.digests.items() if d != work.digests.get(0))
                    self.fail(
                        f"the metrics of the update in command {number} are not the same on every"
                        f" host (hosts {odd} differ): their parameters cannot be trusted"
                    )
            if len(work.digests) == self.size:
                del self._work[number]

    def _held(self, who: int, follower: _Follower, held: pb.Held) -> None:
        key = batch_key(held.batch)
        name = f"micro-batch {held.batch.run_id}/{held.batch.step}/{held.batch.index}"
        if held.error:
            self.fail(f"host {who} could not take its part of {name}: {held.error}")
            return
        holding = self._holding.get(key)
        if holding is None or who not in holding.missing:
            self.fail(f"host {who} reported that it holds {name}, which it was not asked for")
            return
        holding.missing.discard(who)
        holding.sent_bytes += held.received_bytes
        follower.shard_bytes += held.received_bytes
        if not holding.missing:
            del self._holding[key]
            holding.finished.set_result(holding.sent_bytes)

    def closed(self, who: int, why: str) -> None:
        """A follower's connection ended."""
        with self._changed:
            follower = self._followers.get(who)
            if follower is None:
                return
            follower.closed = True
            if not (self._closing and follower.last_done == self._next - 1):
                self.fail(f"host {who} is gone: {why}")
            self._changed.notify_all()

    # -- faults -----------------------------------------------------------------------------------

    def look(self) -> None:
        """Whether somebody is silent or stuck. Called every so often."""
        with self._changed:
            if self.lost.done():
                return
            now_s = self._now()
            compiling = any(sent.command.HasField("compile") for sent in self._sent.values())
            for who, follower in self._followers.items():
                if follower.closed:
                    continue
                loading = compiling or not follower.ready
                silence_s = self.budgets.compile_s if loading else self.budgets.silence_s
                if now_s - follower.heard_s > silence_s:
                    self.fail(f"host {who} said nothing for {now_s - follower.heard_s:.0f} s")
                    return
            for number, sent in sorted(self._sent.items()):
                late = sorted(sent.missing - set(sent.links))
                budget_s = self.budgets.of(sent.command)
                if late and now_s - sent.sent_s > budget_s:
                    self.fail(
                        f"hosts {late} have not carried out command {number}"
                        f" ({kind_of(sent.command)}) after {budget_s:g} s: alive, but stuck"
                    )
                    return
                if late:
                    break  # Executed in order: only the oldest one can be what is stuck.
            for number, work in self._work.items():
                if work.error and now_s - work.error_s > ALONE_S:
                    self.fail(f"command {number} failed and not on every host: {work.error}")
                    return
            for key, holding in self._holding.items():
                if now_s - holding.asked_s > self.budgets.stall_s:
                    self.fail(
                        f"hosts {sorted(holding.missing)} do not hold their part of micro-batch"
                        f" {key[0]}/{key[1]}/{key[2]} after {self.budgets.stall_s:g} s"
                    )
                    return

    def fail(self, reason: str) -> None:
        """The group is lost, for the first reason that is given."""
        with self._changed:
            if self.lost.done():
                return
            self.lost.set_result(reason)
            self._changed.notify_all()
        log.critical("the group of %d hosts is lost: %s", self.size, reason)
        self._on_lost(reason)

    def lost_reason(self) -> str:
        """Empty while the group is whole."""
        return self.lost.result() if self.lost.done() else ""

    def _check_lost(self) -> None:
        if self.lost.done():
            raise HostLost(self.lost.result())

    # -- the end ----------------------------------------------------------------------------------

    def closing(self) -> None:
        """From now on a follower that carried out everything may leave."""
        with self._changed:
            self._closing = True

    def facts(self) -> GroupFacts:
        with self._changed:
            return GroupFacts(
                shard_bytes={who: f.shard_bytes for who, f in self._followers.items()},
                commands=self._next - 1,
                lost=self.lost_reason(),
            )


def _may_be_a_loss(future: Future[T]) -> bool:
    """Whether what the future raised could be the backend's own word for a lost host."""
    return not isinstance(future.exception(), InvalidBatch | ValueError | MemoryError)
