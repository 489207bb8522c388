"""Groups: whole or dropped whole with a named reason, in durable order, and nothing lost."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.groups import (
    Formation,
    GroupAssembler,
    GroupPolicy,
    Outcome,
    ZeroSpread,
    spread_reason,
)
from orchestrator.trajectory import (
    DropReason,
    Group,
    GroupError,
    NoSurvivingGroupsError,
    TrajectoryError,
    find_defect,
    truncate_to_row,
)
from tests.packing.values import LIMITS, trajectory


def assembler(**policy: object) -> GroupAssembler:
    return GroupAssembler(GroupPolicy(**{"group_size": 2, **policy}), LIMITS)


def submit_group(groups: GroupAssembler, name: str, rewards=(0.0, 1.0), version: int = 0):
    return [
        groups.submit(trajectory(name, index, reward=reward, version=version))
        for index, reward in enumerate(rewards)
    ][-1]


EVENT = st.tuples(
    st.integers(0, 5),  # group
    st.integers(0, 4),  # index, one of them beyond the attempts
    st.sampled_from([0.0, 1.0, 1.0, math.nan]),
    st.sampled_from([1, 2, 70]),  # completion tokens: 70 do not fit the row
    st.integers(0, 3),  # policy version
)


@given(
    events=st.lists(EVENT, max_size=60),
    zero_spread=st.sampled_from(ZeroSpread),
    extra=st.integers(0, 1),
    staleness=st.none() | st.integers(0, 2),
)
def test_every_token_is_somewhere_and_groups_are_never_partial(
    events, zero_spread, extra, staleness
):
    def run():
        groups = assembler(
            group_size=3,
            extra=extra,
            zero_spread=zero_spread,
            max_staleness=staleness,
            max_dead_groups=1000,
        )
        handed_out, verdicts, step, came_in = [], [], 0, 0
        for number, (group, index, reward, length, version) in enumerate(events):
            member = trajectory(
                f"g{group}", index, completion=[1] * length, reward=reward, version=version
            )
            verdict = groups.submit(member)
            verdicts.append(verdict)
            if verdict.outcome not in (Outcome.DUPLICATE, Outcome.CONFLICT):
                came_in += member.total_tokens
            groups.ledger().check()
            if number % 10 == 9:
                filled = groups.assign(step, 1)
                groups.ledger().check()
                if filled.complete:
                    handed_out += filled.groups
                    step += 1
        ledger = groups.ledger()
        assert ledger.tokens_in == came_in
        return groups, handed_out, verdicts, ledger

    groups, handed_out, verdicts, ledger = run()
    for group in (*handed_out, *groups.ready):
        assert len(group.trajectories) == 3
        assert all(math.isfinite(reward) for reward in group.rewards)
    names = [group.group_id for group in (*handed_out, *groups.ready)]
    assert len(set(names)) == len(names)
    # The same events give the same answers.
    assert run()[2] == verdicts and run()[3] == ledger


@given(events=st.lists(EVENT, max_size=60), cut=st.integers(0, 60), extra=st.integers(0, 1))
def test_a_restored_formation_goes_on_as_if_nothing_had_happened(events, cut, extra):
    policy = GroupPolicy(
        group_size=3, extra=extra, zero_spread=ZeroSpread.DROP, remembered_groups=3
    )

    def run(restore_at):
        formation: Formation = Formation(policy)
        seen = []
        for number, (group, index, reward, length, version) in enumerate(events):
            if number == restore_at:
                formation = Formation(policy, formation.state())
            member = trajectory(
                f"g{group}", index, completion=[1] * length, reward=reward, version=version
            )
            seen.append(formation.take(member, find_defect(member, LIMITS)))
            if number % 7 == 6:
                seen.append(formation.drop_open(f"g{version}", DropReason.PRODUCER_FAILED))
            seen += [
                (closed.group_id, closed.reason, [member.key for member in closed.released])
                for closed in formation.drain()
            ]
        state = formation.state()
        keys = [(g.group_id, [m.key for m in g.members], g.seen) for g in state.open_groups]
        return seen, keys, state.finished, state.drops, state.dead_in_a_row, state.tokens_in

    assert run(cut) == run(None)


def test_c1_a_reward_that_is_not_finite_rejects_its_group():
    for bad in (math.nan, math.inf):
        groups = assembler(group_size=4)
        for index, reward in enumerate([bad, bad, bad, 1.0]):
            last = groups.submit(trajectory("g", index, reward=reward))
        assert last.reason is DropReason.GROUP_ALREADY_DROPPED
        ledger = groups.ledger()
        assert ledger.dropped[DropReason.NONFINITE_REWARD].groups == 1
        assert not groups.ready and ledger.tokens_dropped == 12
    defect = find_defect(trajectory("g", 3, reward=math.nan), LIMITS)
    assert defect is not None and "group 'g' index 3: reward is nan" in defect.message


def test_c3_one_member_equal_rewards_and_nan_are_different_reasons():
    assert spread_reason((1.0,)) is DropReason.GROUP_OF_ONE
    assert spread_reason((0.0, 1.0, math.nan, 0.0)) is DropReason.NONFINITE_REWARD
    assert spread_reason((math.nan,)) is DropReason.NONFINITE_REWARD
    assert spread_reason((0.5, 0.5)) is DropReason.ZERO_SPREAD
    assert spread_reason((0.0, 1.0)) is None
    one = assembler(group_size=1, zero_spread=ZeroSpread.DROP)
    assert one.submit(trajectory("g", 0, reward=1.0)).reason is DropReason.GROUP_OF_ONE
    kept = assembler(group_size=1)
    assert kept.submit(trajectory("g", 0, reward=1.0)).outcome is Outcome.COMPLETED


def test_c5_a_duplicate_neither_fills_nor_opens_a_group():
    groups = assembler(group_size=4)
    for index, expected in [
        (0, Outcome.ACCEPTED),
        (1, Outcome.ACCEPTED),
        (1, Outcome.DUPLICATE),
        (2, Outcome.ACCEPTED),
        (3, Outcome.COMPLETED),
        (1, Outcome.DUPLICATE),  # Late: the group is complete.
    ]:
        assert groups.submit(trajectory("g", index)).outcome is expected
    assert groups.open_group_ids == () and len(groups.ready) == 1
    ledger = groups.ledger()
    assert ledger.duplicates == 2 and ledger.tokens_in == 12


def test_c5_the_same_key_with_other_content_is_refused():
    groups = assembler()
    groups.submit(trajectory("g", 0))
    verdict = groups.submit(trajectory("g", 0, completion=[9, 9]))
    assert verdict.outcome is Outcome.CONFLICT and "'g' index 0" in verdict.message
    assert groups.submit(trajectory("g", 1)).outcome is Outcome.COMPLETED
    assert groups.ready[0].trajectories[0].completion_tokens.tolist() == [7, 8]


def test_c5_staleness_is_judged_whole_and_at_use():
    groups = assembler(group_size=4, max_staleness=1)
    for index, version in enumerate([3, 3, 5, 5]):
        groups.submit(trajectory("mixed", index, version=version))
    submit_group(groups, "fresh", (0, 1, 0, 1), version=4)
    assert len(groups.ready) == 2, "fresh enough when they came"
    filled = groups.assign(5, 1)
    assert [group.group_id for group in filled.groups] == ["fresh"]
    assert groups.ledger().dropped[DropReason.STALE].trajectories == 4
    # The same groups for step 4 would both have been used.
    early = assembler(group_size=4, max_staleness=1)
    for index, version in enumerate([3, 3, 5, 5]):
        early.submit(trajectory("mixed", index, version=version))
    assert early.assign(4, 1).complete


def test_c7_the_version_is_that_of_dispatch():
    member = replace(trajectory("g", 0, version=1), newest_policy_version=2)
    group = Group(group_id="g", trajectories=(member, trajectory("g", 1, version=2)))
    assert group.oldest_policy_version == 1
    with pytest.raises(TrajectoryError, match="newest_policy_version is 0, below policy_version 1"):
        replace(member, newest_policy_version=0)


def test_c8_finished_groups_beyond_the_step_stay():
    groups = assembler()
    for name in "abcde":
        submit_group(groups, name)
    assert [g.group_id for g in groups.assign(0, 2).groups] == ["a", "b"]
    assert [g.group_id for g in groups.ready] == ["c", "d", "e"]
    assert [g.group_id for g in groups.assign(1, 2).groups] == ["c", "d"]


def test_a_step_fills_as_a_growing_prefix():
    groups = assembler()
    submit_group(groups, "a")
    assert not groups.assign(0, 2).complete
    with pytest.raises(GroupError, match="step 1 was asked for while step 0 is filling"):
        groups.assign(1, 2)
    submit_group(groups, "b")
    filled = groups.assign(0, 2)
    assert filled.complete and [g.group_id for g in filled.groups] == ["a", "b"]
    assert groups.assign(0, 2) == filled
    with pytest.raises(GroupError, match="step 2 was asked for after step 0"):
        groups.assign(2, 2)


def test_c10_a_run_in_which_every_group_dies_ends():
    groups = assembler(max_dead_groups=10)
    for number in range(10):
        groups.submit(trajectory(f"g{number}", 0))
        assert groups.drop_open(f"g{number}", DropReason.PRODUCER_FAILED)
    groups.submit(trajectory("g10", 0))
    with pytest.raises(NoSurvivingGroupsError, match=r"11 groups in a row.*producer_failed: 11"):
        groups.drop_open("g10", DropReason.PRODUCER_FAILED)
    # A survivor in between starts the count again.
    groups = assembler(max_dead_groups=2)
    for number in range(8):
        groups.submit(trajectory(f"dead{number}", 0, reward=math.nan))
        submit_group(groups, f"live{number}")
    assert len(groups.ready) == 8


def test_c10_stale_groups_alone_end_the_run_too():
    groups = assembler(max_staleness=0, max_dead_groups=2)
    for number in range(3):
        submit_group(groups, f"g{number}", version=0)
    with pytest.raises(NoSurvivingGroupsError, match="stale: 3"):
        groups.assign(9, 1)


def test_over_generation_keeps_the_first_and_counts_the_rest():
    groups = assembler(group_size=2, extra=2)
    groups.submit(trajectory("g", 3))
    # A bad member does not cost the group while others can take its place.
    bad = groups.submit(trajectory("g", 0, reward=math.nan))
    assert bad.reason is DropReason.NONFINITE_REWARD and not bad.group_dropped
    assert groups.submit(trajectory("g", 1)).outcome is Outcome.COMPLETED
    late = groups.submit(trajectory("g", 2))
    assert late.reason is DropReason.OVER_GENERATION
    assert groups.submit(trajectory("g", 2)).outcome is Outcome.DUPLICATE
    assert [member.index for member in groups.ready[0].trajectories] == [1, 3]
    ledger = groups.ledger()
    ledger.check()
    assert ledger.dropped[DropReason.OVER_GENERATION].tokens == 3


def test_what_is_remembered_of_finished_groups_is_bounded():
    groups = assembler(remembered_groups=3)
    for number in range(50):
        submit_group(groups, f"g{number}")
        groups.assign(number, 1)
    assert groups.submit(trajectory("g49", 0)).outcome is Outcome.DUPLICATE
    # What is forgotten counts as new: the bound holds.
    assert groups.submit(trajectory("g46", 0)).outcome is Outcome.ACCEPTED
    assert groups.submit(trajectory("g47", 0)).outcome is Outcome.DUPLICATE


@pytest.mark.parametrize(
    ("change", "reason", "text"),
    [
        ({"completion": []}, DropReason.EMPTY_COMPLETION, "completion_tokens is empty"),
        ({"completion": [1] * 64}, DropReason.LONGER_THAN_ROW, "65 tokens .* row of 64"),
        ({"prompt": [5, 1000]}, DropReason.TOKEN_OUT_OF_VOCABULARY, r"prompt_tokens\[1\] is 1000"),
        ({"completion": [-1, 2]}, DropReason.TOKEN_OUT_OF_VOCABULARY, r"tokens\[0\] is -1"),
        ({"reward": math.inf}, DropReason.NONFINITE_REWARD, "reward is inf"),
        ({"logprobs": [0, math.nan]}, DropReason.NONFINITE_LOGPROB, r"logprobs\[1\] is nan"),
        ({"logprobs": [-math.inf, 0]}, DropReason.NONFINITE_LOGPROB, r"logprobs\[0\] is -inf"),
        ({"logprobs": [0, 0.5]}, DropReason.POSITIVE_LOGPROB, r"logprobs\[1\] is 0.5"),
        ({"mask": [0, 2, 1]}, DropReason.MALFORMED, r"loss_mask\[1\] is 2"),
    ],
)
def test_each_defect_is_named(change, reason, text):
    defect = find_defect(trajectory("g", 1, **change), LIMITS)
    assert defect is not None and defect.reason is reason
    assert defect.message.startswith("group 'g' index 1: ")
    assert __import__("re").search(text, defect.message)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("prompt_tokens", np.zeros(1, np.int64), "prompt_tokens is int64; it must be int32"),
        ("completion_tokens", np.zeros((2, 1), np.int32), "must be flat"),
        ("sampling_logprobs", np.zeros(3, np.float32), "3 entries but there are 2 completion"),
        ("loss_mask", np.zeros(2, np.uint8), "2 entries but there are 3 prompt and completion"),
        ("old_logprobs", np.zeros(2, np.float64), "old_logprobs is float64"),
        ("advantage", np.zeros(5, np.float32), "advantage has 5 entries"),
        ("index", -1, "index is -1"),
        ("policy_version", -1, "policy_version is -1"),
    ],
)
def test_malformed_trajectories_are_not_made(field, value, text):
    with pytest.raises(TrajectoryError, match=text):
        replace(trajectory("g", 0), **{field: value})


def test_truncation_is_marked_and_keeps_what_fits():
    member = trajectory(prompt=[1] * 4, completion=list(range(10)), logprobs=[-0.5] * 10)
    cut = truncate_to_row(member, 8)
    assert cut.total_tokens == 8 and cut.truncated_tokens == 6
    assert cut.sampling_logprobs is not None and len(cut.sampling_logprobs) == 4
    assert truncate_to_row(member, 14) is member


def test_groups_that_were_never_complete_do_not_end_the_run():
    """A host that dies with thirty groups open is no sign that the others fill no step."""
    groups = assembler(max_dead_groups=2)
    for number in range(30):
        groups.submit(trajectory(f"g{number}", 0))
    for number in range(30):
        assert groups.drop_open(f"g{number}", DropReason.INCOMPLETE_GROUP)
    submit_group(groups, "alive")
    assert groups.assign(0, 1).complete
    groups.ledger().check()
