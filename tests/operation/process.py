"""Real processes for the tests of operation: started, watched by their state, never slept for."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.trainer.v1 import trainer_pb2_grpc as pb_grpc
from prestage.wire.channel import open_channel

PATIENCE_S = 240.0  # A machine that is shared by many is slow; nothing here needs it.
GRACE_S = 20.0
ROLLOUTS = Path(__file__).parent.parent / "data" / "rollouts.parquet"


def wait_until(true: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Look again and again at a state that another thread or process changes."""
    give_up_s = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < give_up_s, f"never: {what}"
        threading.Event().wait(0.01)


def get(port: int, path: str, timeout_s: float = 10.0) -> tuple[int, str]:
    """(status, body) of an HTTP page on the loopback address."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=timeout_s) as page:
            return int(page.status), page.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def children(pid: int) -> list[int]:
    """Of a living process."""
    listed = Path(f"/proc/{pid}/task")
    found = []
    for task in listed.iterdir():
        with contextlib.suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")


@dataclass(kw_only=True)
class Process:
    """One program; its output is in a file, so that a full pipe never blocks it."""

    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        return self.popen.wait(timeout=patience_s)

    def terminate(self, patience_s: float = PATIENCE_S) -> tuple[int, float]:
        """SIGTERM; (exit status, seconds until the end)."""
        started_s = time.monotonic()
        self.popen.send_signal(signal.SIGTERM)
        return self.wait(patience_s), time.monotonic() - started_s


@contextlib.contextmanager
def running(log: Path, *command: str) -> Iterator[Process]:
    """A program, killed at the end if it still runs."""
    with log.open("wb") as output:
        popen = subprocess.Popen(
            [sys.executable, *command], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield Process(popen=popen, log=log)
    finally:
        popen.kill()
        popen.wait()


@contextlib.contextmanager
def worker(folder: Path, *flags: str, engine: str = "timed", name: str = "w") -> Iterator[Process]:
    """A `trainer_worker` that serves on `FOLDER/NAME.sock`."""
    ready = folder / f"{name}.ready"
    ready.unlink(missing_ok=True)
    with running(
        folder / f"{name}.log",
        "-m",
        "trainer_worker.main",
        f"--engine={engine}",
        f"--listen=unix://{folder}/{name}.sock",
        f"--ready_file={ready}",
        *flags,
    ) as process:
        wait_until(
            lambda: ready.exists() or process.popen.poll() is not None, "the worker is ready"
        )
        assert ready.exists(), process.output
        yield process


def state_of(folder: Path, name: str = "w") -> pb.WorkerState:
    """The worker's state, from its status port."""
    with open_channel(f"unix://{folder}/{name}.sock.health") as channel:
        answer = pb_grpc.TrainerStatusStub(channel).GetState(pb.GetStateRequest(), timeout=10)
    return answer.state


def result_of(path: Path) -> dict[str, object]:
    """A run's result file."""
    read = json.loads(path.read_text())
    assert isinstance(read, dict)
    return read


def flags(folder: Path, *more: str) -> tuple[str, ...]:
    return (
        f"--state_dir={folder}/state",
        f"--checkpoint_dir={folder}/checkpoints",
        f"--grace_s={GRACE_S}",
        *more,
    )


def reached(
    folder: Path, what: str, true: Callable[[pb.WorkerState], bool], name: str = "w"
) -> pb.WorkerState:
    """The worker's first state of which `true` is; looked at over one connection, so often."""
    with open_channel(f"unix://{folder}/{name}.sock.health") as channel:
        stub = pb_grpc.TrainerStatusStub(channel)
        seen: list[pb.WorkerState] = []

        def look() -> bool:
            seen[:] = [stub.GetState(pb.GetStateRequest(), timeout=30, wait_for_ready=True).state]
            return true(seen[0])

        wait_until(look, what)
    return seen[0]


def train(folder: Path, *more: str) -> list[str]:
    return [
        "-m",
        "orchestrator.main",
        f"--trainer=unix://{folder}/w.sock",
        f"--rollouts={ROLLOUTS}",
        "--num_steps=2",
        "--pipeline_step_boundary",
        "--stage_next_microbatch",
        "--checkpoint_every=1",
        "--noprogress",
        f"--result_file={folder}/result.json",
        *more,
    ]


def goes_on(folder: Path, expected: object) -> None:
    """The same command again trains to the end."""
    with running(folder / "again.log", *train(folder)) as process:
        assert process.wait() == 0, process.output
    assert result_of(folder / "result.json")["parameter_digest"] == expected
