"""Judges an A/B's numbers. Pure: three arms' metrics in, a verdict out."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.bench.ab.spec import METRICS, Bound, Spec

Metrics = Mapping[int, Mapping[str, float]]
"""Step to metric to value."""


class Verdict(enum.Enum):
    PASS = "PASS"
    INCONCLUSIVE = "INCONCLUSIVE"
    FAIL = "FAIL"


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


def judge(spec: Spec, off: Metrics, on: Metrics, off_again: Metrics) -> tuple[Finding, ...]:
    """Every metric at every judged step, by the spec's rule."""
    findings = []
    for step in spec.steps:
        for metric in METRICS:
            values = [arm.get(step, {}).get(metric, math.nan) for arm in (off, on, off_again)]
            finding = _missing(step, metric, values)
            if finding is None and spec.kind == "band":
                finding = _band(step, metric, values)
            elif finding is None:
                finding = _bounded(step, metric, values, spec.bounds[metric])
            findings.append(finding)
    return tuple(findings)


def overall(findings: Sequence[Finding]) -> Verdict:
    """FAIL if any fails, else INCONCLUSIVE if any is or there are none, else PASS."""
    verdicts = {finding.verdict for finding in findings}
    if Verdict.FAIL in verdicts:
        return Verdict.FAIL
    if Verdict.INCONCLUSIVE in verdicts or not verdicts:
        return Verdict.INCONCLUSIVE
    return Verdict.PASS


def table_lines(findings: Sequence[Finding]) -> list[str]:
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
    return lines
