"""`kill -TERM` at any moment: status 0 within the grace, and the run goes on to the same parameters."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from orchestrator.bench.synthetic import SyntheticShape
from orchestrator.plan import RunPlan
from orchestrator.ports import Answer, Observer
from orchestrator.runner import Patience
from prestage.admin.v1 import admin_pb2, admin_pb2_grpc
from prestage.trace import TraceRecord
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.wire.channel import open_channel
from tests.operation.process import (
    GRACE_S,
    PATIENCE_S,
    Process,
    flags,
    goes_on,
    reached,
    running,
    state_of,
    train,
    wait_until,
    worker,
)
from tests.support.rig import RunResult, address_of, run_against, served, socket_folder

SHAPE = SyntheticShape(micro_batches=3)
PLAN = RunPlan(num_steps=3, pipeline=True, checkpoint_every=1)
PATIENCE = Patience(data_s=60.0, unreachable_s=120.0, backoff_s=0.02)


@pytest.fixture(scope="module", name="undisturbed")
def _undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run that nobody disturbs: of the timed engine, so at any speed."""
    plan = RunPlan(num_steps=PLAN.num_steps)
    with served() as server:
        return run_against(address_of(server), plan, shape=SHAPE).digest


def driven(folder: Path, plan: RunPlan = PLAN, *observers: Observer) -> Future[RunResult]:
    """A run on a thread of this process, which outlives its worker."""
    pool = ThreadPoolExecutor(1)
    made = pool.submit(
        run_against,
        f"unix://{folder}/w.sock",
        plan,
        shape=SHAPE,
        patience=PATIENCE,
        observers=observers,
    )
    pool.shutdown(wait=False)
    return made


def ends_well(process: Process) -> None:
    code, seconds = process.terminate()
    assert code == 0, process.output
    assert seconds < GRACE_S
    assert "Traceback" not in process.output


STATES: dict[str, tuple[tuple[str, ...], Callable[[pb.WorkerState], bool]]] = {
    # An hour's compile is not waited for: nothing is lost with it.
    "compile": (
        ("--timed_compile_s=3600",),
        lambda state: state.lifecycle == pb.LIFECYCLE_COMPILING,
    ),
    "compute": (
        ("--timed_fwd_bwd_s=0.3",),
        lambda state: state.step == 1 and state.running_call.startswith("fwd_bwd"),
    ),
    # The save was answered, the step after it trains, and nothing is durable yet.
    "checkpoint": (
        ("--timed_checkpoint_s=2",),
        lambda state: state.step == 1 and state.micro_step >= 1 and state.durable_step == -1,
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_the_worker_ends_and_a_successor_goes_on(name: str, undisturbed: str) -> None:
    speed, true = STATES[name]
    with socket_folder() as folder:
        with worker(folder, *flags(folder, *speed)) as process:
            run = driven(folder)
            before = reached(folder, name, true)
            ends_well(process)
        with worker(folder, *flags(folder)):
            if name == "checkpoint":
                assert state_of(folder).durable_step == 1, "the drain waited for the save"
            result = run.result(timeout=PATIENCE_S)
            assert state_of(folder).incarnation != before.incarnation
        assert result.digest == undisturbed


def test_an_idle_worker_ends_at_once_with_the_status_that_it_was_given(undisturbed: str) -> None:
    two = RunPlan(num_steps=2, checkpoint_every=1)
    with socket_folder() as folder:
        with worker(folder, *flags(folder, "--interrupted_exit_code=75")) as process:
            driven(folder, two).result(timeout=PATIENCE_S)
            reached(folder, "idle", lambda state: not state.running_call and not state.in_flight)
            code, seconds = process.terminate()
            assert (code, seconds < 5) == (75, True), process.output
        with worker(folder, *flags(folder)):
            assert driven(folder).result(timeout=PATIENCE_S).digest == undisturbed


class OnceDispatched:
    """SIGTERM to the worker at hand when step 1's second micro-batch was answered: it computes."""

    def __init__(self) -> None:
        self.worker: Process | None = None
        self.sent = threading.Event()

    def on_call(self, record: TraceRecord, answer: Answer) -> None:
        del answer
        here = record.call.startswith("fwd_bwd") and (record.step, record.index) == (1, 1)
        if here and self.worker is not None and not self.sent.is_set():
            self.worker.popen.send_signal(signal.SIGTERM)
            self.sent.set()

    def on_note(self, note: object) -> None:
        del note

    def on_state(self, state: object) -> None:
        del state


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_jax_worker_ends_in_a_compile_and_in_a_computation() -> None:
    with socket_folder() as calm, socket_folder() as folder:
        with worker(calm, *flags(calm), engine="jax"):
            expected = driven(calm).result(timeout=PATIENCE_S).digest
        once = OnceDispatched()
        with worker(folder, *flags(folder), engine="jax") as process:
            run = driven(folder, PLAN, once)
            reached(folder, "compile", lambda state: state.lifecycle == pb.LIFECYCLE_COMPILING)
            ends_well(process)
        with worker(folder, *flags(folder), engine="jax") as process:
            once.worker = process
            assert once.sent.wait(PATIENCE_S)
            assert process.wait(GRACE_S) == 0, process.output
        with worker(folder, *flags(folder), engine="jax"):
            assert run.result(timeout=PATIENCE_S).digest == expected


# -- the orchestrator -----------------------------------------------------------------------------


def test_the_orchestrator_ends_in_the_middle_of_a_step_and_goes_on_there(trained: object) -> None:
    with socket_folder() as folder, worker(folder, *flags(folder, "--timed_fwd_bwd_s=0.2")):
        with running(folder / "o.log", *train(folder, "--grace_s=20")) as process:
            reached(folder, "step 1", lambda state: state.step == 1 and state.micro_step >= 1)
            code, seconds = process.terminate()
            assert (code, seconds < 10) == (0, True), process.output
            assert "start it again with the same flags to go on" in process.output
        assert state_of(folder).step == 1, "nothing was undone"
        goes_on(folder, trained)


@pytest.mark.slow
def test_a_call_that_outlasts_the_grace_is_left_to_be_settled(trained: object) -> None:
    """The orchestrator is gone within its grace; the worker finishes the call all the same."""
    with socket_folder() as folder, worker(folder, *flags(folder, "--timed_fwd_bwd_s=1.2")):
        with running(folder / "o.log", *train(folder, "--grace_s=0.6")) as process:
            # The third waits for one of two slots on the device: a call of more than a second.
            reached(folder, "a long call", lambda s: s.micro_step == 2 and bool(s.running_call))
            code, seconds = process.terminate()
            assert (code, seconds < 5) == (0, True), process.output
            assert "is not waited for any longer" in process.output
        goes_on(folder, trained)


def test_a_compile_is_not_waited_for() -> None:
    with (
        socket_folder() as folder,
        worker(folder, *flags(folder, "--timed_compile_s=3600")),
        running(folder / "o.log", *train(folder, "--interrupted_exit_code=75")) as process,
    ):
        reached(folder, "compile", lambda state: state.lifecycle == pb.LIFECYCLE_COMPILING)
        code, seconds = process.terminate()
        assert (code, seconds < 5) == (75, True), process.output


def test_an_orchestrator_that_waits_for_its_worker_ends_at_once() -> None:
    with (
        socket_folder() as folder,
        running(folder / "o.log", *train(folder, "--trainer_wait_s=600")) as process,
    ):
        wait_until(lambda: "waiting for the worker" in process.output, "it waits")
        code, seconds = process.terminate()
        assert (code, seconds < 5) == (0, True), process.output
        assert "Traceback" not in process.output


def test_r21_a_signal_to_the_main_process_reaches_python_while_it_loads() -> None:
    """SIGTERM before anything is served: the process has nothing to finish and ends at once."""
    with socket_folder() as folder:
        command = [
            "-m",
            "trainer_worker.main",
            "--engine=jax",
            "--preset=tiny",
            f"--listen=unix://{folder}/w.sock",
        ]
        with running(folder / "w.log", *command) as process:
            socket = folder / "w.sock.health"
            wait_until(socket.exists, "the status port is there")
            reached(folder, "an answer", lambda state: bool(state.incarnation))
            code, seconds = process.terminate()
            assert (code, seconds < 10) == (0, True), process.output


def test_d10_a_live_run_that_waits_for_its_producers_ends_and_is_opened_again() -> None:
    """No step was trained: nothing is waited for that will never come."""
    with socket_folder() as folder, worker(folder, *flags(folder)):
        command = [
            "-m",
            "orchestrator.main",
            f"--trainer=unix://{folder}/w.sock",
            f"--listen=unix://{folder}/rollouts.sock",
            f"--journal_dir={folder}/journal",
            "--num_steps=2",
            "--noprogress",
            f"--health_listen=unix://{folder}/a.sock",
        ]
        for name in ("first", "second"):
            with running(folder / f"{name}.log", *command) as process:
                wait_until(lambda: waits(folder), "it waits for data")
                code, seconds = process.terminate()
                assert (code, seconds < 10) == (0, True), process.output
                assert "Traceback" not in process.output


def waits(folder: Path) -> bool:
    """Whether the orchestrator on this admin port has nothing to train."""
    with open_channel(f"unix://{folder}/a.sock") as channel:
        stub = admin_pb2_grpc.OrchestratorAdminStub(channel)
        try:
            status = stub.Status(admin_pb2.StatusRequest(), timeout=10).status
        except grpc.RpcError:
            return False
    return status.state == admin_pb2.RUN_STATE_WAITING_FOR_DATA
