"""Payload files: appended to by one writer, read by anyone, deleted whole.

Arrays lie in files beside the database because SQLite writes a blob twice (log, then table) and
keeps it in its page cache. Measured here in ms a trajectory, committed 16 at a time, blobs against
these files: 2 KB 0.02 / 0.04, 13 KB 0.11 / 0.05, 130 KB 0.66 / 0.16, 1 MB 3.7 / 0.8. So the extra
sync of the file costs less than the second copy from a few KB on, and one way serves all sizes.

Order of a commit: bytes, sync of the file (and of the folder when the file is new), then the rows
that name them. A crash in between leaves a tail that no row names; no process appends to a file
that another one wrote, so such a tail stays dead until its file is deleted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from orchestrator.journal.errors import JournalDamaged
from orchestrator.journal.payload import Encoded, Record

Probe = Callable[[str], None]
"""Hears of each durable operation before it happens; tests make it fail or die there."""


def no_probe(operation: str) -> None:
    """Nothing goes wrong."""
    del operation


_BUFFERS_A_CALL: Final = 512  # Below IOV_MAX.
_SUFFIX: Final = ".payload"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a payload goes."""

    segment: int
    position: int


class Segments:
    """The payload files of one journal. Writing is for one thread; `read` is for any."""

    def __init__(self, folder: Path, *, segment_bytes: int, probe: Probe = no_probe) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._probe = probe
        self.sizes: dict[int, int] = {}  # Durable bytes of each file.
        for path in folder.glob(f"*{_SUFFIX}"):
            if path.stem.isdigit():
                self.sizes[int(path.stem)] = path.stat().st_size
        self.total_bytes = sum(self.sizes.values())
        self._number = max(self.sizes, default=-1) + 1
        self._file = -1
        self._entered = False  # The folder's entry of the file is durable.
        self._staged: list[memoryview] = []
        self._staged_bytes = 0
        self._position = 0

    def path(self, number: int) -> Path:
        """The file of segment `number`."""
        return self._folder / f"{number:08d}{_SUFFIX}"

    def begin(self) -> None:
        """Start a batch; it lies in one file."""
        if self._position >= self._segment_bytes:
            self.roll()

    def place(self) -> Place:
        """Where the next payload would go."""
        return Place(segment=self._number, position=self._position + self._staged_bytes)

    def stage(self, encoded: Encoded) -> None:
        """Have the payload written by the next `flush`, at the last `place`."""
        self._staged.extend(encoded.buffers)
        self._staged_bytes += encoded.payload_bytes

    def flush(self) -> None:
        """Make what is staged durable. Raises `OSError`; `rollback` then undoes it."""
        if not self._staged:
            return
        if self._file < 0:
            self._probe("payload.create")
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
            self._file = os.open(self.path(self._number), flags, 0o600)
        self._probe("payload.write")
        _write_all(self._file, self._staged, self._position)
        self._probe("payload.sync")
        os.fdatasync(self._file)
        if not self._entered:
            self._probe("folder.sync")
            sync_folder(self._folder)
            self._entered = True

    def commit(self) -> None:
        """What was flushed counts now."""
        if self._staged:
            self._position += self._staged_bytes
            self.total_bytes += self._staged_bytes
            self.sizes[self._number] = self._position
        self._staged, self._staged_bytes = [], 0

    def rollback(self) -> None:
        """Nothing of this batch was written."""
        self._staged, self._staged_bytes = [], 0
        if self._file >= 0:
            os.ftruncate(self._file, self._position)

    def roll(self) -> None:
        """The next payload begins a new file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._entered = False
            self._number += 1
            self._position = 0

    def is_current(self, number: int) -> bool:
        """Whether payloads are still appended to the file."""
        return number == self._number

    def delete(self, number: int) -> int:
        """Delete a file that no row needs. Returns its bytes."""
        if self.is_current(number):
            self.roll()
        self._probe("payload.unlink")
        self.path(number).unlink(missing_ok=True)
        size = self.sizes.pop(number, 0)
        self.total_bytes -= size
        return size

    def read(self, record: Record) -> bytes:
        """The payload of `record`, as it lies there. Raises `JournalDamaged`, `OSError`."""
        path = self.path(record.segment)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise JournalDamaged(
                f"{path} is missing; group {record.group_id!r} index {record.index} lies in it"
            ) from error
        try:
            return _read_all(file, record.payload_bytes, record.position)
        finally:
            os.close(file)

    def close(self) -> None:
        """Let the files go."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_all(file: int, buffers: list[memoryview], position: int) -> None:
    for start in range(0, len(buffers), _BUFFERS_A_CALL):
        part = buffers[start : start + _BUFFERS_A_CALL]
        wanted = sum(buffer.nbytes for buffer in part)
        written = os.pwritev(file, part, position)
        position += written
        if written < wanted:
            # The system took a part (at most 2 GiB a call, or the disk is nearly full).
            for buffer in part:
                skip = min(written, buffer.nbytes)
                written -= skip
                rest = buffer[skip:]
                while rest.nbytes:
                    count = os.pwrite(file, rest, position)
                    position += count
                    rest = rest[count:]


def _read_all(file: int, count: int, position: int) -> bytes:
    data = os.pread(file, count, position)
    if len(data) == count or not data:
        return data
    parts = [data]
    have = len(data)
    while have < count:  # At most 2 GiB a call.
        data = os.pread(file, count - have, position + have)
        if not data:
            break
        parts.append(data)
        have += len(data)
    return b"".join(parts)
