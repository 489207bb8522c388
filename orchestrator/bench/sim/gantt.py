"""One step boundary as a picture: which stretches to show, and the text form.

Works on device records, whoever made them: the simulator or a worker's trace. Draws only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from prestage.trace import DeviceRecord, TraceRecord


class GanttError(ValueError):
    """Records that do not hold the boundary that was asked for."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One stretch of a lane. Seconds from the start of step k's last micro-batch."""

    lane: str  # "device", "copy" or "host".
    kind: str  # "before", "last", "update", "next", "copy", "idle", or a call's name.
    label: str
    started_s: float
    finished_s: float


@dataclass(frozen=True, kw_only=True)
class BoundaryView:
    """From step k's last micro-batch to the end of step k + 1's first, and that one's copy."""

    title: str
    step: int
    from_s: float  # 0, or less when the copy began before the last micro-batch did.
    to_s: float
    idle_s: float
    bars: tuple[Bar, ...]

    def lane(self, lane: str) -> tuple[Bar, ...]:
        return tuple(bar for bar in self.bars if bar.lane == lane)


def steps_with_boundary(records: Iterable[DeviceRecord]) -> tuple[int, ...]:
    """The steps whose end and whose next step's start were both recorded."""
    computed = {(r.step, r.index) for r in records if r.kind == "fwd_bwd"}
    steps = {step for step, _ in computed}
    return tuple(sorted(step for step in steps if (step + 1, 0) in computed))


def boundary_view(
    records: Sequence[DeviceRecord],
    step: int,
    *,
    title: str = "",
    host: Sequence[TraceRecord] = (),
) -> BoundaryView:
    """The boundary after `step`. Raises `GanttError` when it was not recorded."""
    of_step = [r for r in records if r.kind == "fwd_bwd" and r.step == step]
    nexts = [r for r in records if r.kind == "fwd_bwd" and r.step == step + 1 and r.index == 0]
    if not of_step or not nexts:
        raise GanttError(
            f"the records do not hold the boundary after step {step}; they hold those after"
            f" {list(steps_with_boundary(records))}"
        )
    last = max(of_step, key=lambda r: r.finished_s)
    first = nexts[-1]  # A step that was trained again: the newest.
    zero, end = last.started_s, first.finished_s
    copies = [
        r
        for r in records
        if r.kind == "copy" and (r.step, r.index) == (step + 1, 0) and r.started_s < end
    ]
    begin = min([zero, *(r.started_s for r in copies)])
    compute = sorted(
        (r for r in records if r.kind != "copy" and r.finished_s > begin and r.started_s < end),
        key=lambda r: r.started_s,
    )
    bars: list[Bar] = []
    free = zero
    idle = 0.0
    for record in compute:
        if record.started_s >= zero and record.started_s > free:
            idle += record.started_s - free
            bars.append(_bar("device", "idle", "idle", free, record.started_s, zero))
        kind = record.kind
        if kind == "fwd_bwd":
            kind = "next" if record.step > step else "last" if record is last else "before"
        label = f"{record.step},{record.index}" if record.index >= 0 else record.kind
        started = max(begin, record.started_s)
        bars.append(_bar("device", kind, label, started, record.finished_s, zero))
        free = max(free, record.finished_s)
    for record in copies:
        label = f"copy {record.step},{record.index}"
        bars.append(_bar("copy", "copy", label, record.started_s, record.finished_s, zero))
    for call in host:
        finished = call.started_s + call.seconds
        if finished <= begin or call.started_s >= end or finished <= call.started_s:
            continue
        started = max(begin, call.started_s)
        bars.append(_bar("host", call.call, call.call, started, min(end, finished), zero))
    return BoundaryView(
        title=title,
        step=step,
        from_s=begin - zero,
        to_s=end - zero,
        idle_s=idle,
        bars=tuple(bars),
    )


def _bar(
    lane: str, kind: str, label: str, started_s: float, finished_s: float, zero_s: float
) -> Bar:
    return Bar(
        lane=lane,
        kind=kind,
        label=label,
        started_s=started_s - zero_s,
        finished_s=finished_s - zero_s,
    )


_LETTERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "before": "-",
        "last": "=",
        "next": "#",
        "update": "u",
        "idle": ".",
        "copy": "c",
        "eval": "e",
        "score": "s",
        "retry": "r",
        "get_metrics": "m",
        "bookkeeping": "b",
        "save_checkpoint": "k",
        "prepare_weight_sync": "w",
        "stage_fwd_bwd": "g",
    }
)
LEGEND: Final = (
    "= last micro-batch of step k (- the ones before)   u update   . device idle\n"
    "# first micro-batch of step k+1   c its input copy\n"
    "the host waits in: m metrics  b bookkeeping  k checkpoint  w weight sync  g stage"
)


def text_lines(view: BoundaryView, *, from_s: float, seconds_per_column: float) -> list[str]:
    """The view as text, from `from_s` on, so that several views can be compared."""

    def column_of(seconds: float) -> int:
        return max(0, round((seconds - from_s) / seconds_per_column))

    columns = max(1, column_of(view.to_s))
    lines = [f"{view.title}: device idle {view.idle_s:.3f} s"]
    for lane in ("device", "copy", "host"):
        row = [" "] * columns
        for bar in view.lane(lane):
            letter = _LETTERS.get(bar.kind, " ")
            from_column, to_column = column_of(bar.started_s), column_of(bar.finished_s)
            if to_column == from_column and letter != " ":
                to_column += 1  # Too short for a column, but there.
            for column in range(from_column, min(columns, to_column)):
                row[column] = letter
        text = "".join(row).rstrip()
        if text or lane != "host":
            lines.append(f"  {lane:<6} |{text}")
    return lines


def scale(views: Sequence[BoundaryView], columns: int = 72) -> tuple[float, float]:
    """Where the longest views begin, and seconds per column so that they take `columns`."""
    from_s = min((view.from_s for view in views), default=0.0)
    length_s = max((view.to_s for view in views), default=0.0) - from_s
    return from_s, (length_s / columns if length_s > 0 else 1.0)
