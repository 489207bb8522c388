"""From its start to its end: STARTING, one caller's epoch, answers that explain themselves, SIGTERM."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import generate_latest

from orchestrator.bench.conformance.driver import Driver, Refused, answer_of
from orchestrator.check_trace import check_traces
from prestage.protocol import Call, Phase, Reason
from prestage.trace import read_trace
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.trainer.v1 import trainer_pb2_grpc as pb_grpc
from prestage.wire.channel import AddressError, open_channel
from prestage.wire.errors import Refusal, classify
from tests.support.rig import FAST, address_of, served, socket_folder
from tests.worker.test_exactly_once import GatedEngine, ready
from trainer_worker.clock import RealClock
from trainer_worker.device_thread import DeviceThread
from trainer_worker.engine import EngineError, EngineParts, InvalidBatch
from trainer_worker.engines.timed import TimedConfig, TimedEngine, create_timed
from trainer_worker.server import ServerConfig, WorkerServer
from trainer_worker.service import MAX_UPLOADS
from trainer_worker.status_server import CHECKPOINTS

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health(server: WorkerServer, name: str = "") -> int:
    with open_channel(server.health_address) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=10).status)


# -- starting -------------------------------------------------------------------------------------


@contextmanager
def starting() -> Iterator[WorkerServer]:
    with socket_folder() as folder:
        server = WorkerServer(ServerConfig(listen=f"unix://{folder}/w.sock", grace_s=5))
        server.start()
        try:
            yield server
        finally:
            server.stop()


def test_r16_r26_while_the_engine_loads_every_call_says_starting() -> None:
    with starting() as server:
        driver = Driver(address=address_of(server))
        attempts = [
            driver.open,
            lambda: driver.call(Call.COMPILE),
            lambda: driver.put(driver.batch(0, 0)),
            lambda: driver.read(Call.GET_METRICS, 0),
            lambda: answer_of(
                lambda: driver.stub.GetCapabilities(pb.GetCapabilitiesRequest(), timeout=5)
            ),
        ]
        for attempt in attempts:
            with pytest.raises(Refused) as refused:
                attempt()
            assert refused.value.reason is Reason.STARTING
            assert refused.value.refusal.code is grpc.StatusCode.FAILED_PRECONDITION
        state = driver.state()
        assert state.lifecycle == pb.LIFECYCLE_STARTING
        assert state.incarnation == server.incarnation
        with open_channel(server.health_address) as channel:
            there = pb_grpc.TrainerStatusStub(channel).GetState(pb.GetStateRequest(), timeout=5)
        assert there.state.lifecycle == pb.LIFECYCLE_STARTING
        assert health(server) == NOT_SERVING

        server.serve(create_timed(FAST, RealClock()))
        assert health(server) == SERVING
        assert driver.state().lifecycle == pb.LIFECYCLE_SERVING
        ready(driver)
        driver.call(Call.FWD_BWD_APPLY, 0, 0)
        assert driver.incarnation == server.incarnation
        driver.close()


def test_r46_a_second_worker_fails_before_its_engine_is_loaded() -> None:
    with starting() as server, pytest.raises(AddressError, match="already listens"):
        WorkerServer(ServerConfig(listen=address_of(server)))


def test_a_method_that_does_not_exist_is_unimplemented() -> None:
    with starting() as server, open_channel(address_of(server)) as channel:
        call = channel.unary_unary("/prestage.trainer.v1.Nothing/GetState")
        with pytest.raises(grpc.RpcError) as failed:
            call(b"", timeout=5)
        assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED


# -- one caller -----------------------------------------------------------------------------------


def test_r20_two_callers_that_open_at_once_never_share_an_epoch() -> None:
    """Their answers are made after both took effect: each must still tell its own epoch."""
    engine = GatedEngine()
    with served(EngineParts(training=engine)) as server:
        driver = ready(Driver(address=address_of(server)))
        engine.gate.clear()
        running = threading.Thread(target=lambda: driver.call(Call.FWD_BWD, 0, 0))
        running.start()
        assert engine.entered.wait(10)
        device = server.service._device
        futures = []
        for count in range(1, 5):
            futures.append(driver.stub.OpenRun.future(pb.OpenRunRequest(run_id="run"), timeout=30))
            while device.waiting < count:
                threading.Event().wait(0.002)
        engine.gate.set()
        running.join(timeout=30)
        epochs = [future.result().state.epoch for future in futures]
        assert epochs == [2, 3, 4, 5], "in the order in which they came, each its own"
        assert driver.state().epoch == 5
        driver.close()


def test_r20_an_open_run_whose_caller_left_does_not_fence_off_the_one_that_stayed() -> None:
    engine = GatedEngine()
    with served(EngineParts(training=engine)) as server:
        driver = ready(Driver(address=address_of(server)))
        engine.gate.clear()
        running = threading.Thread(target=lambda: driver.call(Call.FWD_BWD, 0, 0))
        running.start()
        assert engine.entered.wait(10)
        left = driver.stub.OpenRun.future(pb.OpenRunRequest(run_id="run"), timeout=30)
        device = server.service._device
        while device.waiting < 1:
            threading.Event().wait(0.002)
        left.cancel()
        # Its own queued call comes after the open_run: that it runs shows that nothing was opened.
        second = threading.Thread(
            target=lambda: driver.call(Call.FWD_BWD, 0, 1, seq=driver.seq + 2)
        )
        second.start()
        while device.waiting < 2:
            threading.Event().wait(0.002)
        engine.gate.set()
        running.join(timeout=30)
        second.join(timeout=30)
        state = driver.state()
        assert (state.epoch, state.micro_step) == (1, 2)
        driver.close()


def test_a_call_answers_the_state_of_its_own_key() -> None:
    with served() as server:
        driver = ready(Driver(address=address_of(server)))
        first = driver.call(Call.FWD_BWD, 0, 0)
        driver.call(Call.FWD_BWD, 0, 1)
        again = driver.call(Call.FWD_BWD, 0, 0, seq=driver.seq - 1)
        assert isinstance(first, pb.FwdBwdResponse) and isinstance(again, pb.FwdBwdResponse)
        assert first.state == again.state
        assert (again.state.last_seq, again.state.micro_step) == (driver.seq - 1, 1)
        driver.close()


def test_the_device_thread_keeps_the_order_of_each_kind() -> None:
    device, gate, order = DeviceThread(), threading.Event(), list[str]()
    first = device.submit("first", gate.wait)
    jobs = [("a", False), ("open 1", True), ("b", False), ("open 2", True)]
    for name, urgent in jobs:
        device.submit(name, lambda name=name: order.append(name), urgent=urgent)  # type: ignore[misc]
    gate.set()
    assert device.drain(10)
    assert first.result() is True
    assert order == ["open 1", "open 2", "a", "b"]


# -- every answer explains itself -----------------------------------------------------------------


def refusal_of(call: object) -> Refusal:
    """The worker's own answer; fails for a bare transport error."""
    with pytest.raises((grpc.RpcError, Refused)) as failed:
        call()  # type: ignore[operator]
    error = failed.value
    outcome = error.refusal if isinstance(error, Refused) else classify(error)
    assert isinstance(outcome, Refusal), f"no ErrorInfo: {outcome}"
    return outcome


class Broken(TimedEngine):
    def parameter_digest(self) -> str:
        raise RuntimeError("the device is gone")

    def evaluate(self, batch):  # type: ignore[no-untyped-def]
        raise EngineError("out of memory")

    def export_tensor(self, version: int, name: str):  # type: ignore[no-untyped-def]
        raise OSError("bad read")


@pytest.fixture
def broken() -> Iterator[tuple[WorkerServer, Driver]]:
    engine = Broken(FAST, RealClock())
    parts = EngineParts(training=engine, scoring=engine, weights=engine)
    with served(parts) as server:
        driver = ready(Driver(address=address_of(server)))
        yield server, driver
        driver.close()


def test_a_digest_that_cannot_be_read_is_an_engine_failure(
    broken: tuple[WorkerServer, Driver],
) -> None:
    _, driver = broken
    refusal = refusal_of(driver.digest)
    assert refusal.reason is Reason.ENGINE_FAILED
    assert "the device is gone" in refusal.message
    assert driver.phase is Phase.FAILED


def test_a_failed_evaluation_poisons_the_step(broken: tuple[WorkerServer, Driver]) -> None:
    _, driver = broken
    driver.call(Call.FWD_BWD, 0, 0)
    assert refusal_of(lambda: driver.read(Call.EVALUATE, 0, 1)).reason is Reason.ENGINE_FAILED
    assert driver.phase is Phase.FAILED
    driver.call(Call.ABORT_STEP)
    driver.call(Call.FWD_BWD, 0, 0)


def test_a_failed_export_says_so_and_leaves_the_step_alone(
    broken: tuple[WorkerServer, Driver],
) -> None:
    _, driver = broken
    driver.call(Call.FWD_BWD_APPLY, 0, 0)
    driver.call(Call.PREPARE_WEIGHT_SYNC)
    request = pb.ExportWeightsRequest(run_id="run", epoch=driver.epoch, version=1)
    refusal = refusal_of(lambda: list(driver.stub.ExportWeights(request, timeout=10)))
    assert refusal.reason is Reason.ENGINE_FAILED
    assert driver.phase is Phase.CLOSED


def test_scoring_before_compile_is_refused_and_changes_nothing() -> None:
    with served() as server:
        driver = Driver(address=address_of(server))
        driver.open()
        driver.put(driver.batch(0, 0))
        for call in (Call.EVALUATE, Call.COMPUTE_LOGPROBS):
            assert refusal_of(lambda c=call: driver.read(c, 0, 0)).reason is Reason.NOT_COMPILED  # type: ignore[misc]
        assert driver.phase is Phase.CLOSED
        driver.close()


def test_a_shape_that_the_engine_cannot_train_is_refused_before_anything_changed() -> None:
    class Picky(TimedEngine):
        def compile(self, spec):  # type: ignore[no-untyped-def]
            raise InvalidBatch("field 'old_logprobs' is missing")

    with served(EngineParts(training=Picky(FAST, RealClock()))) as server:
        driver = Driver(address=address_of(server))
        driver.open()
        refusal = refusal_of(lambda: driver.call(Call.COMPILE))
        assert refusal.reason is Reason.INVALID_REQUEST
        assert "old_logprobs" in refusal.message
        assert (driver.phase, driver.state().last_seq) == (Phase.CLOSED, 0)
        driver.close()


def test_an_epoch_that_cannot_be_written_is_not_given_out(tmp_path: Path) -> None:
    with served(state_dir=tmp_path / "state") as server:
        driver = ready(Driver(address=address_of(server)))
        shutil.rmtree(tmp_path / "state")
        (tmp_path / "state").write_text("in the way")
        other = Driver(address=address_of(server))
        refusal = refusal_of(other.open)
        assert refusal.reason is Reason.EPOCH_NOT_DURABLE
        assert str(tmp_path) in refusal.message
        driver.call(Call.FWD_BWD, 0, 0)  # Whoever trains goes on.
        driver.close()
        other.close()


def test_pinned_versions_share_one_memory_budget() -> None:
    with served(weight_sync_memory_bytes=100) as server:  # One version of the engine has 64 bytes.
        driver = ready(Driver(address=address_of(server)), steps=3)
        driver.call(Call.FWD_BWD_APPLY, 0, 0)
        driver.call(Call.PREPARE_WEIGHT_SYNC)
        driver.call(Call.PREPARE_WEIGHT_SYNC)  # The same version: the same memory.
        driver.call(Call.FWD_BWD_APPLY, 1, 0)
        refusal = refusal_of(lambda: driver.call(Call.PREPARE_WEIGHT_SYNC))
        assert refusal.reason is Reason.WEIGHT_SYNC_MEMORY
        assert "64 of 100 bytes" in refusal.message
        driver.call(Call.RELEASE_WEIGHT_SYNC)
        driver.call(Call.PREPARE_WEIGHT_SYNC)
        driver.close()


def test_parameters_that_moved_without_a_version_are_suspect() -> None:
    config = TimedConfig(fwd_bwd_seconds=0.001, fuses_update=True)
    with served(create_timed(config, RealClock())) as server:
        driver = ready(Driver(address=address_of(server)))
        assert "UPDATE_FUSED" in refusal_of(lambda: driver.call(Call.FWD_BWD_DEFER, 0, 0)).message
        driver.seq += 1
        state = driver.state()
        assert (state.train_step, state.parameters_suspect) == (0, True)
        assert refusal_of(lambda: driver.call(Call.ABORT_STEP)).reason is Reason.PARAMETERS_SUSPECT
        driver.close()


def test_r29_control_never_waits_for_uploads() -> None:
    """Puts that wait for room take threads, but never all of them."""
    with served(store_memory_bytes=512) as server:
        driver = Driver(address=address_of(server))
        driver.open()
        driver.call(Call.COMPILE)
        driver.put(driver.batch(0, 0))  # The next one always finds room; now the store is full.
        stuck = [
            threading.Thread(target=lambda i=i: _try(lambda: other.put(driver.batch(1, i))))  # type: ignore[misc]
            for i in range(MAX_UPLOADS)
        ]
        other = replace(driver, timeout_s=60.0)
        for thread in stuck:
            thread.start()
        while server._store.stats().waited < MAX_UPLOADS:
            threading.Event().wait(0.005)
        refusal = refusal_of(lambda: driver.put(driver.batch(1, 99)))
        assert refusal.reason is Reason.TOO_MANY_UPLOADS
        driver.call(Call.FWD_BWD, 0, 0)
        other.channel.close()
        driver.call(Call.ABORT_STEP)
        for thread in stuck:
            thread.join(timeout=30)
            assert not thread.is_alive()
        driver.close()


def _try(call: object) -> None:
    with contextlib.suppress(grpc.RpcError, Refused, ValueError):
        call()  # type: ignore[operator]


# -- times, traces, metrics, health ---------------------------------------------------------------


def test_an_update_that_waits_is_not_counted_as_dispatch() -> None:
    """An engine that replays inside its update waits for the last micro-batch there."""
    config = replace(FAST, fwd_bwd_seconds=0.15, replays=frozenset({(0, 0)}), replay_seconds=0.001)
    with served(create_timed(config, RealClock())) as server:
        driver = ready(Driver(address=address_of(server)))
        response = driver.call(Call.FWD_BWD_APPLY, 0, 0)
        assert isinstance(response, pb.FwdBwdResponse)
        assert response.update.update_seconds >= 0.14
        assert response.dispatch_seconds <= 0.1
        assert response.update.dropless_replays == 1
        driver.close()


def test_the_trace_says_who_opened_the_run_and_what_was_scored(tmp_path: Path) -> None:
    with served(trace_dir=tmp_path) as server:
        driver = ready(Driver(address=address_of(server)))
        driver.call(Call.FWD_BWD, 0, 0)
        driver.read(Call.EVALUATE, 0, 1)
        with pytest.raises(Refused):
            driver.call(Call.UPDATE, seq=99)
        driver.call(Call.FWD_BWD_APPLY, 0, 1)
        with pytest.raises(Refused):
            replace(driver, run_id="another").open()
        driver.close()
    [path] = tmp_path.glob("worker-*.ndjson")
    trace = read_trace(path)
    assert [(record.call, record.outcome, record.epoch) for record in trace.calls] == [
        ("open_run", "ok", 1),
        ("compile", "ok", 1),
        ("fwd_bwd", "ok", 1),
        ("evaluate", "ok", 1),
        ("update", "SEQUENCE_GAP", 1),
        ("fwd_bwd apply_optimizer", "ok", 1),
        ("open_run", "WRONG_RUN", 1),
    ]
    assert {record.kind for record in trace.device} == {"copy", "fwd_bwd", "update"}
    _, findings = check_traces([(path, trace)])
    assert not findings


def test_metrics_tell_phase_counts_device_time_and_boundaries() -> None:
    with served() as server:
        driver = ready(Driver(address=address_of(server)), steps=2)
        driver.call(Call.FWD_BWD_APPLY, 0, 0)
        driver.call(Call.FWD_BWD, 1, 0)
        with pytest.raises(Refused):
            driver.call(Call.APPLY_DEFERRED_UPDATE)
        server.service._worker.watcher.settle()
        # The last record leaves the watcher's thread just after it is done: let that thread end.
        assert server.service._worker.watcher.close(10)
        text = generate_latest(server.metrics.registry).decode()
        for line in (
            'prestage_worker_phase{phase="ACCUMULATING"} 1.0',
            'prestage_worker_phase{phase="CLOSED"} 0.0',
            'prestage_worker_lifecycle{state="SERVING"} 1.0',
            "prestage_worker_step 1.0",
            "prestage_worker_train_step 1.0",
            "prestage_worker_micro_step 1.0",
            "prestage_worker_updates_total 1.0",
            "prestage_worker_update_skipped_total 0.0",
            'prestage_worker_calls_total{call="fwd_bwd",code="OK"} 2.0',
            'prestage_worker_calls_total{call="apply_deferred_update",code="FAILED_PRECONDITION"} 1.0',
            'prestage_worker_refusals_total{call="apply_deferred_update",reason="NOTHING_DEFERRED"} 1.0',
            'prestage_worker_call_seconds_count{call="put_micro_batch"} 4.0',
            "prestage_worker_boundaries_total 1.0",
            'prestage_worker_compiles_total{when="warm_up"} 1.0',
            'prestage_worker_compiles_total{when="serving"} 0.0',
            "prestage_worker_inflight 0.0",
            "prestage_worker_staged_bytes 0.0",
            'prestage_worker_put_bytes_total{plane="shared-memory"} 0.0',
        ):
            assert f"\n{line}\n" in text, line
        [seconds] = re.findall(r'device_busy_seconds_total{kind="fwd_bwd"} (.*)', text)
        assert float(seconds) == pytest.approx(2 * FAST.fwd_bwd_seconds)
        [streamed] = re.findall(r'put_bytes_total{plane="stream"} (.*)', text)
        assert float(streamed) > 0
        driver.close()


def test_the_names_that_dashboards_use_are_the_workers(tmp_path: Path) -> None:
    """`deploy/metrics.json` lists what dashboards and alerts may name."""
    named = json.loads((Path(__file__).parents[2] / "deploy" / "metrics.json").read_text())
    wanted = {
        item["name"]: (item["type"], sorted(item["labels"]))
        for item in named
        if item["side"] == "trainer_worker"
    }
    with served() as server:
        driver = ready(Driver(address=address_of(server)))
        with pytest.raises(Refused):
            driver.call(Call.UPDATE)
        found = {}
        for family in server.metrics.registry.collect():
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            found[name] = (family.type, sorted(labels))
        driver.close()
    both = wanted.keys() & found.keys()
    assert len(both) >= 20
    assert {name: found[name] for name in both} == {name: wanted[name] for name in both}


def test_r32_a_failed_background_save_shows_in_health_under_its_own_name(tmp_path: Path) -> None:
    """A full disk is no reason to restart a trainer, so its own health stays good."""

    class Full(TimedEngine):
        full = True

        def begin_save(self, position):  # type: ignore[no-untyped-def]
            save = super().begin_save(position)
            if self.full:

                def wait() -> None:
                    raise OSError("No space left on device")

                save.wait = wait  # type: ignore[method-assign]
            return save

    engine = Full(FAST, RealClock(), tmp_path)
    with served(EngineParts(training=engine, checkpoint=engine)) as server:
        driver = ready(Driver(address=address_of(server)))
        driver.call(Call.FWD_BWD_APPLY, 0, 0)
        assert health(server, CHECKPOINTS) == SERVING
        driver.call(Call.SAVE_CHECKPOINT)
        while not driver.state().background_failure:
            threading.Event().wait(0.002)
        refusal = refusal_of(lambda: driver.call(Call.SAVE_CHECKPOINT))
        assert refusal.reason is Reason.CHECKPOINT_FAILED
        assert health(server, CHECKPOINTS) == NOT_SERVING
        assert health(server) == SERVING
        engine.full = False
        driver.call(Call.SAVE_CHECKPOINT)
        while driver.state().durable_step != 1:
            threading.Event().wait(0.002)
        driver.close()
    assert server.state().background_failure == ""


def test_r27_health_and_state_stay_fast_while_a_call_blocks() -> None:
    engine = GatedEngine()
    with served(EngineParts(training=engine)) as server:
        driver = ready(Driver(address=address_of(server)))
        engine.gate.clear()
        thread = threading.Thread(target=lambda: driver.call(Call.FWD_BWD, 0, 0))
        thread.start()
        assert engine.entered.wait(10)
        with open_channel(server.health_address) as channel:
            stub, status = health_pb2_grpc.HealthStub(channel), pb_grpc.TrainerStatusStub(channel)
            took = []
            for _ in range(200):
                started_s = time.perf_counter()
                assert stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status == SERVING
                state = status.GetState(pb.GetStateRequest(), timeout=10).state
                took.append((time.perf_counter() - started_s) / 2)
                assert state.running_call == "fwd_bwd"
        engine.gate.set()
        thread.join(timeout=30)
        p99_s = sorted(took)[int(len(took) * 0.99)]
        assert p99_s < 0.05, f"p99 {p99_s * 1e3:.1f} ms"
        driver.close()


# -- the process ----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Process:
    popen: subprocess.Popen[str]
    address: str

    def end(self, within_s: float) -> tuple[int, float]:
        """SIGTERM; (exit code, seconds)."""
        started_s = time.monotonic()
        self.popen.send_signal(signal.SIGTERM)
        code = self.popen.wait(timeout=within_s)
        return code, time.monotonic() - started_s


@contextmanager
def process(*arguments: str) -> Iterator[Process]:
    with socket_folder() as folder:
        popen = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "trainer_worker.main",
                "--engine=timed",
                f"--listen=unix://{folder}/w.sock",
                f"--ready_file={folder}/ready",
                *arguments,
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            give_up_s = time.monotonic() + 60
            while not (folder / "ready").exists():
                assert popen.poll() is None and time.monotonic() < give_up_s
                threading.Event().wait(0.02)
            yield Process(popen=popen, address=f"unix://{folder}/w.sock")
        finally:
            popen.kill()
            popen.communicate()


@pytest.mark.parametrize("count", [1, 3], ids=["computing", "blocked in a call"])
def test_r47_a_device_that_hangs_does_not_hold_up_the_exit(count: int) -> None:
    """Within the grace and a margin, and with a status that says that something was unfinished."""
    with process("--timed_fwd_bwd_s=1000", "--grace_s=1") as worker:
        driver = Driver(address=worker.address)
        driver.open()
        driver.call(Call.COMPILE)
        for index in range(count):
            driver.put(driver.batch(0, index))
        driver.timeout_s = 1.0
        for index in range(count):
            if index < 2:
                driver.call(Call.FWD_BWD, 0, index)
            else:  # Waits for a free slot on the device.
                with pytest.raises(grpc.RpcError):
                    driver.call(Call.FWD_BWD, 0, index)
        code, seconds = worker.end(within_s=30)
        assert code == 1
        assert seconds < 10, f"{seconds:.1f} s"
        driver.close()


def test_the_metrics_port_serves_and_a_taken_one_is_an_error() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with socket_folder() as folder:
            refused = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "trainer_worker.main",
                    "--engine=timed",
                    f"--listen=unix://{folder}/w.sock",
                    f"--metrics_port={port}",
                ],
                capture_output=True,
                text=True,
                timeout=60,
            )
        assert refused.returncode == 2
        assert f"--metrics_port: cannot listen on 127.0.0.1:{port}" in refused.stderr
    with process(f"--metrics_port={port}") as worker:
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()
        assert b'prestage_worker_lifecycle{state="SERVING"} 1.0' in page
        assert worker.end(within_s=30)[0] == 0
