"""Trainer-computed old log-probs on the real engine, over gRPC.

1. One update per batch: the ratio is 1, so that loss and gradient are those of `current`.
2. Several: what is trained on are the log-probs of a float64 decoder with the weights that opened
   the batch, and the ratio moves away from 1 after the first update.
3. Case B6: evaluations and scorings between micro-batches and before the first one leave
   accumulation untouched, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from orchestrator.bench.synthetic import SyntheticShape, make_batch
from orchestrator.calls import Send
from orchestrator.plan import RunPlan
from orchestrator.ports import Answer, StepFacts
from orchestrator.put_client import PlanePut
from orchestrator.score_client import ScoreClient
from orchestrator.scoring import bare
from orchestrator.trainer_client import TrainerClient
from prestage.microbatch import MicroBatch
from prestage.protocol import Call
from prestage.wire.channel import open_channel
from prestage.wire.stream_plane import StreamSender
from tests.engines.jax_engine.reference import F64, decoder_logprobs
from tests.scoring.runs import MODEL, config, run, write_rollouts
from tests.support.rig import address_of, run_against, served
from trainer_worker.engine import EngineParts
from trainer_worker.engines.jax_engine import engine as jax_engine
from trainer_worker.engines.jax_engine.config import (
    EngineConfig,
    LossConfig,
    OldLogprobs,
    OptimizerConfig,
)
from trainer_worker.engines.jax_engine.engine import JaxEngine, named_leaves
from trainer_worker.engines.jax_engine.model import init_params
from trainer_worker.engines.jax_engine.values import Prepared


@pytest.fixture(scope="module", autouse=True)
def compile_once() -> Iterator[None]:
    made: dict[object, object] = {}
    original = jax_engine.compile_programs

    def compile_programs(config, state, spec, *more):  # type: ignore[no-untyped-def]
        key = (config, spec)
        if key not in made:
            made[key] = original(config, state, spec, *more)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_engine, "compile_programs", compile_programs)
        yield


class Watched(JaxEngine):
    """Remembers each trained micro-batch, and the parameters that each step began with."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, init_params(MODEL, 0))
        self.trained: dict[tuple[int, int], MicroBatch] = {}
        self.began: dict[int, Mapping[str, F64]] = {}

    def prepare_fwd_bwd_input(self, batch: MicroBatch) -> Prepared:
        arrays = {name: np.array(array) for name, array in batch.arrays.items()}
        key = (batch.id.step, batch.id.index)
        self.trained[key] = MicroBatch(
            id=batch.id,
            rows=batch.rows,
            tokens_per_row=batch.tokens_per_row,
            row_lengths=batch.row_lengths,
            arrays=arrays,
        )
        if batch.id.step not in self.began:
            self.began[batch.id.step] = {
                name: np.asarray(leaf, np.float64)
                for name, leaf in named_leaves(self.state.params).items()
            }
        return super().prepare_fwd_bwd_input(batch)


def engine(old: OldLogprobs) -> Watched:
    return Watched(
        EngineConfig(
            model=MODEL,
            loss=LossConfig(old_logprobs=old),
            optimizer=OptimizerConfig(learning_rate=1e-2),
            logprob_chunk=32,
        )
    )


def parts(made: JaxEngine) -> EngineParts:
    return EngineParts(training=made, scoring=made)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp("rollouts") / "rollouts.parquet")


@pytest.mark.slow
def test_with_one_update_per_batch_the_ratio_is_1(rollouts: Path) -> None:
    metrics = {}
    for old in ("current", "trainer"):
        plan = RunPlan(num_steps=3, trainer_logprobs=old == "trainer")
        with served(parts(engine(old))) as server:
            result = run(config(address_of(server), rollouts, plan))
        metrics[old] = [record.metrics for record in result.records]
        assert result.backend_compiles_in_steps == 0
    for current, trainer in zip(metrics["current"], metrics["trainer"], strict=True):
        assert trainer["clip_fraction"] == 0
        assert current["grad_norm"] > 0
        for name in ("grad_norm", "entropy", "sampler_is/token_logdiff_absmean"):
            assert trainer[name] == pytest.approx(current[name], rel=2e-5), name
        assert trainer["loss"] == pytest.approx(current["loss"], rel=1e-5, abs=2e-7)


def reference(batch: MicroBatch, params: Mapping[str, F64]) -> F64:
    """Old log-probs of a micro-batch by the naive decoder, one sequence at a time."""
    found = np.zeros((batch.rows, batch.tokens_per_row))
    segments = batch.arrays["segment_ids"]
    for row in range(batch.rows):
        for segment in range(1, int(segments[row].max()) + 1):
            (where,) = np.nonzero(segments[row] == segment)
            found[row, where] = decoder_logprobs(MODEL, params, batch.arrays["tokens"][row, where])
    return np.where(batch.arrays["loss_mask"] == 1, found, 0)


@pytest.mark.slow
def test_with_several_updates_it_is_the_first_forward_of_the_batch(rollouts: Path) -> None:
    made = engine("trainer")
    plan = RunPlan(num_steps=8, trainer_logprobs=True, pipeline=True)
    with served(parts(made)) as server:
        result = run(
            config(address_of(server), rollouts, plan, num_minibatches=2, num_iterations=2)
        )
    assert {step for step, _ in made.trained} == set(range(8))
    worst = 0.0
    for step in (0, 1, 3, 4, 7):  # Each opens, follows within, or ends a batch.
        batch = made.trained[step, 0]
        expected = reference(batch, made.began[step - step % 4])
        worst = max(worst, float(np.abs(batch.arrays["old_logprobs"] - expected).max()))
        assert np.abs(expected).max() > 1
    assert 0 < worst <= 5e-5
    # The weights moved within the batch: its later steps are scored by others than their own.
    later = made.trained[3, 0]
    drift = np.abs(reference(later, made.began[3]) - later.arrays["old_logprobs"]).max()
    assert drift > 1e-2
    assert result.records[0].metrics["clip_fraction"] == 0
    assert any(record.metrics["clip_fraction"] > 0 for record in result.records if record.step % 4)


SHAPE = SyntheticShape(micro_batches=3)


class Interrupting:
    """Before every fwd_bwd, evaluates and scores another micro-batch on the same worker."""

    def __init__(self, client: TrainerClient, scorer: ScoreClient) -> None:
        self._client = client
        self._scorer = scorer
        self.values: list[float] = []

    def call(self, send: Send, *, data_cursor: str) -> Answer:
        if send.call in (Call.FWD_BWD, Call.FWD_BWD_APPLY, Call.FWD_BWD_DEFER):
            other = bare(make_batch(SHAPE, "run", 99, send.index), send.step)
            self.values.append(self._scorer.evaluate(other)["logprob"])
            scored = self._scorer.logprobs(other, lambda: True)
            assert scored.train_step == send.step
            assert scored.values.min() < 0
        return self._client.call(send, data_cursor=data_cursor)

    def read_metrics(self, from_step: int, count: int) -> tuple[StepFacts, ...]:
        return self._client.read_metrics(from_step, count)

    def in_flight(self) -> int:
        return self._client.in_flight()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [False, True])
def test_b6_evaluation_between_micro_batches_leaves_accumulation_untouched(stage: bool) -> None:
    plan = RunPlan(num_steps=3, pipeline=stage, stage=stage, latch_after=1000)
    with served(parts(engine("current"))) as server:
        plain = run_against(address_of(server), plan, shape=SHAPE)
    interrupted: list[Interrupting] = []
    with served(parts(engine("current"))) as server, open_channel(address_of(server)) as channel:

        def wrap(client: TrainerClient) -> Interrupting:
            sender = PlanePut(StreamSender(channel), lambda: (client.epoch, client.incarnation))
            scorer = ScoreClient(channel, sender, "run", lambda: client.epoch)
            interrupted.append(Interrupting(client, scorer))
            return interrupted[0]

        result = run_against(address_of(server), plan, shape=SHAPE, wrap_trainer=wrap)
    assert len(interrupted[0].values) == 9
    assert len(set(interrupted[0].values)) == 9
    assert result.digest == plain.digest
    for one, other in zip(plain.book.records(), result.book.records(), strict=True):
        assert one.metrics == other.metrics
        assert one.metrics["grad_norm"] > 0
