"""Starts many processes of one program cheaply: imports it once, then forks before gRPC starts.

`python -m tests.chaos.zygote worker|orchestrator`: one JSON command a line on standard input, one
JSON answer a line on standard output. A forked process is a process like any other: it has its own
pid and parses its own flags; only the imports are shared. Threads exist in none of it when it forks.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Final

# What each program would import once it runs.
MODULES: Final = {
    "worker": (
        "tests.chaos.worker",
        "trainer_worker.engines.timed",
        "trainer_worker.engines.timed_hosts",
        "prometheus_client",
    ),
    "orchestrator": (
        "tests.chaos.orchestrator",
        "orchestrator.bringup",
        "orchestrator.live",
        "orchestrator.recorded",
        "orchestrator.operation.operation",
    ),
    "producer": ("tests.chaos.producer",),
}


def _become(command: dict[str, object], program: str) -> None:
    """In the forked process: never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        log = os.open(str(command["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        arguments = command["arguments"]
        assert isinstance(arguments, list)
        sys.argv = [program, *map(str, arguments)]
        module = importlib.import_module(f"tests.chaos.{program}")
        module.main()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    program = sys.argv[1]
    for name in MODULES[program]:
        importlib.import_module(name)
    gc.freeze()
    assert threading.active_count() == 1, "a thread would not survive the fork"
    children: set[int] = set()
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "start":
            pid = os.fork()
            if pid == 0:
                _become(command, program)
            children.add(pid)
            answer: object = pid
        else:
            pid = command["pid"]
            done, status = os.waitpid(pid, os.WNOHANG)
            answer = None
            if done:
                children.discard(pid)
                answer = os.waitstatus_to_exitcode(status)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for pid in children:  # The harness is gone.
        os.kill(pid, signal.SIGKILL)


class Zygote:
    """The harness's end. Safe from several threads."""

    def __init__(self, program: str) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.zygote", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )

    def _ask(self, command: dict[str, object]) -> int | None:
        with self._lock:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the zygote died")
        value = json.loads(answer)
        return None if value is None else int(value)

    def start(self, arguments: list[str], log: Path) -> int:
        """The new process's pid."""
        pid = self._ask({"do": "start", "arguments": arguments, "log": str(log)})
        assert pid is not None
        return pid

    def poll(self, pid: int) -> int | None:
        """Exit status, negative for a signal; None while it runs. To be asked until it is given."""
        return self._ask({"do": "poll", "pid": pid})

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)


if __name__ == "__main__":
    main()
