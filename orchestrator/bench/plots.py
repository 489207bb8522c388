"""Timeline pictures as SVG: one boundary, several settings on one time axis.

From the simulator's records or from worker traces. Plain text, small and the same on every run;
draws only what was recorded.
"""

from __future__ import annotations

import argparse
import html
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from orchestrator.bench.sim.gantt import (
    Bar,
    BoundaryView,
    GanttError,
    boundary_view,
    steps_with_boundary,
)
from prestage.trace import TraceError, read_trace

_WIDTH: Final = 960
_LEFT: Final = 176
_RIGHT: Final = 24
_BAR: Final = 26
_GAP: Final = 6
_BLOCK_GAP: Final = 22
_TOP: Final = 44
_AXIS: Final = 34
_LEGEND: Final = 30

# Fill and text colour of each kind; idle is hatched as well, so that colour is not all there is.
_COLOURS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "before": ("#a9bbd8", "#000000"),
        "last": ("#4c72b0", "#ffffff"),
        "next": ("#2e4a7d", "#ffffff"),
        "update": ("#dd8452", "#000000"),
        "copy": ("#55a868", "#000000"),
        "idle": ("url(#idle)", "#a30000"),
        "retry": ("#937860", "#ffffff"),
        "eval": ("#8172b3", "#ffffff"),
        "score": ("#8172b3", "#ffffff"),
    }
)
_OTHER: Final = ("#c9c9c9", "#000000")
_LEGEND_TEXT: Final = (
    ("last", "last micro-batch of step k"),
    ("update", "update of step k"),
    ("idle", "device idle"),
    ("next", "first micro-batch of step k+1"),
    ("copy", "its input copy"),
)
_SHORT: Final[Mapping[str, str]] = MappingProxyType({"update": "upd"})


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
        f"{html.escape(text)}</text>"
    )


def _bar(bar: Bar, y: float, from_s: float, per_second: float) -> list[str]:
    fill, ink = _COLOURS.get(bar.kind, _OTHER)
    x = _LEFT + (bar.started_s - from_s) * per_second
    width = (bar.finished_s - bar.started_s) * per_second
    seconds = bar.finished_s - bar.started_s
    title = html.escape(f"{bar.label}: {bar.started_s:.3f} to {bar.finished_s:.3f} s")
    out = [
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.5):.2f}" height="{_BAR}"'
        f' fill="{fill}" stroke="#ffffff" stroke-width="0.5"><title>{title}</title></rect>'
    ]
    rounded = f"{seconds + 1e-9:.2f}"  # 10.755 is not exact in binary; it shows as 10.76.
    label = _SHORT.get(bar.label, bar.label)
    for text in (f"{label} · {rounded} s", f"{rounded} s", label):
        if len(text) * 6.4 + 4 <= width:
            out.append(
                f'<text x="{x + width / 2:.1f}" y="{y + _BAR / 2 + 4:.1f}" font-size="11"'
                f' text-anchor="middle" fill="{ink}">{html.escape(text)}</text>'
            )
            break
    return out


def tick_seconds(length_s: float) -> float:
    """The distance of axis ticks: 1, 2 or 5 times a power of ten, about ten of them."""
    if length_s <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(length_s / 10))
    for factor in (1, 2, 5, 10):
        if length_s / (factor * power) <= 10.5:
            return factor * power
    return 10 * power


def boundary_svg(views: Sequence[BoundaryView], *, title: str = "") -> str:
    """One picture of the same boundary under several settings. Raises `GanttError` for none."""
    if not views:
        raise GanttError("nothing to draw: give at least one view of a boundary")
    from_s = min(view.from_s for view in views)
    length = max(view.to_s for view in views) - from_s
    per_second = (_WIDTH - _LEFT - _RIGHT) / length if length > 0 else 1.0
    body: list[str] = []
    grid: list[str] = []
    y = float(_TOP)
    for view in views:
        copies = view.lane("copy")
        body.append(_text(8, y + 11, view.title, size=13))
        body.append(_text(8, y + 26, f"idle {view.idle_s:.2f} s", size=11))
        for lane in ("device", "copy"):
            bars = copies if lane == "copy" else view.lane("device")
            if lane == "copy" and not copies:
                continue
            body.append(_text(_LEFT - 8, y + _BAR / 2 + 4, lane, size=11, anchor="end"))
            for bar in bars:
                body += _bar(bar, y, from_s, per_second)
            y += _BAR + _GAP
        y += _BLOCK_GAP - _GAP
    bottom = y - _BLOCK_GAP + 8
    tick = tick_seconds(length)
    first_tick = math.ceil(from_s / tick - 1e-9)
    for number in range(first_tick, int((from_s + length) / tick + 1e-9) + 1):
        x = _LEFT + (number * tick - from_s) * per_second
        grid.append(
            f'<line x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{bottom:.1f}"'
            ' stroke="#dddddd" stroke-width="1"/>'
        )
        body.append(_text(x, bottom + 16, f"{number * tick:g} s", size=11, anchor="middle"))
    height = bottom + _AXIS + _LEGEND
    x = 8.0
    for kind, text in _LEGEND_TEXT:
        fill = _COLOURS[kind][0]
        at = bottom + _AXIS + 4
        body.append(f'<rect x="{x:.1f}" y="{at:.1f}" width="14" height="14" fill="{fill}"/>')
        body.append(_text(x + 19, at + 11, text, size=11))
        x += 19 + len(text) * 6.3 + 16
    heading = title or f"One step boundary, after step {views[0].step} (seconds)"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:.0f}"'
            f' viewBox="0 0 {_WIDTH} {height:.0f}" font-family="DejaVu Sans, Arial, sans-serif"'
            ' role="img">',
            f"<title>{html.escape(heading)}</title>",
            '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse">'
            '<rect width="6" height="6" fill="#fbe9e7"/>'
            '<path d="M0,6 L6,0" stroke="#d62728" stroke-width="1"/></pattern></defs>',
            f'<rect width="{_WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
            _text(8, 22, heading, size=15),
            *grid,
            *body,
            "</svg>",
            "",
        ]
    )


def write_svg(path: Path, svg: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg, encoding="utf-8")


def trace_view(path: Path, step: int | None, title: str) -> BoundaryView:
    """The boundary after `step` (the middle one by default) from a trace with device records.

    Raises `TraceError` for an unreadable trace and `GanttError` for a boundary it does not hold.
    """
    trace = read_trace(path)
    held = steps_with_boundary(trace.device)
    if not held:
        raise GanttError(f"{path}: holds no boundary; use the worker's trace, of 2 steps or more")
    chosen = held[len(held) // 2] if step is None else step
    return boundary_view(trace.device, chosen, title=title)


def main(argv: Sequence[str]) -> int:
    """Draw worker traces (`NAME=TRACE`) as one SVG; returns the exit code (2: cannot be drawn)."""
    parser = argparse.ArgumentParser(
        prog="orchestrator bench plot", description="One boundary of several traces, as SVG."
    )
    parser.add_argument("traces", nargs="+", metavar="NAME=TRACE")
    parser.add_argument("--step", type=int, default=None, help="boundary after this step")
    parser.add_argument("--out", type=Path, required=True, help="the SVG file to write")
    args = parser.parse_args(argv)
    try:
        drawn = []
        for argument in args.traces:
            name, found, text = argument.partition("=")
            path = Path(text if found else argument)
            drawn.append(trace_view(path, args.step, name if found else path.stem))
        write_svg(args.out, boundary_svg(drawn))
    except (TraceError, GanttError, OSError) as error:
        print(f"orchestrator bench plot: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
