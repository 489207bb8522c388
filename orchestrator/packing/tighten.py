"""Do without one more row: dissolve the emptiest one and exchange items until the rest fits again.

Pure integer arithmetic, bounded, and the same on any machine. Never returns an overfull row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

# Rows with more items offer single items only; pairs would not fit the table.
_PAIRS_UP_TO: Final = 7
_OFFERS: Final = 1 + _PAIRS_UP_TO + _PAIRS_UP_TO * (_PAIRS_UP_TO - 1) // 2
# A row that has just been relieved takes nothing back for this many exchanges.
_TABU: Final = 7
# Exchanges without a new least overflow before giving up.
_PATIENCE: Final = 40

Offer = tuple[int, ...]  # Items that leave a row together; () leaves nothing.


class _Exchange:
    """Rows that may be overfull, and every small set of items each could give away."""

    def __init__(
        self, lengths: Int64, rows: list[list[int]], capacity: int, max_segments: int | None
    ) -> None:
        self._lengths = lengths
        self._capacity = capacity
        self._most = int(lengths.size) if max_segments is None else max_segments
        self.rows = rows
        count = len(rows)
        self._loads = np.zeros(count, np.int64)
        self._items = np.zeros(count, np.int64)
        self._offers: list[list[Offer]] = [[] for _ in range(count)]
        self._sizes = np.full((count, _OFFERS), -1, np.int64)  # -1: no such offer.
        self._numbers = np.zeros((count, _OFFERS), np.int64)  # Items in each offer.
        self._tabu_until = np.full(count, -1, np.int64)
        for row in range(count):
            self._refresh(row)

    def _refresh(self, row: int) -> None:
        items = self.rows[row]
        sizes = self._lengths[items].tolist()
        self._loads[row] = sum(sizes)
        self._items[row] = len(items)
        offers: list[Offer] = [()]
        offers += [(item,) for item in items]
        totals = [0, *sizes]
        if len(items) <= _PAIRS_UP_TO:
            offers += list(itertools.combinations(items, 2))
            totals += [left + right for left, right in itertools.combinations(sizes, 2)]
        self._offers[row] = offers[:_OFFERS]
        self._sizes[row] = -1
        self._sizes[row, : len(self._offers[row])] = totals[:_OFFERS]
        self._numbers[row, : len(self._offers[row])] = [len(offer) for offer in offers[:_OFFERS]]

    @property
    def overflow(self) -> int:
        """Tokens over capacity and items over the limit, over all rows."""
        tokens = int(np.maximum(self._loads - self._capacity, 0).sum())
        return tokens + int(np.maximum(self._items - self._most, 0).sum())

    def step(self, now: int) -> bool:
        """The best exchange for the fullest row. False when there is none."""
        fullest = int(np.argmax(self._loads))
        excess = np.maximum(self._loads - self._capacity, 0)
        given = self._sizes[fullest][: len(self._offers[fullest])]
        width = max(len(offers) for offers in self._offers)
        sizes = self._sizes[:, :width]
        moved = given[:, None, None] - sizes[None]  # [offer, row, offer]: tokens that leave.
        after = np.maximum((self._loads - self._capacity)[None, :, None] + moved, 0)
        left = np.maximum(int(excess[fullest]) - moved, 0)
        cost = left * left + after * after - (excess * excess)[None, :, None]
        allowed = (sizes >= 0)[None] & (moved > 0)
        allowed &= (self._tabu_until <= now)[None, :, None]
        allowed[:, fullest] = False
        if self._most < int(self._lengths.size):
            count = self._numbers[fullest][: len(given)]
            net = count[:, None, None] - self._numbers[None, :, :width]
            allowed &= self._items[None, :, None] + net <= self._most
            allowed &= int(self._items[fullest]) - net <= self._most
        cost[~allowed] = np.iinfo(np.int64).max
        best = int(np.argmin(cost))
        if not allowed.flat[best]:
            return False
        offer, row, back = (int(i) for i in np.unravel_index(best, cost.shape))
        out, into = self._offers[fullest][offer], self._offers[row][back]
        self.rows[fullest] = [i for i in self.rows[fullest] if i not in out] + list(into)
        self.rows[row] = [i for i in self.rows[row] if i not in into] + list(out)
        self._refresh(fullest)
        self._refresh(row)
        self._tabu_until[fullest] = now + _TABU
        return True


def without_one_row(
    lengths: Int64,
    rows: Sequence[Sequence[int]],
    capacity: int,
    max_segments: int | None = None,
) -> list[list[int]] | None:
    """The same items in one row less, or None when the search finds no way.

    `lengths`: tokens of each item. `rows`: item positions, none overfull.
    """
    if len(rows) < 2:
        return None
    loads = [int(lengths[list(row)].sum()) for row in rows]
    emptiest = min(range(len(rows)), key=lambda row: (loads[row], row))
    kept = [list(row) for row in rows]
    loose = sorted(kept.pop(emptiest), key=lambda item: (-int(lengths[item]), item))
    free = np.asarray([capacity - load for load in loads], np.int64)
    free = np.delete(free, emptiest)
    for item in loose:
        room = free.copy()
        if max_segments is not None:
            room[[len(row) >= max_segments for row in kept]] = np.iinfo(np.int64).min
        row = int(np.argmax(room))
        if max_segments is not None and len(kept[row]) >= max_segments:
            return None
        kept[row].append(item)
        free[row] -= int(lengths[item])
    exchange = _Exchange(lengths, kept, capacity, max_segments)
    least, since = exchange.overflow, 0
    for now in range(2 * len(kept) + _PATIENCE):
        if exchange.overflow == 0:
            return exchange.rows
        if not exchange.step(now):
            return None
        overflow = exchange.overflow
        if overflow < least:
            least, since = overflow, 0
        else:
            since += 1
            if since > _PATIENCE:
                return None
    return None
