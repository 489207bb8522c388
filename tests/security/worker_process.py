"""A worker as a process of its own, over mTLS with tokens, and what a test asks it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from prestage.wire.security import Role, Security, SecurityConfig
from tests.security.authority import Authority, token_folder

START_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(kw_only=True)
class WorkerProcess:
    folder: Path
    process: subprocess.Popen[bytes]
    port: int
    health_port: int
    metrics_port: int
    authority: Authority
    tokens: dict[str, str]
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self.folder / "worker.log").read_text()

    def security(self) -> Security:
        """What a legitimate program here has."""
        return Security(
            SecurityConfig(tls_dir=self.folder / "tls", token_dir=self.folder / "tokens")
        )

    def metrics(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """(name, sorted label values) to value."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        return {
            (sample.name, tuple(sorted(sample.labels.values()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def refusals(self, call: str, reason: str) -> float:
        key = ("prestage_worker_refusals_total", tuple(sorted((call, reason))))
        return self.metrics().get(key, 0.0)

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * 4096

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


@contextlib.contextmanager
def worker_process(folder: Path, *flags: str, secure: bool = True) -> Iterator[WorkerProcess]:
    authority = Authority()
    authority.folder(folder / "tls")
    tokens = token_folder(folder / "tokens")
    port, health, metrics = free_port(), free_port(), free_port()
    ready = folder / "ready"
    command = [
        sys.executable,
        "-m",
        "trainer_worker.main",
        "--engine=timed",
        "--timed_fwd_bwd_s=0.002",
        f"--listen=127.0.0.1:{port}",
        f"--health_listen=127.0.0.1:{health}",
        f"--metrics_port={metrics}",
        f"--state_dir={folder}/state",
        f"--ready_file={ready}",
        *flags,
    ]
    if secure:
        command += [f"--tls_dir={folder}/tls", f"--token_dir={folder}/tokens"]
    with (folder / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    worker = WorkerProcess(
        folder=folder,
        process=process,
        port=port,
        health_port=health,
        metrics_port=metrics,
        authority=authority,
        tokens=tokens,
    )
    try:
        give_up = time.monotonic() + START_S
        while not ready.exists():
            assert process.poll() is None, worker.log[-2000:]
            assert time.monotonic() < give_up, worker.log[-2000:]
            time.sleep(0.02)
        yield worker
    finally:
        process.terminate()
        process.wait(timeout=60)


class HealthWatch:
    """Asks for health all the while; remembers the slowest answer."""

    def __init__(self, worker: WorkerProcess) -> None:
        address = f"127.0.0.1:{worker.health_port}"
        self._channel = worker.security().open_channel("--health", address, Role.READ)
        self._stop = threading.Event()
        self.answers = 0
        self.slowest_s = 0.0
        self.failures: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        check = health_pb2_grpc.HealthStub(self._channel).Check
        while not self._stop.wait(0.02):
            started = time.monotonic()
            try:
                answer = check(health_pb2.HealthCheckRequest(), timeout=5)
                if answer.status != health_pb2.HealthCheckResponse.SERVING:
                    self.failures.append(str(answer))
            except grpc.RpcError as error:
                self.failures.append(str(error))
            self.slowest_s = max(self.slowest_s, time.monotonic() - started)
            self.answers += 1

    def __enter__(self) -> HealthWatch:
        self._thread.start()
        return self

    def __exit__(self, *why: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        self._channel.close()
