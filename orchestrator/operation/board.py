"""What the run is at: collected from the runner, read by probes, the admin port and the status page.

An observer: it hears of everything and changes nothing. Everything that it keeps is bounded.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from orchestrator.boundary import BoundaryState
from orchestrator.calls import Done, Lost, Note, Refused, Send
from orchestrator.feeder import FeederCounters
from orchestrator.ingest.metrics import LiveReading
from orchestrator.operation.control import RunControl, WaitBoard
from orchestrator.plan import RunPlan
from orchestrator.ports import Answer
from orchestrator.steps import StepRecord
from prestage.operation.heartbeat import SILENCE_S, Progress
from prestage.protocol import Call
from prestage.trace import TraceRecord

STEPS_KEPT: Final = 64
CALLS_KEPT: Final = 1024


class RunState(enum.Enum):
    """What the process is at."""

    STARTING = "STARTING"
    COMPILING = "COMPILING"
    TRAINING = "TRAINING"
    WAITING_FOR_DATA = "WAITING_FOR_DATA"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    FINISHING = "FINISHING"
    STOPPING = "STOPPING"


@dataclass(frozen=True, kw_only=True)
class RunBudgets:
    """Seconds without progress after which a state counts as stuck.

    Each is longer than the deadline that the run itself has there: the watchdog is for a run that
    does not keep its own deadlines.
    """

    start_s: float = 3600.0  # Reaching the worker, opening the rollouts.
    call_s: float = 1800.0  # A trainer call: its deadline (900 s), and a worker's restart.
    compile_s: float = 7500.0
    save_s: float = 2400.0
    data_s: float = 3660.0
    finish_s: float = 3600.0  # The last checkpoint, the digest.

    @staticmethod
    def beyond(*, trainer_wait_s: float, data_wait_s: float) -> RunBudgets:
        """Beyond the waits that this run was told: a worker may be away in any of its calls."""
        usual = RunBudgets()
        return RunBudgets(
            start_s=usual.start_s + trainer_wait_s,
            call_s=usual.call_s + trainer_wait_s,
            compile_s=usual.compile_s + trainer_wait_s,
            save_s=usual.save_s + trainer_wait_s,
            data_s=data_wait_s + 60.0,
            finish_s=usual.finish_s + trainer_wait_s,
        )


@dataclass(frozen=True, kw_only=True)
class CallSpan:
    """One trainer call. Monotonic seconds."""

    call: str
    step: int
    index: int
    started_s: float
    seconds: float
    outcome: str


@dataclass(frozen=True, kw_only=True)
class RunView:
    """The board at one moment."""

    run_id: str
    trainer: str
    state: RunState
    doing: str
    age_s: float
    allowance_s: float
    boundary: BoundaryState | None  # None before the run is open.
    num_steps: int
    refusals: dict[str, int]
    notes: dict[str, int]
    last_note: str
    put_bytes: int
    put_retries: int
    live: LiveReading | None  # None: the rollouts are recorded ones.
    steps: tuple[StepRecord, ...]  # Closed ones, oldest first.
    calls: tuple[CallSpan, ...]  # Oldest first.
    stop_reason: str
    started_s: float
    now_s: float


_SLOW: Final = (Call.SAVE_CHECKPOINT, Call.RESTORE_CHECKPOINT)


class RunBoard(WaitBoard):
    """Thread-safe: written by the runner's thread, read by any."""

    def __init__(
        self,
        control: RunControl,
        *,
        budgets: RunBudgets | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control = control
        self._budgets = budgets or RunBudgets()
        self._now = now
        self._lock = threading.Lock()
        self._state = RunState.STARTING
        self._doing = "reaching the worker"
        self._allowance_s = self._budgets.start_s
        self._progress_s = self._became_s = now()
        self._data_wait_s = 0.0
        self._started_s = now()
        self._run_id = ""
        self._trainer = ""
        self._plan: RunPlan | None = None
        self._boundary: BoundaryState | None = None
        self._refusals: Counter[str] = Counter()
        self._notes: Counter[str] = Counter()
        self._last_note = ""
        self._counters: FeederCounters | None = None
        self._steps: deque[StepRecord] = deque(maxlen=STEPS_KEPT)
        self._calls: deque[CallSpan] = deque(maxlen=CALLS_KEPT)
        self.on_change: Callable[[], object] = lambda: None
        self.live: Callable[[], LiveReading | None] = lambda: None

    # -- told by the application ------------------------------------------------------------------

    def begin(self, run_id: str, trainer: str) -> None:
        with self._lock:
            self._run_id, self._trainer = run_id, trainer

    def opening(self, what: str) -> None:
        """A part of starting that may take its time."""
        self._become(RunState.STARTING, what, self._budgets.start_s)

    def running(self, plan: RunPlan, counters: FeederCounters) -> None:
        """The runner starts."""
        with self._lock:
            self._plan, self._counters = plan, counters
        self._become(RunState.TRAINING, "opening the run", self._budgets.call_s)

    def finishing(self) -> None:
        self._become(RunState.FINISHING, "closing the run", self._budgets.finish_s)

    def closed(self, record: StepRecord, before: StepRecord | None = None) -> None:
        """A step's bookkeeping. `before`: the step before it, whose boundary is known by now."""
        with self._lock:
            if before is not None and self._steps and self._steps[-1].step == before.step:
                self._steps[-1] = before
            self._steps.append(record)

    def _become(self, state: RunState, doing: str, allowance_s: float) -> None:
        now_s = self._now()
        with self._lock:
            self._data_wait_s += self._waiting_s(now_s)
            self._state, self._doing, self._allowance_s = state, doing, allowance_s
            self._progress_s = self._became_s = now_s
        self.on_change()

    def _waiting_s(self, now_s: float) -> float:
        """Of the wait for data that goes on; 0 when none does."""
        return now_s - self._became_s if self._state is RunState.WAITING_FOR_DATA else 0.0

    @property
    def data_wait_seconds(self) -> float:
        """Seconds that the run had nothing to send until a micro-batch came, so far."""
        with self._lock:
            return self._data_wait_s + self._waiting_s(self._now())

    # -- told by the runner -----------------------------------------------------------------------

    def calling(self, send: Send) -> None:
        """A call is about to be made. Asking, and asking again, is no progress."""
        state, allowance_s = RunState.TRAINING, self._budgets.call_s
        if send.call is Call.COMPILE:
            state, allowance_s = RunState.COMPILING, self._budgets.compile_s
        elif send.call in _SLOW:
            allowance_s = self._budgets.save_s
        if send.call is Call.GET_STATE or send.resend:
            with self._lock:
                self._doing = send.line
            return
        self._become(state, send.line, allowance_s)

    def waiting(self) -> None:
        self._become(RunState.WAITING_FOR_DATA, "waiting for a micro-batch", self._budgets.data_s)

    def waited(self) -> None:
        self._become(RunState.TRAINING, "working", self._budgets.call_s)

    def on_call(self, record: TraceRecord, answer: Answer) -> None:
        with self._lock:
            if isinstance(answer.event, Refused):
                self._refusals[answer.event.reason.value] += 1
            self._calls.append(
                CallSpan(
                    call=record.call,
                    step=record.step,
                    index=record.index,
                    started_s=record.started_s,
                    seconds=record.seconds,
                    outcome="lost" if isinstance(answer.event, Lost) else record.outcome,
                )
            )
            asked = record.call == Call.GET_STATE.value
            if isinstance(answer.event, Done) and not asked:
                self._progress_s = self._now()

    def on_note(self, note: Note) -> None:
        with self._lock:
            self._notes[note.kind.value] += 1
            self._last_note = note.text

    def on_state(self, state: BoundaryState) -> None:
        self._boundary = state

    # -- read -------------------------------------------------------------------------------------

    def _stated(self) -> tuple[RunState, str, float]:
        """(state, what is done, allowance), with what a person asked for. Holding the lock."""
        if self._control.stop_reason:
            return RunState.STOPPING, self._doing, self._allowance_s
        holding = self._control.holding_step
        if holding >= 0:
            return RunState.PAUSED, f"holding step {holding} back", math.inf
        if self._control.pause_wanted and self._state is not RunState.STARTING:
            return RunState.PAUSING, self._doing, self._allowance_s
        return self._state, self._doing, self._allowance_s

    def progress(self) -> Progress:
        """For the heartbeat."""
        with self._lock:
            state, doing, allowance_s = self._stated()
            progress_s, inner = self._progress_s, self._state
        stopping = state is RunState.STOPPING
        started = inner is not RunState.STARTING
        return Progress(
            state=f"{state.value} {doing}",
            progress_s=progress_s,
            allowance_s=allowance_s,
            silence_s=SILENCE_S,
            started=started,
            ready=started and not stopping,
            reason="it is stopping" if stopping else ("" if started else doing),
        )

    @property
    def compiling(self) -> bool:
        """Whether the worker compiles for this run now."""
        return self._state is RunState.COMPILING

    @property
    def staging(self) -> bool | None:
        """Whether start-up decided to stage; None = it has not yet."""
        plan = self._plan
        return None if plan is None else plan.stage

    def view(self) -> RunView:
        """Everything, at one moment."""
        live = self.live()
        with self._lock:
            state, doing, allowance_s = self._stated()
            counters = self._counters
            now_s = self._now()
            return RunView(
                run_id=self._run_id,
                trainer=self._trainer,
                state=state,
                doing=doing,
                age_s=max(0.0, now_s - self._progress_s),
                allowance_s=allowance_s,
                boundary=self._boundary,
                num_steps=0 if self._plan is None else self._plan.num_steps,
                refusals=dict(self._refusals),
                notes=dict(self._notes),
                last_note=self._last_note,
                put_bytes=0 if counters is None else counters.put_bytes,
                put_retries=0 if counters is None else counters.put_retries,
                live=live,
                steps=tuple(self._steps),
                calls=tuple(self._calls),
                stop_reason=self._control.stop_reason,
                started_s=self._started_s,
                now_s=now_s,
            )
