"""`trainer_worker`: one trainer behind the step protocol."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from absl import app, flags

from prestage.strict_flags import define_strict_bool
from prestage.wire.channel import AddressError, forbid_fork, tune_allocator
from trainer_worker.engines.errors import EngineConfigError
from trainer_worker.engines.registry import ENGINES, create_engine
from trainer_worker.epoch_file import StateFolderError
from trainer_worker.metrics import serve
from trainer_worker.server import InsecureAddress, ServerConfig, WorkerServer

log = logging.getLogger("prestage.worker")

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
_GRACE = flags.DEFINE_float("grace_s", 30.0, "Seconds to finish the running call at SIGTERM.")
_READY = flags.DEFINE_string("ready_file", "", "Written when serving; empty: none.")
_METRICS = flags.DEFINE_integer(
    "metrics_port",
    0,
    "Prometheus metrics on this loopback port; 0 = off.",
    lower_bound=0,
    upper_bound=65535,
)
_INSECURE = define_strict_bool(
    "insecure", False, "Serve plain text on an address that other hosts can reach."
)
_SHARED = define_strict_bool(
    "shared_memory", True, "Offer shared memory to an orchestrator on this host."
)


def _config() -> ServerConfig:
    if not _LISTEN.value:
        raise AddressError("--listen is not set: give unix:///path or host:port")
    return ServerConfig(
        listen=_LISTEN.value,
        health_listen=_HEALTH.value or "",
        state_dir=Path(_STATE_DIR.value) if _STATE_DIR.value else None,
        trace_dir=Path(_TRACE_DIR.value) if _TRACE_DIR.value else None,
        store_memory_bytes=_STORE.value,
        staging_memory_bytes=_STAGING.value,
        weight_sync_memory_bytes=_SYNC.value,
        insecure=bool(_INSECURE.value),
        grace_s=_GRACE.value,
        shared_memory=bool(_SHARED.value),
    )


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        print(f"trainer_worker: unexpected argument {argv[1]!r}; see --help", file=sys.stderr)  # noqa: T201
        return 2
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    stop = threading.Event()
    loading = threading.Event()

    def on_signal(*_: object) -> None:
        stop.set()
        if loading.is_set():
            os._exit(0)  # Nothing is running and nothing was promised: there is nothing to finish.

    # Before any server runs, so that no SIGTERM is lost.
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    tune_allocator()
    forbid_fork()
    stop_metrics: Callable[[], None] = lambda: None  # noqa: E731
    server: WorkerServer | None = None
    try:
        config = _config()
        server = WorkerServer(config)
        if _METRICS.value:
            stop_metrics = _serve_metrics(server, _METRICS.value)
        server.start()
        loading.set()
        parts = create_engine(_ENGINE.value)
        loading.clear()
        server.serve(parts)
    except (
        AddressError,
        InsecureAddress,
        StateFolderError,
        EngineConfigError,
    ) as error:
        loading.clear()
        if server is not None:
            server.stop()
        print(f"trainer_worker: {error}", file=sys.stderr)  # noqa: T201
        return 2
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
    log.info("stopping: finishing the running call")
    return _end(server, stop_metrics, config.grace_s)


def _serve_metrics(server: WorkerServer, port: int) -> Callable[[], None]:
    try:
        return serve(server.metrics, port)
    except OSError as error:
        raise AddressError(f"--metrics_port is {port}: {error.strerror or error}") from error


def _end(server: WorkerServer, stop_metrics: Callable[[], None], grace_s: float) -> int:
    """Stop within the grace, whatever the device does."""
    outcome: list[bool] = []
    stopping = threading.Thread(target=lambda: outcome.append(server.stop()), daemon=True)
    stopping.start()
    stopping.join(timeout=grace_s + STOP_MARGIN_S)
    if outcome == [True]:
        stop_metrics()
        return 0
    # RPC threads wait for a call that does not end, and a normal exit would wait for them.
    log.error("exiting with a call unfinished: its caller cannot know what became of it")
    logging.shutdown()
    os._exit(1)


def run() -> None:
    """Console script."""
    app.run(lambda argv: sys.exit(main(argv)))


if __name__ == "__main__":
    run()
