"""Log analysis: the published numbers exactly, and nothing skipped in silence."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.bench import read
from orchestrator.steps import StepRecord

RULER_LINES = Path(__file__).parent / "data" / "ruler_lines.txt"


def _logs(*lines: str, arm: str = "run") -> read.Logs:
    return read.read_lines(lines, source="x.log", arm=arm)


def _line(step: int, dispatch: list[float], seconds: float) -> str:
    per = seconds / len(dispatch)
    return (
        f"completed step: {step}, seconds: {seconds:.3f}, micro_steps: {len(dispatch)},"
        f" seconds/micro_step: {per:.3f}, fwd_bwd dispatch s: {dispatch}"
    )


def test_the_published_numbers() -> None:
    logs = read.read_files([str(RULER_LINES)])
    off, on = logs.arms
    assert (off.name, on.name) == ("off", "on")
    numbers = {
        arm.name: read.arm_numbers(arm, tokens_per_micro_batch_per_chip=Decimal(32768))
        for arm in logs.arms
    }
    assert read.fixed(numbers["off"].seconds_mean) == "107.727"
    assert read.fixed(numbers["on"].seconds_mean) == "100.007"
    assert [read.fixed(gap) for gap in numbers["off"].gaps] == ["7.695", "7.636", "7.535", "7.762"]
    gaps_on = [read.fixed(gap) for gap in numbers["on"].gaps]
    assert gaps_on == ["-0.050", "-0.054", "-0.045", "-0.040"]
    assert [read.fixed(numbers[arm].regular_median or Decimal(0)) for arm in numbers] == [
        "10.944",
        "10.944",
    ]
    assert read.fixed(numbers["off"].tail_median) == "12.556"
    assert read.fixed(numbers["on"].tail_median) == "12.548"
    rates = [numbers[arm].tokens_per_second_per_chip for arm in ("off", "on")]
    assert [read.fixed(rate or Decimal(0), 0) for rate in rates] == ["2738", "2949"]
    moved = read.delta(off, on)
    assert moved.parts_steps == (1, 2, 3)
    assert [
        read.signed(value)
        for value in (moved.step, moved.boundary_part, moved.regular_part)
        if value is not None
    ] == ["-7.678", "-7.685", "+0.007"]
    assert read.signed(moved.mean) == "-7.720"
    assert [(s.step, str(s.stage_seconds), str(s.device_wait_seconds)) for s in on.stages] == [
        (0, "0.012", "10.693"),
        (1, "0.041", "10.879"),
        (2, "0.042", "10.879"),
        (3, "0.009", "10.910"),
    ]


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert read.main([str(RULER_LINES), "--tokens_per_micro_batch_per_chip=32768"]) == 0
    out = capsys.readouterr().out
    for text in ("107.727", "100.007", "7.695 / 7.636 / 7.535 / 7.762", "-7.685", "+0.007"):
        assert text in out
    assert "2,738 tok/s/chip" in out
    assert "ignored 0 other line(s)" in out


@given(
    st.integers(0, 10**6),
    st.lists(st.floats(0, 1e4).map(lambda value: round(value, 3)), min_size=1, max_size=12),
    st.floats(0, 1e3),
)
def test_what_a_run_prints_is_read_back(step: int, dispatch: list[float], tail: float) -> None:
    seconds = round(sum(dispatch) + tail, 3)
    record = StepRecord(
        step=step, started_s=0.0, finished_s=seconds, dispatch_seconds=tuple(dispatch)
    )
    prefix = "2026-12-01 01:11:30,123 INFO prestage.orchestrator: "
    (arm,) = _logs(prefix + record.ruler_line()).arms
    (ruler,) = arm.rulers
    assert arm.name == "run"
    assert ruler.step == step
    assert ruler.seconds == Decimal(f"{seconds:.3f}")
    # Six digits of each dispatch time are printed.
    assert [float(value) for value in ruler.dispatch] == pytest.approx(dispatch, rel=1e-5)


def test_a_staged_line_of_a_run_is_read() -> None:
    (arm,) = _logs(
        "[pipeline] staged step 3's first micro-batch on the trainer in 0.012 s;"
        " the last micro-batch then still computed for 10.693 s"
    ).arms
    (stage,) = arm.stages
    assert (stage.step, stage.stage_seconds) == (2, Decimal("0.012"))


@pytest.mark.parametrize(
    "line",
    [
        "completed step: 1, seconds: 107.7",
        "completed step: one, seconds: 1.0, micro_steps: 1, seconds/micro_step: 1.0,"
        " fwd_bwd dispatch s: [1.0]",
        _line(1, [0.1, 1.0], 2.0).replace("micro_steps: 2", "micro_steps: 3"),
        _line(1, [0.1, 1.0], 2.0).replace("micro_step: 1.000", "micro_step: 9.000"),
        _line(1, [0.1, 1.0], 2.0)[:-1],
        _line(1, [0.1, 1.0], 2.0) + " and more",
        "STAGE_BEFORE_UPDATE step=1 staged=bench_2_0 stage_s=fast device_wait_s=1.0",
        "[pipeline] staged step 3's first micro-batch on the trainer in",
    ],
)
def test_a_malformed_line_is_an_error_with_file_and_line(line: str) -> None:
    with pytest.raises(read.ReadError, match=r"x\.log:2: malformed"):
        _logs("something else", line)


def test_other_lines_are_counted_and_the_count_is_printed(tmp_path: Path) -> None:
    log = tmp_path / "mine.log"
    log.write_text("hello\n\n" + _line(1, [0.5, 2.5, 1.0], 5.0) + "\nworld\n")
    lines = read.report_lines(read.read_files([str(log)]))
    assert lines[0] == "arm mine (steps 1)"
    assert lines[-1] == "ignored 2 other line(s); 0 repeated line(s)"


def test_a_repeated_line_counts_once_and_another_line_for_the_step_is_an_error() -> None:
    line = _line(1, [0.5, 2.5, 1.0], 5.0)
    logs = _logs(line, line)
    assert logs.repeated_lines == 1
    assert len(logs.arms[0].rulers) == 1
    with pytest.raises(read.ReadError, match=r"x\.log:2: step 1 of arm 'run'.*x\.log:1"):
        _logs(line, _line(1, [0.5, 2.5, 1.0], 6.0))


def test_a_progress_bar_on_the_same_line_hides_nothing() -> None:
    logs = _logs("50%|###  |\r" + _line(1, [0.5, 1.0], 2.0))
    assert [ruler.step for ruler in logs.arms[0].rulers] == [1]
    assert logs.ignored_lines == 1


def test_arms_are_named_by_argument(tmp_path: Path) -> None:
    for name, seconds in (("a", 6.0), ("b", 5.0)):
        text = "".join(_line(step, [0.5, 2.5, 1.0], seconds) + "\n" for step in (0, 1, 2))
        (tmp_path / f"{name}.log").write_text(
            "off 10:00:00 " + text.replace("\n", "\noff 1:00:00 ")
        )
    logs = read.read_files([f"stock={tmp_path / 'a.log'}", f"staged={tmp_path / 'b.log'}"])
    assert [arm.name for arm in logs.arms] == ["stock", "staged"]
    moved = read.delta(*logs.arms)
    assert moved.mean == Decimal("-1.000")
    assert moved.parts_steps == (1,)  # Step 0 is warm-up; the last has no boundary after it.


def test_no_ruler_line_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.log"
    empty.write_text("nothing here\n")
    assert read.main([str(empty)]) == 2
    assert "no 'completed step:' line" in capsys.readouterr().err
    assert read.main([str(tmp_path / "absent.log")]) == 2
    assert "absent.log" in capsys.readouterr().err


def test_one_micro_batch_has_no_gap() -> None:
    logs = _logs(_line(1, [0.5], 2.0), _line(2, [0.5], 2.0))
    assert read.arm_numbers(logs.arms[0]).gaps == ()
    assert read.report_lines(logs)[0] == "arm run (steps 1-2)"
