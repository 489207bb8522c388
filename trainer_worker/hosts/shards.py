"""Parts of micro-batches: cut by the leader, fetched and checked by the follower that trains them.

A part travels as an ordinary upload of a shard, so a follower checks it by the same block digests as
a worker checks what an orchestrator puts, against the digest of the whole micro-batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prestage.hosts.v1 import hosts_pb2 as pb
from prestage.microbatch import MicroBatch, MicroBatchId
from prestage.protocol import BatchRef
from prestage.tensor.v1 import tensor_pb2
from prestage.wire.codec import layout_of_batch, make_manifest
from prestage.wire.digest import block_tokens
from prestage.wire.errors import DamagedError, SupersededError, WireError
from prestage.wire.layout import ShardRange
from prestage.wire.limits import WireLimits
from prestage.wire.store import MicroBatchStore
from prestage.wire.stream_plane import (
    PutReceiver,
    parse_parts,
    serialize_part,
    shard_to_proto,
    upload_parts,
)
from trainer_worker.hosts.errors import OutOfStep

log = logging.getLogger("prestage.hosts")

_ATTEMPTS: Final = 3

Fetch = Callable[[pb.MicroBatchRef], Iterator[bytes]]
"""Opens the stream of this host's part."""


def ref_of(batch: MicroBatch) -> pb.MicroBatchRef:
    """Raises `ValueError` for a micro-batch without a digest."""
    if not batch.digest:
        raise ValueError(f"micro-batch {batch.id} has no digest")
    return pb.MicroBatchRef(
        run_id=batch.id.run_id, step=batch.id.step, index=batch.id.index, digest=batch.digest
    )


def store_ref(ref: pb.MicroBatchRef) -> BatchRef:
    return BatchRef(step=ref.step, index=ref.index, digest=ref.digest)


def id_of(ref: pb.MicroBatchRef) -> MicroBatchId:
    return MicroBatchId(run_id=ref.run_id, step=ref.step, index=ref.index)


def cut(batch: MicroBatch, shard: ShardRange) -> MicroBatch:
    """One host's part: views on the arrays, with the id and the digest of the whole."""
    rows = slice(shard.row_start, shard.row_start + shard.row_count)
    tokens = slice(shard.token_start, shard.token_start + shard.token_count)
    return MicroBatch(
        id=batch.id,
        rows=shard.row_count,
        tokens_per_row=shard.token_count,
        row_lengths=shard.row_lengths(batch.row_lengths),
        arrays={name: array[rows, tokens] for name, array in batch.arrays.items()},
        digest=batch.digest,
    )


def check_shards(shards: Sequence[ShardRange], *, rows: int, tokens_per_row: int) -> None:
    """The parts make up the micro-batch and can be sent. Several hosts may have the same part.

    Raises `ValueError`.
    """
    parts = sorted(set(shards), key=lambda part: (part.row_start, part.token_start))
    cells = sum(part.row_count * part.token_count for part in parts)
    inside = all(
        part.row_count > 0
        and part.token_count > 0
        and 0 <= part.row_start <= rows - part.row_count
        and 0 <= part.token_start <= tokens_per_row - part.token_count
        for part in parts
    )
    apart = not any(_overlap(one, other) for i, one in enumerate(parts) for other in parts[:i])
    if not (inside and apart and cells == rows * tokens_per_row):
        raise ValueError(
            f"the hosts' parts of [{rows}, {tokens_per_row}] do not make it up: {parts}"
        )
    block = block_tokens(tokens_per_row)
    for part in parts:
        if part.token_start % block:
            raise ValueError(
                f"a host's part of rows of {tokens_per_row} tokens starts at token"
                f" {part.token_start}, inside a block of {block} that is hashed as one: use longer"
                " rows, or a mesh whose context axis stays within a host"
            )


def _overlap(one: ShardRange, other: ShardRange) -> bool:
    return (
        one.row_start < other.row_start + other.row_count
        and other.row_start < one.row_start + one.row_count
        and one.token_start < other.token_start + other.token_count
        and other.token_start < one.token_start + one.token_count
    )


class Offers:
    """The leader's side: micro-batches that followers may fetch now. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offers: dict[bytes, _Offer] = {}

    def offer(self, batch: MicroBatch, shards: Sequence[ShardRange]) -> pb.MicroBatchRef:
        """Let the followers have it until `withdraw`. Costs nothing until one asks for its part.

        `shards`: by process.
        """
        ref = ref_of(batch)
        key = ref.SerializeToString(deterministic=True)
        with self._lock:
            self._offers.setdefault(key, _Offer(batch, tuple(shards))).users += 1
        return ref

    def withdraw(self, ref: pb.MicroBatchRef) -> None:
        """Once for each `offer`."""
        key = ref.SerializeToString(deterministic=True)
        with self._lock:
            known = self._offers[key]
            known.users -= 1
            if not known.users:
                del self._offers[key]

    def upload(self, ref: pb.MicroBatchRef, process_id: int) -> Iterator[bytes]:
        """The messages of one host's part. Raises `KeyError` when it is not on offer."""
        with self._lock:
            offer = self._offers[ref.SerializeToString(deterministic=True)]
        shard = offer.shards[process_id]
        header = tensor_pb2.PutMicroBatchHeader(
            manifest=offer.manifest(), shard=shard_to_proto(shard)
        )
        layout = layout_of_batch(offer.batch, shard)
        return map(serialize_part, upload_parts(offer.batch, header, layout, shard=shard))


class _Offer:
    def __init__(self, batch: MicroBatch, shards: tuple[ShardRange, ...]) -> None:
        self.batch = batch
        self.shards = shards
        self.users = 0
        self._making = threading.Lock()
        self._manifest: tensor_pb2.Manifest | None = None

    def manifest(self) -> tensor_pb2.Manifest:
        """With the digest of each block, which takes a pass over all bytes: made once."""
        with self._making:
            if self._manifest is None:
                self._manifest = make_manifest(self.batch, with_blocks=True)
            return self._manifest


class ShardKeeper:
    """The follower's side: its parts, checked, until their step closes. Safe from any thread."""

    def __init__(self, limit_bytes: int, fetch: Fetch) -> None:
        self._next = (0, 0)
        self._store = MicroBatchStore(limit_bytes, lambda: self._next)
        self._receiver = PutReceiver(
            self._store, WireLimits(), lambda header: None, lambda batch: None
        )
        self._fetch = fetch
        self._lock = threading.Lock()
        self.received_bytes = 0
        self.received_parts = 0
        self.damaged = 0

    def hold(self, hold: pb.Hold) -> pb.Held:
        """Fetch and check the part that the leader names, unless it is here. Waits for room."""
        started_s = time.monotonic()
        held = pb.Held(batch=hold.batch)
        try:
            held.received_bytes = self._bring(hold)
        except (WireError, OutOfStep, MemoryError) as error:
            held.error = f"{type(error).__name__}: {error}"
        held.seconds = time.monotonic() - started_s
        return held

    def _bring(self, hold: pb.Hold) -> int:
        ready, _ = self._store.received_bytes(store_ref(hold.batch))
        if ready:
            return 0
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._take(hold)
            except DamagedError as error:
                self.damaged += 1
                log.warning("fetched again: %s", error)
            except SupersededError as error:
                # A restore or the end of a step cleared what was on its way: the leader still waits.
                log.warning("fetched again: %s", error)
        return self._take(hold)

    def _take(self, hold: pb.Hold) -> int:
        counted = _Counted(_expected(self._fetch(hold.batch), hold))
        answer = self._receiver.take(parse_parts(counted))
        if not answer.stored:
            raise OutOfStep(f"the part of {id_of(hold.batch)} did not arrive whole")
        if answer.duplicate:
            return 0
        with self._lock:
            self.received_bytes += counted.size
            self.received_parts += 1
        return counted.size

    def get(self, ref: pb.MicroBatchRef) -> MicroBatch:
        """Raises `WireError` when it is not held."""
        return self._store.get(store_ref(ref))

    def release(self, ref: pb.MicroBatchRef) -> None:
        """It is not needed any more."""
        self._store.release(store_ref(ref))

    def needs(self, step: int, index: int) -> None:
        """What is trained next: room for it is always there, and earlier steps are over."""
        self._next = (step, index)
        self._store.release_before(step)

    def clear(self) -> None:
        self._store.clear()


def _expected(messages: Iterator[bytes], hold: pb.Hold) -> Iterator[bytes]:
    """Raises `OutOfStep` when the upload is of another micro-batch or part."""
    first = next(messages, b"")
    request = tensor_pb2.PutMicroBatchRequest.FromString(first)
    manifest = request.header.manifest
    found = pb.MicroBatchRef(
        run_id=manifest.id.run_id,
        step=manifest.id.step,
        index=manifest.id.index,
        digest=manifest.digest,
    )
    if found != hold.batch or request.header.shard != hold.shard:
        raise OutOfStep(f"asked for a part of {id_of(hold.batch)}, and another one came")
    yield first
    yield from messages


class _Counted:
    """An iterator of messages that knows how many bytes it gave out."""

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._messages = messages
        self.size = 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        message = next(self._messages)
        self.size += len(message)
        return message
