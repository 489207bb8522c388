"""What a live run tells samplers of its policy version, and which flags it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from absl import flags

from orchestrator import flags as orchestrator_flags
from orchestrator.boundary import BoundaryState, initial
from orchestrator.calls import Done, Lost
from orchestrator.flags import config_from_flags
from orchestrator.ingest import flags as ingest_flags
from orchestrator.ingest.flags import LiveFlags
from orchestrator.live import LiveIntake
from orchestrator.plan import RunPlan
from orchestrator.ports import Answer
from prestage.trace import TraceRecord

FLAGS = LiveFlags(
    listen="unix:///tmp/unused.sock",
    journal_dir=Path("/tmp/unused"),
    journal_budget_bytes=1,
    journal_pending_bytes=1,
    group_timeout_s=1.0,
    extra=0,
    max_staleness=None,
    max_producers=1,
)


def intake(weight_sync_every: int = 0) -> LiveIntake:
    made = LiveIntake(FLAGS)
    made._sync_every = weight_sync_every
    return made


def state(step: int, train_step: int) -> BoundaryState:
    begun = initial(RunPlan(num_steps=100))
    return replace(begun, mirror=replace(begun.mirror, step=step, train_step=train_step))


def call(live: LiveIntake, name: str, answer: Answer) -> None:
    live.on_call(TraceRecord(side="orchestrator", call=name, run_id="run"), answer)


def test_without_weight_syncs_every_update_is_told() -> None:
    live = intake()
    told = []
    # Step 2 was skipped: its step closed, its update did not happen.
    for step, train_step in ((0, 0), (1, 1), (2, 2), (3, 2), (4, 3)):
        live.on_state(state(step, train_step))
        told.append(live.board.state.policy_version)
    assert told == [0, 1, 2, 2, 3]


def test_r14_with_weight_syncs_a_version_is_told_once_its_sync_is_prepared() -> None:
    live = intake(weight_sync_every=2)
    call(live, "fwd_bwd", Answer(event=Done()))
    live.on_state(state(2, 2))
    assert live.board.state.policy_version == 0, "updates alone change nothing for samplers"
    call(live, "prepare_weight_sync", Answer(event=Lost(why="timeout"), train_step=2))
    assert live.board.state.policy_version == 0, "nobody knows whether it is there"
    call(live, "prepare_weight_sync", Answer(event=Done(), train_step=2))
    assert live.board.state.policy_version == 2
    live.on_state(state(3, 3))
    assert live.board.state.policy_version == 2


def test_r39_a_resumed_run_offers_the_last_synced_version_until_the_next_sync() -> None:
    live = intake(weight_sync_every=4)
    live.on_state(state(10, 10))  # What the worker says when the run is opened.
    assert live.board.state.policy_version == 8
    call(live, "fwd_bwd", Answer(event=Done()))
    live.on_state(state(11, 11))
    assert live.board.state.policy_version == 8


def test_a_restored_run_tells_samplers_that_it_went_back() -> None:
    live = intake()
    live.on_state(state(6, 6))
    live.on_state(state(4, 4))
    assert live.board.state.policy_version == 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--listen=unix:///tmp/i.sock"], ["--listen", "--journal_dir is not set"]),
        (["--journal_dir=/tmp/j"], ["--journal_dir", "--listen is not set"]),
        (
            ["--listen=unix:///tmp/i.sock", "--journal_dir=/tmp/j", "--rollouts=x.parquet"],
            ["--rollouts is x.parquet", "--listen is unix:///tmp/i.sock"],
        ),
        ([], ["--rollouts is not set", "--listen"]),
        (["--listen=here", "--journal_dir=/tmp/j"], ["--listen is 'here'"]),
        (["--listen=0.0.0.0:1", "--journal_dir=/tmp/j"], ["--listen is '0.0.0.0:1'"]),
        (
            ["--listen=unix:///tmp/i.sock", "--journal_dir=/tmp/j", "--max_staleness=-2"],
            ["max_staleness"],
        ),
        (
            ["--listen=unix:///tmp/i.sock", "--journal_dir=/tmp/j", "--group_timeout_s=0"],
            ["--group_timeout_s"],
        ),
    ],
)
def test_flags_that_contradict_are_refused_by_name(given: list[str], words: list[str]) -> None:
    modules = (orchestrator_flags.__name__, ingest_flags.__name__)
    flags.FLAGS.unparse_flags()
    try:
        with pytest.raises((ValueError, flags.Error)) as caught:
            flags.FLAGS(["orchestrator", "--trainer=unix:///tmp/w.sock", *given])
            config_from_flags({})
    finally:
        flags.FLAGS.unparse_flags()
        for name in modules:
            for flag in flags.FLAGS.flags_by_module_dict()[name]:
                flag.unparse()
    for word in words:
        assert word in str(caught.value)
