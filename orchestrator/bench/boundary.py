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
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class ArmTimes:
    """One arm: idle of each boundary that is known, in seconds, and staged inputs consumed."""

    idle_s: tuple[float, ...]
    staged: int


def predicted(copy_s: float, boundaries: int) -> list[Prediction]:
    """What the arithmetic says of a copy shorter than a micro-batch. Bands: the promises."""
    staged = [
        Prediction(
            quantity=f"{name}/staged_inputs",
            value=boundaries,
            low=boundaries,
            high=boundaries,
            unit="",
            why="every boundary: packing needs far less than a micro-batch's time",
        )
        for name in ("staged", "zero_gap")
    ]
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
        *staged,
    ]


def run_arm(name: str, arguments: argparse.Namespace) -> ArmTimes:
    """Run one arm with a fresh worker. Raises `ProcessError`."""
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
                "--tokens_per_row=1536",
                "--groups_per_batch=1",
                f"--num_steps={arguments.boundaries + 1}",
                f"--result_file={result}",
                *ARMS[name],
            ],
            folder / "orchestrator.log",
        )
    steps = json.loads(result.read_text())["steps"]
    idle = [float(step["boundary_idle_seconds"]) for step in steps[:-1]]
    return ArmTimes(
        idle_s=tuple(seconds for seconds in idle if seconds >= 0),
        staged=sum(bool(step["staged_input_used"]) for step in steps),
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator bench boundary", description=__doc__)
    parser.add_argument("--rollouts", type=Path, default=Path("tests/data/rollouts.parquet"))
    parser.add_argument("--out", type=Path, default=Path("out/boundary"))
    parser.add_argument("--boundaries", type=int, default=10)
    parser.add_argument("--fwd_bwd_s", type=float, default=1.0)
    parser.add_argument("--update_s", type=float, default=0.2)
    parser.add_argument("--copy_s", type=float, default=0.7)
    arguments = parser.parse_args(argv)
    if arguments.boundaries < 1:
        parser.error(f"--boundaries is {arguments.boundaries}; use 1 or more")
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "predictions.json"
    path.unlink(missing_ok=True)
    wanted = predicted(arguments.copy_s, arguments.boundaries)
    written = predictions.write(path, "boundary idle by arm, medians", wanted)
    print(predictions.announcement(path, written))
    measured: dict[str, float] = {}
    print(
        f"{'arm':<10}{'boundaries':>11}{'staged':>8}{'median s':>10}{'least s':>10}{'most s':>10}"
    )
    try:
        for name in ARMS:
            times = run_arm(name, arguments)
            known = times.idle_s
            if len(known) < arguments.boundaries:
                print(f"{name:<10}{len(known):>11}: not every boundary is known, so not scored")
                continue
            measured[f"{name}/boundary_idle"] = statistics.median(known)
            if name != "stock":
                measured[f"{name}/staged_inputs"] = times.staged
            print(
                f"{name:<10}{len(known):>11}{times.staged:>8}{statistics.median(known):>10.4f}"
                f"{min(known):>10.4f}{max(known):>10.4f}",
                flush=True,
            )
    except ProcessError as error:
        print(f"orchestrator bench boundary: {error}", file=sys.stderr)
        return 1
    card = predictions.score(path, measured, expected_sha256=written.sha256)
    (arguments.out / "score.json").write_text(predictions.to_json(card))
    print("\n".join(predictions.table_lines(card)))
    return 1 if card.misses else 0
