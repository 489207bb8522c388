"""Recorded rollouts as the steps of a run: groups, advantages, plan, micro-batches with digests.

A `StepSource`: the same step has the same micro-batches whenever it is asked for, in this process
or another. Reads no clock and no network.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from orchestrator.advantages import AdvantageConfig, with_advantages
from orchestrator.feeder import SourceError as FeedError
from orchestrator.feeder import StepFeed, always
from orchestrator.groups import GroupAssembler, GroupPolicy, Ledger
from orchestrator.packing import (
    FieldSet,
    PackingConfig,
    StepPlan,
    Written,
    check_plan,
    common_fields,
    plan_step,
    step_conservation,
)
from orchestrator.packing.conservation import trained_tokens
from orchestrator.ports import StepSummary
from orchestrator.sources.batches import BatchShape
from orchestrator.sources.packed import Packer, Reserve
from orchestrator.sources.parquet import RecordedRollouts
from orchestrator.trajectory import ConservationError, Group, RolloutError, TrajectoryLimits
from prestage.microbatch import MicroBatch

# Batches kept for being asked for again; older ones are read again from the file.
_KEPT_BATCHES: Final = 4


@dataclass(frozen=True, kw_only=True)
class RecordedStepsConfig:
    """How recorded groups become steps."""

    run_id: str
    limits: TrajectoryLimits
    policy: GroupPolicy
    packing: PackingConfig
    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)
    groups_per_batch: int
    num_minibatches: int = 1
    num_iterations: int = 1
    epochs: int | None = None  # Passes over the file; None: for ever.

    def __post_init__(self) -> None:
        _ = self.batches  # Checks them.

    @property
    def batches(self) -> BatchShape:
        """How batches feed steps. Raises `ValueError` for numbers that do not go together."""
        return BatchShape(
            groups_per_batch=self.groups_per_batch,
            num_minibatches=self.num_minibatches,
            num_iterations=self.num_iterations,
        )


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """One rollout batch: its groups with advantages, and what was dropped on the way to it."""

    groups: tuple[Group, ...]
    dropped: MappingProxyType[str, int]  # Reason to trajectories.


class RecordedSteps:
    """The steps of a run on a recorded file."""

    def __init__(
        self,
        rollouts: RecordedRollouts,
        config: RecordedStepsConfig,
        *,
        reserve: Reserve | None = None,
    ) -> None:
        """`reserve` gives the memory that micro-batches are written into; None: fresh arrays."""
        self._rollouts = rollouts
        self._config = config
        self._rewind()
        first = next(rollouts.groups())
        self.fields: FieldSet = common_fields(first.trajectories)
        self._packer = Packer(config.run_id, self.fields, reserve)

    def _rewind(self) -> None:
        self._batches: dict[int, _Batch] = {}
        self._next_batch = 0
        self._assembler = GroupAssembler(self._config.policy, self._config.limits)
        self._groups = self._rollouts.groups(epochs=self._config.epochs)
        self._dropped: dict[str, int] = {}

    def open_step(self, step: int, *, wanted: Callable[[], bool] = always) -> StepFeed | None:
        """The step's plan and micro-batches; None when the file has no more groups for it.

        Never waits, so `wanted` is not asked.

        Raises: FeedError.
        """
        del wanted
        config, batches = self._config, self._config.batches
        try:
            batch = self._batch(batches.batch_of(step))
            if batch is None:
                return None
            groups = batch.groups[batches.part(step)]
            plan = plan_step(groups, config.packing)
            check_plan(groups, plan)
        except RolloutError as error:
            raise FeedError(f"step {step}: {error}") from error
        summary = _summarise(step, groups, plan, batch if batches.opens_batch(step) else None)
        return StepFeed(
            summary=summary, micro_batches=self._micro_batches(step, groups, plan, summary)
        )

    def first_micro_batch(self, step: int, *, wanted: Callable[[], bool] = always) -> None:
        """A file has whole steps."""
        del step, wanted

    def data_cursor(self, next_step: int) -> str:
        """Where a restored run goes on: steps are a function of the file, so their number is it."""
        return json.dumps({"next_step": next_step}, separators=(",", ":"))

    def step_durable(self, step: int) -> None:
        """Steps before `step` will not be asked for again."""
        needed = self._config.batches.batch_of(step)
        for number in [number for number in self._batches if number < needed]:
            del self._batches[number]

    def _batch(self, number: int) -> _Batch | None:
        if number not in self._batches:
            if number < self._next_batch:
                self._rewind()
            while self._next_batch <= number:
                batch = self._read_batch(self._next_batch)
                if batch is None:
                    return None
                self._batches[self._next_batch] = batch
                self._next_batch += 1
                while len(self._batches) > _KEPT_BATCHES:
                    del self._batches[min(self._batches)]
        return self._batches[number]

    def _read_batch(self, number: int) -> _Batch | None:
        filled = self._assembler.assign(number, self._config.groups_per_batch)
        while not filled.complete:
            group = next(self._groups, None)
            if group is None:
                return None
            for trajectory in group.trajectories:
                self._assembler.submit(trajectory)
            filled = self._assembler.assign(number, self._config.groups_per_batch)
        ledger = self._assembler.ledger()
        ledger.check()
        before, self._dropped = self._dropped, _dropped(ledger)
        new = {reason: count - before.get(reason, 0) for reason, count in self._dropped.items()}
        return _Batch(
            groups=tuple(
                with_advantages(group, self._config.advantages) for group in filled.groups
            ),
            dropped=MappingProxyType({reason: count for reason, count in new.items() if count}),
        )

    def _micro_batches(
        self, step: int, groups: tuple[Group, ...], plan: StepPlan, summary: StepSummary
    ) -> Iterator[MicroBatch]:
        members = {member.key: member for group in groups for member in group.trajectories}
        written: list[Written] = []
        for index, batch_plan in enumerate(plan.micro_batches):
            batch, counts = self._packer.pack(step, index, batch_plan, members)
            written.append(counts)
            if index == len(plan.micro_batches) - 1:
                # Before the last micro-batch leaves: the update goes with it.
                _check_written(step, groups, written, summary)
            yield batch


def _check_written(
    step: int, groups: tuple[Group, ...], written: list[Written], summary: StepSummary
) -> None:
    try:
        balance = step_conservation(groups, written)
        if balance.trained != summary.trained_tokens:
            raise ConservationError(
                f"{summary.trained_tokens} tokens were to be trained, {balance.trained} are"
            )
    except ConservationError as error:
        raise FeedError(f"step {step}: {error}") from error


def _dropped(ledger: Ledger) -> dict[str, int]:
    return {reason.value: dropped.trajectories for reason, dropped in ledger.dropped.items()}


def _summarise(
    step: int, groups: tuple[Group, ...], plan: StepPlan, batch: _Batch | None
) -> StepSummary:
    rewards = [reward for group in groups for reward in group.rewards]
    return StepSummary(
        step=step,
        micro_batches=len(plan.micro_batches),
        groups=len(groups),
        trajectories=len(rewards),
        real_tokens=plan.real_tokens,
        trained_tokens=trained_tokens(groups),
        rows=plan.used_rows,
        reward_mean=math.fsum(rewards) / len(rewards),
        dropped=MappingProxyType({}) if batch is None else batch.dropped,
    )
