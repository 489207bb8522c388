"""What a scrape says of a run is what happened in it."""

from __future__ import annotations

import dataclasses

from orchestrator.calls import Note, NoteKind, Send
from orchestrator.operation.operation import Operation
from orchestrator.operation.run_metrics import RunMetrics
from orchestrator.report import FORWARD_METRIC
from orchestrator.steps import StepRecord
from prestage.protocol import Call
from tests.operation.runs import PLAN, run_operated
from tests.support.rig import address_of, served


def samples(metrics: RunMetrics) -> dict[str, float]:
    """`name{value}` to value."""
    return {
        sample.name + "".join(f"{{{label}}}" for label in sample.labels.values()): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }


def note(kind: NoteKind, step: int) -> Note:
    return Note(kind=kind, step=step, text="t")


def test_each_boundary_is_counted_once_by_what_became_of_it() -> None:
    metrics = RunMetrics()
    metrics.on_step(StepRecord(step=0, stage_seconds=0.1))
    metrics.on_note(note(NoteKind.LATE, 1))
    metrics.on_step(StepRecord(step=1))
    metrics.on_note(note(NoteKind.INELIGIBLE, 2))
    metrics.on_step(StepRecord(step=2))
    metrics.on_step(StepRecord(step=3))
    metrics.on_note(note(NoteKind.LATE, 4))
    metrics.on_step(StepRecord(step=4, stage_seconds=0.2))  # Late, and then staged after all.
    found = samples(metrics)
    for outcome, count in {"staged": 2, "late": 1, "ineligible": 1, "unstaged": 1}.items():
        assert found[f"prestage_staged_boundaries_total{{{outcome}}}"] == count
    for step in range(10_000):
        metrics.on_note(note(NoteKind.LATE, step))
        metrics.on_step(StepRecord(step=step + 1))
    assert len(metrics._why) <= 1, "notes of steps that were booked are let go"


def test_what_is_not_known_has_no_sample() -> None:
    metrics = RunMetrics()
    before = samples(metrics)
    assert not {"prestage_loss", "prestage_entropy", "prestage_staging_enabled"} & before.keys()
    metrics.on_step(StepRecord(step=0, metrics={"loss": 0.5, FORWARD_METRIC: 0.01}))
    metrics.on_step(StepRecord(step=1, metrics={"loss": 0.25}))
    metrics.staging = lambda: False
    after = samples(metrics)
    assert after["prestage_loss"] == 0.25
    assert after["prestage_token_logdiff_absmean"] == 0.01, "the last that is known"
    assert "prestage_grad_norm" not in after
    assert after["prestage_staging_enabled"] == 0.0


def test_retries_and_restarts() -> None:
    operation = Operation()
    send = Send(call=Call.FWD_BWD, step=1, index=1)
    operation.before_send(send)
    operation.before_send(dataclasses.replace(send, resend=True))
    operation.metrics.on_note(note(NoteKind.WORKER_RESTARTED, 1))
    found = samples(operation.metrics.run)
    assert found["prestage_retries_total{fwd_bwd}"] == 1
    assert found["prestage_worker_restarts_total"] == 1


def test_a_real_runs_metrics() -> None:
    operation = Operation()
    with served() as server:
        run_operated(address_of(server), operation)
    found = samples(operation.metrics.run)
    boundaries = sum(
        value for name, value in found.items() if name.startswith("prestage_staged_boundaries")
    )
    assert boundaries == PLAN.num_steps, "every closed step, the last one included"
    assert found["prestage_staging_enabled"] == 1.0
    assert found["prestage_put_bytes_total"] > 0 and found["prestage_put_retries_total"] == 0
