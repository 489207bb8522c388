"""`make chaos`: every fault at every call index, and what came of it."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

from tests.chaos.faults import Fault
from tests.chaos.harness import (
    JAX,
    SETTINGS,
    Outcome,
    Setting,
    Starter,
    forked,
    real_trainer,
    run_once,
)
from tests.chaos.points import certain, covering, every_fault, pairs

REFERENCE_RUNS = 3


def undisturbed(
    setting: Setting, starter: Starter, runs: int = REFERENCE_RUNS
) -> tuple[Outcome, dict[str, Counter[str]]]:
    """The run that every other is compared with, and the calls that it always makes."""
    outcomes = [run_once(setting, starter=starter) for _ in range(runs)]
    first = outcomes[0]
    for outcome in outcomes:
        problems = outcome.judged(first).problems
        if problems:
            raise SystemExit(f"{setting.name}: an undisturbed run failed: {'; '.join(problems)}")
    return first, certain([outcome.calls for outcome in outcomes])


class Tally:
    """What came of all runs."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.not_reached: Counter[str] = Counter()
        self.restarts: Counter[str] = Counter()
        self.failed: list[tuple[str, Outcome]] = []
        self.lost = self.doubled = self.same = 0

    def add(self, setting: str, outcome: Outcome, reference: Outcome) -> None:
        kind = outcome.faults[0].action.value if len(outcome.faults) == 1 else "two faults"
        name = f"{setting}: {kind}"
        self.runs[name] += 1
        self.not_reached[name] += outcome.fired < 1
        self.restarts[name] += outcome.worker_starts + outcome.orchestrator_starts - 2
        wanted = outcome.reference(reference)
        self.lost += len(outcome.lost(wanted))
        self.doubled += len(outcome.doubled())
        self.same += outcome.parameter_digest == wanted.parameter_digest
        if outcome.problems:
            self.failed.append((setting, outcome))

    def __str__(self) -> str:
        total = sum(self.runs.values())
        return (
            f"{total} disturbed runs: lost {self.lost}, doubled {self.doubled}, digests equal"
            f" {self.same} of {total}, failed {len(self.failed)}, fault not reached"
            f" {sum(self.not_reached.values())}"
        )

    def table(self) -> str:
        width = max(len(name) for name in self.runs)
        lines = [f"{'fault':<{width}}  runs  not reached  restarts"]
        lines += [
            f"{name:<{width}}  {self.runs[name]:4}  {self.not_reached[name]:11}"
            f"  {self.restarts[name]:8}"
            for name in self.runs
        ]
        return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=20260101)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--points", type=int, default=0, help="so many by seed; 0: every one")
    parser.add_argument("--pairs", type=int, default=60, help="runs with two faults, by seed")
    parser.add_argument("--jax_points", type=int, default=24, help="faults on the jax engine")
    parser.add_argument("--only", default="", help="faults whose text contains this")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--keep", type=Path, default=Path("out/chaos"), help="files of failed runs")
    options = parser.parse_args(argv)
    started_s = time.monotonic()
    tally = Tally()
    print(f"seed {options.seed}")
    with forked() as starter:
        for name in options.settings:
            reference, calls = undisturbed(SETTINGS[name], starter)
            faults = every_fault(calls)
            chosen = covering(faults, options.seed, options.points) if options.points else faults
            plans = [(fault,) for fault in chosen]
            plans += pairs(faults, options.seed, options.pairs)
            _play(SETTINGS[name], plans, reference, options, tally, starter)
        if options.jax_points:
            with real_trainer(starter) as jax_starter:
                reference, calls = undisturbed(JAX, jax_starter, runs=2)
                plans = jax_plans(calls, options.seed, options.jax_points)
                _play(JAX, plans, reference, options, tally, jax_starter)
    if not tally.runs:
        print("no fault matches")
        return 2
    print(tally.table())
    for setting, outcome in tally.failed:
        faults = ", then ".join(map(str, outcome.faults))
        print(f"FAILED {setting}: {faults}: {'; '.join(outcome.problems)}")
    print(f"seed {options.seed}: {tally}; {time.monotonic() - started_s:.0f} s")
    return 1 if tally.failed else 0


def jax_plans(calls: dict[str, Counter[str]], seed: int, count: int) -> list[tuple[Fault, ...]]:
    """By seed; without short deadlines, which a real micro-batch does not keep."""
    faults = [fault for fault in every_fault(calls) if not fault.action.needs_deadline]
    return [(fault,) for fault in covering(faults, seed, count)]


def _play(
    setting: Setting,
    plans: list[tuple[Fault, ...]],
    reference: Outcome,
    options: argparse.Namespace,
    tally: Tally,
    starter: Starter,
) -> None:
    plans = [plan for plan in plans if options.only in ", then ".join(map(str, plan))]
    if not plans:
        return
    calls = {side: counts.total() for side, counts in reference.calls.items()}
    print(f"{setting.name}: {calls} calls undisturbed, {len(plans)} disturbed runs", flush=True)

    def one(number: int) -> Outcome:
        kept = options.keep / f"{setting.name}-{number}"
        return run_once(setting, plans[number], kept=kept, reference=reference, starter=starter)

    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = [pool.submit(one, number) for number in range(len(plans))]
        for done in tqdm(as_completed(waiting), total=len(waiting), unit="run", mininterval=1.0):
            outcome = done.result()
            tally.add(setting.name, outcome, reference)
            if outcome.problems:
                faults_text = ", then ".join(map(str, outcome.faults))
                tqdm.write(f"FAILED {setting.name}: {faults_text}: {'; '.join(outcome.problems)}")
    print(f"after {setting.name}: {tally}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
