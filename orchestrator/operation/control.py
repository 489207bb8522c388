"""Pause, resume and stop of a run. Told by any thread, asked by the runner; knows no gRPC and no signal.

A stop is an exception in the runner's thread at its next call or wait: nothing new is sent, and what the
worker and the journal hold is where the next process goes on. A pause holds the runner before the first
fwd_bwd of a new step; the open step is finished.
"""

from __future__ import annotations

import threading
import time

from orchestrator.calls import Event, Send
from orchestrator.ports import FeederPort, StepSummary
from prestage.protocol import FWD_BWD_CALLS

_LOOK_S = 0.25
"""How soon a wait for data notices a stop."""


class RunStopped(Exception):
    """The run was asked to stop and did: it can be resumed. The message says who asked."""


class RunControl:
    """What a person wants of the run."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._stop_reason = ""
        self._pause = False
        self._holding_step = -1

    # -- told; any thread -------------------------------------------------------------------------

    def pause(self) -> bool:
        """From the next step boundary on. False: the run is stopping."""
        with self._changed:
            if self._stop_reason:
                return False
            self._pause = True
            self._changed.notify_all()
            return True

    def resume(self) -> None:
        with self._changed:
            self._pause = False
            self._changed.notify_all()

    def stop(self, reason: str) -> None:
        """For good. The first reason stands."""
        with self._changed:
            self._stop_reason = self._stop_reason or reason
            self._changed.notify_all()

    # -- read; any thread -------------------------------------------------------------------------

    @property
    def stop_reason(self) -> str:
        """Empty = the run is not stopping."""
        return self._stop_reason

    @property
    def pause_wanted(self) -> bool:
        return self._pause

    @property
    def holding_step(self) -> int:
        """The step whose first fwd_bwd is held back by a pause now; -1 = none."""
        return self._holding_step

    # -- asked; the runner's thread ---------------------------------------------------------------

    def check(self) -> None:
        """Raises `RunStopped`."""
        if self._stop_reason:
            raise RunStopped(self._stop_reason)

    def before_send(self, send: Send) -> None:
        """Before each call: holds the first fwd_bwd of a step while paused. Raises `RunStopped`."""
        begins = send.call in FWD_BWD_CALLS and send.index == 0 and not send.resend
        with self._changed:
            if begins and self._pause and not self._stop_reason:
                self._holding_step = send.step
                try:
                    self._changed.wait_for(lambda: not self._pause or bool(self._stop_reason))
                finally:
                    self._holding_step = -1
        self.check()

    def sleep(self, seconds: float) -> None:
        """Sleep, or raise `RunStopped` as soon as the run is asked to stop."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._stop_reason), timeout=seconds)
        self.check()


class ControlledClock:
    """The runner's clock, whose sleeps end with a stop."""

    def __init__(self, control: RunControl) -> None:
        self._control = control

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        self._control.sleep(seconds)


class WaitBoard:
    """Hears when the runner waits for data. The base hears nothing."""

    def waiting(self) -> None:
        """The runner has nothing to send until an event comes."""

    def waited(self) -> None:
        """An event came."""


class ControlledFeeder:
    """A feeder whose long waits end with a stop, and are told to a board."""

    def __init__(self, feeder: FeederPort, control: RunControl, board: WaitBoard) -> None:
        self._feeder = feeder
        self._control = control
        self._board = board

    def next_event(self, timeout_s: float) -> Event | None:
        if timeout_s <= _LOOK_S:
            return self._feeder.next_event(timeout_s)
        give_up_s = time.monotonic() + timeout_s
        self._board.waiting()
        while (left_s := give_up_s - time.monotonic()) > 0:
            self._control.check()
            event = self._feeder.next_event(min(_LOOK_S, left_s))
            if event is not None:
                self._board.waited()
                return event
        return None

    def start_step(self, step: int) -> None:
        self._feeder.start_step(step)

    def score_step(self, step: int) -> None:
        self._feeder.score_step(step)

    def step_closed(self, step: int) -> None:
        self._feeder.step_closed(step)

    def forget_worker(self) -> None:
        self._feeder.forget_worker()

    def summary(self, step: int) -> StepSummary | None:
        return self._feeder.summary(step)

    def data_cursor(self, next_step: int) -> str:
        return self._feeder.data_cursor(next_step)
