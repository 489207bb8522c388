"""A follower as a process: signals, heartbeat, probes, metrics, exit status. Serves no calls."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping

from prestage.operation.flags import ProcessConfig
from prestage.operation.heartbeat import Heartbeat, end_process
from prestage.operation.pages import PageServer, metrics_page
from prestage.operation.probes import Probes
from prestage.operation.signals import hear_signals
from prestage.wire.channel import AddressError, forbid_fork, tune_allocator
from prestage.wire.security import Security, SecurityConfig, SecurityError
from trainer_worker.engines.errors import EngineConfigError
from trainer_worker.hosts.errors import JoinRefused
from trainer_worker.hosts.group import HostBudgets
from trainer_worker.hosts.metrics import FollowerMetrics
from trainer_worker.hosts.run import Create, FollowerProcess, FollowerProgress
from trainer_worker.hosts.settings import HostSettings

log = logging.getLogger("prestage.hosts")


def follow(
    settings: HostSettings,
    process: ProcessConfig,
    *,
    shared: Mapping[str, str],
    budgets: HostBudgets,
    store_bytes: int,
    security: SecurityConfig,
    create: Create,
) -> int:
    """A follower's whole life; returns its exit status. On the main thread.

    A SIGTERM only starts the grace: the leader ends the group in order, and a follower that left
    first would take the running call with it.
    """
    interrupted = threading.Event()

    def on_signal(name: str) -> None:
        log.info("%s: following until the leader ends, %g s at most", name, process.grace_s)
        interrupted.set()
        if progress.read().started:
            time.sleep(process.grace_s)
            log.error("the leader did not end within the grace: leaving it")
        logging.shutdown()
        os._exit(process.interrupted_exit_code)

    progress = FollowerProgress(budgets)
    heartbeat = Heartbeat(progress.read, end=end_process)
    probes: Probes | None = None
    pages: PageServer | None = None
    try:
        hear_signals(on_signal)
        tune_allocator()
        forbid_fork()
        if process.probe_listen:
            probes = Probes(process.probe_listen, heartbeat)
            probes.start()
        follower = FollowerProcess(
            settings,
            shared,
            budgets=budgets,
            store_bytes=store_bytes,
            progress=progress,
            security=Security(security),
        )
        if process.metrics is not None:
            metrics = FollowerMetrics(heartbeat, lambda: follower.shard_bytes)
            shown = {"/metrics": metrics_page(metrics.registry)}
            pages = PageServer(process.metrics_flag, process.metrics, shown)
        progress.on_progress = heartbeat.beat
        heartbeat.start()
        follower.run(create)
    except (AddressError, SecurityError, EngineConfigError, JoinRefused) as error:
        print(f"trainer_worker: {error}", file=sys.stderr)  # noqa: T201
        return 2
    finally:
        heartbeat.stop()
        if probes is not None:
            probes.stop()
        if pages is not None:
            pages.stop()
    log.info("stopped: the leader ended the group")
    return process.interrupted_exit_code if interrupted.is_set() else 0
