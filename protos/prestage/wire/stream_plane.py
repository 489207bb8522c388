"""The `stream` plane: one upload is one client-streaming call, header, chunks, end.

The messages are ordinary protobuf (any language can put), but chunks are written and read by hand,
so that their bytes are copied once on each side. An upload counts only with its end message and the
exact byte count: a client stream that fails can look like a clean end. What a broken stream brought
stays at the worker, and the next put of the same micro-batch goes on from there.
"""

from __future__ import annotations

import collections
import functools
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import grpc

from prestage.microbatch import MicroBatch
from prestage.protocol import BatchRef, Reason
from prestage.tensor.v1 import tensor_pb2 as pb
from prestage.wire.arena import ArenaPool
from prestage.wire.codec import (
    Placer,
    batch_from,
    check_digest,
    check_manifest,
    check_shard,
    chunk_pieces,
    content_views,
    layout_of,
    layout_of_batch,
    make_manifest,
)
from prestage.wire.errors import CodecError, Refusal, SupersededError, WireError, classify
from prestage.wire.layout import Layout, ShardRange
from prestage.wire.limits import MAX_PART_BYTES, MAX_PART_FIELDS, WireLimits
from prestage.wire.planes import SendBuffer, SlotReader
from prestage.wire.scan import count_fields, nested_fields
from prestage.wire.store import MicroBatchStore
from prestage.wire.validate import check_padding

log = logging.getLogger("prestage.wire")

CHUNK_BYTES: Final = 1 << 20
PUT_METHOD: Final = "/prestage.trainer.v1.TrainerWorker/PutMicroBatch"

_CHUNK_TAG: Final = (pb.PutMicroBatchRequest.CHUNK_FIELD_NUMBER << 3) | 2
_OFFSET_TAG: Final = (pb.PutMicroBatchChunk.OFFSET_FIELD_NUMBER << 3) | 0
_DATA_TAG: Final = (pb.PutMicroBatchChunk.DATA_FIELD_NUMBER << 3) | 2
_NESTED: Final = nested_fields(pb.PutMicroBatchRequest)
_BROKEN_KEPT: Final = 64
_DAMAGED_ATTEMPTS: Final = 3


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
    """One chunk as the hand-written codec sees it. A received one has one piece."""

    __slots__ = ("offset", "pieces")

    def __init__(self, offset: int, *pieces: memoryview) -> None:
        self.offset = offset
        self.pieces = pieces

    @property
    def size(self) -> int:
        """Bytes of its data."""
        return sum(len(piece) for piece in self.pieces)


Part = pb.PutMicroBatchRequest | Chunk


def serialize_part(part: Part) -> bytes:
    """Protobuf bytes of a `PutMicroBatchRequest`. A chunk's data is copied once."""
    if not isinstance(part, Chunk):
        return part.SerializeToString()
    size = part.size
    head = bytes([_OFFSET_TAG]) + _varint(part.offset) if part.offset else b""
    head += bytes([_DATA_TAG]) + _varint(size)
    outer = bytes([_CHUNK_TAG]) + _varint(len(head) + size)
    return b"".join((outer, head, *part.pieces))


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
    if len(message) > MAX_PART_BYTES:
        raise CodecError(
            f"a message of an upload has {len(message)} bytes; at most {MAX_PART_BYTES} are read:"
            " send the content in smaller chunks"
        )
    part = pb.PutMicroBatchRequest()
    try:
        count_fields(message, _NESTED, most=MAX_PART_FIELDS)
        part.ParseFromString(message)
    except Exception as error:  # protobuf's DecodeError; its class differs between runtimes.
        raise CodecError(f"not a PutMicroBatchRequest: {str(error)[:200]}") from error
    if part.WhichOneof("part") == "chunk":
        return Chunk(part.chunk.offset, memoryview(part.chunk.data))
    return part


def parse_parts(messages: Iterable[bytes]) -> Iterator[Part]:
    """Parses lazily, so that a malformed message is answered like any other bad upload."""
    return map(parse_part, messages)


def put_method_handler(
    handle: Callable[[Iterator[Part], grpc.ServicerContext], pb.PutMicroBatchResponse],
) -> grpc.GenericRpcHandler:
    """A handler of PutMicroBatch alone, with the raw deserialiser. Add it before the service's."""

    def put(messages: Iterator[bytes], context: grpc.ServicerContext) -> pb.PutMicroBatchResponse:
        return handle(parse_parts(messages), context)

    method: grpc.RpcMethodHandler[bytes, pb.PutMicroBatchResponse] = (
        grpc.stream_unary_rpc_method_handler(
            put,
            request_deserializer=None,
            response_serializer=pb.PutMicroBatchResponse.SerializeToString,
        )
    )
    service, _, name = PUT_METHOD.strip("/").rpartition("/")
    return grpc.method_handlers_generic_handler(service, {name: method})


def shard_to_proto(shard: ShardRange) -> pb.Shard:
    return pb.Shard(
        row_start=shard.row_start,
        row_count=shard.row_count,
        token_start=shard.token_start,
        token_count=shard.token_count,
    )


def upload_parts(
    batch: MicroBatch,
    header: pb.PutMicroBatchHeader,
    layout: Layout,
    *,
    shard: ShardRange | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[Part]:
    """What a client sends to put one micro-batch (or one shard), from `header.resume_from` on."""
    yield pb.PutMicroBatchRequest(header=header)
    views = content_views(batch, layout, shard)
    for offset, pieces in chunk_pieces(views, header.resume_from, chunk_bytes):
        yield Chunk(offset, *pieces)
    yield end_part(layout)


def end_part(layout: Layout) -> pb.PutMicroBatchRequest:
    """The end message of an upload."""
    return pb.PutMicroBatchRequest(end=pb.PutMicroBatchEnd(total_bytes=layout.total_bytes))


class PutCall:
    """The PutMicroBatch call of one channel. Raises `grpc.RpcError`."""

    def __init__(self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._call = channel.stream_unary(
            PUT_METHOD,
            request_serializer=serialize_part,
            response_deserializer=pb.PutMicroBatchResponse.FromString,
        )
        self._metadata = metadata

    def __call__(self, parts: Iterator[Part], timeout_s: float) -> pb.PutMicroBatchResponse:
        response: pb.PutMicroBatchResponse = self._call(
            parts, timeout=timeout_s, metadata=self._metadata
        )
        return response


class StreamSender:
    """Puts micro-batches over one channel. Safe from several threads. A `PayloadPlane`."""

    name: Final = "stream"

    def __init__(
        self,
        channel: grpc.Channel,
        metadata: tuple[tuple[str, str], ...] = (),
        *,
        chunk_bytes: int = CHUNK_BYTES,
        idle_bytes: int = 2 << 30,
    ) -> None:
        """`idle_bytes`: unused send buffers that are kept for the next `reserve`."""
        self._call = PutCall(channel, metadata)
        self._chunk_bytes = chunk_bytes
        self._arenas = ArenaPool(idle_bytes)
        self._lock = threading.Lock()
        # Uploads that broke off: their next put asks the worker how far they came.
        self._broken: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self.resumed = 0
        self.resent_damaged = 0

    def reserve(self, layout: Layout) -> SendBuffer:
        """Arrays to pack into; reused when nothing refers to them any more."""
        buffer, fresh = self._arenas.take(layout.buffer_bytes)
        return SendBuffer(layout=layout, buffer=buffer, zeroed=fresh)

    def put(
        self,
        batch: MicroBatch,
        *,
        epoch: int,
        incarnation: str,
        timeout_s: float,
        shard: ShardRange | None = None,
    ) -> pb.PutMicroBatchResponse:
        """Put one micro-batch, or one shard of it. Raises `grpc.RpcError`.

        Putting again is harmless, and goes on where the last put broke off. Bytes that were damaged
        on their way are sent again at once, a few times.
        """
        layout = layout_of_batch(batch, shard)
        manifest = make_manifest(batch, with_blocks=shard is not None)
        header = pb.PutMicroBatchHeader(
            manifest=manifest,
            epoch=epoch,
            incarnation=incarnation,
            shard=None if shard is None else shard_to_proto(shard),
        )
        for attempt in range(_DAMAGED_ATTEMPTS):
            try:
                return self._put(batch, header, layout, shard, timeout_s)
            except grpc.RpcError as error:
                outcome = classify(error)
                damaged = isinstance(outcome, Refusal) and outcome.reason is Reason.DIGEST_MISMATCH
                if not damaged or attempt == _DAMAGED_ATTEMPTS - 1:
                    raise
                self.resent_damaged += 1
                log.warning("put of micro-batch %s is repeated: %s", batch.id, outcome)
        raise AssertionError("the last attempt returns or raises")

    def _put(
        self,
        batch: MicroBatch,
        header: pb.PutMicroBatchHeader,
        layout: Layout,
        shard: ShardRange | None,
        timeout_s: float,
    ) -> pb.PutMicroBatchResponse:
        key = _upload_key(header)
        with self._lock:
            broken = key in self._broken
        header.resume_from = 0
        if broken and layout.total_bytes:
            parts: list[Part] = [pb.PutMicroBatchRequest(header=header), end_part(layout)]
            there = self._call(iter(parts), timeout_s)
            if there.stored:
                self._settled(key)
                return there
            header.resume_from = there.received_bytes
            self.resumed += 1
            log.warning(
                "put of micro-batch %s goes on at byte %d of %d",
                batch.id,
                there.received_bytes,
                layout.total_bytes,
            )
        parts_sent = upload_parts(batch, header, layout, shard=shard, chunk_bytes=self._chunk_bytes)
        try:
            response = self._call(parts_sent, timeout_s)
        except grpc.RpcError as error:
            if isinstance(classify(error), Refusal):
                self._settled(key)
            else:
                with self._lock:
                    self._broken[key] = None
                    while len(self._broken) > _BROKEN_KEPT:
                        self._broken.popitem(last=False)
            raise
        self._settled(key)
        return response

    def _settled(self, key: bytes) -> None:
        with self._lock:
            self._broken.pop(key, None)

    def close(self) -> None:
        """Let go of unused send buffers."""
        self._arenas.trim()


def _upload_key(header: pb.PutMicroBatchHeader) -> bytes:
    """What two uploads of the same content have in common: manifest and shard."""
    key = pb.PutMicroBatchHeader(manifest=header.manifest)
    if header.HasField("shard"):
        key.shard.CopyFrom(header.shard)
    return key.SerializeToString(deterministic=True)


class PutReceiver:
    """The worker's half: takes one upload, of any plane, into the store."""

    def __init__(
        self,
        store: MicroBatchStore,
        limits: WireLimits,
        check: Callable[[pb.PutMicroBatchHeader], None],
        validate: Callable[[MicroBatch], None],
        *,
        wait_s: float = 600.0,
        shared_memory: SlotReader | None = None,
    ) -> None:
        """`check` raises for a header of the wrong run, epoch or phase; `validate` for bad values.

        `wait_s`: how long a put may wait for room. `shared_memory`: None takes streams only.
        """
        self._store = store
        self._limits = limits
        self._check = check
        self._validate = validate
        self._wait_s = wait_s
        self._shared_memory = shared_memory
        self._arenas = ArenaPool(store.stats().limit_bytes)

    def warm(self, buffer_bytes: int, count: int) -> int:
        """Make buffers ready for uploads of this size; returns how many. Blocks; any thread."""
        return self._arenas.warm(buffer_bytes, count)

    def take(
        self, parts: Iterator[Part], wanted: Callable[[], bool] = lambda: True
    ) -> pb.PutMicroBatchResponse:
        """Take one upload and answer when it is checked. `wanted`: whether the caller is there.

        Raises `WireError`s and what `check` raises. A stream that breaks off can be resumed;
        nothing else of a failed upload is kept.
        """
        first = next(parts, None)
        if isinstance(first, Chunk) or first is None or first.WhichOneof("part") != "header":
            raise CodecError("an upload starts with its header")
        started_s = time.monotonic()
        header = first.header
        try:
            self._check(header)
        except BaseException:
            if self._shared_memory is not None and header.HasField("shared_memory"):
                self._shared_memory.let_go(header.shared_memory)
            raise
        manifest = header.manifest
        check_manifest(manifest, self._limits)
        shard = check_shard(manifest, header.shard) if header.HasField("shard") else None
        upload = _Upload(header, shard, layout_of(manifest, shard))
        if header.HasField("shared_memory"):
            return self._take_slot(parts, upload, wanted, started_s)
        return self._take_stream(parts, upload, wanted, started_s)

    # -- the stream plane -------------------------------------------------------------------------

    def _take_stream(
        self,
        parts: Iterator[Part],
        upload: _Upload,
        wanted: Callable[[], bool],
        started_s: float,
    ) -> pb.PutMicroBatchResponse:
        total = upload.layout.total_bytes
        second = next(parts, None)
        if total and _is_end(second):
            self._check_end(second, total)
            ready, received = self._store.received_bytes(upload.ref)
            return pb.PutMicroBatchResponse(
                stored=ready, duplicate=ready, received_bytes=total if ready else received
            )
        if second is None:
            raise CodecError(f"the upload of micro-batch {upload.ref} broke off after its header")
        if not self._reserve(upload, wanted):
            return pb.PutMicroBatchResponse(stored=True, received_bytes=total, duplicate=True)
        try:
            placer = self._store.placer(upload.ref, lambda: self._place(upload.layout))
            ticket = placer.take_over()
            placer.rewind(ticket, upload.header.resume_from)
            self._receive(_prepend(second, parts), placer, ticket)
            self._check(upload.header)  # An epoch that ended meanwhile brings nothing in.
        except _BrokeOff as error:
            raise CodecError(str(error)) from error
        except SupersededError:
            return self._other(upload, wanted)
        except (WireError, MemoryError):
            self._store.abandon(upload.ref)
            raise
        batch = upload.batch(placer)
        readable_s = time.monotonic()
        try:
            return self._settle(upload, batch, started_s, readable_s, padding=False)
        except SupersededError:
            return self._other(upload, wanted)

    def _other(self, upload: _Upload, wanted: Callable[[], bool]) -> pb.PutMicroBatchResponse:
        """The same micro-batch came by another stream as well: once is enough."""
        if self._store.await_other(upload.ref, wanted):
            size = upload.layout.total_bytes
            return pb.PutMicroBatchResponse(stored=True, received_bytes=size, duplicate=True)
        raise SupersededError(
            f"micro-batch {upload.ref} was dropped, or another upload of it took over and broke off"
        )

    def _place(self, layout: Layout) -> Placer:
        buffer, fresh = self._arenas.take(layout.buffer_bytes)
        layout.fill_padding(buffer, zeroed=fresh)
        return Placer(layout, buffer)

    def _receive(self, parts: Iterator[Part], placer: Placer, ticket: int) -> None:
        total = placer.layout.total_bytes
        try:
            for part in parts:
                if isinstance(part, Chunk):
                    if part.size > self._limits.max_chunk_bytes:
                        raise CodecError(
                            f"a chunk has {part.size} bytes; at most"
                            f" {self._limits.max_chunk_bytes} are taken"
                        )
                    offset = part.offset
                    for piece in part.pieces:
                        placer.write(ticket, offset, piece)
                        offset += len(piece)
                    continue
                self._check_end(part, total)
                placer.finish(ticket)
                return
        except grpc.RpcError as error:
            raise _BrokeOff(f"the upload broke off: {error}") from error
        raise _BrokeOff(
            f"the upload broke off after {placer.received_bytes} of {total} bytes: put it again,"
            " and it goes on from there"
        )

    # -- both planes ------------------------------------------------------------------------------

    def _reserve(self, upload: _Upload, wanted: Callable[[], bool]) -> bool:
        return self._store.reserve(
            upload.ref,
            size=upload.layout.buffer_bytes,
            key=_upload_key(upload.header),
            wait_s=self._wait_s,
            wanted=wanted,
        )

    def _settle(
        self,
        upload: _Upload,
        batch: MicroBatch,
        started_s: float,
        readable_s: float,
        *,
        padding: bool,
    ) -> pb.PutMicroBatchResponse:
        # Not a closure: a failed frame's function would keep the arrays alive in its cells.
        self._store.settle(
            upload.ref, batch, functools.partial(self._judge, upload, batch, padding)
        )
        return pb.PutMicroBatchResponse(
            stored=True,
            received_bytes=upload.layout.total_bytes,
            receive_seconds=readable_s - started_s,
            check_seconds=time.monotonic() - readable_s,
        )

    def _judge(self, upload: _Upload, batch: MicroBatch, padding: bool) -> None:
        check_digest(upload.header.manifest, batch, upload.shard)
        if padding:
            check_padding(batch)
        self._validate(batch)

    @staticmethod
    def _check_end(part: Part | None, total: int) -> None:
        if part is None or not _is_end(part):
            raise CodecError("an upload has one header, then chunks, then its end")
        assert not isinstance(part, Chunk)
        if part.end.total_bytes != total:
            raise CodecError(
                f"the upload's end says {part.end.total_bytes} bytes; its manifest says {total}"
            )

    # -- the shared-memory plane ------------------------------------------------------------------

    def _take_slot(
        self,
        parts: Iterator[Part],
        upload: _Upload,
        wanted: Callable[[], bool],
        started_s: float,
    ) -> pb.PutMicroBatchResponse:
        if self._shared_memory is None:
            raise CodecError("this worker does not offer the shared-memory plane: use the stream")
        slot = upload.header.shared_memory
        try:
            self._check_end(next(parts, None), upload.layout.total_bytes)
            if not self._reserve(upload, wanted):
                return pb.PutMicroBatchResponse(
                    stored=True, received_bytes=upload.layout.total_bytes, duplicate=True
                )
            return self._share(self._shared_memory, upload, started_s)
        except WireError as error:
            # The failed frames still hold the arrays: nobody reads the slot once they are gone.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            # Also when refused: a slot that nobody reads is the sender's again.
            self._shared_memory.let_go(slot)

    def _share(
        self, shared_memory: SlotReader, upload: _Upload, started_s: float
    ) -> pb.PutMicroBatchResponse:
        try:
            buffer = shared_memory.lease(upload.header.shared_memory, upload.layout.buffer_bytes)
        except BaseException:
            self._store.abandon(upload.ref)
            raise
        arrays = upload.layout.arrays(buffer)
        batch = batch_from(upload.header.manifest, arrays, upload.shard)
        return self._settle(upload, batch, started_s, time.monotonic(), padding=True)


class _BrokeOff(Exception):
    """A stream without its end."""


class _Upload:
    """One accepted header."""

    def __init__(
        self, header: pb.PutMicroBatchHeader, shard: ShardRange | None, layout: Layout
    ) -> None:
        self.header = header
        self.shard = shard
        self.layout = layout
        manifest = header.manifest
        self.ref = BatchRef(step=manifest.id.step, index=manifest.id.index, digest=manifest.digest)

    def batch(self, placer: Placer) -> MicroBatch:
        """The micro-batch on the placer's arrays, which nobody may write any more."""
        buffer = placer.buffer.view()
        buffer.flags.writeable = False
        return batch_from(self.header.manifest, self.layout.arrays(buffer), self.shard)


def _is_end(part: Part | None) -> bool:
    return part is not None and not isinstance(part, Chunk) and part.WhichOneof("part") == "end"


def _prepend(first: Part, rest: Iterator[Part]) -> Iterator[Part]:
    yield first
    yield from rest
