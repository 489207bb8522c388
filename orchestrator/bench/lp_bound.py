"""The Gilmore-Gomory bound on rows, for distributions where the packer's own bound is loose.

Column generation with SciPy's linear programs: seconds, not milliseconds, so it measures and tests
but never plans.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

_ROUNDING: Final = 1e-6


def gilmore_gomory_bound(
    lengths: Int64, capacity: int, grain: int = 96, max_patterns: int = 4000
) -> int:
    """Rows that any packing of `lengths` needs.

    Lengths and capacity are rounded to multiples of `grain` in favour of the packer (down and up),
    so the bound holds. Stopping early keeps it valid, too (Farley's bound).
    """
    room = -(-capacity // grain)
    sizes, counts = np.unique(np.maximum(lengths // grain, 1), return_counts=True)
    patterns = [np.diag(np.minimum(room // sizes, counts)).astype(np.float64)]
    best = 0.0
    for _ in range(max_patterns):
        matrix = np.hstack(patterns)
        solved = linprog(
            np.ones(matrix.shape[1]), A_ub=-matrix, b_ub=-counts.astype(np.float64), method="highs"
        )
        values: Float64 = np.maximum(-solved.ineqlin.marginals, 0.0)
        worth, pattern = _best_pattern(sizes, values, room)
        best = max(best, float(values @ counts) / max(1.0, worth))
        if worth <= 1 + _ROUNDING:
            break
        patterns.append(pattern[:, None])
    return math.ceil(best - _ROUNDING)


def _best_pattern(sizes: Int64, values: Float64, room: int) -> tuple[float, Float64]:
    """The row of the most value: an unbounded knapsack over the distinct sizes."""
    best = np.zeros(room + 1)
    taken = np.full(room + 1, -1)  # The size placed last; -1: none, as with one unit less.
    for units in range(int(sizes[0]), room + 1):
        fitting = int(np.searchsorted(sizes, units, "right"))
        worth = best[units - sizes[:fitting]] + values[:fitting]
        size = int(np.argmax(worth))
        if worth[size] > best[units - 1]:
            best[units], taken[units] = worth[size], size
        else:
            best[units] = best[units - 1]
    pattern = np.zeros(sizes.size)
    units = room
    while units > 0:
        size = int(taken[units])
        if size < 0:
            units -= 1
        else:
            pattern[size] += 1
            units -= int(sizes[size])
    return float(best[room]), pattern
