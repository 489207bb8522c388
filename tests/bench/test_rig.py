"""The rig's predictions, and that `bench all` names benches that exist."""

from __future__ import annotations

from pathlib import Path

from orchestrator.bench.main import COMMANDS
from orchestrator.bench.rig import ARMS, predicted
from orchestrator.bench.suite import parts


def test_every_arm_has_two_predictions() -> None:
    names = {item.quantity for item in predicted(3, 1.0, 0.2, 0.7)}
    assert names == {f"{arm}/{what}" for arm in ARMS for what in ("boundary_idle", "step_seconds")}


def test_the_suite_runs_known_benches() -> None:
    assert set(parts(Path("out"))) <= set(COMMANDS)
