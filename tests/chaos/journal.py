"""What a run's journal says once nobody holds it: nothing acked is missing, and what it trains."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from orchestrator.groups import GroupPolicy
from orchestrator.journal.config import LiveConfig
from orchestrator.journal.open import open_live
from orchestrator.packing import PackingConfig
from orchestrator.sources.batches import BatchShape
from orchestrator.trajectory import TrajectoryLimits
from trainer_worker.clock import VirtualClock
from trainer_worker.engines.timed import TimedConfig, TimedEngine

Trained = tuple[int, int, str]
"""(step, index, digest)"""
STEPS, GROUP_SIZE, GROUPS_PER_STEP = 4, 8, 3


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What an undisturbed trainer makes of a journal's groups in their durable order."""

    parameter_digest: str
    trained: tuple[Trained, ...]


def config(folder: Path) -> LiveConfig:
    """The settings that the orchestrator's flags make."""
    return LiveConfig(
        folder=folder / "journal",
        run_id="run",
        limits=TrajectoryLimits(
            tokens_per_row=1024, vocab_size=2**31 - 1, required_fields=("sampling_logprobs",)
        ),
        policy=GroupPolicy(group_size=GROUP_SIZE),
        packing=PackingConfig(rows=4, tokens_per_row=1024),
        batches=BatchShape(groups_per_batch=GROUPS_PER_STEP),
    )


def replayed(folder: Path) -> Replay:
    """Train the journal's first steps on an engine of its own."""
    engine = TimedEngine(TimedConfig(), VirtualClock())
    trained: list[Trained] = []
    run = open_live(config(folder))
    try:
        for step in range(STEPS):
            feed = run.source.open_step(step)
            assert feed is not None, f"the journal has no step {step}"
            for index, batch in enumerate(feed.micro_batches):
                engine.fwd_bwd(engine.prepare_fwd_bwd_input(batch))
                trained.append((step, index, batch.digest))
            engine.update()
    finally:
        run.close()
    return Replay(parameter_digest=engine.parameter_digest(), trained=tuple(trained))


def missing_from_journal(folder: Path) -> list[str]:
    """What was acknowledged and is neither in the journal nor in the steps that it let go.

    The journal's point names the last durable step; rollouts of the steps before are let go, and
    whether they were trained shows in the parameters.
    """
    acks = folder / "acks.txt"
    acked: dict[tuple[str, int], str] = {}
    problems = []
    for line in acks.read_text().splitlines() if acks.exists() else ():
        producer, offset, name, verdict = line.split()
        if acked.setdefault((producer, int(offset)), name) != name:
            problems.append(f"offset {offset} of {producer} was acked for {name} and another")
        if verdict != "taken":
            problems.append(f"{name} was not taken: {verdict}")
    connection = sqlite3.connect(folder / "journal" / "journal.sqlite")
    try:
        kept = connection.execute(
            "SELECT producer, producer_offset FROM events WHERE producer <> ''"
        ).fetchall()
        offsets = dict(connection.execute("SELECT name, next_offset FROM producers"))
    finally:
        connection.close()
    if len(kept) != len(set(kept)):
        problems.append("the journal holds a rollout twice")
    for producer, offset in acked:
        if offset >= offsets.get(producer, 0):
            problems.append(f"offset {offset} of {producer} was acked, and is not in the journal")
    return problems
