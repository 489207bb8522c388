"""`orchestrator bench run`: the main job. Trains on recorded rollouts, flags off and on, and compares.

Two runs, each with a fresh worker process and the same initial weights. What must hold is checked
here and the exit code says so: same parameters to the bit, every step's weights moved, no compile
inside a step, and each staged input consumed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from orchestrator.bench.processes import ProcessError, run_orchestrator, worker_process
from prestage.trace import read_trace, to_perfetto

ARMS: Final[Mapping[str, tuple[str, ...]]] = {
    "off": (),
    "on": ("--pipeline_step_boundary", "--stage_next_microbatch"),
}


@dataclass(frozen=True, kw_only=True)
class ModelRun:
    """How one preset is run. Chosen so that `tiny` takes seconds on 2 cores."""

    rows: int
    tokens_per_row: int
    groups_per_batch: int
    num_steps: int
    worker: tuple[str, ...]


MODELS: Final[Mapping[str, ModelRun]] = {
    "tiny": ModelRun(
        rows=2,
        tokens_per_row=1024,
        groups_per_batch=2,
        num_steps=5,
        worker=("--engine=jax", "--preset=tiny", "--learning_rate=1e-3"),
    ),
    "smollm2-135m": ModelRun(
        rows=2,
        tokens_per_row=640,
        groups_per_batch=1,
        num_steps=3,
        worker=("--engine=jax", "--preset=smollm2-135m", "--learning_rate=1e-6"),
    ),
    "timed": ModelRun(
        rows=4,
        tokens_per_row=1024,
        groups_per_batch=4,
        num_steps=5,
        worker=(
            "--engine=timed",
            "--timed_fwd_bwd_s=0.2",
            "--timed_copy_s=0.14",
            "--timed_update_s=0.04",
            "--timed_vocab_size=49152",
        ),
    ),
}


def _arm(
    name: str, model: ModelRun, rollouts: Path, out: Path, extra: Sequence[str]
) -> dict[str, object]:
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.ndjson"):
        old.unlink()
    result = folder / "result.json"
    worker_args = [*model.worker, f"--trace_dir={folder}"]
    with worker_process(worker_args, folder / "worker.log") as worker:
        run_orchestrator(
            [
                f"--trainer={worker.address}",
                f"--rollouts={rollouts}",
                f"--run_id=flags-{name}",
                f"--rows={model.rows}",
                f"--tokens_per_row={model.tokens_per_row}",
                f"--groups_per_batch={model.groups_per_batch}",
                f"--num_steps={model.num_steps}",
                f"--trace_dir={folder}",
                f"--result_file={result}",
                *ARMS[name],
                *extra,
            ],
            folder / "orchestrator.log",
        )
    print(f"== flags {name} ==")
    print((folder / "orchestrator.log").read_text())
    traces = [read_trace(path) for path in sorted(folder.glob("*.ndjson"))]
    (folder / "timeline.json").write_text(to_perfetto(traces))
    loaded: dict[str, object] = json.loads(result.read_text())
    return loaded


def _steps(result: Mapping[str, object]) -> list[dict[str, object]]:
    steps = result["steps"]
    assert isinstance(steps, list)
    return steps


def _metric(step: Mapping[str, object], name: str) -> float | None:
    metrics = step["metrics"]
    assert isinstance(metrics, dict)
    value = metrics.get(name)
    return None if value is None else float(value)


def check(
    results: Mapping[str, Mapping[str, object]], *, real: bool
) -> list[tuple[str, bool, str]]:
    """(what must hold, whether it does, what was seen). `real`: an engine that computes a loss."""
    checks: list[tuple[str, bool, str]] = []
    digests = {name: str(result["parameter_digest"]) for name, result in results.items()}
    same = len(set(digests.values())) == 1
    seen = ", ".join(f"{name} {digest[:16]}…" for name, digest in digests.items())
    checks.append(("final parameters of all arms are equal, bit for bit", same, seen))
    for name, result in results.items():
        compiles = result["backend_compiles_in_steps"]
        checks.append(
            (f"flags {name}: no backend compile inside a step", compiles == 0, f"{compiles}")
        )
        if not real:
            continue
        steps = _steps(result)
        finite = all(
            value is not None and math.isfinite(value)
            for step in steps
            for value in (_metric(step, "loss"), _metric(step, "grad_norm"))
        )
        checks.append(
            (f"flags {name}: loss and grad_norm are finite", finite, f"{len(steps)} steps")
        )
        norms = [_metric(step, "grad_norm") or 0.0 for step in steps]
        moved = [_metric(step, "update_norm") or 0.0 for step in steps]
        checks.append(
            (
                f"flags {name}: grad_norm is not zero in any step",
                min(norms) > 0,
                f"least {min(norms):.3g}",
            )
        )
        checks.append(
            (
                f"flags {name}: the parameters changed in every step",
                min(moved) > 0,
                f"least update norm {min(moved):.3g}",
            )
        )
    on = _steps(results["on"])
    staged = sum(float(str(step["stage_seconds"])) >= 0 for step in on)
    used = sum(bool(step["staged_input_used"]) for step in on)
    boundaries = len(on) - 1
    checks.append(
        (
            "flags on: every boundary staged, every staged input consumed",
            staged == used == boundaries,
            f"{staged} staged, {used} consumed, {boundaries} boundaries",
        )
    )
    return checks


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator bench run", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny")
    parser.add_argument("--rollouts", type=Path, default=Path("tests/data/rollouts.parquet"))
    parser.add_argument("--out", type=Path, default=Path("out/run"))
    parser.add_argument("--num_steps", type=int, default=0, help="0 = the model's own")
    arguments = parser.parse_args(argv)
    model = MODELS[arguments.model]
    extra = [f"--num_steps={arguments.num_steps}"] if arguments.num_steps else []
    if not arguments.rollouts.is_file():
        print(f"--rollouts {arguments.rollouts} is no file", file=sys.stderr)
        return 2
    try:
        results = {
            name: _arm(name, model, arguments.rollouts, arguments.out, extra) for name in ARMS
        }
    except ProcessError as error:
        print(f"orchestrator bench run: {error}", file=sys.stderr)
        return 1
    checks = check(results, real=arguments.model != "timed")
    print("== what must hold ==")
    for text, holds, seen in checks:
        print(f"{'ok  ' if holds else 'FAIL'} {text}: {seen}")
    print(f"\ntraces: {arguments.out}/off and {arguments.out}/on: *.ndjson, one line a call, and")
    print("timeline.json, which opens in a Chrome/Perfetto trace viewer")
    return 0 if all(holds for _, holds, _ in checks) else 1
