"""What the ingest service asks of the durable log, and what the log tells it. Values and protocols.

The log (`orchestrator.journal`) implements `RolloutLog`; the service (gRPC) consumes it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from orchestrator.trajectory import Trajectory


class IngestClosed(Exception):
    """The log takes nothing any more: the run has ended or the process is stopping."""


class OffsetGap(Exception):
    """A producer's offset is not the next one; the message names both."""


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What became of one trajectory; it is durable when this exists."""

    offset: int
    accepted: bool
    duplicate: bool = False
    reason: str = ""  # A `DropReason` value, "conflict", or empty.
    message: str = ""
    # False: durable, but its connection was lost before the ack; `accepted` is not known then.
    verdict_known: bool = True


class RolloutLog(Protocol):
    """The durable order of trajectories. Safe from any thread."""

    def open_producer(self, producer: str) -> int:
        """The first offset of this producer that is not durable. Raises `IngestClosed`."""
        ...

    def producers(self) -> frozenset[str]:
        """Names of every producer that has something durable."""
        ...

    def append(
        self,
        producer: str,
        offset: int,
        trajectory: Trajectory,
        *,
        cancelled: Callable[[], bool],
    ) -> Future[Receipt]:
        """Queue one trajectory for the durable order; its receipt comes once it is durable.

        Blocks while the byte budget is full (the producer waits; nothing is dropped) and returns
        early only when `cancelled` says that the caller is gone. Offsets below the producer's next
        one are answered as duplicates. Raises `IngestClosed`, `OffsetGap`.
        """
        ...

    def reject(self, producer: str, offset: int, reason: str, message: str) -> Future[Receipt]:
        """Record that what came at `offset` cannot be a trajectory: counted, and the offset moves on.

        The receipt says so once that is durable. Raises `IngestClosed`, `OffsetGap`.
        """
        ...

    def cancellable_groups(self, after: int) -> tuple[int, tuple[str, ...]]:
        """Groups finished (complete, dropped, too old) since the cursor `after`, and a new cursor."""
        ...
