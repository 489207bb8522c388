"""The `stream` plane: one upload is one client-streaming call, header, chunks, end.

The messages are ordinary protobuf (any language can put), but chunks are written and read by hand,
so that their bytes are copied once on each side. An upload counts only with its end message and the
exact byte count: a client stream that fails can look like a clean end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import grpc

from prestage.microbatch import MicroBatch
from prestage.protocol import BatchRef
from prestage.tensor.v1 import tensor_pb2 as pb
from prestage.wire.codec import (
    Placer,
    batch_from,
    check_manifest,
    content_views,
    make_manifest,
)
from prestage.wire.errors import CodecError
from prestage.wire.limits import WireLimits
from prestage.wire.store import MicroBatchStore

CHUNK_BYTES: Final = 1 << 20
PUT_METHOD: Final = "/prestage.trainer.v1.TrainerWorker/PutMicroBatch"

_CHUNK_TAG: Final = (pb.PutMicroBatchRequest.CHUNK_FIELD_NUMBER << 3) | 2
_OFFSET_TAG: Final = (pb.PutMicroBatchChunk.OFFSET_FIELD_NUMBER << 3) | 0
_DATA_TAG: Final = (pb.PutMicroBatchChunk.DATA_FIELD_NUMBER << 3) | 2


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise CodecError("a chunk's varint is cut off or too long")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


class Chunk:
    """One chunk as the hand-written codec sees it."""

    __slots__ = ("data", "offset")

    def __init__(self, offset: int, data: memoryview) -> None:
        self.offset = offset
        self.data = data


Part = pb.PutMicroBatchRequest | Chunk


def serialize_part(part: Part) -> bytes:
    """Protobuf bytes of a `PutMicroBatchRequest`. A chunk's data is copied once."""
    if not isinstance(part, Chunk):
        return part.SerializeToString()
    head = bytes([_OFFSET_TAG]) + _varint(part.offset) if part.offset else b""
    head += bytes([_DATA_TAG]) + _varint(len(part.data))
    outer = bytes([_CHUNK_TAG]) + _varint(len(head) + len(part.data))
    return b"".join((outer, head, part.data))


def parse_part(message: bytes) -> Part:
    """The reverse. A chunk's data is a view on `message`. Raises `CodecError`."""
    data = memoryview(message)
    if not data or data[0] != _CHUNK_TAG:
        return _parse_protobuf(message)
    size, at = _read_varint(data, 1)
    if at + size != len(data):
        return _parse_protobuf(message)  # Unusual but legal; the library decides.
    offset = 0
    if at < len(data) and data[at] == _OFFSET_TAG:
        offset, at = _read_varint(data, at + 1)
    if at >= len(data) or data[at] != _DATA_TAG:
        return _parse_protobuf(message)
    size, at = _read_varint(data, at + 1)
    if at + size != len(data):
        return _parse_protobuf(message)
    return Chunk(offset, data[at:])


def _parse_protobuf(message: bytes) -> Part:
    part = pb.PutMicroBatchRequest()
    try:
        part.ParseFromString(message)
    except Exception as error:  # protobuf's DecodeError; its class differs between runtimes.
        raise CodecError(f"not a PutMicroBatchRequest: {error}") from error
    if part.WhichOneof("part") == "chunk":
        return Chunk(part.chunk.offset, memoryview(part.chunk.data))
    return part


def upload_parts(
    batch: MicroBatch, *, epoch: int, incarnation: str, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[Part]:
    """What a client sends to put one micro-batch (with its digest set)."""
    manifest = make_manifest(batch)
    header = pb.PutMicroBatchHeader(manifest=manifest, epoch=epoch, incarnation=incarnation)
    yield pb.PutMicroBatchRequest(header=header)
    offset = 0
    for view in content_views(batch):
        for start in range(0, len(view), chunk_bytes):
            piece = view[start : start + chunk_bytes]
            yield Chunk(offset, piece)
            offset += len(piece)
    yield pb.PutMicroBatchRequest(end=pb.PutMicroBatchEnd(total_bytes=manifest.total_bytes))


class StreamSender:
    """Puts micro-batches over one channel. Safe from several threads."""

    def __init__(self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._call = channel.stream_unary(
            PUT_METHOD,
            request_serializer=serialize_part,
            response_deserializer=pb.PutMicroBatchResponse.FromString,
        )
        self._metadata = metadata

    def put(
        self, batch: MicroBatch, *, epoch: int, incarnation: str, timeout_s: float
    ) -> pb.PutMicroBatchResponse:
        """Put one micro-batch whole. Raises `grpc.RpcError`; putting again is harmless."""
        parts = upload_parts(batch, epoch=epoch, incarnation=incarnation)
        response: pb.PutMicroBatchResponse = self._call(
            parts, timeout=timeout_s, metadata=self._metadata
        )
        return response


class PutReceiver:
    """The worker's half: takes one upload into the store."""

    def __init__(
        self,
        store: MicroBatchStore,
        limits: WireLimits,
        check: Callable[[pb.PutMicroBatchHeader], None],
        validate: Callable[[MicroBatch], None],
        *,
        wait_s: float = 600.0,
    ) -> None:
        """`check` raises for a header of the wrong run, epoch or phase; `validate` for bad values."""
        self._store = store
        self._limits = limits
        self._check = check
        self._validate = validate
        self._wait_s = wait_s

    def take(self, parts: Iterator[Part]) -> pb.PutMicroBatchResponse:
        """Raises `WireError`s; nothing of a failed upload is kept."""
        first = next(parts, None)
        if isinstance(first, Chunk) or first is None or first.WhichOneof("part") != "header":
            raise CodecError("an upload starts with its header")
        header = first.header
        self._check(header)
        check_manifest(header.manifest, self._limits)
        manifest = header.manifest
        ref = BatchRef(step=manifest.id.step, index=manifest.id.index, digest=manifest.digest)
        size = sum(_padded_bytes(tensor) for tensor in manifest.tensors)
        if not self._store.begin(ref, size, wait_s=self._wait_s):
            return pb.PutMicroBatchResponse(
                stored=True, received_bytes=manifest.total_bytes, duplicate=True
            )
        try:
            placer = Placer(manifest)
            self._receive(parts, placer, manifest)
            batch = batch_from(manifest, placer.arrays)
            self._validate(batch)
        except BaseException:
            self._store.abandon(ref)
            raise
        self._store.complete(ref, batch)
        self._store.verify(ref)
        return pb.PutMicroBatchResponse(stored=True, received_bytes=manifest.total_bytes)

    def _receive(self, parts: Iterator[Part], placer: Placer, manifest: pb.Manifest) -> None:
        for part in parts:
            if isinstance(part, Chunk):
                if len(part.data) > self._limits.max_chunk_bytes:
                    raise CodecError(
                        f"a chunk has {len(part.data)} bytes; at most"
                        f" {self._limits.max_chunk_bytes} are taken"
                    )
                placer.write(part.offset, part.data)
                continue
            if part.WhichOneof("part") != "end":
                raise CodecError("an upload has one header, then chunks, then its end")
            total = manifest.total_bytes
            if part.end.total_bytes != total or placer.received_bytes != total:
                raise CodecError(
                    f"the upload ends after {placer.received_bytes} bytes (its end says"
                    f" {part.end.total_bytes}); the manifest says {total}"
                )
            return
        raise CodecError(
            f"the upload broke off after {placer.received_bytes} of {manifest.total_bytes} bytes"
        )


def _padded_bytes(tensor: pb.TensorSpec) -> int:
    size = 1
    for axis in tensor.shape:
        size *= axis
    widths = {pb.DATA_TYPE_UINT8: 1, pb.DATA_TYPE_INT16: 2, pb.DATA_TYPE_INT64: 8}
    return size * widths.get(tensor.dtype, 4)
