"""Micro-batches to and from bytes: manifests, what is checked about them, and the bytes in order.

Layout is `layout`'s. Nothing is allocated from a manifest that `check_manifest` has not accepted:
every count, shape, offset and size is checked first, in Python integers, which do not overflow.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from prestage.microbatch import FIELDS, Array, MicroBatch, MicroBatchId
from prestage.tensor.v1 import tensor_pb2 as pb
from prestage.wire.digest import (
    BLOCK_DIGEST_BYTES,
    batch_digest,
    block_tokens,
    blocks_of,
    combine,
    shard_blocks,
    tensor_blocks,
)
from prestage.wire.errors import (
    CodecError,
    DamagedError,
    InvalidTensor,
    LimitError,
    SupersededError,
)
from prestage.wire.layout import Buffer, Layout, ShardRange, plan_layout, row_runs
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
_DIGEST: Final = re.compile(r"[0-9a-f]{32}\Z")


def check_run_id(run_id: str) -> None:
    """Raises `CodecError` for anything but 1 to 128 characters of [A-Za-z0-9._-]."""
    if not _RUN_ID.match(run_id):
        raise CodecError(f"run_id is {run_id[:200]!r}: use 1 to 128 characters of [A-Za-z0-9._-]")


def layout_of_batch(batch: MicroBatch, shard: ShardRange | None = None) -> Layout:
    """Where its bytes lie. Raises `InvalidTensor` for a field that is not in the table."""
    for name, array in batch.arrays.items():
        spec = FIELDS.get(name)
        if (
            spec is None
            or array.dtype != spec.dtype
            or array.shape[:2] != (batch.rows, batch.tokens_per_row)
            or array.ndim != 2 + spec.trailing_dims
        ):
            raise InvalidTensor(
                f"micro-batch {batch.id}: field {name!r} of dtype {array.dtype} and shape"
                f" {array.shape} is not in the field table ({', '.join(FIELDS)}; rows"
                f" {batch.rows}, tokens {batch.tokens_per_row})"
            )
    return plan_layout(
        rows=batch.rows,
        tokens_per_row=batch.tokens_per_row,
        row_lengths=batch.row_lengths,
        fields={name: array.shape[2:] for name, array in batch.arrays.items()},
        shard=shard,
    )


def make_manifest(batch: MicroBatch, *, with_blocks: bool = False) -> pb.Manifest:
    """Manifest of a micro-batch; `with_blocks` for one that is put in shards.

    Raises `InvalidTensor` for a field that is not in the table, `CodecError` without a digest.
    """
    layout = layout_of_batch(batch)
    if not batch.digest:
        raise CodecError(f"micro-batch {batch.id} has no digest: give it its content_digest first")
    manifest = pb.Manifest(
        id=pb.MicroBatchId(run_id=batch.id.run_id, step=batch.id.step, index=batch.id.index),
        rows=batch.rows,
        tokens_per_row=batch.tokens_per_row,
        row_lengths=batch.row_lengths,
        digest=batch.digest,
        total_bytes=layout.total_bytes,
    )
    size = block_tokens(batch.tokens_per_row)
    for place in layout.tensors:
        blocks = b""
        if with_blocks:
            blocks = tensor_blocks(batch.arrays[place.name], batch.row_lengths, size)
        manifest.tensors.add(
            name=place.name,
            dtype=_DTYPES[place.dtype.name],
            shape=place.shape,
            offset=place.offset,
            bytes=place.sent_bytes,
            block_digests=blocks,
        )
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
    if not _DIGEST.match(manifest.digest):
        raise CodecError(f"{name}: digest {manifest.digest[:80]!r} is not 32 hex digits")
    _check_tensors(name, manifest, sum(lengths), limits)


def _check_tensors(name: str, manifest: pb.Manifest, real_tokens: int, limits: WireLimits) -> None:
    tensors = manifest.tensors
    if len(tensors) > limits.max_tensors:
        raise LimitError(f"{name}: {len(tensors)} tensors; this side takes {limits.max_tensors}")
    names = [tensor.name for tensor in tensors]
    if names != sorted(set(names)):
        raise CodecError(f"{name}: tensor names must be sorted and unique: {str(names)[:300]}")
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


def check_shard(manifest: pb.Manifest, shard: pb.Shard) -> ShardRange:
    """Accept a shard of an accepted manifest, or raise `CodecError` naming the field."""
    name = f"micro-batch {manifest.id.run_id}/{manifest.id.step}/{manifest.id.index}"
    rows, tokens = manifest.rows, manifest.tokens_per_row
    if not 1 <= shard.row_count <= rows - shard.row_start:
        raise CodecError(
            f"{name}: shard rows [{shard.row_start}, +{shard.row_count}) of {rows} rows"
        )
    size = block_tokens(tokens)
    end = shard.token_start + shard.token_count
    if not 1 <= shard.token_count <= tokens - shard.token_start:
        raise CodecError(
            f"{name}: shard tokens [{shard.token_start}, +{shard.token_count}) of {tokens} a row"
        )
    if shard.token_start % size or (end % size and end != tokens):
        raise CodecError(
            f"{name}: shard tokens [{shard.token_start}, {end}) do not lie on blocks of {size}"
        )
    expected = BLOCK_DIGEST_BYTES * sum(blocks_of(length, size) for length in manifest.row_lengths)
    for tensor in manifest.tensors:
        if len(tensor.block_digests) != expected:
            raise CodecError(
                f"{name}: field {tensor.name} has {len(tensor.block_digests)} bytes of"
                f" block_digests; a shard needs {expected}"
            )
    whole = combine(
        rows=rows,
        tokens_per_row=tokens,
        row_lengths=manifest.row_lengths,
        tensors=[
            (tensor.name, _NAMES[tensor.dtype], list(tensor.shape)[2:], tensor.block_digests)
            for tensor in manifest.tensors
        ],
    )
    if whole != manifest.digest:
        raise DamagedError(f"{name}: block_digests give {whole}, digest is {manifest.digest}")
    return ShardRange(
        row_start=shard.row_start,
        row_count=shard.row_count,
        token_start=shard.token_start,
        token_count=shard.token_count,
    )


def layout_of(manifest: pb.Manifest, shard: ShardRange | None = None) -> Layout:
    """Layout of an accepted manifest, or of one shard of it."""
    return plan_layout(
        rows=manifest.rows,
        tokens_per_row=manifest.tokens_per_row,
        row_lengths=manifest.row_lengths,
        fields={tensor.name: list(tensor.shape)[2:] for tensor in manifest.tensors},
        shard=shard,
    )


def content_views(
    batch: MicroBatch, layout: Layout, shard: ShardRange | None = None
) -> Iterator[memoryview]:
    """The real content in upload order, as views on the micro-batch's arrays (no copy)."""
    for place in layout.tensors:
        array = np.ascontiguousarray(batch.arrays[place.name])
        flat = array.reshape(-1).view(np.uint8).data
        row_bytes = batch.tokens_per_row * place.token_bytes
        first = 0
        if shard is not None:
            first = shard.row_start * row_bytes + shard.token_start * place.token_bytes
        for start, size in row_runs(
            layout.row_lengths, token_bytes=place.token_bytes, row_bytes=row_bytes, first=first
        ):
            yield flat[start : start + size]


def chunk_pieces(
    views: Iterator[memoryview], first_byte: int, chunk_bytes: int
) -> Iterator[tuple[int, list[memoryview]]]:
    """Cut views into chunks of `chunk_bytes`, from byte `first_byte` on: (offset, pieces)."""
    offset, pieces, room = first_byte, list[memoryview](), chunk_bytes
    skip = first_byte
    for view in views:
        if skip >= len(view):
            skip -= len(view)
            continue
        at, skip = skip, 0
        while at < len(view):
            piece = view[at : at + room]
            pieces.append(piece)
            at += len(piece)
            room -= len(piece)
            if not room:
                yield offset, pieces
                offset, pieces, room = offset + chunk_bytes, [], chunk_bytes
    if pieces:
        yield offset, pieces


class Placer:
    """Writes an upload's bytes, as they come in order, straight into a padded buffer.

    One stream at a time owns it: `take_over` makes every earlier owner's write raise
    `SupersededError`. Safe from any thread.
    """

    def __init__(self, layout: Layout, buffer: Buffer) -> None:
        """`buffer` holds at least `layout.buffer_bytes`; its padding is the caller's."""
        self.layout = layout
        self.buffer = buffer
        self._lock = threading.Lock()
        self._owner = 0
        self._received = 0
        self._runs: Iterator[tuple[int, int]] = iter(())
        self._at = self._left = 0  # The run that is being filled: next byte and bytes left.

    @property
    def received_bytes(self) -> int:
        """Contiguous bytes received so far."""
        return self._received

    def take_over(self) -> int:
        """Become the only writer. Returns the ticket that `write` asks for."""
        with self._lock:
            self._owner += 1
            return self._owner

    def rewind(self, ticket: int, offset: int) -> None:
        """Go on from `offset`. Raises `CodecError` when fewer bytes are there."""
        with self._lock:
            self._own(ticket)
            if offset > self._received:
                raise CodecError(
                    f"resume_from is {offset}, but only {self._received} bytes came: resume there"
                )
            self._received = offset
            self._runs = self.layout.runs(offset)
            self._at = self._left = 0

    def write(self, ticket: int, offset: int, data: memoryview) -> None:
        """Take the next bytes. Raises `CodecError` for a gap, a repeat or too many."""
        with self._lock:
            self._own(ticket)
            if offset != self._received:
                raise CodecError(f"a chunk starts at byte {offset}, but {self._received} is next")
            if self._received + len(data) > self.layout.total_bytes:
                raise CodecError(
                    f"{self._received + len(data)} bytes came; the upload has"
                    f" {self.layout.total_bytes}"
                )
            source = np.frombuffer(data, np.uint8)
            taken = 0
            while taken < source.size:
                if not self._left:
                    self._at, self._left = next(self._runs)
                count = min(source.size - taken, self._left)
                self.buffer[self._at : self._at + count] = source[taken : taken + count]
                taken += count
                self._at += count
                self._left -= count
            self._received += taken

    def finish(self, ticket: int) -> None:
        """Nothing more comes. Raises `CodecError` when bytes are missing."""
        with self._lock:
            self._own(ticket)
            if self._received != self.layout.total_bytes:
                raise CodecError(
                    f"the upload ends after {self._received} of {self.layout.total_bytes} bytes"
                )

    def _own(self, ticket: int) -> None:
        if ticket != self._owner:
            raise SupersededError("another upload of this micro-batch took over, or it was dropped")


def batch_from(
    manifest: pb.Manifest,
    arrays: Mapping[str, Array],
    shard: ShardRange | None = None,
) -> MicroBatch:
    """The micro-batch (or this worker's shard of it) of an accepted manifest and its arrays."""
    lengths = tuple(manifest.row_lengths)
    return MicroBatch(
        id=MicroBatchId(run_id=manifest.id.run_id, step=manifest.id.step, index=manifest.id.index),
        rows=manifest.rows if shard is None else shard.row_count,
        tokens_per_row=manifest.tokens_per_row if shard is None else shard.token_count,
        row_lengths=lengths if shard is None else shard.row_lengths(lengths),
        arrays=arrays,
        digest=manifest.digest,
    )


def check_digest(manifest: pb.Manifest, batch: MicroBatch, shard: ShardRange | None = None) -> None:
    """Hash the content. Raises `DamagedError` when it is not what the manifest announced."""
    name = f"micro-batch {batch.id}"
    if shard is None:
        found = batch_digest(batch)
        if found != manifest.digest:
            raise DamagedError(
                f"{name} was announced with digest {manifest.digest}; its bytes give {found}"
            )
        return
    size = block_tokens(manifest.tokens_per_row)
    for tensor in manifest.tensors:
        expected = shard_blocks(
            tensor.block_digests,
            manifest.row_lengths,
            size,
            rows=slice(shard.row_start, shard.row_start + shard.row_count),
            token_start=shard.token_start,
            token_count=shard.token_count,
        )
        if tensor_blocks(batch.arrays[tensor.name], batch.row_lengths, size) != expected:
            raise DamagedError(
                f"{name}: field {tensor.name} of shard rows [{shard.row_start},"
                f" +{shard.row_count}) differs from its block_digests"
            )
