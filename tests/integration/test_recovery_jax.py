"""Kill and recovery of the real jax engine over gRPC.

A worker replaced in the middle of a step, and one killed by SIGKILL, end with the undisturbed
run's parameters, and did resume from a checkpoint.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.bench.synthetic import SyntheticShape
from orchestrator.plan import RunPlan
from orchestrator.ports import Answer
from orchestrator.runner import Patience
from prestage.protocol import Call
from prestage.trace import TraceRecord
from tests.support.rig import RunResult, run_against, socket_folder
from trainer_worker.engine import EngineParts
from trainer_worker.engines.jax_engine import engine as jax_engine
from trainer_worker.engines.jax_engine.config import EngineConfig, ModelConfig, OptimizerConfig
from trainer_worker.engines.jax_engine.model import init_params
from trainer_worker.engines.jax_engine.presets import engine_parts
from trainer_worker.server import ServerConfig, WorkerServer

STEPS = 4
SHAPE = SyntheticShape(micro_batches=3)
PLAN = RunPlan(num_steps=STEPS, pipeline=True, stage=True, latch_after=1000, checkpoint_every=1)
PATIENCE = Patience(data_s=60.0, unreachable_s=60.0, backoff_s=0.02)
MODEL = ModelConfig(
    vocab_size=100,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=24,
    query_block=32,
)
START_SECONDS = 60.0


@pytest.fixture(scope="module", autouse=True)
def compile_once() -> Iterator[None]:
    made: dict[object, object] = {}
    original = jax_engine.compile_programs

    def compile_programs(config, state, spec):  # type: ignore[no-untyped-def]
        key = (config, spec)
        if key not in made:
            made[key] = original(config, state, spec)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_engine, "compile_programs", compile_programs)
        yield


def engine(folder: Path) -> EngineParts:
    config = EngineConfig(
        model=MODEL,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=3),
        logprob_chunk=32,
    )
    return engine_parts(config, init_params(MODEL, 0), checkpoint_dir=folder / "checkpoints")


class DisturbOnce:
    """An observer that disturbs after the second micro-batch of step 2 was answered."""

    def __init__(self, disturb: Callable[[], None]) -> None:
        self.disturb = disturb
        self.done = threading.Event()
        self._seen = 0

    def on_call(self, record: TraceRecord, answer: Answer) -> None:
        del answer
        if record.call == Call.FWD_BWD.value and record.step == 2 and not self.done.is_set():
            self._seen += 1
            if self._seen == 2:
                self.done.set()
                self.disturb()

    def on_note(self, note: object) -> None:
        del note

    def on_state(self, state: object) -> None:
        del state


def calls(result: RunResult) -> list[str]:
    return [record.call for record in result.recorder.records]


class Replaceable:
    """A worker in this process whose server and engine can be replaced by new ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"unix://{folder}/w.sock"
        self.server = self._start()

    def _start(self) -> WorkerServer:
        server = WorkerServer(
            ServerConfig(listen=self.address, state_dir=self.folder / "state"), engine(self.folder)
        )
        server.start()
        return server

    def replace(self) -> None:
        self.server.stop()
        self.server = self._start()


@contextlib.contextmanager
def worker() -> Iterator[Replaceable]:
    with socket_folder() as folder:
        made = Replaceable(folder)
        try:
            yield made
        finally:
            made.server.stop()


@pytest.mark.slow
def test_a_worker_replaced_in_the_middle_of_a_step_changes_nothing() -> None:
    with worker() as undisturbed:
        expected = run_against(undisturbed.address, PLAN, shape=SHAPE, patience=PATIENCE)
    assert Call.RESTORE_CHECKPOINT.value not in calls(expected)
    with worker() as replaced:
        disturb = DisturbOnce(replaced.replace)
        result = run_against(
            replaced.address, PLAN, shape=SHAPE, patience=PATIENCE, observers=(disturb,)
        )
    assert disturb.done.is_set()
    assert Call.RESTORE_CHECKPOINT.value in calls(result)
    assert result.digest == expected.digest
    assert [record.train_step for record in result.book.records()] == [1, 2, 3, 4]


class Process:
    """`trainer_worker --engine=jax` as a real process, to be killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"unix://{folder}/w.sock"
        self.started: list[subprocess.Popen[bytes]] = []
        self.start()

    def start(self) -> None:
        number = len(self.started)
        ready = self.folder / f"ready-{number}"
        path = self.folder / f"worker-{number}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "trainer_worker.main",
                    "--engine=jax",
                    "--preset=tiny",
                    "--learning_rate=0.01",
                    f"--listen={self.address}",
                    f"--state_dir={self.folder}/state",
                    f"--checkpoint_dir={self.folder}/checkpoints",
                    f"--trace_dir={self.folder}/traces",
                    f"--ready_file={ready}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.started.append(process)
        deadline_s = time.monotonic() + START_SECONDS
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise AssertionError(f"the worker did not start: {path.read_text()[-2000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        self.started[-1].kill()
        self.started[-1].wait(timeout=START_SECONDS)
        (self.folder / "w.sock").unlink(missing_ok=True)
        self.start()

    def stop(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.terminate()
            process.wait(timeout=START_SECONDS)


@contextlib.contextmanager
def process() -> Iterator[Process]:
    with socket_folder() as folder:
        made = Process(folder)
        try:
            yield made
        finally:
            made.stop()


@pytest.mark.slow
def test_a_worker_process_killed_in_the_middle_of_a_step_changes_nothing() -> None:
    with process() as undisturbed:
        expected = run_against(undisturbed.address, PLAN, shape=SHAPE, patience=PATIENCE)
    with process() as killed:
        disturb = DisturbOnce(killed.kill)
        result = run_against(
            killed.address, PLAN, shape=SHAPE, patience=PATIENCE, observers=(disturb,)
        )
        folders = sorted(path.name for path in (killed.folder / "checkpoints").iterdir())
    assert len(killed.started) == 2
    assert result.digest == expected.digest
    assert Call.RESTORE_CHECKPOINT.value in calls(result)
    assert [name for name in folders if name.startswith("step-")][-1] in ("step-3", "step-4")
