"""Judges the values of a micro-batch before any engine sees them. Raises `InvalidTensor`."""

from __future__ import annotations

import numpy as np

from prestage.microbatch import FIELDS, Array, MicroBatch
from prestage.wire.errors import InvalidTensor


def _where(bad: Array) -> str:
    first = np.argwhere(bad)[0]
    return f"row {int(first[0])}, position {int(first[1])}"


def check_values(batch: MicroBatch, *, vocab_size: int = 0, num_experts: int = 0) -> None:
    """Check finiteness, id ranges, masks and segments. 0 = any id.

    Raises `InvalidTensor` naming the micro-batch, the field, where and the value.
    """
    arrays, name = batch.arrays, f"micro-batch {batch.id}"
    for field, array in arrays.items():
        spec = FIELDS.get(field)
        if spec is None or array.dtype != spec.dtype:
            raise InvalidTensor(f"{name}: field {field!r} of dtype {array.dtype} is not known")
        expected = (batch.rows, batch.tokens_per_row)
        if array.shape[:2] != expected or array.ndim != 2 + spec.trailing_dims:
            raise InvalidTensor(f"{name}: field {field} has shape {array.shape}; not {expected}")
        if array.dtype.kind == "f" and not (finite := np.isfinite(array)).all():
            raise InvalidTensor(
                f"{name}: field {field} is not finite at {_where(~finite)}"
                f" ({array[~finite][0]}); reject the trajectory at ingest"
            )
    _check_ids(name, "tokens", arrays["tokens"], 0, vocab_size)
    if "routed_experts" in arrays:
        _check_ids(name, "routed_experts", arrays["routed_experts"], -1, num_experts)
    segments, mask = arrays["segment_ids"], arrays["loss_mask"]
    if (odd := np.greater(mask, 1)).any():
        raise InvalidTensor(f"{name}: field loss_mask is not 0 or 1 at {_where(odd)}")
    if (negative := np.less(segments, 0)).any():
        raise InvalidTensor(f"{name}: field segment_ids is negative at {_where(negative)}")
    first = np.ones_like(mask, dtype=bool)
    first[:, 1:] = segments[:, 1:] != segments[:, :-1]
    wrong = (mask == 1) & (first | (segments == 0))
    if wrong.any():
        raise InvalidTensor(
            f"{name}: field loss_mask is set at {_where(wrong)}, where nothing predicts the token"
            " (a segment's first token, or padding)"
        )


def _check_ids(name: str, field: str, array: Array, low: int, count: int) -> None:
    bad = np.less(array, low)
    if count:
        bad = bad | np.greater_equal(array, count)
    if bad.any():
        limit = f"{low} to {count - 1}" if count else f"{low} or more"
        raise InvalidTensor(
            f"{name}: field {field} holds {int(array[bad][0])} at {_where(bad)}; ids are {limit}"
        )
