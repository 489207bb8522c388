"""Large buffers that are used again instead of being given back and faulted in anew.

A buffer goes back to its pool when nothing refers to it any more: no view, and no device array that
aliases one. So it is never written while somebody still reads it. Contents are not cleared.
"""

from __future__ import annotations

import collections
import mmap
import threading
import weakref
from typing import Final

import numpy as np

from prestage.wire.layout import Buffer

_PAGE: Final = mmap.PAGESIZE
_PIECE: Final = 64 << 20


class Lease:
    """Owns one stretch of memory; every array made from it keeps it alive."""

    def __init__(self, address: int, size: int, *, readonly: bool) -> None:
        self.__array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, readonly),
            "version": 3,
        }

    def buffer(self) -> Buffer:
        """The memory as an array whose base is this lease."""
        return np.asarray(self)


def address_of(memory: mmap.mmap) -> int:
    """Where a mapping starts. The mapping stays open as long as anything refers to it."""
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


class ArenaPool:
    """Safe from any thread. Keeps at most `idle_bytes` of unused buffers."""

    def __init__(self, idle_bytes: int) -> None:
        self._idle_bytes = idle_bytes
        # Filled by finalisers, which may run at any allocation: no lock may be taken there.
        self._returned: collections.deque[mmap.mmap] = collections.deque()
        self._lock = threading.Lock()

    def take(self, size: int) -> tuple[Buffer, bool]:
        """A page-aligned buffer of `size` bytes, and whether it is fresh (all zero)."""
        capacity = max(_PAGE, -(-size // _PAGE) * _PAGE)
        memory = self._reuse(capacity)
        fresh = memory is None
        if memory is None:
            memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if capacity >= 4 << 20:
                memory.madvise(mmap.MADV_HUGEPAGE)
        lease = Lease(address_of(memory), capacity, readonly=False)
        weakref.finalize(lease, self._returned.append, memory).atexit = False
        return lease.buffer()[:size], fresh

    def _reuse(self, capacity: int) -> mmap.mmap | None:
        with self._lock:
            kept: list[mmap.mmap] = []
            while self._returned:
                kept.append(self._returned.popleft())
            found = next((memory for memory in kept if len(memory) == capacity), None)
            idle = 0
            for memory in kept:
                # Of another size: of a shape that is no longer sent. Let go of it.
                if memory is found or len(memory) != capacity:
                    continue
                idle += len(memory)
                if idle <= self._idle_bytes:
                    self._returned.append(memory)
            return found

    def warm(self, size: int, count: int) -> int:
        """Touch `count` buffers of `size` bytes, within the idle limit; returns how many are ready.

        Memory that nobody has written yet costs a page fault for each page at its first use: here
        that is paid before the first upload instead of in it.
        """
        count = min(count, self._idle_bytes // max(1, size))
        held = [self.take(size) for _ in range(count)]
        for buffer, fresh in held:
            if fresh:
                for start in range(0, len(buffer), _PIECE):  # Numpy lets other threads run.
                    buffer[start : start + _PIECE : _PAGE] = 0
        return count

    def trim(self) -> None:
        """Give unused buffers back to the system."""
        with self._lock:
            self._returned.clear()
