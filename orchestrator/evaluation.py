"""Evaluation (`--eval_every`): what the weights say of a fixed set of recorded rollouts.

The set is read and checked at the start, packed anew for each evaluation (one micro-batch in memory
at a time) and averaged over its trained tokens. Reads only: training goes on as if it never was.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from orchestrator.advantages import AdvantageConfig, with_advantages
from orchestrator.feeder import SourceError
from orchestrator.packing import PackingConfig, common_fields, plan_step
from orchestrator.scoring import bare
from orchestrator.sources.packed import Packer
from orchestrator.sources.parquet import RecordedRollouts
from orchestrator.trajectory import Group, RolloutError, TrajectoryLimits
from prestage.microbatch import MicroBatch

log = logging.getLogger("prestage.scoring")

TOKENS = "tokens"
"""The metric that the others are means over."""


class EvaluatePort(Protocol):
    """Asks the trainer for metrics of one micro-batch. Raises `grpc.RpcError`."""

    def evaluate(self, batch: MicroBatch) -> Mapping[str, float]: ...


class EvaluationSet:
    """Recorded rollouts as micro-batches, the same ones whenever they are asked for."""

    def __init__(
        self, path: Path, *, run_id: str, limits: TrajectoryLimits, packing: PackingConfig
    ) -> None:
        """Reads the file whole. Raises `SourceError` naming what is wrong with it."""
        try:
            rollouts = RecordedRollouts(path, limits)
            groups: tuple[Group, ...] = tuple(
                with_advantages(group, AdvantageConfig()) for group in rollouts.groups()
            )
            fields = common_fields(member for group in groups for member in group.trajectories)
            self._plan = plan_step(groups, packing)
        except RolloutError as error:
            raise SourceError(f"--eval_rollouts: {error}") from error
        self._members = {member.key: member for group in groups for member in group.trajectories}
        self._packer = Packer(run_id, fields, None)
        log.info(
            "evaluation on %d trajectories of %s, in %d micro-batches",
            len(self._members),
            path,
            len(self._plan.micro_batches),
        )

    def micro_batches(self, step: int) -> Iterator[MicroBatch]:
        """Named as the first of `step`, which is the open or next one."""
        for index, plan in enumerate(self._plan.micro_batches):
            batch, _ = self._packer.pack(step, index, plan, self._members)
            yield bare(batch, step)


class Evaluation:
    """The client's evaluator. Used by the runner's thread only."""

    def __init__(self, data: EvaluationSet, port: EvaluatePort) -> None:
        self._data = data
        self._port = port

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Metrics of the weights after step `step`. Raises `grpc.RpcError`; repeatable."""
        return merged([self._port.evaluate(batch) for batch in self._data.micro_batches(step + 1)])


def merged(parts: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Token-weighted means of the micro-batches' means, and the number of tokens."""
    tokens = math.fsum(part[TOKENS] for part in parts)
    names = sorted({name for part in parts for name in part if name != TOKENS})
    means = {
        name: math.fsum(part[name] * part[TOKENS] for part in parts) / tokens if tokens else 0.0
        for name in names
    }
    return {**means, TOKENS: tokens}
