"""The shared-memory plane: hand-over, reuse only after the worker let go, leaks, foreign pools."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from prestage.microbatch import MicroBatch
from prestage.tensor.v1 import tensor_pb2 as pb
from prestage.wire.codec import layout_of_batch, make_manifest
from prestage.wire.errors import CodecError, Refusal, classify
from prestage.wire.planes import PayloadPlane, SendBuffer
from prestage.wire.shm_plane import (
    SharedMemoryOffer,
    SharedMemorySender,
    SharedMemoryUnavailable,
    WorkerSlots,
    choose_plane,
    remove_leaked,
)
from prestage.wire.stream_plane import StreamSender
from tests.wire.samples import Rig, changed, put_server, ref_of, same_arrays, sample


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of its own; the code works on any file system."""
    return tmp_path / "shm"


@pytest.fixture
def slots(folder: Path) -> Iterator[WorkerSlots]:
    made = WorkerSlots(folder)
    yield made
    made.close()


@pytest.fixture
def rig(slots: WorkerSlots) -> Iterator[Rig]:
    with put_server(shared_memory=slots) as made:
        yield made


def sender_for(
    rig: Rig, slots: WorkerSlots, *, fit: int = 3, like: MicroBatch | None = None
) -> SharedMemorySender:
    size = layout_of_batch(like or sample()).buffer_bytes
    page = -(-size // 4096) * 4096
    return SharedMemorySender(
        rig.channel,
        lambda: slots.offer,
        pool_bytes=65_536 + fit * page,
        fallback=StreamSender(rig.channel),
    )


def put(rig: Rig, sender: PayloadPlane, batch: MicroBatch) -> pb.PutMicroBatchResponse:
    return sender.put(batch, epoch=rig.epoch[0], incarnation="i", timeout_s=20.0)


def packed(batch: MicroBatch, reserved: SendBuffer) -> MicroBatch:
    arrays = reserved.arrays()
    for name, array in batch.arrays.items():
        arrays[name][:] = array
    return replace(batch, arrays=arrays)


def at(batch: MicroBatch) -> int:
    return int(batch.arrays["advantages"].__array_interface__["data"][0])


def test_packed_straight_into_a_slot_nothing_is_copied(rig: Rig, slots: WorkerSlots) -> None:
    sender = sender_for(rig, slots)
    batch = sample()
    local = packed(batch, sender.reserve(layout_of_batch(batch)))
    assert put(rig, sender, local).stored
    got = rig.store.get(ref_of(batch))
    assert same_arrays(got, batch)
    assert not got.arrays["tokens"].flags.writeable
    assert sender.counters.handed_over == 1
    local.arrays["advantages"][0, 0] = 123.0  # The same bytes, seen from the other side.
    assert got.arrays["advantages"][0, 0] == 123.0


def test_arrays_of_any_origin_are_copied_once(rig: Rig, slots: WorkerSlots) -> None:
    sender = sender_for(rig, slots)
    assert put(rig, sender, sample()).stored
    assert same_arrays(rig.store.get(ref_of(sample())), sample())
    assert sender.counters.copied_in == 1
    assert put(rig, sender, sample()).duplicate


def test_a_slot_is_used_again_only_when_the_worker_let_go(rig: Rig, slots: WorkerSlots) -> None:
    sender = sender_for(rig, slots, fit=1)
    layout = layout_of_batch(sample())
    put(rig, sender, packed(sample(), sender.reserve(layout)))
    held = rig.store.get(ref_of(sample()))
    assert put(rig, sender, sample(index=1)).stored
    assert sender.counters.streamed == 1, "the only slot is the worker's"
    rig.store.release_before(5)
    rig.needed[:] = [5, 0]
    assert put(rig, sender, sample(step=5)).stored
    assert sender.counters.streamed == 2, "an array still refers to the slot"
    view = held.arrays["routed_experts"][1:, 2:]
    del held
    assert put(rig, sender, sample(step=5, index=1)).stored
    assert sender.counters.streamed == 3, "a view of an array still refers to the slot"
    np.testing.assert_array_equal(view, sample().arrays["routed_experts"][1:, 2:])
    del view
    assert put(rig, sender, sample(step=5, index=2)).stored
    assert (sender.counters.streamed, sender.counters.copied_in) == (3, 1)
    assert same_arrays(rig.store.get(ref_of(sample(step=5, index=2))), sample(step=5, index=2))


def test_the_packer_does_not_get_a_slot_that_it_still_refers_to(
    rig: Rig, slots: WorkerSlots
) -> None:
    sender = sender_for(rig, slots, fit=1)
    layout = layout_of_batch(sample())
    local = packed(sample(), sender.reserve(layout))
    other = packed(sample(index=1), sender.reserve(layout))  # Ordinary memory.
    assert same_arrays(local, sample())
    del local
    third = packed(sample(index=2), sender.reserve(layout))
    put(rig, sender, other)
    put(rig, sender, third)
    assert (sender.counters.handed_over, sender.counters.streamed) == (1, 1)
    assert same_arrays(rig.store.get(ref_of(sample(index=2))), sample(index=2))


def test_stale_padding_of_a_slot_is_refused_and_the_slot_is_free_again(
    rig: Rig, slots: WorkerSlots
) -> None:
    sender = sender_for(rig, slots, fit=1)
    batch = sample()
    for attempt in range(3):
        reserved = sender.reserve(layout_of_batch(batch))
        local = packed(batch, reserved)
        local.arrays["tokens"][1, -1] = batch.arrays["tokens"][1, -1]
        local.arrays["routed_experts"][2, 40] = 0
        with pytest.raises(grpc.RpcError) as error:
            put(rig, sender, local)
        outcome = classify(error.value)
        assert isinstance(outcome, Refusal)
        assert "row 2, position 40, which is padding: fill it with -1" in outcome.message
        del reserved, local, error
        assert sender.counters.handed_over == attempt + 1
    assert put(rig, sender, batch).stored


@pytest.mark.parametrize("kind", ["damaged", "stale epoch"])
def test_a_refused_slot_can_be_put_again(rig: Rig, slots: WorkerSlots, kind: str) -> None:
    sender = sender_for(rig, slots, fit=1)
    batch = sample()
    local = packed(batch, sender.reserve(layout_of_batch(batch)))
    good = local.arrays["advantages"][0, 0].copy()
    if kind == "damaged":
        local.arrays["advantages"][0, 0] += 1
    else:
        rig.epoch[0] = 2
        sender._fallback = None  # type: ignore[assignment]
    with pytest.raises(grpc.RpcError):
        sender.put(local, epoch=1, incarnation="i", timeout_s=20)
    local.arrays["advantages"][0, 0] = good
    assert put(rig, sender, local).stored
    assert same_arrays(rig.store.get(ref_of(batch)), batch)
    assert sender.counters.handed_over == 2


def test_a_repeated_put_keeps_the_slot_that_the_worker_reads(rig: Rig, slots: WorkerSlots) -> None:
    sender = sender_for(rig, slots, fit=1)
    batch = sample()
    local = packed(batch, sender.reserve(layout_of_batch(batch)))
    assert put(rig, sender, local).stored
    assert put(rig, sender, local).duplicate
    del local
    assert put(rig, sender, sample(index=1)).stored
    assert sender.counters.streamed == 1, "the worker still reads the slot"
    assert same_arrays(rig.store.get(ref_of(batch)), batch)
    rig.store.release_before(1)
    rig.needed[:] = [1, 0]
    assert put(rig, sender, sample(step=1)).stored
    assert sender.counters.copied_in == 1, "let go of, whatever was repeated"


def test_a_new_worker_process_gets_a_new_pool(folder: Path) -> None:
    offers: list[SharedMemoryOffer] = []
    first = WorkerSlots(folder)
    offers.append(first.offer)
    with put_server(shared_memory=first) as rig:
        sender = SharedMemorySender(
            rig.channel,
            lambda: offers[-1],
            pool_bytes=1 << 20,
            fallback=StreamSender(rig.channel),
        )
        assert put(rig, sender, sample()).stored
        held = rig.store.get(ref_of(sample()))
    second = WorkerSlots(folder)
    offers.append(second.offer)
    first.close()
    with put_server(shared_memory=second) as rig:
        sender._call = type(sender._call)(rig.channel)
        response = sender.put(sample(seed=1), epoch=1, incarnation="j", timeout_s=20)
        assert response.stored
        assert sender.counters.streamed == 0
        assert same_arrays(held, sample()), "the old worker's bytes are untouched"
    second.close()


def test_a_worker_that_is_replaced_before_the_first_put_gets_a_pool_of_its_own(
    folder: Path,
) -> None:
    """The pool was made, and packed into, for the one that made the offer."""
    first = WorkerSlots(folder)
    offers = [first.offer]
    with put_server(shared_memory=first) as rig:
        sender = SharedMemorySender(
            rig.channel,
            lambda: offers[-1],
            pool_bytes=1 << 20,
            fallback=StreamSender(rig.channel),
        )
        batch = packed(sample(), sender.reserve(layout_of_batch(sample())))
        second = WorkerSlots(folder)
        offers.append(second.offer)
        first.close()
    with put_server(shared_memory=second) as rig:
        sender._call = type(sender._call)(rig.channel)
        assert put(rig, sender, batch).stored
        assert sender.counters.streamed == 0
        assert same_arrays(rig.store.get(ref_of(sample())), sample())
    second.close()


# -- foreign and bad pools ----------------------------------------------------------------------


def test_another_host_means_the_stream(rig: Rig, slots: WorkerSlots, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    for offer in (
        None,
        SharedMemoryOffer(folder=str(elsewhere), nonce=slots.offer.nonce),
        SharedMemoryOffer(folder="/nowhere", nonce=slots.offer.nonce),
        SharedMemoryOffer(folder=slots.offer.folder, nonce="../../etc/passwd"),
    ):
        plane = choose_plane(rig.channel, lambda offer=offer: offer, pool_bytes=1 << 20)
        assert plane.name == "stream"
    assert choose_plane(rig.channel, lambda: slots.offer, pool_bytes=0).name == "stream"
    plane = choose_plane(rig.channel, lambda: slots.offer, pool_bytes=1 << 20)
    assert plane.name == "shared-memory"


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    with pytest.raises(SharedMemoryUnavailable, match="mode 0700"):
        WorkerSlots(open_folder)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(SharedMemoryUnavailable, match="mode 0700"):
        WorkerSlots(link)


def _pool_file(folder: Path) -> Path:
    return next(folder.glob("pool-*"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.chmod(0o644), "mode 0600"),
        (lambda path: os.truncate(path, 70_000), "its head says"),
        (lambda path: os.truncate(path, 1 << 40), "its head says"),
        (lambda path: _write(path, 0, b"otherone"), "is not a pool"),
        (lambda path: _write(path, 12, b"\xff\xff\xff\xff"), "says 4294967295 slots"),
        (lambda path: _write(path, 16, b"\xff" * 8), "bytes"),
        (lambda path: _write(path, 24, b"0" * 32), "not made for this worker"),
    ],
)
def test_a_pool_that_is_not_what_it_says_is_refused(
    rig: Rig, slots: WorkerSlots, folder: Path, spoil: object, message: str
) -> None:
    sender = sender_for(rig, slots)
    local = packed(sample(), sender.reserve(layout_of_batch(sample())))
    spoil(_pool_file(folder))  # type: ignore[operator]
    with pytest.raises(grpc.RpcError) as error:
        put(rig, sender, local)
    outcome = classify(error.value)
    assert isinstance(outcome, Refusal)
    assert message in outcome.message
    assert rig.store.stats().stored_bytes == 0


def _write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot": 99}, "slots of"),
        ({"offset": 0}, "is not where slot"),
        ({"generation": 0}, "is over"),
        ({"pool": "../pool"}, "is not a pool's name"),
        ({"pool": "pool-0123456789abcdef"}, "cannot be opened"),
    ],
)
def test_a_slot_that_does_not_exist_is_refused(
    rig: Rig, slots: WorkerSlots, change: dict[str, int | str], message: str
) -> None:
    sender = sender_for(rig, slots)
    reserved = sender.reserve(layout_of_batch(sample()))
    pool = sender._pool
    assert pool is not None
    fields = {"pool": pool.name, "slot": 0, "generation": 1, "offset": 65_536, **change}
    slot = pb.SharedMemorySlot(**fields)  # type: ignore[arg-type]
    with pytest.raises(CodecError, match=message):
        slots.lease(slot, reserved.layout.buffer_bytes)
    with pytest.raises(CodecError, match="slots of"):
        slots.lease(pb.SharedMemorySlot(pool=pool.name, generation=1, offset=65_536), 1 << 40)


def test_a_worker_without_the_plane_says_so() -> None:
    with put_server() as rig:
        call = StreamSender(rig.channel)._call
        header = pb.PutMicroBatchHeader(manifest=make_manifest(sample()), epoch=1)
        header.shared_memory.pool = "pool-0123456789abcdef"
        with pytest.raises(grpc.RpcError) as error:
            call(iter([pb.PutMicroBatchRequest(header=header)]), 20.0)
        assert "use the stream" in (error.value.details() or "")  # type: ignore[attr-defined]


# -- leaks --------------------------------------------------------------------------------------


def test_the_pool_loses_its_name_once_the_worker_has_it(
    rig: Rig, slots: WorkerSlots, folder: Path
) -> None:
    sender = sender_for(rig, slots)
    reserved = sender.reserve(layout_of_batch(sample()))
    assert _pool_file(folder).stat().st_mode & 0o777 == 0o600
    put(rig, sender, packed(sample(), reserved))
    assert list(folder.glob("pool-*")) == []
    assert put(rig, sender, sample(index=1)).stored
    assert sender.counters.streamed == 0


def test_what_dead_processes_left_is_removed_and_nothing_else(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    script = textwrap.dedent(
        """
        import os, sys
        from pathlib import Path
        from prestage.wire.shm_plane import WorkerSlots, _Pool
        folder = Path(sys.argv[1])
        slots = WorkerSlots(folder)
        pool = _Pool(folder, "0" * 32, slots=2, slot_bytes=4096)
        os.kill(os.getpid(), 9)
        """
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], check=False, timeout=60)
    assert done.returncode == -9
    left = {path.name for path in folder.iterdir()}
    assert {name.split("-")[0] for name in left} == {"pool", "nonce"}
    (folder / "notes.txt").write_text("not ours")
    mine = folder / "pool-0123456789abcdef"
    descriptor = os.open(mine, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    slots = WorkerSlots(folder)  # Cleans at its start.
    names = {path.name for path in folder.iterdir()}
    assert names == {"notes.txt", mine.name, slots.offer.nonce}
    os.close(descriptor)
    assert remove_leaked(folder) == [mine.name]
    slots.close()
    assert {path.name for path in folder.iterdir()} == {"notes.txt"}


def test_closing_the_sender_leaves_the_workers_bytes(rig: Rig, slots: WorkerSlots) -> None:
    sender = sender_for(rig, slots)
    put(rig, sender, packed(sample(), sender.reserve(layout_of_batch(sample()))))
    sender.close()
    del sender
    assert same_arrays(rig.store.get(ref_of(sample())), sample())


def test_without_room_everything_is_streamed(rig: Rig, slots: WorkerSlots) -> None:
    sender = SharedMemorySender(
        rig.channel, lambda: slots.offer, pool_bytes=70_000, fallback=StreamSender(rig.channel)
    )
    assert put(rig, sender, changed(sample(), "tokens", (3, 0), 0)).stored
    assert sender.counters.streamed == 1
