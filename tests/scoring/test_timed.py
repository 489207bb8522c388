"""Trainer-computed old log-probs over gRPC on the timed engine, whose scores tell which weights gave
them and whose parameters tell which scores were trained on.

1. Every arm ends with the same parameters, and no boundary is staged.
2. A worker killed while it scores changes nothing, with checkpoints and without.
3. A new orchestrator goes on within a rollout batch when the scores were kept; else it says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.plan import RunPlan
from orchestrator.runner import RunFailed
from orchestrator.score_client import ScoreClient
from orchestrator.scoring import Scored
from prestage.microbatch import MicroBatch
from tests.scoring.runs import TimedProcess, config, run, write_rollouts
from tests.support.rig import address_of, served, socket_folder

PLAN = RunPlan(num_steps=8, trainer_logprobs=True, pipeline=True, checkpoint_every=1)
PLAN_BARE = RunPlan(num_steps=8, trainer_logprobs=True, pipeline=True)
TWICE = {"num_minibatches": 2, "num_iterations": 2}  # Four steps a rollout batch.


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp("rollouts") / "rollouts.parquet")


@contextlib.contextmanager
def worker(*, checkpoints: bool = True) -> Iterator[TimedProcess]:
    with socket_folder() as folder:
        made = TimedProcess(folder, checkpoints=checkpoints)
        try:
            yield made
        finally:
            made.stop()


@pytest.fixture(scope="module")
def undisturbed(rollouts: Path) -> str:
    with worker() as timed:
        return run(config(timed.address, rollouts, PLAN, **TWICE)).parameter_digest


class OnScore:
    """Does something once, when the second micro-batch of the batch that `step` opens is to be scored.

    Counts all of them.
    """

    def __init__(self, patch: pytest.MonkeyPatch, step: int, do: Callable[[], None]) -> None:
        self.count = 0
        self.fired = False
        left = [1]
        original = ScoreClient._logprobs

        def scoring(client: ScoreClient, batch: MicroBatch) -> Scored:
            self.count += 1
            if batch.id.step == step:
                left[0] -= 1
                if left[0] == -1:
                    self.fired = True
                    client._sender.put(batch)
                    do()
            return original(client, batch)

        patch.setattr(ScoreClient, "_logprobs", scoring)


@pytest.mark.parametrize(
    "flags", [{}, {"pipeline": True}, {"pipeline": True, "stage": True}], ids=str
)
def test_every_arm_ends_with_the_same_parameters_and_stages_nothing(
    rollouts: Path, flags: dict[str, bool], undisturbed: str
) -> None:
    with served() as server:
        plan = RunPlan(num_steps=8, trainer_logprobs=True, **flags)
        result = run(config(address_of(server), rollouts, plan, **TWICE))
        assert server.service._store.stats().stored_bytes == 0
    assert result.parameter_digest == undisturbed
    assert not any(record.staged_input_used for record in result.records)
    ineligible = [note for note in result.notes if "ineligible" in note]
    assert len(ineligible) == (8 if flags.get("stage") else 0)  # The run's end is one.


def test_scores_come_from_the_weights_of_the_step_that_opens_the_batch(
    rollouts: Path, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions: list[int] = []
    original = ScoreClient._logprobs

    def scoring(client: ScoreClient, batch: MicroBatch) -> Scored:
        scored = original(client, batch)
        versions.append(scored.train_step)
        return scored

    monkeypatch.setattr(ScoreClient, "_logprobs", scoring)
    with served() as server:
        result = run(config(address_of(server), rollouts, PLAN_BARE, **TWICE))
    assert result.parameter_digest == undisturbed
    half = len(versions) // 2
    assert half > 2
    assert versions == [0] * half + [4] * half


def test_shared_memory_carries_scores_too(rollouts: Path, undisturbed: str) -> None:
    with served() as server:
        settings = config(
            address_of(server), rollouts, PLAN_BARE, **TWICE, shared_memory_bytes=8 << 20
        )
        assert run(settings).parameter_digest == undisturbed


@pytest.mark.parametrize("checkpoints", [True, False])
@pytest.mark.parametrize("batch", [0, 1])
def test_a_worker_killed_while_it_scores_changes_nothing(
    rollouts: Path,
    undisturbed: str,
    checkpoints: bool,
    batch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = PLAN if checkpoints else PLAN_BARE
    with worker(checkpoints=checkpoints) as timed:
        counted = OnScore(monkeypatch, 4 * batch, timed.kill)
        result = run(config(timed.address, rollouts, plan, **TWICE))
        assert len(timed.started) == 2
    assert result.parameter_digest == undisturbed
    assert any(note.startswith("worker_restarted") for note in result.notes)
    assert counted.fired


def test_a_new_process_goes_on_within_a_batch_on_the_kept_scores(
    rollouts: Path, undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = OnScore(monkeypatch, -1, lambda: None)
    with worker() as timed:
        first = RunPlan(num_steps=3, trainer_logprobs=True, pipeline=True, checkpoint_every=1)
        kept = {"scores_dir": tmp_path / "scores", **TWICE}
        run(config(timed.address, rollouts, first, **kept))
        once = counted.count
        timed.kill()  # The weights that scored are gone for good.
        result = run(config(timed.address, rollouts, PLAN, **kept))
    assert result.parameter_digest == undisturbed
    assert counted.count == 2 * once  # The second batch only.


def test_without_kept_scores_a_new_process_is_told_what_to_do(rollouts: Path) -> None:
    with worker() as timed:
        first = RunPlan(num_steps=3, trainer_logprobs=True, pipeline=True, checkpoint_every=1)
        run(config(timed.address, rollouts, first, **TWICE))
        with pytest.raises(RunFailed, match=r"step 3 goes on .* --scores_dir .* step 0"):
            run(config(timed.address, rollouts, PLAN, **TWICE))


def test_a_batch_of_one_step_needs_no_kept_scores(rollouts: Path) -> None:
    whole = RunPlan(num_steps=4, trainer_logprobs=True, checkpoint_every=1)
    half = RunPlan(num_steps=2, trainer_logprobs=True, checkpoint_every=1)
    with worker() as timed:
        expected = run(config(timed.address, rollouts, whole)).parameter_digest
    with worker() as timed:
        run(config(timed.address, rollouts, half))
        assert run(config(timed.address, rollouts, whole)).parameter_digest == expected
