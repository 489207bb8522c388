"""The worker's store of put micro-batches: bounded in bytes, fenced by epoch, verified before use.

A put waits while the store is full; the next micro-batch that the step needs never waits, so a full
store cannot deadlock. When room is short for it, micro-batches that the open step has trained
already are let go (they can be put again after an abort), and counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from prestage.microbatch import MicroBatch
from prestage.protocol import BatchRef
from prestage.wire.digest import batch_digest
from prestage.wire.errors import DamagedError, LimitError, WireError


class MissingError(WireError):
    """The store holds no micro-batch of this id and digest."""


@dataclass(kw_only=True)
class _Entry:
    size: int
    batch: MicroBatch | None = None  # None while its bytes arrive.
    verified: bool = False
    damage: str = ""


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """What the store holds. Bytes are padded array bytes."""

    refs: tuple[BatchRef, ...]
    stored_bytes: int
    limit_bytes: int
    evicted: int
    waited: int  # Puts that had to wait for room.


class MicroBatchStore:
    """Safe from any thread. `next_needed` says which (step, index) the protocol needs next."""

    def __init__(self, limit_bytes: int, next_needed: Callable[[], tuple[int, int]]) -> None:
        if limit_bytes < 1:
            raise ValueError(f"the store's limit is {limit_bytes} bytes; use a positive number")
        self._limit = limit_bytes
        self._next_needed = next_needed
        self._entries: dict[BatchRef, _Entry] = {}
        self._used = 0
        self._evicted = 0
        self._waited = 0
        self._changed = threading.Condition()

    # -- putting ------------------------------------------------------------------------------

    def begin(self, ref: BatchRef, size: int, *, wait_s: float) -> bool:
        """Reserve room. False: the micro-batch is there already. Raises `LimitError` after the wait."""
        with self._changed:
            waited = False
            while True:
                entry = self._entries.get(ref)
                if entry is not None and entry.batch is not None and not entry.damage:
                    return False
                if entry is None and self._room_for(ref, size):
                    self._entries[ref] = _Entry(size=size)
                    self._used += size
                    return True
                if entry is not None and entry.damage:
                    self._drop(ref)
                    continue
                if not waited:
                    waited = True
                    self._waited += 1
                if not self._changed.wait(timeout=wait_s):
                    raise LimitError(
                        f"micro-batch {ref} ({size} bytes) found no room within {wait_s:g} s:"
                        f" {self._used} of {self._limit} bytes are taken (--store_memory_bytes)"
                    )

    def _room_for(self, ref: BatchRef, size: int) -> bool:
        needed = self._next_needed()
        is_next = (ref.step, ref.index) <= needed
        # Others leave room for the next one, which is as large as any of this run.
        reserve = 0 if is_next else size
        if self._used + size + reserve <= self._limit:
            return True
        if not is_next:
            return False
        for old in sorted(self._entries):
            if self._used + size <= self._limit:
                break
            if (old.step, old.index) < needed and self._entries[old].batch is not None:
                self._drop(old)
                self._evicted += 1
        return True  # The next one always gets in: at most one micro-batch over the limit.

    def complete(self, ref: BatchRef, batch: MicroBatch) -> None:
        """Its bytes are all there."""
        with self._changed:
            entry = self._entries.get(ref)
            if entry is not None:
                entry.batch = batch
                self._changed.notify_all()

    def abandon(self, ref: BatchRef) -> None:
        """Its upload failed: give the room back."""
        with self._changed:
            entry = self._entries.get(ref)
            if entry is not None and entry.batch is None:
                self._drop(ref)

    def _drop(self, ref: BatchRef) -> None:
        self._used -= self._entries.pop(ref).size
        self._changed.notify_all()

    # -- using --------------------------------------------------------------------------------

    def verify(self, ref: BatchRef) -> None:
        """Hash the stored bytes, once. Off the device thread: called when the put is complete."""
        with self._changed:
            entry = self._entries.get(ref)
            batch = None if entry is None or entry.verified else entry.batch
        if entry is None or batch is None:
            return
        found = batch_digest(batch)
        with self._changed:
            entry.verified = True
            if found != ref.digest:
                entry.damage = f"micro-batch {ref} was announced with that digest; it has {found}"
            self._changed.notify_all()

    def get(self, ref: BatchRef) -> MicroBatch:
        """The verified micro-batch. Raises `MissingError`, `DamagedError`."""
        with self._changed:
            entry = self._entries.get(ref)
        if entry is None or entry.batch is None:
            raise MissingError(f"micro-batch {ref} was not put (or its step closed): put it first")
        if not entry.verified:
            self.verify(ref)
        if entry.damage:
            raise DamagedError(f"{entry.damage}: put it again")
        return entry.batch

    def release_before(self, step: int) -> None:
        """Drop every step before `step`."""
        with self._changed:
            for ref in [ref for ref in self._entries if ref.step < step]:
                self._drop(ref)

    def clear(self) -> None:
        with self._changed:
            for ref in list(self._entries):
                self._drop(ref)

    def stats(self) -> StoreStats:
        with self._changed:
            refs = tuple(sorted(ref for ref, entry in self._entries.items() if entry.batch))
            return StoreStats(
                refs=refs,
                stored_bytes=self._used,
                limit_bytes=self._limit,
                evicted=self._evicted,
                waited=self._waited,
            )
