"""Live rollouts as the steps of a run (skeleton: the shape that its users rely on)."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.feeder import StepFeed
from orchestrator.journal.config import LiveConfig
from orchestrator.journal.log import DurableLog
from prestage.wire.layout import Layout
from prestage.wire.planes import SendBuffer

Reserve = Callable[[Layout], SendBuffer]


class LiveSource:
    """Implements `orchestrator.feeder.StepSource`."""

    def __init__(
        self, log: DurableLog, config: LiveConfig, *, reserve: Reserve | None = None
    ) -> None:
        raise NotImplementedError

    def write_into(self, reserve: Reserve) -> None:
        raise NotImplementedError

    def open_step(self, step: int) -> StepFeed | None:
        raise NotImplementedError

    def data_cursor(self, next_step: int) -> str:
        raise NotImplementedError

    def step_durable(self, step: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
