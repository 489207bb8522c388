"""What `--old_logprobs=trainer` and `--eval_every` add to a run, made from its config."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from orchestrator.evaluation import Evaluation, EvaluationSet
from orchestrator.feeder import StepFeed, StepSource
from orchestrator.flags import ConfigError, OrchestratorConfig
from orchestrator.packing import PackingConfig
from orchestrator.score_client import ScoreClient
from orchestrator.score_files import ScoreFiles
from orchestrator.scoring import FIELD, TrainerScores, Wanted, fresh_memory
from orchestrator.sources.batches import BatchShape
from orchestrator.trainer_client import RunShape
from orchestrator.trajectory import TrajectoryLimits
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.wire.layout import Layout
from prestage.wire.planes import SendBuffer

log = logging.getLogger("prestage.scoring")

Reserve = Callable[[Layout], SendBuffer]


def check_scoring(config: OrchestratorConfig, able: pb.GetCapabilitiesResponse) -> None:
    """Raises `ConfigError` when the worker lacks the scoring that the run asks for."""
    if able.can_score:
        if config.plan.trainer_logprobs and FIELD not in able.required_fields:
            log.warning(
                "--old_logprobs=trainer, but engine %r does not say that its loss reads %s: start the"
                " worker with --loss_old_logprobs=trainer, or the scored values change nothing",
                able.engine,
                FIELD,
            )
        return
    if config.plan.trainer_logprobs:
        raise ConfigError(
            f"--old_logprobs=trainer: the worker's engine {able.engine!r} cannot compute log-probs;"
            " use --old_logprobs=current or sampler"
        )
    if config.plan.eval_every:
        raise ConfigError(
            f"--eval_every is {config.plan.eval_every}: the worker's engine {able.engine!r} cannot"
            " evaluate; use --eval_every=0"
        )


def packs_into(config: OrchestratorConfig, reserve: Reserve) -> Reserve:
    """Where the source packs: what is scored first is copied into the sender's memory later."""
    return fresh_memory if config.plan.trainer_logprobs else reserve


def trained_shape(config: OrchestratorConfig, shape: RunShape) -> RunShape:
    """What the worker trains: the source's fields, and old log-probs where they are scored."""
    if not config.plan.trainer_logprobs:
        return shape
    return replace(shape, fields=tuple(sorted({*shape.fields, FIELD})))


def scoring_hook(
    config: OrchestratorConfig, source: StepSource, client: ScoreClient, reserve: Reserve
) -> Callable[[StepFeed, Wanted], StepFeed] | None:
    """The feeder's `score`; None for a run that needs none."""
    if not config.plan.trainer_logprobs:
        return None
    return TrainerScores(
        source,
        client,
        BatchShape(
            groups_per_batch=config.groups_per_batch,
            num_minibatches=config.num_minibatches,
            num_iterations=config.num_iterations,
        ),
        files=ScoreFiles(config.scores_dir, config.run_id),
        reserve=reserve,
    )


def evaluation_set(config: OrchestratorConfig, vocab_size: int) -> EvaluationSet | None:
    """Reads `--eval_rollouts` whole; None for a run without. Raises `SourceError`."""
    if config.eval_rollouts is None:
        return None
    return EvaluationSet(
        config.eval_rollouts,
        run_id=config.run_id,
        limits=TrajectoryLimits(
            tokens_per_row=config.tokens_per_row,
            vocab_size=vocab_size or 2**31 - 1,  # An engine without a vocabulary takes any.
        ),
        packing=PackingConfig(rows=config.rows, tokens_per_row=config.tokens_per_row),
    )


def evaluation(data: EvaluationSet | None, client: ScoreClient) -> Evaluation | None:
    """The client's evaluator."""
    return None if data is None else Evaluation(data, client)
