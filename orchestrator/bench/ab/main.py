"""`orchestrator bench ab --spec=FILE`: runs the three arms and judges them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from orchestrator.bench.ab.score import Metrics, Verdict, judge, overall, table_lines
from orchestrator.bench.ab.spec import Arm, Spec, SpecError, read_spec
from orchestrator.bench.processes import ProcessError, run_orchestrator, worker_process

EXIT: Final = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 3}


def run_arm(
    name: str, arm: Arm, spec: Spec, rollouts: Path, out: Path
) -> tuple[Metrics, dict[str, object]]:
    """One arm with a fresh worker. The run id is the same in every arm, as the data is."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    with worker_process(arm.worker, folder / "worker.log") as worker:
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
    loaded: dict[str, object] = json.loads(result.read_text())
    steps = loaded["steps"]
    assert isinstance(steps, list)
    metrics = {
        int(step["step"]): {str(name): float(value) for name, value in step["metrics"].items()}
        for step in steps
    }
    return metrics, loaded


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator bench ab", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--rollouts", type=Path, default=Path("tests/data/rollouts.parquet"))
    parser.add_argument("--out", type=Path, default=Path("out/ab"))
    arguments = parser.parse_args(argv)
    try:
        spec = read_spec(arguments.spec)
    except SpecError as error:
        print(f"orchestrator bench ab: {error}", file=sys.stderr)
        return 2
    print(f"spec: {spec.name} ({spec.kind}), {arguments.spec.name}, sha256 {spec.sha256}")
    arms = {"off": spec.off, "on": spec.on, "off_again": spec.off}
    metrics: dict[str, Metrics] = {}
    digests: dict[str, str] = {}
    try:
        for name, arm in arms.items():
            print(f"arm {name} ...", flush=True)
            metrics[name], loaded = run_arm(name, arm, spec, arguments.rollouts, arguments.out)
            digests[name] = str(loaded["parameter_digest"])
    except ProcessError as error:
        print(f"orchestrator bench ab: {error}", file=sys.stderr)
        return 1
    findings = judge(spec, metrics["off"], metrics["on"], metrics["off_again"])
    verdict = overall(findings)
    print("\n".join(table_lines(findings)))
    for name, digest in digests.items():
        print(f"final parameters, {name}: {digest}")
    print(f"\n{verdict.value}")
    report = {
        "spec": spec.name,
        "sha256": spec.sha256,
        "verdict": verdict.value,
        "parameter_digests": digests,
        "findings": [
            {**dataclasses.asdict(finding), "verdict": finding.verdict.value}
            for finding in findings
        ],
    }
    (arguments.out / "verdict.json").write_text(json.dumps(report, indent=1) + "\n")
    return EXIT[verdict]
