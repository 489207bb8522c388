"""A full disk, real: a small tmpfs that is filled at an exact call and freed later."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.harness import SETTINGS, ChaosRun, Outcome, Starter, forked, run_folder, run_once

pytestmark = pytest.mark.slow
SIZE_BYTES = 8 << 20


@pytest.fixture(name="starter", scope="module")
def _starter() -> Iterator[Starter]:
    with forked() as starter:
        yield starter


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of `SIZE_BYTES` at `folder`. Skips where mounting is not allowed."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """To the last byte."""
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while file.write(b"\0" * 4096):
            pass


class Filling(ChaosRun):
    """Fills a folder once `full` holds, and frees it once `free` does."""

    where: Path
    full: Callable[[], bool]
    free: Callable[[], bool]
    filled = freed = False

    def _step(self) -> bool:
        if not self.filled and self.full():
            self.filled = True
            fill(self.where)
        elif self.filled and not self.freed and self.free():
            self.freed = True
            (self.where / "filler").unlink()
        return super()._step()


def calls(run: ChaosRun, side: str, method: str) -> int:
    path = run.folder / f"calls-{side}.txt"
    return path.read_text().count(f"\t{method}\n") if path.exists() else 0


def run_on_small_disk(
    name: str, disk: str, starter: Starter, prepare: Callable[[Filling], None]
) -> tuple[Outcome, str, str]:
    """The outcome beside an undisturbed run, and what both processes logged."""
    reference = run_once(SETTINGS[name], starter=starter)
    with run_folder() as folder, small_disk(folder / disk):
        run = Filling(folder, SETTINGS[name], starter=starter)
        run.where = folder / disk
        prepare(run)
        outcome = run.run().judged(reference)
        assert run.filled and run.freed
        return outcome, run.orchestrator.log.read_text(), run.worker.log.read_text()


def test_r32_checkpoints_on_a_full_disk_end_the_run_and_it_goes_on_once_there_is_room(
    starter: Starter,
) -> None:
    def prepare(run: Filling) -> None:
        run.full = lambda: calls(run, "worker", "SaveCheckpoint") >= 1
        run.free = lambda: run.orchestrator.starts > 1

    outcome, orchestrator, _ = run_on_small_disk("staged", "checkpoints", starter, prepare)
    assert "No space left on device" in orchestrator
    others = [item for item in outcome.problems if item != "the orchestrator exited with 1"]
    assert not others


def test_e2_a_full_journal_disk_makes_producers_wait_and_loses_nothing(starter: Starter) -> None:
    def prepare(run: Filling) -> None:
        run.full = lambda: calls(run, "orchestrator", "journal: rows.committed") >= 5
        # Until then the journal lives on what it kept in reserve.
        run.free = lambda: (
            calls(run, "orchestrator", "SaveCheckpoint") >= 1
            and "the journal cannot be written" in run.orchestrator.log.read_text()
        )

    outcome, orchestrator, _ = run_on_small_disk("live", "journal", starter, prepare)
    assert not outcome.problems
    assert outcome.orchestrator_starts == 1
    assert "the journal can be written again" in orchestrator
