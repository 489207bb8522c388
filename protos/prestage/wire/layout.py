"""Where a micro-batch's bytes lie: in its padded buffer, and in an upload. Numbers only, no bytes.

One layout serves every plane. The buffer holds full padded arrays, so the packer writes
`[rows, tokens]` views and the worker trains on them without another copy; an upload is the buffer's
real content in order, so padding is not sent. Works on checked numbers only (see codec).

    buffer   | tokens: row 0 real ... pad | row 1 real ... pad | (64-byte step) next tensor ...
    upload   | row 0 real | row 1 real | next tensor's row 0 ...
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from prestage.microbatch import FIELDS, Array

ALIGN_BYTES: Final = 64  # JAX aliases host arrays that start at multiples of this.

Buffer = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class ShardRange:
    """A block of rows and tokens of a micro-batch: `[row_start, +row_count) x [token_start, +…)`."""

    row_start: int
    row_count: int
    token_start: int
    token_count: int

    def row_lengths(self, row_lengths: Sequence[int]) -> tuple[int, ...]:
        """Real tokens of the shard's rows, given those of the whole micro-batch."""
        rows = row_lengths[self.row_start : self.row_start + self.row_count]
        return tuple(min(max(length - self.token_start, 0), self.token_count) for length in rows)


@dataclass(frozen=True, kw_only=True)
class TensorPlace:
    """One tensor's place. Bytes."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]  # [rows, tokens, ...], padded.
    start: int  # First byte in the buffer.
    token_bytes: int
    offset: int  # First byte of its content in an upload.
    sent_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one padded row."""
        return self.shape[1] * self.token_bytes

    @property
    def padded_bytes(self) -> int:
        """Bytes of the whole padded tensor."""
        return self.shape[0] * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Places of all tensors of a micro-batch (or of one shard of it), sorted by name."""

    rows: int
    tokens_per_row: int
    row_lengths: tuple[int, ...]
    tensors: tuple[TensorPlace, ...]
    buffer_bytes: int
    total_bytes: int  # Of an upload.

    def arrays(self, buffer: Buffer) -> dict[str, Array]:
        """Padded arrays as views on a buffer of at least `buffer_bytes`."""
        views: dict[str, Array] = {}
        for place in self.tensors:
            flat = buffer[place.start : place.start + place.padded_bytes]
            views[place.name] = flat.view(place.dtype).reshape(place.shape)
        return views

    def runs(self, first_byte: int = 0) -> Iterator[tuple[int, int]]:
        """(start in the buffer, bytes) of the upload from `first_byte` on; touching runs are one."""
        for place in self.tensors:
            if place.offset + place.sent_bytes <= first_byte:
                continue
            skip = max(0, first_byte - place.offset)
            for start, size in row_runs(
                self.row_lengths,
                token_bytes=place.token_bytes,
                row_bytes=place.row_bytes,
                first=place.start,
            ):
                if skip >= size:
                    skip -= size
                    continue
                yield start + skip, size - skip
                skip = 0

    def fill_padding(self, buffer: Buffer, *, zeroed: bool = False) -> None:
        """Write what padding holds, wherever there is no real content. `zeroed`: it is all 0 now."""
        for name, view in self.arrays(buffer).items():
            if zeroed and FIELDS[name].pad_value == 0:
                continue
            for rows, tokens in self.padding():
                view[rows, tokens] = FIELDS[name].pad_value

    def padding(self) -> Iterator[tuple[slice, slice]]:
        """(rows, tokens) of every stretch of padding."""
        row = 0
        while row < self.rows:
            length = self.row_lengths[row]
            end = row + 1
            while end < self.rows and self.row_lengths[end] == length:
                end += 1
            if length < self.tokens_per_row:
                yield slice(row, end), slice(length, None)
            row = end


def row_runs(
    row_lengths: Sequence[int], *, token_bytes: int, row_bytes: int, first: int
) -> Iterator[tuple[int, int]]:
    """(start, bytes) of each row's real content where rows lie `row_bytes` apart; touching = one."""
    run_start, run_size = first, 0
    for row, length in enumerate(row_lengths):
        if not length:
            continue
        start = first + row * row_bytes
        if run_size and start == run_start + run_size:
            run_size += length * token_bytes
            continue
        if run_size:
            yield run_start, run_size
        run_start, run_size = start, length * token_bytes
    if run_size:
        yield run_start, run_size


def buffer_bytes_of(rows: int, tokens_per_row: int, fields: Mapping[str, Sequence[int]]) -> int:
    """`Layout.buffer_bytes` of such a micro-batch; sizes of any magnitude cost nothing.

    `fields`: name to trailing shape. Raises `KeyError` for a field outside the table.
    """
    total = 0
    for name, trailing in fields.items():
        size = rows * tokens_per_row * FIELDS[name].dtype.itemsize * math.prod(trailing)
        total += -(-size // ALIGN_BYTES) * ALIGN_BYTES
    return total


def plan_layout(
    *,
    rows: int,
    tokens_per_row: int,
    row_lengths: Sequence[int],
    fields: Mapping[str, Sequence[int]],
    shard: ShardRange | None = None,
) -> Layout:
    """Layout of a micro-batch with these fields (name to trailing shape) of the field table.

    With `shard`, the layout of that part alone. Raises `KeyError` for a field outside the table.
    """
    lengths = tuple(row_lengths)
    if shard is not None:
        lengths = shard.row_lengths(lengths)
        rows, tokens_per_row = shard.row_count, shard.token_count
    real_tokens = sum(lengths)
    places: list[TensorPlace] = []
    start = offset = 0
    for name in sorted(fields):
        spec = FIELDS[name]
        token_bytes = spec.dtype.itemsize
        for axis in fields[name]:
            token_bytes *= axis
        place = TensorPlace(
            name=name,
            dtype=spec.dtype,
            shape=(rows, tokens_per_row, *fields[name]),
            start=start,
            token_bytes=token_bytes,
            offset=offset,
            sent_bytes=real_tokens * token_bytes,
        )
        places.append(place)
        offset += place.sent_bytes
        start += -(-place.padded_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return Layout(
        rows=rows,
        tokens_per_row=tokens_per_row,
        row_lengths=lengths,
        tensors=tuple(places),
        buffer_bytes=start,
        total_bytes=offset,
    )
