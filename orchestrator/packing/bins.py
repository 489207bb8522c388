"""Which lengths share a row: first-fit decreasing as the yardstick, and a packer that beats it.

Pure integer arithmetic on lengths; ties go to the earlier item, so the result is the same on any
machine. Never puts more than `capacity` (or `max_segments` items) into a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from orchestrator.packing.bounds import lower_bound
from orchestrator.packing.tighten import without_one_row
from orchestrator.trajectory import PackingError

Int64 = npt.NDArray[np.int64]
Rows = tuple[tuple[int, ...], ...]  # Item positions of each row.

# Tolerated waste of a row, in thousandths of a row, tried in this order until a packing meets the
# bound. Small tolerances fill rows exactly but use up the short items that later rows need; large
# ones keep them. Neither is best on every distribution.
_TOLERANCES: Final = (5, 20, 40, 100, 2, 60)

# Packings that are tried for doing without one more row.
_STARTS: Final = 3

# Third partners tried for one row.
_THIRD_PARTNERS: Final = 16


@dataclass(frozen=True, kw_only=True)
class Bins:
    """Rows of item positions, and what they are measured against."""

    rows: Rows
    lower_bound: int
    first_fit_decreasing: int


def check_lengths(lengths: Sequence[int] | Int64, capacity: int, max_segments: int | None) -> Int64:
    """The lengths as int64.

    Raises: PackingError naming the first length that does not fit a row or is not positive.
    """
    if max_segments is not None and max_segments < 1:
        raise PackingError(f"max_segments is {max_segments}; a row holds at least 1 segment")
    values = np.asarray(lengths, np.int64).reshape(-1)
    if values.size:
        bad = (values > capacity) | (values < 1)
        if bad.any():
            at = int(np.argmax(bad))
            raise PackingError(
                f"item {at} has length {int(values[at])}; a row holds 1 to {capacity} tokens:"
                " refuse or truncate it before packing"
            )
    return values


def first_fit_decreasing(
    lengths: Sequence[int] | Int64, capacity: int, max_segments: int | None = None
) -> Rows:
    """First-fit decreasing: longest first, each into the first row with room."""
    values = check_lengths(lengths, capacity, max_segments)
    order = np.argsort(-values, kind="stable")
    rows: list[list[int]] = []
    free = np.full(values.size + 1, capacity, np.int64)
    for item in order.tolist():
        length = int(values[item])
        row = int(np.argmax(free[: len(rows) + 1] >= length))
        if row == len(rows):
            rows.append([])
        rows[row].append(item)
        # A row with all its segments takes no more.
        full = max_segments is not None and len(rows[row]) >= max_segments
        free[row] = -1 if full else free[row] - length
    return tuple(tuple(row) for row in rows)


def fewest_partners(
    lengths: Sequence[int] | Int64,
    capacity: int,
    tolerance: int,
    max_segments: int | None = None,
) -> Rows:
    """Row by row from the longest item: the fewest partners that fill it to within `tolerance`.

    One, two or three partners are chosen for the best fill; when even three leave room for more,
    the longest that fits is taken and the search goes on.
    """
    values = check_lengths(lengths, capacity, max_segments)
    # Ascending; among equals the earlier item is last and so goes first.
    order = np.lexsort((-np.arange(values.size), values))
    items = order.tolist()
    sizes = values[order]
    most = values.size if max_segments is None else max_segments
    rows: list[tuple[int, ...]] = []
    while items:
        row = [items.pop()]
        room = capacity - int(sizes[-1])
        sizes = sizes[:-1]
        while items and len(row) < most and int(sizes[0]) <= room:
            fitting = sizes[: int(np.searchsorted(sizes, room, "right"))]
            chosen = _best_partners(fitting, room, tolerance, most - len(row))
            for place in sorted(chosen, reverse=True):
                room -= int(sizes[place])
                row.append(items.pop(place))
            sizes = np.delete(sizes, chosen)
        rows.append(tuple(row))
    return tuple(rows)


def _best_partners(sizes: Int64, room: int, tolerance: int, most: int) -> list[int]:
    """Places in `sizes` (ascending, all <= room) of the partners that fill `room` best."""
    count = int(sizes.size)
    single = int(sizes[-1])
    chosen, fill = [count - 1], single
    if room - fill <= tolerance or most < 2 or count < 2:
        return chosen
    smallest_two = int(sizes[0]) + int(sizes[1])
    if smallest_two > room:
        return chosen
    pair = _best_pair(sizes, room)
    if pair is not None and pair[0] > fill:
        fill, chosen = pair[0], [pair[1], pair[2]]
    if room - fill <= tolerance or most < 3 or count < 3:
        return chosen
    if smallest_two + int(sizes[2]) > room:
        return chosen
    thirds = np.unique(np.linspace(2, count - 1, min(count - 2, _THIRD_PARTNERS)).astype(np.int64))
    for third in thirds[::-1].tolist():
        length = int(sizes[third])
        if smallest_two + length > room:
            continue
        pair = _best_pair(sizes[:third], room - length)
        if pair is not None and pair[0] + length > fill:
            fill, chosen = pair[0] + length, [third, pair[1], pair[2]]
            if room - fill <= tolerance:
                return chosen
    if len(chosen) == 3 and 4 * int(sizes[0]) <= room:
        # Room for four or more short items: the longest first, then look again.
        return [count - 1]
    return chosen


def _best_pair(sizes: Int64, room: int) -> tuple[int, int, int] | None:
    """(sum, place, place) of the two places with the largest sum <= room, or None."""
    places = np.arange(sizes.size)
    partners = np.minimum(np.searchsorted(sizes, room - sizes, "right") - 1, places - 1)
    sums = np.where(partners >= 0, sizes + sizes[np.maximum(partners, 0)], -1)
    best = int(np.argmax(sums))
    if int(sums[best]) < 0:
        return None
    return int(sums[best]), best, int(partners[best])


def pack_bins(
    lengths: Sequence[int] | Int64, capacity: int, max_segments: int | None = None
) -> Bins:
    """Pack into as few rows as we can find: never more than first-fit decreasing.

    Stops at the lower bound, where nothing can be gained.
    """
    values = check_lengths(lengths, capacity, max_segments)
    bound = lower_bound(values, capacity, max_segments)
    best = first_fit_decreasing(values, capacity, max_segments)
    yardstick = len(best)
    found = [best]
    for thousandths in _TOLERANCES:
        if len(best) <= bound:
            break
        rows = fewest_partners(values, capacity, capacity * thousandths // 1000, max_segments)
        found.append(rows)
        if len(rows) < len(best):
            best = rows
    if len(best) > bound:
        # Which start can be tightened is not known before; the shortest few are tried.
        for start in sorted(dict.fromkeys(found), key=len)[:_STARTS]:
            rows = start
            while len(rows) > bound:
                fewer = without_one_row(values, rows, capacity, max_segments)
                if fewer is None:
                    break
                rows = tuple(tuple(row) for row in fewer)
            if len(rows) < len(best):
                best = rows
    return Bins(rows=best, lower_bound=bound, first_fit_decreasing=yardstick)
