"""The status page: its JSON, its server, and what a real browser makes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.calls import Done, Lost, Note, NoteKind, Refused, Send
from orchestrator.feeder import FeederCounters
from orchestrator.ingest.metrics import LiveReading
from orchestrator.operation.admin import status_of
from orchestrator.operation.board import RunBoard
from orchestrator.operation.cli import text_of
from orchestrator.operation.control import RunControl
from orchestrator.operation.status_page import status_json, status_pages
from orchestrator.plan import RunPlan
from orchestrator.ports import Answer, StepSummary
from orchestrator.steps import StepRecord
from prestage.operation.pages import MAX_REQUESTS, PageServer
from prestage.protocol import Call, Reason
from prestage.trace import TraceRecord
from tests.operation.process import get

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = "run-<img src=x onerror=alert(1)>"


LIVE = LiveReading(
    accepted_tokens=1,
    dropped_tokens={},
    queue_depth=7,
    formed_groups=9,
    queue_bytes=1 << 20,
    queue_budget_bytes=4 << 20,
    incomplete_groups=2,
    producers=3,
    producer_wait_seconds=1.5,
    journal_lag_seconds=0.0,
    journal_bytes=5 << 20,
    journal_budget_bytes=1 << 30,
    commit_bounds=(),
    commit_buckets=(),
    commits=0,
    commit_seconds=0.0,
    policy_lag_updates=None,
)


def board() -> RunBoard:
    """Two closed steps, an open one, a refusal, a lost call, a note."""
    made = RunBoard(RunControl())
    made.live = lambda: LIVE
    begun_s = made.view().started_s
    made.begin(HOSTILE, "unix:///run/w.sock")
    made.running(RunPlan(num_steps=9), FeederCounters(put_bytes=5 << 20, put_retries=2))
    for step in range(3):
        for index, call in enumerate((Call.FWD_BWD, Call.FWD_BWD_APPLY)):
            record = TraceRecord(
                side="orchestrator",
                call=call.value,
                run_id="r",
                epoch=1,
                seq=1,
                incarnation="i",
                step=step,
                index=index,
                outcome="ok",
                started_s=begun_s + step + index * 0.4,
                seconds=0.35,
            )
            made.on_call(record, Answer(event=Done()))
        if step < 2:
            made.closed(
                StepRecord(
                    step=step,
                    started_s=begun_s + step,
                    finished_s=begun_s + step + 0.9,
                    dispatch_seconds=(0.35, 0.35),
                    metrics={"loss": float("nan") if step == 0 else 0.125},
                    summary=StepSummary(
                        step=step,
                        micro_batches=2,
                        groups=4,
                        trajectories=32,
                        real_tokens=9,
                        trained_tokens=9,
                        rows=8,
                        reward_mean=0.5,
                        dropped={"too_long": 3},
                    ),
                )
            )
    lost = TraceRecord(
        side="orchestrator",
        call="update",
        run_id="r",
        epoch=1,
        seq=1,
        incarnation="i",
        step=2,
        index=-1,
        started_s=begun_s + 2.9,
        seconds=0.1,
    )
    made.on_call(lost, Answer(event=Lost(why="gone")))
    refused = dataclasses.replace(lost, outcome=Reason.STEP_OPEN.value)
    made.on_call(refused, Answer(event=Refused(reason=Reason.STEP_OPEN, message="m")))
    made.on_note(Note(kind=NoteKind.LATE, step=1, text="step 2 was late"))
    made.calling(Send(call=Call.FWD_BWD, step=2, index=1))
    return made


@contextlib.contextmanager
def served(made: RunBoard) -> Iterator[int]:
    pages = PageServer("--status_listen", ("127.0.0.1", 0), status_pages(made.view))
    try:
        yield pages.port
    finally:
        pages.stop()


def test_the_json_holds_the_run_and_no_nan() -> None:
    with served(board()) as port:
        status, text = get(port, "/status.json")
        assert status == 200 and "NaN" not in text and "Infinity" not in text
        read = json.loads(text)
        assert read["run_id"] == HOSTILE and read["state"] == "TRAINING"
        assert [step["loss"] for step in read["steps"]] == [None, 0.125]
        assert read["steps"][1]["dropped"] == {"too_long": 3}
        assert read["refusals"] == {"STEP_OPEN": 1} and read["notes"] == {"next_step_late": 1}
        assert [call["outcome"] for call in read["calls"]][-2] == "lost"
        assert read["queue"] == {"ready_micro_batches": 0, "put_bytes": 5 << 20, "put_retries": 2}
        assert get(port, "/")[1].startswith("<!doctype html>")
        assert get(port, "/../secret")[0] == 404


def test_a_run_that_has_not_begun_has_a_page() -> None:
    read = status_json(RunBoard(RunControl()).view())
    assert (read["state"], read["phase"], read["steps"]) == ("STARTING", "", [])
    assert read["live"] is None


def test_a_live_runs_queue_is_in_the_json_and_in_the_status_of_the_command_line() -> None:
    made = board()
    assert status_json(made.view())["live"] == {
        "waiting_groups": 7,
        "incomplete_groups": 2,
        "producers": 3,
        "queue_bytes": 1 << 20,
        "queue_budget_bytes": 4 << 20,
        "journal_bytes": 5 << 20,
        "journal_budget_bytes": 1 << 30,
        "journal_lag_seconds": 0.0,
        "producer_wait_seconds": 1.5,
    }
    text = text_of(status_of(made.view()))
    assert "rollouts    7 groups wait (1.0 MiB of 4.0 MiB), 2 are incomplete, 3 producers" in text
    made.live = lambda: None
    assert "groups wait" not in text_of(status_of(made.view()))


def test_the_page_loads_nothing_from_elsewhere_and_cannot_be_written() -> None:
    with served(board()) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as page:
            policy = page.headers["Content-Security-Policy"]
            text = page.read().decode()
        assert "default-src 'none'" in policy and "connect-src 'self'" in policy
        addresses = set(re.findall(r"https?://[^\s\"']+", text))
        assert addresses == {"http://www.w3.org/2000/svg"}, "the name of SVG, which nothing loads"
        assert "innerHTML" not in text
        for method in ("POST", "PUT", "DELETE"):
            request = urllib.request.Request(f"http://127.0.0.1:{port}/", b"", method=method)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=10)
            assert refused.value.code == 501


def test_connections_that_say_nothing_are_bounded_and_leave_room_when_they_go() -> None:
    with served(board()) as port:
        with contextlib.ExitStack() as stack:
            silent = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
                for _ in range(MAX_REQUESTS + 4)
            ]
            assert silent[-1].recv(1) == b"", "one too many is closed at once"
        for _ in range(100):
            with contextlib.suppress(OSError):
                if get(port, "/status.json", timeout_s=5.0)[0] == 200:
                    return
        pytest.fail("no room was given back")


def test_a_page_that_fails_is_an_answer_and_not_the_end() -> None:
    def broken() -> tuple[str, bytes]:
        raise RuntimeError("planned")

    pages = PageServer("--status_listen", ("127.0.0.1", 0), {"/": broken})
    try:
        assert get(pages.port, "/") == (500, "the page could not be made\n")
        assert get(pages.port, "/")[0] == 500
    finally:
        pages.stop()


def dom(port: int, folder: Path) -> str:
    """The page's document once its script has run."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            f"--user-data-dir={folder}",
            "--window-size=1280,1200",
            "--virtual-time-budget=3000",
            "--dump-dom",
            f"http://127.0.0.1:{port}/",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
def test_a_browser_draws_the_run(tmp_path: Path) -> None:
    with served(board()) as port:
        drawn = dom(port, tmp_path)
    assert "<img" not in drawn, "what a run is named is text, never markup"
    assert html.escape(HOSTILE, quote=False) in drawn
    assert re.search(r'<span id="state" class="badge good">TRAINING</span>', drawn)
    assert len(re.findall(r'class="call fwd"', drawn)) == 6
    assert len(re.findall(r'class="call failed"', drawn)) == 2, "the lost call and the refused one"
    assert len(re.findall(r'class="band"', drawn)) == 2
    assert "step 1: 900 ms" in drawn
    for text in (
        "STEP_OPEN",
        "next_step_late",
        "too_long",
        "5.0 MiB put, 2 repeated",
        "7 groups wait",
    ):
        assert text in drawn, text
    assert re.search(r"<td>1</td><td>900 ms</td><td>2</td><td>0.12500</td>", drawn)
    assert 'id="lost" role="alert" style="display: none;"' in drawn


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
def test_a_browser_says_when_nobody_answers(tmp_path: Path) -> None:
    pages = dict(status_pages(board().view))

    def gone() -> tuple[str, bytes]:
        raise RuntimeError("gone")

    server = PageServer("--status_listen", ("127.0.0.1", 0), {**pages, "/status.json": gone})
    try:
        drawn = dom(server.port, tmp_path)
    finally:
        server.stop()
    assert "The orchestrator has not answered for" in drawn and "HTTP 500" in drawn
