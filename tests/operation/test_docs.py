"""The operations page names only flags, metrics and states that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from orchestrator.operation.board import RunState
from prestage.operation.heartbeat import STUCK_EXIT_CODE
from prestage.operation.signals import SECOND_INTERRUPT_EXIT_CODE
from tests.deploy.test_flags_accepted import accepted

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "operations.md").read_text()
OF_THE_COMMAND_LINE = {"admin", "wait_s", "json"}


def test_every_flag_of_the_page_exists() -> None:
    named = set(re.findall(r"--([a-z][a-z_]+)", PAGE)) - OF_THE_COMMAND_LINE
    assert len(named) > 12
    there = accepted("orchestrator") | accepted("trainer_worker")
    pending = {"tls_dir", "token_dir"} - there
    assert named - there - pending == set()


def test_every_metric_of_the_page_is_listed() -> None:
    listed = {item["name"] for item in json.loads((ROOT / "deploy" / "metrics.json").read_text())}
    assert set(re.findall(r"prestage_[a-z_]+_total", PAGE)) <= listed


@pytest.mark.parametrize("state", [state.value for state in RunState])
def test_every_state_is_explained(state: str) -> None:
    assert f"`{state}`" in PAGE


def test_the_exit_statuses_are_the_programs() -> None:
    assert f"| {STUCK_EXIT_CODE} | both |" in PAGE
    assert f"| {SECOND_INTERRUPT_EXIT_CODE} | both |" in PAGE


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([a-z/.-]+\.md)\)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target
