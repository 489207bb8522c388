"""A follower: carries out what it is told, in order, and reports what came of it.

Decides nothing. A command that is not the next one, or that it cannot make sense of, is never
guessed at: `OutOfStep`, and the process ends, which the leader hears. Knows no gRPC.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from prestage.hosts.v1 import hosts_pb2 as pb
from trainer_worker.engine import Dispatched, EngineParts, PendingMetrics
from trainer_worker.hosts import outcomes
from trainer_worker.hosts.chain import COMPUTED, FAILED, Chain, kind_of, numbers_digest
from trainer_worker.hosts.commands import Carried, Executor
from trainer_worker.hosts.errors import OutOfStep
from trainer_worker.hosts.shards import ShardKeeper

log = logging.getLogger("prestage.hosts")

FETCHES: Final = 20
"""Parts fetched at a time; more than a leader ever asks for, so that none waits for another's room."""


@dataclass(frozen=True, kw_only=True)
class _Watched:
    number: int
    work: Dispatched
    metrics: PendingMetrics | None = None


class Follower:
    """One process's engine, driven by commands. `report` is called from several threads."""

    def __init__(
        self,
        parts: EngineParts,
        keeper: ShardKeeper,
        *,
        incarnation: str,
        report: Callable[[pb.Report], None],
        progress: Callable[[str], None] = lambda busy: None,
    ) -> None:
        """`progress` hears what begins (its name) and when that ended (empty)."""
        self._executor = Executor(parts, keeper.get)
        self._keeper = keeper
        self._report = report
        self._progress = progress
        self._chain = Chain(incarnation)
        self._inputs: dict[int, pb.MicroBatchRef] = {}
        self._next = (0, 0)
        self._fetches = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch")
        self._watched: queue.Queue[_Watched | None] = queue.Queue()
        self._watcher = threading.Thread(target=self._watch, name="settle", daemon=True)
        self._watcher.start()

    @property
    def last_number(self) -> int:
        """The last command that was carried out. Safe from any thread."""
        return self._chain.length

    @property
    def shard_bytes(self) -> int:
        return self._keeper.received_bytes

    def hold(self, hold: pb.Hold) -> None:
        """Fetch a part in the background and report when it is here. Never waits."""
        self._fetches.submit(self._fetch, hold)

    def _fetch(self, hold: pb.Hold) -> None:
        try:
            held = self._keeper.hold(hold)
        except Exception as error:  # Nobody looks at this thread's future.
            log.exception("the part of micro-batch %s could not be fetched", hold.batch.index)
            held = pb.Held(batch=hold.batch, error=f"{type(error).__name__}: {error}")
        self._report(pb.Report(held=held))

    def obey(self, command: pb.Command) -> None:
        """Carry out the next command and report it done. On one thread. Raises `OutOfStep`."""
        if command.number != self._chain.length + 1:
            raise OutOfStep(
                f"command {command.number} ({kind_of(command)}) came after command"
                f" {self._chain.length}: one was lost, doubled or reordered"
            )
        self._progress(kind_of(command))
        error = ""
        carried: Carried | None = None
        try:
            carried = self._executor.carry_out(command)
            outcome = carried.outcome
        except OutOfStep:
            raise
        except Exception as raised:
            log.exception("command %d (%s) raised", command.number, kind_of(command))
            outcome, error = outcomes.of_error(raised), f"{raised}"[:500]
        if carried is not None:
            self._follow_up(command, carried)
        link = self._chain.add(command, outcome)
        done = pb.Done(number=command.number, chain=link, outcome=outcome, error=error)
        self._report(pb.Report(done=done))
        self._progress("")

    def _follow_up(self, command: pb.Command, carried: Carried) -> None:
        """What is needed next, and who waits for what was dispatched."""
        if command.HasField("prepare"):
            self._inputs[command.number] = command.prepare.batch
        elif command.HasField("fwd_bwd"):
            ref = self._inputs.pop(command.fwd_bwd.prepared)
            self._needs(ref.step, ref.index + 1)
            assert carried.dispatched is not None
            self._watched.put(_Watched(number=command.number, work=carried.dispatched))
        elif carried.update is not None:
            self._needs(self._next[0] + 1, 0)
            update = carried.update
            self._watched.put(
                _Watched(number=command.number, work=update.completion, metrics=update.metrics)
            )
        elif command.HasField("compute_logprobs"):
            self._keeper.release(command.compute_logprobs.batch)
        elif command.HasField("evaluate"):
            self._keeper.release(command.evaluate.batch)
        elif command.HasField("abort_step"):
            self._inputs.clear()
            self._needs(self._next[0], 0)
        elif carried.position is not None and command.HasField("restore"):
            self._inputs.clear()
            self._keeper.clear()
            self._needs(carried.position.step, 0)

    def _needs(self, step: int, index: int) -> None:
        self._next = (step, index)
        self._keeper.needs(step, index)

    def _watch(self) -> None:
        while (watched := self._watched.get()) is not None:
            settled = pb.Settled(number=watched.number, digest=COMPUTED)
            try:
                watched.work.wait()
                if watched.metrics is not None:
                    settled.digest = numbers_digest(watched.metrics.result())
            except Exception as error:
                settled.digest, settled.error = FAILED, f"{type(error).__name__}: {error}"[:500]
            self._report(pb.Report(settled=settled))
            del watched

    def stop(self) -> None:
        """Let the threads go; none is waited for."""
        self._watched.put(None)
        self._fetches.shutdown(wait=False, cancel_futures=True)
