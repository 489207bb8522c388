"""Evaluations of a run: at the plan's fixed place, on the set's own rollouts, changing nothing.

1. Their values are token-weighted means over the whole set, of the weights after the step.
2. A run with them ends with the parameters of one without, killed in an evaluation or not.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from orchestrator.evaluation import EvaluationSet, merged
from orchestrator.packing import PackingConfig
from orchestrator.plan import RunPlan
from orchestrator.report import lines_of
from orchestrator.score_client import ScoreClient
from orchestrator.trajectory import TrajectoryLimits
from prestage.microbatch import MicroBatch
from tests.engines.jax_engine.reference import decoder_logprobs
from tests.scoring.runs import MODEL, VOCAB, TimedProcess, config, run, write_rollouts
from tests.support.rig import address_of, served, socket_folder
from trainer_worker.engine import EngineParts
from trainer_worker.engines.jax_engine.config import EngineConfig, OptimizerConfig
from trainer_worker.engines.jax_engine.engine import JaxEngine, named_leaves
from trainer_worker.engines.jax_engine.model import init_params

PLAN = RunPlan(num_steps=4, pipeline=True, stage=True, latch_after=1000)
EVALUATED = RunPlan(num_steps=4, pipeline=True, stage=True, latch_after=1000, eval_every=2)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp("rollouts") / "rollouts.parquet")


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rollouts")
    return write_rollouts(folder / "held-out.parquet", groups=3, seed=7)


def evaluation_set(path: Path) -> EvaluationSet:
    limits = TrajectoryLimits(tokens_per_row=64, vocab_size=VOCAB)
    packing = PackingConfig(rows=2, tokens_per_row=64)
    return EvaluationSet(path, run_id="run", limits=limits, packing=packing)


def test_a_set_is_the_same_whenever_it_is_asked_for(held_out: Path) -> None:
    made = evaluation_set(held_out)
    once, again = list(made.micro_batches(3)), list(made.micro_batches(4))
    assert len(once) > 1
    assert [batch.digest for batch in once] == [batch.digest for batch in again]
    assert {(batch.id.step, batch.id.index) for batch in again} == {(4, 0)}
    assert sum(batch.trained_tokens for batch in once) > 100
    assert all("sampling_logprobs" not in batch.arrays for batch in once)


def test_means_are_weighted_by_tokens() -> None:
    parts = [{"logprob": -1.0, "tokens": 3.0}, {"logprob": -5.0, "tokens": 1.0}]
    assert merged(parts) == {"logprob": -2.0, "tokens": 4.0}
    assert merged([{"logprob": 0.0, "tokens": 0.0}]) == {"logprob": 0.0, "tokens": 0.0}


@pytest.mark.slow
def test_values_are_those_of_a_float64_decoder_with_the_weights_after_the_step(
    rollouts: Path, held_out: Path
) -> None:
    engine = JaxEngine(
        EngineConfig(model=MODEL, optimizer=OptimizerConfig(learning_rate=1e-2), logprob_chunk=32),
        init_params(MODEL, 0),
    )
    with served(EngineParts(training=engine, scoring=engine)) as server:
        result = run(config(address_of(server), rollouts, EVALUATED, eval_rollouts=held_out))
    evaluated = {
        record.step: record.metrics["eval/logprob"]
        for record in result.records
        if "eval/logprob" in record.metrics
    }
    assert sorted(evaluated) == [1, 3]
    assert result.backend_compiles_in_steps == 0
    params = {
        name: np.asarray(leaf, np.float64)
        for name, leaf in named_leaves(engine.state.params).items()
    }
    total, tokens = 0.0, 0
    for batch in evaluation_set(held_out).micro_batches(4):
        total, tokens = total + _logprob_sum(batch, params), tokens + batch.trained_tokens
    last = result.records[-1]
    assert last.metrics["eval/tokens"] == tokens
    assert evaluated[3] == pytest.approx(total / tokens, rel=1e-6)
    assert evaluated[1] != pytest.approx(evaluated[3], rel=1e-4)
    assert f"[eval] after step 3: entropy {last.metrics['eval/entropy']:.6g}" in lines_of(last)[-1]
    assert last.applied


def _logprob_sum(batch: MicroBatch, params: dict[str, np.ndarray]) -> float:
    total = 0.0
    for row in range(batch.rows):
        segments = batch.arrays["segment_ids"][row]
        for segment in range(1, int(segments.max()) + 1):
            (where,) = np.nonzero(segments == segment)
            logprobs = decoder_logprobs(MODEL, params, batch.arrays["tokens"][row, where])
            total += float(logprobs[batch.arrays["loss_mask"][row, where] == 1].sum())
    return total


def test_a_worker_killed_in_an_evaluation_changes_nothing(
    rollouts: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served() as server:
        expected = run(config(address_of(server), rollouts, PLAN)).parameter_digest
    with served() as server:
        settings = config(address_of(server), rollouts, EVALUATED, eval_rollouts=held_out)
        assert run(settings).parameter_digest == expected
        assert server.service._store.stats().stored_bytes == 0
    killed: list[int] = []
    original = ScoreClient.evaluate
    with socket_folder() as folder:
        timed = TimedProcess(folder)

        def evaluate(client: ScoreClient, batch: MicroBatch) -> object:
            if batch.id.step == 2 and not killed:
                killed.append(batch.id.step)
                timed.kill()
            return original(client, batch)

        monkeypatch.setattr(ScoreClient, "evaluate", evaluate)
        try:
            settings = config(timed.address, rollouts, EVALUATED, eval_rollouts=held_out)
            result = run(settings)
        finally:
            timed.stop()
    assert killed
    assert result.parameter_digest == expected
    evaluated = [r.step for r in result.records if "eval/tokens" in r.metrics]
    assert evaluated == [1, 3]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--eval_every=2"], "--eval_every is set without --eval_rollouts"),
        (["--eval_rollouts=FILE"], "--eval_rollouts is set without --eval_every"),
        (["--eval_every=2", "--eval_rollouts=/nowhere.parquet"], "/nowhere.parquet is no file"),
        (["--eval_every=-1"], "--eval_every is -1"),
    ],
)
def test_flags_that_contradict_are_refused(
    rollouts: Path, flags: list[str], words: str, tmp_path: Path
) -> None:
    given = [flag.replace("FILE", str(rollouts)) for flag in flags]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "orchestrator.main", f"--trainer=unix://{tmp_path}/w.sock"),
            *(f"--rollouts={rollouts}", *given),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert words in done.stderr
