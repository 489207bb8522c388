"""Puts one worker together: engine, store, device thread, service, servers; and takes it apart."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from prestage.operation.addresses import check_free
from prestage.operation.folders import FolderLock, check_writable_folder
from prestage.protocol import Lifecycle, Reason
from prestage.trace import DeviceRecord, TraceWriter
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.wire.channel import AddressError, bind, check_address, make_server, status_address
from prestage.wire.limits import WireLimits
from prestage.wire.security import Security, SecurityConfig
from prestage.wire.shm_plane import SharedMemoryUnavailable, WorkerSlots
from prestage.wire.store import MicroBatchStore
from prestage.wire.stream_slots import FIRST_S, SILENT_S
from trainer_worker.clock import Clock, RealClock
from trainer_worker.device_thread import DeviceThread
from trainer_worker.engine import EngineParts
from trainer_worker.epoch_file import EpochFile
from trainer_worker.front import FrontDoor, call_name, observed
from trainer_worker.liveness import Budgets, Doing, WorkerProgress
from trainer_worker.metrics import WorkerFacts, WorkerMetrics
from trainer_worker.service import ServiceConfig, StorePort, TrainerService, handlers_of
from trainer_worker.status_server import StatusServer
from trainer_worker.watcher import ThreadWatcher, Watcher
from trainer_worker.worker import Worker, WorkerConfig

log = logging.getLogger("prestage.worker")

RPC_THREADS = 16
MAX_CALLS = 256
"""Running and queued ones. Streams that are refused wait here for a moment: control must fit beside."""


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
    tls_dir: Path | None = None  # None: plain text.
    token_dir: Path | None = None  # None: no tokens.
    tls_server_name: str = ""
    shared_memory: bool = True  # Offer the shared-memory plane to callers on this host.
    upload_first_s: float = FIRST_S  # A PutMicroBatch sends its header within this.
    upload_silent_s: float = SILENT_S  # From one message of a PutMicroBatch to the next.
    grace_s: float = 30.0
    budgets: Budgets = field(default_factory=Budgets)


def _slots() -> WorkerSlots | None:
    try:
        return WorkerSlots()
    except SharedMemoryUnavailable as error:
        log.warning("payloads come by stream only: %s", error)
        return None


class WorkerServer:
    """One worker process: takes its addresses, answers STARTING, and serves once it has an engine."""

    def __init__(
        self,
        config: ServerConfig,
        parts: EngineParts | None = None,
        *,
        clock: Clock | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        """Binds both ports; serves `parts` if given, else once `serve` brings them.

        Raises `AddressError`, `InsecureAddress`, `SecurityError`, `FolderError`,
        `StateFolderError`.
        """
        health_listen = config.health_listen or status_address(config.listen)
        self.security = Security(
            SecurityConfig(
                tls_dir=config.tls_dir,
                token_dir=config.token_dir,
                server_name=config.tls_server_name,
                insecure=config.insecure,
            )
        )
        for flag, address in (("--listen", config.listen), ("--health_listen", health_listen)):
            check_address(flag, address)
            try:
                self.security.check_listen(flag, address)
            except AddressError as error:
                raise InsecureAddress(str(error)) from error
            check_free(flag, address)
        self._config = config
        self._clock = clock or RealClock()
        self._given_watcher = watcher
        self.incarnation = secrets.token_hex(8)
        self.health_address = health_listen
        self._service: TrainerService | None = None
        self._worker: Worker | None = None
        self._trace: TraceWriter | None = None
        self._slots: WorkerSlots | None = None
        self._front = FrontDoor(self.incarnation)
        self.guard = self.security.guard(self._on_refused)
        self._server = make_server(RPC_THREADS, name="rpc", guard=self.guard, max_calls=MAX_CALLS)
        self._server.add_generic_rpc_handlers((self._front,))
        self.port = bind(self._server, "--listen", config.listen, guard=self.guard)
        self.status = StatusServer(self.state, health_listen, guard=self.guard)
        # After the addresses: a second worker must not touch the first one's folders.
        self._lock: FolderLock | None = None
        if config.state_dir is not None:
            self._lock = FolderLock("--state_dir", config.state_dir, owner="a trainer_worker")
        if config.trace_dir is not None:
            check_writable_folder("--trace_dir", config.trace_dir)
        self.progress = WorkerProgress(config.budgets, self._doing)
        self._epochs = EpochFile(config.state_dir)
        self._store = MicroBatchStore(config.store_memory_bytes, self._next_needed)
        self.metrics = WorkerMetrics(
            self.state,
            facts=self._facts,
            store=self._store.stats,
            staging_budget_bytes=config.staging_memory_bytes,
        )
        self.metrics.security.watch(self.security.tls, self.guard.connections)
        if parts is not None:
            self.serve(parts)

    def serve(self, parts: EngineParts) -> None:
        """The engine is there: from now on calls are carried out."""
        config, clock = self._config, self._clock
        if config.trace_dir is not None:
            self._trace = TraceWriter(
                config.trace_dir / f"worker-{self.incarnation}.ndjson",
                side="worker",
                clock_origin_s=time.time() - time.monotonic(),
            )
        self._worker = worker = Worker(
            parts=parts,
            store=StorePort(self._store),
            watcher=self._given_watcher or ThreadWatcher(clock, self._on_device),
            clock=clock,
            incarnation=self.incarnation,
            config=WorkerConfig(
                staging_memory_bytes=config.staging_memory_bytes,
                weight_sync_memory_bytes=config.weight_sync_memory_bytes,
            ),
            first_epoch=self._epochs.epoch,
            on_save=self._on_save,
        )
        self._slots = _slots() if config.shared_memory else None
        self._service = TrainerService(
            worker=worker,
            store=self._store,
            device=DeviceThread(on_change=self.progress.made),
            epochs=self._epochs,
            clock=clock,
            config=ServiceConfig(
                staging_memory_bytes=config.staging_memory_bytes,
                limits=WireLimits(),
                upload_first_s=config.upload_first_s,
                upload_silent_s=config.upload_silent_s,
            ),
            trace=self._trace,
            slots=self._slots,
            on_put=self.metrics.on_put,
        )
        self._front.open(observed(handlers_of(self._service), self.metrics.on_call))
        self.progress.made()
        self.status.set_serving(True)

    @property
    def service(self) -> TrainerService:
        """Raises `RuntimeError` before `serve`."""
        if self._service is None:
            raise RuntimeError("the worker has no engine yet: call serve first")
        return self._service

    def state(self) -> pb.WorkerState:
        """The state now, also while the engine loads. Safe from any thread."""
        return self._front.state() if self._service is None else self._service.state()

    def _doing(self) -> Doing:
        service, worker = self._service, self._worker
        if service is None or worker is None:
            return Doing(lifecycle=Lifecycle.STARTING, call="", in_flight=0)
        return Doing(
            lifecycle=service.lifecycle,
            call=service.busy_with,
            in_flight=worker.watcher.in_flight(),
        )

    def _facts(self) -> WorkerFacts:
        worker = self._worker
        if worker is None:
            return WorkerFacts()
        return WorkerFacts(
            counters=worker.counters,
            in_flight=worker.watcher.in_flight(),
            staged_bytes=worker.snapshot().staged_bytes,
        )

    def _on_refused(self, service: str, method: str, reason: Reason) -> None:
        del service
        self.metrics.on_call(call_name(method), reason.value, reason.value, 0.0)

    def _on_save(self, durable: bool, seconds: float) -> None:
        self.status.set_checkpoints(durable)
        self.metrics.on_save(durable, seconds)

    def _on_device(self, record: DeviceRecord) -> None:
        """On the watcher's threads."""
        if self._trace is not None:
            self._trace.write(record)
        self.progress.made()
        self.metrics.on_device(record)
        if record.kind == "fwd_bwd" and record.index == 0 and self._worker is not None:
            idle_seconds = self._worker.watcher.facts(record.step - 1).idle_seconds
            if idle_seconds >= 0:
                self.metrics.on_boundary(idle_seconds)

    def _next_needed(self) -> tuple[int, int]:
        if self._worker is None:
            return 0, 0
        step = self._worker.snapshot().session.step
        return step.step, step.micro_step

    def start(self) -> None:
        self._server.start()
        self.status.start()

    def stop(self, *, abandon_compile: bool = False) -> bool:
        """Not serving, finish the running call, let go of the device. False: the grace ran out.

        `abandon_compile`: do not wait for a compile; for a process that exits next.
        """
        self.status.set_serving(False)
        drained = self._service is None or self._service.drain(
            self._config.grace_s, abandon_compile=abandon_compile
        )
        # Handlers still answer what the drained calls returned.
        self._server.stop(1.0).wait()
        self.status.stop(0.5).wait()
        if self._slots is not None:
            self._slots.close()
        if self._trace is not None:
            self._trace.close()
        if self._lock is not None:
            self._lock.release()
        if not drained:
            log.error("the device did not come to rest within %.0f s", self._config.grace_s)
        return drained
