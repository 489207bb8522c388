"""`orchestrator bench boundary`: boundary idle on the real clock, on the timed engine, by arm.

Two processes, recorded rollouts, 1.0 s micro-batches, a 0.2 s update and a 0.7 s input copy. The
predictions are written, and their hash is printed, before the first arm starts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from orchestrator.bench import predictions
from orchestrator.bench.predictions import Prediction
from orchestrator.bench.processes import ProcessError, run_orchestrator, worker_process

STAGED: Final = ("--pipeline_step_boundary", "--stage_next_microbatch", "--latch_after=1000")
ARMS: Final[Mapping[str, tuple[str, ...]]] = {
    "stock": (),
    "staged": STAGED,
    "zero_gap": (*STAGED, "--dispatch_before_metrics"),
}


def predicted(fwd_bwd_s: float, update_s: float, copy_s: float) -> list[Prediction]:
    """What the arithmetic says. Bands: the promises, in seconds."""
    del fwd_bwd_s, update_s
    return [
        Prediction(
            quantity="stock/boundary_idle",
            value=copy_s + 0.01,
            low=copy_s,
            high=copy_s * 1.2,
            why="the input is copied on an idle device, after the metrics are read",
        ),
        Prediction(
            quantity="staged/boundary_idle",
            value=0.003,
            low=0.0,
            high=0.02,
            why="the copy hides; what is left is reading the metrics and one call",
        ),
        Prediction(
            quantity="zero_gap/boundary_idle",
            value=0.0,
            low=0.0,
            high=0.005,
            why="the staged micro-batch is dispatched while the update still computes",
        ),
    ]


def run_arm(name: str, arguments: argparse.Namespace) -> list[float]:
    """Boundary idle of every boundary, in seconds."""
    folder = arguments.out / name
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    worker_flags = [
        "--engine=timed",
        f"--timed_fwd_bwd_s={arguments.fwd_bwd_s}",
        f"--timed_update_s={arguments.update_s}",
        f"--timed_copy_s={arguments.copy_s}",
        "--timed_vocab_size=49152",
    ]
    with worker_process(worker_flags, folder / "worker.log") as worker:
        run_orchestrator(
            [
                f"--trainer={worker.address}",
                f"--rollouts={arguments.rollouts}",
                f"--run_id={name}",
                "--rows=1",
                "--tokens_per_row=1024",
                "--groups_per_batch=1",
                f"--num_steps={arguments.boundaries + 1}",
                f"--result_file={result}",
                *ARMS[name],
            ],
            folder / "orchestrator.log",
        )
    steps = json.loads(result.read_text())["steps"]
    return [float(step["boundary_idle_seconds"]) for step in steps[:-1]]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator bench boundary", description=__doc__)
    parser.add_argument("--rollouts", type=Path, default=Path("tests/data/rollouts.parquet"))
    parser.add_argument("--out", type=Path, default=Path("out/boundary"))
    parser.add_argument("--boundaries", type=int, default=10)
    parser.add_argument("--fwd_bwd_s", type=float, default=1.0)
    parser.add_argument("--update_s", type=float, default=0.2)
    parser.add_argument("--copy_s", type=float, default=0.7)
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "predictions.json"
    path.unlink(missing_ok=True)
    wanted = predicted(arguments.fwd_bwd_s, arguments.update_s, arguments.copy_s)
    written = predictions.write(path, "boundary idle by arm, medians", wanted)
    print(predictions.announcement(path, written))
    measured = {}
    print(f"{'arm':<10}{'boundaries':>11}{'median s':>10}{'least s':>10}{'most s':>10}")
    try:
        for name in ARMS:
            idle = run_arm(name, arguments)
            known = [value for value in idle if value >= 0]
            median = statistics.median(known)
            measured[f"{name}/boundary_idle"] = median
            print(
                f"{name:<10}{len(known):>11}{median:>10.4f}{min(known):>10.4f}{max(known):>10.4f}"
            )
    except ProcessError as error:
        print(f"orchestrator bench boundary: {error}", file=sys.stderr)
        return 1
    card = predictions.score(path, measured, expected_sha256=written.sha256)
    (arguments.out / "score.json").write_text(predictions.to_json(card))
    print("\n".join(predictions.table_lines(card)))
    return 1 if card.misses else 0
