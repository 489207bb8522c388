"""The boundary core as the simulator drives it: `orchestrator.boundary.advance`, remembered.

A long run repeats itself: the same state and event, some steps later, lead to the same decision. So
decisions are remembered in a form without step numbers, and the core is asked once for each. May
decide nothing by itself: whatever is not known yet, or cannot be shifted, goes to the core.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Protocol

from orchestrator.boundary import BoundaryState, Mode, advance, initial
from orchestrator.calls import (
    Action,
    Await,
    Done,
    Event,
    Local,
    LocalDone,
    NoteKind,
    Ready,
    Send,
)
from orchestrator.plan import RunPlan
from prestage.protocol import BatchRef

# The core looks at most this many steps behind and ahead of the open one.
_REACH: Final = 4
_FAR: Final = 1_000_000_000
_MOVES_KEPT: Final = 10_000  # Of one state: measured waits may differ every time.
_SEQ: Final = 1_000_000  # Where every remembered state's next seq is put.


class Core(Protocol):
    """Takes events in, gives actions out."""

    def advance(self, event: Event) -> Action: ...

    @property
    def noted(self) -> tuple[NoteKind, ...]:
        """What a person would hear of after the last event."""
        ...


class DirectCore:
    """Asks the core every time."""

    def __init__(self, plan: RunPlan) -> None:
        self._state = initial(plan)

    def advance(self, event: Event) -> Action:
        self._state, action = advance(self._state, event)
        return action

    @property
    def noted(self) -> tuple[NoteKind, ...]:
        return tuple(note.kind for note in self._state.notes)


@dataclass(frozen=True, kw_only=True)
class _Move:
    """One remembered decision, its steps counted from the shift that it was made at."""

    to: int
    shift_by: int
    action: Action
    noted: tuple[NoteKind, ...]


_Key = tuple[int, int, bool] | tuple[float, float] | str


class RememberingCore:
    """Gives the same actions as `DirectCore`; `asked` counts how often the core was asked."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._period = math.lcm(
            *(
                every
                for every in (plan.checkpoint_every, plan.weight_sync_every, plan.eval_every)
                if every
            )
        )
        self._first = 2 * self._period + 2 * _REACH
        self._normal: list[BoundaryState] = []
        self._ids: dict[BoundaryState, int] = {}
        self._moves: list[dict[_Key, _Move]] = []
        self._id = -1
        self._shift = 0
        self._state: BoundaryState | None = initial(plan)
        self.noted: tuple[NoteKind, ...] = ()
        self.asked = 0

    def advance(self, event: Event) -> Action:
        key = self._key(event) if self._id >= 0 else None
        if key is not None:
            move = self._moves[self._id].get(key)
            if move is not None:
                action = _shifted_action(move.action, self._shift)
                self._id, self._shift, self._state = move.to, self._shift + move.shift_by, None
                self.noted = move.noted
                normal = self._normal[self._id]
                if not self._far(normal.step + self._shift):
                    self._state = _shifted(normal, self._shift, self._plan)
                    self._id, self._shift = -1, 0
                return action
        return self._ask(event, key)

    def _far(self, step: int) -> bool:
        """No end of the run, and no first scored step, is near enough to matter."""
        scored = self._plan.val_start_step
        return self._plan.num_steps - step > _REACH and (not scored or abs(scored - step) > _REACH)

    def _key(self, event: Event) -> _Key | None:
        match event:
            case Ready(step=step, index=index, last=last):
                return (step - self._shift, index, last)
            case LocalDone():
                return "local"
            case Done(view=None, update_applied=True):
                return (event.stage_seconds, event.device_wait_seconds)
        return None

    def _ask(self, event: Event, key: _Key | None) -> Action:
        before_id, before_shift = self._id, self._shift
        state = self._state
        if state is None:
            state = _shifted(self._normal[self._id], self._shift, self._plan)
        self.asked += 1
        state, action = advance(state, event)
        self._state = state
        self.noted = tuple(note.kind for note in state.notes)
        self._settle(replace(state, notes=()))
        if key is not None and self._id >= 0 and len(self._moves[before_id]) < _MOVES_KEPT:
            self._moves[before_id][key] = _Move(
                to=self._id,
                shift_by=self._shift - before_shift,
                action=_shifted_action(action, -before_shift),
                noted=self.noted,
            )
        return action

    def _settle(self, state: BoundaryState) -> None:
        """Find the state's number, or -1 when it cannot be shifted."""
        self._id, self._shift = -1, 0
        if (
            state.mode is not Mode.RUN
            or state.lost is not None
            or state.given_up is not None
            or state.must_restore
            or state.packing < 0
            or not self._far(state.step)
        ):
            return
        step = state.step
        shift = 0
        if step >= self._first:
            shift = (step - self._first) // self._period * self._period
        normal = self._normalised(state, shift)
        number = self._ids.setdefault(normal, len(self._normal))
        if number == len(self._normal):
            self._normal.append(normal)
            self._moves.append({})
        self._id, self._shift = number, shift

    def _normalised(self, state: BoundaryState, shift: int) -> BoundaryState:
        plan = self._plan
        step = state.step - shift
        scored = plan.val_start_step
        if scored:
            scored = self._first + (_FAR if scored > state.step else -_REACH)
        # Far from both: where exactly they are makes no difference.
        normal_plan = replace(plan, num_steps=self._first + _FAR, val_start_step=scored)
        moved = _shifted(state, -shift, normal_plan)
        # Only compared with the open step: older is the same as very old.
        oldest = step - _REACH
        outstanding = moved.outstanding
        if isinstance(outstanding, Send) and outstanding.seq:
            outstanding = replace(outstanding, seq=_SEQ + outstanding.seq - state.next_seq)
        return replace(
            moved,
            next_seq=_SEQ,
            outstanding=outstanding,
            clocked=max(moved.clocked, oldest),
            scored=max(moved.scored, oldest),
            stage_decided=max(moved.stage_decided, oldest),
        )


def _shifted_ref(ref: BatchRef, by: int) -> BatchRef:
    return replace(ref, step=ref.step + by)


def _shifted_action(action: Action, by: int) -> Action:
    match action:
        case Send(step=step, call=call, index=index, seq=seq) if step >= 0 and not action.resend:
            return Send(call=call, step=step + by, index=index, digest=action.digest, seq=seq)
        case Local(kind=kind, step=step):
            return Local(kind=kind, step=step + by)
        case Await(step=step, index=index):
            return Await(step=step + by, index=index)
    return action


def _shifted(state: BoundaryState, by: int, plan: RunPlan) -> BoundaryState:
    """The same state `by` steps later (or earlier), under `plan`."""
    mirror = state.mirror
    outstanding = state.outstanding
    if outstanding is not None:
        moved = _shifted_action(outstanding, by)
        assert isinstance(moved, Send | Local)
        outstanding = moved
    return replace(
        state,
        plan=plan,
        mirror=replace(
            mirror,
            step=mirror.step + by,
            train_step=mirror.train_step + by,
            staged=None if mirror.staged is None else _shifted_ref(mirror.staged, by),
            trained=tuple(_shifted_ref(ref, by) for ref in mirror.trained),
        ),
        ready=tuple(replace(ready, step=ready.step + by) for ready in state.ready),
        packing=state.packing + by,
        clocked=state.clocked + by,
        scored=state.scored + by,
        unbooked=tuple(step + by for step in state.unbooked),
        stage_decided=state.stage_decided + by,
        outstanding=outstanding,
    )
