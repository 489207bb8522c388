"""The recorded-rollouts source of a run, from its config."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.advantages import AdvantageConfig, Estimator, Std
from orchestrator.feeder import SourceError, StepSource
from orchestrator.flags import OrchestratorConfig
from orchestrator.groups import GroupPolicy, ZeroSpread
from orchestrator.packing import PackingConfig
from orchestrator.routing import routed
from orchestrator.sources.parquet import RecordedRollouts
from orchestrator.sources.recorded_steps import RecordedSteps, RecordedStepsConfig
from orchestrator.trainer_client import RunShape
from orchestrator.trajectory import RolloutError, TrajectoryLimits
from prestage.wire.layout import Layout
from prestage.wire.planes import SendBuffer


def recorded_source(
    config: OrchestratorConfig, vocab_size: int, reserve: Callable[[Layout], SendBuffer]
) -> tuple[StepSource, RunShape]:
    """Reads the file whole and checks it, so that bad input ends the run before it trains.

    Raises `SourceError` naming what is wrong, where, and the fix.
    """
    if config.rollouts is None:
        raise SourceError("--rollouts is not set: give a Parquet file of recorded rollouts")
    try:
        limits = TrajectoryLimits(
            tokens_per_row=config.tokens_per_row,
            vocab_size=vocab_size or 2**31 - 1,  # An engine without a vocabulary takes any.
            required_fields=("sampling_logprobs",),
        )
        limits = routed(limits, config.routing)
        source = RecordedSteps(
            RecordedRollouts(config.rollouts, limits, group_size=config.group_size),
            RecordedStepsConfig(
                run_id=config.run_id,
                limits=limits,
                policy=GroupPolicy(
                    group_size=config.group_size, zero_spread=ZeroSpread(config.zero_spread)
                ),
                packing=PackingConfig(rows=config.rows, tokens_per_row=config.tokens_per_row),
                advantages=AdvantageConfig(
                    estimator=Estimator(config.advantage), std=Std(config.advantage_std)
                ),
                groups_per_batch=config.groups_per_batch,
                num_minibatches=config.num_minibatches,
                num_iterations=config.num_iterations,
            ),
            reserve=reserve,
        )
    except RolloutError as error:
        raise SourceError(str(error)) from error
    return source, RunShape(
        rows=config.rows,
        tokens_per_row=config.tokens_per_row,
        fields=tuple(sorted(source.fields.names)),
    )
