"""Reads certificate and token files: bounded, with their permissions checked, never in an error's text."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final, TypeAlias

MAX_FILE_BYTES: Final = 1 << 20

Stamp: TypeAlias = tuple[tuple[str, int, int, int], ...]
"""Of some files: name, inode, size and time of change of each. Differs when one was replaced."""


class SecurityError(ValueError):
    """A certificate, key or token that cannot be used; names the flag, the file and the fix."""


def read_file(flag: str, path: Path, *, secret: bool) -> bytes:
    """The file's bytes. Raises `SecurityError`.

    Nobody but its owner and group may write it, nor read it when it is `secret`. Its group may: a
    Secret that Kubernetes mounts for another user than root can be read in no other way.
    """
    try:
        # Not blocking: a named pipe in the file's place must not hang the start.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SecurityError(f"{flag}: {path} cannot be read ({error.strerror})") from error
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(file.fileno())
        mode = stat.S_IMODE(found.st_mode)
        if not stat.S_ISREG(found.st_mode):
            raise SecurityError(f"{flag}: {path} is not a plain file")
        if mode & 0o022:
            raise SecurityError(
                f"{flag}: {path} has mode {mode:04o}, so that others can change it: chmod go-w"
            )
        if secret and mode & 0o004:
            raise SecurityError(
                f"{flag}: {path} has mode {mode:04o}, so that every user of this host can read it:"
                " chmod o-r (0600, or 0440 with a group of its own)"
            )
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise SecurityError(f"{flag}: {path} has more than {MAX_FILE_BYTES} bytes")
    return content


def stamp_of(folder: Path, names: tuple[str, ...]) -> Stamp:
    """Of the files as they are now; what is missing has none. Follows links, as a mount's are."""
    found: list[tuple[str, int, int, int]] = []
    for name in names:
        try:
            status = (folder / name).stat()
        except OSError:
            continue
        found.append((name, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)
