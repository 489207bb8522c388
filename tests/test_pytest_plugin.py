"""The pytest plugin, by runs of its own: each of its checks fails on a wrong run."""

from __future__ import annotations

import importlib.metadata

import pytest

pytest_plugins = ["pytester"]

INSTALLED = any(
    point.value == "orchestrator.pytest_plugin"
    for point in importlib.metadata.entry_points(group="pytest11")
)
QUIET = ("-p", "no:randomly", "-p", "no:hypothesispytest", "-p", "no:cacheprovider")
TEST = """
import pytest
from orchestrator.calls import Done
from orchestrator.ports import Answer
from prestage.trace import TraceRecord, TraceWriter

def record(call, seq, step, index, **more):
    return TraceRecord(side="orchestrator", call=call, run_id="r", epoch=1, seq=seq,
                       incarnation="w1", step=step, index=index, digest=f"d{step}.{index}", **more)

CALLS = [record("fwd_bwd", 1, 0, 0), record("fwd_bwd apply_optimizer", 2, 0, 1),
         record("get_metrics", 0, 0, -1)]

def play(sequence, calls=CALLS):
    for call in calls:
        sequence.on_call(call, Answer(event=Done()))

def test_it(prestage_sequence):
    BODY
"""
FROZEN = "fwd_bwd step=0 index=0\nfwd_bwd apply_optimizer step=0 index=1\nget_metrics step=0\n"
CHECK = 'play(prestage_sequence); prestage_sequence.check("run")'


def run(pytester: pytest.Pytester, body: str, *args: str, frozen: str | None = FROZEN) -> str:
    pytester.makepyfile(TEST.replace("BODY", body))
    if frozen is not None:
        folder = pytester.path / "golden"
        folder.mkdir(exist_ok=True)
        (folder / "run.txt").write_text(frozen)
    plugin = "prestage" if INSTALLED else "orchestrator.pytest_plugin"
    result = pytester.runpytest_inprocess("-p", plugin, *QUIET, *args)
    return "\n".join([*result.outlines, *result.errlines])


def test_passes_the_frozen_sequence(pytester: pytest.Pytester) -> None:
    assert "1 passed" in run(pytester, CHECK)


def test_fails_on_another_sequence_with_a_readable_diff(pytester: pytest.Pytester) -> None:
    wrong = FROZEN.replace("get_metrics step=0", "get_metrics step=0\nsave_checkpoint step=0")
    out = run(pytester, CHECK, frozen=wrong)
    assert "1 failed" in out
    assert "call 4: expected 'save_checkpoint step=0', got 'the end'" in out
    assert "-save_checkpoint step=0" in out
    assert "--prestage-rewrite=" in out


def test_fails_on_another_order(pytester: pytest.Pytester) -> None:
    lines = FROZEN.splitlines()
    out = run(pytester, CHECK, frozen="\n".join([lines[0], lines[2], lines[1]]) + "\n")
    assert "call 2: expected 'get_metrics step=0', got 'fwd_bwd apply_optimizer" in out


def test_fails_when_nothing_was_recorded(pytester: pytest.Pytester) -> None:
    assert "nothing was recorded" in run(pytester, 'prestage_sequence.check("run")')


def test_fails_when_the_frozen_file_is_missing(pytester: pytest.Pytester) -> None:
    assert "run.txt is missing" in run(pytester, CHECK, frozen=None)


def test_fails_when_nobody_checked(pytester: pytest.Pytester) -> None:
    assert "no check() looked at" in run(pytester, "play(prestage_sequence)")


def test_fails_on_a_broken_rule_even_when_it_was_frozen(pytester: pytest.Pytester) -> None:
    body = 'play(prestage_sequence, [CALLS[0], CALLS[0]]); prestage_sequence.check("run")'
    out = run(pytester, body, frozen="fwd_bwd step=0 index=0\nfwd_bwd step=0 index=0\n")
    assert "call 2 (fwd_bwd step=0 index=0): each-call-carried-out-once" in out


def test_rewrites_with_a_reason_and_never_without(pytester: pytest.Pytester) -> None:
    assert "say in a few words why" in run(pytester, CHECK, "--prestage-rewrite=x", frozen="old\n")
    assert (pytester.path / "golden" / "run.txt").read_text() == "old\n"
    out = run(pytester, CHECK, "--prestage-rewrite=stock order from now on", frozen="old\n")
    assert "1 passed" in out
    text = (pytester.path / "golden" / "run.txt").read_text()
    assert text == "# rewritten because: stock order from now on\n" + FROZEN
    assert "1 passed" in run(pytester, CHECK, frozen=None)


def test_a_broken_run_is_not_frozen(pytester: pytest.Pytester) -> None:
    body = 'play(prestage_sequence, [CALLS[0], CALLS[0]]); prestage_sequence.check("run")'
    out = run(pytester, body, "--prestage-rewrite=want it so", frozen="old\n")
    assert "1 failed" in out
    assert (pytester.path / "golden" / "run.txt").read_text() == "old\n"


def test_reads_a_trace(pytester: pytest.Pytester) -> None:
    body = """
    from pathlib import Path
    writer = TraceWriter(Path("t.ndjson"), side="orchestrator")
    for call in CALLS:
        writer.write(call)
    writer.close()
    prestage_sequence.read(Path("t.ndjson"))
    prestage_sequence.check("run")
"""
    assert "1 passed" in run(pytester, body)
