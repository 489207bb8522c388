"""Timeline pictures: they hold what was recorded, to scale, and nothing else."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from orchestrator.bench import plots
from orchestrator.bench.sim.gantt import (
    BoundaryView,
    GanttError,
    boundary_view,
    scale,
    steps_with_boundary,
    text_lines,
)
from orchestrator.bench.sim.model import Shape
from orchestrator.bench.sim.run import plan_for, simulate
from orchestrator.plan import RunPlan
from prestage.trace import DeviceRecord, TraceWriter

SHAPE = Shape(micro_batches=3, fwd_bwd_s=1.0, update_s=0.2, copy_s=0.7, update_waits=True)


def _view(setting: str) -> BoundaryView:
    result = simulate(SHAPE, plan_for(setting, RunPlan(num_steps=6)), picture=2)
    return boundary_view(result.spans, 2, title=setting, host=result.host)


def _rects(svg: str) -> dict[str, tuple[float, float]]:
    """Title to (x, width) of every bar."""
    space = "{http://www.w3.org/2000/svg}"
    out = {}
    for rect in ET.fromstring(svg).iter(f"{space}rect"):
        title = rect.find(f"{space}title")
        if title is not None and title.text is not None:
            out[title.text] = (float(rect.attrib["x"]), float(rect.attrib["width"]))
    return out


def test_a_boundary_view_holds_the_boundary() -> None:
    stock = _view("stock")
    assert stock.idle_s == pytest.approx(0.7)
    assert [bar.kind for bar in stock.lane("device")] == ["last", "update", "idle", "next"]
    assert [bar.label for bar in stock.lane("copy")] == ["copy 3,0"]
    assert (stock.from_s, stock.to_s) == (0.0, pytest.approx(2.9))
    staged = _view("staged_before")
    assert staged.idle_s == 0.0
    assert [bar.kind for bar in staged.lane("device")] == ["before", "last", "update", "next"]
    (copy,) = staged.lane("copy")
    # The copy lane is free once the last micro-batch's own input is there.
    assert (copy.started_s, copy.finished_s) == (pytest.approx(-0.6), pytest.approx(0.1))


def test_bars_are_to_scale_on_one_axis() -> None:
    svg = plots.boundary_svg([_view("stock"), _view("staged_before")])
    rects = _rects(svg)
    idle = rects["idle: 1.200 to 1.900 s"]
    copies = [rect for title, rect in rects.items() if title.startswith("copy")]
    assert len(copies) == 2
    last = rects["2,2: 0.000 to 1.000 s"]
    assert idle[1] == pytest.approx(0.7 * last[1], rel=1e-3)
    assert all(width == pytest.approx(0.7 * last[1], rel=1e-3) for _, width in copies)
    assert all(x >= 0 and x + width <= 960 for x, width in rects.values())
    for text in ("stock", "staged_before", "idle 0.70 s", "idle 0.00 s"):
        assert text in svg


def test_the_same_picture_every_time_and_a_small_one() -> None:
    views = [_view("stock"), _view("staged_before")]
    assert plots.boundary_svg(views) == plots.boundary_svg([_view(view.title) for view in views])
    assert len(plots.boundary_svg(views)) < 10_000


def test_titles_are_escaped() -> None:
    view = boundary_view(_records(), 0, title="<a & b>")
    svg = plots.boundary_svg([view], title="x < y")
    ET.fromstring(svg)
    assert "&lt;a &amp; b&gt;" in svg


def _records() -> list[DeviceRecord]:
    return [
        DeviceRecord(kind="fwd_bwd", step=0, index=0, started_s=100.0, finished_s=101.0),
        DeviceRecord(kind="update", step=0, index=-1, started_s=101.0, finished_s=101.5),
        DeviceRecord(kind="copy", step=1, index=0, started_s=101.5, finished_s=102.0),
        DeviceRecord(kind="fwd_bwd", step=1, index=0, started_s=102.0, finished_s=103.0),
    ]


def test_a_worker_trace_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "worker.ndjson"
    writer = TraceWriter(trace, side="worker")
    for record in _records():
        writer.write(record)
    writer.close()
    assert steps_with_boundary(_records()) == (0,)
    out = tmp_path / "pictures" / "boundary.svg"
    assert plots.main([f"off={trace}", f"on={trace}", f"--out={out}"]) == 0
    rects = _rects(out.read_text())
    assert "idle: 1.500 to 2.000 s" in rects
    assert plots.main([str(trace), "--step=5", f"--out={out}"]) == 2
    assert "boundary after step 5" in capsys.readouterr().err
    empty = tmp_path / "empty.ndjson"
    TraceWriter(empty, side="worker").close()
    assert plots.main([str(empty), f"--out={out}"]) == 2
    assert "holds no boundary" in capsys.readouterr().err


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(GanttError, match="nothing to draw"):
        plots.boundary_svg([])


@pytest.mark.parametrize(
    ("length", "tick"), [(31.8, 5.0), (2.9, 0.5), (10.0, 1.0), (0.03, 0.005), (0.0, 1.0)]
)
def test_ticks_are_round_numbers(length: float, tick: float) -> None:
    assert plots.tick_seconds(length) == pytest.approx(tick)


def test_the_text_form_is_to_scale() -> None:
    views = [_view("stock"), _view("staged_before")]
    from_s, per_column = scale(views, columns=35)
    lines = text_lines(views[0], from_s=from_s, seconds_per_column=per_column)
    device = next(line for line in lines if "device |" in line)
    counts = {letter: len(re.findall(re.escape(letter), device)) for letter in "=u.#"}
    assert counts == {"=": 10, "u": 2, ".": 7, "#": 10}
    staged = text_lines(views[1], from_s=from_s, seconds_per_column=per_column)
    assert sum(line.count("c") for line in staged if "copy   |" in line) - 1 == 7
