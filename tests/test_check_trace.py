"""`check-trace` names file, line and broken rule, for each rule, and passes what is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.check_trace import main
from orchestrator.invariants import Rule
from prestage.trace import DeviceRecord, Record, TraceRecord, TraceWriter
from tests.mutants.checks import DEFER, FWD, GOOD, STAGE, WRONG, _record


def write(path: Path, side: str, records: tuple[Record, ...]) -> str:
    writer = TraceWriter(path, side=side)
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)


def caller(call: str, seq: int, step: int = -1, index: int = -1, **more: object) -> TraceRecord:
    return _record(call, seq, step, index, side="orchestrator", **more)


def test_passes_a_right_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write(tmp_path / "w.ndjson", "worker", GOOD)]) == 0
    out = capsys.readouterr().out
    assert "2 steps closed, 1 staged inputs used" in out
    assert out.splitlines()[-1].startswith("ok: ")


@pytest.mark.parametrize("rule", [rule for rule in WRONG if rule is not Rule.RESTORE])
def test_names_file_line_and_rule(
    rule: Rule, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "w.ndjson", "worker", WRONG[rule])
    assert main([path]) == 1
    line = len(WRONG[rule]) + 1  # The header is line 1.
    assert f"{path}:{line}: {rule.value}: " in capsys.readouterr().out


def test_names_a_compute_before_the_update(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spans = (
        DeviceRecord(kind="fwd_bwd", step=0, index=0, started_s=0.0, finished_s=1.0),
        DeviceRecord(kind="update", step=0, index=-1, started_s=1.0, finished_s=1.2),
        DeviceRecord(kind="fwd_bwd", step=1, index=0, started_s=1.1, finished_s=2.1),
    )
    path = write(tmp_path / "w.ndjson", "worker", spans)
    assert main([path]) == 1
    assert f"{path}:4: {Rule.DEVICE_ORDER.value}" in capsys.readouterr().out


def test_a_lost_call_is_settled_under_its_own_key(tmp_path: Path) -> None:
    lost = caller(FWD, 1, 0, 0, outcome="lost")
    right = (lost, caller(FWD, 1, 0, 0), caller(FWD, 2, 0, 1))
    new_key = (lost, caller(FWD, 2, 0, 0))
    replaced = (lost, caller("abort_step", 1))
    assert main([write(tmp_path / "right.ndjson", "orchestrator", right)]) == 0
    assert main([write(tmp_path / "new.ndjson", "orchestrator", new_key)]) == 1
    assert main([write(tmp_path / "replaced.ndjson", "orchestrator", replaced)]) == 1


@pytest.mark.parametrize("arrived", [False, True])
def test_only_a_lost_stage_may_be_given_up(arrived: bool, tmp_path: Path) -> None:
    apply = "apply_deferred_update"
    begin = (
        caller(FWD, 1, 0, 0),
        caller(DEFER, 2, 0, 1),
        caller(STAGE, 3, 1, 0, outcome="lost"),
    )
    rest = (caller(apply, 3, 0), caller(FWD, 4, 1, 0))
    if arrived:
        rest = (
            caller(apply, 3, 0, outcome="KEY_REUSED"),
            caller(apply, 4, 0),
            caller(FWD, 5, 1, 0, used_staged_input=True),
        )
    assert main([write(tmp_path / "o.ndjson", "orchestrator", (*begin, *rest))]) == 0


def test_a_trace_may_begin_in_the_middle_of_a_run(tmp_path: Path) -> None:
    calls = (caller(FWD, 1, 7, 2), caller("fwd_bwd apply_optimizer", 2, 7, 3))
    assert main([write(tmp_path / "o.ndjson", "orchestrator", calls)]) == 0
    wrong = (caller(FWD, 1, 7, 2), caller(FWD, 2, 7, 2))
    assert main([write(tmp_path / "wrong.ndjson", "orchestrator", wrong)]) == 1


def test_the_caller_is_held_against_the_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = write(tmp_path / "w.ndjson", "worker", GOOD)
    calls = tuple(
        caller(record.call, record.seq, record.step, record.index) for record in GOOD[1:3]
    )
    assert main([worker, write(tmp_path / "o.ndjson", "orchestrator", calls)]) == 0
    lying = write(tmp_path / "lying.ndjson", "orchestrator", (*calls, caller("abort_step", 9)))
    assert main([worker, lying]) == 1
    assert "the worker never did it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "empty"), ('{"type": "header", "format": "other"}\n', "format"), ("{", "not JSON")],
)
def test_an_unreadable_file_is_no_pass(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.ndjson"
    path.write_text(text)
    assert main([str(path)]) == 2
    assert says in capsys.readouterr().err
