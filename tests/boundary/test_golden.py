"""The frozen call sequences.

1. Flags off is, line by line, the stock sequence that was written out by hand.
2. Pipelined makes the same trainer calls in the same order.
3. Staged differs from stock only by stage, defer and apply calls.
4. Every other combination of flags, refusal and fallback has its own frozen sequence.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.calls import Done, Event, Lost, Refused, Send, WorkerView
from orchestrator.plan import RunPlan
from prestage.protocol import Call, Phase, Reason, StepState
from tests.boundary.script import Script

GOLDEN = Path(__file__).parent.parent / "golden"
SIZES = (1, 3, 9)
DUTIES = {"": {}, "_checkpoint_sync": {"checkpoint_every": 1, "weight_sync_every": 1}}
ARMS = {
    "pipelined": {"pipeline": True},
    "staged": {"pipeline": True, "stage": True},
    "staged_after": {"pipeline": True, "stage": True, "stage_before_update": False},
    "zero_gap": {"pipeline": True, "stage": True, "dispatch_before_metrics": True},
}


def plan(num_steps: int = 3, **flags: int | bool) -> RunPlan:
    return RunPlan(num_steps=num_steps, **flags)  # type: ignore[arg-type]


def compare(request: pytest.FixtureRequest, name: str, lines: list[str]) -> None:
    path = GOLDEN / f"{name}.txt"
    text = "\n".join(lines) + "\n"
    if request.config.getoption("--rewrite-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"{path} is missing: --rewrite-golden=REASON makes it"
    assert text == path.read_text(), f"call sequence differs from {path}"


def trainer_calls(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith("# ")]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("duties", DUTIES)
def test_flags_off_is_the_hand_written_stock_sequence(size: int, duties: str) -> None:
    lines = Script(plan=plan(**DUTIES[duties]), micro_batches=size).run().lines
    assert lines == (GOLDEN / "stock" / f"m{size}{duties}.txt").read_text().splitlines()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("duties", DUTIES)
@pytest.mark.parametrize("arm", ARMS)
def test_frozen(request: pytest.FixtureRequest, size: int, duties: str, arm: str) -> None:
    script = Script(plan=plan(**ARMS[arm], **DUTIES[duties]), micro_batches=size).run()
    compare(request, f"{arm}/m{size}{duties}", script.lines)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("duties", DUTIES)
def test_pipelined_makes_the_same_trainer_calls_in_the_same_order(size: int, duties: str) -> None:
    stock = (GOLDEN / "stock" / f"m{size}{duties}.txt").read_text().splitlines()
    script = Script(plan=plan(pipeline=True, **DUTIES[duties]), micro_batches=size).run()
    assert trainer_calls(script.lines) == trainer_calls(stock)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("duties", DUTIES)
def test_staged_differs_from_stock_only_by_stage_defer_and_apply(size: int, duties: str) -> None:
    stock = (GOLDEN / "stock" / f"m{size}{duties}.txt").read_text().splitlines()
    script = Script(plan=plan(**ARMS["staged"], **DUTIES[duties]), micro_batches=size).run()
    undone = [
        line.replace(" defer_update", "")
        for line in trainer_calls(script.lines)
        if not line.startswith(("stage_fwd_bwd", "apply_deferred_update"))
    ]
    assert undone == trainer_calls(stock)


@pytest.mark.parametrize("arm", [*ARMS, "stock"])
def test_frozen_late_rollouts(request: pytest.FixtureRequest, arm: str) -> None:
    script = Script(plan=plan(**ARMS.get(arm, {})), micro_batches=3, late=(1, 2)).run()
    assert not any("stage_fwd_bwd" in line for line in script.lines)
    compare(request, f"late/{arm}", script.lines)


def lose(call: Call, at_step: int, *, admitted: bool) -> object:
    """An answer function that loses one call's reply; the worker had admitted it or not."""
    lost: list[Send] = []

    def answer(send: Send, count: int) -> Event | None:
        if count == 1:  # Another run of the same script.
            lost.clear()
        if send.call is call and send.step == at_step and not lost:
            lost.append(send)
            return Lost(why="connection reset")
        if send.call is Call.GET_STATE:
            last_seq = lost[0].seq if admitted else lost[0].seq - 1
            state = StepState(phase=Phase.UPDATE_DEFERRED)
            return Done(
                view=WorkerView(
                    state=state, incarnation="i1", epoch=1, last_seq=last_seq, compiled=True
                )
            )
        return None

    return answer


def refuse(call: Call, at_step: int, reason: Reason) -> object:
    def answer(send: Send, count: int) -> Event | None:
        if send.call is call and send.step == at_step:
            return Refused(reason=reason, message=f"{reason.value} in the script")
        return None

    return answer


OTHER = {
    "stage_lost_unseen": (ARMS["staged"], lose(Call.STAGE_FWD_BWD, 1, admitted=False)),
    "stage_lost_admitted": (ARMS["staged"], lose(Call.STAGE_FWD_BWD, 1, admitted=True)),
    "fwd_bwd_lost_unseen": (ARMS["staged"], lose(Call.FWD_BWD, 1, admitted=False)),
    "fwd_bwd_lost_admitted": (ARMS["staged"], lose(Call.FWD_BWD, 1, admitted=True)),
    "apply_lost_admitted": (ARMS["staged"], lose(Call.APPLY_DEFERRED_UPDATE, 1, admitted=True)),
    "stage_refused_memory": (
        ARMS["staged"],
        refuse(Call.STAGE_FWD_BWD, 1, Reason.STAGING_MEMORY),
    ),
    "defer_refused_fused": (ARMS["staged"], refuse(Call.FWD_BWD_DEFER, 0, Reason.UPDATE_FUSED)),
    "fenced": (ARMS["staged"], refuse(Call.FWD_BWD, 1, Reason.STALE_EPOCH)),
    "val_start_step_2": ({**ARMS["staged"], "val_start_step": 2}, None),
    "trainer_logprobs": ({**ARMS["staged"], "trainer_logprobs": True}, None),
    "eval_every_2": ({**ARMS["staged"], "eval_every": 2}, None),
}


@pytest.mark.parametrize("name", OTHER)
def test_frozen_refusals_and_fallbacks(request: pytest.FixtureRequest, name: str) -> None:
    flags, answer = OTHER[name]
    arguments = {} if answer is None else {"answer": answer}
    script = Script(plan=plan(**flags), micro_batches=3, **arguments).run()  # type: ignore[arg-type]
    compare(request, f"other/{name}", [*script.lines, *_noted(script)])


def _noted(script: Script) -> list[str]:
    return [f"# note {note.kind.value} step={note.step}" for note in script.notes]


def test_val_start_step_7_stages_6_of_9_boundaries() -> None:
    script = Script(plan=plan(num_steps=10, val_start_step=7, **ARMS["staged"]), micro_batches=2)
    staged = [line for line in script.run().lines if line.startswith("stage_fwd_bwd")]
    assert staged == [f"stage_fwd_bwd step={step} index=0" for step in range(1, 7)]
