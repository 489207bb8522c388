"""Manifests and values from outside: a clear error that names the field, before any allocation."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prestage.tensor.v1 import tensor_pb2 as pb
from prestage.wire.codec import check_manifest, check_shard, layout_of, make_manifest
from prestage.wire.digest import block_tokens
from prestage.wire.errors import CodecError, InvalidTensor, LimitError, WireError
from prestage.wire.limits import WireLimits
from prestage.wire.store import MicroBatchStore
from prestage.wire.stream_plane import PutReceiver, end_part
from prestage.wire.validate import check_padding, check_values
from tests.wire.samples import changed, sample

LIMITS = WireLimits()
HUGE = 2**64 - 1


def _set(field: str, value: object) -> Callable[[pb.Manifest], None]:
    def change(manifest: pb.Manifest) -> None:
        setattr(manifest, field, value)

    return change


def _tensor(which: str, **fields: object) -> Callable[[pb.Manifest], None]:
    def change(manifest: pb.Manifest) -> None:
        tensor = next(tensor for tensor in manifest.tensors if tensor.name == which)
        for field, value in fields.items():
            if isinstance(value, list):
                del tensor.shape[:]
                tensor.shape.extend(value)
            else:
                setattr(tensor, field, value)

    return change


def _lengths(*values: int) -> Callable[[pb.Manifest], None]:
    def change(manifest: pb.Manifest) -> None:
        del manifest.row_lengths[:]
        manifest.row_lengths.extend(values)

    return change


def _without(name: str) -> Callable[[pb.Manifest], None]:
    def change(manifest: pb.Manifest) -> None:
        kept = [tensor for tensor in manifest.tensors if tensor.name != name]
        del manifest.tensors[:]
        manifest.tensors.extend(kept)

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda m: setattr(m.id, "run_id", "a/b"), CodecError, "run_id"),
        (_set("rows", 0), LimitError, "rows is 0"),
        (_set("rows", 2**32 - 1), LimitError, "rows is 4294967295"),
        (_set("rows", 5), CodecError, "4 row_lengths for 5 rows"),
        (_set("tokens_per_row", 1), LimitError, "tokens_per_row is 1"),
        (_set("tokens_per_row", 2**32 - 1), LimitError, "tokens_per_row"),
        (_set("tokens_per_row", 63), CodecError, "a row length of 64"),
        (_set("digest", "xyz"), CodecError, "digest 'xyz'"),
        (_set("digest", "A" * 32), CodecError, "32 hex digits"),
        (_set("total_bytes", HUGE), CodecError, "total_bytes is 18446744073709551615"),
        (_lengths(60, 0, 17, 0), CodecError, "padding row comes before"),
        (_lengths(60, 64, 17, 2**32 - 1), CodecError, "a row length of 4294967295"),
        (_tensor("tokens", name="advantages"), CodecError, "sorted and unique"),
        (_without("tokens"), InvalidTensor, "field 'tokens' is missing"),
        (_tensor("ref_logprobs", name="reg_logprobs"), InvalidTensor, "unknown field 'reg_log"),
        (_tensor("tokens", dtype=pb.DATA_TYPE_INT64), InvalidTensor, "dtype int64; it is int32"),
        (_tensor("tokens", dtype=0), InvalidTensor, "field tokens has dtype 0"),
        (_tensor("tokens", shape=[4, 65]), InvalidTensor, r"field tokens has shape \[4, 65\]"),
        (_tensor("tokens", shape=[4, 64, 1]), InvalidTensor, "0 more axes"),
        (_tensor("routed_experts", shape=[4, 64, 0, 2]), LimitError, "an axis of 0"),
        (_tensor("routed_experts", shape=[4, 64, HUGE, 2]), LimitError, "an axis of"),
        (_tensor("routed_experts", shape=[4, 64, 60_000, 60_000]), LimitError, "values a token"),
        (_tensor("tokens", offset=1), CodecError, "field tokens lies at 1"),
        (_tensor("tokens", bytes=HUGE), CodecError, "the layout gives"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_by_name(
    change: Callable[[pb.Manifest], None], error: type[WireError], message: str
) -> None:
    manifest = make_manifest(sample())
    check_manifest(manifest, LIMITS)
    change(manifest)
    with pytest.raises(error, match=message) as caught:
        check_manifest(manifest, LIMITS)
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (WireLimits(max_rows=3), "takes 1 to 3"),
        (WireLimits(max_tokens_per_row=63), "takes 2 to 63"),
        (WireLimits(max_tensors=3), "takes 3"),
        (WireLimits(max_trailing=5), "6 values a token"),
        (WireLimits(max_payload_bytes=100), "takes 100"),
        (WireLimits(max_padded_bytes=100), r"\(100 padded\)"),
    ],
)
def test_every_limit_holds(limits: WireLimits, message: str) -> None:
    with pytest.raises(LimitError, match=message):
        check_manifest(make_manifest(sample()), limits)


def test_d14_a_payload_of_five_gigabytes_is_planned_without_allocating_it() -> None:
    """64 x 65,536 tokens with routing [60, 10]: over every 32-bit and 2 GiB limit."""
    manifest = make_manifest(sample(row_lengths=(64,), routing=(60, 10)))
    manifest.rows, manifest.tokens_per_row = 64, 65_536
    _lengths(*[65_536] * 64)(manifest)
    offset = 0
    for tensor in manifest.tensors:
        tensor.shape[0], tensor.shape[1] = 64, 65_536
        tensor.offset = offset
        tensor.bytes = tensor.bytes * 65_536
        offset += tensor.bytes
    manifest.total_bytes = offset
    check_manifest(manifest, LIMITS)
    routing = next(t for t in layout_of(manifest).tensors if t.name == "routed_experts")
    assert routing.sent_bytes == 5_033_164_800
    with pytest.raises(LimitError, match="takes 4294967296"):
        check_manifest(manifest, WireLimits(max_payload_bytes=1 << 32))


manifests = st.builds(
    pb.Manifest,
    id=st.builds(pb.MicroBatchId, run_id=st.text(max_size=5), step=st.integers(0, HUGE)),
    rows=st.integers(0, 2**32 - 1) | st.integers(0, 4),
    tokens_per_row=st.integers(0, 2**32 - 1) | st.integers(0, 70),
    row_lengths=st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 70), max_size=4),
    tensors=st.lists(
        st.builds(
            pb.TensorSpec,
            name=st.sampled_from(["tokens", "routed_experts", "loss_mask", "x", ""]),
            dtype=st.integers(0, 6),
            shape=st.lists(st.integers(0, HUGE) | st.integers(0, 70), max_size=5),
            offset=st.integers(0, HUGE),
            bytes=st.integers(0, HUGE),
            block_digests=st.binary(max_size=40),
        ),
        max_size=4,
    ),
    total_bytes=st.integers(0, HUGE),
    digest=st.text(max_size=40),
)


@given(manifest=manifests)
def test_any_manifest_is_accepted_or_refused_clearly(manifest: pb.Manifest) -> None:
    with pytest.raises(WireError) as caught:
        check_manifest(manifest, LIMITS)
    assert len(str(caught.value)) < 2000


@given(data=st.data())
def test_a_spoiled_manifest_never_reaches_an_allocation(data: st.DataObject) -> None:
    """Flip bytes of a good header: the outcome is a clear error or the same small upload."""
    header = pb.PutMicroBatchHeader(manifest=make_manifest(sample()), epoch=1)
    raw = bytearray(header.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    spoiled = pb.PutMicroBatchHeader()
    try:
        spoiled.ParseFromString(bytes(raw))
    except Exception:
        return
    store = MicroBatchStore(1 << 30, lambda: (0, 0))
    receiver = PutReceiver(
        store, LIMITS, lambda header: None, lambda batch: check_values(batch), wait_s=0.0
    )
    tracemalloc.start()
    try:
        receiver.take(
            iter([pb.PutMicroBatchRequest(header=spoiled), end_part(layout_of(header.manifest))])
        )
    except WireError as error:
        assert len(str(error)) < 2000
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 << 20
    assert store.stats().stored_bytes <= 1 << 20


@given(
    shard=st.builds(
        pb.Shard,
        row_start=st.integers(0, 2**32 - 1) | st.integers(0, 5),
        row_count=st.integers(0, 2**32 - 1) | st.integers(0, 5),
        token_start=st.integers(0, 2**32 - 1) | st.sampled_from([0, 128, 512, 1024]),
        token_count=st.integers(0, 2**32 - 1) | st.sampled_from([0, 128, 512, 1024]),
    )
)
def test_any_shard_lies_inside_or_is_refused(shard: pb.Shard) -> None:
    manifest = make_manifest(
        sample(row_lengths=(1024, 9), tokens_per_row=1024, routing=None), with_blocks=True
    )
    inside = (
        shard.row_count > 0
        and shard.row_start + shard.row_count <= 2
        and shard.token_count > 0
        and shard.token_start + shard.token_count <= 1024
        and shard.token_start % block_tokens(1024) == 0
        and (shard.token_start + shard.token_count) % block_tokens(1024) == 0
    )
    if inside:
        assert layout_of(manifest, check_shard(manifest, shard)).total_bytes >= 0
    else:
        with pytest.raises(CodecError, match="shard"):
            check_shard(manifest, shard)


def test_block_digests_must_be_those_of_the_digest() -> None:
    manifest = make_manifest(sample(), with_blocks=True)
    shard = pb.Shard(row_count=4, token_count=64)
    check_shard(manifest, shard)
    blocks = bytearray(manifest.tensors[0].block_digests)
    blocks[0] ^= 1
    manifest.tensors[0].block_digests = bytes(blocks)
    with pytest.raises(WireError, match="block_digests give"):
        check_shard(manifest, shard)
    manifest.tensors[0].block_digests = b"short"
    with pytest.raises(CodecError, match="5 bytes of block_digests"):
        check_shard(manifest, shard)


# -- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "where", "value", "message"),
    [
        ("tokens", (1, 7), 100, "tokens holds 100 at row 1, position 7; ids are 0 to 99"),
        ("tokens", (1, 7), -1, "holds -1"),
        ("positions", (0, 1), -3, "positions holds -3 at row 0, position 1"),
        ("segment_ids", (0, 1), -1, "segment_ids holds -1"),
        ("loss_mask", (0, 2), 2, "loss_mask holds 2"),
        ("loss_mask", (0, 0), 1, "loss_mask is set at row 0, position 0, where nothing"),
        ("loss_mask", (2, 40), 1, "loss_mask is set at row 2, position 40"),
        ("routed_experts", (1, 5, 2, 1), 8, "routed_experts holds 8 at row 1, position 5"),
        ("routed_experts", (1, 5, 2, 1), -2, "holds -2"),
        ("advantages", (3, 63), float("nan"), "advantages is not finite at row 3, position 63"),
        ("sampling_logprobs", (0, 0), float("inf"), "not finite"),
        ("ref_logprobs", (0, 0), float("-inf"), "not finite"),
    ],
)
def test_bad_values_are_named(
    field: str, where: tuple[int, ...], value: float, message: str
) -> None:
    batch = sample()
    check_values(batch, vocab_size=100, num_experts=8)
    with pytest.raises(InvalidTensor, match=message):
        check_values(changed(batch, field, where, value), vocab_size=100, num_experts=8)


def test_the_first_token_of_a_later_segment_is_not_trained() -> None:
    batch = sample()
    segments = batch.arrays["segment_ids"].copy()
    positions = batch.arrays["positions"].copy()
    mask = np.zeros_like(batch.arrays["loss_mask"])
    segments[0, 30:60] = 2
    positions[0, 30:60] = np.arange(30)
    mask[0, 31] = 1
    arrays = {**batch.arrays, "segment_ids": segments, "positions": positions, "loss_mask": mask}
    check_values(replace(batch, arrays=arrays))
    mask[0, 30] = 1
    with pytest.raises(InvalidTensor, match="row 0, position 30"):
        check_values(replace(batch, arrays=arrays))


@pytest.mark.parametrize(
    ("field", "array", "message"),
    [
        ("extra", np.zeros((4, 64), np.int32), "field 'extra'"),
        ("tokens", np.zeros((4, 64), np.int64), "dtype int64"),
        ("tokens", np.zeros((4, 63), np.int32), "shape"),
    ],
)
def test_unknown_fields_dtypes_and_shapes_are_named(
    field: str, array: np.ndarray, message: str
) -> None:
    batch = sample()
    with pytest.raises(InvalidTensor, match=message):
        check_values(replace(batch, arrays={**batch.arrays, field: array}))


def test_checking_takes_no_memory_of_the_payloads_size() -> None:
    batch = sample(row_lengths=(4096,) * 32, tokens_per_row=4096, routing=(16, 4))
    payload = batch.payload_bytes
    tracemalloc.start()
    check_values(batch, vocab_size=100, num_experts=8)
    check_padding(batch)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < payload // 4
