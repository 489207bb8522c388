"""Where bytes lie, and digests that do not depend on how a micro-batch travels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prestage.microbatch import FIELDS, MicroBatch
from prestage.wire import codec
from prestage.wire.arena import ArenaPool
from prestage.wire.codec import Placer, chunk_pieces, content_views, layout_of_batch
from prestage.wire.digest import batch_digest, block_tokens, content_digest
from prestage.wire.errors import CodecError, SupersededError
from prestage.wire.layout import ALIGN_BYTES, Layout, ShardRange, buffer_bytes_of, plan_layout
from tests.wire.samples import changed, sample

lengths = st.lists(st.integers(0, 24), min_size=1, max_size=6).map(
    lambda values: sorted(values, reverse=True)
)


def placed(batch: MicroBatch, chunk_bytes: int, *, stale: int = 77) -> dict[str, np.ndarray]:
    """The arrays after a trip through chunks, in a buffer that held other bytes before."""
    layout = layout_of_batch(batch)
    buffer = np.full(layout.buffer_bytes, stale, np.uint8)
    layout.fill_padding(buffer)
    placer = Placer(layout, buffer)
    ticket = placer.take_over()
    placer.rewind(ticket, 0)
    for offset, pieces in chunk_pieces(content_views(batch, layout), 0, chunk_bytes):
        placer.write(ticket, offset, memoryview(b"".join(pieces)))
    assert placer.received_bytes == layout.total_bytes
    return layout.arrays(buffer)


@given(lengths=lengths, chunk_bytes=st.integers(1, 400), routed=st.booleans())
def test_any_chunking_gives_the_padded_arrays(
    lengths: list[int], chunk_bytes: int, routed: bool
) -> None:
    batch = sample(row_lengths=lengths, tokens_per_row=24, routing=(2, 3) if routed else None)
    arrays = placed(batch, chunk_bytes)
    for name, array in batch.arrays.items():
        np.testing.assert_array_equal(arrays[name], array)


@given(lengths=lengths, data=st.data())
def test_an_upload_goes_on_from_any_byte(lengths: list[int], data: st.DataObject) -> None:
    batch = sample(row_lengths=lengths, tokens_per_row=24, routing=(2, 1))
    layout = layout_of_batch(batch)
    broke_at = data.draw(st.integers(0, layout.total_bytes))
    resumed_at = data.draw(st.integers(0, broke_at))
    buffer = np.zeros(layout.buffer_bytes, np.uint8)
    layout.fill_padding(buffer)
    placer = Placer(layout, buffer)
    whole = b"".join(content_views(batch, layout))
    ticket = placer.take_over()
    placer.rewind(ticket, 0)
    placer.write(ticket, 0, memoryview(whole[:broke_at]))
    second = placer.take_over()
    placer.rewind(second, resumed_at)
    placer.write(second, resumed_at, memoryview(whole[resumed_at:]))
    arrays = layout.arrays(buffer)
    assert all(np.array_equal(arrays[name], array) for name, array in batch.arrays.items())


def test_padding_is_not_sent() -> None:
    batch = sample(row_lengths=(10, 3, 0, 0), tokens_per_row=100, routing=(4, 2))
    layout = layout_of_batch(batch)
    token_bytes = sum(place.token_bytes for place in layout.tensors)
    assert layout.total_bytes == 13 * token_bytes
    assert layout.buffer_bytes >= 400 * token_bytes
    assert sum(size for _, size in layout.runs()) == layout.total_bytes


def test_full_rows_are_one_run() -> None:
    batch = sample(row_lengths=(64, 64, 64), tokens_per_row=64, routing=None)
    layout = layout_of_batch(batch)
    assert len(list(layout.runs())) <= len(layout.tensors)


@given(lengths=lengths, first=st.integers(0, 10_000))
def test_runs_from_a_byte_are_the_rest_of_the_runs(lengths: list[int], first: int) -> None:
    layout = layout_of_batch(sample(row_lengths=lengths, tokens_per_row=24, routing=(2, 2)))
    assert _bytes_of(layout, first) == _bytes_of(layout, 0)[first:]


def _bytes_of(layout: Layout, first: int) -> list[int]:
    return [at for start, size in layout.runs(first) for at in range(start, start + size)]


def test_tensors_start_aligned_and_do_not_overlap() -> None:
    layout = layout_of_batch(sample(row_lengths=(7, 3), tokens_per_row=7, routing=(1, 1)))
    end = 0
    for place in layout.tensors:
        assert place.start % ALIGN_BYTES == 0
        assert place.start >= end
        end = place.start + place.padded_bytes
    assert end <= layout.buffer_bytes


@pytest.mark.parametrize(
    ("offset", "size", "message"),
    [(5, 1, "a chunk starts at byte 5, but 0 is next"), (0, 10_000_000, "the upload has")],
)
def test_gaps_and_too_many_bytes_are_refused(offset: int, size: int, message: str) -> None:
    layout = layout_of_batch(sample())
    placer = Placer(layout, np.zeros(layout.buffer_bytes, np.uint8))
    ticket = placer.take_over()
    placer.rewind(ticket, 0)
    with pytest.raises(CodecError, match=message):
        placer.write(ticket, offset, memoryview(bytes(size)))


def test_a_later_stream_ends_the_earlier_ones_writes() -> None:
    layout = layout_of_batch(sample())
    placer = Placer(layout, np.zeros(layout.buffer_bytes, np.uint8))
    first = placer.take_over()
    placer.rewind(first, 0)
    placer.take_over()
    with pytest.raises(SupersededError):
        placer.write(first, 0, memoryview(b"x"))


def test_a_resume_past_what_came_is_refused() -> None:
    layout = layout_of_batch(sample())
    placer = Placer(layout, np.zeros(layout.buffer_bytes, np.uint8))
    with pytest.raises(CodecError, match="resume_from is 4, but only 0 bytes came"):
        placer.rewind(placer.take_over(), 4)


# -- digests ------------------------------------------------------------------------------------


def test_the_digest_is_frozen() -> None:
    """Another value means that journals and peers of other versions no longer agree."""
    arrays = {
        "advantages": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
        "loss_mask": np.ones((3, 4), np.uint8),
        "routed_experts": np.arange(24, dtype=np.int16).reshape(3, 4, 1, 2),
        "tokens": np.arange(12, dtype=np.int32).reshape(3, 4),
    }
    digest = content_digest(arrays, rows=3, tokens_per_row=4, row_lengths=(3, 1, 0))
    assert digest == "47d66460979333e67375f36306d886e1"


def test_padding_does_not_count_but_every_value_does() -> None:
    batch = sample(row_lengths=(10, 4, 0), tokens_per_row=12)
    assert batch_digest(changed(batch, "tokens", (1, 4), 99)) == batch.digest
    assert batch_digest(changed(batch, "advantages", (2, 0), 9.0)) == batch.digest
    for name in batch.arrays:
        where = (1, 3, 0, 0) if FIELDS[name].trailing_dims else (1, 3)
        assert batch_digest(changed(batch, name, where, 5)) != batch.digest, name


def test_name_dtype_shape_and_lengths_count() -> None:
    batch = sample(row_lengths=(4, 4), tokens_per_row=4, routing=(2, 3))
    digests = {batch.digest}
    swapped = dict(batch.arrays)
    swapped["old_logprobs"], swapped["ref_logprobs"] = (
        swapped["ref_logprobs"],
        swapped["old_logprobs"],
    )
    reshaped = {
        **batch.arrays,
        "routed_experts": batch.arrays["routed_experts"].reshape(2, 4, 3, 2),
    }
    fewer = {name: a for name, a in batch.arrays.items() if name != "ref_logprobs"}
    for arrays, row_lengths in (
        (swapped, (4, 4)),
        (reshaped, (4, 4)),
        (fewer, (4, 4)),
        (batch.arrays, (4, 3)),
    ):
        digests.add(
            codec.batch_digest(
                MicroBatch(
                    id=batch.id,
                    rows=2,
                    tokens_per_row=4,
                    row_lengths=row_lengths,
                    arrays=arrays,
                )
            )
        )
    assert len(digests) == 5


def _shards(batch: MicroBatch, row_parts: int, token_parts: int) -> list[ShardRange]:
    rows, tokens = batch.rows // row_parts, batch.tokens_per_row // token_parts
    return [
        ShardRange(row_start=r * rows, row_count=rows, token_start=t * tokens, token_count=tokens)
        for r in range(row_parts)
        for t in range(token_parts)
    ]


@pytest.mark.parametrize(("row_parts", "token_parts"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 4)])
def test_d8_shards_give_the_same_digest_and_only_their_own_bytes(
    row_parts: int, token_parts: int
) -> None:
    tokens = 1024
    assert (tokens // token_parts) % block_tokens(tokens) == 0
    batch = sample(row_lengths=(1024, 900, 300, 0), tokens_per_row=tokens, routing=(1, 2))
    manifest = codec.make_manifest(batch, with_blocks=True)
    sent = 0
    for shard in _shards(batch, row_parts, token_parts):
        layout = codec.layout_of_batch(batch, shard)
        sent += layout.total_bytes
        buffer = np.zeros(layout.buffer_bytes, np.uint8)
        layout.fill_padding(buffer)
        placer = Placer(layout, buffer)
        ticket = placer.take_over()
        placer.rewind(ticket, 0)
        for offset, pieces in chunk_pieces(content_views(batch, layout, shard), 0, 1000):
            placer.write(ticket, offset, memoryview(b"".join(pieces)))
        rows = slice(shard.row_start, shard.row_start + shard.row_count)
        columns = slice(shard.token_start, shard.token_start + shard.token_count)
        local = codec.batch_from(manifest, layout.arrays(buffer), shard)
        for name, array in batch.arrays.items():
            np.testing.assert_array_equal(local.arrays[name], array[rows, columns])
        accepted = codec.check_shard(
            manifest,
            codec.pb.Shard(
                row_start=shard.row_start,
                row_count=shard.row_count,
                token_start=shard.token_start,
                token_count=shard.token_count,
            ),
        )
        assert accepted == shard
        codec.check_digest(manifest, local, shard)
        if local.row_lengths[0]:
            with pytest.raises(codec.DamagedError, match="advantages"):
                codec.check_digest(manifest, changed(local, "advantages", (0, 0), 9.0), shard)
    assert sent == layout_of_batch(batch).total_bytes


@pytest.mark.parametrize("tokens", [2, 64, 128, 4096, 65_536, 1_000_000])
def test_blocks_let_a_row_be_split_eight_ways(tokens: int) -> None:
    size = block_tokens(tokens)
    assert 128 <= size <= 8192
    if 1024 <= tokens <= 65_536:
        assert tokens % (8 * size) == 0


def test_send_buffers_are_reused_only_when_nothing_refers_to_them() -> None:
    pool = ArenaPool(1 << 20)
    buffer, fresh = pool.take(5000)
    assert fresh
    assert buffer.__array_interface__["data"][0] % 64 == 0
    view = buffer[10:20].view()
    view[:] = 7
    del buffer
    other, fresh = pool.take(5000)
    assert fresh, "a view still refers to the first buffer"
    del view
    again, fresh = pool.take(5000)
    assert not fresh
    assert again[10] == 7
    del again, other


def test_a_layout_needs_no_arrays() -> None:
    batch = sample(routing=(3, 2))
    assert layout_of_batch(batch) == plan_layout(
        rows=batch.rows,
        tokens_per_row=batch.tokens_per_row,
        row_lengths=batch.row_lengths,
        fields={name: array.shape[2:] for name, array in batch.arrays.items()},
    )


def test_warm_buffers_are_used_by_the_next_takers_and_bounded_by_the_idle_limit() -> None:
    pool = ArenaPool(idle_bytes=3 << 20)
    assert pool.warm(1 << 20, count=8) == 3
    held = [pool.take(1 << 20) for _ in range(4)]
    assert [fresh for _, fresh in held] == [False, False, False, True]
    assert pool.warm(4 << 20, count=8) == 0, "more than the pool may keep"


@given(st.integers(1, 9), st.integers(2, 70), st.tuples(st.integers(1, 3), st.integers(1, 4)))
def test_the_size_of_a_buffer_needs_no_layout(
    rows: int, tokens: int, routing: tuple[int, int]
) -> None:
    fields = {name: routing if spec.trailing_dims else () for name, spec in FIELDS.items()}
    layout = plan_layout(rows=rows, tokens_per_row=tokens, row_lengths=(0,) * rows, fields=fields)
    assert buffer_bytes_of(rows, tokens, fields) == layout.buffer_bytes
