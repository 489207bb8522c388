"""The status page: one static HTML file and the JSON that it draws. Read-only; no gRPC."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Final

from orchestrator.ingest.metrics import LiveReading
from orchestrator.operation.board import CallSpan, RunView
from orchestrator.steps import StepRecord
from prestage.operation.pages import Page

_HTML: Final = "text/html; charset=utf-8"
_JSON: Final = "application/json"


def _number(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return None if value is None or not math.isfinite(value) else value


def _known(value: float) -> float | None:
    return None if value < 0 else _number(value)


def _step(record: StepRecord, origin_s: float) -> dict[str, object]:
    summary = record.summary
    return {
        "step": record.step,
        "started_s": _known(record.started_s - origin_s),
        "finished_s": _known(record.finished_s - origin_s),
        "seconds": _known(record.seconds),
        "micro_steps": record.micro_steps,
        "train_step": record.train_step,
        "boundary_idle_seconds": _known(record.boundary_idle_seconds),
        "stage_seconds": _known(record.stage_seconds),
        "device_wait_seconds": _known(record.device_wait_seconds),
        "staged_input_used": record.staged_input_used,
        "loss": _number(record.metrics.get("loss")),
        "reward_mean": None if summary is None else _number(summary.reward_mean),
        "groups": None if summary is None else summary.groups,
        "trajectories": None if summary is None else summary.trajectories,
        "dropped": {} if summary is None else dict(summary.dropped),
    }


def _call(span: CallSpan, origin_s: float) -> dict[str, object]:
    return {
        "call": span.call,
        "step": span.step,
        "index": span.index,
        "started_s": span.started_s - origin_s,
        "seconds": span.seconds,
        "outcome": span.outcome,
    }


def _live(live: LiveReading) -> dict[str, object]:
    return {
        "waiting_groups": live.queue_depth,
        "incomplete_groups": live.incomplete_groups,
        "producers": live.producers,
        "queue_bytes": live.queue_bytes,
        "queue_budget_bytes": live.queue_budget_bytes,
        "journal_bytes": live.journal_bytes,
        "journal_budget_bytes": live.journal_budget_bytes,
        "journal_lag_seconds": _number(live.journal_lag_seconds),
        "producer_wait_seconds": _number(live.producer_wait_seconds),
    }


def status_json(view: RunView) -> dict[str, object]:
    """What the page draws. Times in seconds since the process started."""
    origin_s = view.started_s
    boundary = view.boundary
    mirror = None if boundary is None else boundary.mirror
    return {
        "run_id": view.run_id,
        "trainer": view.trainer,
        "state": view.state.value,
        "doing": view.doing,
        "progress_age_s": view.age_s,
        "progress_allowance_s": _number(view.allowance_s),
        "uptime_s": view.now_s - origin_s,
        "stop_reason": view.stop_reason,
        "num_steps": view.num_steps,
        "step": 0 if mirror is None else mirror.step,
        "micro_step": 0 if mirror is None else mirror.micro_step,
        "train_step": 0 if mirror is None else mirror.train_step,
        "phase": "" if mirror is None else mirror.phase.value,
        "staged": "" if mirror is None or mirror.staged is None else str(mirror.staged),
        "latched": boundary is not None and boundary.latched,
        "epoch": 0 if boundary is None else boundary.epoch,
        "incarnation": "" if boundary is None else boundary.incarnation,
        "queue": {
            "ready_micro_batches": 0 if boundary is None else len(boundary.ready),
            "put_bytes": view.put_bytes,
            "put_retries": view.put_retries,
        },
        "live": None if view.live is None else _live(view.live),
        "refusals": view.refusals,
        "notes": view.notes,
        "last_note": view.last_note,
        "steps": [_step(record, origin_s) for record in view.steps],
        "calls": [_call(span, origin_s) for span in view.calls],
    }


def status_pages(view: Callable[[], RunView]) -> Mapping[str, Page]:
    """`/` and `/status.json`."""
    html = resources.files("orchestrator.operation").joinpath("status_page.html").read_bytes()

    def page() -> tuple[str, bytes]:
        return _HTML, html

    def data() -> tuple[str, bytes]:
        text = json.dumps(status_json(view()), allow_nan=False)
        return _JSON, text.encode()

    return {"/": page, "/index.html": page, "/status.json": data}
