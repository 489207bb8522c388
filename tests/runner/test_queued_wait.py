"""A first micro-batch that becomes ready while the update could not run yet is still staged."""

from __future__ import annotations

from collections import deque

import pytest

from orchestrator.calls import (
    Done,
    Event,
    GaveUp,
    NoteKind,
    PutRefused,
    Raised,
    Ready,
    Send,
    SourceEnded,
    WorkerView,
)
from orchestrator.plan import RunPlan
from orchestrator.ports import Answer, StepFacts, StepSummary
from orchestrator.runner import RunFailed, Runner
from prestage.protocol import Call, StepState
from tests.support.direct import Listener
from trainer_worker.clock import VirtualClock


class Device:
    """A trainer whose device has `queued` polls left before only its last micro-batch runs."""

    def __init__(self, polls: int) -> None:
        self.polls_left = polls
        self.polls = 0
        self.sent: list[Call] = []

    def call(self, send: Send, *, data_cursor: str) -> Answer:
        del data_cursor
        self.sent.append(send.call)
        view = None
        if send.call is Call.GET_STATE:
            return Answer(event=Raised(message="asked, as planned"))
        if send.call is Call.OPEN_RUN:
            view = WorkerView(
                state=StepState(), incarnation="one", epoch=1, last_seq=0, compiled=True
            )
        return Answer(event=Done(view=view, stage_seconds=1.0, device_wait_seconds=1.0))

    def read_metrics(self, from_step: int, count: int) -> tuple[StepFacts, ...]:
        del from_step, count
        return ()

    def in_flight(self) -> int:
        self.polls += 1
        self.polls_left -= 1
        return 2 if self.polls_left >= 0 else 1


class LateFeeder:
    """Step 0 is ready at once; what comes next comes at the n-th look after step 1 was asked for."""

    def __init__(self, late: Event, looks: int) -> None:
        self._late = late
        self._looks = looks
        self._events: deque[Event] = deque()
        self._waiting = False

    def start_step(self, step: int) -> None:
        if step == 0:
            self._events.extend(
                Ready(step=0, index=i, digest=f"0.{i}", last=i == 1) for i in range(2)
            )
        else:
            self._waiting = True

    def next_event(self, timeout_s: float) -> Event | None:
        if self._events:
            return self._events.popleft()
        if self._waiting and timeout_s > 0:
            self._looks -= 1 if timeout_s < 1 else self._looks  # A real wait sees it come.
            if self._looks <= 0:
                self._waiting = False
                return self._late
        return None

    def score_step(self, step: int) -> None: ...

    def step_closed(self, step: int) -> None: ...

    def forget_worker(self) -> None: ...

    def summary(self, step: int) -> StepSummary | None:
        del step
        return None

    def data_cursor(self, next_step: int) -> str:
        return str(next_step)

    def close(self) -> None: ...


STAGED = RunPlan(num_steps=2, pipeline=True, stage=True)
FIRST = Ready(step=1, index=0, digest="1.0", last=True)


def drive(device: Device, late: Event, looks: int, plan: RunPlan = STAGED) -> Listener:
    listener = Listener(notes=[], lines=[])
    Runner(
        run_id="r",
        plan=plan,
        trainer=device,
        feeder=LateFeeder(late, looks),
        clock=VirtualClock(),
        observers=(listener,),
    ).run()
    return listener


def kinds(listener: Listener) -> set[NoteKind]:
    return {note.kind for note in listener.notes}


def test_it_is_staged_when_it_comes_while_a_micro_batch_is_queued() -> None:
    device = Device(polls=10)
    listener = drive(device, FIRST, looks=3)
    assert Call.STAGE_FWD_BWD in device.sent
    assert NoteKind.LATE not in kinds(listener)
    assert device.polls == 3, "it was waited for once it was there"


def test_the_update_goes_on_as_soon_as_only_the_last_micro_batch_is_left() -> None:
    device = Device(polls=2)
    listener = drive(device, FIRST, looks=5)
    assert Call.STAGE_FWD_BWD not in device.sent
    assert NoteKind.LATE in kinds(listener)
    assert device.polls == 3


def test_nothing_is_asked_when_it_is_ready_already() -> None:
    device = Device(polls=10)
    drive(device, FIRST, looks=0)
    assert Call.STAGE_FWD_BWD in device.sent
    assert device.polls <= 1


def test_flags_off_never_asks() -> None:
    device = Device(polls=10)
    drive(device, FIRST, looks=1, plan=RunPlan(num_steps=2))
    assert device.polls == 0


def test_the_wait_ends_with_the_data() -> None:
    device = Device(polls=1_000_000)
    drive(device, SourceEnded(step=1), looks=4)
    assert Call.APPLY_DEFERRED_UPDATE in device.sent
    assert device.polls == 4


def test_a_refused_put_is_settled_at_once() -> None:
    device = Device(polls=1_000_000)
    with pytest.raises(RunFailed, match="asked, as planned"):
        drive(device, PutRefused(why="planned"), looks=4)
    assert device.polls == 4


def test_a_feeder_that_gave_up_ends_the_run() -> None:
    device = Device(polls=1_000_000)
    with pytest.raises(RunFailed, match="planned"):
        drive(device, GaveUp(why="planned"), looks=4)
    assert device.polls == 4
