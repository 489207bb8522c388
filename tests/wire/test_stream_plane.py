"""The stream plane over a real gRPC connection: whole, broken, damaged, resumed, full, fenced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prestage.protocol import Reason
from prestage.tensor.v1 import tensor_pb2 as pb
from prestage.wire.channel import open_channel
from prestage.wire.codec import layout_of_batch, make_manifest
from prestage.wire.digest import batch_digest
from prestage.wire.errors import (
    CodecError,
    DamagedError,
    MissingError,
    Refusal,
    Unknown,
    classify,
)
from prestage.wire.layout import ShardRange
from prestage.wire.limits import WireLimits
from prestage.wire.store import MicroBatchStore
from prestage.wire.stream_plane import (
    PUT_METHOD,
    Chunk,
    Part,
    PutReceiver,
    StreamSender,
    end_part,
    parse_part,
    serialize_part,
    upload_parts,
)
from tests.wire.samples import Rig, changed, put_server, ref_of, same_arrays, sample


def put(rig: Rig, sender: StreamSender, batch: object, **more: object) -> pb.PutMicroBatchResponse:
    return sender.put(  # type: ignore[arg-type]
        batch, epoch=rig.epoch[0], incarnation="i", timeout_s=20.0, **more
    )


def refusal(error: grpc.RpcError) -> Refusal:
    outcome = classify(error)
    assert isinstance(outcome, Refusal), outcome
    return outcome


# -- messages -----------------------------------------------------------------------------------


@given(offset=st.integers(0, 2**64 - 1), pieces=st.lists(st.binary(min_size=1), min_size=1))
def test_a_chunk_is_what_protobuf_writes(offset: int, pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    chunk = Chunk(offset, *map(memoryview, pieces))
    library = pb.PutMicroBatchRequest(chunk=pb.PutMicroBatchChunk(offset=offset, data=data))
    assert serialize_part(chunk) == library.SerializeToString()
    parsed = parse_part(library.SerializeToString())
    assert isinstance(parsed, Chunk)
    assert (parsed.offset, b"".join(parsed.pieces)) == (offset, data)


@given(message=st.binary(max_size=200))
def test_any_bytes_are_a_part_or_a_clear_error(message: bytes) -> None:
    try:
        part = parse_part(message)
    except CodecError as error:
        assert len(str(error)) < 400
        return
    library = pb.PutMicroBatchRequest()
    library.ParseFromString(message)
    if isinstance(part, Chunk):
        assert library.chunk.offset == part.offset
        assert library.chunk.data == b"".join(part.pieces)
    else:
        assert part == library


@given(prefix=st.binary(max_size=12), cut=st.integers(0, 40))
def test_a_cut_or_odd_chunk_agrees_with_the_library(prefix: bytes, cut: int) -> None:
    whole = pb.PutMicroBatchRequest(chunk=pb.PutMicroBatchChunk(offset=300, data=b"x" * 20))
    message = (whole.SerializeToString() + prefix)[:cut]
    library = pb.PutMicroBatchRequest()
    try:
        library.ParseFromString(message)
    except Exception:
        with pytest.raises(CodecError):
            parse_part(message)
        return
    part = parse_part(message)
    if isinstance(part, Chunk):
        assert library.chunk.data == b"".join(part.pieces)
    else:
        assert part == library


# -- whole uploads ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row_lengths", "routing"),
    [((64, 64), None), ((60, 64, 17, 0), (3, 2)), ((1,), (1, 1)), ((0, 0), (2, 2))],
)
def test_a_micro_batch_arrives_whole_and_readonly(
    row_lengths: tuple[int, ...], routing: tuple[int, int] | None
) -> None:
    lengths = tuple(sorted(row_lengths, reverse=True))
    batch = sample(row_lengths=lengths, routing=routing)
    with put_server() as rig:
        response = put(rig, StreamSender(rig.channel, chunk_bytes=1000), batch)
        assert response.stored
        assert response.received_bytes == layout_of_batch(batch).total_bytes
        got = rig.store.get(ref_of(batch))
        assert same_arrays(got, batch)
        assert got.row_lengths == lengths
        assert not any(array.flags.writeable for array in got.arrays.values())
        again = put(rig, StreamSender(rig.channel), batch)
        assert again.duplicate


def test_any_protobuf_client_can_put() -> None:
    batch = sample()
    with put_server() as rig:
        call = rig.channel.stream_unary(
            PUT_METHOD,
            request_serializer=pb.PutMicroBatchRequest.SerializeToString,
            response_deserializer=pb.PutMicroBatchResponse.FromString,
        )
        header = pb.PutMicroBatchHeader(manifest=make_manifest(batch), epoch=1)
        layout = layout_of_batch(batch)

        def messages() -> Iterator[pb.PutMicroBatchRequest]:
            for part in upload_parts(batch, header, layout, chunk_bytes=777):
                yield pb.PutMicroBatchRequest.FromString(serialize_part(part))

        assert call(messages()).stored
        assert same_arrays(rig.store.get(ref_of(batch)), batch)


def test_a_reserved_buffer_is_sent_as_it_is() -> None:
    batch = sample()
    with put_server() as rig:
        sender = StreamSender(rig.channel)
        reserved = sender.reserve(layout_of_batch(batch))
        reserved.fill_padding()
        arrays = reserved.arrays()
        for name, array in batch.arrays.items():
            arrays[name][:] = array
        put(rig, sender, replace(batch, arrays=arrays))
        assert same_arrays(rig.store.get(ref_of(batch)), batch)


@pytest.mark.parametrize("token_parts", [1, 2])
def test_d8_a_host_receives_its_rows_and_tokens_only(token_parts: int) -> None:
    batch = sample(row_lengths=(1024, 700, 300, 0), tokens_per_row=1024, routing=(1, 1))
    shard = ShardRange(
        row_start=1,
        row_count=2,
        token_start=512 * (token_parts - 1),
        token_count=1024 // token_parts,
    )
    with put_server() as rig:
        response = put(rig, StreamSender(rig.channel), batch, shard=shard)
        assert response.received_bytes == layout_of_batch(batch, shard).total_bytes
        got = rig.store.get(ref_of(batch))
        assert (got.rows, got.tokens_per_row) == (2, 1024 // token_parts)
        columns = slice(shard.token_start, shard.token_start + shard.token_count)
        for name, array in batch.arrays.items():
            assert (got.arrays[name] == array[1:3, columns]).all()
        with pytest.raises(grpc.RpcError) as error:
            put(rig, StreamSender(rig.channel), batch)
        assert "another manifest or shard" in refusal(error.value).message


# -- broken, damaged and unfit uploads ----------------------------------------------------------


def test_d15_a_lost_upload_goes_on_where_it_broke_off() -> None:
    batch = sample(row_lengths=(64,) * 8, routing=(4, 4))
    layout = layout_of_batch(batch)
    there, sent = threading.Event(), [0]

    def watch(parts: Iterator[Part]) -> Iterator[Part]:
        for number, part in enumerate(parts):
            if isinstance(part, Chunk):
                sent[0] += part.size
            yield part
            if number == 8:
                there.set()  # Eight chunks are in their places.

    with put_server(wrap=watch) as rig:
        header = pb.PutMicroBatchHeader(manifest=make_manifest(batch), epoch=1)

        def stuck() -> Iterator[Part]:
            for number, part in enumerate(upload_parts(batch, header, layout, chunk_bytes=1000)):
                if number == 9:
                    there.wait(20)
                    lost.wait(20)
                yield part

        lost = threading.Event()
        sender = StreamSender(rig.channel, chunk_bytes=1000)
        call = sender._call._call.future(stuck(), timeout=20)  # type: ignore[attr-defined]
        assert there.wait(20)
        call.cancel()
        lost.set()
        with pytest.raises(MissingError):
            rig.store.get(ref_of(batch))
        # The sender does not know how far it came: it asks, and sends the rest.
        sender._broken[_key(batch)] = None
        sent[0] = 0
        assert put(rig, sender, batch).stored
        assert sender.resumed == 1
        assert same_arrays(rig.store.get(ref_of(batch)), batch)
        assert sent[0] == layout.total_bytes - 8000


def test_a_lost_connection_is_remembered_until_the_upload_is_whole() -> None:
    batch = sample()
    sender = StreamSender(open_channel("unix:///tmp/prestage-nobody.sock"))
    with pytest.raises(grpc.RpcError) as error:
        sender.put(batch, epoch=1, incarnation="i", timeout_s=0.2)
    assert isinstance(classify(error.value), Unknown)
    assert list(sender._broken) == [_key(batch)]
    with put_server() as rig:
        sender._call = StreamSender(rig.channel)._call
        assert put(rig, sender, batch).stored
        assert not sender._broken
        assert same_arrays(rig.store.get(ref_of(batch)), batch)


def _key(batch: object) -> bytes:
    manifest = make_manifest(batch)  # type: ignore[arg-type]
    return pb.PutMicroBatchHeader(manifest=manifest).SerializeToString(deterministic=True)


def test_a_stream_without_its_end_is_no_upload() -> None:
    """A client stream that fails can look like a clean end to the server."""
    batch = sample()
    with put_server() as rig:
        call = rig.channel.stream_unary(
            PUT_METHOD,
            request_serializer=serialize_part,
            response_deserializer=pb.PutMicroBatchResponse.FromString,
        )
        header = pb.PutMicroBatchHeader(manifest=make_manifest(batch), epoch=1)
        parts = list(upload_parts(batch, header, layout_of_batch(batch)))
        for cut in range(len(parts)):
            with pytest.raises(grpc.RpcError) as error:
                call(iter(parts[:cut]), timeout=20)
            assert refusal(error.value).reason is Reason.INVALID_REQUEST
            assert rig.store.stats().refs == ()
        assert call(iter(parts), timeout=20).stored


def test_header_and_end_ask_how_far_an_upload_came() -> None:
    batch = sample()
    layout = layout_of_batch(batch)
    header = pb.PutMicroBatchHeader(manifest=make_manifest(batch), epoch=1)
    ask = [pb.PutMicroBatchRequest(header=header), end_part(layout)]
    store = MicroBatchStore(64 << 20, lambda: (0, 0))
    receiver = PutReceiver(store, WireLimits(), lambda header: None, lambda batch: None)
    assert receiver.take(iter(ask)) == pb.PutMicroBatchResponse()
    parts = list(upload_parts(batch, header, layout, chunk_bytes=500))
    with pytest.raises(CodecError, match="broke off after 1000 of"):
        receiver.take(iter(parts[:3]))
    assert receiver.take(iter(ask)) == pb.PutMicroBatchResponse(received_bytes=1000)
    assert receiver.take(iter(parts)).stored
    there = receiver.take(iter(ask))
    assert (there.stored, there.received_bytes) == (True, layout.total_bytes)


def test_damaged_bytes_are_sent_again_and_never_used() -> None:
    batch = sample()
    hits = [2]  # Uploads to damage.

    def damage(parts: Iterator[Part]) -> Iterator[Part]:
        hits[0] -= 1
        for part in parts:
            if isinstance(part, Chunk) and hits[0] >= 0:
                data = bytearray(b"".join(part.pieces))
                data[len(data) // 2] ^= 1
                yield Chunk(part.offset, memoryview(data))
            else:
                yield part

    with put_server(wrap=damage) as rig:
        sender = StreamSender(rig.channel)
        assert put(rig, sender, batch).stored
        assert sender.resent_damaged == 2
        assert rig.store.stats().failed == 2
        assert same_arrays(rig.store.get(ref_of(batch)), batch)
        hits[0] = 99
        other = sample(index=1)
        with pytest.raises(grpc.RpcError) as error:
            put(rig, sender, other)
        answer = refusal(error.value)
        assert (answer.code, answer.reason) == (
            grpc.StatusCode.DATA_LOSS,
            Reason.DIGEST_MISMATCH,
        )
        with pytest.raises(DamagedError, match="put it again"):
            rig.store.get(ref_of(other))


def test_bad_values_are_refused_and_leave_nothing() -> None:
    batch = sample()
    bad = changed(batch, "advantages", (0, 3), float("nan"))
    bad = replace(bad, digest=batch_digest(bad))
    with put_server() as rig:
        with pytest.raises(grpc.RpcError) as error:
            put(rig, StreamSender(rig.channel), bad)
        answer = refusal(error.value)
        assert (answer.code, answer.reason) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            Reason.INVALID_BATCH,
        )
        assert "advantages" in answer.message
        assert rig.store.stats().stored_bytes == 0


def test_a_chunk_over_the_limit_is_refused() -> None:
    batch = sample(routing=(8, 8))
    with put_server(limits=WireLimits(max_chunk_bytes=1000)) as rig:
        with pytest.raises(grpc.RpcError) as error:
            put(rig, StreamSender(rig.channel, chunk_bytes=1001), batch)
        assert "at most 1000 are taken" in refusal(error.value).message
        assert put(rig, StreamSender(rig.channel, chunk_bytes=1000), batch).stored


def test_an_epoch_that_ends_during_an_upload_brings_nothing_in() -> None:
    batch = sample()

    def fence(parts: Iterator[Part]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, Chunk):
                rig.epoch[0] = 2
            yield part

    with put_server(wrap=fence) as rig:
        with pytest.raises(grpc.RpcError) as error:
            put(rig, StreamSender(rig.channel), batch)
        assert "epoch 1 is over" in refusal(error.value).message
        assert rig.store.stats().refs == ()
        assert put(rig, StreamSender(rig.channel), batch).stored


def test_a_dead_server_is_an_unknown_outcome() -> None:
    batch = sample()
    with put_server() as rig:
        sender = StreamSender(rig.channel)
    with pytest.raises((grpc.RpcError, ValueError)) as error:
        put(rig, sender, batch)
    if isinstance(error.value, grpc.RpcError):
        assert isinstance(classify(error.value), Unknown)


# -- the store ----------------------------------------------------------------------------------


def test_a_full_store_makes_the_sender_wait_and_the_next_one_gets_in() -> None:
    batches = [sample(index=index) for index in range(4)]
    size = layout_of_batch(batches[0]).buffer_bytes
    with put_server(limit_bytes=3 * size) as rig:
        sender = StreamSender(rig.channel)
        put(rig, sender, batches[1])  # Room for (0, 0) stays.
        put(rig, sender, batches[2])
        done = threading.Event()
        thread = threading.Thread(target=lambda: (put(rig, sender, batches[3]), done.set()))
        thread.start()
        try:
            while rig.store.stats().waited == 0:
                assert thread.is_alive()
            put(rig, sender, batches[0])
            assert not done.is_set()
            assert rig.store.stats().stored_bytes == 3 * size
            rig.needed[:] = [0, 3]  # The first three were trained: they may go.
            with rig.store._changed:
                rig.store._changed.notify_all()
            assert done.wait(10)
        finally:
            rig.needed[:] = [9, 0]
            thread.join(20)
        assert rig.store.stats().stored_bytes <= 3 * size
        assert rig.store.stats().evicted == 1
        assert same_arrays(rig.store.get(ref_of(batches[3])), batches[3])


def test_a_store_without_room_says_so_in_the_end() -> None:
    batches = [sample(index=index) for index in range(3)]
    size = layout_of_batch(batches[0]).buffer_bytes
    with put_server(limit_bytes=2 * size, wait_s=0.0) as rig:
        sender = StreamSender(rig.channel)
        put(rig, sender, batches[1])
        with pytest.raises(grpc.RpcError) as error:
            put(rig, sender, batches[2])
        assert "--store_memory_bytes" in refusal(error.value).message


def test_micro_batches_go_when_their_step_closes() -> None:
    with put_server() as rig:
        sender = StreamSender(rig.channel)
        old, new = sample(step=0), sample(step=1)
        put(rig, sender, old)
        put(rig, sender, new)
        rig.store.release_before(1)
        with pytest.raises(MissingError):
            rig.store.get(ref_of(old))
        assert same_arrays(rig.store.get(ref_of(new)), new)
        assert rig.store.stats().stored_bytes == layout_of_batch(new).buffer_bytes


def test_a_step_that_closes_during_an_upload_ends_it() -> None:
    batch = sample()

    def close(parts: Iterator[Part]) -> Iterator[Part]:
        for number, part in enumerate(parts):
            if number == 2:
                rig.store.release_before(5)
            yield part

    with put_server(wrap=close) as rig:
        with pytest.raises(grpc.RpcError) as error:
            put(rig, StreamSender(rig.channel, chunk_bytes=300), batch)
        assert "dropped" in refusal(error.value).message
        assert rig.store.stats().stored_bytes == 0


def test_the_same_micro_batch_by_two_streams_at_once_comes_once_and_both_are_told() -> None:
    with put_server() as rig, ThreadPoolExecutor(2) as pool:
        for seed in range(20):
            batch = sample(seed=seed)
            twice = [pool.submit(put, rig, StreamSender(rig.channel), batch) for _ in range(2)]
            assert all(done.result().stored for done in twice)
            assert same_arrays(rig.store.get(ref_of(batch)), batch)
