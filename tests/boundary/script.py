"""Drives the pure core by a script: a made-up worker that does what it is told.

The data source answers `pack` with every micro-batch at once (`on time`), or withholds a step until
the core waits for it (`late`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from orchestrator.boundary import BoundaryState, advance, initial
from orchestrator.calls import (
    Action,
    Await,
    Done,
    Event,
    Fail,
    Finish,
    Local,
    LocalDone,
    LocalKind,
    Note,
    Ready,
    Send,
    Start,
    WorkerView,
)
from orchestrator.plan import RunPlan
from prestage.protocol import Call, StepState


def digest(step: int, index: int) -> str:
    return f"digest-{step}-{index}"


@dataclass
class Script:
    """One scripted run. `answer` may override the answer to a call (None = carried out)."""

    plan: RunPlan
    micro_batches: int
    late: Collection[int] = ()
    answer: Callable[[Send, int], Event | None] = lambda send, count: None
    lines: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    state: BoundaryState = field(init=False)

    def run(self, limit: int = 10_000) -> Script:
        self.state = initial(self.plan)
        action = self._advance(Start())
        count = 0
        for _ in range(limit):
            if isinstance(action, Finish | Fail):
                if isinstance(action, Fail):
                    self.lines.append(action.line)
                return self
            if isinstance(action, Await):
                assert action.step in self.late, f"waits for {action} that is not late"
                action = self._ready(action.step)
                continue
            self.lines.append(action.line)
            if isinstance(action, Local):
                packed = action.kind is LocalKind.PACK and action.step not in self.late
                step = action.step
                action = self._advance(LocalDone())
                if packed:
                    action = self._ready(step, action)
                continue
            count += 1
            event = self.answer(action, count) or self._carry_out(action)
            action = self._advance(event)
        raise AssertionError(f"not finished after {limit} actions: {self.lines[-5:]}")

    def _advance(self, event: Event) -> Action:
        self.state, action = advance(self.state, event)
        self.notes.extend(self.state.notes)
        return action

    def _ready(self, step: int, action: Action | None = None) -> Action:
        for index in range(self.micro_batches):
            got = self._advance(
                Ready(
                    step=step,
                    index=index,
                    digest=digest(step, index),
                    last=index == self.micro_batches - 1,
                )
            )
            if not isinstance(got, Await):
                assert action is None or isinstance(action, Await), (action, got)
                action = got
        assert action is not None
        return action

    def _carry_out(self, send: Send) -> Event:
        if send.call in (Call.OPEN_RUN, Call.GET_STATE):
            return Done(
                view=WorkerView(
                    state=StepState(), incarnation="i1", epoch=1, last_seq=0, compiled=False
                )
            )
        return Done()
