"""Everything beside the run, put together: control, board, probes, metrics, admin port, status page.

`app.run` uses the parts that touch the run; `main` starts it before anything else and closes it last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType

from orchestrator.calls import Send
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.operation.admin import AdminServer
from orchestrator.operation.board import RunBoard, RunBudgets
from orchestrator.operation.control import ControlledClock, ControlledFeeder, RunControl, RunStopped
from orchestrator.operation.ending import Ending
from orchestrator.operation.flags import OperationConfig
from orchestrator.operation.status_page import status_pages
from orchestrator.ports import FeederPort
from prestage.operation.folders import check_writable_file, check_writable_folder
from prestage.operation.heartbeat import Heartbeat, end_process
from prestage.operation.pages import PageServer, metrics_page
from prestage.operation.probes import Probes
from prestage.wire.security import Guard, Security

log = logging.getLogger("prestage.orchestrator")


class Operation:
    """One process's operation. A context manager: entering binds every address, leaving lets go."""

    def __init__(
        self,
        config: OperationConfig | None = None,
        *,
        budgets: RunBudgets | None = None,
        security: Security | None = None,
    ) -> None:
        """`config`: None serves nothing; for runs inside another program. `security`: None = plain."""
        self._config = config or OperationConfig()
        self.security = security or Security()
        self._guards: list[Guard] = []
        self.control = RunControl()
        self.board = RunBoard(self.control, budgets=budgets)
        self.clock = ControlledClock(self.control)
        self.metrics = OrchestratorMetrics()
        self.metrics.run.staging = lambda: self.board.staging
        self.board.live = self.metrics.live.reading
        self.metrics.watch_data_wait(lambda: self.board.data_wait_seconds)
        self.ending = Ending(
            self.control,
            grace_s=self._config.process.grace_s,
            exit_code=self._config.process.interrupted_exit_code,
            hopeless=lambda: self.board.compiling,
        )
        self.heartbeat: Heartbeat | None = None
        self.probes: Probes | None = None
        self.admin: AdminServer | None = None
        self._closing: list[Callable[[], object]] = []

    # -- for the run ------------------------------------------------------------------------------

    def before_send(self, send: Send) -> None:
        """The runner's hook: a pause waits here, a stop raises `RunStopped`."""
        self.control.before_send(send)
        if send.resend:
            self.metrics.run.resent(send.call.value)
        self.board.calling(send)

    def feeder(self, feeder: FeederPort) -> ControlledFeeder:
        return ControlledFeeder(feeder, self.control, self.board)

    def guard(self) -> Guard:
        """For one of the process's servers; what it refuses is counted."""
        guard = self.security.guard(
            lambda service, method, reason: self.metrics.refused(service, reason.value)
        )
        self._guards.append(guard)
        connections = (item.connections for item in self._guards)
        self.metrics.security.watch(self.security.tls, *connections)
        return guard

    # -- for the process --------------------------------------------------------------------------

    def __enter__(self) -> Operation:
        """Raises `AddressError`, `FolderError`: one line each, before anything is trained."""
        config, process = self._config, self._config.process
        if config.trace_dir is not None:
            check_writable_folder("--trace_dir", config.trace_dir)
        if config.result_file is not None:
            check_writable_file("--result_file", config.result_file)
        try:
            self._start_watching(process.probe_listen)
            if process.metrics is not None:
                pages = {"/metrics": metrics_page(self.metrics.registry)}
                self._closing.append(PageServer(process.metrics_flag, process.metrics, pages).stop)
            if config.status is not None:
                page = PageServer("--status_listen", config.status, status_pages(self.board.view))
                self._closing.append(page.stop)
            if config.health_listen:
                self.security.check_listen("--health_listen", config.health_listen)
                self.admin = AdminServer(
                    config.health_listen,
                    view=self.board.view,
                    control=self.control,
                    stop=self.ending.begin,
                    guard=self.guard(),
                )
                self.admin.start()
                self.admin.set_serving(True)
                self._closing.append(self._stop_admin)
        except BaseException:
            self.close()
            raise
        return self

    def _start_watching(self, probe_listen: str) -> None:
        heartbeat = Heartbeat(self.board.progress, end=end_process)
        self.heartbeat = heartbeat
        self._closing.append(heartbeat.stop)
        if probe_listen:
            probes = Probes(probe_listen, heartbeat)
            self.probes = probes
            self._closing.append(probes.stop)
            probes.start()
        heartbeat.start()
        self.board.on_change = heartbeat.beat
        self.metrics.watch_liveness(
            lambda: heartbeat.age_s, lambda: heartbeat.allowance_s, self._probe_restarts
        )

    def _probe_restarts(self) -> int:
        return 0 if self.probes is None else self.probes.restarts

    def _stop_admin(self) -> None:
        assert self.admin is not None
        self.admin.set_serving(False)
        self.admin.stop(0.5).wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del kind, error, trace
        self.close()

    def close(self) -> None:
        self.ending.ended()
        self.board.on_change = lambda: None
        while self._closing:
            self._closing.pop()()

    def stopped(self, error: Exception) -> bool:
        """Whether the run ended because it was asked to, whatever its last words are."""
        reason = self.control.stop_reason
        if not reason:
            return False
        if not isinstance(error, RunStopped):
            log.warning("while stopping: %s: %s", type(error).__name__, error)
        log.info("stopped (%s): start it again with the same flags to go on", reason)
        return True
