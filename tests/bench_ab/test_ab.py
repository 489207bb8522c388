"""The A/B's rules, each shown to fail on a wrong run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from orchestrator.bench.ab.score import Metrics, Verdict, judge, overall
from orchestrator.bench.ab.spec import FORWARD_METRIC, METRICS, Spec, SpecError, read_spec

SPECS = Path(__file__).parent.parent.parent / "deploy" / "ab"
BASE = {"loss": 0.25, "grad_norm": 1.5, "entropy": 10.3, FORWARD_METRIC: 9.9}


def spec(tmp_path: Path, text: str) -> Spec:
    path = tmp_path / "spec.toml"
    path.write_text(text)
    return read_spec(path)


def arm(scale: float = 1.0, **changed: float) -> Metrics:
    values = {name: value * scale for name, value in BASE.items()}
    values.update({name.replace("forward", FORWARD_METRIC): v for name, v in changed.items()})
    return {step: values for step in range(3)}


def verdict(spec: Spec, off: Metrics, on: Metrics, again: Metrics) -> Verdict:
    return overall(judge(spec, off, on, again))


def test_band_equal_arms_pass(tmp_path: Path) -> None:
    band = spec(tmp_path, 'kind = "band"')
    assert verdict(band, arm(), arm(), arm()) is Verdict.PASS
    assert verdict(band, arm(0.999), arm(), arm(1.001)) is Verdict.PASS


@pytest.mark.parametrize("metric", METRICS)
def test_band_one_metric_outside_fails(tmp_path: Path, metric: str) -> None:
    band = spec(tmp_path, 'kind = "band"')
    name = "forward" if metric == FORWARD_METRIC else metric
    wrong = arm(**{name: BASE[metric] * (1 + 1e-7)})
    assert verdict(band, arm(), wrong, arm()) is Verdict.FAIL
    late = {**arm(), 2: wrong[2]}
    assert verdict(band, arm(), late, arm()) is Verdict.FAIL, "the last judged step counts"


@pytest.mark.parametrize(
    ("metric", "passes", "unsure", "fails"),
    [
        ("loss", 0.5e-5, None, 2e-5),
        ("grad_norm", 1e-3, 5e-3, 2e-2),
        ("entropy", 0.5e-4, 5e-4, 2e-3),
        ("forward", 4e-5, 1e-4, 6e-4),
    ],
)
def test_bounds(
    tmp_path: Path, metric: str, passes: float, unsure: float | None, fails: float
) -> None:
    bounds = spec(tmp_path, 'kind = "bounds"')
    base = BASE[FORWARD_METRIC] if metric == "forward" else BASE[metric]

    def moved(by: float) -> Metrics:
        return arm(**{metric: base + by if metric == "forward" else base * (1 + by)})

    assert verdict(bounds, arm(), moved(passes), arm()) is Verdict.PASS
    assert verdict(bounds, arm(), moved(-passes), arm()) is Verdict.PASS
    assert verdict(bounds, arm(), moved(fails), arm()) is Verdict.FAIL
    if unsure is not None:
        assert verdict(bounds, arm(), moved(unsure), arm()) is Verdict.INCONCLUSIVE


def test_off_arms_that_differ_too_much_say_nothing(tmp_path: Path) -> None:
    bounds = spec(tmp_path, 'kind = "bounds"')
    noisy = arm(grad_norm=BASE["grad_norm"] * 1.01)
    assert verdict(bounds, arm(), arm(), noisy) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("kind", ["band", "bounds"])
def test_a_missing_or_vacuous_number_is_inconclusive(tmp_path: Path, kind: str) -> None:
    made = spec(tmp_path, f'kind = "{kind}"')
    missing = {0: {name: value for name, value in BASE.items() if name != "entropy"}}
    assert verdict(made, arm(), {**arm(), **missing}, arm()) is Verdict.INCONCLUSIVE
    assert verdict(made, arm(), arm(loss=math.nan), arm()) is Verdict.INCONCLUSIVE
    zero = arm(grad_norm=0.0)
    assert verdict(made, zero, zero, zero) is Verdict.INCONCLUSIVE
    assert overall(()) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kind = 'sometimes'", "kind is 'sometimes'"),
        ("kind = 'band'\nsurprise = 1", "surprise"),
        ("kind = 'band'\nsteps = []", "steps is"),
        ("kind = 'band'\nnum_steps = 2", "num_steps is 2"),
        ("kind = 'band'\n[on]\nworkers = []", "workers"),
        ("kind = 'band'\n[on]\nworker = '--x'", "list of flags"),
        ("kind = 'bounds'\n[bounds.speed]\npasses = 1", "bounds.speed"),
        ("kind = 'bounds'\n[bounds.loss]\npasses = 2\nfails = 1", "passes <= fails"),
        ("kind = ", "spec.toml"),
    ],
)
def test_a_spec_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(SpecError, match=says):
        spec(tmp_path, text)


def test_the_hash_is_the_files_own(tmp_path: Path) -> None:
    first = spec(tmp_path, "kind = 'band'")
    second = spec(tmp_path, "kind = 'band' # moved goalposts")
    assert first.sha256 != second.sha256


def test_the_shipped_specs_read() -> None:
    shipped = sorted(SPECS.glob("*.toml"))
    assert len(shipped) >= 2
    for path in shipped:
        read_spec(path)
