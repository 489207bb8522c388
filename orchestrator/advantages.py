"""Advantages from a group's rewards, computed on whole groups before anything is split.

Pure arithmetic: float64 with exactly rounded sums inside, float32 out, the same on any machine.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.trajectory import Float32, Group, GroupError


class Estimator(enum.Enum):
    """How rewards of one group become advantages."""

    GRPO = "grpo"  # (r - mean) / (std + epsilon)
    DR_GRPO = "dr_grpo"  # r - mean
    RLOO = "rloo"  # r - mean of the others


class Std(enum.Enum):
    """GRPO's standard deviation: divide by G (population) or by G - 1 (sample)."""

    POPULATION = "population"
    SAMPLE = "sample"


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Which estimator, and its two details."""

    estimator: Estimator = Estimator.GRPO
    std: Std = Std.POPULATION
    epsilon: float = 1e-6  # Added to the standard deviation; GRPO only.

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise GroupError(f"epsilon is {self.epsilon}; use a finite number, 0 or more")


def advantages(rewards: Sequence[float], config: AdvantageConfig) -> Float32:
    """Advantages float32 [G] of one group's rewards [G].

    Equal rewards (and a group of one, under GRPO and Dr.GRPO) give exactly 0.

    Raises: GroupError for no rewards, a reward that is not finite, or RLOO of a group of one.
    """
    size = len(rewards)
    if size == 0:
        raise GroupError("advantages of no rewards were asked for")
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise GroupError(f"reward of member {index} is {reward}; it must be finite")
    if config.estimator is Estimator.RLOO and size == 1:
        raise GroupError("RLOO compares with the other members, and a group of one has none")
    if min(rewards) == max(rewards):
        # Exactly 0: rounding of the mean must not be divided by epsilon.
        return np.zeros(size, np.float32)
    mean = math.fsum(rewards) / size
    centred = [reward - mean for reward in rewards]
    if config.estimator is Estimator.DR_GRPO:
        return np.asarray(centred, np.float64).astype(np.float32)
    if config.estimator is Estimator.RLOO:
        scale = size / (size - 1)
        return np.asarray([value * scale for value in centred], np.float64).astype(np.float32)
    divisor = size if config.std is Std.POPULATION else size - 1
    std = math.sqrt(math.fsum(value * value for value in centred) / divisor)
    scaled = [value / (std + config.epsilon) for value in centred]
    return np.asarray(scaled, np.float64).astype(np.float32)


def with_advantages(group: Group, config: AdvantageConfig) -> Group:
    """The group with every member's `advantage` set to one value.

    Raises: GroupError as `advantages`, naming the group.
    """
    try:
        values = advantages(group.rewards, config)
    except GroupError as error:
        raise GroupError(f"group {group.group_id!r}: {error}") from error
    return Group(
        group_id=group.group_id,
        trajectories=tuple(
            replace(trajectory, advantage=float(value))
            for trajectory, value in zip(group.trajectories, values, strict=True)
        ),
    )
