"""The admin port and the worker's status port, asked as stock tools ask them; and the command line."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from orchestrator.feeder import FeederCounters
from orchestrator.main import COMMANDS
from orchestrator.operation import cli
from orchestrator.operation.admin import SERVICE, AdminServer, status_of
from orchestrator.operation.board import RunBoard, RunState
from orchestrator.operation.control import RunControl
from orchestrator.plan import RunPlan
from orchestrator.steps import StepRecord
from prestage.admin.v1 import admin_pb2 as pb
from prestage.admin.v1 import admin_pb2_grpc as pb_grpc
from prestage.protocol import Reason
from prestage.wire.channel import open_channel
from prestage.wire.errors import Refusal, classify
from prestage.wire.security import Security, SecurityConfig
from tests.operation.process import (
    flags,
    goes_on,
    reached,
    running,
    state_of,
    train,
    wait_until,
    worker,
)
from tests.security.authority import token_folder
from tests.support.rig import address_of, served, socket_folder

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Served:
    """An admin port over a board that no run writes."""

    def __init__(self, folder: Path, security: Security | None = None) -> None:
        self.control = RunControl()
        self.board = RunBoard(self.control)
        self.stops: list[str] = []
        self.address = f"unix://{folder}/a.sock"
        self.server = AdminServer(
            self.address,
            view=self.board.view,
            control=self.control,
            stop=self._stop,
            guard=(security or Security()).guard(),
        )
        self.server.start()
        self.server.set_serving(True)

    def _stop(self, reason: str) -> None:
        self.stops.append(reason)
        self.control.stop(reason)


@pytest.fixture(name="admin")
def _admin() -> Iterator[Served]:
    with socket_folder() as folder:
        made = Served(folder)
        made.board.begin("run-1", "unix:///w.sock")
        made.board.running(RunPlan(num_steps=9), FeederCounters(put_bytes=3 << 20, put_retries=1))
        made.board.closed(StepRecord(step=0, started_s=1.0, finished_s=3.5, metrics={"loss": 0.25}))
        yield made
        made.server.stop(0).wait()


@contextlib.contextmanager
def stub(admin: Served) -> Iterator[pb_grpc.OrchestratorAdminStub]:
    with open_channel(admin.address) as channel:
        yield pb_grpc.OrchestratorAdminStub(channel)


# -- stock clients --------------------------------------------------------------------------------


def checked(channel: grpc.Channel, name: str = "") -> int:
    request = health_pb2.HealthCheckRequest(service=name)
    return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=10).status)


def services(channel: grpc.Channel) -> set[str]:
    """What `grpcurl list` shows."""
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
        iter([ask]), timeout=10
    )
    return {item.name for item in next(iter(answers)).list_services_response.service}


def called_by_reflection(channel: grpc.Channel, service: str, method: str) -> dict[str, object]:
    """A call whose messages are known from the server alone, as `grpcurl` makes it."""
    pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    found = pool.FindServiceByName(service).FindMethodByName(method)
    request = message_factory.GetMessageClass(found.input_type)()
    answer_class = message_factory.GetMessageClass(found.output_type)
    call = channel.unary_unary(
        f"/{service}/{method}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=answer_class.FromString,
    )
    answer = call(request, timeout=10)
    return {field.name: value for field, value in answer.ListFields()}


def test_the_admin_port_answers_stock_health_reflection_and_channelz(admin: Served) -> None:
    with open_channel(admin.address) as channel:
        assert checked(channel) == SERVING
        assert checked(channel, SERVICE) == SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            checked(channel, "nothing.v1.Nothing")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        assert services(channel) == {
            SERVICE,
            "grpc.channelz.v1.Channelz",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        status = called_by_reflection(channel, SERVICE, "Status")["status"]
        assert "run-1" in str(status)
        servers = channelz_pb2_grpc.ChannelzStub(channel).GetServers(
            channelz_pb2.GetServersRequest(start_server_id=0), timeout=10
        )
        # Of this process's servers, which other tests may have left some of.
        assert any(server.data.calls_started >= 1 for server in servers.server)
        admin.server.set_serving(False)
        assert checked(channel) == NOT_SERVING


def test_the_workers_status_port_answers_stock_health_and_reflection() -> None:
    with served() as server:
        with open_channel(server.health_address) as channel:
            assert checked(channel) == SERVING
            assert checked(channel, "prestage.trainer.v1.TrainerWorker") == SERVING
            found = services(channel)
            assert {"prestage.trainer.v1.TrainerStatus", "grpc.health.v1.Health"} <= found
            status = "prestage.trainer.v1.TrainerStatus"
            state = called_by_reflection(channel, status, "GetState")["state"]
            assert server.incarnation in str(state)
        with open_channel(address_of(server)) as channel:
            for call in (services, checked):
                with pytest.raises(grpc.RpcError) as refused:
                    call(channel)  # type: ignore[operator]
                assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED, "not on the main port"


@pytest.mark.skipif(shutil.which("grpcurl") is None, reason="no grpcurl on this machine")
def test_grpcurl_itself_lists_and_calls(admin: Served) -> None:
    def grpcurl(*words: str) -> str:
        path = admin.address.removeprefix("unix://")
        command = ["grpcurl", "-plaintext", "-unix", path, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    assert SERVICE in grpcurl("list")
    assert "RUN_STATE_TRAINING" in grpcurl(f"{SERVICE}/Status")
    assert "SERVING" in grpcurl("grpc.health.v1.Health/Check")


# -- the service ----------------------------------------------------------------------------------


def test_status_tells_what_the_board_holds(admin: Served) -> None:
    with stub(admin) as ask:
        status = ask.Status(pb.StatusRequest(), timeout=10).status
    assert (status.run_id, status.trainer, status.num_steps) == ("run-1", "unix:///w.sock", 9)
    assert status.state == pb.RUN_STATE_TRAINING
    assert (status.queue.put_bytes, status.queue.put_retries) == (3 << 20, 1)
    [step] = status.steps
    assert (step.step, step.seconds, step.loss) == (0, 2.5, 0.25)
    assert math.isnan(step.reward_mean) and step.boundary_idle_seconds == -1


def test_every_state_has_a_name_on_the_wire() -> None:
    names = {name.removeprefix("RUN_STATE_") for name in pb.RunState.DESCRIPTOR.values_by_name}
    assert names - {"UNSPECIFIED"} == {state.value for state in RunState}


def test_pause_resume_and_stop(admin: Served) -> None:
    with stub(admin) as ask:
        paused = ask.Pause(pb.PauseRequest(), timeout=10).status
        assert paused.state == pb.RUN_STATE_PAUSING and admin.control.pause_wanted
        again = ask.Pause(pb.PauseRequest(), timeout=10).status
        assert again.state == pb.RUN_STATE_PAUSING, "harmless to repeat"
        resumed = ask.Resume(pb.ResumeRequest(), timeout=10).status
        assert resumed.state == pb.RUN_STATE_TRAINING and not admin.control.pause_wanted
        stopping = ask.Stop(pb.StopRequest(), timeout=10).status
        assert stopping.state == pb.RUN_STATE_STOPPING
        assert admin.stops == ["stop asked by unix"] and stopping.stop_reason == admin.stops[0]
        with pytest.raises(grpc.RpcError) as refused:
            ask.Pause(pb.PauseRequest(), timeout=10)
        outcome = classify(refused.value)
        assert isinstance(outcome, Refusal) and outcome.reason is Reason.DRAINING


# -- the command line -----------------------------------------------------------------------------


def test_the_command_line_reads_well(admin: Served, capsys: pytest.CaptureFixture[str]) -> None:
    at = f"--admin={admin.address}"
    assert cli.status([at]) == 0
    text = capsys.readouterr().out
    assert text.startswith("run run-1: TRAINING (opening the run)\n")
    assert "3.0 MiB brought to the worker, 1 puts repeated" in text
    assert "step 0          2.5 s, 0 micro-batches, loss 0.25, boundary idle -" in text

    assert cli.status([at, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["state"], plain["num_steps"], plain["staged"]) == ("RUN_STATE_TRAINING", "9", "")

    assert cli.pause([at]) == 0
    assert "PAUSING" in capsys.readouterr().out
    assert cli.pause([at, "--wait_s=0.1"]) == 1, "no run is there to reach a boundary"
    assert cli.resume([at]) == 0
    assert cli.stop([at]) == 0
    assert "stopping    stop asked by unix" in capsys.readouterr().out
    assert cli.pause([at]) == 1
    assert "DRAINING" in capsys.readouterr().err


def test_with_tokens_a_reader_may_look_and_only_a_driver_may_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token_folder(tmp_path / "all")
    token_folder(tmp_path / "reader", ("read",))
    shutil.copy(tmp_path / "all" / "read", tmp_path / "reader" / "read")
    security = Security(SecurityConfig(token_dir=tmp_path / "all"))
    with socket_folder() as folder:
        admin = Served(folder, security)
        at = f"--admin={admin.address}"
        assert cli.status([at]) == 1, "no token"
        assert "UNAUTHENTICATED" in capsys.readouterr().err
        reader, driver = f"--token_dir={tmp_path / 'reader'}", f"--token_dir={tmp_path / 'all'}"
        assert cli.status([at, reader]) == 0
        assert cli.stop([at, reader]) == 2
        assert "drive" in capsys.readouterr().err
        assert not admin.stops
        assert cli.status([at, driver]) == 0
        assert cli.stop([at, driver]) == 0
        assert len(admin.stops) == 1
        admin.server.stop(0).wait()


def test_nobody_there_and_a_bad_address_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    with socket_folder() as folder:
        assert cli.status([f"--admin=unix://{folder}/none.sock"]) == 3
    assert "nobody answers at unix://" in capsys.readouterr().err
    assert cli.status(["--admin=somewhere"]) == 2
    assert "--admin is 'somewhere'" in capsys.readouterr().err


def test_every_command_of_the_program_exists() -> None:
    import importlib

    for target in COMMANDS.values():
        module, _, name = target.partition(":")
        assert callable(vars(importlib.import_module(module))[name or "main"]), target


def test_status_of_a_run_that_is_not_open_yet_has_no_phase() -> None:
    status = status_of(RunBoard(RunControl()).view())
    assert (status.state, status.phase, status.epoch) == (pb.RUN_STATE_STARTING, "", 0)


def test_a_real_run_is_paused_at_a_boundary_and_stopped_from_the_command_line(
    trained: object,
) -> None:
    """Processes throughout: paused before step 1, resumed, stopped, and trained to the end by another."""
    with socket_folder() as folder, worker(folder, *flags(folder, "--timed_fwd_bwd_s=0.3")):
        admin = f"--admin=unix://{folder}/a.sock"
        command = train(folder, f"--health_listen=unix://{folder}/a.sock")
        with running(folder / "o.log", *command) as process:
            reached(folder, "step 0 trains", lambda state: state.micro_step >= 1)
            assert cli.pause([admin, "--wait_s=60"]) == 0
            held = state_of(folder)
            assert (held.step, held.micro_step) == (1, 0)
            assert cli.resume([admin]) == 0
            reached(folder, "step 1 trains", lambda state: state.step > 1 or state.micro_step >= 1)
            assert cli.stop([admin, "--wait_s=60"]) == 0
            wait_until(lambda: process.popen.poll() is not None, "it ended")
            assert process.wait() == 0, process.output
        goes_on(folder, trained)
