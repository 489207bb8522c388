"""A live orchestrator as a process of its own, and what its journal says afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from orchestrator.groups import GroupPolicy
from orchestrator.journal.config import LiveConfig
from orchestrator.journal.open import open_live
from orchestrator.packing import PackingConfig
from orchestrator.sources.batches import BatchShape
from orchestrator.trajectory import TrajectoryLimits

ROLLOUTS = Path(__file__).parent.parent / "data" / "rollouts.parquet"
GROUP_SIZE = 8
GROUPS_PER_BATCH = 4


@dataclass(kw_only=True)
class LiveProcess:
    """`orchestrator --listen`, started as often as a test wants."""

    folder: Path
    worker: str
    flags: tuple[str, ...] = ()
    run_id: str = "run"
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def address(self) -> str:
        return f"unix://{self.folder}/i.sock"

    @property
    def log(self) -> str:
        return (self.folder / "orchestrator.log").read_text(errors="replace")

    def start(self) -> None:
        command = [
            *(sys.executable, "-m", "orchestrator.main"),
            f"--trainer={self.worker}",
            f"--listen={self.address}",
            f"--journal_dir={self.folder}/journal",
            f"--run_id={self.run_id}",
            f"--group_size={GROUP_SIZE}",
            f"--groups_per_batch={GROUPS_PER_BATCH}",
            f"--result_file={self.folder}/live.json",
            "--progress=false",
            *self.flags,
        ]
        with (self.folder / "orchestrator.log").open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def kill(self) -> None:
        """As a machine would: nothing is said to anybody."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def finish(self, timeout_s: float = 120.0) -> dict[str, object]:
        """Wait for a good end. The run's result."""
        assert self.process is not None
        code = self.process.wait(timeout=timeout_s)
        assert code == 0, self.log[-3000:]
        result = json.loads((self.folder / "live.json").read_text())
        assert isinstance(result, dict)
        return result

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def live(folder: Path, worker: str, *flags: str) -> Iterator[LiveProcess]:
    made = LiveProcess(folder=folder, worker=worker, flags=flags)
    made.start()
    try:
        yield made
    finally:
        made.stop()


def journal_of(folder: Path, *, extra: int = 0, max_staleness: int | None = None) -> LiveConfig:
    """The settings that `LiveProcess` runs with."""
    return LiveConfig(
        folder=folder / "journal",
        run_id="run",
        limits=TrajectoryLimits(
            tokens_per_row=1024, vocab_size=2**31 - 1, required_fields=("sampling_logprobs",)
        ),
        policy=GroupPolicy(group_size=GROUP_SIZE, extra=extra, max_staleness=max_staleness),
        packing=PackingConfig(rows=4, tokens_per_row=1024),
        batches=BatchShape(groups_per_batch=GROUPS_PER_BATCH),
    )


def durable_groups(config: LiveConfig) -> list[str]:
    """Complete groups in their durable order, as a journal holds them that nobody has open."""
    run = open_live(config)
    try:
        return [group.group_id for group in run.log.waiting_groups(0)]
    finally:
        run.close()


def write_in_order(groups: list[str], target: Path) -> None:
    """The recorded file, with its groups in this order and no others."""
    table = pq.read_table(ROLLOUTS)
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(table.column("group_id").to_pylist()):
        rows.setdefault(name, []).append(row)
    order = [row for group in groups for row in rows[group.rpartition("@")[0]]]
    pq.write_table(table.take(order), target, row_group_size=64)


def digest_from_file(rollouts: Path, folder: Path, worker: str, steps: int, *flags: str) -> str:
    """The parameters that the same groups give when they are read from a file.

    `flags` come last, so that they override.
    """
    result = folder / "recorded.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "orchestrator.main"),
            f"--trainer={worker}",
            f"--rollouts={rollouts}",
            f"--num_steps={steps}",
            f"--group_size={GROUP_SIZE}",
            f"--groups_per_batch={GROUPS_PER_BATCH}",
            f"--result_file={result}",
            "--progress=false",
            *flags,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return str(json.loads(result.read_text())["parameter_digest"])


def wait_until(true: object, what: str, timeout_s: float = 60.0) -> None:
    """Poll another process; there is nothing to be told by."""
    assert callable(true)
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)
