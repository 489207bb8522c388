"""What the worker is at and how long that may take, for the heartbeat. Knows no gRPC and no engine.

A call that computes has one allowance, loading and compiling another, and an idle worker none: nothing
is due from it. The device counts as busy while a call runs and while micro-batches are in flight.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from prestage.operation.heartbeat import SILENCE_S, Progress
from prestage.protocol import Call, Lifecycle


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Seconds without progress that a state may take."""

    compile_s: float = 7200.0  # Loading the engine; a compile, at any time.
    stall_s: float = 1800.0  # Any other call, and the device between two micro-batches.


@dataclass(frozen=True, kw_only=True)
class Doing:
    """The worker at one moment."""

    lifecycle: Lifecycle
    call: str  # What the device thread runs; empty = nothing.
    in_flight: int  # Micro-batches dispatched and not done.


class WorkerProgress:
    """Remembers when progress was last made. Safe from any thread."""

    def __init__(
        self,
        budgets: Budgets,
        doing: Callable[[], Doing],
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budgets = budgets
        self._doing = doing
        self._now = now
        self._progress_s = now()
        self.on_progress: Callable[[], object] = lambda: None

    def made(self) -> None:
        """Progress: a call began or ended, or the device finished something."""
        self._progress_s = self._now()
        self.on_progress()

    def read(self) -> Progress:
        """For the heartbeat."""
        budgets, doing, progress_s = self._budgets, self._doing(), self._progress_s
        if doing.lifecycle is Lifecycle.STARTING:
            return Progress(
                state="STARTING",
                progress_s=progress_s,
                allowance_s=budgets.compile_s,
                silence_s=max(SILENCE_S, budgets.compile_s),
                started=False,
                ready=False,
                reason="the engine is loading",
            )
        if doing.call == Call.COMPILE.value:
            return Progress(
                state="COMPILING",
                progress_s=progress_s,
                allowance_s=budgets.compile_s,
                silence_s=max(SILENCE_S, budgets.compile_s),
                ready=doing.lifecycle is not Lifecycle.DRAINING,
            )
        busy = doing.call or ("the device's micro-batches" if doing.in_flight else "")
        draining = doing.lifecycle is Lifecycle.DRAINING
        return Progress(
            state=f"{'DRAINING' if draining else 'SERVING'} {busy}".strip() if busy else "IDLE",
            progress_s=progress_s,
            allowance_s=budgets.stall_s if busy else math.inf,
            ready=not draining,
            reason="it is shutting down" if draining else "",
        )
