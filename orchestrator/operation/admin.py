"""The admin port: status, pause, resume, stop; gRPC health, reflection and channelz. Its own threads."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from typing import Final

import grpc
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from orchestrator.operation.board import RunState, RunView
from orchestrator.operation.control import RunControl
from orchestrator.steps import StepRecord
from prestage.admin.v1 import admin_pb2 as pb
from prestage.admin.v1 import admin_pb2_grpc as pb_grpc
from prestage.operation.addresses import check_free
from prestage.protocol import Reason
from prestage.wire.channel import CONTROL_ONLY, ServerGuard, bind, make_server
from prestage.wire.errors import abort_with
from prestage.wire.stream_slots import StreamGate, StreamSlots

SERVICE: Final = "prestage.admin.v1.OrchestratorAdmin"
CHANNELZ: Final = "grpc.channelz.v1.Channelz"
THREADS: Final = 4
STEPS_SHOWN: Final = 16

_STATES: Final = {
    RunState.STARTING: pb.RUN_STATE_STARTING,
    RunState.COMPILING: pb.RUN_STATE_COMPILING,
    RunState.TRAINING: pb.RUN_STATE_TRAINING,
    RunState.WAITING_FOR_DATA: pb.RUN_STATE_WAITING_FOR_DATA,
    RunState.PAUSING: pb.RUN_STATE_PAUSING,
    RunState.PAUSED: pb.RUN_STATE_PAUSED,
    RunState.FINISHING: pb.RUN_STATE_FINISHING,
    RunState.STOPPING: pb.RUN_STATE_STOPPING,
}


def _step_of(record: StepRecord) -> pb.StepStatus:
    summary = record.summary
    return pb.StepStatus(
        step=record.step,
        seconds=record.seconds,
        micro_steps=record.micro_steps,
        train_step=record.train_step,
        boundary_idle_seconds=record.boundary_idle_seconds,
        stage_seconds=record.stage_seconds,
        device_wait_seconds=record.device_wait_seconds,
        staged_input_used=record.staged_input_used,
        loss=record.metrics.get("loss", math.nan),
        reward_mean=math.nan if summary is None else summary.reward_mean,
    )


def status_of(view: RunView) -> pb.RunStatus:
    """The board as the service tells it."""
    status = pb.RunStatus(
        run_id=view.run_id,
        state=_STATES[view.state],
        doing=view.doing,
        progress_age_seconds=view.age_s,
        progress_allowance_seconds=view.allowance_s,
        trainer=view.trainer,
        num_steps=view.num_steps,
        refusals=view.refusals,
        notes=view.notes,
        last_note=view.last_note,
        queue=pb.QueueStatus(put_bytes=view.put_bytes, put_retries=view.put_retries),
        steps=[_step_of(record) for record in view.steps[-STEPS_SHOWN:]],
        stop_reason=view.stop_reason,
        uptime_seconds=view.now_s - view.started_s,
        pid=os.getpid(),
    )
    live = view.live
    if live is not None:
        status.queue.live.CopyFrom(
            pb.LiveQueue(
                waiting_groups=live.queue_depth,
                incomplete_groups=live.incomplete_groups,
                producers=live.producers,
                queue_bytes=live.queue_bytes,
                queue_budget_bytes=live.queue_budget_bytes,
                journal_bytes=live.journal_bytes,
                journal_budget_bytes=live.journal_budget_bytes,
                journal_lag_seconds=live.journal_lag_seconds,
                producer_wait_seconds=live.producer_wait_seconds,
            )
        )
    boundary = view.boundary
    if boundary is not None:
        mirror = boundary.mirror
        status.incarnation = boundary.incarnation
        status.epoch = boundary.epoch
        status.step = mirror.step
        status.micro_step = mirror.micro_step
        status.train_step = mirror.train_step
        status.phase = mirror.phase.value
        status.staging_latched = boundary.latched
        status.queue.ready_micro_batches = len(boundary.ready)
        if mirror.staged is not None:
            status.staged = f"{mirror.staged.step}/{mirror.staged.index}"
    return status


class _Admin(pb_grpc.OrchestratorAdminServicer):
    def __init__(
        self, view: Callable[[], RunView], control: RunControl, stop: Callable[[str], None]
    ) -> None:
        self._view = view
        self._control = control
        self._stop = stop

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusResponse:
        del request, context
        return pb.StatusResponse(status=status_of(self._view()))

    def Pause(self, request: pb.PauseRequest, context: grpc.ServicerContext) -> pb.PauseResponse:
        del request
        if not self._control.pause():
            abort_with(
                context,
                Reason.DRAINING,
                f"the run is stopping ({self._control.stop_reason}): it cannot be paused",
                {},
            )
        return pb.PauseResponse(status=status_of(self._view()))

    def Resume(self, request: pb.ResumeRequest, context: grpc.ServicerContext) -> pb.ResumeResponse:
        del request, context
        self._control.resume()
        return pb.ResumeResponse(status=status_of(self._view()))

    def Stop(self, request: pb.StopRequest, context: grpc.ServicerContext) -> pb.StopResponse:
        del request
        self._stop(f"stop asked by {context.peer().rstrip(':')}")
        return pb.StopResponse(status=status_of(self._view()))


class AdminServer:
    """Serves on the admin port. Not serving (as health tells it) until told otherwise."""

    def __init__(
        self,
        address: str,
        *,
        view: Callable[[], RunView],
        control: RunControl,
        stop: Callable[[str], None],
        guard: ServerGuard | None = None,
        flag: str = "--health_listen",
    ) -> None:
        """Binds at once. `guard`: certificates and tokens. Raises `AddressError`."""
        check_free(flag, address)
        # Streams of requests (reflection) get two of the threads at most: health has the others.
        gate = StreamGate(StreamSlots(2))
        self._server = make_server(
            THREADS, name="admin", guard=guard, interceptors=(gate,), changes=CONTROL_ONLY
        )
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        pb_grpc.add_OrchestratorAdminServicer_to_server(_Admin(view, control, stop), self._server)
        channelz.add_channelz_servicer(self._server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, CHANNELZ, reflection.SERVICE_NAME),
            self._server,
        )
        self.set_serving(False)
        self.port = bind(self._server, flag, address, guard=guard)

    def start(self) -> None:
        self._server.start()

    def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    def stop(self, grace_s: float) -> threading.Event:
        return self._server.stop(grace_s)
