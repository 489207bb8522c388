"""Small trajectories and groups for the packing and group tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orchestrator.trajectory import Group, Trajectory, TrajectoryLimits

LIMITS = TrajectoryLimits(tokens_per_row=64, vocab_size=1000)


def trajectory(
    group_id: str = "g",
    index: int = 0,
    *,
    prompt: Sequence[int] = (5,),
    completion: Sequence[int] = (7, 8),
    logprobs: Sequence[float] | None = None,
    reward: float = 0.0,
    version: int = 0,
    advantage: float | None = 1.0,
    mask: Sequence[int] | None = None,
    routing: np.ndarray | None = None,
) -> Trajectory:
    return Trajectory(
        group_id=group_id,
        index=index,
        prompt_tokens=np.asarray(prompt, np.int32),
        completion_tokens=np.asarray(completion, np.int32),
        sampling_logprobs=None if logprobs is None else np.asarray(logprobs, np.float32),
        reward=reward,
        policy_version=version,
        advantage=advantage,
        loss_mask=None if mask is None else np.asarray(mask, np.uint8),
        routed_experts=routing,
    )


def of_length(group_id: str, index: int, total: int, seed: int = 0) -> Trajectory:
    """`total` tokens (at least 2) with contents that tell every token apart from its neighbours."""
    prompt = max(1, total // 3)
    rng = np.random.default_rng((seed, index, total, len(group_id)))
    ids = rng.integers(1, 1000, total, dtype=np.int32)
    return Trajectory(
        group_id=group_id,
        index=index,
        prompt_tokens=ids[:prompt],
        completion_tokens=ids[prompt:],
        sampling_logprobs=-rng.random(total - prompt, dtype=np.float32) - 0.01,
        reward=float(rng.random()),
        policy_version=0,
        advantage=float(rng.normal()),
    )


def groups_of(lengths: Sequence[int], group_size: int = 4) -> list[Group]:
    """Groups of `group_size` (the last may be smaller) with the given total lengths."""
    groups = []
    for start in range(0, len(lengths), group_size):
        name = f"g{start // group_size:04d}"
        members = tuple(
            of_length(name, index, total)
            for index, total in enumerate(lengths[start : start + group_size])
        )
        groups.append(Group(group_id=name, trajectories=members))
    return groups


def members_of(groups: Sequence[Group]) -> dict[tuple[str, int], Trajectory]:
    return {member.key: member for group in groups for member in group.trajectories}


def trainer_weights(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The trainer's shift: weight of position t is what it gives to predicting token t + 1."""
    segments, mask = arrays["segment_ids"], arrays["loss_mask"]
    weights = np.zeros(mask.shape, np.int64)
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, :-1] != 0)
    weights[:, :-1] = mask[:, 1:] * same
    return weights
