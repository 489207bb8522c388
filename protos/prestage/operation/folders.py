"""Folders that a program writes to: checked before anything runs, and owned by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path
from typing import IO


class FolderError(ValueError):
    """A folder or file that cannot be used; names the flag, the path and the fix."""


def check_writable_folder(flag: str, folder: Path) -> None:
    """Make the folder if it is missing and write into it once. Raises `FolderError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise FolderError(
            f"{flag} is {str(folder)!r}: nothing can be written there ({error.strerror or error}):"
            " give a folder that this user may write to"
        ) from error


def check_writable_file(flag: str, path: Path) -> None:
    """Whether the file can be written at the end. Raises `FolderError`."""
    if path.is_dir():
        raise FolderError(f"{flag} is {str(path)!r}, which is a folder: give a file's path")
    check_writable_folder(flag, path.parent)
    if path.exists() and not os.access(path, os.W_OK):
        raise FolderError(f"{flag} is {str(path)!r}, which this user may not write to")


class FolderLock:
    """Keeps other processes out of a folder for as long as this one lives; gone with it, however it ends."""

    def __init__(self, flag: str, folder: Path, *, owner: str) -> None:
        """`owner`: what this process is, for the other's error. Raises `FolderError`."""
        check_writable_folder(flag, folder)
        path = folder / "lock"
        self._file: IO[str]
        with contextlib.ExitStack() as stack:
            try:
                self._file = stack.enter_context(path.open("a+"))
            except OSError as error:
                raise FolderError(f"{flag}: cannot open {path}: {error.strerror}") from error
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self._file.seek(0)
                holder = self._file.read(200).strip() or "another process"
                raise FolderError(
                    f"{flag} is {str(folder)!r}, which {holder} uses: stop it, or give this one a"
                    " folder of its own"
                ) from error
            except OSError as error:
                raise FolderError(
                    f"{flag}: {path} cannot be locked ({error.strerror}): use a local file system"
                ) from error
            self._file.truncate(0)
            self._file.write(f"{owner} (process {os.getpid()})\n")
            self._file.flush()
            stack.pop_all()

    def release(self) -> None:
        self._file.close()
