"""The A/B's rules, each shown to fail on a wrong run; and two real runs, one of them wrong."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.bench.ab.main import arm_run, main, report
from orchestrator.bench.ab.score import (
    UPDATE_NORM,
    ArmRun,
    Arms,
    Verdict,
    conditions,
    judge,
    overall,
    table_lines,
)
from orchestrator.bench.ab.spec import FORWARD_METRIC, METRICS, Spec, SpecError, read_spec

SPECS = Path(__file__).parent.parent.parent / "deploy" / "ab"
BASE = {"loss": 0.25, "grad_norm": 1.5, "entropy": 10.3, FORWARD_METRIC: 9.9, UPDATE_NORM: 0.1}
ON = "\n[on]\norchestrator = ['--pipeline_step_boundary', '--stage_next_microbatch']\n"
STEPS = 4


def spec(tmp_path: Path, text: str) -> Spec:
    path = tmp_path / "spec.toml"
    path.write_text(text + ON if "[on]" not in text else text)
    return read_spec(path)


def arm(scale: float = 1.0, **changed: float) -> ArmRun:
    values = {name: value * scale for name, value in BASE.items()}
    values.update({name.replace("forward", FORWARD_METRIC): v for name, v in changed.items()})
    return ArmRun(
        metrics={step: dict(values) for step in range(STEPS)},
        trained={step: (4, 8, 32, 1000 + step, 700) for step in range(STEPS)},
    )


def at(run: ArmRun, step: int, **changed: float) -> ArmRun:
    """`run` with other values at one step only."""
    values = {name.replace("forward", FORWARD_METRIC): v for name, v in changed.items()}
    return replace(run, metrics={**run.metrics, step: {**run.metrics[step], **values}})


def without(run: ArmRun, step: int, metric: str) -> ArmRun:
    left = {name: value for name, value in run.metrics[step].items() if name != metric}
    return replace(run, metrics={**run.metrics, step: left})


def verdict(spec: Spec, off: ArmRun, on: ArmRun, again: ArmRun) -> Verdict:
    arms = Arms(off=off, on=on, off_again=again)
    return overall(judge(spec, arms), conditions(spec, arms))


def short(metric: str) -> str:
    return "forward" if metric == FORWARD_METRIC else metric


# -- the rules ------------------------------------------------------------------------------------


def test_band_equal_arms_pass(tmp_path: Path) -> None:
    band = spec(tmp_path, 'kind = "band"')
    assert verdict(band, arm(), arm(), arm()) is Verdict.PASS
    assert verdict(band, arm(0.999), arm(), arm(1.001)) is Verdict.PASS
    assert verdict(band, arm(1.001), arm(), arm(0.999)) is Verdict.PASS


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("metric", METRICS)
def test_band_one_metric_outside_at_one_step_fails(tmp_path: Path, metric: str, step: int) -> None:
    band = spec(tmp_path, 'kind = "band"')
    for factor in (1 + 1e-7, 1 - 1e-7):
        wrong = at(arm(), step, **{short(metric): BASE[metric] * factor})
        assert verdict(band, arm(), wrong, arm()) is Verdict.FAIL
    not_judged = at(arm(), 3, **{short(metric): BASE[metric] * 2})
    assert verdict(band, arm(), not_judged, arm()) is Verdict.PASS


def test_band_shows_its_noise_floor(tmp_path: Path) -> None:
    band = spec(tmp_path, 'kind = "band"')
    arms = Arms(off=arm(loss=0.25), on=arm(loss=0.31), off_again=arm(loss=0.27))
    loss = judge(band, arms)[0]
    assert (loss.metric, loss.noise, loss.distance) == ("loss", 0.27 - 0.25, 0.31 - 0.27)
    assert "0.31" in "\n".join(table_lines([loss]))


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

    def moved(by: float) -> ArmRun:
        return arm(**{metric: base + by if metric == "forward" else base * (1 + by)})

    for sign in (1, -1):
        assert verdict(bounds, arm(), moved(sign * passes), arm()) is Verdict.PASS
        assert verdict(bounds, arm(), moved(sign * fails), arm()) is Verdict.FAIL
        if unsure is not None:
            assert verdict(bounds, arm(), moved(sign * unsure), arm()) is Verdict.INCONCLUSIVE
    later = at(arm(), 1, **{metric: base * 2})
    assert verdict(bounds, arm(), later, arm()) is Verdict.PASS, "step 0 is judged"


def test_the_reference_is_the_mean_of_the_off_arms(tmp_path: Path) -> None:
    """Between two off arms that differ by 1.6e-3, +1.5e-3 from their mean passes, +2.5e-3 does not."""
    bounds = spec(tmp_path, 'kind = "bounds"')
    off, again = (arm(grad_norm=1.5 * (1 + shift)) for shift in (-0.8e-3, 0.8e-3))
    assert verdict(bounds, off, arm(grad_norm=1.5 * (1 + 1.5e-3)), again) is Verdict.PASS
    assert verdict(bounds, off, arm(grad_norm=1.5 * (1 + 2.5e-3)), again) is Verdict.INCONCLUSIVE


def test_off_arms_that_differ_too_much_say_nothing(tmp_path: Path) -> None:
    bounds = spec(tmp_path, 'kind = "bounds"')
    noisy = arm(grad_norm=BASE["grad_norm"] * 1.01)
    between = arm(grad_norm=BASE["grad_norm"] * 1.005)  # Their mean: no distance at all.
    assert verdict(bounds, arm(), between, noisy) is Verdict.INCONCLUSIVE
    assert verdict(bounds, noisy, between, arm()) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("kind", ["band", "bounds"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_missing_or_vacuous_number_is_inconclusive(tmp_path: Path, kind: str, which: int) -> None:
    made = spec(tmp_path, f'kind = "{kind}"')
    for metric in METRICS:
        for wrong in (
            without(arm(), 0, metric),
            at(arm(), 0, **{short(metric): math.nan}),
            at(arm(), 0, **{short(metric): math.inf}),
        ):
            runs = [arm(), arm(), arm()]
            runs[which] = wrong
            assert verdict(made, *runs) is Verdict.INCONCLUSIVE, metric
    zero = arm(grad_norm=0.0)
    assert verdict(made, zero, zero, zero) is Verdict.INCONCLUSIVE
    assert overall(()) is Verdict.INCONCLUSIVE


# -- the conditions -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["band", "bounds"])
def test_an_on_arm_that_trained_other_data_fails(tmp_path: Path, kind: str) -> None:
    made = spec(tmp_path, f'kind = "{kind}"')
    other = replace(arm(), trained={**arm().trained, 0: (4, 8, 32, 1000, 699)})
    assert verdict(made, arm(), other, arm()) is Verdict.FAIL
    assert verdict(made, arm(), arm(), other) is Verdict.INCONCLUSIVE
    assert verdict(made, arm(), arm(loss=9.0), other) is Verdict.INCONCLUSIVE, "nothing compares"
    unsaid = replace(arm(), trained={})
    assert verdict(made, arm(), unsaid, arm()) is Verdict.INCONCLUSIVE


def test_weights_that_stand_still_say_nothing_about_later_steps(tmp_path: Path) -> None:
    band = spec(tmp_path, 'kind = "band"')
    still = at(arm(), 1, **{UPDATE_NORM: 0.0})
    assert verdict(band, still, still, still) is Verdict.INCONCLUSIVE
    last = at(arm(), 2, **{UPDATE_NORM: 0.0})  # No judged step follows this update.
    assert verdict(band, last, last, last) is Verdict.PASS
    only_first = spec(tmp_path, 'kind = "bounds"')
    assert verdict(only_first, still, still, still) is Verdict.PASS


def test_a_switch_that_did_nothing_is_not_a_pass(tmp_path: Path) -> None:
    band = spec(tmp_path, 'kind = "band"\non_stages = true\nnum_steps = 4')
    staged = replace(arm(), staged=frozenset({1, 2, 3}))
    assert verdict(band, arm(), staged, arm()) is Verdict.PASS
    assert verdict(band, arm(), arm(), arm()) is Verdict.INCONCLUSIVE
    latched = replace(arm(), staged=frozenset({1, 2}))
    assert verdict(band, arm(), latched, arm()) is Verdict.INCONCLUSIVE
    assert verdict(band, staged, staged, arm()) is Verdict.INCONCLUSIVE
    wrong = replace(arm(loss=9.0), staged=frozenset({1}))
    assert verdict(band, arm(), wrong, arm()) is Verdict.FAIL, "a difference stays a difference"


# -- the report -----------------------------------------------------------------------------------


def test_the_report_is_json_also_of_numbers_that_are_not_known(tmp_path: Path) -> None:
    band = spec(tmp_path, 'kind = "band"')
    arms = Arms(off=without(arm(), 0, "loss"), on=arm(), off_again=arm())
    findings, held = judge(band, arms), conditions(band, arms)
    written = json.loads(json.dumps(report(band, arms, findings, held), allow_nan=False))
    assert written["verdict"] == "INCONCLUSIVE"
    assert written["sha256"] == band.sha256
    assert written["findings"][0]["off"] == [None, 0.25]
    assert written["arms"]["on"]["orchestrator"][0] == "--pipeline_step_boundary"
    assert [condition["verdict"] for condition in written["conditions"]] == ["PASS", "PASS"]


def test_a_result_file_is_read_whole() -> None:
    summary = {
        "micro_batches": 4,
        "rows": 8,
        "trajectories": 16,
        "real_tokens": 6000,
        "trained_tokens": 3000,
    }
    steps = [
        {"step": 0, "metrics": {"loss": 1}, "summary": summary, "staged_input_used": False},
        {"step": 1, "metrics": {}, "summary": None, "staged_input_used": True},
    ]
    read = arm_run({"steps": steps, "parameter_digest": "abc"})
    assert read == ArmRun(
        metrics={0: {"loss": 1.0}, 1: {}},
        trained={0: (4, 8, 16, 6000, 3000)},
        staged=frozenset({1}),
        parameter_digest="abc",
    )


# -- the spec -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kind = 'sometimes'", "kind is 'sometimes'"),
        ("kind = 'band'\nsurprise = 1", "surprise"),
        ("kind = 'band'\nsteps = []", "steps is"),
        ("kind = 'band'\nsteps = [true]", "steps is"),
        ("kind = 'band'\nnum_steps = 2", "num_steps is 2"),
        ("kind = 'band'\non_stages = 'yes'", "on_stages is 'yes'"),
        ("kind = 'band'\n[on]\nworkers = []", "workers"),
        ("kind = 'band'\n[on]\nworker = '--x'", "list of flags"),
        ("kind = 'band'\n[on]\n", "same flags"),
        ("kind = 'band'\n[on]\norchestrator = ['--num_steps=9']", "sets --num_steps itself"),
        ("kind = 'band'\n[on]\nworker = ['--listen=x']", "sets --listen itself"),
        ("kind = 'bounds'\n[bounds.speed]\npasses = 1", "bounds.speed"),
        ("kind = 'bounds'\n[bounds.loss]\npasses = 2\nfails = 1", "passes <= fails"),
        ("kind = 'bounds'\n[bounds.loss]\npasses = -1", "0 or more"),
        ("kind = 'bounds'\n[bounds.loss]\nfails = inf", "it is a number"),
        ("kind = 'bounds'\n[bounds.loss]\nfails = 'none'", "it is a number"),
        ("kind = ", "spec.toml"),
    ],
)
def test_a_spec_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(SpecError, match=says):
        spec(tmp_path, text)


def test_json_and_toml_say_the_same(tmp_path: Path) -> None:
    toml = spec(tmp_path, "kind = 'bounds'\nsteps = [0, 1]\n[bounds.entropy]\npasses = 1e-6")
    path = tmp_path / "spec.json"
    content = {
        "kind": "bounds",
        "steps": [0, 1],
        "bounds": {"entropy": {"passes": 1e-6}},
        "on": {"orchestrator": ["--pipeline_step_boundary", "--stage_next_microbatch"]},
    }
    path.write_text(json.dumps(content))
    assert replace(read_spec(path), sha256="") == replace(toml, sha256="")
    path.write_text("[1]")
    with pytest.raises(SpecError, match="no table of keys"):
        read_spec(path)
    path.write_text("{")
    with pytest.raises(SpecError, match=r"spec\.json"):
        read_spec(path)


def test_the_hash_is_the_files_own(tmp_path: Path) -> None:
    first = spec(tmp_path, "kind = 'band'")
    second = spec(tmp_path, "kind = 'band' # moved goalposts")
    assert first.sha256 != second.sha256


def test_the_shipped_specs_read() -> None:
    shipped = {path.stem: read_spec(path) for path in sorted(SPECS.glob("*.toml"))}
    assert {spec.kind for spec in shipped.values()} == {"band", "bounds"}
    assert shipped["staged-boundary"].on_stages
    assert shipped["staged-boundary"].steps == (0, 1, 2)


# -- the command ----------------------------------------------------------------------------------


def test_what_would_reach_every_arm_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = SPECS / "staged-boundary.toml"
    assert main([f"--spec={path}", f"--rollouts={tmp_path / 'none.parquet'}"]) == 2
    assert "is no file" in capsys.readouterr().err
    monkeypatch.setenv("PIPELINE_STEP_BOUNDARY", "1")
    assert main([f"--spec={path}"]) == 2
    assert "PIPELINE_STEP_BOUNDARY is set" in capsys.readouterr().err
    assert main([f"--spec={tmp_path / 'none.toml'}"]) == 2


def test_an_engine_without_gradients_is_inconclusive_and_the_hash_comes_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = spec(
        tmp_path,
        """kind = "band"
num_steps = 3
[common]
worker = ["--engine=timed", "--timed_fwd_bwd_s=0.005", "--timed_copy_s=0.001"]
orchestrator = ["--rows=2", "--groups_per_batch=1", "--latch_after=99", "--vocab_size=49152"]
[on]
orchestrator = ["--pipeline_step_boundary", "--stage_next_microbatch"]
""",
    )
    out = tmp_path / "out"
    assert main([f"--spec={tmp_path / 'spec.toml'}", f"--out={out}"]) == 3
    printed = capsys.readouterr().out
    assert printed.index(made.sha256) < printed.index("arm off ...")
    assert "INCONCLUSIVE: missing or not finite in an arm" in printed
    written = json.loads((out / "verdict.json").read_text())
    assert written["verdict"] == "INCONCLUSIVE"
    assert len(set(written["parameter_digests"].values())) == 1


def test_an_arm_that_does_not_run_is_told_from_a_verdict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec(
        tmp_path,
        "kind = 'band'\n[common]\nworker = ['--engine=timed', '--timed_copy_s=-1']",
    )
    assert main([f"--spec={tmp_path / 'spec.toml'}", f"--out={tmp_path}"]) == 4
    assert "arm off: " in capsys.readouterr().err


@pytest.mark.slow
def test_the_staged_boundary_passes_with_real_gradients(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([f"--spec={SPECS / 'staged-boundary.toml'}", f"--out={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert "3 staged inputs in the on arm, none in the off arms" in printed
    assert printed.rstrip().endswith("PASS")


@pytest.mark.slow
def test_a_wrong_learning_rate_fails_at_step_1_with_real_gradients(tmp_path: Path) -> None:
    spec(
        tmp_path,
        """kind = "band"
steps = [0, 1]
num_steps = 2
[common]
worker = ["--engine=jax", "--preset=tiny"]
orchestrator = ["--rows=1", "--tokens_per_row=1024", "--groups_per_batch=1"]
[off]
worker = ["--learning_rate=1e-3"]
[on]
worker = ["--learning_rate=1.001e-3"]
""",
    )
    assert main([f"--spec={tmp_path / 'spec.toml'}", f"--out={tmp_path}"]) == 1
    findings = json.loads((tmp_path / "verdict.json").read_text())["findings"]
    failed = {finding["step"] for finding in findings if finding["verdict"] == "FAIL"}
    assert failed == {1}, "step 0 precedes the first update"
