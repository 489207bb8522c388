"""Every scenario: on values, on the real worker in this process, and on one behind gRPC.

The same files on all three. `--rewrite-golden=REASON` rewrites the logs of the pure side: read the diff
and understand it before it is committed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.check_trace import main as check_trace
from tests.scenarios.in_process import WorkerBackend, undisturbed
from tests.scenarios.play import Play, PureBackend
from tests.scenarios.process import ProcessBackend, can_play
from tests.scenarios.script import Scenario, ScenarioError, read_scenario
from tests.support.rig import socket_folder

FOLDER = Path(__file__).parent
FILES = sorted(FOLDER.glob("*.txt"))


def differs(scenario: Scenario, log: tuple[str, ...]) -> str:
    """Where two logs part, in words; empty when they do not."""
    for number in range(max(len(log), len(scenario.expected))):
        got = log[number] if number < len(log) else "(the log ends)"
        want = scenario.expected[number] if number < len(scenario.expected) else "(the log ends)"
        if got != want:
            return f"{scenario.path.name}, log line {number + 1}: got {got!r}, expected {want!r}"
    return ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_pure(path: Path, request: pytest.FixtureRequest) -> None:
    scenario = read_scenario(path)
    log = Play(scenario, PureBackend(scenario)).run()
    if request.config.getoption("--rewrite-golden"):
        path.write_text(scenario.head + "\n".join(log) + "\n")
        return
    assert not differs(scenario, log)
    assert not [line for line in log if line.startswith(("UNUSED", "BROKEN")) or "WRONG" in line]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_real_worker_in_process(path: Path) -> None:
    scenario = read_scenario(path)
    log = Play(scenario, WorkerBackend(scenario, undisturbed(scenario))).run()
    assert not differs(scenario, log)


def test_an_unknown_command_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "s.txt"
    path.write_text("plan stock steps=1 micro_batches=1\ndrop everything\n----\n")
    with pytest.raises(ScenarioError, match=r"s\.txt:2: unknown command 'drop everything'"):
        read_scenario(path)


def test_a_command_that_never_acts_is_said(tmp_path: Path) -> None:
    path = tmp_path / "s.txt"
    path.write_text(
        "plan stock steps=1 micro_batches=1\ndrop-reply at stage_fwd_bwd step=9\n----\n"
    )
    scenario = read_scenario(path)
    log = Play(scenario, PureBackend(scenario)).run()
    assert log[-1] == "UNUSED drop-reply stage_fwd_bwd step=9"


def test_a_wrong_log_is_told_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "s.txt"
    path.write_text("plan stock steps=1 micro_batches=1\n----\nopen_run -> lost\n")
    scenario = read_scenario(path)
    log = Play(scenario, PureBackend(scenario)).run()
    assert "log line 1: got 'open_run -> done" in differs(scenario, log)


# ---------------------------------------------------------------------------------------------
# The same files against a real worker process.


PLAYABLE = [path for path in FILES if can_play(read_scenario(path))]


@pytest.mark.parametrize("path", PLAYABLE, ids=lambda path: path.stem)
def test_real_process(path: Path) -> None:
    scenario = read_scenario(path)
    with socket_folder() as folder:
        backend = ProcessBackend(scenario, folder, expected_digest=undisturbed(scenario))
        try:
            log = Play(scenario, backend).run()
        finally:
            backend.stop()
        assert not differs(scenario, log)
        traces = [str(trace) for trace in sorted((folder / "traces").glob("*.ndjson"))]
        assert traces
        assert check_trace([*traces]) == 0
