"""The specs that judge a switch of the jax engine: their arms differ by that switch alone, and the
worker takes every flag of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.bench.ab.spec import DEFAULT_BOUNDS, read_spec

AB = Path(__file__).parents[2] / "deploy" / "ab"
SWITCHES = {
    "logprob-head": {"--logps_sharded_head=local"},
    "precision-keys": {"--cast_grads_after_all_reduce", "--matmul_precision=high"},
    "padding-exclusion": {"--exclude_padding_from_routing", "--noexclude_padding_from_routing"},
}


@pytest.mark.parametrize("name", SWITCHES)
def test_the_arms_differ_by_the_switch_alone(name: str) -> None:
    spec = read_spec(AB / f"{name}.toml")
    assert spec.kind == "bounds"
    assert spec.steps == (0,)
    assert dict(spec.bounds) == dict(DEFAULT_BOUNDS)
    assert set(spec.on.worker) ^ set(spec.off.worker) == SWITCHES[name]
    assert spec.on.orchestrator == spec.off.orchestrator
    assert spec.on.environment == spec.off.environment


@pytest.mark.parametrize("name", SWITCHES)
def test_the_worker_takes_the_flags_of_both_arms(name: str) -> None:
    spec = read_spec(AB / f"{name}.toml")
    for arm in (spec.off, spec.on):
        command = [sys.executable, "-m", "trainer_worker.main", *arm.worker, "--only_check_args"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
