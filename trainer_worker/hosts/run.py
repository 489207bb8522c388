"""A process of the group, from its start to its end: the leader's set-up, and a follower's whole life.

Whatever goes wrong between the hosts ends every one of their processes with status `LOST_EXIT_CODE`: a
collective that waits for a dead host cannot be taken back, and only the group as a whole starts again.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from prestage.hosts.v1 import hosts_pb2 as pb
from prestage.operation.heartbeat import SILENCE_S, Progress
from prestage.wire.channel import ServerGuard
from prestage.wire.security import Security
from trainer_worker.engine import EngineParts
from trainer_worker.engines.processes import Processes
from trainer_worker.hosts.engine import hosts_parts
from trainer_worker.hosts.errors import HostLost, OutOfStep
from trainer_worker.hosts.follower import Follower
from trainer_worker.hosts.group import HostBudgets, HostGroup
from trainer_worker.hosts.link import FollowerLink, LeaderServer
from trainer_worker.hosts.settings import HostSettings
from trainer_worker.hosts.shards import Offers, ShardKeeper

log = logging.getLogger("prestage.hosts")

LOST_EXIT_CODE: Final = 71
"""Exit status of every process of a group that lost a host (EX_OSERR)."""
LINGER_S: Final = 5.0
"""How long a leader that lost a host goes on answering, so that its caller hears why."""
_LAST_WORDS_S: Final = 0.5

Create = Callable[[Processes], EngineParts]


def end_lost(reason: str) -> None:
    """Say why and end at once: threads in a collective with a dead host never return."""
    log.critical("ending this process: %s", reason)
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stderr.flush()
    os._exit(LOST_EXIT_CODE)


def engine_facts(parts: EngineParts) -> dict[str, str]:
    """What must be the same on every host."""
    able = parts.training.capabilities
    return {
        "engine": able.engine,
        "device_kind": able.device_kind,
        "devices": str(able.device_count),
        "processes": str(able.process_count),
        "vocab_size": str(able.vocab_size),
        "moe_layers": str(able.moe_layers),
        "row_multiple": str(able.row_multiple),
        "checkpoints": str(able.can_checkpoint),
        "train_step": str(parts.training.train_step),
    }


class Leader:
    """Process 0's side: meets the followers, then gives out an engine that is all of them."""

    def __init__(
        self,
        settings: HostSettings,
        shared: Mapping[str, str],
        *,
        incarnation: str,
        budgets: HostBudgets,
        guard: ServerGuard | None = None,
        end: Callable[[str], None] = end_lost,
        linger_s: float = LINGER_S,
    ) -> None:
        """Binds the group's address. `shared`: flags that must be equal. Raises `AddressError`."""
        self._settings = settings
        self._end = end
        self._linger_s = linger_s
        self._loaded = False
        self._offers = Offers()
        self.group = HostGroup(
            num_processes=settings.processes.num_processes,
            incarnation=incarnation,
            settings=shared,
            budgets=budgets,
            on_lost=self._lost,
        )
        self._server = LeaderServer(self.group, self._offers, settings.listen, guard)

    def load(self, create: Create) -> EngineParts:
        """Wait for all to join, load everybody's engine at once. Raises `HostLost`."""
        self._server.start()
        log.info("waiting for %d other processes at %s", self.group.size - 1, self._settings.listen)
        self.group.await_joined()
        parts = create(self._settings.processes)
        self.group.await_ready(engine_facts(parts))
        self._loaded = True
        return hosts_parts(parts, self.group, self._offers)

    def _lost(self, reason: str) -> None:
        """On the thread that noticed: it may be any."""
        linger_s = self._linger_s if self._loaded else _LAST_WORDS_S

        def end() -> None:
            time.sleep(linger_s)
            self._end(reason)

        threading.Thread(target=end, name="hosts-end", daemon=True).start()

    def stop(self) -> None:
        self._server.stop()


class FollowerProgress:
    """What a follower is at, for its heartbeat. Safe from any thread."""

    def __init__(self, budgets: HostBudgets, *, now: Callable[[], float] = time.monotonic) -> None:
        self._budgets = budgets
        self._now = now
        self._busy = "loading"
        self._progress_s = now()
        self.on_progress: Callable[[], object] = lambda: None

    def made(self, busy: str) -> None:
        """`busy`: the command that begins; empty = it ended."""
        self._busy, self._progress_s = busy, self._now()
        self.on_progress()

    def read(self) -> Progress:
        busy, progress_s = self._busy, self._progress_s
        slow = busy in ("loading", "compile")
        allowance_s = self._budgets.compile_s if slow else self._budgets.stall_s
        return Progress(
            state={"loading": "STARTING", "compile": "COMPILING", "": "IDLE"}.get(busy)
            or f"FOLLOWING {busy}",
            progress_s=progress_s,
            allowance_s=allowance_s if busy else math.inf,
            silence_s=max(SILENCE_S, self._budgets.compile_s) if slow else SILENCE_S,
            started=busy != "loading",
            ready=busy != "loading",
            reason="the engine is loading" if busy == "loading" else "",
        )


class FollowerProcess:
    """A follower from joining to the leader's close."""

    def __init__(
        self,
        settings: HostSettings,
        shared: Mapping[str, str],
        *,
        budgets: HostBudgets,
        store_bytes: int,
        progress: FollowerProgress,
        security: Security | None = None,
        end: Callable[[str], None] = end_lost,
    ) -> None:
        """`store_bytes`: limit of the parts of micro-batches that it keeps."""
        self._settings = settings
        self._shared = dict(shared)
        self._budgets = budgets
        self._store_bytes = store_bytes
        self._progress = progress
        self._end = end
        self._link = FollowerLink(settings.dial, security or Security())
        self._inbox: queue.SimpleQueue[pb.Command] = queue.SimpleQueue()
        self._started = threading.Event()
        self._follower: Follower | None = None
        self._closing = False

    def run(self, create: Create) -> None:
        """Join, load, carry out commands until the leader closes. Raises `AddressError`,
        `JoinRefused`, and what `create` raises; any later fault ends the process."""
        where = self._settings.processes
        hello = pb.Hello(
            process_id=where.process_id, num_processes=where.num_processes, settings=self._shared
        )
        log.info("joining the leader at %s as host %d", self._settings.dial, where.process_id)
        self._link.join(hello, self._budgets.join_s)
        self._link.start_beating(self._beat)
        threading.Thread(target=self._listen, name="hosts-commands", daemon=True).start()
        self._started.wait()
        try:
            parts = create(where)
        except Exception as error:
            self._cannot(f"its engine could not be loaded: {error}")
            raise
        keeper = ShardKeeper(self._store_bytes, self._link.fetch)
        self._follower = Follower(
            parts,
            keeper,
            incarnation=self._link.incarnation,
            report=self._link.report,
            progress=self._progress.made,
        )
        self._progress.made("")
        self._link.report(pb.Report(ready=pb.Ready(engine=engine_facts(parts))))
        log.info("host %d follows", where.process_id)
        try:
            while self._obey(self._inbox.get()):
                pass
        except Exception as error:
            log.exception("host %d cannot go on", where.process_id)
            self._cannot(f"{type(error).__name__}: {error}")
            self._end(str(error))
            return
        log.info(
            "host %d ends: received %d bytes in %d parts of micro-batches",
            where.process_id,
            keeper.received_bytes,
            keeper.received_parts,
        )
        self._follower.stop()
        self._link.close()

    def _obey(self, command: pb.Command) -> bool:
        assert self._follower is not None
        closes = command.HasField("close")
        self._closing = self._closing or closes
        self._follower.obey(command)
        return not closes

    def _cannot(self, reason: str) -> None:
        """Tell the leader, and give the words time to leave."""
        self._link.report(pb.Report(failed=pb.Failed(reason=reason[:900])))
        time.sleep(_LAST_WORDS_S)

    @property
    def shard_bytes(self) -> int:
        """Of micro-batches, received so far. Safe from any thread."""
        return 0 if self._follower is None else self._follower.shard_bytes

    def _beat(self) -> pb.Beat:
        follower = self._follower
        if follower is None:
            return pb.Beat()
        return pb.Beat(last_number=follower.last_number, shard_bytes=follower.shard_bytes)

    def _listen(self) -> None:
        try:
            for command in self._link.commands():
                if command.HasField("start"):
                    self._started.set()
                elif command.HasField("hold"):
                    if self._follower is None:
                        raise OutOfStep("a micro-batch came before the engine was loaded")
                    self._follower.hold(command.hold)
                else:
                    self._inbox.put(command)
                    if command.HasField("close"):
                        return  # What follows is the end of the connection.
        except (HostLost, OutOfStep) as error:
            if not self._closing:
                self._end(str(error))
