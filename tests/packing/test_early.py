"""The early first micro-batch: fixed by a prefix of the durable order, the same in every mode."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.packing import (
    PackingConfig,
    check_plan,
    first_fit_decreasing,
    first_micro_batch,
    plan_step,
)
from tests.packing.values import groups_of

CONFIG = PackingConfig(rows=2, tokens_per_row=64)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=4, max_size=60),
    ranks=st.sampled_from([1, 2]),
    align=st.sampled_from([1, 4]),
)
def test_early_release_equals_the_whole_step(lengths, ranks, align):
    config = PackingConfig(rows=2, tokens_per_row=64, data_parallel_ranks=ranks, align_tokens=align)
    groups = groups_of(lengths)
    whole = plan_step(groups, config)
    check_plan(groups, whole)
    released = None
    for count in range(1, len(groups) + 1):
        now = first_micro_batch(groups[:count], len(groups), config)
        if released is not None:
            assert now == released, "more groups changed a released micro-batch"
        if now is not None:
            assert now == whole.micro_batches[0]
            assert whole.early_groups <= count
        released = now
    # Released if and only if the whole-step plan says so, at exactly the prefix it names.
    assert (released is not None) == (whole.early_groups > 0)
    if whole.early_groups:
        before = first_micro_batch(groups[: whole.early_groups - 1], len(groups), config)
        assert before is None
        assert first_micro_batch(groups[: whole.early_groups], len(groups), config) is not None


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(2, 40), min_size=4, max_size=80))
def test_what_follows_an_early_release_keeps_the_row_rule(lengths):
    groups = groups_of(lengths)
    plan = plan_step(groups, CONFIG)
    if not plan.early_groups:
        assert plan.used_rows <= plan.first_fit_decreasing_rows
        return
    first, rest = plan.micro_batches[0], plan.micro_batches[1:]
    wasted = CONFIG.rows * CONFIG.tokens_per_row - first.real_tokens
    assert wasted * 8 <= CONFIG.tokens_per_row
    others = [s.length for batch in rest for s in batch.segments]
    rows = sum(batch.used_rows for batch in rest)
    assert rows <= len(first_fit_decreasing(others, CONFIG.tokens_per_row))


def test_it_does_release_early_where_rows_fill():
    plan = plan_step(groups_of([16] * 80), CONFIG)
    assert 0 < plan.early_groups <= 8
    assert plan.used_rows == plan.lower_bound_rows == 20


def test_it_waits_for_the_whole_step_where_rows_cannot_fill():
    # 0.51 of a row: nothing that comes early may take the place of better company.
    plan = plan_step(groups_of([33] * 80), CONFIG)
    assert plan.early_groups == 0
    assert plan.used_rows == plan.first_fit_decreasing_rows == 80


def test_it_waits_while_the_prefix_leaves_rows_that_others_could_complete():
    # Pairs of 32 fill rows, but each 33 stands alone so far: 31s may still come.
    plan = plan_step(groups_of([32, 32, 33, 33] * 10 + [31] * 20), CONFIG)
    assert plan.early_groups == 0
    assert plan.used_rows == plan.lower_bound_rows


def test_a_prefix_that_is_the_whole_step_is_no_early_release():
    groups = groups_of([16] * 12)  # The first mark, 144 tokens, is reached by the last group.
    assert plan_step(groups, CONFIG).early_groups == 0
    assert first_micro_batch(groups, 3, CONFIG) is None
    assert first_micro_batch(groups, 4, CONFIG) is not None


def test_it_can_be_switched_off():
    config = PackingConfig(rows=2, tokens_per_row=64, early_first_micro_batch=False)
    groups = groups_of([16] * 80)
    assert plan_step(groups, config).early_groups == 0
    assert first_micro_batch(groups, 30, config) is None


def test_rows_beyond_first_fit_decreasing_are_told():
    # Short first, then only lengths that the short ones would have completed: no prefix can know.
    lengths = [16] * 12 + [48] * 12
    plan = plan_step(groups_of(lengths), CONFIG)
    assert plan.early_groups > 0
    assert plan.rows_over_first_fit_decreasing == plan.used_rows - 12 > 0
    whole = plan_step(
        groups_of(lengths),
        PackingConfig(rows=2, tokens_per_row=64, early_first_micro_batch=False),
    )
    assert whole.rows_over_first_fit_decreasing == 0
