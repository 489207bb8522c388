"""What a run counts is what happened in it."""

from __future__ import annotations

import urllib.request

from orchestrator.calls import NoteKind
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.plan import RunPlan
from prestage.operation.pages import PageServer, metrics_page
from tests.support.rig import address_of, run_against, served


def test_metrics_count_calls_fallbacks_and_steps() -> None:
    with served() as server:
        plan = RunPlan(num_steps=3, pipeline=True, stage=True)
        result = run_against(address_of(server), plan)
    metrics = OrchestratorMetrics()
    for record, answer in zip(result.recorder.records, result.recorder.answers, strict=True):
        metrics.on_call(record, answer)
    for record in result.book.records():
        metrics.on_step(result.book, record.step)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    made = [record.call for record in result.recorder.records]
    assert value("prestage_calls_total", call="fwd_bwd", outcome="ok") == made.count("fwd_bwd")
    assert value("prestage_step_seconds_count") == 3
    for kind in NoteKind:
        assert value("prestage_fallbacks_total", kind=kind.value) == 0
    summaries = [record.summary for record in result.book.records()]
    assert value("prestage_trained_tokens_total") == sum(s.trained_tokens for s in summaries if s)
    place = ("127.0.0.1", 0)
    pages = PageServer("--metrics_port", place, {"/metrics": metrics_page(metrics.registry)})
    try:
        page = urllib.request.urlopen(f"http://127.0.0.1:{pages.port}/metrics", timeout=5).read()
        assert b"prestage_trained_tokens_total" in page
    finally:
        pages.stop()
