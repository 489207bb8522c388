"""What CI walks, and what the longer target walks."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.plan import RunPlan
from tests.walk.model import Faults, WalkConfig

ARMS: Mapping[str, Mapping[str, bool]] = {
    "stock": {},
    "pipelined": {"pipeline": True},
    "staged": {"pipeline": True, "stage": True},
    "staged_after": {"pipeline": True, "stage": True, "stage_before_update": False},
    "zero_gap": {"pipeline": True, "stage": True, "dispatch_before_metrics": True},
}


def plan(arm: str, steps: int, **duties: int | bool) -> RunPlan:
    return RunPlan(num_steps=steps, **{**ARMS[arm], **duties})  # type: ignore[arg-type]


def _case(
    arm: str, steps: int, faults: int, micro_batches: int = 2, **duties: int | bool
) -> WalkConfig:
    return WalkConfig(
        plan=plan(arm, steps, **duties), micro_batches=micro_batches, faults=Faults(total=faults)
    )


CI: Mapping[str, WalkConfig] = {
    "stock": _case("stock", 2, 2, checkpoint_every=1, weight_sync_every=1),
    "pipelined": _case("pipelined", 2, 2, checkpoint_every=1, weight_sync_every=1),
    "staged": _case("staged", 2, 2, checkpoint_every=1, weight_sync_every=1),
    "staged_3_steps": _case("staged", 3, 2, checkpoint_every=2),
    "staged_single_3_faults": _case("staged", 2, 3, micro_batches=1, checkpoint_every=1),
    "staged_after": _case("staged_after", 3, 2, checkpoint_every=2),
    "zero_gap": _case("zero_gap", 3, 2),
    "zero_gap_checkpoint": _case("zero_gap", 3, 2, checkpoint_every=2),
    "zero_gap_single": _case("zero_gap", 3, 2, micro_batches=1),
    "scored_and_evaluated": _case("staged", 3, 1, val_start_step=2, eval_every=1),
    "trainer_logprobs": _case("staged", 3, 1, trainer_logprobs=True, checkpoint_every=1),
}
DEEP: Mapping[str, WalkConfig] = {
    **{
        f"{arm}_3_faults": _case(arm, 2, 3, checkpoint_every=1, weight_sync_every=1) for arm in ARMS
    },
    "zero_gap_3_steps_3_faults": _case("zero_gap", 3, 3),
    "staged_3_steps_3_faults": _case("staged", 3, 3, checkpoint_every=2),
}
