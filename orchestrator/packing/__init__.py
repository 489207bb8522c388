"""Whole-step packing: a plan from lengths, then arrays written once into the send buffer.

`plan_step` decides (pure), `write_micro_batch` writes, `check_plan` and `step_conservation` prove
that nothing was lost. Imports NumPy and the micro-batch contract; knows no wire or trainer.
"""

from orchestrator.packing.bins import Bins, first_fit_decreasing, pack_bins
from orchestrator.packing.bounds import lower_bound
from orchestrator.packing.conservation import StepConservation, check_plan, step_conservation
from orchestrator.packing.layout import MicroBatchPlan, Segment, StepPlan
from orchestrator.packing.planner import PackingConfig, first_micro_batch, plan_step
from orchestrator.packing.writer import (
    FieldSet,
    Positions,
    Written,
    allocate,
    common_fields,
    pack_micro_batch,
    write_micro_batch,
)

__all__ = [
    "Bins",
    "FieldSet",
    "MicroBatchPlan",
    "PackingConfig",
    "Positions",
    "Segment",
    "StepConservation",
    "StepPlan",
    "Written",
    "allocate",
    "check_plan",
    "common_fields",
    "first_fit_decreasing",
    "first_micro_batch",
    "lower_bound",
    "pack_bins",
    "pack_micro_batch",
    "plan_step",
    "step_conservation",
    "write_micro_batch",
]
