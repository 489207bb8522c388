"""What cannot be used is one clear line that names the flag, before anything is loaded or compiled."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prestage.operation.flags import metrics_place
from prestage.operation.folders import FolderError, FolderLock, check_writable_file
from prestage.operation.logs import JsonLines
from prestage.wire.channel import AddressError
from tests.operation.process import ROLLOUTS, get, running, wait_until, worker
from tests.support.rig import socket_folder

PROGRAMS = ("orchestrator", "trainer_worker")


def start(program: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The program with enough flags to get to the one under test."""
    base = {
        "orchestrator": [
            f"--trainer=unix://{folder}/w.sock",
            f"--rollouts={ROLLOUTS}",
            "--trainer_wait_s=0.1",
            "--noprogress",
        ],
        "trainer_worker": ["--engine=timed", f"--listen=unix://{folder}/w.sock"],
    }[program]
    return subprocess.run(
        [sys.executable, "-m", f"{program}.main", *base, *flags],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture(name="taken", scope="module")
def _taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


REFUSED = [
    ("orchestrator", "--probe_listen=127.0.0.1:TAKEN", "--probe_listen: cannot listen on"),
    ("orchestrator", "--metrics_address=127.0.0.1:TAKEN", "--metrics_address: cannot listen on"),
    ("orchestrator", "--metrics_port=TAKEN", "--metrics_port: cannot listen on"),
    ("orchestrator", "--status_listen=127.0.0.1:TAKEN", "--status_listen: cannot listen on"),
    ("orchestrator", "--health_listen=127.0.0.1:TAKEN", "--health_listen: cannot listen on"),
    ("orchestrator", "--status_listen=0.0.0.0:7000", "other hosts can reach"),
    ("orchestrator", "--health_listen=0.0.0.0:7000", "other hosts can reach"),
    ("orchestrator", "--trace_dir=/proc/nothing", "--trace_dir is '/proc/nothing'"),
    ("orchestrator", "--result_file=/proc/nothing/r", "--result_file is '/proc/nothing'"),
    ("orchestrator", "--result_file=FOLDER", "which is a folder"),
    ("orchestrator", "--probe_listen=7455", "--probe_listen is '7455': write host:port"),
    ("trainer_worker", "--health_listen=127.0.0.1:TAKEN", "--health_listen: cannot listen on"),
    ("trainer_worker", "--listen=127.0.0.1:TAKEN", "--listen: cannot listen on"),
    ("trainer_worker", "--probe_listen=127.0.0.1:TAKEN", "--probe_listen: cannot listen on"),
    ("trainer_worker", "--metrics_address=nowhere.invalid:1", "--metrics_address: cannot listen"),
    ("trainer_worker", "--metrics_address=127.0.0.1", "without a port"),
    ("trainer_worker", "--trace_dir=/proc/nothing", "--trace_dir is '/proc/nothing'"),
    ("trainer_worker", "--state_dir=/proc/nothing", "--state_dir is '/proc/nothing'"),
]


@pytest.mark.parametrize(("program", "flag", "says"), REFUSED)
def test_what_cannot_be_used_is_one_line(program: str, flag: str, says: str, taken: int) -> None:
    with socket_folder() as folder:
        flag = flag.replace("TAKEN", str(taken)).replace("FOLDER", str(folder))
        done = start(program, folder, flag)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1 and lines[0].startswith(f"{program}: "), done.stderr
    assert says in lines[0]


DURATIONS = [
    ("orchestrator", "grace_s"),
    ("orchestrator", "trainer_wait_s"),
    ("orchestrator", "data_wait_s"),
    ("trainer_worker", "grace_s"),
    ("trainer_worker", "compile_budget_s"),
    ("trainer_worker", "stall_budget_s"),
]


@pytest.mark.parametrize(("program", "flag"), DURATIONS)
def test_a_duration_of_nothing_is_refused_by_its_flag(program: str, flag: str) -> None:
    with socket_folder() as folder:
        for value in ("0", "-1", "nan") if flag == "grace_s" else ("-1",):
            done = start(program, folder, f"--{flag}={value}")
            assert done.returncode != 0
            assert f"--{flag} is '{value}'" in done.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_shows_the_programs_own_flags_and_not_the_librarys(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"{program}.main", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    for flag in ("--grace_s:", "--probe_listen:", "--metrics_address:", "--interrupted_exit_code:"):
        assert flag in done.stdout
    own = {"orchestrator": "--num_steps:", "trainer_worker": "--stall_budget_s:"}[program]
    assert own in done.stdout
    assert "--pdb" not in done.stdout and "--verbosity" not in done.stdout
    assert "docs/operations.md" in done.stdout


def test_where_metrics_are_served() -> None:
    assert metrics_place("", 0) is None
    assert metrics_place("", 9) == ("127.0.0.1", 9)
    assert metrics_place("0.0.0.0", 9464) == ("0.0.0.0", 9464)
    assert metrics_place("0.0.0.0:9464", 0) == ("0.0.0.0", 9464)
    assert metrics_place("0.0.0.0:9464", 9464) == ("0.0.0.0", 9464)
    assert metrics_place("[::1]:9464", 0) == ("::1", 9464)
    assert metrics_place("::", 9464) == ("::", 9464)
    with pytest.raises(AddressError, match=r"0\.0\.0\.0:9464 and --metrics_port=9465 name two"):
        metrics_place("0.0.0.0:9464", 9465)


def test_a_second_worker_on_one_state_folder_is_refused_at_once() -> None:
    with socket_folder() as folder, worker(folder, f"--state_dir={folder}/state", name="a"):
        began_s = time.monotonic()
        done = start("trainer_worker", folder, f"--state_dir={folder}/state")
        assert done.returncode == 2 and time.monotonic() - began_s < 20
        assert "which a trainer_worker (process" in done.stderr
    with socket_folder() as folder:
        with worker(folder, f"--state_dir={folder}/state") as first:
            first.popen.kill()
            first.wait()
        with worker(folder, f"--state_dir={folder}/state"):
            pass  # A killed process holds nothing.


def test_a_lock_goes_with_its_release(tmp_path: Path) -> None:
    lock = FolderLock("--state_dir", tmp_path, owner="a trainer_worker")
    with pytest.raises(FolderError, match=r"--state_dir is .* uses: stop it"):
        FolderLock("--state_dir", tmp_path, owner="a trainer_worker")
    lock.release()
    FolderLock("--state_dir", tmp_path, owner="a trainer_worker").release()


def test_a_result_file_may_be_new_or_old(tmp_path: Path) -> None:
    check_writable_file("--result_file", tmp_path / "deep" / "result.json")
    (tmp_path / "old.json").write_text("{}")
    check_writable_file("--result_file", tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "{}", "looked at, not written"


def test_metrics_are_there_before_the_worker_is_reached() -> None:
    with socket_folder() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [
            "-m",
            "orchestrator.main",
            f"--trainer=unix://{folder}/w.sock",
            f"--rollouts={ROLLOUTS}",
            "--trainer_wait_s=600",
            f"--metrics_address=127.0.0.1:{port}",
        ]
        with running(folder / "o.log", *command) as process:
            wait_until(lambda: "waiting for the worker" in process.output, "it waits")
            status, text = get(port, "/metrics")
            assert status == 200 and "\nprestage_progress_allowance_seconds 4200.0\n" in text
            assert get(port, "/elsewhere")[0] == 404


def test_log_lines_may_be_json_objects() -> None:
    with socket_folder() as folder:
        with worker(folder, "--log_format=json", name="j") as process:
            assert process.terminate()[0] == 0
        lines = [json.loads(line) for line in process.output.splitlines()]
    assert all(line["program"] == "trainer_worker" for line in lines)
    [ready] = [line for line in lines if line["message"].startswith("trainer_worker ready")]
    assert (ready["level"], ready["logger"]) == ("INFO", "prestage.worker")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[0-9:.]+Z", ready["time"])


def test_an_exception_stays_on_its_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "%s", ("m",), sys.exc_info())
    [line] = JsonLines("p").format(record).splitlines()
    assert json.loads(line)["exception"].endswith("ValueError: two\nlines")
