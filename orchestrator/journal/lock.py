"""One process at a time: a lock on the journal's folder that a crash cannot leave behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from orchestrator.journal.errors import JournalBusy, JournalError


class FolderLock:
    """Holds the folder until `release`, or until the process ends in whatever way."""

    def __init__(self, folder: Path) -> None:
        """Raises: JournalBusy naming the process that holds it, JournalError."""
        path = folder / "lock"
        try:
            self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._file, 32, 0).decode(errors="replace").strip()
            os.close(self._file)
            raise JournalBusy(
                f"{folder} is in use by process {holder or '(unknown)'}: one orchestrator at a"
                " time; stop that one, or give this run a folder of its own"
            ) from error
        except OSError as error:
            os.close(self._file)
            raise JournalError(
                f"{path} cannot be locked ({error.strerror}): the journal needs a local disk"
            ) from error
        with contextlib.suppress(OSError):  # A full disk: the lock holds, only its name is missing.
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let the folder go. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
