"""`orchestrator bench rig`: recorded groups through both processes, five arms, predicted and scored.

The prediction file (value and band per quantity) is written and its hash printed before the first
arm starts; misses are kept. Arms: A0 stock, A0p stock again, A1 pipelined, A2 staged after the
update, A3 staged before it.
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
from orchestrator.check_trace import check_traces
from prestage.trace import read_trace

_PIPELINE: Final = "--pipeline_step_boundary"
_STAGE: Final = ("--stage_next_microbatch", "--latch_after=1000000")
ARMS: Final[Mapping[str, tuple[str, ...]]] = {
    "A0": (),
    "A0p": (),
    "A1": (_PIPELINE,),
    "A2": (_PIPELINE, *_STAGE, "--nostage_before_update"),
    "A3": (_PIPELINE, *_STAGE),
}


TIMED_SECONDS: Final[Mapping[str, float]] = {"fwd_bwd_s": 0.3, "update_s": 0.05, "copy_s": 0.2}


def predicted(
    micro_batches: int, fwd_bwd_s: float, update_s: float, copy_s: float
) -> list[Prediction]:
    """What the arithmetic says of the timed engine: only A3's copy hides. Seconds."""
    busy_s = micro_batches * fwd_bwd_s + update_s
    found = []
    for arm in ARMS:
        hidden = arm == "A3"
        # Staged after the update, the copy overlaps the update's own time on the device.
        idle = 0.003 if hidden else max(0.0, copy_s - update_s) if arm == "A2" else copy_s
        low, high = (0.0, 0.02) if hidden else (0.8 * idle, 1.2 * idle + 0.02)
        found.append(
            Prediction(quantity=f"{arm}/boundary_idle", value=idle, low=low, high=high, why="copy")
        )
        step = busy_s + idle
        found.append(
            Prediction(
                quantity=f"{arm}/step_seconds",
                value=step,
                low=0.97 * step,
                high=1.05 * step,
                why="compute + idle",
            )
        )
    return found


def run_arm(
    arm: str, worker_flags: Sequence[str], arguments: argparse.Namespace
) -> list[dict[str, object]]:
    """The steps of one arm. Raises `ProcessError`, also when a trace breaks a rule."""
    folder: Path = arguments.out / arm
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.ndjson"):
        old.unlink()
    result = folder / "result.json"
    with worker_process([*worker_flags, f"--trace_dir={folder}"], folder / "worker.log") as worker:
        run_orchestrator(
            [
                f"--trainer={worker.address}",
                f"--rollouts={arguments.rollouts}",
                "--run_id=rig",
                f"--rows={arguments.rows}",
                f"--tokens_per_row={arguments.tokens_per_row}",
                f"--groups_per_batch={arguments.groups_per_batch}",
                f"--num_steps={arguments.num_steps}",
                f"--trace_dir={folder}",
                f"--result_file={result}",
                *ARMS[arm],
            ],
            folder / "orchestrator.log",
        )
    _, findings = check_traces([(path, read_trace(path)) for path in folder.glob("*.ndjson")])
    if findings:
        raise ProcessError(f"arm {arm} breaks {len(findings)} rule(s): {findings[0]}")
    steps: list[dict[str, object]] = json.loads(result.read_text())["steps"]
    return steps


def _median(steps: Sequence[Mapping[str, object]], name: str, micro_batches: int) -> float:
    """Over steps of just so many micro-batches, without the first step and the last."""
    alike = [s for s in steps[1:-1] if len(_list(s["dispatch_seconds"])) == micro_batches]
    known = [float(str(step[name])) for step in alike]
    kept = [value for value in known if value >= 0]
    return statistics.median(kept) if kept else float("nan")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator bench rig", description=__doc__)
    parser.add_argument("--engine", choices=("timed", "jax"), default="timed")
    parser.add_argument("--rollouts", type=Path, default=Path("tests/data/rollouts.parquet"))
    parser.add_argument("--predictions", type=Path, default=None, help="a file of your own")
    parser.add_argument("--out", type=Path, default=Path("out/rig"))
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens_per_row", type=int, default=2048)
    parser.add_argument("--groups_per_batch", type=int, default=2)
    parser.add_argument("--num_steps", type=int, default=6)
    parser.add_argument("--micro_batches", type=int, default=3, help="predicted, per step")
    for name, seconds in TIMED_SECONDS.items():
        parser.add_argument(f"--{name}", type=float, default=None, help=f"timed: {seconds:g}")
    arguments = parser.parse_args(argv)
    told = [getattr(arguments, name) is not None for name in TIMED_SECONDS]
    if arguments.engine == "jax" and arguments.predictions is None and not all(told):
        parser.error(
            "--engine=jax: predictions are made from --fwd_bwd_s, --update_s and --copy_s of your"
            " own engine (a flags-off run measures them), or given as --predictions=FILE"
        )
    for name, seconds in TIMED_SECONDS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, seconds)
    if arguments.num_steps < 3:
        parser.error(f"--num_steps is {arguments.num_steps}; use 3 or more")
    arguments.out.mkdir(parents=True, exist_ok=True)
    worker_flags = ["--engine=jax", "--preset=tiny", "--learning_rate=1e-3"]
    if arguments.engine == "timed":
        worker_flags = [
            "--engine=timed",
            f"--timed_fwd_bwd_s={arguments.fwd_bwd_s}",
            f"--timed_update_s={arguments.update_s}",
            f"--timed_copy_s={arguments.copy_s}",
            "--timed_update_waits",  # As the rig that this one is modelled on: dropless retry.
            "--timed_vocab_size=49152",
        ]
    measured: dict[str, float] = {}
    path = arguments.predictions
    try:
        if path is None:
            path = arguments.out / "predictions.json"
            path.unlink(missing_ok=True)
            times = arguments.fwd_bwd_s, arguments.update_s, arguments.copy_s
            about = f"rig, {arguments.engine} engine, medians"
            predictions.write(path, about, predicted(arguments.micro_batches, *times))
        written = predictions.read(path)
        print(predictions.announcement(path, written), flush=True)
        print(f"{'arm':<5}{'idle s':>9}{'step s':>9}  micro-batches a step")
        size: int = arguments.micro_batches
        trained: dict[str, list[int]] = {}
        for arm in ARMS:
            steps = run_arm(arm, worker_flags, arguments)
            measured[f"{arm}/boundary_idle"] = _median(steps, "boundary_idle_seconds", size)
            measured[f"{arm}/step_seconds"] = _median(steps, "seconds", size)
            trained[arm] = [len(_list(step["dispatch_seconds"])) for step in steps]
            idle, seconds = measured[f"{arm}/boundary_idle"], measured[f"{arm}/step_seconds"]
            print(f"{arm:<5}{idle:>9.4f}{seconds:>9.4f}  {trained[arm]}", flush=True)
        card = predictions.score(path, measured, expected_sha256=written.sha256)
    except (ProcessError, predictions.PredictionError) as error:
        print(f"orchestrator bench rig: {error}", file=sys.stderr)
        return 1
    (arguments.out / "score.json").write_text(predictions.to_json(card))
    print("\n".join(predictions.table_lines(card)))
    return 1 if card.misses else 0


def _list(value: object) -> list[object]:
    assert isinstance(value, list)
    return value
