"""How rollout batches feed steps: the arithmetic that every source shares. Pure.

A rollout batch of `groups_per_batch` groups feeds `num_minibatches * num_iterations` steps: each
iteration goes through the batch once, in `num_minibatches` equal parts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Groups of a rollout batch and the steps they feed."""

    groups_per_batch: int
    num_minibatches: int = 1
    num_iterations: int = 1

    def __post_init__(self) -> None:
        for name, value in (
            ("groups_per_batch", self.groups_per_batch),
            ("num_minibatches", self.num_minibatches),
            ("num_iterations", self.num_iterations),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.groups_per_batch % self.num_minibatches:
            raise ValueError(
                f"groups_per_batch is {self.groups_per_batch} and num_minibatches"
                f" {self.num_minibatches}; choose a multiple, so that the steps have equal parts"
            )

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps that one rollout batch feeds."""
        return self.num_minibatches * self.num_iterations

    @property
    def groups_per_step(self) -> int:
        """Groups of one optimizer step."""
        return self.groups_per_batch // self.num_minibatches

    def batch_of(self, step: int) -> int:
        """The rollout batch that feeds `step`."""
        return step // self.steps_per_batch

    def first_step(self, batch: int) -> int:
        """The first step that `batch` feeds."""
        return batch * self.steps_per_batch

    def opens_batch(self, step: int) -> bool:
        """Whether `step` is the first of its batch."""
        return step % self.steps_per_batch == 0

    def part(self, step: int) -> slice:
        """Which groups of its batch the step trains."""
        size = self.groups_per_step
        number = step % self.num_minibatches
        return slice(number * size, (number + 1) * size)

    def step_of_place(self, batch: int, place: int) -> int:
        """The first step that trains the group at `place` of `batch`."""
        return self.first_step(batch) + place // self.groups_per_step
