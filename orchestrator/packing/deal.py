"""Which row goes to which micro-batch and data-parallel rank, so that ranks wait for nobody.

Pure integer arithmetic, bounded, ties to the earlier row: the same on any machine. A row never
holds more than its capacity, before or after items move.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from orchestrator.trajectory import PackingError

Int64 = npt.NDArray[np.int64]
Row = tuple[int, ...]  # Item positions.

# Exchanges between ranks of one micro-batch before levelling stops.
_MAX_EXCHANGES: Final = 512


@dataclass(kw_only=True)
class _Slot:
    """The rows of one rank in one micro-batch."""

    places: int
    rows: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    squares: int = 0


def deal_rows(
    rows: Sequence[Row],
    lengths: Int64,
    *,
    rows_per_micro_batch: int,
    ranks: int,
    capacity: int,
    max_segments: int | None = None,
) -> tuple[tuple[tuple[Row, ...], ...], ...]:
    """Deal packed rows to `[micro-batch][rank][row]`.

    Every micro-batch but the last is full. In the last one each rank gets the same number of rows:
    up to `ranks - 1` of its padding rows are put to use, and micro-batches are never added.
    Attention cost (sum of squared lengths) is evened out by dealing costly rows first; then token
    counts of the ranks of each micro-batch are brought within one segment, the longest one.
    """
    if ranks < 1 or rows_per_micro_batch < 1 or rows_per_micro_batch % ranks:
        raise PackingError(
            f"{rows_per_micro_batch} rows per micro-batch do not divide over {ranks} data-parallel"
            " ranks; choose a multiple"
        )
    if not rows:
        return ()
    count = -(-len(rows) // rows_per_micro_batch)
    in_last = len(rows) - (count - 1) * rows_per_micro_batch
    full, last = rows_per_micro_batch // ranks, -(-in_last // ranks)
    slots = [
        [_Slot(places=last if batch == count - 1 else full) for _ in range(ranks)]
        for batch in range(count)
    ]
    spare = last * ranks - in_last
    for slot in slots[-1][ranks - spare :]:
        slot.rows.append([])
    _deal_by_cost(rows, lengths, list(itertools.chain.from_iterable(slots)))
    longest = int(lengths.max())
    for batch in slots:
        _level_tokens(batch, lengths, capacity, max_segments, longest)
    return tuple(
        tuple(tuple(tuple(sorted(row)) for row in _ordered(slot.rows)) for slot in batch)
        for batch in slots
    )


def _ordered(rows: list[list[int]]) -> list[list[int]]:
    """By earliest item; empty rows last."""
    return sorted(rows, key=lambda row: (not row, min(row, default=0)))


def _deal_by_cost(rows: Sequence[Row], lengths: Int64, slots: list[_Slot]) -> None:
    """Costliest row first, each to the slot that is furthest below its share."""
    items = [lengths[list(row)] for row in rows]
    tokens = [int(values.sum()) for values in items]
    squares = [int((values * values).sum()) for values in items]
    total = sum(squares)
    order = sorted(range(len(rows)), key=lambda row: (-squares[row], rows[row]))
    for row in order:
        free = (slot for slot in range(len(slots)) if len(slots[slot].rows) < slots[slot].places)
        # Mean share minus cost so far, times the number of rows: larger is needier, and exact.
        best = max(
            free,
            key=lambda slot: (
                slots[slot].places * total - slots[slot].squares * len(rows),
                -slot,
            ),
        )
        slot = slots[best]
        slot.rows.append(list(rows[row]))
        slot.tokens += tokens[row]
        slot.squares += squares[row]


def _level_tokens(
    batch: list[_Slot],
    lengths: Int64,
    capacity: int,
    max_segments: int | None,
    longest: int,
) -> None:
    """Exchange rows, then single items, between the fullest and the emptiest rank."""
    most = int(lengths.size) if max_segments is None else max_segments
    for _ in range(_MAX_EXCHANGES):
        high = max(range(len(batch)), key=lambda rank: (batch[rank].tokens, -rank))
        low = min(range(len(batch)), key=lambda rank: (batch[rank].tokens, rank))
        gap = batch[high].tokens - batch[low].tokens
        if gap <= longest:
            return
        moved = _swap_rows(batch[high], batch[low], lengths, gap)
        if moved == 0:
            moved = _move_items(batch[high], batch[low], lengths, gap, capacity, most)
        if moved == 0:
            return
        batch[high].tokens -= moved
        batch[low].tokens += moved


def _swap_rows(high: _Slot, low: _Slot, lengths: Int64, gap: int) -> int:
    """Swap the two rows that leave the smallest gap. Returns the tokens moved; 0: none helps."""
    give = np.asarray([int(lengths[row].sum()) if row else 0 for row in high.rows], np.int64)
    take = np.asarray([int(lengths[row].sum()) if row else 0 for row in low.rows], np.int64)
    moved = give[:, None] - take[None, :]
    left = np.where((moved > 0) & (moved < gap), np.abs(gap - 2 * moved), gap)
    best = int(np.argmin(left))
    if int(left.flat[best]) >= gap:
        return 0
    i, j = divmod(best, len(low.rows))
    high.rows[i], low.rows[j] = low.rows[j], high.rows[i]
    return int(moved[i, j])


def _move_items(high: _Slot, low: _Slot, lengths: Int64, gap: int, capacity: int, most: int) -> int:
    """Move one item, or swap two, where the receiving row has room for it."""
    best: tuple[int, int, int, int, int] | None = None  # left, high row, item, low row, item
    for j, into in enumerate(low.rows):
        room = capacity - (int(lengths[into].sum()) if into else 0)
        # -1 stands for no item going back.
        back = [-1, *into] if len(into) < most else list(into)
        returned = np.asarray([0 if item < 0 else int(lengths[item]) for item in back], np.int64)
        for i, out in enumerate(high.rows):
            if not out:
                continue
            moved = lengths[out][:, None] - returned[None, :]
            left = np.where(
                (moved > 0) & (moved < gap) & (moved <= room), np.abs(gap - 2 * moved), gap
            )
            at = int(np.argmin(left))
            value = int(left.flat[at])
            if value < gap and (best is None or value < best[0]):
                x, y = divmod(at, len(back))
                best = (value, i, out[x], j, back[y])
    if best is None:
        return 0
    _, i, given, j, received = best
    high.rows[i].remove(given)
    low.rows[j].append(given)
    if received < 0:
        return int(lengths[given])
    low.rows[j].remove(received)
    high.rows[i].append(received)
    return int(lengths[given]) - int(lengths[received])
