"""The `shared-memory` plane: the packer writes into a slot, the worker trains on the same bytes.

The sender owns a pool of slots, one file in the shared-memory file system; the worker maps it
readonly. Pages are allocated and touched once, when the pool is made. A slot is used again only when
the worker has let go of it in the pool's control words, which happens when the last array (or device
array) on it is gone. Both ends prove that they see one host: the worker offers a nonce file, and the
pool carries the secret that is in it.

Not `multiprocessing.shared_memory`: there, an attaching process that ends unlinks the owner's
segment. Nothing leaks: the pool loses its name once the worker has mapped it, and files whose owner
is dead (it held a lock on them) are removed when either side starts or ends.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import itertools
import logging
import mmap
import os
import re
import secrets
import stat
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import numpy as np
import numpy.typing as npt

from prestage.microbatch import MicroBatch
from prestage.tensor.v1 import tensor_pb2 as pb
from prestage.wire.arena import Lease, address_of
from prestage.wire.codec import layout_of_batch, make_manifest
from prestage.wire.errors import CodecError
from prestage.wire.layout import Buffer, Layout, ShardRange
from prestage.wire.planes import SendBuffer
from prestage.wire.stream_plane import Part, PutCall, StreamSender, end_part, shard_to_proto

log = logging.getLogger("prestage.wire")

MAX_SLOTS: Final = 4096
_DATA_START: Final = 64 << 10  # Head, then one word a slot; the slots start here.
_WORDS_START: Final = 4096
_HEAD: Final = struct.Struct("<8sIIQ32s")  # magic, version, slots, bytes a slot, secret (hex)
_MAGIC: Final = b"prestage"
_VERSION: Final = 1
_POOL_NAME: Final = re.compile(r"pool-[0-9a-f]{16}\Z")
_NONCE_NAME: Final = re.compile(r"nonce-[0-9a-f]{16}\Z")
_MODE: Final = 0o600


class SharedMemoryUnavailable(Exception):
    """The plane cannot be used here; the message says why. The stream always can."""


# -- the folder -----------------------------------------------------------------------------------


def default_folder() -> Path:
    """One folder a user in the shared-memory file system."""
    return Path(f"/dev/shm/prestage-{os.geteuid()}")


def check_folder(folder: Path) -> None:
    """Raises `SharedMemoryUnavailable` unless the folder is ours alone."""
    try:
        found = os.lstat(folder)
    except OSError as error:
        raise SharedMemoryUnavailable(f"{folder} cannot be used: {error}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise SharedMemoryUnavailable(
            f"{folder} is not a folder of this user alone (mode 0700): remove it, or name another"
        )


def prepare_folder(folder: Path) -> None:
    """Make the folder and remove what dead processes left in it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise SharedMemoryUnavailable(f"{folder} cannot be made: {error}") from error
    check_folder(folder)
    remove_leaked(folder)


def remove_leaked(folder: Path) -> list[str]:
    """Remove files whose owner no longer holds its lock on them. Returns their names."""
    removed = []
    for path in sorted(folder.iterdir()):
        if not (_POOL_NAME.match(path.name) or _NONCE_NAME.match(path.name)):
            continue
        with contextlib.suppress(OSError), _opened(path, os.O_RDWR) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(path.name)
    if removed:
        log.info("removed %d files of dead processes from %s", len(removed), folder)
    return removed


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _create_locked(folder: Path, kind: str) -> tuple[Path, int]:
    """A new file of ours, locked for as long as its descriptor is open."""
    while True:
        path = folder / f"{kind}-{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, _MODE)
        try:
            os.fchmod(descriptor, _MODE)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A cleaner may have taken it for a leak before it was locked.
            if os.fstat(descriptor).st_nlink:
                return path, descriptor
        except BlockingIOError:
            pass
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        os.close(descriptor)


def _remove(path: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.close(descriptor)


# -- the worker's half ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SharedMemoryOffer:
    """What a worker says in its capabilities."""

    folder: str
    nonce: str  # Name of the nonce file.


class _MappedPool:
    """A sender's pool as the worker sees it. Alive as long as any lease of it."""

    def __init__(self, descriptor: int, *, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        control = mmap.mmap(descriptor, _DATA_START, mmap.MAP_SHARED)
        self._words: npt.NDArray[np.uint64] = np.frombuffer(control, np.uint64, slots, _WORDS_START)
        size = _DATA_START + slots * slot_bytes
        self._memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
        # Leases of each slot, and the last generation of it that a header named. Both are touched
        # by finalisers, which may run anywhere and so take no lock: a lease is entered before its
        # generation is, and `release` reads them the other way round. Then no generation is let go
        # of while a lease of it is alive, and none is forgotten.
        self._live: list[set[int]] = [set() for _ in range(slots)]
        self._seen = [0] * slots
        self._tickets = itertools.count()

    def let_go_of(self, slot: int) -> int:
        """The last generation of the slot that was let go of."""
        return int(self._words[slot])

    def lease(self, slot: int, generation: int, size: int) -> Buffer:
        """Readonly bytes; lets go of the slot when nothing refers to any lease of it."""
        address = address_of(self._memory) + _DATA_START + slot * self.slot_bytes
        lease = Lease(address, size, readonly=True)
        ticket = next(self._tickets)
        self._live[slot].add(ticket)
        weakref.finalize(lease, self._end, slot, ticket).atexit = False
        self._seen[slot] = max(self._seen[slot], generation)
        return lease.buffer()

    def let_go(self, slot: int, generation: int) -> None:
        """The sender may write the slot again, now or when its last lease ends."""
        self._seen[slot] = max(self._seen[slot], generation)
        self._release(slot)

    def _end(self, slot: int, ticket: int) -> None:
        self._live[slot].discard(ticket)
        self._release(slot)

    def _release(self, slot: int) -> None:
        while True:
            seen = self._seen[slot]
            if self._live[slot] or self._words[slot] >= seen:
                return
            self._words[slot] = seen

    def owner_is_gone(self) -> bool:
        """Whether the sender has closed the pool or died."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


class WorkerSlots:
    """Leases slots of senders on this host. A `SlotReader`. Safe from any thread."""

    def __init__(
        self, folder: Path | None = None, *, max_pool_bytes: int = 64 << 30, max_pools: int = 8
    ) -> None:
        """Makes the folder and its nonce file. Raises `SharedMemoryUnavailable`."""
        self._folder = folder or default_folder()
        prepare_folder(self._folder)
        self._max_pool_bytes = max_pool_bytes
        self._max_pools = max_pools
        self._secret = secrets.token_hex(16)
        try:
            path, descriptor = _create_locked(self._folder, "nonce")
            os.write(descriptor, self._secret.encode())
        except OSError as error:
            raise SharedMemoryUnavailable(f"{self._folder} cannot be used: {error}") from error
        self._remove_nonce = weakref.finalize(self, _remove, path, descriptor)
        self.offer = SharedMemoryOffer(folder=str(self._folder), nonce=path.name)
        self._lock = threading.Lock()
        self._pools: dict[str, _MappedPool] = {}

    def lease(self, slot: pb.SharedMemorySlot, size: int) -> Buffer:
        """Readonly bytes of a slot. Raises `CodecError` for one that is not as the header says."""
        with self._lock:
            pool = self._pool(slot.pool)
        number, generation = slot.slot, slot.generation
        if number >= pool.slots or size > pool.slot_bytes:
            raise CodecError(
                f"shared_memory.slot {number} with {size} bytes: pool {slot.pool} has {pool.slots}"
                f" slots of {pool.slot_bytes} bytes"
            )
        if slot.offset != _DATA_START + number * pool.slot_bytes:
            raise CodecError(f"shared_memory.offset {slot.offset} is not where slot {number} lies")
        if generation <= pool.let_go_of(number):
            raise CodecError(
                f"shared_memory.generation {generation} of slot {number} is over: every put needs a"
                " new one"
            )
        return pool.lease(number, generation, size)

    def let_go(self, slot: pb.SharedMemorySlot) -> None:
        """Tell the sender that a slot is free, unless somebody reads it. Never raises."""
        with self._lock:
            try:
                pool = self._pool(slot.pool)
            except CodecError:
                return  # Not a pool of ours: nobody waits for it here.
            if slot.slot < pool.slots:
                pool.let_go(slot.slot, slot.generation)

    def close(self) -> None:
        """Withdraw the offer and remove what dead processes left. Leased slots stay readable."""
        self._remove_nonce()
        with self._lock:
            self._pools.clear()
        with contextlib.suppress(OSError):
            remove_leaked(self._folder)

    def _pool(self, name: str) -> _MappedPool:
        pool = self._pools.get(name)
        if pool is not None:
            return pool
        for other in [key for key, value in self._pools.items() if value.owner_is_gone()]:
            del self._pools[other]  # Its memory goes when its last lease does.
        if len(self._pools) >= self._max_pools:
            raise CodecError(
                f"shared_memory.pool: {self._max_pools} pools are mapped already: close one"
            )
        if not _POOL_NAME.match(name):
            raise CodecError(f"shared_memory.pool {name[:80]!r} is not a pool's name")
        try:
            descriptor = os.open(
                self._folder / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            )
        except OSError as error:
            raise CodecError(
                f"shared_memory.pool {name} cannot be opened in {self._folder}: {error.strerror}"
            ) from error
        try:
            slots, slot_bytes = self._check_pool(name, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        pool = self._pools[name] = _MappedPool(descriptor, slots=slots, slot_bytes=slot_bytes)
        return pool

    def _check_pool(self, name: str, descriptor: int) -> tuple[int, int]:
        found = os.fstat(descriptor)
        if (
            not stat.S_ISREG(found.st_mode)
            or found.st_uid != os.geteuid()
            or stat.S_IMODE(found.st_mode) != _MODE
        ):
            raise CodecError(f"shared_memory.pool {name} is not a file of this user, mode 0600")
        head = os.pread(descriptor, _HEAD.size, 0)
        if len(head) != _HEAD.size:
            raise CodecError(f"shared_memory.pool {name} has no head")
        magic, version, slots, slot_bytes, secret = _HEAD.unpack(head)
        if magic != _MAGIC or version != _VERSION:
            raise CodecError(f"shared_memory.pool {name} is not a pool of version {_VERSION}")
        if not secrets.compare_digest(secret, self._secret.encode()):
            raise CodecError(f"shared_memory.pool {name} was not made for this worker")
        if not 1 <= slots <= MAX_SLOTS or slot_bytes % mmap.PAGESIZE or not slot_bytes:
            raise CodecError(f"shared_memory.pool {name} says {slots} slots of {slot_bytes} bytes")
        size = _DATA_START + slots * slot_bytes
        if size > self._max_pool_bytes:
            raise CodecError(
                f"shared_memory.pool {name} has {size} bytes; this worker maps"
                f" {self._max_pool_bytes}"
            )
        # A hole would end the reader with SIGBUS when the file system is full.
        if found.st_size != size or found.st_blocks * 512 < size:
            raise CodecError(
                f"shared_memory.pool {name} has {found.st_size} bytes; its head says {size}"
            )
        return slots, slot_bytes


# -- the sender's half ----------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class _Slot:
    number: int
    generation: int = 0
    taken: bool = False  # Something in this process refers to it.
    sent: bool = False  # The worker may read this generation.


class _Pool:
    """Slots in one new file. Raises `OSError` when the file system has no room for them."""

    def __init__(self, folder: Path, secret: str, *, slots: int, slot_bytes: int) -> None:
        path, descriptor = _create_locked(folder, "pool")
        self.name = path.name
        self.slot_bytes = slot_bytes
        self._remove = weakref.finalize(self, _remove, path, descriptor)
        size = _DATA_START + slots * slot_bytes
        try:
            # Says ENOSPC now, where a write to a mapped hole would end the process later.
            os.posix_fallocate(descriptor, 0, size)
            os.pwrite(
                descriptor, _HEAD.pack(_MAGIC, _VERSION, slots, slot_bytes, secret.encode()), 0
            )
            self._memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError:
            self._remove()
            raise
        self._path = path
        self._words: npt.NDArray[np.uint64] = np.frombuffer(
            self._memory, np.uint64, slots, _WORDS_START
        )
        self._start = address_of(self._memory) + _DATA_START
        self.slots = [_Slot(number=number) for number in range(slots)]
        # Filled by finalisers, which may run anywhere: no lock may be taken there.
        self._returned: collections.deque[_Slot] = collections.deque()

    def hide(self) -> None:
        """Remove its name: the worker has mapped it, and nothing can leak from now on."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give the pool up. Its memory goes when nothing refers to it on either side."""
        self._remove()

    def free(self, slot: _Slot) -> bool:
        return not slot.taken and not (slot.sent and self.let_go_of(slot) < slot.generation)

    def let_go_of(self, slot: _Slot) -> int:
        return int(self._words[slot.number])

    def idle(self) -> bool:
        """Whether every slot is free."""
        self._collect()
        return all(self.free(slot) for slot in self.slots)

    def _collect(self) -> None:
        while self._returned:
            self._returned.popleft().taken = False

    def take(self, size: int) -> tuple[_Slot, Buffer] | None:
        """A free slot and its bytes. The slot is taken until nothing refers to the bytes."""
        self._collect()
        slot = next((slot for slot in self.slots if self.free(slot)), None)
        if slot is None or size > self.slot_bytes:
            return None
        slot.taken, slot.sent = True, False
        return slot, self._buffer(slot, size)

    def _buffer(self, slot: _Slot, size: int) -> Buffer:
        lease = Lease(self._start + slot.number * self.slot_bytes, size, readonly=False)
        # The memory stays mapped while a lease refers to it.
        weakref.finalize(lease, _give_back, self._returned, slot, self._memory).atexit = False
        return lease.buffer()

    def slot_at(self, address: int) -> _Slot | None:
        """The slot that starts at an address."""
        number, rest = divmod(address - self._start, self.slot_bytes)
        if rest or not 0 <= number < len(self.slots):
            return None
        return self.slots[number]

    def address(self, slot: _Slot) -> pb.SharedMemorySlot:
        return pb.SharedMemorySlot(
            pool=self.name,
            slot=slot.number,
            generation=slot.generation,
            offset=_DATA_START + slot.number * self.slot_bytes,
        )


def _give_back(returned: collections.deque[_Slot], slot: _Slot, memory: mmap.mmap) -> None:
    del memory
    returned.append(slot)


@dataclass(kw_only=True)
class SharedMemoryCounters:
    """Counted for metrics. Monotonic."""

    handed_over: int = 0  # Packed straight into a slot.
    copied_in: int = 0
    streamed: int = 0  # No slot was free, or none is large enough.


class SharedMemorySender:
    """Puts micro-batches through slots on one host, and by the stream when no slot is free.

    A `PayloadPlane`. Safe from several threads. The pool is made at the first `reserve` or `put`,
    with slots as large as that micro-batch, and anew for larger ones once no slot is in use.
    """

    name: Final = "shared-memory"

    def __init__(
        self,
        channel: grpc.Channel,
        offer_of: Callable[[], SharedMemoryOffer | None],
        *,
        pool_bytes: int,
        fallback: StreamSender,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """Raises `SharedMemoryUnavailable` unless the worker is on this host.

        `offer_of`: asks the worker's capabilities; called now and for every new worker process.
        `pool_bytes`: at most that much shared memory. A step's micro-batches stay in their slots
        until it closes, so have room for M + 2 of them.
        """
        self._offer_of = offer_of
        self._folder, self._secret = _accept(offer_of())
        self._pool_bytes = pool_bytes
        self._fallback = fallback
        self._call = PutCall(channel, metadata)
        self._lock = threading.Lock()
        self._pool: _Pool | None = None
        self._no_pool = ""  # Why there can be none.
        self._incarnation = ""
        self._warned = False
        self.counters = SharedMemoryCounters()

    def reserve(self, layout: Layout) -> SendBuffer:
        """A slot's bytes; memory of the stream plane when no slot is free."""
        with self._lock:
            taken = self._take(layout.buffer_bytes)
        if taken is None:
            return self._fallback.reserve(layout)
        return SendBuffer(layout=layout, buffer=taken[1], zeroed=False)

    def put(
        self,
        batch: MicroBatch,
        *,
        epoch: int,
        incarnation: str,
        timeout_s: float,
        shard: ShardRange | None = None,
    ) -> pb.PutMicroBatchResponse:
        """Hand one micro-batch over; copied into a slot first if it was not packed into one.

        Raises `grpc.RpcError`. Harmless to repeat.
        """
        layout = layout_of_batch(batch, shard)
        with self._lock:
            self._follow(incarnation)
            pool = self._pool
            slot = None if pool is None or shard is not None else _slot_of(pool, batch, layout)
            buffer: Buffer | None = None
            if slot is not None:
                self.counters.handed_over += 1
            elif (taken := self._take(layout.buffer_bytes)) is not None:
                slot, buffer = taken
                self.counters.copied_in += 1
                pool = self._pool
            else:
                self.counters.streamed += 1
                self._warn(batch)
        if slot is None or pool is None:
            return self._fallback.put(
                batch, epoch=epoch, incarnation=incarnation, timeout_s=timeout_s, shard=shard
            )
        if buffer is not None:
            _copy_in(batch, layout, buffer, shard)
        with self._lock:
            slot.generation += 1
            slot.sent = True
            address = pool.address(slot)
        header = pb.PutMicroBatchHeader(
            manifest=make_manifest(batch, with_blocks=shard is not None),
            epoch=epoch,
            incarnation=incarnation,
            shard=None if shard is None else shard_to_proto(shard),
            shared_memory=address,
        )
        parts: list[Part] = [pb.PutMicroBatchRequest(header=header), end_part(layout)]
        response = self._call(iter(parts), timeout_s)
        if not response.duplicate:
            pool.hide()
        return response

    def close(self) -> None:
        """Give the pool up. What the worker reads of it stays readable there."""
        with self._lock:
            self._drop_pool()
        self._fallback.close()

    # -- holding the lock -------------------------------------------------------------------------

    def _drop_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _follow(self, incarnation: str) -> None:
        """A new worker process: what the old one still reads is not known. Make a new pool.

        The first one that is put to may also be another than the one that made the offer.
        """
        if incarnation != self._incarnation:
            first = not self._incarnation
            try:
                folder, secret = _accept(self._offer_of())
            except SharedMemoryUnavailable as error:
                self._no_pool = str(error)
                log.warning("micro-batches are streamed, not shared: %s", error)
                self._drop_pool()
            else:
                if not first or secret != self._secret:
                    self._drop_pool()
                self._folder, self._secret, self._no_pool = folder, secret, ""
        self._incarnation = incarnation

    def _take(self, size: int) -> tuple[_Slot, Buffer] | None:
        if self._pool is not None and size > self._pool.slot_bytes and self._pool.idle():
            self._pool.close()  # Larger micro-batches than before: slots of their size.
            self._pool = None
        if self._pool is None and not self._no_pool:
            self._make_pool(size)
        return None if self._pool is None else self._pool.take(size)

    def _make_pool(self, size: int) -> None:
        slot_bytes = max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
        slots = min(MAX_SLOTS, (self._pool_bytes - _DATA_START) // slot_bytes)
        if slots < 1:
            self._no_pool = (
                f"a micro-batch has {size} bytes, the pool {self._pool_bytes}"
                " (--shared_memory_bytes)"
            )
        else:
            try:
                self._pool = _Pool(self._folder, self._secret, slots=slots, slot_bytes=slot_bytes)
            except OSError as error:
                why = "no room" if error.errno == errno.ENOSPC else str(error)
                self._no_pool = f"{self._folder}: {why} for {slots} slots of {slot_bytes} bytes"
        if self._no_pool:
            log.warning("micro-batches are streamed, not shared: %s", self._no_pool)
            self._warned = True

    def _warn(self, batch: MicroBatch) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "micro-batch %s is streamed: no slot of the shared-memory pool is free or large"
                " enough; give it room for M + 2 micro-batches (later ones are counted only)",
                batch.id,
            )


def _accept(offer: SharedMemoryOffer | None) -> tuple[Path, str]:
    """(folder, secret) of an offer. Raises `SharedMemoryUnavailable`."""
    if offer is None:
        raise SharedMemoryUnavailable("the worker does not offer shared memory")
    folder = Path(offer.folder)
    secret = _read_secret(folder, offer.nonce)
    remove_leaked(folder)
    return folder, secret


def _read_secret(folder: Path, nonce: str) -> str:
    """Prove that the worker's files can be read here: it is on this host, under this user."""
    if not folder.is_absolute() or not _NONCE_NAME.match(nonce):
        raise SharedMemoryUnavailable(f"the worker offers {str(folder)[:200]!r}, {nonce[:80]!r}")
    check_folder(folder)
    try:
        with _opened(folder / nonce, os.O_RDONLY) as descriptor:
            secret = os.read(descriptor, 64).decode("ascii", "replace")
    except OSError as error:
        raise SharedMemoryUnavailable(
            f"the worker's nonce file {folder / nonce} cannot be read: it is on another host, or"
            f" runs as another user ({error.strerror})"
        ) from error
    if not re.fullmatch(r"[0-9a-f]{32}", secret):
        raise SharedMemoryUnavailable(f"{folder / nonce} is not a worker's nonce")
    return secret


def _slot_of(pool: _Pool, batch: MicroBatch, layout: Layout) -> _Slot | None:
    """The slot that a micro-batch was packed into, if it was."""
    slot: _Slot | None = None
    for place in layout.tensors:
        array = batch.arrays[place.name]
        address = int(array.__array_interface__["data"][0]) - place.start
        here = pool.slot_at(address) if array.flags.c_contiguous else None
        if here is None or (slot is not None and here is not slot):
            return None
        slot = here
    return slot


def _copy_in(batch: MicroBatch, layout: Layout, buffer: Buffer, shard: ShardRange | None) -> None:
    for name, target in layout.arrays(buffer).items():
        source = batch.arrays[name]
        if shard is not None:
            source = source[
                shard.row_start : shard.row_start + shard.row_count,
                shard.token_start : shard.token_start + shard.token_count,
            ]
        np.copyto(target, source)


def choose_plane(
    channel: grpc.Channel,
    offer_of: Callable[[], SharedMemoryOffer | None],
    *,
    pool_bytes: int,
    metadata: tuple[tuple[str, str], ...] = (),
) -> StreamSender | SharedMemorySender:
    """Shared memory where the worker offers it and proves to be on this host, else the stream.

    `pool_bytes` 0 asks for the stream. Raises what `offer_of` raises.
    """
    stream = StreamSender(channel, metadata)
    if pool_bytes <= 0:
        return stream
    try:
        return SharedMemorySender(
            channel, offer_of, pool_bytes=pool_bytes, fallback=stream, metadata=metadata
        )
    except SharedMemoryUnavailable as error:
        log.info("payloads go by stream: %s", error)
        return stream
