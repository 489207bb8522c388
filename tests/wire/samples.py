"""Micro-batches of any shape for the wire's tests, and a bare server that takes puts."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import numpy as np

from prestage.microbatch import FIELDS, Array, MicroBatch, MicroBatchId
from prestage.protocol import BatchRef
from prestage.tensor.v1 import tensor_pb2 as pb
from prestage.wire.channel import bind, make_server, open_channel
from prestage.wire.digest import content_digest
from prestage.wire.errors import REASON_OF_ERROR, WireError, abort_with
from prestage.wire.limits import WireLimits
from prestage.wire.planes import SlotReader
from prestage.wire.store import MicroBatchStore
from prestage.wire.stream_plane import Part, PutReceiver, put_method_handler
from prestage.wire.validate import check_values


def sample(
    *,
    row_lengths: Sequence[int] = (60, 64, 17, 0),
    tokens_per_row: int = 64,
    routing: tuple[int, int] | None = (3, 2),
    index: int = 0,
    step: int = 0,
    seed: int = 0,
) -> MicroBatch:
    """A valid micro-batch with every field, padding as the field table says."""
    rng = np.random.default_rng((seed, step, index))
    rows = len(row_lengths)
    real = np.arange(tokens_per_row)[None, :] < np.asarray(row_lengths)[:, None]
    arrays: dict[str, Array] = {}
    for spec in FIELDS.values():
        trailing: tuple[int, ...] = ()
        if spec.trailing_dims:
            if routing is None:
                continue
            trailing = routing
        shape = (rows, tokens_per_row, *trailing)
        if spec.dtype.kind == "f":
            values: Array = -rng.random(shape).astype(spec.dtype)
        else:
            values = rng.integers(0, 2, shape).astype(spec.dtype)
        arrays[spec.name] = values
    arrays["segment_ids"] = np.ones((rows, tokens_per_row), np.int32)
    arrays["positions"] = np.broadcast_to(
        np.arange(tokens_per_row, dtype=np.int32), (rows, tokens_per_row)
    ).copy()
    arrays["loss_mask"][:, 0] = 0
    for name, values in arrays.items():
        values[~real] = FIELDS[name].pad_value
    lengths = tuple(row_lengths)
    return MicroBatch(
        id=MicroBatchId(run_id="run", step=step, index=index),
        rows=rows,
        tokens_per_row=tokens_per_row,
        row_lengths=lengths,
        arrays=arrays,
        digest=content_digest(
            arrays, rows=rows, tokens_per_row=tokens_per_row, row_lengths=lengths
        ),
    )


def changed(batch: MicroBatch, field: str, where: tuple[int, ...], value: float) -> MicroBatch:
    """A copy with one value changed; the digest stays."""
    array = batch.arrays[field].copy()
    array[where] = value
    return replace(batch, arrays={**batch.arrays, field: array})


def ref_of(batch: MicroBatch) -> BatchRef:
    return BatchRef(step=batch.id.step, index=batch.id.index, digest=batch.digest)


def same_arrays(left: MicroBatch, right: MicroBatch) -> bool:
    return left.arrays.keys() == right.arrays.keys() and all(
        np.array_equal(left.arrays[name], right.arrays[name]) for name in left.arrays
    )


@dataclass(kw_only=True)
class Rig:
    """A bare worker end: a server with a store, and a channel to it."""

    address: str
    store: MicroBatchStore
    channel: grpc.Channel
    needed: list[int]  # [step, index] of the next micro-batch.
    epoch: list[int]


@contextlib.contextmanager
def put_server(
    *,
    limit_bytes: int = 64 << 20,
    limits: WireLimits | None = None,
    wrap: Callable[[Iterator[Part]], Iterator[Part]] = lambda parts: parts,
    shared_memory: SlotReader | None = None,
    wait_s: float = 20.0,
    vocab_size: int = 0,
) -> Iterator[Rig]:
    """`wrap` sees the parts of every upload as they come."""
    needed, epoch = [0, 0], [1]
    store = MicroBatchStore(limit_bytes, lambda: (needed[0], needed[1]))

    def check(header: pb.PutMicroBatchHeader) -> None:
        if header.epoch != epoch[0]:
            raise WireError(f"epoch {header.epoch} is over")

    receiver = PutReceiver(
        store,
        limits or WireLimits(),
        check,
        lambda batch: check_values(batch, vocab_size=vocab_size),
        wait_s=wait_s,
        shared_memory=shared_memory,
    )

    def handle(parts: Iterator[Part], context: grpc.ServicerContext) -> pb.PutMicroBatchResponse:
        try:
            return receiver.take(wrap(parts), context.is_active)
        except WireError as error:
            abort_with(context, REASON_OF_ERROR[type(error)], str(error))

    with tempfile.TemporaryDirectory(prefix="ps-") as folder:
        address = f"unix://{Path(folder) / 'put.sock'}"
        server = make_server(8, name="put")
        server.add_generic_rpc_handlers((put_method_handler(handle),))
        bind(server, "--listen", address)
        server.start()
        channel = open_channel(address)
        try:
            yield Rig(address=address, store=store, channel=channel, needed=needed, epoch=epoch)
        finally:
            channel.close()
            server.stop(0).wait()
