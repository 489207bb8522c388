"""What goes into and comes out of the step boundary: actions, events and notes. Values only.

Actions are what the runner does next; events are what happened; notes are what a person (and a
counter) must hear of.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from prestage.protocol import Call, Reason, StepState

# ---------------------------------------------------------------------------------------------
# Actions: what the runner does next.


@dataclass(frozen=True, kw_only=True)
class Send:
    """Make one trainer call and answer with `Done`, `Lost`, `Refused` or `Raised`."""

    call: Call
    step: int = -1  # The micro-batch's step, or the closed step that the call is about.
    index: int = -1
    digest: str = ""
    seq: int = 0  # 0 for calls that are not sequenced.
    resend: bool = False  # The same key was sent before.

    @property
    def line(self) -> str:
        """The call as golden files write it."""
        text = self.call.value
        if self.step >= 0:
            text += f" step={self.step}"
        if self.index >= 0:
            text += f" index={self.index}"
        if self.resend:
            text += " resend"
        return text


class LocalKind(enum.Enum):
    """The orchestrator's own work. The runner does it and answers with `LocalDone`."""

    PACK = "pack"  # Start packing (and putting) the step in the background; answers at once.
    CLOCK = "clock"  # The step's clock starts.
    BOOKKEEPING = "bookkeeping"  # Log the closed step and publish its metrics.
    SCORE = "score"  # Trainer-computed old log-probs for the step, before its first fwd_bwd.


@dataclass(frozen=True, kw_only=True)
class Local:
    kind: LocalKind
    step: int

    @property
    def line(self) -> str:
        return f"# {self.kind.value} step={self.step}"


@dataclass(frozen=True, kw_only=True)
class Await:
    """Nothing to send until the next event (`Ready`, `SourceEnded`, ...)."""

    step: int
    index: int

    @property
    def line(self) -> str:
        return f"# await step={self.step} index={self.index}"


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The run is over; every step is closed and has nothing left to do."""

    line: str = "# finish"


@dataclass(frozen=True, kw_only=True)
class Fail:
    """The run ends with an error."""

    why: str

    @property
    def line(self) -> str:
        return f"# fail {self.why}"


Action = Send | Local | Await | Finish | Fail

# ---------------------------------------------------------------------------------------------
# Events: what happened.


@dataclass(frozen=True, kw_only=True)
class Start:
    """Begin (or begin again, in a new process)."""


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """The worker's answer about itself: OpenRun's and GetState's."""

    state: StepState
    incarnation: str
    epoch: int
    last_seq: int
    compiled: bool
    durable_step: int = -1
    idle_wait_seconds: float = 0.0  # Of the compiled worker's idle device.


@dataclass(frozen=True, kw_only=True)
class Done:
    """The outstanding call was carried out. What it returned, as far as the core needs it."""

    view: WorkerView | None = None  # open_run, get_state, restore_checkpoint.
    update_applied: bool = True  # Closing calls: False when the update was skipped.
    idle_wait_seconds: float = 0.0  # compile: median of wait_for_device on the idle device.
    stage_seconds: float = -1.0  # get_metrics of a staged boundary.
    device_wait_seconds: float = -1.0  # get_metrics of a staged boundary.


@dataclass(frozen=True, kw_only=True)
class LocalDone:
    """The outstanding local action is done."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The outstanding call's outcome is unknown."""

    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The worker refused the outstanding call: it changed nothing."""

    reason: Reason
    message: str


@dataclass(frozen=True, kw_only=True)
class Raised:
    """The engine raised in the outstanding call (or earlier, on the device)."""

    message: str


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A micro-batch is packed and its bytes are at the worker."""

    step: int
    index: int
    digest: str
    last: bool  # The step's last micro-batch.


@dataclass(frozen=True, kw_only=True)
class SourceEnded:
    """No data for `step` or any later one: the run ends before it."""

    step: int


@dataclass(frozen=True, kw_only=True)
class PutRefused:
    """A micro-batch's bytes were refused because of the state that the worker is in: ask it."""

    why: str


@dataclass(frozen=True, kw_only=True)
class GaveUp:
    """The runner's patience ended (a deadline, a watchdog, a dead producer)."""

    why: str


Event = (
    Start | Done | LocalDone | Lost | Refused | Raised | Ready | SourceEnded | PutRefused | GaveUp
)

# ---------------------------------------------------------------------------------------------
# Notes: what a person (and a counter) must hear of. The runner logs and counts them.


class NoteKind(enum.Enum):
    STAGE_LOST = "stage_lost"  # Fell back to an unstaged send; latched.
    STAGE_ARRIVED = "stage_arrived_late"  # A lost stage came through after all and is used.
    STAGE_REFUSED = "stage_refused"  # The worker refused to stage; latched.
    LATCHED_NOTHING_HIDDEN = "latched_nothing_hidden"
    STAGE_OUTLASTED = "stage_outlasted_compute"  # The update waited for the stage.
    LATE = "next_step_late"  # Not ready in time: nothing staged.
    INELIGIBLE = "boundary_ineligible"
    RESENT = "call_resent"
    WORKER_RESTARTED = "worker_restarted"
    RESTARTED_FROM_SCRATCH = "no_checkpoint_restarted_from_step_0"
    ABORTED = "step_aborted"
    METRICS_LOST = "metrics_not_kept"


@dataclass(frozen=True, kw_only=True)
class Note:
    kind: NoteKind
    step: int
    text: str
