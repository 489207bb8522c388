"""`trainer_worker`: one trainer behind the step protocol."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from absl import app, flags

from prestage.operation.flags import ProcessConfig, process_config
from prestage.operation.folders import FolderError
from prestage.operation.heartbeat import Heartbeat, end_process
from prestage.operation.help import own_help, parse_flags
from prestage.operation.logs import start_logs
from prestage.operation.pages import PageServer, metrics_page
from prestage.operation.probes import Probes
from prestage.operation.signals import hear_signals
from prestage.strict_flags import define_seconds, define_strict_bool
from prestage.wire.channel import AddressError, forbid_fork, raise_file_limit, tune_allocator
from prestage.wire.security import SecurityError
from prestage.wire.security_flags import security_config
from trainer_worker.engines.errors import EngineConfigError
from trainer_worker.engines.registry import ENGINES, create_engine
from trainer_worker.epoch_file import StateFolderError
from trainer_worker.hosts.errors import HostLost
from trainer_worker.hosts.flags import engine_settings, host_budgets, settings_from_flags
from trainer_worker.hosts.main import follow
from trainer_worker.hosts.run import Leader, end_lost
from trainer_worker.hosts.settings import HostSettings
from trainer_worker.liveness import Budgets
from trainer_worker.server import InsecureAddress, ServerConfig, WorkerServer

log = logging.getLogger("prestage.worker")

HELP: Final = """trainer_worker: one trainer behind the step protocol.

    trainer_worker --listen=unix:///run/worker.sock --state_dir=DIR --checkpoint_dir=DIR

Ends in order on SIGTERM. Exit status: 0 ended as asked, 1 a call was left unfinished, 2 a flag or an
address cannot be used, 70 the watchdog ended it, 71 a host of several was lost. See
docs/operations.md and, for several hosts, docs/multi-host.md.
"""
OWN_FLAGS: Final = (
    "__main__",
    "trainer_worker.main",
    "trainer_worker.engines.registry",
    "trainer_worker.engines.jax_flags",
    "trainer_worker.hosts.flags",
    "prestage.operation.flags",
    "prestage.wire.security_flags",
)
STOP_MARGIN_S: Final = 3.0
"""For what follows the drain: open handlers, sockets, files."""

_LISTEN = flags.DEFINE_string("listen", None, "Where to serve: unix:///path or host:port.")
_HEALTH = flags.DEFINE_string(
    "health_listen", "", "Status port. Default: the socket path + .health, or the port + 1."
)
_ENGINE = flags.DEFINE_enum("engine", "jax", ENGINES, "Trainer engine.")
_STATE_DIR = flags.DEFINE_string("state_dir", "", "Folder for the durable epoch; empty: in memory.")
_TRACE_DIR = flags.DEFINE_string("trace_dir", "", "Folder for NDJSON traces; empty: none.")
_STORE = flags.DEFINE_integer(
    "store_memory_bytes", 4 << 30, "Limit of put micro-batches, bytes.", lower_bound=1
)
_STAGING = flags.DEFINE_integer(
    "staging_memory_bytes", 1 << 30, "Limit of a staged input on the device, bytes.", lower_bound=0
)
_SYNC = flags.DEFINE_integer(
    "weight_sync_memory_bytes", 8 << 30, "Limit of a pinned version, bytes.", lower_bound=0
)
_COMPILE = define_seconds(
    "compile_budget_s", 7200.0, "Loading or compiling for longer than this is a hang, s."
)
_STALL = define_seconds(
    "stall_budget_s", 1800.0, "Any other call without progress for longer than this is a hang, s."
)
_READY = flags.DEFINE_string("ready_file", "", "Written when serving; empty: none.")
_INSECURE = define_strict_bool(
    "insecure", False, "Serve plain text on an address that other hosts can reach."
)
_SHARED = define_strict_bool(
    "shared_memory", True, "Offer shared memory to an orchestrator on this host."
)


def _budgets() -> Budgets:
    return Budgets(compile_s=_COMPILE.value, stall_s=_STALL.value)


def _follow(hosts: HostSettings, process: ProcessConfig) -> int:
    """One of several processes, and not the one that serves."""
    return follow(
        hosts,
        process,
        shared=engine_settings(_ENGINE.value),
        budgets=host_budgets(_budgets()),
        store_bytes=_STORE.value,
        security=security_config(insecure=bool(_INSECURE.value)),
        create=lambda where: create_engine(_ENGINE.value, where),
    )


def _leader(hosts: HostSettings, server: WorkerServer) -> Leader:
    return Leader(
        hosts,
        engine_settings(_ENGINE.value),
        incarnation=server.incarnation,
        budgets=host_budgets(_budgets()),
        guard=server.guard,
    )


def _config(grace_s: float) -> ServerConfig:
    if not _LISTEN.value:
        raise AddressError("--listen is not set: give unix:///path or host:port")
    security = security_config(insecure=bool(_INSECURE.value))
    return ServerConfig(
        listen=_LISTEN.value,
        health_listen=_HEALTH.value or "",
        state_dir=Path(_STATE_DIR.value) if _STATE_DIR.value else None,
        trace_dir=Path(_TRACE_DIR.value) if _TRACE_DIR.value else None,
        store_memory_bytes=_STORE.value,
        staging_memory_bytes=_STAGING.value,
        weight_sync_memory_bytes=_SYNC.value,
        insecure=security.insecure,
        tls_dir=security.tls_dir,
        token_dir=security.token_dir,
        tls_server_name=security.server_name,
        grace_s=grace_s,
        budgets=_budgets(),
        shared_memory=bool(_SHARED.value),
    )


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        print(f"trainer_worker: unexpected argument {argv[1]!r}; see --help", file=sys.stderr)  # noqa: T201
        return 2
    start_logs("trainer_worker")
    stop = threading.Event()
    loading = threading.Event()
    operated = _Operated()
    try:
        process = process_config()
        hosts = settings_from_flags(security_config(insecure=bool(_INSECURE.value)))
        if hosts is not None and not hosts.leads:
            return _follow(hosts, process)
        config = _config(process.grace_s)

        def on_signal(name: str) -> None:
            log.info("%s: stopping within %g s", name, process.grace_s)
            stop.set()
            if loading.is_set():
                # Nothing is running and nothing was promised: there is nothing to finish.
                _exit_now(process.interrupted_exit_code)

        # Before any server runs, so that no SIGTERM is lost.
        hear_signals(on_signal)
        tune_allocator()
        raise_file_limit()
        forbid_fork()
        server = WorkerServer(config)
        operated.server = server
        heartbeat = Heartbeat(server.progress.read, end=end_process)
        operated.heartbeat = heartbeat
        server.progress.on_progress = heartbeat.beat
        if process.probe_listen:
            operated.probes = Probes(process.probe_listen, heartbeat)
            operated.probes.start()
        server.metrics.watch_liveness(heartbeat, operated.probe_restarts)
        if process.metrics is not None:
            pages = {"/metrics": metrics_page(server.metrics.registry)}
            operated.pages = PageServer(process.metrics_flag, process.metrics, pages)
        if hosts is not None:
            operated.leader = _leader(hosts, server)
        server.start()
        heartbeat.start()
        loading.set()
        if operated.leader is None:
            parts = create_engine(_ENGINE.value)
        else:
            parts = operated.leader.load(lambda where: create_engine(_ENGINE.value, where))
        loading.clear()
        server.serve(parts)
    except (
        AddressError,
        InsecureAddress,
        SecurityError,
        FolderError,
        StateFolderError,
        EngineConfigError,
    ) as error:
        loading.clear()
        if operated.server is not None:
            operated.server.stop()
        operated.stop()
        print(f"trainer_worker: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except HostLost as error:
        end_lost(str(error))
        raise
    log.info(
        "trainer_worker ready: engine %s on %s, status on %s, incarnation %s",
        _ENGINE.value,
        config.listen,
        server.health_address,
        server.incarnation,
    )
    if _READY.value:
        Path(_READY.value).write_text(server.incarnation)
    stop.wait()
    return _end(server, operated, process.grace_s, process.interrupted_exit_code)


class _Operated:
    """What is watched and served beside the worker; taken apart in order."""

    def __init__(self) -> None:
        self.server: WorkerServer | None = None
        self.leader: Leader | None = None
        self.heartbeat: Heartbeat | None = None
        self.probes: Probes | None = None
        self.pages: PageServer | None = None

    def probe_restarts(self) -> int:
        return 0 if self.probes is None else self.probes.restarts

    def stop(self) -> None:
        if self.leader is not None:
            self.leader.stop()
        if self.heartbeat is not None:
            self.heartbeat.stop()
        if self.probes is not None:
            self.probes.stop()
        if self.pages is not None:
            self.pages.stop()


def _exit_now(code: int) -> None:
    """Without waiting for threads that cannot end."""
    logging.shutdown()
    os._exit(code)


def _end(server: WorkerServer, operated: _Operated, grace_s: float, exit_code: int) -> int:
    """Stop within the grace, whatever the device does."""
    outcome: list[bool] = []

    def work() -> None:
        outcome.append(server.stop(abandon_compile=True))

    stopping = threading.Thread(target=work, daemon=True)
    stopping.start()
    stopping.join(timeout=grace_s + STOP_MARGIN_S)
    if outcome != [True]:
        # RPC threads wait for a call that does not end, and a normal exit would wait for them.
        log.error("exiting with a call unfinished: its caller cannot know what became of it")
        _exit_now(1)
    if server.service.compiling:
        log.info("the running compile was given up: nothing is lost with it")
        _exit_now(exit_code)
    operated.stop()
    log.info("stopped: everything that was answered is kept, and the run can be resumed")
    return exit_code


def run() -> None:
    """Console script."""
    own_help(HELP, OWN_FLAGS)
    app.run(lambda argv: sys.exit(main(argv)), flags_parser=parse_flags)


if __name__ == "__main__":
    run()
