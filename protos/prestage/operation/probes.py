"""Starts the process that answers probes, and starts it again when it dies.

The listening socket stays the program's own, so the address is never lost between two such processes.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from typing import IO, Final

from prestage.operation import probe_process
from prestage.operation.addresses import listen_tcp, port_of, split_host_port
from prestage.operation.heartbeat import Heartbeat

log = logging.getLogger("prestage.operation")

_PAUSE_S: Final = 0.2
_MAX_PAUSE_S: Final = 30.0


class Probes:
    """Serves `/livez`, `/readyz` and `/startupz` from a small process."""

    def __init__(self, address: str, heartbeat: Heartbeat, *, flag: str = "--probe_listen") -> None:
        """Binds at once. Raises `AddressError`."""
        host, port = split_host_port(flag, address)
        self._listener = listen_tcp(flag, host, port)
        self._heartbeat = heartbeat
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.port = port_of(self._listener)
        self.restarts = 0  # Monotonic.

    @property
    def pid(self) -> int:
        """Of the probe process; 0 = there is none now."""
        process = self._process
        return 0 if process is None else process.pid

    def start(self) -> None:
        self._process = self._spawn()
        self._thread = threading.Thread(target=self._watch, name="probes", daemon=True)
        self._thread.start()

    def _spawn(self) -> subprocess.Popen[bytes]:
        listen_fd, heartbeat_fd = self._listener.fileno(), self._heartbeat.fd
        # A new program (never a fork of this one), without site-packages: it starts in milliseconds.
        return subprocess.Popen(
            [
                sys.executable,
                "-E",
                "-s",
                "-S",
                str(probe_process.__file__),
                str(listen_fd),
                str(heartbeat_fd),
            ],
            stdin=subprocess.PIPE,  # Closed by the system when this process ends, however it ends.
            stdout=subprocess.DEVNULL,
            pass_fds=(listen_fd, heartbeat_fd),
        )

    def _watch(self) -> None:
        pause_s = _PAUSE_S
        while (process := self._process) is not None:
            code = process.wait()
            _close(process.stdin)
            if self._stopped.is_set():
                return
            log.warning(
                "the probe process (pid %d) ended with status %d: starting another",
                process.pid,
                code,
            )
            self._stopped.wait(pause_s)
            pause_s = min(_MAX_PAUSE_S, pause_s * 2)
            with self._lock:
                if self._stopped.is_set():
                    return
                self.restarts += 1
                try:
                    self._process = self._spawn()
                except OSError as error:  # Out of processes or memory: the probe fails, we go on.
                    log.error("no probe process could be started: %s", error)

    def stop(self) -> None:
        with self._lock:
            self._stopped.set()
            process = self._process
        if process is not None:
            _close(process.stdin)
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._thread is not None:
            self._thread.join(timeout=5)
        self._listener.close()


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None and not pipe.closed:
        pipe.close()
