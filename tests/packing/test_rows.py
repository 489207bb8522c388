"""Rows: the cap, first-fit decreasing as the yardstick, true bounds, and even dealing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.bench.lp_bound import gilmore_gomory_bound
from orchestrator.bench.packing_bench import DISTRIBUTIONS
from orchestrator.packing import (
    PackingConfig,
    check_plan,
    first_fit_decreasing,
    lower_bound,
    pack_bins,
    plan_step,
)
from orchestrator.packing.deal import deal_rows
from orchestrator.packing.tighten import without_one_row
from orchestrator.trajectory import PackingError, TrajectoryError
from tests.packing.values import groups_of, of_length

LENGTHS = st.lists(st.integers(2, 64), min_size=1, max_size=60)
CAP = 64


def exact_rows(lengths: list[int], capacity: int) -> int:
    """The fewest rows, by trying everything. For a handful of lengths."""
    best = len(lengths)
    rows: list[int] = []

    def place(item: int) -> None:
        nonlocal best
        if len(rows) >= best:
            return
        if item == len(lengths):
            best = len(rows)
            return
        for row in range(len(rows)):
            if rows[row] + lengths[item] <= capacity:
                rows[row] += lengths[item]
                place(item + 1)
                rows[row] -= lengths[item]
        rows.append(lengths[item])
        place(item + 1)
        rows.pop()

    place(0)
    return best


@given(lengths=LENGTHS, most=st.none() | st.integers(1, 5))
def test_rows_hold_every_item_once_within_the_cap_and_beat_first_fit_decreasing(lengths, most):
    bins = pack_bins(lengths, CAP, most)
    assert sorted(itertools.chain.from_iterable(bins.rows)) == list(range(len(lengths)))
    for row in bins.rows:
        assert sum(lengths[item] for item in row) <= CAP
        assert most is None or len(row) <= most
    yardstick = first_fit_decreasing(lengths, CAP, most)
    assert len(bins.rows) <= len(yardstick) == bins.first_fit_decreasing
    assert bins.lower_bound <= len(bins.rows)


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_the_bound_never_exceeds_the_best_packing(lengths):
    best = exact_rows(lengths, 20)
    assert lower_bound(lengths, 20) <= best <= len(pack_bins(lengths, 20).rows)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([51] * 7, 7),  # More than half a row each: L2.
        ([35] * 6, 3),  # Twice into a row, not 2.86 times: u^(2).
        ([60] * 3 + [40] * 3, 3),
        ([70] * 4 + [31] * 4, 6),  # 31 does not fit beside 70.
        ([], 0),
    ],
)
def test_bounds_are_tight_where_the_total_is_not(lengths, expected):
    assert lower_bound(lengths, 100) == expected == len(pack_bins(lengths, 100).rows)


LOOSE = "bimodal 12k / 40k"  # L2 and u^(k) miss that five 12k leave 5k that nothing fills.


@pytest.mark.parametrize("name", [name for name in DISTRIBUTIONS if name != LOOSE])
@pytest.mark.parametrize("count", [1024, 1152])
def test_rows_stay_within_a_percent_of_a_true_bound(name, count):
    for seed in range(2):
        lengths = DISTRIBUTIONS[name](np.random.default_rng(seed), count)
        bins = pack_bins(lengths, 65_536)
        assert len(bins.rows) <= bins.first_fit_decreasing
        assert len(bins.rows) <= bins.lower_bound * 1.01


@pytest.mark.slow
def test_rows_stay_within_a_percent_of_the_linear_programming_bound():
    lengths = DISTRIBUTIONS[LOOSE](np.random.default_rng(0), 1024)
    bins = pack_bins(lengths, 65_536)
    assert len(bins.rows) <= bins.first_fit_decreasing
    bound = gilmore_gomory_bound(lengths, 65_536)
    assert bins.lower_bound <= bound
    assert len(bins.rows) <= bound * 1.01


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_the_linear_programming_bound_never_exceeds_the_best_packing(lengths):
    values = np.asarray(lengths, np.int64)
    assert gilmore_gomory_bound(values, 20, grain=1) <= exact_rows(lengths, 20)


@given(lengths=st.lists(st.integers(2, 40), min_size=2, max_size=40), most=st.integers(2, 6))
def test_doing_without_a_row_keeps_cap_and_items(lengths, most):
    values = np.asarray(lengths, np.int64)
    rows = [(item,) for item in range(len(lengths))]
    while (fewer := without_one_row(values, rows, CAP, most)) is not None:
        assert len(fewer) == len(rows) - 1
        assert sorted(itertools.chain.from_iterable(fewer)) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in row) <= CAP and len(row) <= most for row in fewer)
        rows = [tuple(row) for row in fewer]
    assert lower_bound(values, CAP, most) <= len(rows)


@given(
    lengths=LENGTHS,
    ranks=st.sampled_from([1, 2, 4]),
    rows_per_rank=st.integers(1, 4),
    most=st.none() | st.integers(2, 6),
)
def test_ranks_get_equal_tokens_within_one_segment(lengths, ranks, rows_per_rank, most):
    rows = rows_per_rank * ranks
    config = PackingConfig(
        rows=rows,
        tokens_per_row=CAP,
        data_parallel_ranks=ranks,
        max_segments_per_row=most,
        early_first_micro_batch=False,
    )
    plan = plan_step(groups_of(lengths), config)
    packed = len(pack_bins(lengths, CAP, most).rows)
    # Dealing uses padding rows that are there anyway, and never adds a micro-batch.
    assert len(plan.micro_batches) == -(-packed // rows)
    assert plan.used_rows <= -(-packed // ranks) * ranks
    for batch in plan.micro_batches:
        assert max(batch.row_lengths) <= CAP
        assert max(batch.rank_tokens) - min(batch.rank_tokens) <= max(lengths)
        for rank in range(ranks):
            mine = batch.row_lengths[rank * rows_per_rank : (rank + 1) * rows_per_rank]
            assert list(mine) == [n for n in mine if n] + [0] * mine.count(0)


@given(data=st.data(), ranks=st.sampled_from([2, 3]), per_rank=st.integers(1, 3))
def test_dealing_moves_items_only_where_they_fit(data, ranks, per_rank):
    rows: list[tuple[int, ...]] = []
    lengths: list[int] = []
    for _ in range(data.draw(st.integers(1, 3 * ranks * per_rank))):
        room, row = 24, []
        for length in data.draw(st.lists(st.integers(2, 16), min_size=1, max_size=4)):
            if length <= room:
                room -= length
                row.append(len(lengths))
                lengths.append(length)
        rows.append(tuple(row))
    dealt = deal_rows(
        rows,
        np.asarray(lengths, np.int64),
        rows_per_micro_batch=ranks * per_rank,
        ranks=ranks,
        capacity=24,
        max_segments=4,
    )
    flat = [row for batch in dealt for rank in batch for row in rank]
    assert sorted(itertools.chain.from_iterable(flat)) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in row) <= 24 and len(row) <= 4 for row in flat)
    assert all(len(rank) == len(batch[0]) for batch in dealt for rank in batch)


def test_levelling_passes_by_a_full_row():
    # Three rows of 24 and one of 10: the emptier rank has a full row first, then the short one.
    full = [5, 5, 5, 5, 4]
    lengths = np.asarray([*full, *full, *full, 5, 5], np.int64)
    rows = [tuple(range(5)), tuple(range(5, 10)), tuple(range(10, 15)), (15, 16)]
    ((first, second),) = deal_rows(rows, lengths, rows_per_micro_batch=4, ranks=2, capacity=24)
    loads = [[int(lengths[list(row)].sum()) for row in rank] for rank in (first, second)]
    assert max(max(rank) for rank in loads) <= 24
    assert abs(sum(loads[0]) - sum(loads[1])) <= 5


def test_costly_rows_are_spread():
    # Half of the rows hold one long segment, half hold eight short ones.
    lengths = np.asarray([64] * 16 + [8] * 128, np.int64)
    bins = pack_bins(lengths, 64)
    dealt = deal_rows(bins.rows, lengths, rows_per_micro_batch=8, ranks=2, capacity=64)
    costs = [
        sum(int(lengths[item]) ** 2 for row in rank for item in row)
        for batch in dealt
        for rank in batch
    ]
    assert max(costs) == min(costs)


def test_a1_balancing_never_breaks_the_cap():
    # Balancing work alone makes one row of 14, and one of 155648.
    bins = pack_bins([7] * 8, 8)
    assert len(bins.rows) == 8
    work = [16384, 49152, 65536, 98304, 24576]
    rows = pack_bins(work, 131072).rows
    assert sorted(sum(work[item] for item in row) for row in rows) == [122880, 131072]
    for ranks in (1, 2):
        plan = plan_step(
            groups_of([7] * 8), PackingConfig(rows=4, tokens_per_row=8, data_parallel_ranks=ranks)
        )
        assert max(max(batch.row_lengths) for batch in plan.micro_batches) == 7
        assert plan.used_rows == 8


def test_a2_a_sequence_longer_than_a_row_is_refused_by_name():
    with pytest.raises(PackingError, match="length 21; a row holds 1 to 20"):
        pack_bins([21], 20)
    with pytest.raises(TrajectoryError, match=r"'g0000' index 0: 21 tokens do not fit a row of 20"):
        plan_step(groups_of([21]), PackingConfig(rows=1, tokens_per_row=20))
    assert pack_bins([20], 20).rows == ((0,),)


def test_a3_nothing_is_split_or_requeued():
    config = PackingConfig(rows=3, tokens_per_row=4)
    with pytest.raises(TrajectoryError, match="5 tokens"):
        plan_step(groups_of([5, 2, 4, 2]), config)
    plan = plan_step(groups_of([4, 2, 4, 2]), config)
    (batch,) = plan.micro_batches
    assert sorted(s.length for s in batch.segments) == [2, 2, 4, 4]
    assert plan.used_rows == 3


def test_a6_short_segments_are_padded_to_the_alignment():
    groups = groups_of([3, 17, 5])
    plan = plan_step(groups, PackingConfig(rows=1, tokens_per_row=64, align_tokens=16))
    (batch,) = plan.micro_batches
    assert [(s.offset, s.length) for s in batch.segments] == [(0, 3), (16, 17), (48, 5)]
    with pytest.raises(PackingError, match="align_tokens is 24"):
        PackingConfig(rows=1, tokens_per_row=64, align_tokens=24)


def test_a13_every_rank_computes_the_same_number_of_micro_batches():
    # 10000 and 7000 tokens would be 3 and 2 micro-batches if each rank packed for itself.
    lengths = [2500] * 4 + [3500] * 2
    config = PackingConfig(rows=2, tokens_per_row=4000, data_parallel_ranks=2)
    plan = plan_step(groups_of(lengths, 2), config)
    assert len(plan.micro_batches) == 3
    for batch in plan.micro_batches:
        assert all(tokens > 0 for tokens in batch.rank_tokens)


def test_a_plan_misses_and_repeats_nothing():
    groups = groups_of([9, 8, 7, 6, 5])
    plan = plan_step(groups, PackingConfig(rows=2, tokens_per_row=16))
    check_plan(groups, plan)
    assert len({s.key for b in plan.micro_batches for s in b.segments}) == 5
    assert of_length("g0000", 0, 9).total_tokens == 9
