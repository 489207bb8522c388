"""A group of processes within one: a leader's engine, and followers that can be made to misbehave."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.bench.synthetic import SyntheticShape, make_batch
from prestage.hosts.v1 import hosts_pb2 as pb
from prestage.microbatch import MicroBatch
from trainer_worker.clock import RealClock
from trainer_worker.engine import CompileSpec, EngineParts
from trainer_worker.engines.processes import Processes
from trainer_worker.engines.timed import TimedConfig
from trainer_worker.engines.timed_hosts import create_timed_host
from trainer_worker.hosts.engine import hosts_parts
from trainer_worker.hosts.errors import OutOfStep
from trainer_worker.hosts.follower import Follower
from trainer_worker.hosts.group import HostBudgets, HostGroup
from trainer_worker.hosts.shards import Offers, ShardKeeper

SHAPE = SyntheticShape(rows=6, tokens_per_row=64, real_length=60, micro_batches=3)
FAST = TimedConfig(fwd_bwd_seconds=0.001, update_seconds=0.0, copy_seconds=0.0)
FIELDS = ("advantages", "loss_mask", "positions", "sampling_logprobs", "segment_ids", "tokens")
SPEC = CompileSpec(rows=6, tokens_per_row=64, fields=FIELDS)
BUDGETS = HostBudgets(join_s=5.0, compile_s=5.0, stall_s=5.0, silence_s=20.0)


def batch(step: int, index: int) -> MicroBatch:
    return make_batch(SHAPE, "run", step, index)


def place(process_id: int, count: int) -> Processes:
    return Processes(num_processes=count, process_id=process_id, coordinator_address="127.0.0.1:9")


@dataclass(kw_only=True)
class Wire:
    """What happens to messages on their way. Each takes a message, gives those that arrive."""

    to_follower: Callable[[pb.Command], Sequence[pb.Command]] = lambda command: [command]
    to_leader: Callable[[pb.Report], Sequence[pb.Report]] = lambda report: [report]
    shard: Callable[[bytes], bytes] = lambda message: message


@dataclass(kw_only=True)
class Host:
    """A follower on threads of this process."""

    who: int
    follower: Follower
    keeper: ShardKeeper
    dead: threading.Event = field(default_factory=threading.Event)
    faults: list[str] = field(default_factory=list)


class Rig:
    """One leader and its followers, connected by function calls."""

    def __init__(
        self,
        *,
        count: int = 2,
        wires: dict[int, Wire] | None = None,
        budgets: HostBudgets = BUDGETS,
        checkpoint_dir: Path | None = None,
        make: Callable[[Processes], EngineParts] | None = None,
    ) -> None:
        def usual(where: Processes) -> EngineParts:
            return create_timed_host(FAST, RealClock(), where, checkpoint_dir)

        make = make or usual
        self.offers = Offers()
        self.lost = threading.Event()
        self.group = HostGroup(
            num_processes=count,
            incarnation="group",
            settings={"engine": "timed"},
            budgets=budgets,
            on_lost=lambda reason: self.lost.set(),
        )
        self.hosts: dict[int, Host] = {}
        self._stop = threading.Event()
        self._inboxes: list[queue.SimpleQueue[pb.Command | None]] = []
        for who in range(1, count):
            self._follow(who, make(place(who, count)), (wires or {}).get(who, Wire()))
        self.inner = make(place(0, count))
        self.parts = hosts_parts(self.inner, self.group, self.offers)
        clock = threading.Thread(target=self._look, daemon=True)
        clock.start()

    def _look(self) -> None:
        while not self._stop.wait(0.05):
            self.group.look()

    def _follow(self, who: int, parts: EngineParts, wire: Wire) -> None:
        inbox: queue.SimpleQueue[pb.Command | None] = queue.SimpleQueue()

        def report(message: pb.Report) -> None:
            if not host.dead.is_set():
                for arrived in wire.to_leader(message):
                    self.group.report(who, arrived)

        def fetch(ref: pb.MicroBatchRef) -> Iterator[bytes]:
            return map(wire.shard, self.offers.upload(ref, who))

        keeper = ShardKeeper(1 << 28, fetch)
        follower = Follower(parts, keeper, incarnation="group", report=report)
        host = Host(who=who, follower=follower, keeper=keeper)

        def send(message: pb.Command) -> None:
            for arrived in wire.to_follower(message):
                copy = pb.Command()
                copy.CopyFrom(arrived)
                if copy.HasField("hold"):
                    follower.hold(copy.hold)
                elif copy.number:
                    inbox.put(copy)

        def serve() -> None:
            while (command := inbox.get()) is not None:
                if host.dead.is_set():
                    return
                try:
                    follower.obey(command)
                except OutOfStep as error:
                    host.faults.append(str(error))
                    report(pb.Report(failed=pb.Failed(reason=str(error))))
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        self.hosts[who] = host
        self._inboxes.append(inbox)
        hello = pb.Hello(
            process_id=who, num_processes=self.group.size, settings={"engine": "timed"}
        )
        self.group.join(hello, send)
        self.group.report(who, pb.Report(ready=pb.Ready(engine={"engine": "timed"})))

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def kill(self, who: int) -> None:
        """As `kill -9` does: it says nothing any more, and its connection ends."""
        self.hosts[who].dead.set()
        self.group.closed(who, "killed")

    def close(self) -> None:
        self._stop.set()
        for inbox in self._inboxes:
            inbox.put(None)
        for host in self.hosts.values():
            host.follower.stop()


def train(parts: EngineParts, steps: int, *, first: int = 0, micro_batches: int = 2) -> None:
    """Unstaged steps, each waited for."""
    engine = parts.training
    for step in range(first, first + steps):
        for index in range(micro_batches):
            prepared = engine.prepare_fwd_bwd_input(batch(step, index))
            prepared.wait_ready()
            engine.fwd_bwd(prepared).wait()
        update = engine.update()
        update.completion.wait()
        update.metrics.result()
