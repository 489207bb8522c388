"""The chain of digests over what a process executed. Pure.

Leader and followers keep one each and compare it command by command. It covers every earlier
command with its outcome, so one that was lost, doubled, reordered, changed on its way or carried
out with another result makes all later links differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from prestage.hosts.v1 import hosts_pb2 as pb

LINK_BYTES: Final = 16
COMPUTED: Final = b"computed"
FAILED: Final = b"failed"
"""What dispatched work came to, where there is nothing more to compare."""


class Chain:
    """One process's. Not safe from several threads."""

    def __init__(self, incarnation: str) -> None:
        self._link = hashlib.blake2b(incarnation.encode(), digest_size=LINK_BYTES).digest()
        self.length = 0

    def add(self, command: pb.Command, outcome: str) -> bytes:
        """The link of the next executed command."""
        link = hashlib.blake2b(self._link, digest_size=LINK_BYTES)
        link.update(command.SerializeToString(deterministic=True))
        link.update(outcome.encode())
        self._link = link.digest()
        self.length += 1
        return self._link


def numbers_digest(values: Mapping[str, float]) -> bytes:
    """Of metrics, bit for bit."""
    whole = hashlib.blake2b(digest_size=LINK_BYTES)
    for name, value in sorted(values.items()):
        whole.update(f"{name} {float(value).hex()}\n".encode())
    return whole.digest()


def kind_of(command: pb.Command) -> str:
    """Its name, for messages."""
    return command.WhichOneof("what") or "nothing"
