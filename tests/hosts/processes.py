"""Groups of real processes on this machine, each a `trainer_worker`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.trainer.v1.trainer_pb2_grpc import TrainerWorkerStub
from prestage.wire.channel import open_channel


def two_free_ports() -> int:
    """A port of the loopback address, free like the next one."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return int(port)
    raise AssertionError("no two neighbouring ports are free")


@dataclass(kw_only=True)
class Group:
    """Its processes by id; logs in `folder`."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"unix://{self.folder}/w.sock"

    def log(self, who: int) -> str:
        return (self.folder / f"{who}.log").read_text()

    def logs(self) -> str:
        return "\n".join(f"--- {who}\n{self.log(who)}" for who in range(len(self.processes)))

    def signal(self, who: int, number: signal.Signals) -> None:
        self.processes[who].send_signal(number)

    def ended(self, who: int, timeout_s: float) -> int:
        """Its exit status. Raises `TimeoutExpired`."""
        return self.processes[who].wait(timeout=timeout_s)

    def state(self) -> pb.WorkerState:
        with contextlib.closing(open_channel(self.address)) as channel:
            return TrainerWorkerStub(channel).GetState(pb.GetStateRequest(), timeout=5.0).state

    def await_serving(self, timeout_s: float) -> None:
        limit_s = time.monotonic() + timeout_s
        while time.monotonic() < limit_s:
            assert all(p.poll() is None for p in self.processes), self.logs()
            with contextlib.suppress(grpc.RpcError):
                if self.state().lifecycle == pb.LIFECYCLE_SERVING:
                    return
            time.sleep(0.1)
        raise AssertionError(f"not serving after {timeout_s} s\n{self.logs()}")


@contextlib.contextmanager
def group_of(
    folder: Path,
    count: int,
    flags: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    own_flags: Mapping[int, Sequence[str]] | None = None,
    wait_s: float = 60.0,
) -> Iterator[Group]:
    """`count` processes, serving; killed at the end if they have not ended. 1: no group at all."""
    folder.mkdir(parents=True, exist_ok=True)
    group = Group(folder=folder)
    port = two_free_ports()
    try:
        for who in range(count):
            place = (
                f"--num_processes={count}",
                f"--process_id={who}",
                f"--coordinator_address=127.0.0.1:{port}",
            )
            with (folder / f"{who}.log").open("wb") as log:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "trainer_worker.main",
                        f"--listen={group.address}",
                        *(place if count > 1 else ()),
                        *flags,
                        *(own_flags or {}).get(who, ()),
                    ],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(environment or {})},
                )
            group.processes.append(process)
        if wait_s:
            group.await_serving(wait_s)
        yield group
    finally:
        for process in group.processes:
            if process.poll() is None:
                process.kill()
        for process in group.processes:
            process.wait()
