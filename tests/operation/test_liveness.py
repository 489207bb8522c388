"""Health is progress, told by a process of its own: states have allowances, and a busy GIL fails nothing."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prestage.operation.heartbeat import SILENCE_S, STUCK_EXIT_CODE, Heartbeat, Progress
from prestage.operation.probe_process import (
    HEARTBEAT_BYTES,
    SLOT_BYTES,
    Beat,
    answer,
    pack,
    respond,
    stuck,
    unpack,
)
from prestage.operation.probes import Probes
from prestage.protocol import Lifecycle
from prestage.wire.channel import AddressError
from tests.operation.process import alive, children, get, running, wait_until, worker
from tests.support.rig import socket_folder
from trainer_worker.liveness import Budgets, Doing, WorkerProgress

BEAT = Beat(
    counter=1,
    beat_s=100.0,
    progress_s=100.0,
    allowance_s=30.0,
    silence_s=60.0,
    started=True,
    ready=True,
    state="SERVING fwd_bwd",
    reason="",
)


def test_what_each_path_answers() -> None:
    at_s = 110.0
    for path in ("/livez", "/readyz", "/startupz", "/healthz"):
        assert answer(path, BEAT, at_s)[0] == 200
        assert answer(path, None, at_s) == (503, "no heartbeat yet")
    loading = BEAT._replace(started=False, ready=False, state="STARTING", reason="loading")
    assert answer("/startupz", loading, at_s) == (503, "not started: STARTING")
    assert answer("/readyz", loading, at_s) == (503, "not ready: loading")
    assert answer("/livez", loading, at_s)[0] == 200
    assert answer("/metrics", BEAT, at_s)[0] == 404


def test_stuck_names_the_state_and_both_numbers() -> None:
    assert stuck(BEAT, 130.0) == ""
    assert stuck(BEAT._replace(beat_s=131.0), 131.0) == (
        "no progress for 31.0 s while SERVING fwd_bwd (allowance 30.0 s)"
    )
    silent = BEAT._replace(allowance_s=math.inf)
    assert stuck(silent, 160.0) == ""
    assert stuck(silent, 161.0) == (
        "its Python has not run for 61.0 s while SERVING fwd_bwd (allowance 60.0 s)"
    )
    assert answer("/livez", silent, 161.0)[0] == 503


@given(
    counter=st.integers(1, 2**63),
    numbers=st.tuples(*[st.floats(allow_nan=False)] * 4),
    flags=st.tuples(st.booleans(), st.booleans()),
    state=st.text(max_size=12),
)
def test_a_beat_survives_its_bytes(
    counter: int, numbers: tuple[float, ...], flags: tuple[bool, ...], state: str
) -> None:
    beat = Beat(counter, *numbers, *flags, state.replace("\0", ""), "why")  # type: ignore[arg-type]
    assert unpack(pack(beat) + bytes(SLOT_BYTES)) == beat


@given(torn=st.integers(0, SLOT_BYTES - 1))
def test_a_beat_that_is_half_written_is_not_read(torn: int) -> None:
    """The writer may be stopped at any byte, for as long as somebody else holds the GIL."""
    whole, newer = pack(BEAT), pack(BEAT._replace(counter=2, beat_s=500.0))
    half = newer[:torn] + bytes(SLOT_BYTES - torn)
    read = unpack(whole + half)
    assert read is not None and read.counter in (1, 2)
    assert read == BEAT or half == newer


@given(data=st.binary(max_size=300))
def test_no_request_breaks_the_answer(data: bytes) -> None:
    assert respond(data, BEAT, 110.0).startswith(b"HTTP/1.1 ")


@given(data=st.binary(max_size=HEARTBEAT_BYTES))
def test_no_memory_breaks_the_reader(data: bytes) -> None:
    unpack(data)


# -- the worker's states, on a virtual clock ------------------------------------------------------


class Rig:
    """A worker's progress and its watchdog, on a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.doing = Doing(lifecycle=Lifecycle.STARTING, call="", in_flight=0)
        self.ended: list[str] = []
        self.progress = WorkerProgress(
            Budgets(compile_s=7200.0, stall_s=900.0), lambda: self.doing, now=lambda: self.now_s
        )
        self.heartbeat = Heartbeat(
            self.progress.read, end=self.ended.append, now=lambda: self.now_s
        )

    def pass_s(self, seconds: float, step_s: float = 10.0) -> str:
        """Time passes and the watchdog looks; why it ended the process, or empty."""
        until_s = self.now_s + seconds
        while self.now_s < until_s and not self.ended:
            self.now_s += step_s
            self.heartbeat.look()
        return self.ended[0] if self.ended else ""

    def call(self, name: str) -> None:
        self.doing = replace(self.doing, lifecycle=Lifecycle.SERVING, call=name)
        self.progress.made()


def test_r16_half_an_hour_of_loading_or_compiling_is_no_alarm_and_of_training_is_one() -> None:
    rig = Rig()
    assert rig.pass_s(1800) == ""
    rig.call("")
    assert rig.pass_s(24 * 3600) == "", "nothing is due from an idle worker"
    rig.call("compile")
    assert rig.pass_s(1800) == ""
    rig.call("fwd_bwd")
    why = rig.pass_s(1800)
    assert "no progress for 910.0 s while SERVING fwd_bwd (allowance 900.0 s)" in why


def test_r25_a_compile_after_start_up_is_no_hang() -> None:
    rig = Rig()
    rig.call("fwd_bwd")
    assert rig.pass_s(60) == ""
    rig.call("compile")
    assert rig.pass_s(7000) == ""
    assert "while COMPILING" in rig.pass_s(1000), "but one has its end, too"


def test_r16_loading_for_ever_ends() -> None:
    assert "while STARTING" in Rig().pass_s(8000)


def test_r15_a_device_that_is_stuck_with_work_shows_although_the_process_answers() -> None:
    """No call runs, every heartbeat comes, and the device does not finish what it was given."""
    rig = Rig()
    rig.call("")
    rig.doing = replace(rig.doing, in_flight=2)
    rig.progress.made()
    assert rig.pass_s(890) == ""
    rig.progress.made()
    assert rig.pass_s(890) == "", "it finished one micro-batch"
    assert "the device's micro-batches" in rig.pass_s(20)


def test_an_idle_day_before_a_call_does_not_count_against_it() -> None:
    rig = Rig()
    rig.call("")
    assert rig.pass_s(24 * 3600, step_s=600.0) == ""
    rig.call("compute_logprobs")
    assert rig.pass_s(600) == ""


def test_python_may_be_silent_for_longer_while_it_compiles() -> None:
    rig = Rig()
    rig.call("compile")
    assert rig.progress.read().silence_s == 7200.0
    rig.call("fwd_bwd")
    assert rig.progress.read().silence_s == SILENCE_S


# -- the process ----------------------------------------------------------------------------------


@contextlib.contextmanager
def probed(progress: Progress) -> Iterator[tuple[Probes, Heartbeat]]:
    heartbeat = Heartbeat(lambda: progress)
    probes = Probes("127.0.0.1:0", heartbeat)
    heartbeat.start()
    probes.start()
    try:
        yield probes, heartbeat
    finally:
        probes.stop()
        heartbeat.stop()


WELL = Progress(state="SERVING", progress_s=time.monotonic() + 3600, allowance_s=600.0)

_PROBE_ONCE_A_TENTH = """
import sys, time, urllib.request
url, seconds = sys.argv[1], float(sys.argv[2])
end, slowest, answers = time.monotonic() + seconds, 0.0, 0
print("ready", flush=True)
while time.monotonic() < end:
    began = time.monotonic()
    page = urllib.request.urlopen(url, timeout=1)
    assert page.status == 200
    answers += 1
    slowest = max(slowest, time.monotonic() - began)
    time.sleep(0.1)
print(answers, slowest)
"""


def test_r24_probes_answer_while_the_gil_is_held_for_five_seconds() -> None:
    with probed(WELL) as (probes, heartbeat):
        url = f"http://127.0.0.1:{probes.port}/livez"
        prober = subprocess.Popen(
            [sys.executable, "-c", _PROBE_ONCE_A_TENTH, url, "6.0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert prober.stdout is not None
        assert prober.stdout.readline() == "ready\n"
        before = heartbeat._counter
        began_s = time.monotonic()
        ctypes.PyDLL(None).usleep(5_000_000)  # PyDLL, unlike CDLL, keeps the GIL.
        held_s = time.monotonic() - began_s
        assert held_s >= 5.0 and heartbeat._counter - before <= 2, "no other thread ran meanwhile"
        out, _ = prober.communicate(timeout=60)
        assert prober.returncode == 0, "a probe failed or took over a second"
        answers, slowest_s = out.split()
        assert int(answers) >= 20 and float(slowest_s) < 1.0


def test_the_probe_process_is_small_and_imports_neither_grpc_nor_jax() -> None:
    with probed(WELL) as (probes, _):
        wait_until(lambda: get(probes.port, "/livez")[0] == 200, "the probe answers")
        mapped = Path(f"/proc/{probes.pid}/maps").read_text()
        assert "grpc" not in mapped and "jax" not in mapped and "numpy" not in mapped
        status = Path(f"/proc/{probes.pid}/status").read_text()
        [resident] = [line for line in status.splitlines() if line.startswith("VmRSS")]
        assert int(resident.split()[1]) < 24 << 10, resident


def test_clients_that_say_nothing_hold_up_nobody() -> None:
    with probed(WELL) as (probes, _), contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", probes.port), timeout=10))
        assert get(probes.port, "/livez", timeout_s=1.0)[0] == 200


def test_r18_a_probe_process_that_dies_is_started_again_and_counted() -> None:
    with probed(WELL) as (probes, _):
        first = probes.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: probes.pid not in (0, first), "another one is there")
        assert get(probes.port, "/livez")[0] == 200, "on the same port, which was never lost"
        assert probes.restarts == 1


def test_the_probe_tells_a_stuck_program_apart() -> None:
    stale = Progress(state="SERVING fwd_bwd", progress_s=time.monotonic() - 700, allowance_s=600.0)
    with probed(stale) as (probes, _):
        status, text = get(probes.port, "/livez")
        assert status == 503
        assert "stuck: no progress for 7" in text and "SERVING fwd_bwd" in text
        assert get(probes.port, "/startupz")[0] == 200


def test_a_taken_probe_port_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            AddressError, match=f"--probe_listen: cannot listen on 127.0.0.1:{port}"
        ):
            Probes(f"127.0.0.1:{port}", Heartbeat(lambda: WELL))


def test_the_workers_probes_end_with_it_however_it_ends() -> None:
    with socket_folder() as folder, worker(folder, "--probe_listen=127.0.0.1:0") as process:
        [probe] = children(process.popen.pid)
        process.popen.kill()
        process.wait()
        wait_until(lambda: not alive(probe), "the probe process ended, too")


def test_a_stuck_call_ends_the_worker_with_the_reason_and_every_stack() -> None:
    """R15: the process answers, the device does not; the allowance of a call is over."""
    from orchestrator.bench.conformance.driver import Driver
    from prestage.protocol import Call

    with (
        socket_folder() as folder,
        worker(folder, "--timed_fwd_bwd_s=1000", "--stall_budget_s=1") as process,
    ):
        driver = Driver(address=f"unix://{folder}/w.sock")
        driver.open()
        driver.call(Call.COMPILE)
        driver.put(driver.batch(0, 0))
        driver.call(Call.FWD_BWD, 0, 0)
        assert process.wait() == STUCK_EXIT_CODE
        driver.close()
        assert "ending this process: no progress for" in process.output
        assert "while SERVING the device's micro-batches (allowance 1.0 s)" in process.output
        assert "Current thread" in process.output and "in _serve" in process.output


_SILENT = """
import ctypes, sys
from prestage.operation import heartbeat
heartbeat._SILENCE_MARGIN_S = 0.5
progress = heartbeat.Progress(state="SERVING", progress_s=0.0, silence_s=0.5)
watched = heartbeat.Heartbeat(lambda: progress, end=heartbeat.end_process)
watched.start()
while not watched._armed_for_s:
    pass
ctypes.PyDLL(None).sleep(100)
"""


def test_an_interpreter_that_does_not_come_back_is_ended_without_it(tmp_path: Path) -> None:
    """No Python thread can run, so no Python watchdog can: a timer in C ends the process."""
    with running(tmp_path / "log", "-c", _SILENT) as process:
        assert process.wait(60) == 1
        assert "Timeout" in process.output and "most recent call first" in process.output
