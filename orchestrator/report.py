"""What a run shows a person: ruler lines, staged lines, and the table at the end. Pure text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from orchestrator.steps import StepRecord

FORWARD_METRIC: Final = "sampler_is/token_logdiff_absmean"
EVALUATION: Final = "eval/"
"""What the names of an evaluation's metrics begin with."""
_COLUMNS: Final = (
    "step",
    "seconds",
    "micro_steps",
    "loss",
    "grad_norm",
    "entropy",
    "fwd metric",
    "reward",
    "boundary idle s",
    "stage_s",
    "device_wait_s",
    "staged input",
)


def staged_line(record: StepRecord) -> str | None:
    """The line of a staged boundary; None when nothing was staged after this step."""
    if record.stage_seconds < 0:
        return None
    wait = max(0.0, record.device_wait_seconds)
    return (
        f"[pipeline] staged step {record.step + 1}'s first micro-batch on the trainer in"
        f" {record.stage_seconds:.3f} s; the last micro-batch then still computed for {wait:.3f} s"
    )


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _seconds(value: float) -> str:
    return "-" if value < 0 else f"{value:.3f}"


def _cells(record: StepRecord) -> tuple[str, ...]:
    metrics = record.metrics
    summary = record.summary
    return (
        str(record.step),
        _seconds(record.seconds),
        str(record.micro_steps),
        _number(metrics.get("loss"), 6),
        _number(metrics.get("grad_norm"), 6),
        _number(metrics.get("entropy"), 6),
        _number(metrics.get(FORWARD_METRIC), 6),
        "-" if summary is None else _number(summary.reward_mean),
        _seconds(record.boundary_idle_seconds),
        _seconds(record.stage_seconds),
        _seconds(record.device_wait_seconds),
        "used" if record.staged_input_used else "-",
    )


def table(records: Sequence[StepRecord]) -> str:
    """One row a step, in columns as wide as they need."""
    rows = [_COLUMNS, *(_cells(record) for record in records)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def retry_line(record: StepRecord) -> str | None:
    """The line of a step whose update ran micro-batches again; None when it did not."""
    if not record.dropless_replays:
        return None
    return (
        f"step {record.step}: {record.dropless_replays} micro-batch(es) were run again without drops"
        " inside the update (dropless retry)"
    )


def skipped_line(record: StepRecord) -> str | None:
    """The line of a step that closed without an update; None for every other."""
    if record.applied:
        return None
    return f"step {record.step}: its update was skipped, as its summed denominator is 0"


def evaluation_line(record: StepRecord) -> str | None:
    """The line of a step whose weights were evaluated; None for every other."""
    values = {
        name.removeprefix(EVALUATION): value
        for name, value in record.metrics.items()
        if name.startswith(EVALUATION)
    }
    if not values:
        return None
    tokens = values.pop("tokens", 0.0)
    means = "".join(f" {name} {value:.6g}" for name, value in sorted(values.items()))
    return f"[eval] after step {record.step}:{means} over {tokens:.0f} tokens"


def lines_of(record: StepRecord) -> list[str]:
    """The ruler line and, where they apply, those of a staged boundary, an evaluation, a retry and
    a skip."""
    if not record.micro_steps:
        return [f"step {record.step}: an earlier process of this run trained and closed it"]
    more = (
        staged_line(record),
        evaluation_line(record),
        retry_line(record),
        skipped_line(record),
    )
    return [record.ruler_line(), *(line for line in more if line is not None)]
