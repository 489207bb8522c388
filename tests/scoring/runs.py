"""Whole runs with scoring, as the application wires them, on small recorded rollouts."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator import app
from orchestrator.flags import OrchestratorConfig, Staging
from orchestrator.plan import RunPlan
from orchestrator.recorded import recorded_source
from trainer_worker.engines.jax_engine.config import ModelConfig

VOCAB = 100
MODEL = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=24,
    query_block=32,
)
START_SECONDS = 60.0


def write_rollouts(path: Path, *, groups: int = 8, group_size: int = 4, seed: int = 0) -> Path:
    """Made-up rollouts of the small vocabulary, with log-probs and rewards."""
    rng = np.random.default_rng(seed)
    columns: dict[str, list[object]] = {
        name: []
        for name in (
            "group_id",
            "index_in_group",
            "prompt_tokens",
            "completion_tokens",
            "logprobs",
            "reward",
            "policy_version",
        )
    }
    for group in range(groups):
        prompt = rng.integers(0, VOCAB, int(rng.integers(2, 6))).tolist()
        for index in range(group_size):
            completion = rng.integers(0, VOCAB, int(rng.integers(2, 24))).tolist()
            columns["group_id"].append(f"g{group}")
            columns["index_in_group"].append(index)
            columns["prompt_tokens"].append(prompt)
            columns["completion_tokens"].append(completion)
            columns["logprobs"].append((-rng.random(len(completion)) * 5).tolist())
            columns["reward"].append(float(rng.random()))
            columns["policy_version"].append(0)
    schema = pa.schema(
        {
            "group_id": pa.string(),
            "index_in_group": pa.int32(),
            "prompt_tokens": pa.list_(pa.int32()),
            "completion_tokens": pa.list_(pa.int32()),
            "logprobs": pa.list_(pa.float32()),
            "reward": pa.float32(),
            "policy_version": pa.int32(),
        }
    )
    pq.write_table(pa.table(columns, schema=schema), path)
    return path


def config(
    address: str,
    rollouts: Path,
    plan: RunPlan,
    *,
    num_minibatches: int = 1,
    num_iterations: int = 1,
    scores_dir: Path | None = None,
    eval_rollouts: Path | None = None,
    shared_memory_bytes: int = 0,
) -> OrchestratorConfig:
    return OrchestratorConfig(
        trainer=address,
        rollouts=rollouts,
        run_id="run",
        plan=plan,
        staging=Staging.ON if plan.stage else Staging.OFF,
        rows=2,
        tokens_per_row=64,
        groups_per_batch=4,
        group_size=4,
        num_minibatches=num_minibatches,
        num_iterations=num_iterations,
        advantage="grpo",
        advantage_std="population",
        zero_spread="keep",
        old_logprobs="trainer" if plan.trainer_logprobs else "current",
        vocab_size=VOCAB,
        trainer_wait_s=20.0,
        data_wait_s=30.0,
        trace_dir=None,
        result_file=None,
        progress=False,
        scores_dir=scores_dir,
        eval_rollouts=eval_rollouts,
        shared_memory_bytes=shared_memory_bytes,
    )


def run(config: OrchestratorConfig) -> app.RunResult:
    return app.run(config, recorded_source)


class TimedProcess:
    """`trainer_worker --engine=timed` as a real process, to be killed."""

    def __init__(self, folder: Path, *, checkpoints: bool = True) -> None:
        self.folder = folder
        self.address = f"unix://{folder}/w.sock"
        self._checkpoints = [f"--checkpoint_dir={folder}/checkpoints"] if checkpoints else []
        self.started: list[subprocess.Popen[bytes]] = []
        self.start()

    def start(self) -> None:
        number = len(self.started)
        ready, path = self.folder / f"ready-{number}", self.folder / f"worker-{number}.log"
        command = [
            *(sys.executable, "-m", "trainer_worker.main", "--engine=timed"),
            *("--timed_fwd_bwd_s=0.002", "--timed_update_s=0.001", "--timed_copy_s=0.001"),
            *(f"--listen={self.address}", f"--state_dir={self.folder}/state"),
            *(f"--ready_file={ready}", *self._checkpoints),
        ]
        with path.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
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
