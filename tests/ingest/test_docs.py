"""The page for rollout teams: its example runs, and it names every reason and flag as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import orchestrator.client
from orchestrator.ingest import flags
from orchestrator.ingest.limits import IngestLimits
from orchestrator.trajectory import DropReason
from prestage.rollout.refusals import RETRIED, RolloutReason
from tests.ingest.rig import served

PAGE = (Path(__file__).parent.parent.parent / "docs" / "ingest.md").read_text()


def block(title: str) -> str:
    section = PAGE.split(f"## {title}")[1]
    return section.split("```python\n")[1].split("```")[0]


def test_the_ten_lines_work(capsys: pytest.CaptureFixture[str]) -> None:
    example = block("A producer in ten lines").replace('"run"', '"run-1"')
    with served() as where:
        exec(compile(example, "docs/ingest.md", "exec"), {"address": where.address})
    assert "accepted=True" in capsys.readouterr().out
    (taken,) = where.log.taken
    assert taken.prompt_tokens.tolist() == [1, 2, 3]
    assert taken.completion_tokens.tolist() == [40, 41]


def test_every_reason_to_drop_is_explained() -> None:
    by_request = {
        DropReason.TRUNCATED_BY_REQUEST,
        DropReason.FIRST_TOKEN_HAS_NO_PREDICTOR,
    }
    for reason in set(DropReason) - by_request:
        assert f"`{reason.value}`" in PAGE


def test_every_refusal_is_in_the_row_of_what_the_client_does() -> None:
    rows = {
        does: set(re.findall(r"`([A-Z_]+)`", names))
        for names, does in re.findall(r"^\| (`[A-Z_`, ]+`) \| ([^|]+) \|$", PAGE, re.MULTILINE)
    }
    ended = RolloutReason.RUN_ENDED
    assert rows == {
        "connects again": {reason.value for reason in RETRIED},
        "raises `RunEnded`": {ended.value},
        "raises `ProducerRefused`": {
            reason.value for reason in RolloutReason if reason not in RETRIED | {ended}
        },
    }


def test_numbers_and_names_are_those_of_the_code() -> None:
    limits = IngestLimits()
    for text in (
        f"{limits.window} (`window`)",
        f"({flags.MAX_PRODUCERS.default}) producers and {limits.max_watchers} watchers",
        f"within {limits.open_s:g} s",
        f"more than {limits.max_unopened}",
        f"for {limits.idle_s / 60:g} minutes",
        f"at most {limits.max_message_bytes >> 20} MiB",
        f"up to {limits.max_trajectory_bytes >> 20} MiB",
        f"({flags.JOURNAL_BUDGET.default >> 30} GiB)",
        f"({flags.JOURNAL_PENDING.default >> 20} MiB)",
    ):
        assert text in PAGE, text
    for name in ("RunEnded", "ProducerRefused", "ProducerUnreachable", "ProducerClosed"):
        assert f"`{name}`" in PAGE and name in orchestrator.client.__all__
