"""What the step plan demands of the orchestrator's own decisions, restated apart from the core.

The call history cannot show these: a boundary that could have been staged and was not, a clock that
starts after the wait, bookkeeping before the next send.
"""

from __future__ import annotations

from orchestrator.boundary import BoundaryState
from orchestrator.calls import Action, Await, Local, LocalKind, Send
from prestage.protocol import CLOSING_CALLS, Call, Phase


def at_action(before: BoundaryState, state: BoundaryState, action: Action) -> tuple[str, ...]:
    """What is wrong with this decision; nothing for a right one."""
    broken: list[str] = []
    closing = isinstance(before.outstanding, Send) and before.outstanding.call in CLOSING_CALLS
    if closing and before.owed and state.mirror.step > before.mirror.step:
        owed = ", ".join(duty.value for duty in before.owed)
        broken.append(f"duties: {owed} of step {before.mirror.step - 1} are dropped")
    if isinstance(action, Send) and not action.resend:
        broken.extend(_staging(before, state, action))
    if isinstance(action, Await) and action.index == 0 and state.clocked < action.step:
        broken.append(
            f"step-clock: waits for step {action.step}, whose clock has not started"
            f" (newest: {state.clocked})"
        )
    if isinstance(action, Local) and action.kind is LocalKind.BOOKKEEPING:
        broken.extend(_bookkeeping(state, action.step))
    return tuple(broken)


def _is_ready(state: BoundaryState, step: int) -> bool:
    return any((ready.step, ready.index) == (step, 0) for ready in state.ready)


def _may_stage(state: BoundaryState, step: int) -> bool:
    """The boundary after `step` is to be staged, as far as the plan goes."""
    plan = state.plan
    ends = step + 1 >= plan.num_steps
    scored = plan.val_start_step > 0 and step + 1 >= plan.val_start_step
    return plan.stage and not (ends or scored or plan.trainer_logprobs or state.latched)


def _staging(before: BoundaryState, state: BoundaryState, send: Send) -> list[str]:
    step, plan = state.mirror.step, state.plan
    may_stage = _may_stage(before, step) and _may_stage(state, step) and _is_ready(state, step + 1)
    if send.call is Call.APPLY_DEFERRED_UPDATE and state.mirror.staged is None and may_stage:
        return [f"never-stages: applies update {step} although ({step + 1}, 0) is ready"]
    if send.call is Call.FWD_BWD_APPLY and plan.stage_before_update and _may_stage(state, step):
        return [f"never-stages: closes step {step} without deferring its update"]
    if send.call is Call.FWD_BWD_DEFER and not (
        plan.stage_before_update and _may_stage(state, step)
    ):
        return [f"eligible: defers the update of step {step}, whose boundary is not to be staged"]
    closed = state.mirror.phase is Phase.CLOSED and step > 0 and state.packing >= step
    if closed and not plan.stage_before_update and _may_stage(state, step - 1):
        unstaged = state.mirror.staged is None and send.call is not Call.STAGE_FWD_BWD
        if unstaged and _is_ready(before, step) and state.stage_decided < step - 1:
            return [f"never-stages: sends {send.line} although ({step}, 0) is ready"]
    return []


def _bookkeeping(state: BoundaryState, booked: int) -> list[str]:
    """Pipelined: the next step's first micro-batch is sent before the step is booked."""
    step, plan = state.mirror.step, state.plan
    if not plan.pipeline or plan.trainer_logprobs or step >= plan.num_steps:
        return []
    newest = state.mirror.phase is Phase.CLOSED and booked == step - 1 == state.unbooked[-1]
    if newest and _is_ready(state, step):
        return [f"bookkeeping: books step {booked} although ({step}, 0) is ready to be sent"]
    return []


def at_finish(state: BoundaryState) -> tuple[str, ...]:
    """A run ends with every closed step booked and nothing owed."""
    broken: list[str] = []
    if state.unbooked:
        broken.append(f"bookkeeping: finished with steps {state.unbooked} not booked")
    if state.owed:
        broken.append(f"duties: finished while {[duty.value for duty in state.owed]} are owed")
    return tuple(broken)
