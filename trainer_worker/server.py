"""Puts one worker together: engine, store, device thread, service, servers; and takes it apart."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from prestage.trace import TraceWriter
from prestage.wire.channel import bind, is_local, make_server, status_address
from prestage.wire.limits import WireLimits
from prestage.wire.shm_plane import SharedMemoryUnavailable, WorkerSlots
from prestage.wire.store import MicroBatchStore
from trainer_worker.clock import Clock, RealClock
from trainer_worker.device_thread import DeviceThread
from trainer_worker.engine import EngineParts
from trainer_worker.epoch_file import EpochFile
from trainer_worker.service import ServiceConfig, StorePort, TrainerService, add_to_server
from trainer_worker.status_server import StatusServer
from trainer_worker.watcher import ThreadWatcher, Watcher
from trainer_worker.worker import Worker, WorkerConfig

log = logging.getLogger("prestage.worker")

RPC_THREADS = 16


class InsecureAddress(Exception):
    """An address that other hosts can reach, without protection."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """One worker process. Bytes and seconds."""

    listen: str
    health_listen: str = ""  # Empty: derived from `listen`.
    state_dir: Path | None = None
    trace_dir: Path | None = None
    store_memory_bytes: int = 4 << 30
    staging_memory_bytes: int = 1 << 30
    weight_sync_memory_bytes: int = 8 << 30
    insecure: bool = False
    shared_memory: bool = True  # Offer the shared-memory plane to callers on this host.
    grace_s: float = 30.0


def _slots() -> WorkerSlots | None:
    try:
        return WorkerSlots()
    except SharedMemoryUnavailable as error:
        log.warning("payloads come by stream only: %s", error)
        return None


class WorkerServer:
    """A serving worker."""

    def __init__(
        self,
        config: ServerConfig,
        parts: EngineParts,
        *,
        clock: Clock | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        """Binds both ports. Raises `AddressError`, `InsecureAddress`, `StateFolderError`."""
        health_listen = config.health_listen or status_address(config.listen)
        for flag, address in (("--listen", config.listen), ("--health_listen", health_listen)):
            if not is_local(address) and not config.insecure:
                raise InsecureAddress(
                    f"{flag} {address} can be reached from other hosts: use unix:///path or a"
                    " loopback address, or say --insecure"
                )
        self._config = config
        clock = clock or RealClock()
        self.incarnation = secrets.token_hex(8)
        self._trace = None
        if config.trace_dir is not None:
            self._trace = TraceWriter(
                config.trace_dir / f"worker-{self.incarnation}.ndjson",
                side="worker",
                clock_origin_s=time.time() - time.monotonic(),
            )
        epochs = EpochFile(config.state_dir)
        store = MicroBatchStore(config.store_memory_bytes, self._next_needed)
        self._worker: Worker | None = None
        self._worker = worker = Worker(
            parts=parts,
            store=StorePort(store),
            watcher=watcher
            or ThreadWatcher(clock, None if self._trace is None else self._trace.write),
            clock=clock,
            incarnation=self.incarnation,
            config=WorkerConfig(
                staging_memory_bytes=config.staging_memory_bytes,
                weight_sync_memory_bytes=config.weight_sync_memory_bytes,
            ),
            first_epoch=epochs.epoch,
        )
        self._slots = _slots() if config.shared_memory else None
        self.service = TrainerService(
            worker=worker,
            store=store,
            device=DeviceThread(),
            epochs=epochs,
            clock=clock,
            config=ServiceConfig(
                staging_memory_bytes=config.staging_memory_bytes, limits=WireLimits()
            ),
            trace=self._trace,
            slots=self._slots,
        )
        self._server = make_server(RPC_THREADS, name="rpc")
        add_to_server(self.service, self._server)
        self.port = bind(self._server, "--listen", config.listen)
        self.status = StatusServer(self.service, health_listen)
        self.health_address = health_listen

    def _next_needed(self) -> tuple[int, int]:
        if self._worker is None:
            return 0, 0
        step = self._worker.snapshot().session.step
        return step.step, step.micro_step

    def start(self) -> None:
        self._server.start()
        self.status.start()

    def stop(self) -> bool:
        """Not serving, finish the running call, let go of the device. False: the grace ran out."""
        self.status.set_serving(False)
        drained = self.service.drain(self._config.grace_s)
        # Handlers still answer what the drained calls returned.
        self._server.stop(1.0).wait()
        self.status.stop(0.5).wait()
        if self._slots is not None:
            self._slots.close()
        if self._trace is not None:
            self._trace.close()
        if not drained:
            log.error(
                "the running call did not end within the grace of %.0f s", self._config.grace_s
            )
        return drained
