"""The durable log (skeleton: the shape that its users rely on)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from orchestrator.ingest.ports import Receipt
from orchestrator.journal.config import LiveConfig
from orchestrator.trajectory import Trajectory


class DurableLog:
    """Implements `orchestrator.ingest.ports.RolloutLog`."""

    def __init__(self, config: LiveConfig) -> None:
        raise NotImplementedError

    def open_producer(self, producer: str) -> int:
        raise NotImplementedError

    def append(
        self,
        producer: str,
        offset: int,
        trajectory: Trajectory,
        *,
        cancelled: Callable[[], bool],
    ) -> Future[Receipt]:
        raise NotImplementedError

    def reject(self, producer: str, offset: int, reason: str, message: str) -> Future[Receipt]:
        raise NotImplementedError

    def cancellable_groups(self, after: int) -> tuple[int, tuple[str, ...]]:
        raise NotImplementedError

    def end_source(self) -> None:
        raise NotImplementedError

    def close(self, *, drain_s: float = 10.0) -> None:
        raise NotImplementedError
