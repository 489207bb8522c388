"""Where evaluations and scorings stand among a step's calls: sequences written out by hand.

After the weight sync, before the first fwd_bwd; the same trainer calls in every arm.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.boundary import advance, initial
from orchestrator.calls import Await, Done, LocalDone, Ready, Start, WorkerView
from orchestrator.plan import RunPlan
from prestage.protocol import BatchRef, Phase, StepState
from tests.boundary.script import Script, digest

STOCK = Path(__file__).parents[1] / "golden" / "stock"
DUTIES = {"checkpoint_every": 1, "weight_sync_every": 1, "eval_every": 1}
BY_HAND = {
    "m3_eval_every_2": (3, {"eval_every": 2}),
    "m1_checkpoint_sync_eval": (1, DUTIES),
    "m1_checkpoint_sync_eval_trainer_logprobs": (1, {**DUTIES, "trainer_logprobs": True}),
}
ARMS = {
    "pipelined": {"pipeline": True},
    "staged": {"pipeline": True, "stage": True},
    "staged_after": {"pipeline": True, "stage": True, "stage_before_update": False},
    "zero_gap": {"pipeline": True, "stage": True, "dispatch_before_metrics": True},
}


def lines(size: int, **flags: int | bool) -> list[str]:
    return Script(plan=RunPlan(num_steps=3, **flags), micro_batches=size).run().lines  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BY_HAND)
def test_flags_off_is_the_sequence_written_by_hand(name: str) -> None:
    size, flags = BY_HAND[name]
    assert lines(size, **flags) == (STOCK / f"{name}.txt").read_text().splitlines()


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", BY_HAND)
def test_every_arm_makes_the_same_calls_but_for_staging(name: str, arm: str) -> None:
    size, flags = BY_HAND[name]
    made = [
        line.replace(" defer_update", "")
        for line in lines(size, **flags, **ARMS[arm])
        if not line.startswith(("# ", "stage_fwd_bwd", "apply_deferred_update"))
    ]
    stock = (STOCK / f"{name}.txt").read_text().splitlines()
    assert sorted(made) == sorted(line for line in stock if not line.startswith("# "))
    evaluated = [place for place, line in enumerate(made) if line.startswith("evaluate")]
    assert evaluated
    for place in evaluated:
        step = made[place].split()[1]
        # Nothing of the next step before it, nothing of its own step after it.
        assert not any(line.endswith(step) for line in made[place + 1 :] if "release" not in line)
        number = int(step.removeprefix("step="))
        assert not any(f"step={number + 1} " in line for line in made[:place])


def test_a_step_taken_up_in_its_middle_is_scored_before_it_goes_on() -> None:
    plan = RunPlan(num_steps=2, trainer_logprobs=True)
    trained = (BatchRef(step=0, index=0, digest=digest(0, 0)),)
    state = StepState(phase=Phase.ACCUMULATING, micro_step=1, trained=trained)
    view = WorkerView(state=state, incarnation="i1", epoch=2, last_seq=4, compiled=True)
    core, action = advance(initial(plan), Start())
    said = [action]
    core, action = advance(core, Done(view=view))
    while not isinstance(action, Await):
        said.append(action)
        core, action = advance(core, LocalDone())
    assert [one.line for one in said] == ["open_run", "# pack step=0", "# score step=0"]
    for index in range(2):
        ready = Ready(step=0, index=index, digest=digest(0, index), last=index == 1)
        core, action = advance(core, ready)
    assert action.line == "fwd_bwd apply_optimizer step=0 index=1"
    assert core.scored == 0
