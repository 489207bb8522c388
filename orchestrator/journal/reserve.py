"""Room kept back on the journal's disk, for the moment when there is none.

A full disk must not keep the trainer from going on: the plans of the groups that are in need a few
pages, and so does letting go of what a checkpoint covers, which is what makes room again.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

RESERVE_BYTES: Final = 4 << 20


class Reserve:
    """A file whose blocks can be given back. Best effort: a disk without room has none."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "reserve"
        self.held = False
        self.hold()

    def hold(self) -> None:
        """Have the room kept back, if it can be had."""
        if self.held:
            return
        try:
            file = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        try:
            os.posix_fallocate(file, 0, RESERVE_BYTES)
            self.held = True
        except OSError:
            with contextlib.suppress(OSError):
                self._path.unlink()  # A part of it would only take room from the journal.
        finally:
            os.close(file)

    def release(self) -> None:
        """Give the room back to the disk."""
        if self.held:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self.held = False
