"""The durable epoch: outside checkpoints, so that a restore cannot lower it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_MAX_DIGITS: Final = 18
"""An epoch fits in 63 bits, with room to count on."""


class StateFolderError(Exception):
    """The state folder cannot be used; names it and the fix."""


class EpochFile:
    """Counts epochs in `FOLDER/epoch`, durably."""

    def __init__(self, folder: Path | None) -> None:
        """None: epochs are kept in memory only (tests, throw-away workers)."""
        self._path = None if folder is None else folder / "epoch"
        self._epoch = 0
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            text = self._read().strip() if self._path.exists() else "0"
        except OSError as error:
            raise StateFolderError(f"--state_dir {folder}: {error}") from error
        if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
            raise StateFolderError(
                f"{self._path} holds {text[:40]!r}, not a number: it was damaged; write the last"
                " epoch from the orchestrator's log into it, or a larger number"
            )
        self._epoch = int(text)

    def _read(self) -> str:
        assert self._path is not None
        with self._path.open("rb") as file:
            return file.read(4096).decode(errors="replace")

    @property
    def epoch(self) -> int:
        return self._epoch

    def advance(self) -> int:
        """The next epoch, durable before it is returned. Raises `StateFolderError`."""
        epoch = self._epoch + 1
        if self._path is not None:
            partial = self._path.with_suffix(".partial")
            try:
                with partial.open("w") as file:
                    file.write(f"{epoch}\n")
                    file.flush()
                    os.fsync(file.fileno())
                partial.replace(self._path)
                folder = os.open(self._path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
            except OSError as error:
                raise StateFolderError(f"cannot write {self._path}: {error}") from error
        self._epoch = epoch
        return epoch
