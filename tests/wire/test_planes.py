"""What every payload plane keeps: the same cases on the stream and on shared memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.bench.plane_bench import WayResult, measure, verdicts
from prestage.microbatch import MicroBatch
from prestage.protocol import Reason
from prestage.wire.codec import layout_of_batch
from prestage.wire.digest import batch_digest
from prestage.wire.errors import Refusal, classify
from prestage.wire.layout import ShardRange
from prestage.wire.planes import PayloadPlane
from prestage.wire.shm_plane import SharedMemorySender, WorkerSlots
from prestage.wire.stream_plane import StreamSender
from tests.wire.samples import Rig, changed, put_server, ref_of, same_arrays, sample

POOL_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Both ends of one plane."""

    rig: Rig
    plane: PayloadPlane

    def put(self, batch: MicroBatch, **more: object) -> bool:
        response = self.plane.put(  # type: ignore[arg-type]
            batch, epoch=self.rig.epoch[0], incarnation="i", timeout_s=20.0, **more
        )
        assert response.stored
        return not response.duplicate

    def refused(self, batch: MicroBatch) -> Refusal:
        with pytest.raises(grpc.RpcError) as error:
            self.put(batch)
        outcome = classify(error.value)
        assert isinstance(outcome, Refusal)
        return outcome

    def packed(self, batch: MicroBatch) -> MicroBatch:
        """Written by a packer straight into what the plane reserves."""
        reserved = self.plane.reserve(layout_of_batch(batch))
        reserved.fill_padding()
        arrays = reserved.arrays()
        for name, array in batch.arrays.items():
            for row, length in enumerate(batch.row_lengths):
                arrays[name][row, :length] = array[row, :length]
        return replace(batch, arrays=arrays)


@pytest.fixture(params=["stream", "shared-memory"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ends]:
    slots = WorkerSlots(tmp_path / "shm")
    size = layout_of_batch(sample()).buffer_bytes
    with put_server(shared_memory=slots, vocab_size=50, limit_bytes=40 * size) as rig:
        stream = StreamSender(rig.channel)
        plane: PayloadPlane = stream
        if request.param == "shared-memory":
            plane = SharedMemorySender(
                rig.channel, lambda: slots.offer, pool_bytes=POOL_BYTES, fallback=stream
            )
        yield Ends(rig=rig, plane=plane)
        if isinstance(plane, SharedMemorySender):
            assert plane.counters.streamed == 0, "the case did not use the plane"
        plane.close()
    slots.close()


def test_arrives_whole_under_the_same_digest(ends: Ends) -> None:
    batch = sample()
    assert ends.put(batch)
    got = ends.rig.store.get(ref_of(batch))
    assert same_arrays(got, batch)
    assert batch_digest(got) == batch.digest
    assert not got.arrays["tokens"].flags.writeable


def test_packed_in_place_arrives_the_same(ends: Ends) -> None:
    for index in range(4):
        batch = sample(index=index)
        assert ends.put(ends.packed(batch))
        assert same_arrays(ends.rig.store.get(ref_of(batch)), batch)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 64), min_size=4, max_size=4),
    routed=st.booleans(),
    in_place=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_buffers_that_are_used_again_hold_nothing_old(
    ends: Ends, lengths: list[int], routed: bool, in_place: bool, seed: int
) -> None:
    """Steps follow each other in the same memory, with other lengths and other fields."""
    ends.rig.store.clear()
    batch = sample(
        row_lengths=sorted(lengths, reverse=True), routing=(3, 2) if routed else None, seed=seed
    )
    ends.put(ends.packed(batch) if in_place else batch)
    assert same_arrays(ends.rig.store.get(ref_of(batch)), batch)


def test_a_repeated_put_changes_nothing(ends: Ends) -> None:
    batch = ends.packed(sample())
    assert ends.put(batch)
    assert not ends.put(batch)
    assert not ends.put(sample())
    assert len(ends.rig.store.stats().refs) == 1


def test_damage_is_found_before_use(ends: Ends) -> None:
    damaged = changed(
        sample(),
        "routed_experts",
        (1, 63, 2, 1),
        1 - sample().arrays["routed_experts"][1, 63, 2, 1],
    )
    assert ends.refused(damaged).reason is Reason.DIGEST_MISMATCH
    assert ends.rig.store.stats().refs == ()
    assert ends.put(sample())


@pytest.mark.parametrize(
    ("field", "value"), [("advantages", np.nan), ("tokens", 50), ("loss_mask", 2)]
)
def test_bad_values_are_refused_before_use(ends: Ends, field: str, value: float) -> None:
    bad = changed(sample(), field, (0, 3), value)
    bad = replace(bad, digest=batch_digest(bad))
    refusal = ends.refused(bad)
    assert (refusal.code, refusal.reason) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        Reason.INVALID_BATCH,
    )
    assert field in refusal.message
    assert ends.rig.store.stats().stored_bytes == 0


def test_an_old_epoch_is_refused(ends: Ends) -> None:
    batch = ends.packed(sample())
    ends.rig.epoch[0] = 2
    with pytest.raises(grpc.RpcError, match="epoch 1 is over"):
        ends.plane.put(batch, epoch=1, incarnation="i", timeout_s=20.0)
    assert ends.put(batch)


def test_a_shard_brings_its_rows_and_tokens(ends: Ends) -> None:
    batch = sample(row_lengths=(1024, 500, 100, 0), tokens_per_row=1024, routing=None)
    shard = ShardRange(row_start=0, row_count=3, token_start=512, token_count=512)
    ends.put(batch, shard=shard)
    got = ends.rig.store.get(ref_of(batch))
    assert got.row_lengths == (512, 0, 0)
    for name, array in batch.arrays.items():
        np.testing.assert_array_equal(got.arrays[name], array[:3, 512:])


def test_a_full_store_makes_the_sender_wait(ends: Ends) -> None:
    ends.rig.store._limit = 2 * layout_of_batch(sample()).buffer_bytes
    ends.put(sample(index=1))
    thread = threading.Thread(target=lambda: ends.put(sample(index=2)))
    thread.start()
    try:
        while ends.rig.store.stats().waited == 0:
            assert thread.is_alive()
        ends.put(sample(index=0))  # The next one never waits.
    finally:
        ends.rig.needed[:] = [1, 0]
        ends.rig.store.release_before(1)
        thread.join(20)
    assert not thread.is_alive()


# -- between processes, as the bench measures them --------------------------------------------------


@pytest.mark.parametrize("way", ["unary", "stream tcp", "shm copy", "shm in place"])
def test_the_bench_measures_between_processes(way: str) -> None:
    result = measure(way, 4 << 20, 1)
    assert result.way == way
    assert 3 << 20 < result.payload_bytes <= 4 << 20
    assert min(result.first_s, result.median_s, result.memcpy_s) > 0


def test_a_broken_promise_is_seen() -> None:
    def result(way: str, seconds: float, peak: float) -> WayResult:
        return WayResult(
            way=way,
            payload_bytes=1 << 30,
            first_s=seconds,
            median_s=seconds,
            worst_s=seconds,
            memcpy_s=0.1,
            check_s=0.0,
            sender_peak=1.0,
            receiver_peak=peak,
        )

    good = [
        result("unary", 8.0, 9.0),
        result("stream unix", 1.0, 1.1),
        result("stream tcp", 1.0, 1.3),
        result("shm copy", 0.12, 1.0),
        result("shm in place", 0.002, 1.0),
    ]
    assert all(verdict.met for verdict in verdicts(good))
    for place, bad in (
        (0, result("unary", 7.9, 9.0)),
        (1, result("stream unix", 1.3, 1.1)),
        (2, result("stream tcp", 1.0, 1.31)),
        (3, result("shm copy", 0.17, 1.0)),
        (4, result("shm in place", 0.006, 1.0)),
        (4, result("shm in place", 0.002, 1.06)),
    ):
        spoiled = [bad if at == place else one for at, one in enumerate(good)]
        assert not all(verdict.met for verdict in verdicts(spoiled))
