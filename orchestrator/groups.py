"""From trajectories in durable order to whole groups, and from groups to steps.

Pure: no I/O, clock or thread. The same trajectories in the same order always give the same groups,
drops and steps. A group is complete or dropped whole with one named reason; nothing is lost: tokens
in = tokens open + ready + assigned + dropped, checked by `Ledger.check`.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from orchestrator.trajectory import (
    ConservationError,
    DropReason,
    Group,
    GroupError,
    NoSurvivingGroupsError,
    Trajectory,
    TrajectoryLimits,
    find_defect,
)


class ZeroSpread(enum.Enum):
    """What to do with a group whose rewards are all equal (its advantages are all zero)."""

    KEEP = "keep"  # Its tokens stay in the loss's denominator.
    DROP = "drop"


@dataclass(frozen=True, kw_only=True)
class GroupPolicy:
    """How groups are formed and which are kept."""

    group_size: int  # G
    extra: int = 0  # Over-generation: producers make G + extra, the first G are kept.
    max_staleness: int | None = None  # Updates between sampling and use; None: any.
    zero_spread: ZeroSpread = ZeroSpread.KEEP
    max_dead_groups: int = 10  # This many dropped groups in a row are borne; one more ends the run.
    remembered_groups: int = 131_072  # Finished groups whose late members are still recognised.

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise GroupError(f"group_size is {self.group_size}; a group has at least 1 member")
        if self.extra < 0:
            raise GroupError(f"extra is {self.extra}; over-generation adds 0 or more members")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise GroupError(f"max_staleness is {self.max_staleness}; use 0 or more updates")
        if self.max_dead_groups < 1:
            raise GroupError(f"max_dead_groups is {self.max_dead_groups}; use at least 1")
        if self.remembered_groups < 1:
            raise GroupError(f"remembered_groups is {self.remembered_groups}; use at least 1")

    @property
    def attempts(self) -> int:
        """Members that producers make for each group."""
        return self.group_size + self.extra


def spread_reason(rewards: tuple[float, ...]) -> DropReason | None:
    """Why these rewards carry no signal, or None when they do.

    A group of one and a group of equal rewards are different reasons; a value that is not finite
    is neither.
    """
    if not all(math.isfinite(reward) for reward in rewards):
        return DropReason.NONFINITE_REWARD
    if len(rewards) == 1:
        return DropReason.GROUP_OF_ONE
    if min(rewards) == max(rewards):
        return DropReason.ZERO_SPREAD
    return None


class Outcome(enum.Enum):
    """What became of a submitted trajectory."""

    ACCEPTED = "accepted"  # Its group is still open.
    COMPLETED = "completed"  # It completed its group, which is ready.
    DUPLICATE = "duplicate"  # Seen before with the same key; acknowledged, counted once.
    CONFLICT = "conflict"  # Same key, other content: refused, not counted.
    DROPPED = "dropped"  # Counted under `reason`.


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer to one submitted trajectory."""

    outcome: Outcome
    reason: DropReason | None = None
    message: str = ""
    group_dropped: bool = False  # Its whole group went with it.


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """What one reason has cost so far."""

    groups: int = 0
    trajectories: int = 0
    tokens: int = 0

    def plus(self, *, groups: int, trajectories: int, tokens: int) -> Dropped:
        """The sum, as a new value."""
        return Dropped(
            groups=self.groups + groups,
            trajectories=self.trajectories + trajectories,
            tokens=self.tokens + tokens,
        )


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Where every token that came in is now. Prompt and completion tokens alike."""

    tokens_in: int
    tokens_open: int
    tokens_ready: int
    tokens_assigned: int
    dropped: Mapping[DropReason, Dropped]
    duplicates: int = 0  # Trajectories; not part of tokens_in.

    @property
    def tokens_dropped(self) -> int:
        """Tokens dropped for any reason."""
        return sum(dropped.tokens for dropped in self.dropped.values())

    def check(self) -> None:
        """Raise `ConservationError` unless every token is accounted for."""
        held = self.tokens_open + self.tokens_ready + self.tokens_assigned + self.tokens_dropped
        if held != self.tokens_in:
            raise ConservationError(
                f"{self.tokens_in} tokens came in but {held} are accounted for"
                f" ({self.tokens_open} open, {self.tokens_ready} ready, {self.tokens_assigned}"
                f" assigned, {self.tokens_dropped} dropped)"
            )


@dataclass(frozen=True, kw_only=True)
class StepGroups:
    """The groups assigned to one step so far, in durable order: always a prefix of the whole."""

    step: int
    groups: tuple[Group, ...]
    complete: bool


@dataclass(kw_only=True)
class _Open:
    """A group that is still forming."""

    members: dict[int, Trajectory] = field(default_factory=dict)
    lost: int = 0  # Members that came and were dropped.
    seen: int = 0  # Bit i: index i was seen.

    @property
    def tokens(self) -> int:
        return sum(trajectory.total_tokens for trajectory in self.members.values())


@dataclass(frozen=True, kw_only=True)
class _Finished:
    """What is remembered of a group that is complete or dropped."""

    seen: int
    dropped: bool


class GroupAssembler:
    """Forms groups from trajectories in durable order and assigns them to steps.

    Consumes trajectories (`submit`); waits for nothing; `assign` hands out what is ready. The place
    of a group in the durable order is that of the trajectory that completed it.
    """

    def __init__(self, policy: GroupPolicy, limits: TrajectoryLimits) -> None:
        self._policy = policy
        self._limits = limits
        self._open: dict[str, _Open] = {}
        self._finished: OrderedDict[str, _Finished] = OrderedDict()
        self._ready: deque[Group] = deque()
        self._step = -1
        self._assigned: list[Group] = []
        self._step_complete = True
        self._tokens_in = 0
        self._tokens_assigned = 0
        self._dropped: dict[DropReason, Dropped] = {}
        self._duplicates = 0
        self._dead_in_a_row = 0
        self._stale_in_a_row = 0

    @property
    def ready(self) -> tuple[Group, ...]:
        """Complete groups that no step has yet, in durable order."""
        return tuple(self._ready)

    @property
    def open_group_ids(self) -> tuple[str, ...]:
        """Groups that are still forming, oldest first."""
        return tuple(self._open)

    def ledger(self) -> Ledger:
        """Where every token is now."""
        return Ledger(
            tokens_in=self._tokens_in,
            tokens_open=sum(group.tokens for group in self._open.values()),
            tokens_ready=sum(group.total_tokens for group in self._ready),
            tokens_assigned=self._tokens_assigned,
            dropped=MappingProxyType(dict(self._dropped)),
            duplicates=self._duplicates,
        )

    def submit(self, trajectory: Trajectory) -> Verdict:
        """Take the next trajectory of the durable order.

        Raises: NoSurvivingGroupsError when more than `max_dead_groups` groups in a row died.
        """
        group_id, index = trajectory.key
        if index >= self._policy.attempts:
            return self._drop_member(
                trajectory,
                DropReason.MALFORMED,
                f"group {group_id!r} index {index}: members have index 0 to"
                f" {self._policy.attempts - 1} (group size {self._policy.group_size}"
                f" + {self._policy.extra} extra)",
            )
        finished = self._finished.get(group_id)
        if finished is not None:
            return self._late(trajectory, finished)
        group = self._open.setdefault(group_id, _Open())
        bit = 1 << index
        if group.seen & bit:
            return self._again(trajectory, group)
        group.seen |= bit
        defect = find_defect(trajectory, self._limits, allow_empty=True)
        if defect is not None:
            group.lost += 1
            verdict = self._drop_member(trajectory, defect.reason, defect.message)
            if self._policy.attempts - group.lost >= self._policy.group_size:
                return verdict
            self._drop_open(group_id, defect.reason)
            return Verdict(
                outcome=verdict.outcome,
                reason=verdict.reason,
                message=verdict.message,
                group_dropped=True,
            )
        self._tokens_in += trajectory.total_tokens
        group.members[index] = trajectory
        if len(group.members) < self._policy.group_size:
            return Verdict(outcome=Outcome.ACCEPTED)
        return self._complete(group_id, group)

    def drop_open(self, group_id: str, reason: DropReason) -> bool:
        """Drop a group that will not complete (its producer failed, the source ended).

        Returns False when no such group is open.
        """
        if group_id not in self._open:
            return False
        self._drop_open(group_id, reason)
        return True

    def assign(self, step: int, groups: int) -> StepGroups:
        """Assign ready groups to `step` until it has `groups` of them; what it has so far.

        A group older than the policy allows *for this step* is dropped here, whole. Steps are
        filled in order; what is left over stays ready for the next one.

        Raises: GroupError (steps out of order), NoSurvivingGroupsError.
        """
        if groups < 1:
            raise GroupError(f"a step of {groups} groups was asked for; it needs at least 1")
        if step != self._step:
            if step != self._step + 1 and self._step >= 0:
                raise GroupError(f"step {step} was asked for after step {self._step}")
            if not self._step_complete:
                raise GroupError(f"step {step} was asked for while step {self._step} is filling")
            self._step, self._assigned, self._step_complete = step, [], False
        while len(self._assigned) < groups and self._ready:
            group = self._ready.popleft()
            limit = self._policy.max_staleness
            if limit is not None and step - group.oldest_policy_version > limit:
                self._drop_group(group, DropReason.STALE)
                self._stale_in_a_row += 1
                self._check_alive(self._stale_in_a_row)
                continue
            self._stale_in_a_row = 0
            self._assigned.append(group)
            self._tokens_assigned += group.total_tokens
        self._step_complete = len(self._assigned) >= groups
        return StepGroups(step=step, groups=tuple(self._assigned), complete=self._step_complete)

    def _complete(self, group_id: str, open_group: _Open) -> Verdict:
        members = tuple(open_group.members[index] for index in sorted(open_group.members))
        group = Group(group_id=group_id, trajectories=members)
        del self._open[group_id]
        reason = None
        if self._policy.zero_spread is ZeroSpread.DROP:
            reason = spread_reason(group.rewards)
        self._remember(group_id, _Finished(seen=open_group.seen, dropped=reason is not None))
        if reason is not None:
            self._drop_group(group, reason)
            self._dead_in_a_row += 1
            self._check_alive(self._dead_in_a_row)
            return Verdict(
                outcome=Outcome.DROPPED,
                reason=reason,
                message=f"group {group_id!r}: dropped whole ({reason.value})",
                group_dropped=True,
            )
        self._dead_in_a_row = 0
        self._ready.append(group)
        return Verdict(outcome=Outcome.COMPLETED)

    def _again(self, trajectory: Trajectory, group: _Open) -> Verdict:
        held = group.members.get(trajectory.index)
        if held is not None and not held.same_content(trajectory):
            return Verdict(
                outcome=Outcome.CONFLICT,
                message=f"group {trajectory.group_id!r} index {trajectory.index}: this index came"
                " before with other content; the first one is kept",
            )
        self._duplicates += 1
        return Verdict(outcome=Outcome.DUPLICATE)

    def _late(self, trajectory: Trajectory, finished: _Finished) -> Verdict:
        bit = 1 << trajectory.index
        if finished.seen & bit:
            self._duplicates += 1
            return Verdict(outcome=Outcome.DUPLICATE)
        self._remember(
            trajectory.group_id, _Finished(seen=finished.seen | bit, dropped=finished.dropped)
        )
        if finished.dropped:
            reason, why = DropReason.GROUP_ALREADY_DROPPED, "was dropped"
        else:
            reason, why = DropReason.OVER_GENERATION, "is complete"
        return self._drop_member(
            trajectory,
            reason,
            f"group {trajectory.group_id!r} index {trajectory.index}: the group {why} already",
        )

    def _drop_member(self, trajectory: Trajectory, reason: DropReason, message: str) -> Verdict:
        self._tokens_in += trajectory.total_tokens
        self._count(reason, groups=0, trajectories=1, tokens=trajectory.total_tokens)
        return Verdict(outcome=Outcome.DROPPED, reason=reason, message=message)

    def _drop_open(self, group_id: str, reason: DropReason) -> None:
        group = self._open.pop(group_id)
        self._remember(group_id, _Finished(seen=group.seen, dropped=True))
        self._count(reason, groups=1, trajectories=len(group.members), tokens=group.tokens)
        self._dead_in_a_row += 1
        self._check_alive(self._dead_in_a_row)

    def _drop_group(self, group: Group, reason: DropReason) -> None:
        self._count(
            reason, groups=1, trajectories=len(group.trajectories), tokens=group.total_tokens
        )

    def _count(self, reason: DropReason, *, groups: int, trajectories: int, tokens: int) -> None:
        before = self._dropped.get(reason, Dropped())
        self._dropped[reason] = before.plus(groups=groups, trajectories=trajectories, tokens=tokens)

    def _remember(self, group_id: str, finished: _Finished) -> None:
        self._finished[group_id] = finished
        self._finished.move_to_end(group_id)
        while len(self._finished) > self._policy.remembered_groups:
            self._finished.popitem(last=False)

    def _check_alive(self, dead: int) -> None:
        if dead <= self._policy.max_dead_groups:
            return
        counts = ", ".join(
            f"{reason.value}: {dropped.groups}"
            for reason, dropped in sorted(self._dropped.items(), key=lambda item: item[0].value)
            if dropped.groups
        )
        raise NoSurvivingGroupsError(
            f"{dead} groups in a row were dropped, {self._policy.max_dead_groups} are borne; the"
            f" step would never fill. Groups dropped so far by reason: {counts}"
        )
