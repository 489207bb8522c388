"""The one runner: does the I/O that the pure core asks for, one action at a time.

Consumes: the feeder's events and the trainer's answers. Waits for: a trainer call, or (when there
is nothing to send) the feeder; both have a deadline, so no wait is endless. Decides nothing about
the protocol: that is `boundary.advance`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from orchestrator.boundary import BoundaryState, Mode, advance, initial
from orchestrator.calls import (
    Action,
    Await,
    Done,
    Event,
    Fail,
    Finish,
    GaveUp,
    Local,
    LocalDone,
    LocalKind,
    Lost,
    NoteKind,
    Refused,
    Send,
    Start,
)
from orchestrator.plan import RunPlan
from orchestrator.ports import Answer, Clock, FeederPort, Observer, TrainerPort
from orchestrator.steps import StepBook
from prestage.protocol import CLOSING_CALLS, Call
from prestage.trace import TraceRecord

log = logging.getLogger("prestage.orchestrator")

_QUEUED_POLL_S: Final = 0.01
"""How often the worker is asked whether the device still has a micro-batch queued."""

_QUIET: Final = {NoteKind.INELIGIBLE, NoteKind.RESENT}


class RunFailed(Exception):
    """The run ended with an error; the message says what happened and what to do."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the runner waits. Seconds."""

    data_s: float = 3600.0  # For the next micro-batch, then the run ends with the reason.
    unreachable_s: float = 120.0  # For a worker that does not answer at all.
    backoff_s: float = 0.05  # First pause after a lost call; doubles up to 2 s.


BookkeepingHook = Callable[[StepBook, int], None]
"""What is done with each closed step: a progress bar, a log line, metrics."""


class Runner:
    """Drives one run from start to finish."""

    def __init__(
        self,
        *,
        run_id: str,
        plan: RunPlan,
        trainer: TrainerPort,
        feeder: FeederPort,
        clock: Clock,
        observers: tuple[Observer, ...] = (),
        patience: Patience | None = None,
        on_bookkeeping: BookkeepingHook | None = None,
        before_send: Callable[[Send], None] = lambda send: None,
    ) -> None:
        """`before_send`: called before each trainer call; may wait (a pause) or raise (a stop)."""
        self._run_id = run_id
        self._trainer = trainer
        self._feeder = feeder
        self._clock = clock
        self._observers = observers
        self._patience = patience or Patience()
        self._on_bookkeeping = on_bookkeeping
        self._before_send = before_send
        self._plan = plan
        self._state = initial(plan)
        self._lost_since: float | None = None
        self._lost_count = 0
        self._pending: tuple[TraceRecord, Answer] | None = None
        self.book = StepBook()

    @property
    def state(self) -> BoundaryState:
        return self._state

    def run(self) -> StepBook:
        """Run to the end. Raises `RunFailed`.

        Called again, it takes the run up from where the worker is: for a worker that was replaced
        after the last step.
        """
        if self._state.mode is Mode.FINISHED:
            self._state = initial(self._plan)
            self._feeder.forget_worker()
        action = self._advance(Start())
        while not isinstance(action, Finish | Fail):
            event = self._do(action)
            if not isinstance(action, Await):
                # What became ready during the call counts as ready before its answer.
                while (waiting := self._feeder.next_event(0.0)) is not None:
                    self._advance(waiting)
            action = self._advance(event)
            self._observe_call()
        if isinstance(action, Fail):
            raise RunFailed(action.why)
        return self.book

    def _advance(self, event: Event) -> Action:
        before = self._state
        self._state, action = advance(before, event)
        for note in self._state.notes:
            log.log(
                logging.INFO if note.kind in _QUIET else logging.WARNING,
                "[pipeline] %s",
                note.text,
            )
            for observer in self._observers:
                observer.on_note(note)
            if note.kind is NoteKind.WORKER_RESTARTED:
                self._feeder.forget_worker()
        for observer in self._observers:
            observer.on_state(self._state)
        return action

    def _do(self, action: Send | Local | Await) -> Event:
        match action:
            case Send():
                return self._send(action)
            case Local():
                return self._local(action)
            case Await():
                event = self._feeder.next_event(self._patience.data_s)
                return event or GaveUp(
                    why=f"no micro-batch ({action.step}, {action.index}) within"
                    f" {self._patience.data_s:g} s: are the rollout producers alive?"
                )

    # -- trainer calls ------------------------------------------------------------------------

    def _send(self, send: Send) -> Event:
        self._before_send(send)
        before = self._state.mirror
        started_s = self._clock.now()
        cursor = ""
        if send.call is Call.SAVE_CHECKPOINT:
            cursor = self._feeder.data_cursor(before.step)
        answer = self._trainer.call(send, data_cursor=cursor)
        seconds = self._clock.now() - started_s
        self.book.called(send, answer, seconds)
        self._pending = self._record(send, answer, started_s, seconds), answer
        if isinstance(answer.event, Lost):
            return self._lost(answer.event)
        self._lost_since, self._lost_count = None, 0
        if send.call is Call.FWD_BWD_DEFER and isinstance(answer.event, Done):
            self._await_while_queued(send.step + 1)
        if send.call in CLOSING_CALLS and not isinstance(answer.event, Refused):
            self._feeder.step_closed(before.step)
        return answer.event

    def _await_while_queued(self, step: int) -> None:
        """Give `step`'s first micro-batch the time that the held-back update must wait anyway.

        While the device has a micro-batch queued behind the one that it computes, the update could
        not run yet: what becomes ready until then still counts as ready before the call's answer.
        """
        while (
            self._state.mode is Mode.RUN
            and step < self._state.plan.num_steps
            and not self._state.put_refused
            and not any(r.step == step and r.index == 0 for r in self._state.ready)
            and self._trainer.in_flight() >= 2
        ):
            event = self._feeder.next_event(_QUEUED_POLL_S)
            if event is not None:
                self._advance(event)

    def _record(self, send: Send, answer: Answer, started_s: float, seconds: float) -> TraceRecord:
        state = self._state
        outcome = type(answer.event).__name__.lower()
        if isinstance(answer.event, Refused):
            outcome = answer.event.reason.value
        return TraceRecord(
            side="orchestrator",
            call=send.call.value,
            run_id=self._run_id,
            epoch=state.epoch,
            seq=send.seq,
            incarnation=state.incarnation,
            step=send.step,
            index=send.index,
            digest=send.digest,
            used_staged_input=answer.used_staged_input,
            phase_before=state.mirror.phase.value,
            train_step_after=answer.train_step,
            outcome="ok" if outcome == "done" else outcome,
            started_s=started_s,
            seconds=seconds,
        )

    def _observe_call(self) -> None:
        """Tell the observers of the call that was just taken in, with the phase it led to."""
        if self._pending is None:
            return
        record, answer = self._pending
        self._pending = None
        record = replace(record, phase_after=self._state.mirror.phase.value)
        for observer in self._observers:
            observer.on_call(record, answer)

    def _lost(self, event: Lost) -> Event:
        """A call's outcome is unknown: pause, and give up when the worker stays silent."""
        now = self._clock.now()
        self._lost_since = now if self._lost_since is None else self._lost_since
        if now - self._lost_since > self._patience.unreachable_s:
            return GaveUp(
                why=f"the worker did not answer for {now - self._lost_since:.0f} s ({event.why}):"
                " check that it runs and that --trainer names its address; this run can be"
                " resumed"
            )
        self._clock.sleep(min(2.0, self._patience.backoff_s * 2**self._lost_count))
        self._lost_count = min(self._lost_count + 1, 16)
        return event

    # -- local work -----------------------------------------------------------------------------

    def _local(self, local: Local) -> Event:
        match local.kind:
            case LocalKind.CLOCK:
                self.book.clock_started(local.step, self._clock.now())
            case LocalKind.PACK:
                self._feeder.start_step(local.step)
            case LocalKind.SCORE:
                self._feeder.score_step(local.step)
            case LocalKind.BOOKKEEPING:
                self._bookkeeping(local.step)
        return LocalDone()

    def _bookkeeping(self, step: int) -> None:
        self.book.finished(step, self._clock.now())
        summary = self._feeder.summary(step)
        if summary is not None:
            self.book.summarised(summary)
        if self._on_bookkeeping is not None:
            self._on_bookkeeping(self.book, step)
