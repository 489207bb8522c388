"""What is done to a run, and where: a fault, and the injector that counts calls up to it.

Both launchers (`tests.chaos.worker`, `tests.chaos.orchestrator`) run the real program with an
injector in its gRPC calls. A fault fires once in a run, whatever restarts: a marker file says so.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FAULTS_FILE = "faults.json"
SUBMIT, ACK, JOURNAL = "(a rollout arrives)", "(an ack leaves)", "journal: "
"""What is counted beside gRPC calls, as if it were one."""


class Action(enum.Enum):
    """What happens at the call. Those of the worker happen in its handler, around the real one."""

    # On the worker.
    KILL_BEFORE = "worker killed before"
    KILL_AFTER = "worker killed after"
    KILL_LATER = "worker killed a little later"
    KILL_BOTH_BEFORE = "both killed before"
    KILL_BOTH_AFTER = "both killed after"
    STOP = "worker stopped (SIGSTOP)"
    DROP_REQUEST = "request dropped"
    DROP_REPLY = "reply dropped"
    DELAY_REQUEST = "request delayed"
    DELAY_REPLY = "reply delayed"
    DISCONNECT_BEFORE = "connection closed before"
    DISCONNECT_AFTER = "connection closed after"
    ORPHAN = "caller killed, request carried out after its successor opened the run"
    # On the orchestrator.
    CALLER_KILL_BEFORE = "orchestrator killed before"
    CALLER_KILL_DURING = "orchestrator killed during"
    CALLER_KILL_AFTER = "orchestrator killed after"
    CALLER_STOP = "orchestrator stopped (SIGSTOP)"
    DUPLICATE = "request sent twice"
    DUPLICATE_AT_ONCE = "request sent twice at once"
    DUPLICATE_LATE = "request sent again two calls later"
    # On the orchestrator's intake and journal.
    STREAM_BROKEN = "producer's stream broken"
    PRODUCER_KILL = "producer killed"
    JOURNAL_FULL = "journal's disk full for a while"

    @property
    def side(self) -> str:
        return "orchestrator" if self in _CALLERS else "worker"

    @property
    def at_intake(self) -> bool:
        """Only of a live run's intake or journal."""
        return self in (Action.STREAM_BROKEN, Action.PRODUCER_KILL, Action.JOURNAL_FULL)

    def happens_at(self, method: str) -> bool:
        """Whether it makes sense there."""
        if method.startswith(JOURNAL):
            # What is committed already needs no space.
            full = Action.JOURNAL_FULL if not method.endswith(("committed", "unlink")) else None
            return self in (Action.CALLER_KILL_BEFORE, full)
        if method in (SUBMIT, ACK):
            kills = Action.CALLER_KILL_BEFORE, Action.CALLER_KILL_AFTER, Action.CALLER_STOP
            return self in (*kills, Action.STREAM_BROKEN, Action.PRODUCER_KILL)
        return not self.at_intake

    @property
    def needs_deadline(self) -> bool:
        """Only a caller with short deadlines notices."""
        return self in (Action.STOP, Action.DELAY_REQUEST, Action.DELAY_REPLY)


_CALLERS = (
    Action.CALLER_KILL_BEFORE,
    Action.CALLER_KILL_DURING,
    Action.CALLER_KILL_AFTER,
    Action.CALLER_STOP,
    Action.DUPLICATE,
    Action.DUPLICATE_AT_ONCE,
    Action.DUPLICATE_LATE,
    Action.STREAM_BROKEN,
    Action.PRODUCER_KILL,
    Action.JOURNAL_FULL,
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """At the `occurrence`-th call of `method` (from 0) on the action's side, once."""

    action: Action
    method: str
    occurrence: int
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.action.value} at {self.method} {self.occurrence}"

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "action": self.action.name}


def write_faults(folder: Path, faults: Sequence[Fault]) -> None:
    (folder / FAULTS_FILE).write_text(json.dumps([fault.to_json() for fault in faults]))


def read_faults(folder: Path) -> list[Fault]:
    entries = json.loads((folder / FAULTS_FILE).read_text())
    return [Fault(**{**entry, "action": Action[entry["action"]]}) for entry in entries]


def fired(folder: Path, number: int) -> bool:
    return (folder / f"fired-{number}").exists()


class Injector:
    """Counts one process's calls and says when a fault is due. Safe from several threads."""

    def __init__(self, folder: Path, side: str) -> None:
        self.folder = folder
        self.side = side
        self.faults = read_faults(folder)
        self._counts = [0] * len(self.faults)
        self._lock = threading.Lock()
        self._log = (folder / f"calls-{side}.txt").open("a", buffering=1)
        (folder / f"{side}.pid").write_text(str(os.getpid()))

    def due(self, method: str) -> Fault | None:
        """Count a call; the fault that happens at it. A later fault counts once the earlier fired."""
        with self._lock:
            self._log.write(f"{os.getpid()}\t{method}\n")
            for number, fault in enumerate(self.faults):
                if fired(self.folder, number):
                    continue
                if fault.method != method or fault.action.side != self.side:
                    return None
                self._counts[number] += 1
                if self._counts[number] <= fault.occurrence:
                    return None
                (self.folder / f"fired-{number}").touch(exist_ok=False)
                return fault
        return None

    # -- what faults do ---------------------------------------------------------------------------

    def kill(self, *sides: str) -> None:
        """SIGKILL, this process last."""
        for side in sides:
            if side != self.side:
                # If it is not there, the other one dies alone.
                with contextlib.suppress(ProcessLookupError, FileNotFoundError, ValueError):
                    os.kill(int((self.folder / f"{side}.pid").read_text()), signal.SIGKILL)
        if self.side in sides:
            os.kill(os.getpid(), signal.SIGKILL)

    def stop(self, seconds: float) -> None:
        """SIGSTOP this process; the harness lets it go on after `seconds`."""
        note = self.folder / "stopped"
        note.with_suffix(".partial").write_text(f"{os.getpid()} {seconds}")
        note.with_suffix(".partial").replace(note)
        os.kill(os.getpid(), signal.SIGSTOP)

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        def work() -> None:
            time.sleep(seconds)
            what()

        threading.Thread(target=work, daemon=True).start()


def calls_of(folder: Path, side: str) -> Counter[str]:
    """How often each method was called, over all processes of a side."""
    path = folder / f"calls-{side}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return Counter(line.partition("\t")[2] for line in lines)
