"""Recorded rollouts as steps: the same bytes whenever a step is asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from orchestrator.feeder import SourceError
from orchestrator.groups import GroupPolicy, ZeroSpread
from orchestrator.packing import PackingConfig
from orchestrator.sources.parquet import RecordedRollouts
from orchestrator.sources.recorded_steps import RecordedSteps, RecordedStepsConfig
from orchestrator.trajectory import TrajectoryLimits
from prestage.wire.digest import batch_digest

RECORDED = Path(__file__).parents[1] / "data" / "rollouts.parquet"
LIMITS = TrajectoryLimits(tokens_per_row=1024, vocab_size=49152)


def source(**change) -> RecordedSteps:
    config = {
        "run_id": "r",
        "limits": LIMITS,
        "policy": GroupPolicy(group_size=8),
        "packing": PackingConfig(rows=4, tokens_per_row=1024),
        "groups_per_batch": 4,
        **change,
    }
    return RecordedSteps(RecordedRollouts(RECORDED, LIMITS), RecordedStepsConfig(**config))


def digests(steps: RecordedSteps, step: int) -> list[str]:
    feed = steps.open_step(step)
    assert feed is not None
    return [batch.digest for batch in feed.micro_batches]


def test_steps_are_a_function_of_the_file():
    steps = source()
    there = [digests(steps, step) for step in range(8)]
    assert len({digest for step in there for digest in step}) == sum(map(len, there))
    # Again, backwards past what is kept, and from a new process's point of view.
    assert [digests(steps, step) for step in reversed(range(8))] == there[::-1]
    assert digests(source(), 5) == there[5]


def test_what_a_feed_says_is_what_it_packs():
    feed = source().open_step(1)
    assert feed is not None
    batches = list(feed.micro_batches)
    summary = feed.summary
    assert (summary.step, summary.groups, summary.trajectories) == (1, 4, 32)
    assert len(batches) == summary.micro_batches >= 3
    assert sum(batch.trained_tokens for batch in batches) == summary.trained_tokens
    assert sum(batch.real_tokens for batch in batches) == summary.real_tokens
    for index, batch in enumerate(batches):
        assert (batch.id.run_id, batch.id.step, batch.id.index) == ("r", 1, index)
        assert batch.digest == batch_digest(batch)
        assert set(batch.arrays) == set(source().fields.names)


def test_a_batch_is_shared_out_and_gone_through_again():
    whole = source().open_step(0)
    steps = source(num_minibatches=2, num_iterations=2)
    feeds = [steps.open_step(step) for step in range(4)]
    assert whole is not None and all(feed is not None for feed in feeds)
    assert [feed.summary.groups for feed in feeds] == [2, 2, 2, 2]
    assert sum(feed.summary.trained_tokens for feed in feeds[:2]) == whole.summary.trained_tokens
    tokens = [np.concatenate([b.arrays["tokens"] for b in feed.micro_batches]) for feed in feeds]
    assert (tokens[0] == tokens[2]).all() and (tokens[1] == tokens[3]).all()
    with pytest.raises(ValueError, match="groups_per_batch is 4 and num_minibatches 3"):
        source(num_minibatches=3)


def test_groups_without_spread_are_dropped_and_told():
    steps = source(policy=GroupPolicy(group_size=8, zero_spread=ZeroSpread.DROP), epochs=1)
    summaries = []
    while (feed := steps.open_step(len(summaries))) is not None:
        summaries.append(feed.summary)
    # 40 of the file's 48 groups have spread.
    assert len(summaries) == 10
    assert sum(summary.dropped.get("zero_spread", 0) for summary in summaries) % 8 == 0
    assert sum(summary.dropped.get("zero_spread", 0) for summary in summaries) in (56, 64)


def test_the_file_ends_after_its_epochs():
    steps = source(epochs=1)
    assert steps.open_step(11) is not None
    assert steps.open_step(12) is None
    assert source().open_step(12) is not None


def test_a_step_that_cannot_be_packed_says_which():
    steps = source(packing=PackingConfig(rows=4, tokens_per_row=256))
    with pytest.raises(SourceError, match=r"step 0: group 'train-.*' index .* row of 256"):
        steps.open_step(0)


def test_durable_steps_are_let_go():
    steps = source()
    before = digests(steps, 3)
    steps.step_durable(4)
    assert digests(steps, 3) == before
    assert steps.data_cursor(4) == '{"next_step":4}'
