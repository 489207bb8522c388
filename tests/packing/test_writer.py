"""Arrays: written once, whatever the buffer held, and what each token is worth."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.advantages import AdvantageConfig, with_advantages
from orchestrator.packing import (
    FieldSet,
    PackingConfig,
    StepPlan,
    allocate,
    common_fields,
    pack_micro_batch,
    plan_step,
    step_conservation,
    write_micro_batch,
)
from orchestrator.sources.parquet import RecordedRollouts
from orchestrator.trajectory import (
    ConservationError,
    DropReason,
    Group,
    PackingError,
    Trajectory,
    TrajectoryError,
    TrajectoryLimits,
    find_defect,
    truncate_to_row,
)
from prestage.microbatch import FIELDS, MicroBatchId
from tests.packing.values import LIMITS, groups_of, members_of, trainer_weights, trajectory

RECORDED = Path(__file__).parents[1] / "data" / "rollouts.parquet"


def write(groups: list[Group], config: PackingConfig, dirt: int = 0x5A):
    """All micro-batches of the step, each written into a buffer full of `dirt`."""
    members = members_of(groups)
    fields = common_fields(members.values())
    plan = plan_step(groups, config)
    arrays, written = [], []
    for batch in plan.micro_batches:
        out = allocate(batch.rows, batch.tokens_per_row, fields)
        for array in out.values():
            array.view(np.uint8).fill(dirt)
        written.append(write_micro_batch(batch, members, out))
        arrays.append(out)
    return plan, arrays, written


def one_row(*members: Trajectory, tokens_per_row: int = 16) -> dict[str, np.ndarray]:
    """The members as one group in micro-batches of one row; the first micro-batch's arrays."""
    group = Group(group_id=members[0].group_id, trajectories=members)
    _, arrays, _ = write([group], PackingConfig(rows=1, tokens_per_row=tokens_per_row))
    return arrays[0]


def expected_arrays(plan, members, fields: FieldSet) -> list[dict[str, np.ndarray]]:
    """A second, token-by-token writing of the contract."""
    result = []
    for batch in plan.micro_batches:
        out = {
            name: np.full(
                fields.shape(name, batch.rows, batch.tokens_per_row),
                FIELDS[name].pad_value,
                FIELDS[name].dtype,
            )
            for name in fields.names
        }
        numbers = [0] * batch.rows
        for segment in batch.segments:
            member = members[segment.key]
            numbers[segment.row] += 1
            prompt = len(member.prompt_tokens)
            for place in range(segment.length):
                at = (segment.row, segment.offset + place)
                sampled = place >= prompt
                out["segment_ids"][at] = numbers[segment.row]
                out["positions"][at] = place
                if sampled:
                    out["tokens"][at] = member.completion_tokens[place - prompt]
                    out["advantages"][at] = member.advantage
                    out["sampling_logprobs"][at] = member.sampling_logprobs[place - prompt]
                    out["loss_mask"][at] = place > 0
                else:
                    out["tokens"][at] = member.prompt_tokens[place]
        result.append(out)
    return result


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=30),
    rows=st.integers(1, 4),
    align=st.sampled_from([1, 8]),
    dirt=st.sampled_from([0x00, 0x5A, 0xFF]),
)
def test_every_element_is_written_as_the_contract_says(lengths, rows, align, dirt):
    groups = groups_of(lengths)
    config = PackingConfig(rows=rows, tokens_per_row=64, align_tokens=align)
    plan, arrays, written = write(groups, config, dirt)
    members = members_of(groups)
    expected = expected_arrays(plan, members, common_fields(members.values()))
    for got, want in zip(arrays, expected, strict=True):
        assert got.keys() == want.keys()
        for name in want:
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    balance = step_conservation(groups, written)
    assert balance.tokens_packed == sum(lengths)
    assert balance.trained == sum(int(a["loss_mask"].sum()) for a in arrays)
    # What the trainer will weigh is exactly what the balance calls trained.
    assert balance.trained == sum(int(trainer_weights(a).sum()) for a in arrays)


def test_the_same_groups_give_the_same_bytes():
    lengths = [7, 30, 12, 5, 33, 18, 9, 40, 21, 16, 3, 28]
    groups = []
    for number in range(3):
        members = []
        for index, total in enumerate(lengths[4 * number : 4 * number + 4]):
            ids = (np.arange(total) * 31 + 7 * number + index).astype(np.int32) % 997
            members.append(
                Trajectory(
                    group_id=f"golden-{number}",
                    index=index,
                    prompt_tokens=ids[:2],
                    completion_tokens=ids[2:],
                    sampling_logprobs=-(ids[2:] % 8).astype(np.float32) / 8,
                    routed_experts=(ids[:, None, None] % 5 - 1 + np.zeros((1, 2, 3))).astype(
                        np.int16
                    ),
                    reward=0.0,
                    policy_version=0,
                    advantage=index / 4 - 0.5,
                )
            )
        groups.append(Group(group_id=f"golden-{number}", trajectories=tuple(members)))
    plan, arrays, _ = write(groups, PackingConfig(rows=2, tokens_per_row=64))
    assert StepPlan.from_json(plan.to_json()) == plan
    assert plan.digest == "4c6baac071fa97271fc2f109ef046ea28ffa9930a732ef221e74f3d0b156e122"
    content = hashlib.sha256()
    for out in arrays:
        for name in FIELDS:
            if name in out:
                content.update(out[name].tobytes())
    assert content.hexdigest() == "05a7e39b3435f0da323fe8922fda7765cb91ab82bd29e39aaf5e8116f7619dfd"


def test_recorded_rollouts_pack_to_the_same_bytes():
    recorded = RecordedRollouts(RECORDED, TrajectoryLimits(tokens_per_row=2048, vocab_size=49152))
    groups = [with_advantages(group, AdvantageConfig()) for group in recorded.groups()][:12]
    plan, arrays, written = write(groups, PackingConfig(rows=4, tokens_per_row=2048))
    assert plan.used_rows <= plan.first_fit_decreasing_rows
    balance = step_conservation(groups, written)
    assert balance.trained == balance.trainable_in == 4047
    assert plan.digest == "3826a2a07f8e2a84051a076c386f21f45fd653a6bcd7e761ef14b0e44e60001e"
    content = hashlib.sha256(b"".join(out[n].tobytes() for out in arrays for n in sorted(out)))
    assert content.hexdigest() == "8eba784628ec42fdac4252976f2ed8968354801a6d4323af9a81bd2324cde657"


def test_a4_mixed_presence_is_refused_not_shifted():
    members = [
        replace(trajectory("g", 0, completion=[1, 2]), old_logprobs=None),
        replace(
            trajectory("g", 1, completion=[3, 4]), old_logprobs=np.asarray([-1, -2], np.float32)
        ),
    ]
    with pytest.raises(
        PackingError, match="'g' index 1 has old_logprobs, unlike group 'g' index 0"
    ):
        common_fields(members)
    with pytest.raises(PackingError, match="'g' index 0 has no old_logprobs"):
        common_fields(members[::-1])
    # Also when the buffers were made for other fields than the trajectories have.
    group = Group(group_id="g", trajectories=(trajectory("g", 0),))
    (batch,) = plan_step([group], PackingConfig(rows=1, tokens_per_row=8)).micro_batches
    out = allocate(1, 8, FieldSet(optional=("old_logprobs",)))
    out["tokens"].fill(77)
    with pytest.raises(PackingError, match="old_logprobs"):
        write_micro_batch(batch, members_of([group]), out)
    assert (out["tokens"] == 77).all(), "refused, yet written to"


def test_a6_a_padded_short_segment_trains_its_own_tokens_only():
    member = trajectory("g", 0, prompt=[], completion=[4, 5, 6], mask=[1, 1, 1])
    long = trajectory("g", 1, prompt=[1] * 20, completion=[2] * 10)
    group = Group(group_id="g", trajectories=(member, long))
    plan, (out,), written = write(
        [group], PackingConfig(rows=1, tokens_per_row=64, align_tokens=16)
    )
    assert [s.offset for s in plan.micro_batches[0].segments] == [0, 16]
    assert not out["segment_ids"][0, 3:16].any() and not out["loss_mask"][0, 3:16].any()
    # Three tokens asked for; the first has no predictor and is counted as such.
    assert int(out["loss_mask"][0, :16].sum()) == 2
    balance = step_conservation([group], written)
    assert balance.dropped_trainable == {DropReason.FIRST_TOKEN_HAS_NO_PREDICTOR: 1}
    with_prompt = trajectory("g", 0, prompt=[3], completion=[4, 5, 6])
    assert int(one_row(with_prompt)["loss_mask"].sum()) == 3


def test_a8_exactly_the_response_is_trained():
    out = one_row(trajectory(prompt=[1, 2, 3], completion=[4, 5]))
    assert np.flatnonzero(trainer_weights(out)[0]).tolist() == [2, 3]
    single = one_row(trajectory(prompt=[1, 2, 3], completion=[4]))
    assert np.flatnonzero(trainer_weights(single)[0]).tolist() == [2]


def test_a8_without_a_prompt_the_first_token_is_counted_not_trained():
    group = Group(group_id="g", trajectories=(trajectory(prompt=[], completion=[4, 5, 6]),))
    _, (out,), written = write([group], PackingConfig(rows=1, tokens_per_row=4))
    assert out["loss_mask"][0].tolist() == [0, 1, 1, 0]
    balance = step_conservation([group], written)
    assert balance.dropped_trainable == {DropReason.FIRST_TOKEN_HAS_NO_PREDICTOR: 1}


def test_a9_nothing_is_predicted_across_segments():
    members = (
        trajectory("g", 0, prompt=[10], completion=[11], mask=[1, 1]),
        trajectory("g", 1, prompt=[20], completion=[21], mask=[1, 1]),
    )
    out = one_row(*members)
    assert out["tokens"][0, :4].tolist() == [10, 11, 20, 21]
    assert out["loss_mask"][0].tolist() == [0, 1, 0, 1] + [0] * 12
    assert trainer_weights(out)[0].tolist() == [1, 0, 1, 0] + [0] * 12


def test_a12_an_empty_response_is_dropped_with_a_reason():
    members = tuple(
        trajectory("g", index, prompt=[1, 2], completion=completion)
        for index, completion in enumerate([[], [7], [7, 8]])
    )
    group = Group(group_id="g", trajectories=members)
    _, (out,), written = write([group], PackingConfig(rows=1, tokens_per_row=16))
    balance = step_conservation([group], written)
    assert balance.dropped_tokens == {DropReason.EMPTY_COMPLETION: 2}
    assert balance.trained == 3 == int(out["loss_mask"].sum())


def test_a14_an_all_zero_mask_packs_to_a_zero_denominator():
    members = tuple(trajectory("g", i, mask=[0, 0, 0]) for i in range(2))
    group = Group(group_id="g", trajectories=members)
    _, (out,), written = write([group], PackingConfig(rows=1, tokens_per_row=16))
    assert not out["loss_mask"].any()
    assert step_conservation([group], written).trained == 0


def test_c11_the_update_has_a_micro_batch_even_if_the_last_group_packs_to_nothing():
    full = Group(group_id="a", trajectories=(trajectory("a", 0), trajectory("a", 1)))
    hollow = Group(group_id="b", trajectories=(trajectory("b", 0, completion=[]),))
    config = PackingConfig(rows=1, tokens_per_row=8)
    plan, _, written = write([full, hollow], config)
    assert len(plan.micro_batches) == 1, "the last micro-batch carries the only update"
    assert step_conservation([full, hollow], written).trained == 4
    # Nothing at all: one all-padding micro-batch, whose denominator of 0 skips the update by rule.
    nothing = plan_step([hollow], config)
    (batch,) = nothing.micro_batches
    assert batch.segments == () and batch.row_lengths == (0,)
    out = allocate(1, 8, FieldSet())
    assert write_micro_batch(batch, {}, out).trained_tokens == 0
    assert all(not array.any() for array in out.values())


def routed(tokens: int, rows: int, expert: int = 3, dtype: type = np.int16) -> np.ndarray:
    return np.full((rows, 2, 3), expert, dtype)


def test_f1_routing_of_another_length_is_refused():
    with pytest.raises(TrajectoryError, match="5 rows but there are 4") as refused:
        trajectory("g", 2, prompt=[1, 2], completion=[3, 4], routing=routed(4, 5))
    assert refused.value.defect.reason is DropReason.ROUTING_MISMATCH
    assert "group 'g' index 2" in str(refused.value)


def test_f4_expert_ids_do_not_pass_through_eight_bits():
    ids = np.arange(290, 312, dtype=np.int16)  # top-22 of 512 experts, around 300.
    routing = np.broadcast_to(ids, (3, 2, 22)).copy()
    member = trajectory(routing=routing)
    limits = TrajectoryLimits(
        tokens_per_row=64, vocab_size=1000, num_experts=512, moe_layers=2, top_k=22
    )
    assert find_defect(member, limits) is None
    assert (one_row(member)["routed_experts"][0, :3] == routing).all()
    with pytest.raises(TrajectoryError, match="routed_experts is uint8; it must be int16"):
        trajectory(routing=routing.astype(np.uint8))
    few = replace(limits, num_experts=256)
    defect = find_defect(member, few)
    assert defect is not None and defect.reason is DropReason.EXPERT_OUT_OF_RANGE
    assert "routed_experts[0,0,0] is 290" in defect.message


def test_f6_routing_is_cut_and_padded_like_its_tokens():
    routing = np.arange(6 * 2 * 3, dtype=np.int16).reshape(6, 2, 3)
    member = trajectory(prompt=[1, 2], completion=[3, 4, 5, 6], logprobs=[-1] * 4, routing=routing)
    cut = truncate_to_row(member, 4)
    assert cut.truncated_tokens == 2 and cut.finish_reason == "truncated"
    out = one_row(cut, tokens_per_row=6)
    assert (out["routed_experts"][0, :4] == routing[:4]).all()
    assert (out["routed_experts"][0, 4:] == -1).all()
    assert out["sampling_logprobs"][0].tolist() == [0, 0, -1, -1, 0, 0]
    with pytest.raises(TrajectoryError, match="leaves no room for a completion token"):
        truncate_to_row(member, 2)


def test_f8_missing_routing_is_refused_before_packing():
    limits = replace(LIMITS, required_fields=("routed_experts",))
    with_routing = trajectory("g", 0, routing=routed(3, 3))
    without = trajectory("g", 1)
    assert find_defect(with_routing, limits) is None
    defect = find_defect(without, limits)
    assert defect is not None and defect.reason is DropReason.MISSING_FIELD
    assert "group 'g' index 1: routed_experts is missing" in defect.message
    with pytest.raises(PackingError, match="index 1 has no routed_experts"):
        common_fields([with_routing, without])


def test_conservation_notices_a_lost_token():
    groups = groups_of([5, 6, 7])
    _, _, written = write(groups, PackingConfig(rows=1, tokens_per_row=32))
    assert step_conservation(groups, written).tokens_in == 18
    with pytest.raises(ConservationError, match="18 tokens were assigned"):
        step_conservation(groups, [replace(written[0], tokens=17)])
    with pytest.raises(ConservationError, match="trainable"):
        step_conservation(groups, [replace(written[0], trained_tokens=1)])


def test_per_token_advantages_and_missing_ones():
    values = np.asarray([0.5, -0.5], np.float32)
    member = replace(trajectory(prompt=[1], completion=[2, 3]), advantage=values)
    assert one_row(member, tokens_per_row=4)["advantages"][0].tolist() == [0, 0.5, -0.5, 0]
    with pytest.raises(PackingError, match="'g' index 0 has no advantage"):
        one_row(replace(member, advantage=None))


def test_wrong_buffers_are_refused_by_name():
    group = Group(group_id="g", trajectories=(trajectory(),))
    (batch,) = plan_step([group], PackingConfig(rows=1, tokens_per_row=8)).micro_batches
    members = members_of([group])
    good = allocate(1, 8, FieldSet())
    for name, bad in {
        "tokens": good["tokens"].astype(np.int64),
        "advantages": np.zeros((1, 9), np.float32),
        "loss_mask": np.zeros((8, 1), np.uint8).T[:, ::-1],
    }.items():
        with pytest.raises(PackingError, match=f"buffer for {name}"):
            write_micro_batch(batch, members, {**good, name: bad})
    lacking = {name: array for name, array in good.items() if name != "positions"}
    with pytest.raises(PackingError, match="required field 'positions'"):
        write_micro_batch(batch, members, lacking)


def test_a_packed_micro_batch_carries_its_identity():
    groups = groups_of([5, 6])
    (batch,) = plan_step(groups, PackingConfig(rows=2, tokens_per_row=16)).micro_batches
    members = members_of(groups)
    identity = MicroBatchId(run_id="r", step=3, index=0)
    packed, written = pack_micro_batch(identity, batch, members, common_fields(members.values()))
    assert packed.id == identity and packed.row_lengths == (11, 0)
    assert packed.real_tokens == written.tokens == 11
    assert packed.trained_tokens == written.trained_tokens


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format":1}',
        '{"format":1,"rows":1,"tokens_per_row":8,"ranks":1,"micro_batches":[[[0,0]]]}',
    ],
)
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(PackingError):
        StepPlan.from_json(text)
