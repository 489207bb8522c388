"""The plan of a step as a value: which trajectory lies where in which micro-batch.

Values and canonical JSON only; knows no arrays. The journal stores the JSON before a step's first
send, and the same plan always gives the same text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.trajectory import PackingError

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One trajectory's place in a micro-batch."""

    row: int
    offset: int  # First token's place in the row.
    length: int  # Tokens, without alignment padding.
    group_id: str
    index: int

    @property
    def key(self) -> tuple[str, int]:
        """(group_id, index) of the trajectory."""
        return (self.group_id, self.index)

    @property
    def end(self) -> int:
        """Place after the last token."""
        return self.offset + self.length


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlan:
    """Segments by row, then offset. With `ranks` data-parallel ranks, rank d has rows
    [d * rows / ranks, (d + 1) * rows / ranks), padding rows last within them."""

    rows: int
    tokens_per_row: int
    ranks: int
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.rows < 1 or self.rows % self.ranks:
            raise PackingError(f"{self.rows} rows do not divide over {self.ranks} ranks")
        row, end = 0, 0
        for segment in self.segments:
            if segment.row != row:
                if segment.row < row:
                    raise PackingError(f"{segment} comes after row {row}; segments go by row")
                row, end = segment.row, 0
            if segment.row >= self.rows or segment.end > self.tokens_per_row:
                raise PackingError(
                    f"{segment} does not fit [{self.rows}, {self.tokens_per_row}]"
                    " (rows, tokens per row)"
                )
            if segment.length < 1 or segment.offset < end:
                raise PackingError(f"{segment} is empty or overlaps the segment before it")
            end = segment.end

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Of each row, the place after its last token; 0 for a padding row."""
        lengths = [0] * self.rows
        for segment in self.segments:
            lengths[segment.row] = segment.end
        return tuple(lengths)

    @property
    def real_tokens(self) -> int:
        """Tokens of all segments."""
        return sum(segment.length for segment in self.segments)

    @property
    def used_rows(self) -> int:
        """Rows with at least one segment."""
        return len({segment.row for segment in self.segments})

    @property
    def rank_tokens(self) -> tuple[int, ...]:
        """Tokens of each data-parallel rank."""
        return self._by_rank(squared=False)

    @property
    def rank_squared_lengths(self) -> tuple[int, ...]:
        """Sum of squared segment lengths of each rank: what attention costs."""
        return self._by_rank(squared=True)

    def _by_rank(self, *, squared: bool) -> tuple[int, ...]:
        sums = [0] * self.ranks
        rows_per_rank = self.rows // self.ranks
        for segment in self.segments:
            value = segment.length * segment.length if squared else segment.length
            sums[segment.row // rows_per_rank] += value
        return tuple(sums)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """All micro-batches of one step. Its update goes with the last one, which always exists.

    A step whose groups pack to nothing has one all-padding micro-batch: its denominator is 0, so
    the update is skipped by rule instead of forgotten.
    """

    micro_batches: tuple[MicroBatchPlan, ...]
    early_groups: int = 0  # Micro-batch 0 was fixed by this many groups; 0: by the whole step.
    lower_bound_rows: int = 0  # No packing of the step needs fewer rows.
    first_fit_decreasing_rows: int = 0  # What first-fit decreasing needs for the whole step.

    def __post_init__(self) -> None:
        if not self.micro_batches:
            raise PackingError("a step plan has at least one micro-batch")
        first = self.micro_batches[0]
        for plan in self.micro_batches:
            if (plan.rows, plan.tokens_per_row, plan.ranks) != (
                first.rows,
                first.tokens_per_row,
                first.ranks,
            ):
                raise PackingError("micro-batches of a step have one shape")

    @property
    def used_rows(self) -> int:
        """Rows with at least one segment, over all micro-batches."""
        return sum(plan.used_rows for plan in self.micro_batches)

    @property
    def rows_over_first_fit_decreasing(self) -> int:
        """Rows beyond those of first-fit decreasing (as dealt to the ranks); 0 but for an early
        first micro-batch whose step turned out otherwise than it began. Worth a counter."""
        ranks = self.micro_batches[0].ranks
        return max(0, self.used_rows - -(-self.first_fit_decreasing_rows // ranks) * ranks)

    @property
    def real_tokens(self) -> int:
        """Tokens of all segments."""
        return sum(plan.real_tokens for plan in self.micro_batches)

    @property
    def rank_tokens(self) -> tuple[int, ...]:
        """Tokens of each data-parallel rank over the whole step."""
        sums = zip(*(plan.rank_tokens for plan in self.micro_batches), strict=True)
        return tuple(sum(tokens) for tokens in sums)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, integers and strings only."""
        first = self.micro_batches[0]
        value = {
            "format": _FORMAT,
            "rows": first.rows,
            "tokens_per_row": first.tokens_per_row,
            "ranks": first.ranks,
            "early_groups": self.early_groups,
            "lower_bound_rows": self.lower_bound_rows,
            "first_fit_decreasing_rows": self.first_fit_decreasing_rows,
            "micro_batches": [
                [[s.row, s.offset, s.length, s.group_id, s.index] for s in plan.segments]
                for plan in self.micro_batches
            ],
        }
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @staticmethod
    def from_json(text: str) -> StepPlan:
        """Read what `to_json` wrote.

        Raises: PackingError when the text is no step plan of this format.
        """
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise PackingError(f"not a step plan: {error}") from error
        if not isinstance(value, Mapping) or value.get("format") != _FORMAT:
            raise PackingError(f"not a step plan of format {_FORMAT}")
        shape = {name: _integer(value, name) for name in ("rows", "tokens_per_row", "ranks")}
        micro_batches = value.get("micro_batches")
        if not isinstance(micro_batches, list):
            raise PackingError("a step plan's micro_batches is a list")
        return StepPlan(
            micro_batches=tuple(
                MicroBatchPlan(
                    rows=shape["rows"],
                    tokens_per_row=shape["tokens_per_row"],
                    ranks=shape["ranks"],
                    segments=tuple(_segment(entry) for entry in _entries(segments)),
                )
                for segments in micro_batches
            ),
            early_groups=_integer(value, "early_groups"),
            lower_bound_rows=_integer(value, "lower_bound_rows"),
            first_fit_decreasing_rows=_integer(value, "first_fit_decreasing_rows"),
        )


def _integer(value: Mapping[str, object], name: str) -> int:
    number = value.get(name)
    if not isinstance(number, int) or isinstance(number, bool):
        raise PackingError(f"a step plan's {name} is an integer, not {number!r}")
    return number


def _entries(value: object) -> list[object]:
    if not isinstance(value, list):
        raise PackingError(f"a micro-batch of a step plan is a list of segments, not {value!r}")
    return value


def _segment(entry: object) -> Segment:
    if not isinstance(entry, list) or len(entry) != 5:
        raise PackingError(f"not a segment [row, offset, length, group_id, index]: {entry!r}")
    row, offset, length, group_id, index = entry
    if not isinstance(group_id, str):
        raise PackingError(f"a segment's group_id is a string, not {group_id!r}")
    for number in (row, offset, length, index):
        if not isinstance(number, int) or isinstance(number, bool):
            raise PackingError(f"not a segment [row, offset, length, group_id, index]: {entry!r}")
    return Segment(row=row, offset=offset, length=length, group_id=group_id, index=index)
