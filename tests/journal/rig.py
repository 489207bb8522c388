"""A small live run, faults at its durable operations, and what its steps must be.

The model at the end forms groups, advantages, plans and bytes from whole trajectories in memory,
with none of the journal's code: what the journal gives is compared with that.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from orchestrator.advantages import AdvantageConfig, with_advantages
from orchestrator.feeder import always
from orchestrator.groups import GroupAssembler, GroupPolicy, Ledger
from orchestrator.ingest.ports import IngestClosed, Receipt
from orchestrator.journal.config import LiveConfig
from orchestrator.journal.log import DurableLog
from orchestrator.journal.order import Kind
from orchestrator.journal.segments import Probe, no_probe
from orchestrator.packing import PackingConfig, common_fields, plan_step
from orchestrator.sources.batches import BatchShape
from orchestrator.sources.live import LiveSource
from orchestrator.sources.packed import Packer
from orchestrator.trajectory import Trajectory, TrajectoryLimits

LIMITS = TrajectoryLimits(
    tokens_per_row=64, vocab_size=1000, required_fields=("sampling_logprobs",)
)


def config(folder: Path, **change: object) -> LiveConfig:
    """Groups of 2, two groups a step, rows of 64 tokens."""
    policy = {"group_size": 2, **change.pop("policy", {})}
    batches = {"groups_per_batch": 2, **change.pop("batches", {})}
    values = {
        "folder": folder,
        "run_id": "run",
        "limits": LIMITS,
        "policy": GroupPolicy(**policy),
        "packing": PackingConfig(rows=2, tokens_per_row=64),
        "batches": BatchShape(**batches),
        **change,
    }
    return LiveConfig(**values)


def rollout(
    group: str, index: int, *, tokens: int = 0, version: int = 0, reward: float | None = None
) -> Trajectory:
    """A trajectory whose content follows from its name."""
    rng = np.random.default_rng([index, *group.encode()])
    total = tokens or int(rng.integers(8, 60))
    prompt = max(1, total // 3)
    ids = rng.integers(1, 1000, total, dtype=np.int32)
    return Trajectory(
        group_id=group,
        index=index,
        prompt_tokens=ids[:prompt],
        completion_tokens=ids[prompt:],
        sampling_logprobs=-rng.random(total - prompt, dtype=np.float32) - 0.01,
        reward=float(rng.random()) if reward is None else reward,
        policy_version=version,
    )


def never() -> bool:
    return False


class Live:
    """An open journal and its source, for tests that speak to both."""

    def __init__(
        self,
        settings: LiveConfig,
        *,
        probe: Probe = no_probe,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.config = settings
        clocked = {} if clock is None else {"clock": clock}
        self.log = DurableLog(settings, probe=probe, **clocked)
        self.source = LiveSource(self.log, settings)

    def send(self, producer: str, trajectories: Iterable[Trajectory]) -> list[Receipt]:
        """Append from the producer's next offset; wait for every receipt."""
        start = self.log.open_producer(producer)
        futures = [
            self.log.append(producer, start + at, trajectory, cancelled=never)
            for at, trajectory in enumerate(trajectories)
        ]
        return [future.result(timeout=20) for future in futures]

    def group(
        self,
        name: str,
        *,
        size: int = 2,
        producer: str = "p",
        one_by_one: bool = False,
        **change: object,
    ) -> Receipt:
        """One whole group; the receipt of its last member."""
        members = [rollout(name, index, **change) for index in range(size)]
        if one_by_one:
            return [self.send(producer, [member])[0] for member in members][-1]
        return self.send(producer, members)[-1]

    def digests(self, step: int) -> list[str]:
        feed = self.source.open_step(step)
        assert feed is not None, f"no step {step}"
        digests = [batch.digest for batch in feed.micro_batches]
        assert len(digests) == feed.summary.micro_batches
        return digests

    def groups_of(self, step: int) -> list[str]:
        """Names of the groups that a step trains, in durable order."""
        batch = self.source._batch(self.config.batches.batch_of(step), step, always)
        assert batch is not None
        return [group.group_id for group in batch.groups[self.config.batches.part(step)]]

    def close(self) -> None:
        self.source.close()
        self.log.close()


@contextlib.contextmanager
def opened(settings: LiveConfig, **change: object) -> Iterator[Live]:
    live = Live(settings, **change)
    try:
        yield live
    finally:
        live.close()


# -- faults -----------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process dies here."""


@dataclass
class Faults:
    """A probe that dies, or meets a full disk, at chosen operations."""

    folder: Path  # Of the journal.
    die_at: int = -1  # Number of the operation, from 0.
    full: Callable[[int, str], bool] = field(default=lambda number, operation: False)
    lose_unsynced: bool = False  # The power goes with the process.
    operations: list[str] = field(default_factory=list)
    copy: Path | None = None  # What the disk held when it died.
    _synced: dict[str, int] = field(default_factory=dict)

    def __call__(self, operation: str) -> None:
        number = len(self.operations)
        self.operations.append(operation)
        if self.full(number, operation):
            raise OSError(errno.ENOSPC, "No space left on device")
        if number == self.die_at and self.copy is None:
            self.copy = self.folder.with_name(f"{self.folder.name}+")
            shutil.copytree(self.folder, self.copy)
            if self.lose_unsynced:
                for path in self.copy.glob("*.payload"):
                    size = path.stat().st_size
                    kept = self._synced.get(path.name, 0)
                    with path.open("r+b") as file:
                        file.truncate(kept + (size - kept) // 2)
            raise Crash
        if operation == "rows.begin":  # Comes after the sync of the payload files.
            for path in self.folder.glob("*.payload"):
                self._synced[path.name] = path.stat().st_size


# -- what must come of it ---------------------------------------------------------------------------


def journaled(folder: Path) -> dict[int, tuple[Kind, str, int]]:
    """Place in the durable order to (kind, producer, offset) of a journal that nobody holds."""
    path = folder / "journal.sqlite"
    if not path.exists():
        return {}
    connection = sqlite3.connect(path)
    try:
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            return {}
        rows = connection.execute("SELECT seq, kind, producer, producer_offset FROM events")
        return {seq: (Kind(kind), producer, offset) for seq, kind, producer, offset in rows}
    finally:
        connection.close()


class Model:
    """The steps that trajectories in durable order make, by the whole-trajectory code."""

    def __init__(self, settings: LiveConfig) -> None:
        self._config = settings
        self._groups = GroupAssembler(settings.policy, settings.limits)
        self._packer = Packer(settings.run_id, settings.fields, None)
        self.steps: list[list[str]] = []
        self.trained: list[str] = []
        self._filling = 0

    def ledger(self) -> Ledger:
        return self._groups.ledger()

    def submit(self, trajectory: Trajectory) -> None:
        self._groups.submit(trajectory)
        while True:
            filled = self._groups.assign(self._filling, self._config.batches.groups_per_batch)
            if not filled.complete:
                return
            self._filling += 1
            groups = [with_advantages(group, AdvantageConfig()) for group in filled.groups]
            self.trained += [group.group_id for group in groups]
            step = len(self.steps)
            members = {m.key: m for group in groups for m in group.trajectories}
            assert common_fields(members.values()) == self._config.fields
            plan = plan_step(groups, self._config.packing)
            self.steps.append(
                [
                    self._packer.pack(step, index, batch, members)[0].digest
                    for index, batch in enumerate(plan.micro_batches)
                ]
            )


__all__ = ["Crash", "Faults", "IngestClosed", "Live", "Model", "config", "journaled", "opened"]
