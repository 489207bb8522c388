"""The specs of the two gates at full size: their rule, and that each arm is what it claims to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.bench.ab.spec import FORWARD_METRIC, Arm, SpecError, read_spec
from orchestrator.bench.processes import worker_process
from orchestrator.recipes.flagnames import ENV_LIBTPU, ENV_MAXTEXT
from orchestrator.recipes.keys import TUNED_LIBTPU, TUNED_MAXTEXT, TUNED_PRECISION
from orchestrator.recipes.launch import launch, maxtext_settings
from orchestrator.recipes.manifests import site_of
from tests.deploy.recipes import ROOT, shipped

AB = ROOT / "deploy" / "ab"
RECIPE = "gbs1024-submission"


def environment(arm: Arm) -> dict[str, str]:
    return dict(word.split("=", 1) for word in arm.environment)


def maxtext(arm: Arm) -> dict[str, str]:
    return dict(word.split("=", 1) for word in environment(arm)[ENV_MAXTEXT].split())


def test_the_gate_of_the_tuned_settings() -> None:
    spec = read_spec(AB / "tuned-settings-tpu.toml")
    assert spec.kind == "bounds"
    assert spec.steps == (0,)
    limits = {name: (bound.passes, bound.fails) for name, bound in spec.bounds.items()}
    assert limits == {
        "loss": (1e-5, 1e-5),
        FORWARD_METRIC: (5e-5, 5e-4),
        "entropy": (1e-4, 1e-3),
        "grad_norm": (2e-3, 1e-2),
    }
    assert [name for name, bound in spec.bounds.items() if bound.absolute] == [FORWARD_METRIC]
    # The arms differ by the libtpu flag and the six settings, and by nothing else.
    assert (spec.off.worker, spec.off.orchestrator) == (spec.on.worker, spec.on.orchestrator)
    off, on = maxtext(spec.off), maxtext(spec.on)
    changed = {name: value for name, value in on.items() if off.get(name) != value}
    assert changed == {**dict(TUNED_MAXTEXT), "num_moe_token_chunks": "2"}
    assert off["num_moe_token_chunks"] == "4"
    assert set(off) < set(on)
    assert not set(dict(TUNED_PRECISION)) & set(on)
    flags = dict(
        word.removeprefix("--").split("=") for word in environment(spec.on)[ENV_LIBTPU].split()
    )
    assert flags == dict(TUNED_LIBTPU)
    assert ENV_LIBTPU not in environment(spec.off)


def test_the_gate_of_the_staged_boundary() -> None:
    spec = read_spec(AB / "staged-boundary-tpu.toml")
    assert spec.kind == "band"
    assert spec.steps == (0, 1, 2)
    assert spec.on_stages
    assert (spec.off.worker, spec.off.environment) == (spec.on.worker, spec.on.environment)
    added = spec.on.orchestrator[len(spec.off.orchestrator) :]
    assert added == ("--pipeline_step_boundary", "--stage_next_microbatch")
    # What trains is what the recipe would render.
    settings = shipped(RECIPE)
    assert maxtext(spec.on) == dict(maxtext_settings(settings))
    both = launch(settings, site_of(settings))
    assert set(spec.on.worker) - {"--logp_gate=0"} <= set(both.worker.argv)
    assert set(spec.off.orchestrator) <= set(both.orchestrator.argv)
    assert environment(spec.on)[ENV_LIBTPU] == both.worker.environment[ENV_LIBTPU]


@pytest.mark.parametrize("name", ["tuned-settings-tpu", "staged-boundary-tpu"])
def test_no_gate_drops_sequences(name: str) -> None:
    """With the log-prob gate on, a random-weight model has loss and gradient 0."""
    spec = read_spec(AB / f"{name}.toml")
    for arm in (spec.off, spec.on):
        assert "--logp_gate=0" in arm.worker


def test_an_arms_variables_reach_its_worker(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    arguments = ("--engine=timed", "--timed_fwd_bwd_s=0.01")
    with worker_process(arguments, log, environment={"PRESTAGE_TEST": "on"}) as worker:
        pid = worker.process.pid
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert b"PRESTAGE_TEST=on" in variables


def test_an_arms_own_variable_replaces_the_common_one(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    text = "kind='bounds'\n[common]\nenvironment=['A=1', 'B=x=y']\n[on]\nenvironment=['A=2']\n"
    path.write_text(text)
    spec = read_spec(path)
    assert spec.off.environment == ("A=1", "B=x=y")
    assert spec.on.environment == ("A=2", "B=x=y")
    path.write_text(text.replace("'A=2'", "'A'"))
    with pytest.raises(SpecError, match="write NAME=VALUE"):
        read_spec(path)
