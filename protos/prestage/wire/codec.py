"""Micro-batches to and from one stretch of bytes. Only real content is in it.

Layout: tensors in order of their names; within a tensor the rows one after another, each with its
real tokens only. Nothing is allocated from a manifest that `check_manifest` has not accepted.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from prestage.microbatch import FIELDS, Array, MicroBatch, MicroBatchId
from prestage.tensor.v1 import tensor_pb2 as pb
from prestage.wire.errors import CodecError, InvalidTensor, LimitError
from prestage.wire.limits import WireLimits

_DTYPES: Final[Mapping[str, pb.DataType]] = {
    "uint8": pb.DATA_TYPE_UINT8,
    "int16": pb.DATA_TYPE_INT16,
    "int32": pb.DATA_TYPE_INT32,
    "int64": pb.DATA_TYPE_INT64,
    "float32": pb.DATA_TYPE_FLOAT32,
}
_NAMES: Final = {value: name for name, value in _DTYPES.items()}
_RUN_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")

Buffer = npt.NDArray[np.uint8]


def check_run_id(run_id: str) -> None:
    """Raises `CodecError` for anything but 1 to 128 characters of [A-Za-z0-9._-]."""
    if not _RUN_ID.match(run_id):
        raise CodecError(f"run_id is {run_id[:200]!r}: use 1 to 128 characters of [A-Za-z0-9._-]")


def make_manifest(batch: MicroBatch) -> pb.Manifest:
    """Manifest of a micro-batch. Raises `InvalidTensor` for a field that is not in the table."""
    manifest = pb.Manifest(
        id=pb.MicroBatchId(run_id=batch.id.run_id, step=batch.id.step, index=batch.id.index),
        rows=batch.rows,
        tokens_per_row=batch.tokens_per_row,
        row_lengths=batch.row_lengths,
        digest=batch.digest,
    )
    offset = 0
    real_tokens = sum(batch.row_lengths)
    for name in sorted(batch.arrays):
        array = batch.arrays[name]
        spec = FIELDS.get(name)
        if spec is None or array.dtype != spec.dtype:
            raise InvalidTensor(
                f"micro-batch {batch.id}: field {name!r} of dtype {array.dtype} is not in the field"
                f" table ({', '.join(FIELDS)})"
            )
        size = real_tokens * array.dtype.itemsize * int(np.prod(array.shape[2:], dtype=np.int64))
        manifest.tensors.add(
            name=name,
            dtype=_DTYPES[array.dtype.name],
            shape=array.shape,
            offset=offset,
            bytes=size,
        )
        offset += size
    manifest.total_bytes = offset
    return manifest


def check_manifest(manifest: pb.Manifest, limits: WireLimits) -> None:
    """Accept a manifest or raise `CodecError`/`LimitError`/`InvalidTensor` naming the field."""
    check_run_id(manifest.id.run_id)
    rows, tokens = manifest.rows, manifest.tokens_per_row
    name = f"micro-batch {manifest.id.run_id}/{manifest.id.step}/{manifest.id.index}"
    if not 1 <= rows <= limits.max_rows:
        raise LimitError(f"{name}: rows is {rows}; this side takes 1 to {limits.max_rows}")
    if not 2 <= tokens <= limits.max_tokens_per_row:
        raise LimitError(
            f"{name}: tokens_per_row is {tokens}; this side takes 2 to {limits.max_tokens_per_row}"
        )
    if len(manifest.row_lengths) != rows:
        raise CodecError(f"{name}: {len(manifest.row_lengths)} row_lengths for {rows} rows")
    lengths = list(manifest.row_lengths)
    if max(lengths) > tokens:
        raise CodecError(f"{name}: a row length of {max(lengths)} in rows of {tokens} tokens")
    if any(before == 0 and after > 0 for before, after in itertools.pairwise(lengths)):
        raise CodecError(f"{name}: a padding row comes before a real one (row_lengths)")
    if not re.fullmatch(r"[0-9a-f]{32}", manifest.digest):
        raise CodecError(f"{name}: digest {manifest.digest[:80]!r} is not 32 hex digits")
    _check_tensors(name, manifest, sum(lengths), limits)


def _check_tensors(name: str, manifest: pb.Manifest, real_tokens: int, limits: WireLimits) -> None:
    tensors = manifest.tensors
    if len(tensors) > limits.max_tensors:
        raise LimitError(f"{name}: {len(tensors)} tensors; this side takes {limits.max_tensors}")
    names = [tensor.name for tensor in tensors]
    if names != sorted(set(names)):
        raise CodecError(f"{name}: tensor names must be sorted and unique: {names[:16]}")
    missing = [spec.name for spec in FIELDS.values() if spec.required and spec.name not in names]
    if missing:
        raise InvalidTensor(f"{name}: field {missing[0]!r} is missing; every micro-batch has it")
    offset, padded = 0, 0
    for tensor in tensors:
        spec = FIELDS.get(tensor.name)
        if spec is None:
            raise InvalidTensor(
                f"{name}: unknown field {tensor.name[:80]!r}; known: {', '.join(FIELDS)}"
            )
        dtype = _NAMES.get(tensor.dtype)
        if dtype != spec.dtype.name:
            raise InvalidTensor(
                f"{name}: field {tensor.name} has dtype {dtype or tensor.dtype};"
                f" it is {spec.dtype.name}"
            )
        shape = list(tensor.shape)
        if shape[:2] != [manifest.rows, manifest.tokens_per_row] or (
            len(shape) != 2 + spec.trailing_dims
        ):
            raise InvalidTensor(
                f"{name}: field {tensor.name} has shape {shape[:8]}; it is [{manifest.rows},"
                f" {manifest.tokens_per_row}] and {spec.trailing_dims} more axes"
            )
        trailing = 1
        for size in shape[2:]:
            if not 1 <= size <= limits.max_trailing:
                raise LimitError(f"{name}: field {tensor.name} has an axis of {size}")
            trailing *= size
        if trailing > limits.max_trailing:
            raise LimitError(f"{name}: field {tensor.name} has {trailing} values a token")
        expected = real_tokens * spec.dtype.itemsize * trailing
        if (tensor.offset, tensor.bytes) != (offset, expected):
            raise CodecError(
                f"{name}: field {tensor.name} lies at {tensor.offset} with {tensor.bytes} bytes;"
                f" the layout gives {offset} with {expected}"
            )
        offset += expected
        padded += manifest.rows * manifest.tokens_per_row * spec.dtype.itemsize * trailing
    if manifest.total_bytes != offset:
        raise CodecError(
            f"{name}: total_bytes is {manifest.total_bytes}; the layout gives {offset}"
        )
    if offset > limits.max_payload_bytes or padded > limits.max_padded_bytes:
        raise LimitError(
            f"{name}: {offset} bytes ({padded} padded); this side takes"
            f" {limits.max_payload_bytes} ({limits.max_padded_bytes} padded)"
        )


def row_offsets(row_lengths: Sequence[int]) -> list[int]:
    """Real tokens before each row, and the total."""
    offsets = [0]
    for length in row_lengths:
        offsets.append(offsets[-1] + length)
    return offsets


def content_views(batch: MicroBatch) -> list[memoryview]:
    """The micro-batch's real content in layout order, as views on its arrays (no copy)."""
    views: list[memoryview] = []
    for name in sorted(batch.arrays):
        array = batch.arrays[name]
        for row, length in enumerate(batch.row_lengths):
            if length:
                views.append(np.ascontiguousarray(array[row, :length]).data.cast("B"))
    return views


def padded_arrays(manifest: pb.Manifest) -> dict[str, Array]:
    """Arrays `[rows, tokens_per_row, ...]` holding padding everywhere. After `check_manifest`."""
    arrays: dict[str, Array] = {}
    for tensor in manifest.tensors:
        spec = FIELDS[tensor.name]
        shape = tuple(tensor.shape)
        if spec.pad_value == 0:
            arrays[tensor.name] = np.zeros(shape, spec.dtype)
        else:
            arrays[tensor.name] = np.full(shape, spec.pad_value, spec.dtype)
    return arrays


class Placer:
    """Writes a micro-batch's bytes, as they come in order, straight into its padded arrays."""

    def __init__(self, manifest: pb.Manifest) -> None:
        """`manifest` has passed `check_manifest`."""
        self.arrays = padded_arrays(manifest)
        self.received_bytes = 0
        self._targets: list[npt.NDArray[np.uint8]] = []
        for tensor in manifest.tensors:
            array = self.arrays[tensor.name]
            for row, length in enumerate(manifest.row_lengths):
                if length:
                    self._targets.append(array[row, :length].reshape(-1).view(np.uint8))
        self._at = 0  # Target that is being filled.
        self._filled = 0  # Bytes of it that are there.

    def write(self, offset: int, data: memoryview) -> None:
        """Take the next bytes. Raises `CodecError` for a gap, a repeat or too many."""
        if offset != self.received_bytes:
            raise CodecError(f"a chunk starts at byte {offset}, but {self.received_bytes} is next")
        source = np.frombuffer(data, np.uint8)
        taken = 0
        while taken < source.size:
            if self._at >= len(self._targets):
                raise CodecError("more bytes came than the manifest announces")
            target = self._targets[self._at]
            count = min(source.size - taken, target.size - self._filled)
            target[self._filled : self._filled + count] = source[taken : taken + count]
            taken += count
            self._filled += count
            if self._filled == target.size:
                self._at, self._filled = self._at + 1, 0
        self.received_bytes += taken


def batch_from(manifest: pb.Manifest, arrays: Mapping[str, Array]) -> MicroBatch:
    """The micro-batch of an accepted manifest and its arrays."""
    return MicroBatch(
        id=MicroBatchId(run_id=manifest.id.run_id, step=manifest.id.step, index=manifest.id.index),
        rows=manifest.rows,
        tokens_per_row=manifest.tokens_per_row,
        row_lengths=tuple(manifest.row_lengths),
        arrays=arrays,
        digest=manifest.digest,
    )
