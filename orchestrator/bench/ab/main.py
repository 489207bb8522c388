"""`orchestrator bench ab --spec=FILE`: runs the three arms and judges them.

Every arm gets a fresh worker process, the same data and the same run id, from this one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from orchestrator.bench.ab.score import (
    ArmRun,
    Arms,
    Condition,
    Finding,
    Verdict,
    conditions,
    judge,
    overall,
    table_lines,
)
from orchestrator.bench.ab.spec import Arm, Spec, SpecError, read_spec
from orchestrator.bench.processes import ProcessError, run_orchestrator, worker_process
from orchestrator.flags import PIPELINE_ENV, STAGE_ENV

EXIT: Final = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 3}
EXIT_UNUSABLE: Final = 2
EXIT_BROKEN: Final = 4

_TRAINED: Final = ("micro_batches", "rows", "trajectories", "real_tokens", "trained_tokens")


def arm_run(result: Mapping[str, object]) -> ArmRun:
    """An arm's result file as the judge reads it."""
    steps = result["steps"]
    assert isinstance(steps, list)
    metrics: dict[int, dict[str, float]] = {}
    trained: dict[int, tuple[int, ...]] = {}
    staged: set[int] = set()
    for step in steps:
        number = int(step["step"])
        metrics[number] = {str(name): float(value) for name, value in step["metrics"].items()}
        if step["summary"] is not None:
            trained[number] = tuple(int(step["summary"][name]) for name in _TRAINED)
        if step["staged_input_used"]:
            staged.add(number)
    return ArmRun(
        metrics=metrics,
        trained=trained,
        staged=frozenset(staged),
        parameter_digest=str(result["parameter_digest"]),
    )


def run_arm(name: str, arm: Arm, spec: Spec, rollouts: Path, out: Path) -> ArmRun:
    """One arm with a fresh worker. Raises `ProcessError`."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    result.unlink(missing_ok=True)  # An earlier run's must not be taken for this one's.
    with worker_process(
        arm.worker,
        folder / "worker.log",
        environment=dict(word.split("=", 1) for word in arm.environment),
    ) as worker:
        run_orchestrator(
            [
                f"--trainer={worker.address}",
                f"--rollouts={rollouts}",
                "--run_id=ab",
                f"--num_steps={spec.num_steps}",
                f"--result_file={result}",
                *arm.orchestrator,
            ],
            folder / "orchestrator.log",
        )
    return arm_run(json.loads(result.read_text()))


def _plain(finding: Finding | Condition) -> dict[str, object]:
    """JSON has no NaN: what is not known is null."""
    known = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in dataclasses.asdict(finding).items()
    }
    if isinstance(finding, Finding):
        known["off"] = [value if math.isfinite(value) else None for value in finding.off]
    return {**known, "verdict": finding.verdict.value}


def report(
    spec: Spec, arms: Arms, findings: Sequence[Finding], held: Sequence[Condition]
) -> dict[str, object]:
    """The verdict and everything it rests on, for JSON."""
    return {
        "spec": spec.name,
        "kind": spec.kind,
        "sha256": spec.sha256,
        "verdict": overall(findings, held).value,
        "arms": {
            name: dataclasses.asdict(arm) for name, arm in (("off", spec.off), ("on", spec.on))
        },
        "parameter_digests": {name: run.parameter_digest for name, run in arms.named()},
        "conditions": [_plain(condition) for condition in held],
        "findings": [_plain(finding) for finding in findings],
    }


def _unusable(environment: Mapping[str, str], rollouts: Path) -> str:
    """Why the arms would not be what the spec says; empty when they would."""
    for name in (PIPELINE_ENV, STAGE_ENV):
        if name in environment:
            return f"{name} is set in the environment and would reach every arm: unset it"
    return "" if rollouts.is_file() else f"--rollouts {rollouts} is no file"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator bench ab", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="TOML, or JSON by its name")
    parser.add_argument("--rollouts", type=Path, default=Path("tests/data/rollouts.parquet"))
    parser.add_argument("--out", type=Path, default=Path("out/ab"))
    arguments = parser.parse_args(argv)
    try:
        spec = read_spec(arguments.spec)
    except SpecError as error:
        print(f"orchestrator bench ab: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    why = _unusable(os.environ, arguments.rollouts)
    if why:
        print(f"orchestrator bench ab: {why}", file=sys.stderr)
        return EXIT_UNUSABLE
    print(f"spec: {spec.name} ({spec.kind}), {arguments.spec.name}, sha256 {spec.sha256}")
    runs: dict[str, ArmRun] = {}
    try:
        for name, arm in (("off", spec.off), ("on", spec.on), ("off_again", spec.off)):
            print(f"arm {name} ...", flush=True)
            runs[name] = run_arm(name, arm, spec, arguments.rollouts, arguments.out)
    except ProcessError as error:
        print(f"orchestrator bench ab: arm {name}: {error}", file=sys.stderr)
        return EXIT_BROKEN
    arms = Arms(off=runs["off"], on=runs["on"], off_again=runs["off_again"])
    findings, held = judge(spec, arms), conditions(spec, arms)
    print("\n".join(table_lines(findings, held)))
    for name, run in arms.named():
        print(f"final parameters, {name}: {run.parameter_digest}")
    text = json.dumps(report(spec, arms, findings, held), indent=1, allow_nan=False)
    (arguments.out / "verdict.json").write_text(text + "\n")
    verdict = overall(findings, held)
    print(f"\n{verdict.value}")
    return EXIT[verdict]
