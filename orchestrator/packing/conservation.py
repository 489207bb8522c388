"""The step's balance: every token that was assigned to it is packed once or counted as dropped.

Pure counting. Called for every step, on the plan before the first send and on what was written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from orchestrator.packing.layout import StepPlan
from orchestrator.packing.writer import Written
from orchestrator.trajectory import ConservationError, DropReason, Group


@dataclass(frozen=True, kw_only=True)
class StepConservation:
    """Token counts of one step, prompt and completion alike, and its trainable tokens."""

    tokens_in: int
    tokens_packed: int
    trainable_in: int  # Tokens whose loss mask was set on arrival.
    trained: int  # Tokens whose packed loss mask is set.
    dropped_tokens: Mapping[DropReason, int]
    dropped_trainable: Mapping[DropReason, int]

    def check(self) -> None:
        """Raise `ConservationError` unless both balances are even."""
        dropped = sum(self.dropped_tokens.values())
        if self.tokens_in != self.tokens_packed + dropped:
            raise ConservationError(
                f"{self.tokens_in} tokens were assigned to the step, {self.tokens_packed} packed"
                f" and {dropped} dropped"
            )
        lost = sum(self.dropped_trainable.values())
        if self.trainable_in != self.trained + lost:
            raise ConservationError(
                f"{self.trainable_in} trainable tokens were assigned to the step,"
                f" {self.trained} are trained and {lost} dropped"
            )


def check_plan(groups: Sequence[Group], plan: StepPlan) -> None:
    """Raise `ConservationError` unless the plan places every trajectory once, whole."""
    wanted = {
        trajectory.key: trajectory.total_tokens
        for group in groups
        for trajectory in group.trajectories
        if trajectory.completion_tokens.shape[0]
    }
    for batch in plan.micro_batches:
        for segment in batch.segments:
            length = wanted.pop(segment.key, None)
            if length != segment.length:
                raise ConservationError(
                    f"group {segment.group_id!r} index {segment.index} is planned with"
                    f" {segment.length} tokens;"
                    + (" it is not wanted (again)" if length is None else f" it has {length}")
                )
    if wanted:
        group_id, index = next(iter(wanted))
        raise ConservationError(f"group {group_id!r} index {index} is in no micro-batch")


def trained_tokens(groups: Sequence[Group]) -> int:
    """Tokens of the groups that will be trained once packed."""
    total = 0
    for group in groups:
        for trajectory in group.trajectories:
            if not trajectory.completion_tokens.shape[0]:
                continue
            mask = trajectory.loss_mask
            no_prompt = trajectory.prompt_tokens.shape[0] == 0
            first = no_prompt if mask is None else bool(mask[0])
            total += trajectory.trainable_tokens - int(first)
    return total


def step_conservation(groups: Sequence[Group], written: Sequence[Written]) -> StepConservation:
    """The checked balance of a step from its groups and what was written for all micro-batches.

    Raises: ConservationError.
    """
    members = [trajectory for group in groups for trajectory in group.trajectories]
    empty = [trajectory for trajectory in members if not trajectory.completion_tokens.shape[0]]
    dropped = {DropReason.EMPTY_COMPLETION: sum(t.total_tokens for t in empty)}
    lost = {
        DropReason.EMPTY_COMPLETION: sum(t.trainable_tokens for t in empty),
        DropReason.FIRST_TOKEN_HAS_NO_PREDICTOR: sum(w.unpredictable_tokens for w in written),
    }
    balance = StepConservation(
        tokens_in=sum(trajectory.total_tokens for trajectory in members),
        tokens_packed=sum(w.tokens for w in written),
        trainable_in=sum(trajectory.trainable_tokens for trajectory in members),
        trained=sum(w.trained_tokens for w in written),
        dropped_tokens=MappingProxyType({k: v for k, v in dropped.items() if v}),
        dropped_trainable=MappingProxyType({k: v for k, v in lost.items() if v}),
    )
    balance.check()
    return balance
