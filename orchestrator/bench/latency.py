"""`orchestrator bench latency`: how fast health and state answer while the jax engine works.

A worker process compiles and trains (the `tiny` preset on recorded rollouts) while this process
asks its status port for health and for the state, one after the other.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.bench.processes import ProcessError, run_orchestrator, worker_process
from orchestrator.bench.run import MODELS
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.trainer.v1 import trainer_pb2_grpc as pb_grpc
from prestage.wire.channel import open_channel, status_address

BOUND_MS = 50.0


def _ask(channel: grpc.Channel, stop: threading.Event) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of every answer, by question and by what the worker was doing."""
    health = health_pb2_grpc.HealthStub(channel)
    status = pb_grpc.TrainerStatusStub(channel)
    found: dict[str, dict[str, list[float]]] = {"health": {}, "state": {}}

    def timed(question: str, doing: str, call: Callable[[], object]) -> None:
        started_s = time.perf_counter()
        call()
        found[question].setdefault(doing, []).append((time.perf_counter() - started_s) * 1e3)

    doing = "idle"
    while not stop.wait(0.005):
        timed("health", doing, lambda: health.Check(health_pb2.HealthCheckRequest(), timeout=30))
        started_s = time.perf_counter()
        state = status.GetState(pb.GetStateRequest(), timeout=30).state
        found["state"].setdefault(doing, []).append((time.perf_counter() - started_s) * 1e3)
        if state.lifecycle == pb.LIFECYCLE_COMPILING:
            doing = "compiling"
        else:
            doing = "computing" if state.running_call or state.compiled else "idle"
    return found


def measure(
    model: str, rollouts: Path, out: Path, num_steps: int
) -> dict[str, dict[str, list[float]]]:
    run = MODELS[model]
    out.mkdir(parents=True, exist_ok=True)
    result: list[dict[str, dict[str, list[float]]]] = []
    with worker_process(run.worker, out / "worker.log") as worker:
        stop = threading.Event()
        with open_channel(status_address(worker.address)) as channel:
            asker = threading.Thread(target=lambda: result.append(_ask(channel, stop)))
            asker.start()
            try:
                run_orchestrator(
                    [
                        f"--trainer={worker.address}",
                        f"--rollouts={rollouts}",
                        f"--rows={run.rows}",
                        f"--tokens_per_row={run.tokens_per_row}",
                        f"--groups_per_batch={run.groups_per_batch}",
                        f"--num_steps={num_steps}",
                        "--pipeline_step_boundary",
                        "--stage_next_microbatch",
                    ],
                    out / "orchestrator.log",
                )
            finally:
                stop.set()
                asker.join()
    return result[0]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator bench latency", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny")
    parser.add_argument("--rollouts", type=Path, default=Path("tests/data/rollouts.parquet"))
    parser.add_argument("--out", type=Path, default=Path("out/latency"))
    parser.add_argument("--num_steps", type=int, default=3)
    arguments = parser.parse_args(argv)
    try:
        found = measure(arguments.model, arguments.rollouts, arguments.out, arguments.num_steps)
    except ProcessError as error:
        print(f"orchestrator bench latency: {error}")
        return 1
    summary = {}
    worst = 0.0
    print(f"{'question':<10}{'worker is':<12}{'answers':>8}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}")
    for question, phases in found.items():
        for doing, values in phases.items():
            p50, p99, top = np.percentile(values, [50, 99, 100])
            summary[f"{question}/{doing}"] = {"n": len(values), "p50": p50, "p99": p99, "max": top}
            print(f"{question:<10}{doing:<12}{len(values):>8}{p50:>9.2f}{p99:>9.2f}{top:>9.2f}")
            worst = max(worst, float(p99))
    (arguments.out / "latency.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(
        f"\nworst p99 {worst:.2f} ms, bound {BOUND_MS:g} ms: {'ok' if worst < BOUND_MS else 'MISS'}"
    )
    return 0 if worst < BOUND_MS else 1
