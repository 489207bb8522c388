"""The step plan: which calls each optimizer step needs, and which boundaries may be staged.

Pure values and arithmetic. No clock, socket, thread or array.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PlanError(ValueError):
    """Settings that contradict each other; names them and the fix."""


class Duty(enum.Enum):
    """What a closed step still owes, in this order."""

    GET_METRICS = "get_metrics"
    SAVE_CHECKPOINT = "save_checkpoint"
    RELEASE_WEIGHT_SYNC = "release_weight_sync"
    PREPARE_WEIGHT_SYNC = "prepare_weight_sync"
    EVALUATE = "evaluate"


class Ineligible(enum.Enum):
    """Why a boundary is not staged. Each has a counter and one log line."""

    SWITCH_OFF = "staging is off"
    RUN_ENDS = "the run ends with this step"
    SCORED = "this step's checkpoint is scored (val_start_step)"
    NEEDS_UPDATED_WEIGHTS = "the next step's payload needs the updated weights"
    LATCHED = "staging latched itself off"


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What every step of a run does. Steps count from 0; `*_every` = 0 means never."""

    num_steps: int
    pipeline: bool = False  # --pipeline_step_boundary
    stage: bool = False  # --stage_next_microbatch, after the capability check.
    stage_before_update: bool = True
    dispatch_before_metrics: bool = False  # Zero-gap order.
    checkpoint_every: int = 0
    weight_sync_every: int = 0
    eval_every: int = 0
    val_start_step: int = 0  # Counts from 1: checkpoints of steps >= this are scored; 0 = none.
    trainer_logprobs: bool = False  # --old_logprobs=trainer
    # Latch: staging turns itself off after this many boundaries in a row where it hid nothing.
    latch_after: int = 3
    latch_hidden_seconds: float = 0.05  # A stage that hid less than this hid nothing.

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise PlanError(f"num_steps is {self.num_steps}; a run has at least 1 step")
        for name in ("checkpoint_every", "weight_sync_every", "eval_every", "val_start_step"):
            value: int = {
                "checkpoint_every": self.checkpoint_every,
                "weight_sync_every": self.weight_sync_every,
                "eval_every": self.eval_every,
                "val_start_step": self.val_start_step,
            }[name]
            if value < 0:
                raise PlanError(f"{name} is {value}; use 0 for never, or a positive number")
        if self.latch_after < 1:
            raise PlanError(f"latch_after is {self.latch_after}; use at least 1 boundary")
        if self.stage and not self.pipeline:
            raise PlanError(
                "stage_next_microbatch is set without pipeline_step_boundary: staging needs the"
                " pipelined boundary; add --pipeline_step_boundary or drop --stage_next_microbatch"
            )
        if self.dispatch_before_metrics and not (self.stage and self.stage_before_update):
            raise PlanError(
                "dispatch_before_metrics is set without a staged boundary before the update: it"
                " dispatches the staged input; add --stage_next_microbatch, or drop it"
            )

    def duties(self, step: int) -> tuple[Duty, ...]:
        """What step `step` owes once it is closed, in order."""
        number = step + 1
        owed = [Duty.GET_METRICS]
        if self.checkpoint_every and number % self.checkpoint_every == 0:
            owed.append(Duty.SAVE_CHECKPOINT)
        if self.weight_sync_every and number % self.weight_sync_every == 0:
            if number > self.weight_sync_every:
                owed.append(Duty.RELEASE_WEIGHT_SYNC)
            owed.append(Duty.PREPARE_WEIGHT_SYNC)
        if self.eval_every and number % self.eval_every == 0:
            owed.append(Duty.EVALUATE)
        return tuple(owed)

    def synced_before(self, step: int) -> int:
        """The step whose weights were pinned before step `step`'s own weight sync."""
        return step - self.weight_sync_every

    def staging_refused(self, step: int, *, latched: bool) -> Ineligible | None:
        """Why the boundary after step `step` is not staged; None when it may be."""
        if not self.stage:
            return Ineligible.SWITCH_OFF
        if step + 1 >= self.num_steps:
            return Ineligible.RUN_ENDS
        if self.val_start_step and step + 1 >= self.val_start_step:
            return Ineligible.SCORED
        if self.trainer_logprobs:
            return Ineligible.NEEDS_UPDATED_WEIGHTS
        if latched:
            return Ineligible.LATCHED
        return None
