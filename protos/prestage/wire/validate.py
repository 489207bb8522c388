"""Judges the values of a micro-batch before any engine sees them. Raises `InvalidTensor`.

Works through a few rows at a time: its temporary memory does not grow with the payload.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from prestage.microbatch import FIELDS, Array, MicroBatch
from prestage.wire.errors import InvalidTensor

_BLOCK_BYTES: Final = 4 << 20


def check_values(batch: MicroBatch, *, vocab_size: int = 0, num_experts: int = 0) -> None:
    """Check dtypes, shapes, finiteness, id ranges, masks and segments. 0 = any id.

    Raises `InvalidTensor` naming the micro-batch, the field, where and the value.
    """
    name = f"micro-batch {batch.id}"
    _check_shapes(name, batch)
    for field, array in batch.arrays.items():
        if array.dtype.kind == "f":
            for start, rows in _blocks(array):
                # NaN and infinity both show in the extremes, which need no temporary array.
                if not (np.isfinite(rows.min()) and np.isfinite(rows.max())):
                    bad = ~np.isfinite(rows)
                    raise InvalidTensor(
                        f"{name}: field {field} is not finite at {_where(bad, start)}"
                        f" ({rows[bad][0]}); reject the trajectory at ingest"
                    )
    _check_ids(name, "tokens", batch.arrays["tokens"], 0, vocab_size)
    _check_ids(name, "positions", batch.arrays["positions"], 0, 0)
    _check_ids(name, "segment_ids", batch.arrays["segment_ids"], 0, 0)
    _check_ids(name, "loss_mask", batch.arrays["loss_mask"], 0, 2)
    if "routed_experts" in batch.arrays:
        _check_ids(name, "routed_experts", batch.arrays["routed_experts"], -1, num_experts)
    _check_mask(name, batch.arrays)


def check_padding(batch: MicroBatch) -> None:
    """Check that padding holds what the field table says. For planes that do not write it."""
    for field, array in batch.arrays.items():
        value = FIELDS[field].pad_value
        for row, length in enumerate(batch.row_lengths):
            tail = array[row, length:]
            if tail.size and not (tail.min() == value and tail.max() == value):
                bad = np.not_equal(tail, value)
                token = length + int(np.argwhere(bad)[0][0])
                raise InvalidTensor(
                    f"micro-batch {batch.id}: field {field} holds {tail[bad][0]} at row {row},"
                    f" position {token}, which is padding: fill it with {value}"
                )


def _check_shapes(name: str, batch: MicroBatch) -> None:
    for spec in FIELDS.values():
        if spec.required and spec.name not in batch.arrays:
            raise InvalidTensor(f"{name}: field {spec.name!r} is missing")
    for field, array in batch.arrays.items():
        known = FIELDS.get(field)
        if known is None or array.dtype != known.dtype:
            raise InvalidTensor(f"{name}: field {field!r} of dtype {array.dtype} is not known")
        expected = (batch.rows, batch.tokens_per_row)
        if array.shape[:2] != expected or array.ndim != 2 + known.trailing_dims:
            raise InvalidTensor(f"{name}: field {field} has shape {array.shape}; not {expected}")


def _blocks(array: Array) -> Iterator[tuple[int, Array]]:
    """(first row, rows) of a few megabytes each; nothing of an array without values."""
    rows = array.shape[0]
    if not array.size:
        return
    step = max(1, _BLOCK_BYTES * rows // max(array.nbytes, 1))
    for start in range(0, rows, step):
        yield start, array[start : start + step]


def _where(bad: Array, first_row: int) -> str:
    first = np.argwhere(bad)[0]
    return f"row {first_row + int(first[0])}, position {int(first[1])}"


def _check_ids(name: str, field: str, array: Array, low: int, count: int) -> None:
    for start, rows in _blocks(array):
        if rows.min() >= low and (not count or rows.max() < count):
            continue
        bad = np.less(rows, low)
        if count:
            bad = bad | np.greater_equal(rows, count)
        what = "ids" if field in ("tokens", "routed_experts", "segment_ids") else "values"
        limit = f"{low} to {count - 1}" if count else f"{low} or more"
        raise InvalidTensor(
            f"{name}: field {field} holds {int(rows[bad][0])} at {_where(bad, start)}; {what}"
            f" are {limit}"
        )


def _check_mask(name: str, arrays: Mapping[str, Array]) -> None:
    segments = arrays["segment_ids"]
    for start, mask in _blocks(arrays["loss_mask"]):
        block = segments[start : start + mask.shape[0]]
        # Column 0 of a token shard may lie within a segment: there, positions tell.
        first = np.equal(arrays["positions"][start : start + mask.shape[0]], 0)
        first[:, 1:] |= np.not_equal(block[:, 1:], block[:, :-1])
        wrong = (first | np.equal(block, 0)) & np.equal(mask, 1)
        if wrong.any():
            raise InvalidTensor(
                f"{name}: field loss_mask is set at {_where(wrong, start)}, where nothing predicts"
                " the token (a segment's first token, or padding)"
            )
