"""Lower bounds on the rows that any packing needs. Pure integer arithmetic.

Bounds use no packing: they hold for the best packing there is, so `rows - bound` says how much a
packer could still gain at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

# Fekete-Schepers functions u^(k) are tried up to this k; beyond it they gain less than a row in k.
_MAX_DIVISIONS: Final = 128


def lower_bound(
    lengths: Sequence[int] | Int64, capacity: int, max_segments: int | None = None
) -> int:
    """Rows of `capacity` that any packing of `lengths` needs.

    The largest of: total length, Martello-Toth L2, Fekete-Schepers u^(k) (which sees that 0.35 of
    a row goes in twice, not 2.86 times), and the count with `max_segments` a row.
    """
    values = np.sort(np.asarray(lengths, np.int64))[::-1]
    if values.size == 0:
        return 0
    best = max(martello_toth_l2(values, capacity), fekete_schepers(values, capacity))
    if max_segments is not None:
        best = max(best, -(-int(values.size) // max_segments))
    return best


def martello_toth_l2(descending: Int64, capacity: int) -> int:
    """Martello-Toth L2 of lengths sorted in descending order.

    For each threshold a <= capacity/2: lengths over half a row need a row each; what fits beside
    them is what is left in rows whose length is at most capacity - a; the rest of the lengths >= a
    needs rows of its own.
    """
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(descending)])
    total_bound = -(-int(sums[-1]) // capacity)
    thresholds = np.unique(np.append(descending[2 * descending <= capacity], 0))
    ascending = -descending
    over_half = int(np.searchsorted(2 * ascending, -capacity, "left"))  # 2 * length > capacity
    alone = np.minimum(np.searchsorted(ascending, -(capacity - thresholds), "left"), over_half)
    counted = np.maximum(np.searchsorted(ascending, -thresholds, "right"), over_half)
    room = (over_half - alone) * capacity - (sums[over_half] - sums[alone])
    small = sums[counted] - sums[over_half]
    extra = np.maximum(0, -((room - small) // capacity))
    return max(total_bound, over_half + int(extra.max()))


def fekete_schepers(lengths: Int64, capacity: int) -> int:
    """The best of the dual feasible functions u^(k): lengths rounded to k-ths of a row.

    u^(k)(x) = x when (k + 1) x is whole, else floor((k + 1) x) / k, for x = length / capacity.
    """
    smallest = int(lengths.min()) if lengths.size else 0
    if smallest <= 0:
        return 0
    best = 0
    for k in range(1, min(_MAX_DIVISIONS, capacity // smallest) + 1):
        scaled = (k + 1) * lengths
        whole = scaled % capacity == 0
        # In units of 1 / (k * capacity), so that everything stays an integer.
        units = np.where(whole, k * lengths, (scaled // capacity) * capacity)
        best = max(best, -(-int(units.sum()) // (k * capacity)))
    return best
