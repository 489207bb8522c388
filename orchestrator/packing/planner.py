"""The plan of a step from its groups in durable order: one pure function, used by every mode.

Early first micro-batch, the rule. Let R be the rows of a micro-batch, T its tokens per row and n
the groups of the step (known beforehand). Groups are looked at in durable order at eight fixed
marks: the shortest prefixes that hold 9/8, 10/8, ... 16/8 of R * T tokens. At each mark that is
shorter than the step, the prefix is packed by itself. If that takes no more than
ceil(tokens / T) rows (nothing is lost to fragmentation) and its R fullest rows together waste at
most T / 8 tokens, those R rows are micro-batch 0, for good; everything else of the step is packed
as a whole, by the row rule. If no mark qualifies, the whole step is packed together.

So micro-batch 0 depends on a prefix of the durable order alone: it can be sent when that prefix is
in, and it is the same when all groups are there from the start. The rest keeps the row rule by
itself, and the first micro-batch loses at most an eighth of one row. No prefix can know what
follows: where a step begins with short lengths and goes on with ones that only those would have
completed, the step takes more rows than packing it at once. `rows_over_first_fit_decreasing` of
the plan tells; it is 0 where groups come in no particular order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from orchestrator.packing.bins import Rows, first_fit_decreasing, pack_bins
from orchestrator.packing.bounds import lower_bound
from orchestrator.packing.deal import deal_rows
from orchestrator.packing.layout import MicroBatchPlan, Segment, StepPlan
from orchestrator.trajectory import (
    Defect,
    DropReason,
    Group,
    PackingError,
    Trajectory,
    TrajectoryError,
)

Int64 = npt.NDArray[np.int64]

_MARKS: Final = 8
_EARLY_WASTE_DIVISOR: Final = 8  # Micro-batch 0 may waste this fraction of one row.


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """The shape of micro-batches and how they are filled."""

    rows: int  # Rows per micro-batch.
    tokens_per_row: int
    data_parallel_ranks: int = 1  # Divides `rows`; rank d has the d-th block of rows.
    align_tokens: int = 1  # Segments start at multiples of this; divides `tokens_per_row`.
    max_segments_per_row: int | None = None
    early_first_micro_batch: bool = True

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise PackingError(f"rows is {self.rows}; a micro-batch has at least 1 row")
        if self.tokens_per_row < 2:
            raise PackingError(f"tokens_per_row is {self.tokens_per_row}; use at least 2")
        if self.data_parallel_ranks < 1 or self.rows % self.data_parallel_ranks:
            raise PackingError(
                f"rows is {self.rows} and data_parallel_ranks {self.data_parallel_ranks}; every"
                " rank gets the same number of rows, so rows must be a multiple"
            )
        if self.align_tokens < 1 or self.tokens_per_row % self.align_tokens:
            raise PackingError(
                f"align_tokens is {self.align_tokens}; it must divide tokens_per_row"
                f" ({self.tokens_per_row})"
            )
        if self.max_segments_per_row is not None and self.max_segments_per_row < 1:
            raise PackingError(
                f"max_segments_per_row is {self.max_segments_per_row}; use at least 1, or none"
            )


@dataclass(frozen=True, kw_only=True)
class _Items:
    """The packable trajectories of some groups, in durable order."""

    trajectories: tuple[Trajectory, ...]
    sizes: Int64  # [items] tokens with alignment padding.
    groups: Int64  # [items] position of each one's group.


def _items(groups: Sequence[Group], config: PackingConfig) -> _Items:
    members: list[Trajectory] = []
    of_group: list[int] = []
    for position, group in enumerate(groups):
        for trajectory in group.trajectories:
            if trajectory.total_tokens > config.tokens_per_row:
                raise TrajectoryError(
                    Defect(
                        reason=DropReason.LONGER_THAN_ROW,
                        message=f"group {trajectory.group_id!r} index {trajectory.index}:"
                        f" {trajectory.total_tokens} tokens do not fit a row of"
                        f" {config.tokens_per_row}; refuse or truncate it at ingest",
                    )
                )
            if trajectory.completion_tokens.shape[0]:
                members.append(trajectory)
                of_group.append(position)
    lengths = np.asarray([trajectory.total_tokens for trajectory in members], np.int64)
    align = config.align_tokens
    return _Items(
        trajectories=tuple(members),
        sizes=-(-lengths // align) * align,
        groups=np.asarray(of_group, np.int64),
    )


def _early_rows(
    items: _Items, groups_so_far: int, groups_in_step: int, config: PackingConfig
) -> tuple[int, Rows] | None:
    """(prefix length in groups, rows of micro-batch 0) by the rule above, or None."""
    if not config.early_first_micro_batch:
        return None
    room = config.rows * config.tokens_per_row
    counts = np.bincount(items.groups, weights=None, minlength=groups_so_far)
    ends = np.cumsum(counts)  # Items in each prefix of groups.
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(items.sizes)])
    prefix_tokens = sums[ends]
    tried = 0
    for mark in range(1, _MARKS + 1):
        threshold = room * (_MARKS + mark) // _MARKS
        prefix = int(np.searchsorted(prefix_tokens, threshold, "left")) + 1
        if prefix > groups_so_far or prefix >= groups_in_step:
            return None
        if prefix == tried:
            continue
        tried = prefix
        sizes = items.sizes[: int(ends[prefix - 1])]
        fewest = -(-int(sizes.sum()) // config.tokens_per_row)
        packed = pack_bins(sizes, config.tokens_per_row, config.max_segments_per_row).rows
        if len(packed) > fewest:
            continue
        waste = [config.tokens_per_row - int(sizes[list(row)].sum()) for row in packed]
        fullest = sorted(range(len(packed)), key=lambda row: (waste[row], packed[row]))
        chosen = fullest[: config.rows]
        if sum(waste[row] for row in chosen) * _EARLY_WASTE_DIVISOR <= config.tokens_per_row:
            return prefix, tuple(packed[row] for row in chosen)
    return None


def first_micro_batch(
    groups_so_far: Sequence[Group], groups_in_step: int, config: PackingConfig
) -> MicroBatchPlan | None:
    """Micro-batch 0 of a step whose first groups are in, if they fix it already.

    Once it answers, further groups do not change the answer, and `plan_step` of the whole step
    has the same micro-batch 0. None: wait for more groups (or plan the whole step).
    """
    items = _items(groups_so_far, config)
    early = _early_rows(items, len(groups_so_far), groups_in_step, config)
    if early is None:
        return None
    return _lay_out(early[1], items, config)[0]


def plan_step(groups: Sequence[Group], config: PackingConfig) -> StepPlan:
    """Plan the step of `groups` (in durable order).

    Trajectories without completion tokens take no place; `StepConservation` counts them.

    Raises: TrajectoryError (longer than a row), PackingError (the same trajectory twice).
    """
    items = _items(groups, config)
    keys = [trajectory.key for trajectory in items.trajectories]
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise PackingError(f"group {twice[0]!r} index {twice[1]} is in the step twice")
    if not keys:
        empty = MicroBatchPlan(
            rows=config.rows,
            tokens_per_row=config.tokens_per_row,
            ranks=config.data_parallel_ranks,
            segments=(),
        )
        return StepPlan(micro_batches=(empty,))
    capacity, most = config.tokens_per_row, config.max_segments_per_row
    early = _early_rows(items, len(groups), len(groups), config)
    if early is None:
        bins = pack_bins(items.sizes, capacity, most)
        return StepPlan(
            micro_batches=_lay_out(bins.rows, items, config),
            lower_bound_rows=bins.lower_bound,
            first_fit_decreasing_rows=bins.first_fit_decreasing,
        )
    prefix, first = early
    placed = {item for row in first for item in row}
    rest = [item for item in range(len(keys)) if item not in placed]
    packed = pack_bins(items.sizes[rest], capacity, most).rows
    rest_rows = tuple(tuple(rest[place] for place in row) for row in packed)
    return StepPlan(
        micro_batches=_lay_out(first, items, config) + _lay_out(rest_rows, items, config),
        early_groups=prefix,
        lower_bound_rows=lower_bound(items.sizes, capacity, most),
        first_fit_decreasing_rows=len(first_fit_decreasing(items.sizes, capacity, most)),
    )


def _lay_out(rows: Rows, items: _Items, config: PackingConfig) -> tuple[MicroBatchPlan, ...]:
    dealt = deal_rows(
        rows,
        items.sizes,
        rows_per_micro_batch=config.rows,
        ranks=config.data_parallel_ranks,
        capacity=config.tokens_per_row,
        max_segments=config.max_segments_per_row,
    )
    per_rank = config.rows // config.data_parallel_ranks
    plans: list[MicroBatchPlan] = []
    for batch in dealt:
        segments: list[Segment] = []
        for rank, rank_rows in enumerate(batch):
            for place, row in enumerate(rank_rows):
                offset = 0
                for item in row:
                    trajectory = items.trajectories[item]
                    segments.append(
                        Segment(
                            row=rank * per_rank + place,
                            offset=offset,
                            length=trajectory.total_tokens,
                            group_id=trajectory.group_id,
                            index=trajectory.index,
                        )
                    )
                    offset += int(items.sizes[item])
        plans.append(
            MicroBatchPlan(
                rows=config.rows,
                tokens_per_row=config.tokens_per_row,
                ranks=config.data_parallel_ranks,
                segments=tuple(segments),
            )
        )
    return tuple(plans)
