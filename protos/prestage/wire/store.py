"""The worker's store of put micro-batches: bounded in bytes, checked before use.

A put waits while the store is full; the next micro-batch that the step needs never waits, so a full
store cannot deadlock. When room is short for it (or for the one to be staged), micro-batches that
the open step has trained already are let go (they can be put again after an abort), and counted.

    put:  absent -> RECEIVING (a broken stream leaves it so, to be resumed) -> CHECKING -> READY
    a failed check, a closed step or another epoch drops it from anywhere
"""

from __future__ import annotations

import collections
import enum
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from prestage.microbatch import MicroBatch
from prestage.protocol import BatchRef
from prestage.wire.codec import Placer
from prestage.wire.errors import (
    CodecError,
    DamagedError,
    LimitError,
    MissingError,
    SupersededError,
    WireError,
)

_MAX_ENTRIES: Final = 65_536
_FAILURES_KEPT: Final = 64
_LOOK_S: Final = 1.0  # How often a waiting put looks whether its caller is still there.
_OTHER_S: Final = 30.0
"""For an upload that overtook another: that one's caller may still be there, and waits with it."""

__all__ = ["MicroBatchStore", "MissingError", "StoreStats"]


class _Stage(enum.Enum):
    RECEIVING = "receiving"
    CHECKING = "checking"
    READY = "ready"


@dataclass(kw_only=True, eq=False)
class _Entry:
    size: int
    key: bytes  # The header's content: an upload of the same ref must be the same one.
    stage: _Stage = _Stage.RECEIVING
    placer: Placer | None = None  # Of a stream; None where the bytes need no receiving.
    batch: MicroBatch | None = None


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """What the store holds. Bytes are padded array bytes."""

    refs: tuple[BatchRef, ...]  # Ready for use.
    stored_bytes: int
    limit_bytes: int
    evicted: int
    waited: int  # Puts that had to wait for room.
    failed: int  # Puts whose bytes did not pass their checks.


class MicroBatchStore:
    """Safe from any thread. `next_needed` says which (step, index) the protocol needs next."""

    def __init__(self, limit_bytes: int, next_needed: Callable[[], tuple[int, int]]) -> None:
        if limit_bytes < 1:
            raise ValueError(f"the store's limit is {limit_bytes} bytes; use a positive number")
        self._limit = limit_bytes
        self._next_needed = next_needed
        self._entries: dict[BatchRef, _Entry] = {}
        # Why a put failed: (damaged, text). Not the error itself, whose traceback holds the arrays.
        self._failures: collections.OrderedDict[BatchRef, tuple[bool, str]] = (
            collections.OrderedDict()
        )
        self._used = 0
        self._evicted = 0
        self._waited = 0
        self._failed = 0
        self._changed = threading.Condition()

    # -- putting ------------------------------------------------------------------------------

    def reserve(
        self,
        ref: BatchRef,
        *,
        size: int,
        key: bytes,
        wait_s: float,
        wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Make room, or find the upload that broke off. False: the micro-batch is there already.

        Waits while the store is full or another put of it is being checked. Raises `LimitError`
        after `wait_s`, or at once for more than the store can ever hold; `SupersededError` when the
        caller left (`wanted`), and `CodecError` for another upload under the same ref.
        """
        if size > self._limit:
            raise LimitError(
                f"micro-batch {ref} takes {size} bytes; this worker keeps at most {self._limit}"
                " (--store_memory_bytes)"
            )
        give_up_s = time.monotonic() + wait_s
        with self._changed:
            waited = False
            while True:
                entry = self._entries.get(ref)
                if entry is None and self._room_for(ref, size):
                    self._entries[ref] = _Entry(size=size, key=key)
                    self._used += size
                    return True
                if entry is not None:
                    if entry.key != key:
                        raise CodecError(
                            f"micro-batch {ref} was put before with another manifest or shard"
                        )
                    if entry.stage is _Stage.READY:
                        return False
                    if entry.placer is not None and entry.stage is _Stage.RECEIVING:
                        return True
                elif not waited:
                    waited = True
                    self._waited += 1
                left_s = give_up_s - time.monotonic()
                if left_s <= 0:
                    raise LimitError(
                        f"micro-batch {ref} ({size} bytes) found no room within {wait_s:g} s:"
                        f" {self._used} of {self._limit} bytes are taken (--store_memory_bytes)"
                    )
                self._changed.wait(timeout=min(left_s, _LOOK_S))
                if not wanted():
                    raise SupersededError(f"the put of micro-batch {ref} ended while it waited")

    def placer(self, ref: BatchRef, make: Callable[[], Placer]) -> Placer:
        """The placer of a reserved micro-batch: that of the upload that broke off, or a new one."""
        with self._changed:
            entry = self._reserved(ref)
            if entry.placer is None:
                entry.placer = make()
            return entry.placer

    def received_bytes(self, ref: BatchRef) -> tuple[bool, int]:
        """(whether it is ready, contiguous bytes of an upload that broke off)."""
        with self._changed:
            entry = self._entries.get(ref)
            if entry is None:
                return False, 0
            received = 0 if entry.placer is None else entry.placer.received_bytes
            return entry.stage is _Stage.READY, received

    def settle(self, ref: BatchRef, batch: MicroBatch, check: Callable[[], None]) -> None:
        """All bytes are there: check them outside any lock, then offer them for use.

        Raises what `check` raises, and drops the micro-batch then; `SupersededError` when it was
        dropped meanwhile.
        """
        with self._changed:
            entry = self._reserved(ref)
            entry.stage, entry.batch = _Stage.CHECKING, batch
        try:
            check()
        except BaseException as error:
            with self._changed:
                if isinstance(error, WireError):
                    self._failed += 1
                    self._failures[ref] = isinstance(error, DamagedError), str(error)
                    while len(self._failures) > _FAILURES_KEPT:
                        self._failures.popitem(last=False)
                if self._entries.get(ref) is entry:
                    self._drop(ref)
            raise
        with self._changed:
            if self._entries.get(ref) is not entry:
                raise SupersededError(f"micro-batch {ref} was dropped while it was checked")
            entry.stage, entry.placer = _Stage.READY, None
            self._failures.pop(ref, None)
            self._changed.notify_all()

    def await_other(self, ref: BatchRef, wanted: Callable[[], bool]) -> bool:
        """Wait, for a while, until another upload of this micro-batch is over: whether it is there.

        For an upload that another one of the same content overtook.
        """
        give_up_s = time.monotonic() + _OTHER_S
        with self._changed:
            while wanted() and time.monotonic() < give_up_s:
                entry = self._entries.get(ref)
                if entry is None:
                    return False
                if entry.stage is _Stage.READY:
                    return True
                self._changed.wait(timeout=_LOOK_S)
        return False

    def abandon(self, ref: BatchRef) -> None:
        """Its upload is no good: give the room back."""
        with self._changed:
            entry = self._entries.get(ref)
            if entry is not None and entry.stage is _Stage.RECEIVING:
                self._drop(ref)

    def _reserved(self, ref: BatchRef) -> _Entry:
        entry = self._entries.get(ref)
        if entry is None or entry.stage is not _Stage.RECEIVING:
            raise SupersededError(f"micro-batch {ref} was dropped while its bytes came")
        return entry

    def _room_for(self, ref: BatchRef, size: int) -> bool:
        needed = self._next_needed()
        place = (ref.step, ref.index)
        is_next = place <= needed
        held = any((other.step, other.index) == needed for other in self._entries)
        # Others leave room for the next one, which is as large as any of this run.
        total = size if is_next or held else 2 * size
        if is_next or place == (needed[0] + 1, 0):
            for old in sorted(self._entries):
                if self._used + total <= self._limit:
                    break
                at, stage = (old.step, old.index), self._entries[old].stage
                trained = at < needed and stage is _Stage.READY
                # Broken uploads of other content under the same id: the newest is meant.
                rival = is_next and at == place and stage is _Stage.RECEIVING
                if trained or rival:
                    self._drop(old)
                    self._evicted += 1
        if is_next and self._used <= self._limit:
            return True  # At most one micro-batch over the limit.
        return self._used + total <= self._limit and len(self._entries) < _MAX_ENTRIES

    def _drop(self, ref: BatchRef) -> None:
        entry = self._entries.pop(ref)
        if entry.placer is not None:
            entry.placer.take_over()  # Nobody writes it from now on.
        self._used -= entry.size
        self._changed.notify_all()

    # -- using --------------------------------------------------------------------------------

    def get(self, ref: BatchRef) -> MicroBatch:
        """The checked micro-batch; waits for its check. Raises `MissingError`, `DamagedError`."""
        with self._changed:
            while True:
                entry = self._entries.get(ref)
                if entry is None or entry.stage is not _Stage.CHECKING:
                    break
                self._changed.wait()
            if entry is not None and entry.batch is not None and entry.stage is _Stage.READY:
                return entry.batch
            failure = self._failures.get(ref)
        if failure is not None:
            damaged, why = failure
            if damaged:
                raise DamagedError(f"{why}: put it again")
            raise MissingError(f"micro-batch {ref} was refused when it was put: {why}")
        raise MissingError(f"micro-batch {ref} was not put (or its step closed): put it first")

    def release(self, ref: BatchRef) -> None:
        """Drop one micro-batch that is ready; nothing where there is none."""
        with self._changed:
            entry = self._entries.get(ref)
            if entry is not None and entry.stage is _Stage.READY:
                self._drop(ref)

    def release_before(self, step: int) -> None:
        """Drop every step before `step`."""
        with self._changed:
            for ref in [ref for ref in self._entries if ref.step < step]:
                self._drop(ref)
            for ref in [ref for ref in self._failures if ref.step < step]:
                del self._failures[ref]

    def clear(self) -> None:
        with self._changed:
            for ref in list(self._entries):
                self._drop(ref)
            self._failures.clear()

    def stats(self) -> StoreStats:
        with self._changed:
            ready = (ref for ref, entry in self._entries.items() if entry.stage is _Stage.READY)
            return StoreStats(
                refs=tuple(sorted(ready)),
                stored_bytes=self._used,
                limit_bytes=self._limit,
                evicted=self._evicted,
                waited=self._waited,
                failed=self._failed,
            )
