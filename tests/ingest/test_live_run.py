"""Whole live runs: real processes, real sockets, the timed engine, recorded rollouts.

The timed engine's parameters are a hash chain of what it applied: a micro-batch that is lost,
doubled or out of order shows in the digest.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.client import RolloutProducer
from orchestrator.client.submit import Tally, replay
from orchestrator.sources.parquet import RecordedRollouts
from orchestrator.trajectory import TrajectoryLimits
from tests.ingest.processes import (
    GROUP_SIZE,
    GROUPS_PER_BATCH,
    ROLLOUTS,
    LiveProcess,
    digest_from_file,
    durable_groups,
    journal_of,
    live,
    wait_until,
    write_in_order,
)
from tests.support.rig import address_of, served, socket_folder
from trainer_worker.clock import RealClock
from trainer_worker.engines.timed import TimedConfig, create_timed

pytestmark = pytest.mark.slow

FAST = TimedConfig(fwd_bwd_seconds=0.01, update_seconds=0.002, copy_seconds=0.002)
STEPS = 8


@contextlib.contextmanager
def worker(config: TimedConfig = FAST) -> Iterator[str]:
    with served(create_timed(config, RealClock())) as server:
        yield address_of(server)


@pytest.fixture(name="folder")
def _folder() -> Iterator[Path]:
    with socket_folder() as folder:
        yield folder


class Replay:
    """Producers on a thread, as a rollout job beside the run."""

    def __init__(self, address: str, producers: int = 3, per_second: float = 0.0) -> None:
        self.tally: Tally | None = None
        self.ended = False
        self.error: Exception | None = None
        self._thread = threading.Thread(
            target=self._run, args=(address, producers, per_second), daemon=True
        )
        self._thread.start()

    def _run(self, address: str, producers: int, per_second: float) -> None:
        try:
            self.tally, self.ended = replay(
                ROLLOUTS,
                address,
                run_id="run",
                producers=producers,
                per_second=per_second,
                show=False,
            )
        except Exception as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(timeout=60)
        assert not self._thread.is_alive(), "the producers did not end"
        if self.error is not None:
            raise self.error


def same_groups_from_a_file(folder: Path) -> str:
    """The digest that the journal's groups give in their durable order."""
    groups = durable_groups(journal_of(folder))[: STEPS * GROUPS_PER_BATCH]
    assert len(groups) == len(set(groups)) == STEPS * GROUPS_PER_BATCH
    write_in_order(groups, folder / "ordered.parquet")
    with worker() as address:
        return digest_from_file(folder / "ordered.parquet", folder, address, STEPS)


def test_a_live_run_trains_what_a_recorded_one_trains_in_the_same_order(folder: Path) -> None:
    with worker() as address, live(folder, address, f"--num_steps={STEPS}") as run:
        producers = Replay(run.address)
        result = run.finish()
        producers.join()
    assert result["parameter_digest"] == same_groups_from_a_file(folder)
    steps = result["steps"]
    assert isinstance(steps, list) and len(steps) == STEPS
    assert [step["train_step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(step["summary"]["groups"] == GROUPS_PER_BATCH for step in steps)


@pytest.mark.parametrize("flags", [(), ("--pipeline_step_boundary", "--stage_next_microbatch=on")])
def test_e2_r10_kill_9_in_the_middle_changes_nothing(folder: Path, flags: tuple[str, ...]) -> None:
    with worker() as address, live(folder, address, f"--num_steps={STEPS}", *flags) as run:
        # Slow enough to be in the middle of it when the process dies.
        producers = Replay(run.address, per_second=30.0)
        for step in (2, 5):
            await_version(run, step)
            run.kill()
            run.start()
        result = run.finish()
        producers.join()
    assert result["parameter_digest"] == same_groups_from_a_file(folder)
    tally = producers.tally
    assert tally is not None
    assert not tally.not_accepted
    assert tally.reconnections >= 3, "the producers had nothing to do when the process died"


def await_version(run: LiveProcess, version: int) -> None:
    """Until so many updates are applied, as samplers are told."""
    with RolloutProducer(run.address, producer="observer", run_id="run") as observer:
        for update in observer.watch():
            if update.policy_version >= version:
                return
    raise AssertionError("the run ended before that")


def test_resuming_at_the_end_does_nothing(folder: Path) -> None:
    with worker() as address, live(folder, address, "--num_steps=2") as run:
        producers = Replay(run.address)
        first = run.finish()
        producers.join()
        run.start()
        again = run.finish()
    assert again["parameter_digest"] == first["parameter_digest"]


def test_samplers_hear_of_every_group_and_of_the_end(folder: Path) -> None:
    """Over-generation: the first G of G + 2 are kept, the stragglers are told and counted."""
    limits = TrajectoryLimits(tokens_per_row=1 << 20, vocab_size=1 << 30)
    recorded = RecordedRollouts(ROLLOUTS, limits)
    groups = [group for group, _ in zip(recorded.groups(), range(8), strict=False)]
    with worker() as address, live(folder, address, "--num_steps=2", "--extra=2") as run:
        with RolloutProducer(run.address, producer="p", run_id="run") as producer:
            updates = producer.watch()
            cancelled: list[str] = []
            receipts = []
            for group in groups:
                members = list(group.trajectories)
                members += [replace(members[n], index=GROUP_SIZE + n) for n in range(2)]
                receipts.append([producer.submit(member) for member in members])
            finished = False
            for update in updates:
                cancelled += update.cancel_groups
                finished = finished or update.finished
            results = [[future.result(timeout=30) for future in group] for group in receipts[:-1]]
        run.finish()
    assert finished
    assert cancelled == [group.group_id for group in groups]
    for group in results:
        assert [receipt.accepted for receipt in group] == [True] * GROUP_SIZE + [False] * 2
        assert {receipt.reason for receipt in group[GROUP_SIZE:]} == {"over_generation"}


def test_r12_a_run_without_producers_ends_with_the_reason(folder: Path) -> None:
    with worker() as address, live(folder, address, "--data_wait_s=1") as run:
        assert run.process is not None
        assert run.process.wait(timeout=60) == 1
    assert "are the rollout producers alive?" in run.log


def test_c10_e2_a_group_that_never_completes_is_dropped_and_the_run_goes_on(folder: Path) -> None:
    limits = TrajectoryLimits(tokens_per_row=1 << 20, vocab_size=1 << 30)
    groups = list(RecordedRollouts(ROLLOUTS, limits).groups())
    flags = ("--num_steps=2", "--group_timeout_s=1")
    with worker() as address, live(folder, address, *flags) as run:
        with RolloutProducer(run.address, producer="p", run_id="run") as producer:
            first = groups[0].trajectories
            for member in first[1:]:  # One never comes.
                producer.submit(member)
            producer.flush()
            for update in producer.watch():
                if groups[0].group_id in update.cancel_groups:
                    break
            late = producer.submit(first[0]).result(timeout=30)
            assert late.reason == "group_already_dropped"
            for group in groups[1 : 2 * GROUPS_PER_BATCH + 1]:
                for member in group.trajectories:
                    producer.submit(member)
        result = run.finish()
    steps = result["steps"]
    assert isinstance(steps, list)
    assert steps[0]["summary"]["dropped"] == {
        "incomplete_group": GROUP_SIZE - 1,
        "group_already_dropped": 1,
    }


def test_sigterm_stops_producers_without_loss_and_the_run_goes_on(folder: Path) -> None:
    slow = replace(FAST, fwd_bwd_seconds=0.04)
    with worker(slow) as address, live(folder, address, f"--num_steps={STEPS}") as run:
        producers = Replay(run.address)
        await_version(run, 2)
        assert run.process is not None
        run.process.terminate()
        wait_until(lambda: run.process is not None and run.process.poll() is not None, "the end")
        assert run.process.returncode == 0, run.log[-3000:]
        run.start()
        result = run.finish()
        producers.join()
    assert result["parameter_digest"] == same_groups_from_a_file(folder)
