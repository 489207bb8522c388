"""Starts and ends the two processes of a run, as a user would: by their console scripts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO


class ProcessError(Exception):
    """A process did not do what it was started for; quotes the end of its log."""


def _tail(path: Path, lines: int = 15) -> str:
    if not path.exists():
        return "(no log)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


@dataclass(kw_only=True)
class WorkerProcess:
    """A running `trainer_worker`."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self, grace_s: float = 60.0) -> int:
        """SIGTERM, then wait. Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise ProcessError(
                f"the worker did not end within {grace_s:g} s of SIGTERM\n{_tail(self.log)}"
            ) from None


@contextlib.contextmanager
def worker_process(
    arguments: Sequence[str],
    log: Path,
    *,
    ready_s: float = 120.0,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[WorkerProcess]:
    """Run a worker on a unix socket of its own; `environment` is added to ours.

    Raises `ProcessError`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="prestage-") as folder, log.open("wb") as output:
        address = f"unix://{folder}/worker.sock"
        ready = Path(folder) / "ready"
        command = [
            sys.executable,
            "-m",
            "trainer_worker.main",
            f"--listen={address}",
            f"--ready_file={ready}",
            *arguments,
        ]
        process = _start(command, output, environment)
        worker = WorkerProcess(address=address, process=process, log=log)
        try:
            deadline_s = time.monotonic() + ready_s
            while not ready.exists():
                if process.poll() is not None:
                    raise ProcessError(
                        f"the worker ended with {process.returncode} at its start\n{_tail(log)}"
                    )
                if time.monotonic() > deadline_s:
                    raise ProcessError(f"the worker was not ready in {ready_s:g} s\n{_tail(log)}")
                time.sleep(0.05)
            yield worker
        finally:
            worker.stop()


def _start(
    command: Sequence[str], output: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
    )


def run_orchestrator(arguments: Sequence[str], log: Path, *, timeout_s: float = 3600.0) -> None:
    """Run the orchestrator to its end; its progress bar is shown. Raises `ProcessError`."""
    command = [sys.executable, "-m", "orchestrator.main", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output)
        try:
            code = process.wait(timeout=timeout_s)
        except BaseException:
            process.kill()
            process.wait()
            raise
    if code != 0:
        raise ProcessError(f"the orchestrator ended with {code}\n{_tail(log)}")
