"""The runner's ports: a trainer to call, a feeder of micro-batches, a clock, and who watches.

Small protocols and values; adapters (gRPC, files, metrics) implement them and point here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.boundary import BoundaryState
from orchestrator.calls import Done, Event, Lost, Note, Raised, Refused, Send
from prestage.trace import TraceRecord


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What the worker knows of one closed step. Seconds; -1 = not known or not applicable."""

    step: int
    train_step: int
    applied: bool
    values: Mapping[str, float] = field(default_factory=dict)
    boundary_idle_seconds: float = -1.0
    device_wait_seconds: float = -1.0
    stage_seconds: float = -1.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one trainer call came back with."""

    event: Done | Lost | Refused | Raised
    used_staged_input: bool = False
    dispatch_seconds: float = -1.0
    stage_seconds: float = -1.0
    train_step: int = -1
    dropless_replays: int = 0
    metrics: tuple[StepFacts, ...] = ()


class TrainerPort(Protocol):
    """One trainer. Never retries a call by itself and never invents a key."""

    def call(self, send: Send, *, data_cursor: str) -> Answer:
        """Make one call and wait for its answer. Transport failures are `Lost`, never raised."""
        ...

    def read_metrics(self, from_step: int, count: int) -> tuple[StepFacts, ...]:
        """Metrics of closed steps, read again for the final table; empty when not kept."""
        ...

    def in_flight(self) -> int:
        """Micro-batches dispatched to the device and not done; 0 when that cannot be learnt."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """What the feeder knows of one packed step."""

    step: int
    micro_batches: int
    groups: int
    trajectories: int
    real_tokens: int
    trained_tokens: int
    rows: int
    reward_mean: float
    dropped: Mapping[str, int] = field(default_factory=dict)  # Reason to trajectories.


class FeederPort(Protocol):
    """Packs steps in the background and brings their bytes to the worker."""

    def start_step(self, step: int) -> None:
        """Begin packing a step; returns at once. An earlier step may be asked for again."""
        ...

    def next_event(self, timeout_s: float) -> Event | None:
        """The oldest unread event (`Ready`, `SourceEnded`, ...); None after the timeout."""
        ...

    def score_step(self, step: int) -> None:
        """The step's weights are in place: its old log-probs may be computed; returns at once.

        The step's `Ready` events follow once it is scored.
        """
        ...

    def step_closed(self, step: int) -> None:
        """The worker closed the step: its bytes are no longer needed."""
        ...

    def forget_worker(self) -> None:
        """The worker is another process now: nothing that was put is there any more."""
        ...

    def summary(self, step: int) -> StepSummary | None: ...

    def data_cursor(self, next_step: int) -> str:
        """The source's position before `next_step`, as the checkpoint stores it."""
        ...


class Clock(Protocol):
    """Monotonic seconds."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class Observer(Protocol):
    """Hears of everything; changes nothing."""

    def on_call(self, record: TraceRecord, answer: Answer) -> None: ...

    def on_note(self, note: Note) -> None: ...

    def on_state(self, state: BoundaryState) -> None: ...
