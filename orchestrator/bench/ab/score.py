"""Judges an A/B's numbers. Pure: three arms' results in, a verdict out.

Two parts. Findings: each metric at each judged step, by the spec's rule. Conditions: what must hold
for a PASS to mean anything (same data, weights that move, a switch that was on).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.bench.ab.spec import METRICS, Bound, Spec

Metrics = Mapping[int, Mapping[str, float]]
"""Step to metric to value."""
UPDATE_NORM = "update_norm"


class Verdict(enum.Enum):
    PASS = "PASS"
    INCONCLUSIVE = "INCONCLUSIVE"
    FAIL = "FAIL"


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """What one arm's run came out with."""

    metrics: Metrics
    trained: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Step to (micro-batches, rows, trajectories, real tokens, trained tokens)."""
    staged: frozenset[int] = frozenset()  # Steps whose first micro-batch was a staged input.
    parameter_digest: str = ""


@dataclass(frozen=True, kw_only=True)
class Arms:
    """The three arms, in the order in which they ran."""

    off: ArmRun
    on: ArmRun
    off_again: ArmRun

    def named(self) -> tuple[tuple[str, ArmRun], ...]:
        return (("off", self.off), ("on", self.on), ("off again", self.off_again))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One metric at one step."""

    step: int
    metric: str
    off: tuple[float, float]
    on: float
    noise: float  # Between the two off arms, in the rule's own measure.
    distance: float  # Of `on`, in the same measure.
    verdict: Verdict
    why: str


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What must hold for a PASS to mean anything."""

    name: str
    verdict: Verdict
    why: str
    voids: bool = False  # It does not hold, and so no finding means anything either.


def _missing(step: int, metric: str, values: Sequence[float]) -> Finding | None:
    """INCONCLUSIVE when a number is missing or not finite, or the gradient is zero (vacuous)."""
    off, on = (values[0], values[2]), values[1]
    if not all(math.isfinite(value) for value in values):
        why = "missing or not finite in an arm"
    elif metric == "grad_norm" and min(values) <= 0:
        why = "no gradient: the comparison says nothing"
    else:
        return None
    return Finding(
        step=step,
        metric=metric,
        off=off,
        on=on,
        noise=math.nan,
        distance=math.nan,
        verdict=Verdict.INCONCLUSIVE,
        why=why,
    )


def _band(step: int, metric: str, values: Sequence[float]) -> Finding:
    first, on, second = values
    low, high = min(first, second), max(first, second)
    outside = max(low - on, on - high, 0.0)
    return Finding(
        step=step,
        metric=metric,
        off=(first, second),
        on=on,
        noise=high - low,
        distance=outside,
        verdict=Verdict.PASS if outside == 0 else Verdict.FAIL,
        why="inside the off arms' band" if outside == 0 else "outside the off arms' band",
    )


def _bounded(step: int, metric: str, values: Sequence[float], bound: Bound) -> Finding:
    first, on, second = values
    mean = (first + second) / 2
    scale = 1.0 if bound.absolute else max(abs(mean), 1e-30)
    noise, distance = abs(first - second) / scale, abs(on - mean) / scale
    kind = "absolute" if bound.absolute else "relative"
    if noise > bound.passes:
        verdict, why = Verdict.INCONCLUSIVE, f"the off arms differ by {noise:.3g} themselves"
    elif distance <= bound.passes:
        verdict, why = Verdict.PASS, f"{kind}, bound {bound.passes:g}"
    elif distance > bound.fails:
        verdict, why = Verdict.FAIL, f"{kind}, above {bound.fails:g}"
    else:
        verdict, why = (
            Verdict.INCONCLUSIVE,
            f"{kind}, between {bound.passes:g} and {bound.fails:g}",
        )
    return Finding(
        step=step,
        metric=metric,
        off=(first, second),
        on=on,
        noise=noise,
        distance=distance,
        verdict=verdict,
        why=why,
    )


def judge(spec: Spec, arms: Arms) -> tuple[Finding, ...]:
    """Every metric at every judged step, by the spec's rule."""
    findings = []
    for step in spec.steps:
        for metric in METRICS:
            values = [run.metrics.get(step, {}).get(metric, math.nan) for _, run in arms.named()]
            finding = _missing(step, metric, values)
            if finding is None and spec.kind == "band":
                finding = _band(step, metric, values)
            elif finding is None:
                finding = _bounded(step, metric, values, spec.bounds[metric])
            findings.append(finding)
    return tuple(findings)


def _condition(name: str, wrong: Sequence[str], holds: str) -> Condition:
    verdict = Verdict.INCONCLUSIVE if wrong else Verdict.PASS
    return Condition(name=name, verdict=verdict, why="; ".join(wrong) or holds)


def _same_data(spec: Spec, arms: Arms) -> Condition:
    """Off arms that differ void everything; an `on` arm that trains other data is wrong itself."""
    name = "the arms trained the same data"
    for step in range(max(spec.steps) + 1):
        off, on, again = (run.trained.get(step, ()) for _, run in arms.named())
        where = f"step {step}: {off}, {on}, {again}"
        if not (off and on and again) or off != again:
            return Condition(name=name, verdict=Verdict.INCONCLUSIVE, why=where, voids=True)
        if on != off:
            return Condition(name=name, verdict=Verdict.FAIL, why=where)
    return Condition(name=name, verdict=Verdict.PASS, why="at every judged step")


def _moved(spec: Spec, arms: Arms) -> Condition:
    """Later steps are judged to see the updates before them: there must have been some."""
    wrong, unsaid = [], False
    for name, run in arms.named():
        for step in range(max(spec.steps)):
            norm = run.metrics.get(step, {}).get(UPDATE_NORM)
            unsaid = unsaid or norm is None
            if norm is not None and not norm > 0:
                wrong.append(f"{name}: update_norm of step {step} is {norm:g}")
    holds = "an arm reports no update_norm" if unsaid else "before every judged step"
    return _condition("the updates moved the weights", wrong, holds)


def _staged(spec: Spec, arms: Arms) -> Condition:
    wanted = set(range(1, spec.num_steps))
    wrong = []
    missed = sorted(wanted - arms.on.staged)
    if missed:
        wrong.append(f"on: no staged input in step(s) {', '.join(map(str, missed))}")
    for name, run in (("off", arms.off), ("off again", arms.off_again)):
        if run.staged:
            wrong.append(
                f"{name}: staged input in step(s) {', '.join(map(str, sorted(run.staged)))}"
            )
    holds = f"{len(wanted)} staged inputs in the on arm, none in the off arms"
    return _condition("the switch was on in the on arm only", wrong, holds)


def conditions(spec: Spec, arms: Arms) -> tuple[Condition, ...]:
    """Everything that must hold for the findings to mean anything."""
    found = [_same_data(spec, arms)]
    if max(spec.steps) > 0:
        found.append(_moved(spec, arms))
    if spec.on_stages:
        found.append(_staged(spec, arms))
    return tuple(found)


def overall(findings: Sequence[Finding], held: Sequence[Condition] = ()) -> Verdict:
    """INCONCLUSIVE where nothing was compared; else FAIL if anything fails, INCONCLUSIVE if anything
    is, PASS otherwise."""
    if not findings or any(condition.voids for condition in held):
        return Verdict.INCONCLUSIVE
    verdicts = {finding.verdict for finding in findings}
    verdicts |= {condition.verdict for condition in held}
    for worst in (Verdict.FAIL, Verdict.INCONCLUSIVE):
        if worst in verdicts:
            return worst
    return Verdict.PASS


def table_lines(findings: Sequence[Finding], held: Sequence[Condition] = ()) -> list[str]:
    lines = [
        f"{'step':>4} {'metric':<34}{'off':>15}{'on':>15}{'off again':>15}{'noise':>11}"
        f"{'distance':>11}  verdict"
    ]
    for item in findings:
        lines.append(
            f"{item.step:>4} {item.metric:<34}{item.off[0]:>15.9g}{item.on:>15.9g}"
            f"{item.off[1]:>15.9g}{item.noise:>11.3g}{item.distance:>11.3g}"
            f"  {item.verdict.value}: {item.why}"
        )
    lines += [f"{item.verdict.value}: {item.name}: {item.why}" for item in held]
    return lines
