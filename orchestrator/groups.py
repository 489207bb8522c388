"""From trajectories in durable order to whole groups, and from groups to steps.

Pure: no I/O, clock or thread. The same trajectories in the same order always give the same groups,
drops and steps. A group is complete or dropped whole with one named reason; nothing is lost: tokens
in = tokens open + ready + assigned + dropped, checked by `Ledger.check`.

`Formation` forms groups and `Assignment` hands them to steps; neither depends on how far the other
has got. Both take whole trajectories or small records of them (`Member`), and their states can be
saved and restored. `GroupAssembler` is the two together over whole trajectories.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Generic, Protocol, Self, TypeVar

from orchestrator.trajectory import (
    ConservationError,
    Defect,
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
    # This many dropped groups in a row are borne; one more ends the run. Groups that were never
    # complete do not count.
    max_dead_groups: int = 10
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


class Member(Protocol):
    """What forming groups needs of a trajectory: a whole one, or a small record of one."""

    @property
    def group_id(self) -> str: ...

    @property
    def index(self) -> int: ...

    @property
    def reward(self) -> float: ...

    @property
    def policy_version(self) -> int: ...

    @property
    def total_tokens(self) -> int: ...

    def same_content(self, other: Self) -> bool: ...


M = TypeVar("M", bound=Member)

Drops = Mapping[DropReason, Dropped]
NO_DROPS: Final[Drops] = MappingProxyType({})


def add_drop(
    drops: Drops, reason: DropReason, *, groups: int, trajectories: int, tokens: int
) -> Drops:
    """`drops` and one more, as a new value."""
    before = drops.get(reason, Dropped())
    after = before.plus(groups=groups, trajectories=trajectories, tokens=tokens)
    return MappingProxyType({**drops, reason: after})


def merge_drops(left: Drops, right: Drops) -> Drops:
    """The sum of both."""
    merged = left
    for reason, dropped in right.items():
        merged = add_drop(
            merged,
            reason,
            groups=dropped.groups,
            trajectories=dropped.trajectories,
            tokens=dropped.tokens,
        )
    return merged


@dataclass(frozen=True, kw_only=True)
class Formed(Generic[M]):
    """A complete group, in index order. `drops_before`: all that was dropped until it completed."""

    group_id: str
    members: tuple[M, ...]
    drops_before: Drops = field(default_factory=lambda: NO_DROPS)

    @property
    def total_tokens(self) -> int:
        """Prompt and completion tokens of all members."""
        return sum(member.total_tokens for member in self.members)

    @property
    def oldest_policy_version(self) -> int:
        """The oldest weights that sampled any of the members."""
        return min(member.policy_version for member in self.members)


@dataclass(frozen=True, kw_only=True)
class Closed(Generic[M]):
    """A group that takes no more members: complete (`formed`) or dropped whole (`reason`)."""

    group_id: str
    formed: Formed[M] | None
    reason: DropReason | None
    released: tuple[M, ...]  # Members that will never be trained.


@dataclass(frozen=True, kw_only=True)
class OpenGroup(Generic[M]):
    """A group that is still forming, as a saved state has it. `members` in order of arrival."""

    group_id: str
    members: tuple[M, ...]
    lost: int  # Members that came and were dropped.
    seen: int  # Bit i: index i was seen.


@dataclass(frozen=True, kw_only=True)
class FormationState(Generic[M]):
    """All that a `Formation` remembers. Restoring it goes on as if nothing had happened."""

    open_groups: tuple[OpenGroup[M], ...] = ()  # Oldest first.
    finished: tuple[tuple[str, int, bool], ...] = ()  # (group id, indices seen, dropped).
    drops: Drops = field(default_factory=lambda: NO_DROPS)
    tokens_in: int = 0
    tokens_formed: int = 0
    duplicates: int = 0
    dead_in_a_row: int = 0


@dataclass(kw_only=True)
class _Open(Generic[M]):
    """A group that is still forming."""

    members: dict[int, M] = field(default_factory=dict)
    lost: int = 0
    seen: int = 0

    @property
    def tokens(self) -> int:
        return sum(member.total_tokens for member in self.members.values())


@dataclass(frozen=True, kw_only=True)
class _Finished:
    """What is remembered of a group that is complete or dropped."""

    seen: int
    dropped: bool


class Formation(Generic[M]):
    """Forms groups from members in durable order.

    The place of a group in the durable order is that of the member that completed it.
    """

    def __init__(self, policy: GroupPolicy, state: FormationState[M] | None = None) -> None:
        state = FormationState() if state is None else state
        self._policy = policy
        self._open: dict[str, _Open[M]] = {
            group.group_id: _Open(
                members={member.index: member for member in group.members},
                lost=group.lost,
                seen=group.seen,
            )
            for group in state.open_groups
        }
        self._finished: OrderedDict[str, _Finished] = OrderedDict(
            (group_id, _Finished(seen=seen, dropped=dropped))
            for group_id, seen, dropped in state.finished
        )
        self._closed: list[Closed[M]] = []
        self._tokens_open = sum(group.tokens for group in self._open.values())
        self._drops = state.drops
        self._tokens_in = state.tokens_in
        self._tokens_formed = state.tokens_formed
        self._duplicates = state.duplicates
        self._dead_in_a_row = state.dead_in_a_row

    def state(self) -> FormationState[M]:
        """Everything that is remembered, to be restored from."""
        return FormationState(
            open_groups=tuple(
                OpenGroup(
                    group_id=group_id,
                    members=tuple(group.members.values()),
                    lost=group.lost,
                    seen=group.seen,
                )
                for group_id, group in self._open.items()
            ),
            finished=tuple(
                (group_id, finished.seen, finished.dropped)
                for group_id, finished in self._finished.items()
            ),
            drops=self._drops,
            tokens_in=self._tokens_in,
            tokens_formed=self._tokens_formed,
            duplicates=self._duplicates,
            dead_in_a_row=self._dead_in_a_row,
        )

    @property
    def open_group_ids(self) -> tuple[str, ...]:
        """Groups that are still forming, oldest first."""
        return tuple(self._open)

    def is_open(self, group_id: str) -> bool:
        """Whether the group is still forming."""
        return group_id in self._open

    @property
    def tokens_in(self) -> int:
        """Tokens of everything taken, duplicates left out."""
        return self._tokens_in

    @property
    def tokens_open(self) -> int:
        """Tokens of groups that are still forming."""
        return self._tokens_open

    @property
    def tokens_formed(self) -> int:
        """Tokens of all groups that were completed and kept."""
        return self._tokens_formed

    @property
    def drops(self) -> Drops:
        """All that was dropped while forming."""
        return self._drops

    @property
    def duplicates(self) -> int:
        """Members that came again."""
        return self._duplicates

    @property
    def dead_in_a_row(self) -> int:
        """Groups dropped since the last one that was kept."""
        return self._dead_in_a_row

    def drain(self) -> tuple[Closed[M], ...]:
        """Groups that were closed since the last call, in order."""
        closed, self._closed = tuple(self._closed), []
        return closed

    def take(self, member: M, defect: Defect | None) -> Verdict:
        """Take the next member of the durable order; `defect` is what is wrong with it, if known."""
        group_id, index = member.group_id, member.index
        if index >= self._policy.attempts:
            return self._drop_member(
                member,
                DropReason.MALFORMED,
                f"group {group_id!r} index {index}: members have index 0 to"
                f" {self._policy.attempts - 1} (group size {self._policy.group_size}"
                f" + {self._policy.extra} extra)",
            )
        finished = self._finished.get(group_id)
        if finished is not None:
            return self._late(member, finished)
        group = self._open.setdefault(group_id, _Open())
        bit = 1 << index
        if group.seen & bit:
            return self._again(member, group)
        group.seen |= bit
        if defect is not None:
            group.lost += 1
            verdict = self._drop_member(member, defect.reason, defect.message)
            if self._policy.attempts - group.lost >= self._policy.group_size:
                return verdict
            self._drop_open(group_id, defect.reason)
            return Verdict(
                outcome=verdict.outcome,
                reason=verdict.reason,
                message=verdict.message,
                group_dropped=True,
            )
        self._tokens_in += member.total_tokens
        self._tokens_open += member.total_tokens
        group.members[index] = member
        if len(group.members) < self._policy.group_size:
            return Verdict(outcome=Outcome.ACCEPTED)
        return self._complete(group_id, group)

    def refuse(self, reason: DropReason) -> None:
        """Count something that came and could not even be read as a member."""
        self._count(reason, groups=0, trajectories=1, tokens=0)

    def drop_open(self, group_id: str, reason: DropReason) -> bool:
        """Drop a group that will not complete (its producer failed, the source ended, time is up).

        Returns False when no such group is open.
        """
        if group_id not in self._open:
            return False
        self._drop_open(group_id, reason)
        return True

    def open_below(self, version: int) -> tuple[str, ...]:
        """Open groups with a member that was sampled by weights older than policy `version`."""
        return tuple(
            group_id
            for group_id, group in self._open.items()
            if any(member.policy_version < version for member in group.members.values())
        )

    def check_alive(self) -> None:
        """Raise `NoSurvivingGroupsError` when more groups in a row died than the policy bears."""
        check_alive(self._dead_in_a_row, self._policy, self._drops)

    def _complete(self, group_id: str, open_group: _Open[M]) -> Verdict:
        members = tuple(open_group.members[index] for index in sorted(open_group.members))
        formed = Formed(group_id=group_id, members=members, drops_before=self._drops)
        del self._open[group_id]
        self._tokens_open -= formed.total_tokens
        reason = None
        if self._policy.zero_spread is ZeroSpread.DROP:
            reason = spread_reason(tuple(member.reward for member in members))
        self._remember(group_id, _Finished(seen=open_group.seen, dropped=reason is not None))
        if reason is not None:
            self._close_dropped(group_id, members, reason)
            return Verdict(
                outcome=Outcome.DROPPED,
                reason=reason,
                message=f"group {group_id!r}: dropped whole ({reason.value})",
                group_dropped=True,
            )
        self._dead_in_a_row = 0
        self._tokens_formed += formed.total_tokens
        self._closed.append(Closed(group_id=group_id, formed=formed, reason=None, released=()))
        return Verdict(outcome=Outcome.COMPLETED)

    def _again(self, member: M, group: _Open[M]) -> Verdict:
        held = group.members.get(member.index)
        if held is not None and not held.same_content(member):
            return Verdict(
                outcome=Outcome.CONFLICT,
                message=f"group {member.group_id!r} index {member.index}: this index came"
                " before with other content; the first one is kept",
            )
        self._duplicates += 1
        return Verdict(outcome=Outcome.DUPLICATE)

    def _late(self, member: M, finished: _Finished) -> Verdict:
        bit = 1 << member.index
        if finished.seen & bit:
            self._duplicates += 1
            return Verdict(outcome=Outcome.DUPLICATE)
        self._remember(
            member.group_id, _Finished(seen=finished.seen | bit, dropped=finished.dropped)
        )
        if finished.dropped:
            reason, why = DropReason.GROUP_ALREADY_DROPPED, "was dropped"
        else:
            reason, why = DropReason.OVER_GENERATION, "is complete"
        return self._drop_member(
            member,
            reason,
            f"group {member.group_id!r} index {member.index}: the group {why} already",
        )

    def _drop_member(self, member: M, reason: DropReason, message: str) -> Verdict:
        self._tokens_in += member.total_tokens
        self._count(reason, groups=0, trajectories=1, tokens=member.total_tokens)
        return Verdict(outcome=Outcome.DROPPED, reason=reason, message=message)

    def _drop_open(self, group_id: str, reason: DropReason) -> None:
        group = self._open.pop(group_id)
        self._tokens_open -= group.tokens
        self._remember(group_id, _Finished(seen=group.seen, dropped=True))
        self._close_dropped(group_id, tuple(group.members.values()), reason)

    def _close_dropped(self, group_id: str, members: tuple[M, ...], reason: DropReason) -> None:
        self._count(
            reason,
            groups=1,
            trajectories=len(members),
            tokens=sum(member.total_tokens for member in members),
        )
        if reason not in (DropReason.INCOMPLETE_GROUP, DropReason.STALE):
            # A producer that went away, or was slow, takes all its open groups with it, at one
            # moment: that says nothing about the others, and whoever waits for a step has a
            # patience of its own.
            self._dead_in_a_row += 1
        self._closed.append(Closed(group_id=group_id, formed=None, reason=reason, released=members))

    def _count(self, reason: DropReason, *, groups: int, trajectories: int, tokens: int) -> None:
        self._drops = add_drop(
            self._drops, reason, groups=groups, trajectories=trajectories, tokens=tokens
        )

    def _remember(self, group_id: str, finished: _Finished) -> None:
        self._finished[group_id] = finished
        self._finished.move_to_end(group_id)
        while len(self._finished) > self._policy.remembered_groups:
            self._finished.popitem(last=False)


@dataclass(frozen=True, kw_only=True)
class AssignmentState:
    """All that an `Assignment` remembers."""

    tokens_assigned: int = 0
    stale: Dropped = field(default_factory=Dropped)
    stale_in_a_row: int = 0


class Assignment:
    """Decides, group by group in durable order, which ones steps train."""

    def __init__(self, policy: GroupPolicy, state: AssignmentState | None = None) -> None:
        self._policy = policy
        self.state = AssignmentState() if state is None else state

    @property
    def drops(self) -> Drops:
        """All that was dropped on assignment."""
        stale = self.state.stale
        return MappingProxyType({DropReason.STALE: stale}) if stale.groups else NO_DROPS

    def offer(self, group: Formed[M], version: int) -> bool:
        """Whether a step trained at policy `version` takes the group; dropped as stale if not."""
        state, limit = self.state, self._policy.max_staleness
        if limit is not None and version - group.oldest_policy_version > limit:
            self.state = AssignmentState(
                tokens_assigned=state.tokens_assigned,
                stale=state.stale.plus(
                    groups=1, trajectories=len(group.members), tokens=group.total_tokens
                ),
                stale_in_a_row=state.stale_in_a_row + 1,
            )
            return False
        self.state = AssignmentState(
            tokens_assigned=state.tokens_assigned + group.total_tokens, stale=state.stale
        )
        return True


def check_alive(dead_in_a_row: int, policy: GroupPolicy, drops: Drops) -> None:
    """Raise `NoSurvivingGroupsError` when more groups in a row died than the policy bears."""
    if dead_in_a_row <= policy.max_dead_groups:
        return
    counts = ", ".join(
        f"{reason.value}: {dropped.groups}"
        for reason, dropped in sorted(drops.items(), key=lambda item: item[0].value)
        if dropped.groups
    )
    raise NoSurvivingGroupsError(
        f"{dead_in_a_row} groups in a row were dropped, {policy.max_dead_groups} are borne; the"
        f" step would never fill. Groups dropped so far by reason: {counts}"
    )


class GroupAssembler:
    """Forms groups from trajectories in durable order and assigns them to steps.

    Consumes trajectories (`submit`); waits for nothing; `assign` hands out what is ready.
    """

    def __init__(self, policy: GroupPolicy, limits: TrajectoryLimits) -> None:
        self._policy = policy
        self._limits = limits
        self._formation: Formation[Trajectory] = Formation(policy)
        self._assignment = Assignment(policy)
        self._ready: deque[Formed[Trajectory]] = deque()
        self._step = -1
        self._assigned: list[Group] = []
        self._step_complete = True

    @property
    def ready(self) -> tuple[Group, ...]:
        """Complete groups that no step has yet, in durable order."""
        return tuple(_whole(formed) for formed in self._ready)

    @property
    def open_group_ids(self) -> tuple[str, ...]:
        """Groups that are still forming, oldest first."""
        return self._formation.open_group_ids

    def ledger(self) -> Ledger:
        """Where every token is now."""
        return Ledger(
            tokens_in=self._formation.tokens_in,
            tokens_open=self._formation.tokens_open,
            tokens_ready=sum(group.total_tokens for group in self._ready),
            tokens_assigned=self._assignment.state.tokens_assigned,
            dropped=merge_drops(self._formation.drops, self._assignment.drops),
            duplicates=self._formation.duplicates,
        )

    def submit(self, trajectory: Trajectory) -> Verdict:
        """Take the next trajectory of the durable order.

        Raises: NoSurvivingGroupsError when more than `max_dead_groups` groups in a row died.
        """
        verdict = self._formation.take(
            trajectory, find_defect(trajectory, self._limits, allow_empty=True)
        )
        self._settle()
        return verdict

    def drop_open(self, group_id: str, reason: DropReason) -> bool:
        """Drop a group that will not complete (its producer failed, the source ended).

        Returns False when no such group is open.

        Raises: NoSurvivingGroupsError as `submit`.
        """
        dropped = self._formation.drop_open(group_id, reason)
        self._settle()
        return dropped

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
            formed = self._ready.popleft()
            if self._assignment.offer(formed, step):
                self._assigned.append(_whole(formed))
            else:
                check_alive(
                    self._assignment.state.stale_in_a_row, self._policy, self.ledger().dropped
                )
        self._step_complete = len(self._assigned) >= groups
        return StepGroups(step=step, groups=tuple(self._assigned), complete=self._step_complete)

    def _settle(self) -> None:
        closed = self._formation.drain()
        self._ready.extend(group.formed for group in closed if group.formed is not None)
        if closed:
            self._formation.check_alive()


def _whole(formed: Formed[Trajectory]) -> Group:
    return Group(group_id=formed.group_id, trajectories=formed.members)
