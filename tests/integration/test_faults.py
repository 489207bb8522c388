"""Faults at every call of a run: the reply lost, the request lost, the worker killed.

The timed engine's parameters are a hash chain of what it applied, so any doubled, lost or reordered
micro-batch shows. Each disturbed run must end with the undisturbed run's parameters.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from orchestrator.bench.synthetic import SyntheticShape, SyntheticSource
from orchestrator.calls import Lost, Send
from orchestrator.feeder import SourceError, StepFeed, always
from orchestrator.plan import RunPlan
from orchestrator.ports import Answer, StepFacts
from orchestrator.runner import Patience, RunFailed
from orchestrator.trainer_client import TrainerClient
from prestage.protocol import BatchRef, Call, Reason, Request
from prestage.trainer.v1 import trainer_pb2 as pb
from tests.support.rig import address_of, run_against, served, socket_folder
from trainer_worker.clock import RealClock, VirtualClock
from trainer_worker.engine import CompileSpec, EngineParts, RunPosition
from trainer_worker.engines.timed import TimedConfig, TimedEngine, create_timed
from trainer_worker.server import ServerConfig, WorkerServer
from trainer_worker.sessions import CallKey
from trainer_worker.watcher import InlineWatcher
from trainer_worker.worker import CallResult, Work, Worker

STEPS, MICRO_BATCHES = 3, 2
SHAPE = SyntheticShape(micro_batches=MICRO_BATCHES)
FAST = TimedConfig(fwd_bwd_seconds=0.002, update_seconds=0.0005, copy_seconds=0.0005)
ARMS = {
    "stock": RunPlan(num_steps=STEPS, checkpoint_every=1),
    "staged": RunPlan(
        num_steps=STEPS, checkpoint_every=1, pipeline=True, stage=True, latch_after=1000
    ),
    "zero_gap": RunPlan(
        num_steps=STEPS, pipeline=True, stage=True, dispatch_before_metrics=True, latch_after=1000
    ),
}


class Site:
    """Where a worker lives: one address, one state folder; it can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = self._start()

    def _start(self) -> WorkerServer:
        parts = create_timed(FAST, RealClock(), self.folder / "checkpoints")
        server = WorkerServer(
            ServerConfig(listen=f"unix://{self.folder}/w.sock", state_dir=self.folder / "state"),
            parts,
        )
        server.start()
        return server

    def restart(self) -> None:
        """A new process with nothing but the folders, as far as callers can tell."""
        self.server.stop()
        self.server = self._start()


@contextlib.contextmanager
def site() -> Iterator[Site]:
    with socket_folder() as folder:
        made = Site(folder)
        try:
            yield made
        finally:
            made.server.stop()


class Disturbed:
    """A `TrainerPort` that does something to one call."""

    def __init__(
        self, inner: TrainerClient, at: int, fault: Callable[[TrainerClient, Send, str], Answer]
    ) -> None:
        self._inner = inner
        self._left = at
        self._fault = fault
        self.calls = 0

    def call(self, send: Send, *, data_cursor: str) -> Answer:
        self.calls += 1
        self._left -= 1
        if self._left == -1:
            return self._fault(self._inner, send, data_cursor)
        return self._inner.call(send, data_cursor=data_cursor)

    def read_metrics(self, from_step: int, count: int) -> tuple[StepFacts, ...]:
        return self._inner.read_metrics(from_step, count)

    def in_flight(self) -> int:
        return self._inner.in_flight()


def undisturbed(plan: RunPlan) -> tuple[str, int]:
    """(parameter digest, calls made)."""
    with site() as here:
        result = run_against(address_of(here.server), plan, shape=SHAPE)
        return result.digest, len(result.recorder.records)


def disturbed(plan: RunPlan, at: int, kind: str) -> str:
    with site() as here:

        def fault(inner: TrainerClient, send: Send, cursor: str) -> Answer:
            if kind == "reply lost":
                inner.call(send, data_cursor=cursor)
            if kind == "killed after":
                inner.call(send, data_cursor=cursor)
            if kind.startswith("killed"):
                here.restart()
            return Answer(event=Lost(why=f"{kind} in the test"))

        result = run_against(
            address_of(here.server),
            plan,
            shape=SHAPE,
            wrap_trainer=lambda client: Disturbed(client, at, fault),
        )
        state = here.server.service.state()
        assert (state.step, state.train_step) == (STEPS, STEPS)
        return result.digest


@pytest.mark.parametrize(
    "kind",
    [
        "reply lost",
        "request lost",
        pytest.param("killed before", marks=pytest.mark.slow),
        pytest.param("killed after", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("arm", ARMS)
def test_d2_r2_r10_a_fault_at_every_call_changes_no_parameter(arm: str, kind: str) -> None:
    plan = ARMS[arm]
    wanted, calls = undisturbed(plan)
    assert calls > STEPS * MICRO_BATCHES
    for at in range(calls):
        assert disturbed(plan, at, kind) == wanted, f"{kind} at call {at} of {calls}"


def test_d3_a_checkpoint_holds_its_own_step_only() -> None:
    prefix = {}
    for steps in range(1, STEPS + 1):
        with site() as here:
            plan = RunPlan(num_steps=steps)
            prefix[steps] = run_against(address_of(here.server), plan, shape=SHAPE).digest
    with site() as here:
        run_against(address_of(here.server), ARMS["staged"], shape=SHAPE)
        here.restart()  # Which waits until the last save is durable.
        for steps, digest in prefix.items():
            engine = TimedEngine(FAST, VirtualClock(), here.folder / "checkpoints")
            position = engine.restore(steps)
            assert position is not None
            assert (position.step, position.train_step) == (steps, steps)
            assert engine.parameter_digest() == digest


def test_d4_r7_a_resumed_run_goes_on_with_the_first_untrained_step() -> None:
    wanted, _ = undisturbed(RunPlan(num_steps=4))
    with site() as here:
        run_against(address_of(here.server), RunPlan(num_steps=2, checkpoint_every=1), shape=SHAPE)
        here.restart()
        plan = RunPlan(num_steps=4, checkpoint_every=1)
        result = run_against(address_of(here.server), plan, shape=SHAPE)
        trained = [r.step for r in result.recorder.records if r.call.startswith("fwd_bwd")]
        assert trained == [2, 2, 3, 3]
        assert result.digest == wanted
        again = run_against(address_of(here.server), plan, shape=SHAPE)
        assert not [r for r in again.recorder.records if r.call.startswith("fwd_bwd")]
        assert again.digest == wanted


@pytest.mark.parametrize("arm", ARMS)
def test_a_worker_restarted_while_data_is_waited_for_is_noticed(arm: str) -> None:
    """The put finds it out first; the runner has no call to make and must be told to ask."""
    wanted, _ = undisturbed(ARMS[arm])
    with site() as here:

        class Restarting(SyntheticSource):
            restarts = 0

            def open_step(
                self, step: int, *, wanted: Callable[[], bool] = always
            ) -> StepFeed | None:
                if step == 1 and not self.restarts:
                    self.restarts += 1
                    here.restart()
                return super().open_step(step, wanted=wanted)

        source = Restarting(SHAPE, "run")
        result = run_against(address_of(here.server), ARMS[arm], source=source, shape=SHAPE)
        assert source.restarts == 1
        assert result.digest == wanted


class Broken(SyntheticSource):
    def open_step(self, step: int, *, wanted: Callable[[], bool] = always) -> StepFeed | None:
        if step == 1:
            raise SourceError("the producers are gone (planned)")
        return super().open_step(step, wanted=wanted)


def test_r12_a_dead_producer_ends_the_run_with_its_reason() -> None:
    with served() as server, pytest.raises(RunFailed, match="the producers are gone"):
        run_against(
            address_of(server), RunPlan(num_steps=3), source=Broken(SHAPE, "run"), shape=SHAPE
        )


class Stalled(SyntheticSource):
    def open_step(self, step: int, *, wanted: Callable[[], bool] = always) -> StepFeed | None:
        if step == 1:
            threading.Event().wait(3)
        return super().open_step(step, wanted=wanted)


def test_c10_a_source_that_gives_nothing_ends_the_run_in_bounded_time() -> None:
    with served() as server, pytest.raises(RunFailed, match="rollout producers"):
        run_against(
            address_of(server),
            RunPlan(num_steps=3),
            source=Stalled(SHAPE, "run"),
            shape=SHAPE,
            patience=Patience(data_s=0.2),
        )


def test_a_source_that_ends_early_ends_the_run_with_its_last_step() -> None:
    class Short(SyntheticSource):
        def open_step(self, step: int, *, wanted: Callable[[], bool] = always) -> StepFeed | None:
            return None if step >= 2 else super().open_step(step, wanted=wanted)

    staged = RunPlan(num_steps=9, pipeline=True, stage=True, latch_after=1000)
    for plan in (RunPlan(num_steps=9), staged, replace(staged, dispatch_before_metrics=True)):
        with served() as server:
            result = run_against(address_of(server), plan, source=Short(SHAPE, "run"), shape=SHAPE)
            assert [record.step for record in result.book.records()][:2] == [0, 1]
            assert server.service.state().step == 2


class Full(TimedEngine):
    def begin_save(self, position: RunPosition):  # type: ignore[no-untyped-def]
        save = super().begin_save(position)

        def wait() -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        save.wait = wait  # type: ignore[method-assign]
        return save


def test_r32_a_background_save_that_fails_ends_the_run(tmp_path: Path) -> None:
    engine = Full(FAST, RealClock(), tmp_path)
    with served(EngineParts(training=engine, checkpoint=engine)) as server:
        with pytest.raises(RunFailed, match=r"CHECKPOINT_FAILED.*No space left"):
            run_against(address_of(server), ARMS["stock"], shape=SHAPE)
        state = server.service.state()
        assert "No space left" in state.background_failure
        assert state.durable_step == -1


def test_r31_a_restore_with_nothing_to_restore_is_an_error(tmp_path: Path) -> None:
    from orchestrator.bench.conformance.driver import Driver, Refused

    with served(create_timed(FAST, RealClock(), tmp_path)) as server:
        driver = Driver(address=address_of(server))
        driver.open()
        with pytest.raises(Refused) as refused:
            driver.call(Call.RESTORE_CHECKPOINT)
        assert refused.value.reason is Reason.CHECKPOINT_MISSING
        assert refused.value.refusal.code is grpc.StatusCode.NOT_FOUND
        driver.close()


def test_d18_a_pinned_version_does_not_change_with_the_next_update() -> None:
    from orchestrator.bench.conformance.driver import Driver

    with served() as server:
        driver = Driver(address=address_of(server))
        driver.open()
        driver.call(Call.COMPILE)
        for step in range(2):
            driver.put(driver.batch(step, 0))
        driver.call(Call.FWD_BWD_APPLY, 0, 0)
        driver.call(Call.PREPARE_WEIGHT_SYNC)

        def export() -> list[pb.ExportWeightsResponse]:
            request = pb.ExportWeightsRequest(run_id="run", epoch=driver.epoch, version=1)
            return list(driver.stub.ExportWeights(request, timeout=10))

        before = export()
        driver.call(Call.FWD_BWD_APPLY, 1, 0)
        assert export() == before
        assert before[0].manifest.version == 1
        chunks = b"".join(part.chunk for part in before)
        assert len(chunks) == before[0].manifest.total_bytes == before[-1].end.total_bytes
        driver.close()


def test_e10_ten_thousand_steps_keep_memory_flat() -> None:
    clock = VirtualClock()
    engine = TimedEngine(FAST, clock)
    batch = SyntheticSource(SHAPE, "run")
    del batch

    class OneBatch:
        """A store with one micro-batch under every name."""

        def get(self, ref: BatchRef):  # type: ignore[no-untyped-def]
            from orchestrator.bench.synthetic import make_batch

            return made[0] if made else made.append(make_batch(SHAPE, "run", 0, 0)) or made[0]

        def release(self, ref: BatchRef) -> None:
            del ref

        def release_before(self, step: int) -> None:
            del step

        def clear(self) -> None:
            return

        def stored(self) -> tuple[tuple[BatchRef, ...], int, int]:
            return (), 0, 1

    made: list = []  # type: ignore[type-arg]
    worker = Worker(
        parts=EngineParts(training=engine),
        store=OneBatch(),
        watcher=InlineWatcher(),
        clock=clock,
        incarnation="i",
    )
    worker.open_run("run", 1)
    seq = 0

    def call(request: Request, work: Work | None = None) -> None:
        nonlocal seq
        seq += 1
        key = CallKey(run_id="run", incarnation="i", epoch=1, seq=seq)
        assert isinstance(worker.call(key, request, work or Work()), CallResult)

    call(
        Request(call=Call.COMPILE),
        Work(compile_spec=CompileSpec(rows=2, tokens_per_row=64, fields=())),
    )

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            ref = BatchRef(step=step, index=0, digest="d")
            call(Request(call=Call.FWD_BWD_APPLY, batch=ref))

    steps(0, 2000)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    steps(2000, 10_000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert worker.snapshot().session.step.train_step == 10_000
    assert after - before < 200_000, f"{after - before} bytes grew over 8,000 steps"


@pytest.mark.parametrize("when", ["idle", "computing"])
def test_r23_r47_sigterm_drains_and_exits_0(when: str, tmp_path: Path) -> None:
    from orchestrator.bench.conformance.driver import Driver

    with socket_folder() as folder:
        ready = folder / "ready"
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "trainer_worker.main",
                "--engine=timed",
                "--timed_fwd_bwd_s=0.5",
                f"--listen=unix://{folder}/w.sock",
                f"--ready_file={ready}",
                f"--state_dir={tmp_path}",
            ]
        )
        try:
            clock = RealClock()
            deadline_s = clock.now() + 60
            while not ready.exists():
                assert process.poll() is None and clock.now() < deadline_s
                clock.sleep_until(clock.now() + 0.02)
            driver = Driver(address=f"unix://{folder}/w.sock")
            driver.open()
            outcome: list[object] = []
            if when == "computing":
                driver.call(Call.COMPILE)
                for index in range(3):
                    driver.put(driver.batch(0, index))
                driver.call(Call.FWD_BWD, 0, 0)
                driver.call(Call.FWD_BWD, 0, 1)
                # The third waits for a free slot on the device: it is running when SIGTERM comes.
                thread = threading.Thread(
                    target=lambda: outcome.append(driver.call(Call.FWD_BWD_APPLY, 0, 2))
                )
                thread.start()
                while not driver.state().running_call:
                    assert clock.now() < deadline_s
                process.send_signal(signal.SIGTERM)
                thread.join(timeout=30)
                assert isinstance(outcome[0], pb.FwdBwdResponse), "the running call was lost"
            else:
                process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0
            driver.close()
        finally:
            process.kill()
            process.wait()
