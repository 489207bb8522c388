"""Rollout values: one trajectory, one group, the limits they are held to, and why they are dropped.

Values and checks only: no I/O, clock or policy. What to do about a defect is decided elsewhere (a
recorded file stops the run, a live producer loses its trajectory).

    RolloutError                 anything wrong with rollout data
    |- TrajectoryError           one trajectory; carries its `Defect`
    |- GroupError                one group: members missing, twice, or of another shape
    |- SourceError               a recorded file that cannot be read as rollouts
    |- PackingError              a step that cannot be packed as asked
    |- NoSurvivingGroupsError    too many groups in a row were dropped
    `- ConservationError         tokens went missing: a fault in this program
"""

from __future__ import annotations

import enum
import itertools
import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int16 = npt.NDArray[np.int16]
Uint8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

# A float32 log-softmax may end a few ulps above 0; anything larger is not a log-probability.
LOGPROB_ROUNDING_NATS: Final = 1e-4
FAILED: Final = "failed"
"""The finish reason of a completion that never came: it only tells its group so."""


class DropReason(enum.Enum):
    """Why tokens that came in are not trained. Each is a counter's label."""

    # One trajectory.
    MALFORMED = "malformed"
    EMPTY_COMPLETION = "empty_completion"
    LONGER_THAN_ROW = "longer_than_row"
    TOKEN_OUT_OF_VOCABULARY = "token_out_of_vocabulary"
    NONFINITE_REWARD = "nonfinite_reward"
    NONFINITE_LOGPROB = "nonfinite_logprob"
    POSITIVE_LOGPROB = "positive_logprob"
    MISSING_FIELD = "missing_field"
    UNEXPECTED_FIELD = "unexpected_field"
    ROUTING_MISMATCH = "routing_mismatch"
    EXPERT_OUT_OF_RANGE = "expert_out_of_range"
    # A whole group.
    INCOMPLETE_GROUP = "incomplete_group"
    PRODUCER_FAILED = "producer_failed"
    STALE = "stale"
    ZERO_SPREAD = "zero_spread"
    GROUP_OF_ONE = "group_of_one"
    # Members beyond what a group needs.
    OVER_GENERATION = "over_generation"
    GROUP_ALREADY_DROPPED = "group_already_dropped"
    # Parts of a trajectory.
    TRUNCATED_BY_REQUEST = "truncated_by_request"
    FIRST_TOKEN_HAS_NO_PREDICTOR = "first_token_has_no_predictor"


@dataclass(frozen=True, kw_only=True)
class Defect:
    """What is wrong with one trajectory, and the sentence that says so."""

    reason: DropReason
    message: str


class RolloutError(Exception):
    """Anything wrong with rollout data."""


class TrajectoryError(RolloutError):
    """One trajectory cannot be used. `defect.reason` says why."""

    def __init__(self, defect: Defect) -> None:
        super().__init__(defect.message)
        self.defect = defect


class GroupError(RolloutError):
    """One group's members do not form a group."""


class SourceError(RolloutError):
    """A recorded file cannot be read as rollouts."""


class PackingError(RolloutError):
    """A step cannot be packed as asked."""


class NoSurvivingGroupsError(RolloutError):
    """Too many groups in a row were dropped: the step would never fill."""


class ConservationError(RolloutError):
    """Tokens that came in are neither trained nor counted as dropped: a fault in this program."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """One completion with its prompt. P prompt tokens, C completion tokens, N = P + C.

    Shapes and dtypes are checked on construction (`TrajectoryError`); contents by `find_defect`.
    Arrays are not copied and must not be changed afterwards.
    """

    group_id: str
    index: int  # Place in the group, from 0.
    prompt_tokens: Int32  # [P] token ids.
    completion_tokens: Int32  # [C] token ids.
    reward: float
    policy_version: int  # Updates applied to the weights when the rollout was dispatched.
    newest_policy_version: int | None = None  # Weights at its last token; None: as dispatched.
    loss_mask: Uint8 | None = None  # [N], 1 = train this token; None: every completion token.
    sampling_logprobs: Float32 | None = None  # [C] nats, of each sampled token.
    old_logprobs: Float32 | None = None  # [C] nats.
    ref_logprobs: Float32 | None = None  # [C] nats.
    advantage: float | Float32 | None = None  # One value, or [C]; None until computed.
    routed_experts: Int16 | None = None  # [N, moe_layers, top_k] expert ids, -1 = unset.
    finish_reason: str = ""
    task: str = ""
    truncated_tokens: int = 0  # Completion tokens cut off because the user asked for it.

    def __post_init__(self) -> None:
        if not self.group_id:
            raise _malformed("", self.index, "group_id is empty; give every group a stable name")
        if self.index < 0:
            raise self._malformed(f"index is {self.index}; members count from 0")
        if self.policy_version < 0:
            raise self._malformed(f"policy_version is {self.policy_version}; it counts from 0")
        newest = self.newest_policy_version
        if newest is not None and newest < self.policy_version:
            raise self._malformed(
                f"newest_policy_version is {newest}, below policy_version {self.policy_version};"
                " the version at dispatch is the oldest one"
            )
        self._check_array("prompt_tokens", self.prompt_tokens, np.dtype(np.int32), None)
        self._check_array("completion_tokens", self.completion_tokens, np.dtype(np.int32), None)
        completion = (self.completion_tokens.shape[0], "completion tokens")
        total = (self.total_tokens, "prompt and completion tokens")
        float32 = np.dtype(np.float32)
        if self.loss_mask is not None:
            self._check_array("loss_mask", self.loss_mask, np.dtype(np.uint8), total)
        for name, values in self.token_logprobs():
            self._check_array(name, values, float32, completion)
        if isinstance(self.advantage, np.ndarray):
            self._check_array("advantage", self.advantage, float32, completion)
        if self.routed_experts is not None:
            self._check_routing(self.routed_experts)

    def _malformed(self, what: str) -> TrajectoryError:
        return _malformed(self.group_id, self.index, what)

    def _check_array(
        self,
        name: str,
        values: npt.NDArray[np.generic],
        dtype: np.dtype[np.generic],
        length: tuple[int, str] | None,
    ) -> None:
        if values.dtype != dtype:
            raise self._malformed(f"{name} is {values.dtype}; it must be {dtype}")
        if values.ndim != 1:
            raise self._malformed(f"{name} has shape {list(values.shape)}; it must be flat")
        if length is not None and values.shape[0] != length[0]:
            raise self._malformed(
                f"{name} has {values.shape[0]} entries but there are {length[0]} {length[1]};"
                " give exactly one entry per token"
            )

    def _check_routing(self, routing: Int16) -> None:
        if routing.dtype != np.int16:
            raise self._malformed(
                f"routed_experts is {routing.dtype}; it must be int16 (8 bits cannot name more"
                " than 256 experts, and -1 means unset)"
            )
        if routing.ndim != 3:
            raise self._malformed(
                f"routed_experts has shape {list(routing.shape)}; it must be"
                " [tokens, moe_layers, top_k]"
            )
        if routing.shape[0] != self.total_tokens:
            raise TrajectoryError(
                Defect(
                    reason=DropReason.ROUTING_MISMATCH,
                    message=_where(self.group_id, self.index)
                    + f"routed_experts has {routing.shape[0]} rows but there are"
                    f" {self.total_tokens} prompt and completion tokens; cut both alike and give"
                    " -1 where a token's routing is not known",
                )
            )

    def token_logprobs(self) -> tuple[tuple[str, Float32], ...]:
        """The log-prob fields that are present: (field name, [C] nats)."""
        fields = (
            ("sampling_logprobs", self.sampling_logprobs),
            ("old_logprobs", self.old_logprobs),
            ("ref_logprobs", self.ref_logprobs),
        )
        return tuple((name, values) for name, values in fields if values is not None)

    @property
    def key(self) -> tuple[str, int]:
        """Identity of the trajectory: (group_id, index)."""
        return (self.group_id, self.index)

    @property
    def total_tokens(self) -> int:
        """N: prompt and completion tokens together."""
        return int(self.prompt_tokens.shape[0]) + int(self.completion_tokens.shape[0])

    @property
    def trainable_tokens(self) -> int:
        """Tokens that the loss mask asks to train, before packing."""
        if self.loss_mask is None:
            return int(self.completion_tokens.shape[0])
        return int(np.count_nonzero(self.loss_mask))

    @property
    def optional_fields(self) -> tuple[str, ...]:
        """Names of the optional micro-batch fields this trajectory has, in field-table order."""
        names = [name for name, _ in self.token_logprobs()]
        if self.routed_experts is not None:
            names.append("routed_experts")
        return tuple(names)

    @property
    def routing_shape(self) -> tuple[int, int] | None:
        """(moe_layers, top_k), or None without routing."""
        if self.routed_experts is None:
            return None
        return (int(self.routed_experts.shape[1]), int(self.routed_experts.shape[2]))

    def same_content(self, other: Trajectory) -> bool:
        """Whether both hold the same tokens, log-probs, mask, routing, reward and versions."""
        return (
            self.key == other.key
            and (
                self.reward == other.reward
                or (self.reward != self.reward and other.reward != other.reward)
            )
            and self.policy_version == other.policy_version
            and self.newest_policy_version == other.newest_policy_version
            and self.optional_fields == other.optional_fields
            and _same(self.prompt_tokens, other.prompt_tokens)
            and _same(self.completion_tokens, other.completion_tokens)
            and _same(self.loss_mask, other.loss_mask)
            and _same(self.sampling_logprobs, other.sampling_logprobs)
            and _same(self.old_logprobs, other.old_logprobs)
            and _same(self.ref_logprobs, other.ref_logprobs)
            and _same(self.routed_experts, other.routed_experts)
        )


def _same(left: npt.NDArray[np.generic] | None, right: npt.NDArray[np.generic] | None) -> bool:
    if left is None or right is None:
        return left is right
    # Bytes, not values: two NaNs from the same producer are the same content.
    return left.shape == right.shape and left.tobytes() == right.tobytes()


def _where(group_id: str, index: int) -> str:
    return f"group {group_id!r} index {index}: "


def _malformed(group_id: str, index: int, what: str) -> TrajectoryError:
    return TrajectoryError(
        Defect(reason=DropReason.MALFORMED, message=_where(group_id, index) + what)
    )


@dataclass(frozen=True, kw_only=True)
class Group:
    """The `G` trajectories of one prompt, in index order. Never partial."""

    group_id: str
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        if not self.trajectories:
            raise GroupError(f"group {self.group_id!r} has no members; a group has at least one")
        for trajectory in self.trajectories:
            if trajectory.group_id != self.group_id:
                raise GroupError(
                    f"group {self.group_id!r} was given a member of {trajectory.group_id!r}"
                )
        indices = [trajectory.index for trajectory in self.trajectories]
        for left, right in itertools.pairwise(indices):
            if left >= right:
                raise GroupError(
                    f"group {self.group_id!r}: index {right} follows {left}; members come in"
                    " index order, each once"
                )

    @property
    def total_tokens(self) -> int:
        """Prompt and completion tokens of all members."""
        return sum(trajectory.total_tokens for trajectory in self.trajectories)

    @property
    def rewards(self) -> tuple[float, ...]:
        """Each member's reward, in index order."""
        return tuple(trajectory.reward for trajectory in self.trajectories)

    @property
    def oldest_policy_version(self) -> int:
        """The oldest weights that sampled any of the members."""
        return min(trajectory.policy_version for trajectory in self.trajectories)


@dataclass(frozen=True, kw_only=True)
class TrajectoryLimits:
    """What a trajectory must stay within to be trained."""

    tokens_per_row: int
    vocab_size: int
    required_fields: tuple[str, ...] | None = None  # Exact optional fields; None: not checked.
    num_experts: int | None = None  # With routing: ids are -1 or below this.
    moe_layers: int | None = None
    top_k: int | None = None

    def __post_init__(self) -> None:
        if self.tokens_per_row < 2:
            raise PackingError(
                f"tokens_per_row is {self.tokens_per_row}; a trained token and its predictor"
                " need at least 2"
            )
        if self.vocab_size < 1:
            raise PackingError(f"vocab_size is {self.vocab_size}; it must be at least 1")
        if self.num_experts is not None and not 1 <= self.num_experts <= 32768:
            raise PackingError(f"num_experts is {self.num_experts}; int16 ids allow 1 to 32768")


def find_defect(
    trajectory: Trajectory, limits: TrajectoryLimits, *, allow_empty: bool = False
) -> Defect | None:
    """The first thing that keeps `trajectory` from being trained, or None.

    `allow_empty`: an empty completion is no defect (its reward still counts in its group).
    """
    where = _where(trajectory.group_id, trajectory.index)
    completion = trajectory.completion_tokens
    if trajectory.finish_reason == FAILED:
        return Defect(
            reason=DropReason.PRODUCER_FAILED,
            message=where + "its producer gave it up; it is not trained",
        )
    if completion.shape[0] == 0 and not allow_empty:
        return Defect(
            reason=DropReason.EMPTY_COMPLETION,
            message=where + "completion_tokens is empty; a completion has at least one token",
        )
    if trajectory.total_tokens > limits.tokens_per_row:
        return Defect(
            reason=DropReason.LONGER_THAN_ROW,
            message=where
            + f"{trajectory.total_tokens} tokens ({trajectory.prompt_tokens.shape[0]} prompt,"
            f" {completion.shape[0]} completion) do not fit a row of {limits.tokens_per_row};"
            " raise the row size, or ask for truncation",
        )
    return (
        _token_defect(where, trajectory, limits)
        or _number_defect(where, trajectory)
        or _field_defect(where, trajectory, limits)
        or _routing_defect(where, trajectory, limits)
    )


def _token_defect(where: str, trajectory: Trajectory, limits: TrajectoryLimits) -> Defect | None:
    for name, ids in (
        ("prompt_tokens", trajectory.prompt_tokens),
        ("completion_tokens", trajectory.completion_tokens),
    ):
        if ids.shape[0] and (int(ids.min()) < 0 or int(ids.max()) >= limits.vocab_size):
            at = int(np.argmax((ids < 0) | (ids >= limits.vocab_size)))
            return Defect(
                reason=DropReason.TOKEN_OUT_OF_VOCABULARY,
                message=where
                + f"{name}[{at}] is {int(ids[at])}; token ids are 0 to {limits.vocab_size - 1}"
                " (is this the trained model's tokenizer?)",
            )
    return None


def _number_defect(where: str, trajectory: Trajectory) -> Defect | None:
    if not math.isfinite(trajectory.reward):
        return Defect(
            reason=DropReason.NONFINITE_REWARD,
            message=where + f"reward is {trajectory.reward}; it must be finite",
        )
    for name, values in trajectory.token_logprobs():
        bad = ~np.isfinite(values)
        if bad.any():
            at = int(np.argmax(bad))
            return Defect(
                reason=DropReason.NONFINITE_LOGPROB,
                message=where
                + f"{name}[{at}] is {float(values[at])}; a sampled token has a finite log-prob",
            )
        high = values > LOGPROB_ROUNDING_NATS
        if high.any():
            at = int(np.argmax(high))
            return Defect(
                reason=DropReason.POSITIVE_LOGPROB,
                message=where
                + f"{name}[{at}] is {float(values[at])}; log-probs are natural logs, at most 0",
            )
    mask = trajectory.loss_mask
    if mask is not None and mask.shape[0] and int(mask.max()) > 1:
        at = int(np.argmax(mask > 1))
        return Defect(
            reason=DropReason.MALFORMED,
            message=where + f"loss_mask[{at}] is {int(mask[at])}; it is 0 or 1",
        )
    advantage = trajectory.advantage
    if advantage is not None and not bool(np.all(np.isfinite(advantage))):
        return Defect(reason=DropReason.MALFORMED, message=where + "advantage is not finite")
    return None


def _field_defect(where: str, trajectory: Trajectory, limits: TrajectoryLimits) -> Defect | None:
    if limits.required_fields is None:
        return None
    present = trajectory.optional_fields
    for name in limits.required_fields:
        if name not in present:
            return Defect(
                reason=DropReason.MISSING_FIELD,
                message=where
                + f"{name} is missing; this run trains with it, so every trajectory needs it",
            )
    for name in present:
        if name not in limits.required_fields:
            return Defect(
                reason=DropReason.UNEXPECTED_FIELD,
                message=where
                + f"{name} is given but this run does not use it; leave it out, or configure the"
                " run with it",
            )
    return None


def _routing_defect(where: str, trajectory: Trajectory, limits: TrajectoryLimits) -> Defect | None:
    routing = trajectory.routed_experts
    if routing is None:
        return None
    layers, top_k = int(routing.shape[1]), int(routing.shape[2])
    if (limits.moe_layers is not None and layers != limits.moe_layers) or (
        limits.top_k is not None and top_k != limits.top_k
    ):
        return Defect(
            reason=DropReason.ROUTING_MISMATCH,
            message=where + f"routed_experts has {layers} layers of {top_k} experts; the model has"
            f" {limits.moe_layers} layers of {limits.top_k}",
        )
    if routing.size == 0:
        return None
    top = 32768 if limits.num_experts is None else limits.num_experts
    if int(routing.min()) < -1 or int(routing.max()) >= top:
        at = int(np.argmax((routing < -1) | (routing >= top)))
        token, layer, slot = (int(i) for i in np.unravel_index(at, routing.shape))
        return Defect(
            reason=DropReason.EXPERT_OUT_OF_RANGE,
            message=where
            + f"routed_experts[{token},{layer},{slot}] is {int(routing[token, layer, slot])};"
            f" expert ids are 0 to {top - 1}, or -1 for unset (an id that once passed through"
            " 8 bits wraps)",
        )
    return None


def check_trajectory(
    trajectory: Trajectory, limits: TrajectoryLimits, *, allow_empty: bool = False
) -> None:
    """Raise `TrajectoryError` if `find_defect` finds one."""
    defect = find_defect(trajectory, limits, allow_empty=allow_empty)
    if defect is not None:
        raise TrajectoryError(defect)


def truncate_to_row(trajectory: Trajectory, tokens_per_row: int) -> Trajectory:
    """Cut the end of the completion so that the whole fits a row. Only for users who ask for it.

    Every per-token field is cut alike. The result is marked (`truncated_tokens`, and
    `finish_reason` "truncated"); count the difference under `TRUNCATED_BY_REQUEST`.

    Raises: TrajectoryError when the prompt leaves no room for a completion token.
    """
    excess = trajectory.total_tokens - tokens_per_row
    if excess <= 0:
        return trajectory
    keep = int(trajectory.completion_tokens.shape[0]) - excess
    if keep < 1:
        raise TrajectoryError(
            Defect(
                reason=DropReason.LONGER_THAN_ROW,
                message=_where(trajectory.group_id, trajectory.index)
                + f"the prompt alone has {trajectory.prompt_tokens.shape[0]} tokens; a row of"
                f" {tokens_per_row} leaves no room for a completion token",
            )
        )
    total = trajectory.total_tokens - excess
    advantage = trajectory.advantage
    return replace(
        trajectory,
        completion_tokens=trajectory.completion_tokens[:keep],
        loss_mask=None if trajectory.loss_mask is None else trajectory.loss_mask[:total],
        sampling_logprobs=_cut(trajectory.sampling_logprobs, keep),
        old_logprobs=_cut(trajectory.old_logprobs, keep),
        ref_logprobs=_cut(trajectory.ref_logprobs, keep),
        advantage=advantage[:keep] if isinstance(advantage, np.ndarray) else advantage,
        routed_experts=None
        if trajectory.routed_experts is None
        else trajectory.routed_experts[:total],
        finish_reason="truncated",
        truncated_tokens=trajectory.truncated_tokens + excess,
    )


def _cut(values: Float32 | None, keep: int) -> Float32 | None:
    return None if values is None else values[:keep]
