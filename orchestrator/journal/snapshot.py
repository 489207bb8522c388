"""What a journal must remember once events are deleted, as a value and as canonical JSON. Pure.

A snapshot stands for all events up to `seq`: how groups were forming then, the groups that steps
may still ask for, and how far assignment to steps had got before the first of those. Trajectories
are named by their place in the durable order; their rows stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.groups import (
    NO_DROPS,
    AssignmentState,
    Dropped,
    Drops,
    FormationState,
    Formed,
    OpenGroup,
)
from orchestrator.journal.errors import JournalDamaged
from orchestrator.journal.payload import Record
from orchestrator.trajectory import DropReason


@dataclass(frozen=True, kw_only=True)
class RetentionPoint:
    """Where the oldest rollout batch that may still be asked for begins."""

    durable_step: int = 0  # Steps below it are in a durable checkpoint.
    batch: int = 0  # The batch that holds it.
    position: int = 0  # Complete groups, in durable order, before that batch's first one.
    assignment: AssignmentState = field(default_factory=AssignmentState)  # Before that batch.
    drops: Drops = field(default_factory=lambda: NO_DROPS)  # Told with earlier batches.
    skipped_steps: int = 0  # Steps before that batch that had nothing to train.


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that is known of the events up to `seq`."""

    seq: int = -1
    ended: bool = False
    formation: FormationState[Record] = field(default_factory=lambda: FormationState[Record]())
    groups: tuple[Formed[Record], ...] = ()  # From `point.position` on.
    point: RetentionPoint = field(default_factory=RetentionPoint)

    def records(self) -> set[int]:
        """The places of all trajectories that are still needed."""
        needed = {record.seq for group in self.groups for record in group.members}
        for group in self.formation.open_groups:
            needed.update(record.seq for record in group.members)
        return needed

    def to_json(self) -> str:
        """Canonical JSON."""
        formation, point = self.formation, self.point
        value = {
            "seq": self.seq,
            "ended": self.ended,
            "formation": {
                "open_groups": [
                    [
                        group.group_id,
                        [record.seq for record in group.members],
                        group.lost,
                        group.seen,
                    ]
                    for group in formation.open_groups
                ],
                "finished": [list(finished) for finished in formation.finished],
                "drops": _drops_json(formation.drops),
                "tokens_in": formation.tokens_in,
                "tokens_formed": formation.tokens_formed,
                "duplicates": formation.duplicates,
                "dead_in_a_row": formation.dead_in_a_row,
            },
            "groups": [
                [
                    group.group_id,
                    [record.seq for record in group.members],
                    _drops_json(group.drops_before),
                ]
                for group in self.groups
            ],
            "point": {
                "durable_step": point.durable_step,
                "batch": point.batch,
                "position": point.position,
                "tokens_assigned": point.assignment.tokens_assigned,
                "stale": _dropped_json(point.assignment.stale),
                "stale_in_a_row": point.assignment.stale_in_a_row,
                "drops": _drops_json(point.drops),
                "skipped_steps": point.skipped_steps,
            },
        }
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str, record: Callable[[int], Record]) -> Snapshot:
        """Read what `to_json` wrote; `record` gives the trajectory at a place.

        Raises: JournalDamaged.
        """
        try:
            return _snapshot(json.loads(text), record)
        except (KeyError, TypeError, ValueError) as error:
            raise JournalDamaged(f"the journal's snapshot cannot be read: {error!r}") from error


def _snapshot(value: Mapping[str, object], record: Callable[[int], Record]) -> Snapshot:
    formation, point = _table(value["formation"]), _table(value["point"])
    interned = _Interned()
    return Snapshot(
        seq=_whole(value["seq"]),
        ended=bool(value["ended"]),
        formation=FormationState(
            open_groups=tuple(
                OpenGroup(
                    group_id=str(entry[0]),
                    members=tuple(record(_whole(seq)) for seq in _row(entry[1])),
                    lost=_whole(entry[2]),
                    seen=_whole(entry[3]),
                )
                for entry in map(_row, _row(formation["open_groups"]))
            ),
            finished=tuple(
                (str(entry[0]), _whole(entry[1]), bool(entry[2]))
                for entry in map(_row, _row(formation["finished"]))
            ),
            drops=_drops(formation["drops"]),
            tokens_in=_whole(formation["tokens_in"]),
            tokens_formed=_whole(formation["tokens_formed"]),
            duplicates=_whole(formation["duplicates"]),
            dead_in_a_row=_whole(formation["dead_in_a_row"]),
        ),
        groups=tuple(
            Formed(
                group_id=str(entry[0]),
                members=tuple(record(_whole(seq)) for seq in _row(entry[1])),
                drops_before=interned(entry[2]),
            )
            for entry in map(_row, _row(value["groups"]))
        ),
        point=RetentionPoint(
            durable_step=_whole(point["durable_step"]),
            batch=_whole(point["batch"]),
            position=_whole(point["position"]),
            assignment=AssignmentState(
                tokens_assigned=_whole(point["tokens_assigned"]),
                stale=_dropped(point["stale"]),
                stale_in_a_row=_whole(point["stale_in_a_row"]),
            ),
            drops=_drops(point["drops"]),
            skipped_steps=_whole(point["skipped_steps"]),
        ),
    )


class _Interned:
    """One value for equal drop counts of neighbouring groups: most have the same."""

    def __init__(self) -> None:
        self._last: tuple[object, Drops] = (None, NO_DROPS)

    def __call__(self, value: object) -> Drops:
        if value != self._last[0]:
            self._last = (value, _drops(value))
        return self._last[1]


def _drops_json(drops: Drops) -> dict[str, list[int]]:
    return {reason.value: _dropped_json(dropped) for reason, dropped in drops.items()}


def _dropped_json(dropped: Dropped) -> list[int]:
    return [dropped.groups, dropped.trajectories, dropped.tokens]


def _drops(value: object) -> Drops:
    return {DropReason(name): _dropped(counts) for name, counts in _table(value).items()}


def _dropped(value: object) -> Dropped:
    groups, trajectories, tokens = _row(value)
    return Dropped(groups=_whole(groups), trajectories=_whole(trajectories), tokens=_whole(tokens))


def _table(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"not a table: {value!r}")
    return value


def _row(value: object) -> Sequence[object]:
    if not isinstance(value, list):
        raise TypeError(f"not a list: {value!r}")
    return value


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"not a whole number: {value!r}")
    return value
