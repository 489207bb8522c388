"""The durable order: events, and everything that follows from them. Pure.

`Order.apply` is the one place that says what an event means: the writer asks it before an event is
written, and an opening journal asks it again for every event that it finds, so both get the same
groups, drops and failures. Reads no clock: that time was up is an event like any other.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from orchestrator.groups import (
    Closed,
    Formation,
    FormationState,
    GroupPolicy,
    Outcome,
    Verdict,
)
from orchestrator.journal.payload import Record
from orchestrator.trajectory import Defect, DropReason, NoSurvivingGroupsError


class Kind(enum.Enum):
    """What happened. The values are in journals: never renumber."""

    TRAJECTORY = 1
    REJECTED = 2  # What came could not be read as a trajectory.
    GROUP_DROPPED = 3  # An open group's time was up, or it could not be used any more.
    SOURCE_ENDED = 4  # Nothing comes any more; open groups are dropped.


@dataclass(frozen=True, kw_only=True)
class Event:
    """One entry of the durable order."""

    seq: int
    kind: Kind
    producer: str = ""
    offset: int = -1
    record: Record | None = None  # Of a trajectory.
    defect: Defect | None = None  # What is wrong with that trajectory by itself.
    group_id: str = ""  # Of a dropped group.
    reason: str = ""  # A `DropReason` value (rejections: whatever the service said).
    message: str = ""


class Order:
    """What follows from the events so far."""

    def __init__(self, policy: GroupPolicy, state: FormationState[Record] | None = None) -> None:
        self.formation: Formation[Record] = Formation(policy, state)
        self.ended = False
        self.failure = ""  # Why the run cannot go on; empty: it can.

    def apply(self, event: Event) -> tuple[Verdict, tuple[Closed[Record], ...]]:
        """Take the next event: its verdict, and the groups that it closed."""
        verdict = self._apply(event)
        closed = self.formation.drain()
        if closed and not self.failure:
            try:
                self.formation.check_alive()
            except NoSurvivingGroupsError as error:
                self.failure = str(error)
        return verdict, closed

    def _apply(self, event: Event) -> Verdict:
        match event.kind:
            case Kind.TRAJECTORY:
                if event.record is None:
                    raise ValueError(f"event {event.seq} is a trajectory without a record")
                return self.formation.take(event.record, event.defect)
            case Kind.REJECTED:
                reason = drop_reason(event.reason)
                self.formation.refuse(reason)
                return Verdict(outcome=Outcome.DROPPED, reason=reason, message=event.message)
            case Kind.GROUP_DROPPED:
                reason = drop_reason(event.reason)
                dropped = self.formation.drop_open(event.group_id, reason)
                return Verdict(outcome=Outcome.DROPPED, reason=reason, group_dropped=dropped)
            case Kind.SOURCE_ENDED:
                for group_id in self.formation.open_group_ids:
                    self.formation.drop_open(group_id, DropReason.INCOMPLETE_GROUP)
                self.ended = True
                return Verdict(outcome=Outcome.ACCEPTED)


def drop_reason(text: str) -> DropReason:
    """The reason under which a rejection is counted; what is none of them is malformed."""
    try:
        return DropReason(text)
    except ValueError:
        return DropReason.MALFORMED
