"""Pause, resume, stop, and the watchdog of a run: on fakes, and on a clock that the test moves."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.calls import Done, Event, Lost, Note, NoteKind, Ready, Refused, Send
from orchestrator.feeder import FeederCounters
from orchestrator.operation.board import CALLS_KEPT, STEPS_KEPT, RunBoard, RunBudgets, RunState
from orchestrator.operation.control import ControlledFeeder, RunControl, RunStopped, WaitBoard
from orchestrator.operation.ending import Ending
from orchestrator.operation.operation import Operation
from orchestrator.plan import RunPlan
from orchestrator.ports import Answer, StepSummary
from orchestrator.runner import Patience
from orchestrator.steps import StepRecord
from orchestrator.trainer_client import Deadlines
from prestage.operation.heartbeat import STUCK_EXIT_CODE, Heartbeat
from prestage.protocol import Call, Reason
from prestage.trace import TraceRecord
from tests.operation.process import running, wait_until
from tests.operation.runs import run_operated
from tests.support.rig import address_of, served

FIRST = Send(call=Call.FWD_BWD, step=3, index=0)
PLAN = RunPlan(num_steps=4)


def held(control: RunControl, send: Send) -> tuple[threading.Thread, list[str]]:
    """A thread that is about to make a call, and what became of it."""
    outcome: list[str] = []

    def work() -> None:
        try:
            control.before_send(send)
            outcome.append("sent")
        except RunStopped as error:
            outcome.append(f"stopped: {error}")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, outcome


def test_a_pause_holds_the_first_fwd_bwd_of_a_step_and_nothing_else() -> None:
    control = RunControl()
    assert control.pause()
    for send in (
        Send(call=Call.FWD_BWD_DEFER, step=2, index=1),
        Send(call=Call.STAGE_FWD_BWD, step=3, index=0),
        Send(call=Call.APPLY_DEFERRED_UPDATE, step=2),
        Send(call=Call.GET_METRICS, step=2),
        Send(call=Call.SAVE_CHECKPOINT, step=2),
        Send(call=Call.FWD_BWD, step=3, index=0, resend=True),  # It was sent before the pause.
    ):
        control.before_send(send)
    for call in (Call.FWD_BWD, Call.FWD_BWD_APPLY, Call.FWD_BWD_DEFER):
        thread, outcome = held(control, Send(call=call, step=3, index=0))
        wait_until(lambda: control.holding_step == 3, "it is held")
        control.resume()
        thread.join(10)
        assert outcome == ["sent"] and control.holding_step == -1
        control.pause()


def test_a_stop_ends_a_pause_and_every_wait() -> None:
    control = RunControl()
    control.pause()
    thread, outcome = held(control, FIRST)
    wait_until(lambda: control.holding_step == 3, "it is held")
    control.stop("SIGTERM")
    control.stop("a second reason")
    thread.join(10)
    assert outcome == ["stopped: SIGTERM"]
    assert not control.pause(), "a run that stops cannot be paused"
    for wait in (control.check, lambda: control.sleep(3600), lambda: control.before_send(FIRST)):
        with pytest.raises(RunStopped, match="SIGTERM"):
            wait()


class Silent:
    """A feeder whose producer is dead: no event ever comes."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.events: list[Event] = []

    def next_event(self, timeout_s: float) -> Event | None:
        self.asked.append(timeout_s)
        return self.events.pop(0) if self.events else None

    def start_step(self, step: int) -> None: ...
    def score_step(self, step: int) -> None: ...
    def step_closed(self, step: int) -> None: ...
    def forget_worker(self) -> None: ...
    def summary(self, step: int) -> StepSummary | None: ...
    def data_cursor(self, next_step: int) -> str:
        return ""


def test_r12_a_wait_for_data_ends_with_a_stop_however_long_it_may_take() -> None:
    control = RunControl()
    feeder = ControlledFeeder(Silent(), control, WaitBoard())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(feeder.next_event, 3600.0)
        control.stop("SIGTERM")
        with pytest.raises(RunStopped):
            waiting.result(timeout=10)


def test_a_wait_for_data_takes_what_comes_and_keeps_its_deadline() -> None:
    silent = Silent()
    feeder = ControlledFeeder(silent, RunControl(), WaitBoard())
    ready = Ready(step=0, index=0, digest="d", last=True)
    silent.events.append(ready)
    assert feeder.next_event(3600.0) == ready
    assert feeder.next_event(0.0) is None
    assert feeder.next_event(0.26) is None


# -- the board and its watchdog, on a virtual clock -----------------------------------------------


class Rig:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.control = RunControl()
        self.board = RunBoard(self.control, now=lambda: self.now_s)
        self.ended: list[str] = []
        self.heartbeat = Heartbeat(
            self.board.progress, end=self.ended.append, now=lambda: self.now_s
        )

    def pass_s(self, seconds: float) -> str:
        until_s = self.now_s + seconds
        while self.now_s < until_s and not self.ended:
            self.now_s += 10.0
            self.heartbeat.look()
        return self.ended[0] if self.ended else ""

    def answered(self, send: Send, answer: Answer) -> None:
        record = TraceRecord(
            side="orchestrator",
            call=send.call.value,
            run_id="r",
            epoch=1,
            seq=1,
            incarnation="i",
            step=send.step,
            index=send.index,
            started_s=self.now_s,
        )
        self.board.on_call(record, answer)


def test_r12_a_run_that_waits_for_data_past_its_own_deadline_is_ended() -> None:
    rig = Rig()
    rig.board.running(PLAN, FeederCounters())
    rig.board.waiting()
    assert rig.board.view().state is RunState.WAITING_FOR_DATA
    assert rig.pass_s(3600) == "", "its own deadline is an hour"
    assert "no progress" in rig.pass_s(120)
    assert "WAITING_FOR_DATA" in rig.ended[0]


def test_r15_asking_a_stuck_worker_again_and_again_is_no_progress() -> None:
    """The worker answers GetState at once and joins every resend; its device never ends the call."""
    rig = Rig()
    rig.board.running(PLAN, FeederCounters())
    rig.board.calling(FIRST)
    ask = Send(call=Call.GET_STATE)
    again = Send(call=Call.FWD_BWD, step=3, index=0, resend=True)
    for _ in range(2):
        assert rig.pass_s(890) == ""
        rig.answered(FIRST, Answer(event=Lost(why="DEADLINE_EXCEEDED")))
        rig.board.calling(ask)
        rig.answered(ask, Answer(event=Done()))
        rig.board.calling(again)
    assert "while TRAINING fwd_bwd step=3 index=0 resend" in rig.pass_s(60)


def test_the_watchdog_lets_every_wait_that_was_asked_for_come_to_its_end() -> None:
    """Of a call: its deadline, and then a worker that comes back as late as it may."""
    deadlines = Deadlines()
    for wait_s in (60.0, 7200.0):
        budgets = RunBudgets.beyond(trainer_wait_s=wait_s, data_wait_s=86400.0)
        away_s = max(wait_s, Patience().unreachable_s)
        assert budgets.start_s > wait_s and budgets.data_s > 86400
        assert budgets.call_s > max(deadlines.train_s, deadlines.read_s) + away_s
        assert budgets.compile_s > deadlines.compile_s + away_s
        assert budgets.save_s > deadlines.save_s + away_s
        assert budgets.finish_s > deadlines.save_s + away_s


def test_r16_a_compile_of_two_hours_is_no_alarm() -> None:
    rig = Rig()
    rig.board.running(PLAN, FeederCounters())
    rig.board.calling(Send(call=Call.COMPILE))
    assert rig.board.compiling and rig.board.view().state is RunState.COMPILING
    assert rig.pass_s(7200) == ""
    assert "COMPILING" in rig.pass_s(600)


def test_a_pause_over_the_weekend_is_no_hang_and_costs_no_allowance_afterwards() -> None:
    rig = Rig()
    rig.board.running(PLAN, FeederCounters())
    rig.control.pause()
    assert rig.board.view().state is RunState.PAUSING
    thread, _ = held(rig.control, FIRST)
    wait_until(lambda: rig.control.holding_step == 3, "it is held")
    assert rig.board.view().state is RunState.PAUSED
    assert rig.pass_s(48 * 3600) == ""
    rig.control.resume()
    thread.join(10)
    rig.board.calling(FIRST)
    assert rig.pass_s(1700) == ""


def test_probes_learn_when_the_worker_was_reached() -> None:
    rig = Rig()
    rig.board.opening("reaching the worker")
    before = rig.board.progress()
    assert (before.started, before.ready, before.reason) == (False, False, "reaching the worker")
    rig.board.running(PLAN, FeederCounters())
    assert rig.board.progress().started and rig.board.progress().ready
    rig.control.stop("SIGTERM")
    after = rig.board.progress()
    assert (after.started, after.ready, after.reason) == (True, False, "it is stopping")


def test_e10_the_board_keeps_a_bounded_part_of_a_long_run() -> None:
    rig = Rig()
    refused = Refused(reason=Reason.STEP_OPEN, message="m")
    for step in range(5000):
        rig.board.closed(StepRecord(step=step))
        rig.answered(FIRST, Answer(event=refused))
        rig.board.on_note(Note(kind=NoteKind.LATE, step=step, text=f"late {step}"))
    view = rig.board.view()
    assert (len(view.steps), len(view.calls)) == (STEPS_KEPT, CALLS_KEPT)
    assert view.steps[-1].step == 4999
    assert view.refusals == {"STEP_OPEN": 5000}
    assert (view.notes, view.last_note) == ({"next_step_late": 5000}, "late 4999")


def test_d9_what_the_run_is_at_is_told_although_its_thread_is_busy() -> None:
    """Every reader takes the board's lock for a moment only; nobody holds it over a wait."""
    operation = Operation()
    operation.board.running(PLAN, FeederCounters())
    operation.control.pause()
    thread = threading.Thread(target=operation.before_send, args=(FIRST,), daemon=True)
    thread.start()
    wait_until(lambda: operation.board.view().state is RunState.PAUSED, "it is held")
    operation.control.resume()
    thread.join(10)
    assert operation.board.view().doing == FIRST.line


# -- the end --------------------------------------------------------------------------------------


class Exit:
    def __init__(self) -> None:
        self.codes: list[int] = []

    def __call__(self, code: int) -> None:
        self.codes.append(code)


def test_d10_the_end_is_bounded_first_by_a_cut_then_by_an_exit() -> None:
    control, exits, cuts = RunControl(), Exit(), list[str]()
    ending = Ending(control, grace_s=0.2, exit_code=75, exit_now=exits)
    ending.on_cut(lambda: cuts.append("cut"))
    ending.begin("SIGTERM")
    ending.begin("SIGTERM again")
    wait_until(lambda: bool(exits.codes), "it exits by itself")
    assert (exits.codes, cuts, control.stop_reason) == ([75], ["cut"], "SIGTERM")


def test_an_end_in_time_is_neither_cut_nor_forced() -> None:
    exits, cuts = Exit(), list[str]()
    ending = Ending(RunControl(), grace_s=30, exit_code=0, exit_now=exits)
    ending.on_cut(lambda: cuts.append("cut"))
    before = threading.active_count()
    ending.begin("SIGTERM")
    ending.ended()
    wait_until(lambda: threading.active_count() <= before, "its thread ended")
    assert not exits.codes and not cuts


def test_a_paused_run_trains_to_the_same_end_and_sends_no_new_step_meanwhile() -> None:
    """A real run: paused from its first moment on, so it holds before step 0."""
    with served() as server:
        plain = run_operated(address_of(server), Operation())
    operation = Operation()
    operation.control.pause()
    with served() as server, ThreadPoolExecutor(1) as pool:
        run = pool.submit(run_operated, address_of(server), operation)
        wait_until(lambda: operation.control.holding_step == 0, "held before step 0")
        assert server.state().step == 0 and server.state().micro_step == 0
        assert math.isinf(operation.board.progress().allowance_s)
        operation.control.resume()
        wait_until(lambda: server.state().step >= 1, "step 0 is closed")
        operation.control.pause()
        wait_until(
            lambda: operation.control.holding_step >= 1 or run.done(), "held at a later boundary"
        )
        step = operation.control.holding_step
        if step >= 1:
            assert (server.state().step, server.state().micro_step) == (step, 0)
        operation.control.resume()
        assert run.result(timeout=60) == plain


_STUCK_RUN = """
import threading
from orchestrator.operation.board import RunBudgets
from orchestrator.operation.operation import Operation
from orchestrator.plan import RunPlan
from orchestrator.runner import Runner
from tests.operation.soak_steps import Feeder, Trainer

class Stuck(Trainer):
    def call(self, send, *, data_cursor):
        if send.step == 2:
            threading.Event().wait()
        return super().call(send, data_cursor=data_cursor)

with Operation(budgets=RunBudgets(call_s=1.0)) as operation:
    Runner(
        run_id="stuck",
        plan=RunPlan(num_steps=4),
        trainer=Stuck(),
        feeder=operation.feeder(Feeder()),
        clock=operation.clock,
        observers=(operation.metrics, operation.board),
        before_send=operation.before_send,
    ).run()
"""


def test_r15_a_run_that_is_stuck_in_a_call_ends_with_the_reason_and_its_stack(
    tmp_path: Path,
) -> None:
    with running(tmp_path / "log", "-c", _STUCK_RUN) as process:
        assert process.wait(60) == STUCK_EXIT_CODE
        assert "while TRAINING fwd_bwd step=2 index=0 (allowance 1.0 s)" in process.output
        assert "in _send" in process.output, "where the run's own thread is stuck"
