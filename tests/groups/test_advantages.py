"""Advantages: per group, before any split, exact zeros without spread."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.advantages import AdvantageConfig, Estimator, Std, advantages, with_advantages
from orchestrator.packing import (
    PackingConfig,
    allocate,
    common_fields,
    plan_step,
    write_micro_batch,
)
from orchestrator.trajectory import Group, GroupError
from tests.packing.values import members_of, trajectory

REWARDS = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=16)


def test_known_values():
    rewards = [0.0, 1.0, 1.0, 4.0]  # Mean 1.5; squared deviations 2.25 + 0.25 + 0.25 + 6.25 = 9.
    exact = AdvantageConfig(epsilon=0.0)
    population = [-1.0, -1 / 3, -1 / 3, 5 / 3]
    np.testing.assert_allclose(advantages(rewards, exact), population, rtol=1e-7)
    sample = AdvantageConfig(epsilon=0.0, std=Std.SAMPLE)
    np.testing.assert_allclose(
        advantages(rewards, sample), np.asarray([-1.5, -0.5, -0.5, 2.5]) / math.sqrt(3), rtol=1e-7
    )
    centred = AdvantageConfig(estimator=Estimator.DR_GRPO)
    assert advantages(rewards, centred).tolist() == [-1.5, -0.5, -0.5, 2.5]
    others = AdvantageConfig(estimator=Estimator.RLOO)
    assert advantages(rewards, others).tolist() == pytest.approx([-2, -2 / 3, -2 / 3, 10 / 3])
    large = AdvantageConfig(epsilon=1.0)
    assert advantages(rewards, large)[3] == pytest.approx(1.0)


@given(rewards=REWARDS, estimator=st.sampled_from(Estimator))
def test_rloo_is_the_gap_to_the_others_and_all_sum_to_zero(rewards, estimator):
    values = advantages(rewards, AdvantageConfig(estimator=estimator))
    assert values.dtype == np.float32 and np.isfinite(values).all()
    if estimator is Estimator.RLOO:
        for index, reward in enumerate(rewards):
            others = rewards[:index] + rewards[index + 1 :]
            want = reward - math.fsum(others) / len(others)
            assert values[index] == pytest.approx(want, rel=1e-5, abs=1e-4)
    if estimator is not Estimator.GRPO:
        assert float(values.sum()) == pytest.approx(0, abs=1e-2)


@given(reward=st.floats(-1e6, 1e6, width=32), size=st.integers(1, 12))
def test_no_spread_is_exactly_zero(reward, size):
    for estimator in (Estimator.GRPO, Estimator.DR_GRPO):
        config = AdvantageConfig(estimator=estimator, epsilon=0.0)
        assert not advantages([reward] * size, config).any()


@given(rewards=REWARDS)
def test_order_of_members_does_not_matter(rewards):
    config = AdvantageConfig()
    there = advantages(rewards, config)
    assert advantages(rewards[::-1], config)[::-1].tolist() == there.tolist()


def test_c4_a_micro_batch_smaller_than_the_group_keeps_the_groups_advantages():
    members = tuple(trajectory("g", i, reward=float(i), advantage=None) for i in range(2))
    group = with_advantages(Group(group_id="g", trajectories=members), AdvantageConfig(epsilon=0.0))
    # One trajectory a row, one row a micro-batch: the group is split over two micro-batches.
    plan = plan_step([group], PackingConfig(rows=1, tokens_per_row=4))
    assert len(plan.micro_batches) == 2
    by_key = members_of([group])
    seen = {}
    for batch in plan.micro_batches:
        out = allocate(1, 4, common_fields(by_key.values()))
        write_micro_batch(batch, by_key, out)
        (segment,) = batch.segments
        seen[segment.index] = out["advantages"][0].tolist()
    assert seen == {0: [0, -1, -1, 0], 1: [0, 1, 1, 0]}


def test_what_has_no_answer_is_refused():
    with pytest.raises(GroupError, match="reward of member 1 is nan"):
        advantages([0.0, math.nan], AdvantageConfig())
    with pytest.raises(GroupError, match="no rewards"):
        advantages([], AdvantageConfig())
    lonely = Group(group_id="g7", trajectories=(trajectory("g7", 0),))
    with pytest.raises(GroupError, match="group 'g7': RLOO"):
        with_advantages(lonely, AdvantageConfig(estimator=Estimator.RLOO))
    with pytest.raises(GroupError, match="epsilon is -1"):
        AdvantageConfig(epsilon=-1)
