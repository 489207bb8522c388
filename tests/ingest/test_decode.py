"""What a producer's bytes become, and what is refused with which reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from orchestrator.client.rollout import Finish, Rollout, encode, given, sampled
from orchestrator.ingest.decode import (
    MessageError,
    Rejected,
    TrajectoryParts,
    decode_trajectory,
    parse_request,
)
from orchestrator.ingest.limits import IngestLimits
from orchestrator.trajectory import DropReason, Trajectory, TrajectoryError
from prestage.rollout.v1 import rollout_pb2 as pb
from prestage.wire.scan import ScanError, count_fields

LIMITS = IngestLimits()
ASSISTANT, ENVIRONMENT = pb.SEGMENT_SOURCE_ASSISTANT, pb.SEGMENT_SOURCE_ENVIRONMENT


def through_the_wire(rollout: Rollout, part_bytes: int = 4 << 20) -> Trajectory | Rejected:
    parts = TrajectoryParts(LIMITS)
    result = None
    for request in encode(rollout, part_bytes=part_bytes).requests(7):
        assert result is None, "the trajectory was whole before its last part"
        result = parts.add(parse_request(request.SerializeToString(), LIMITS).submit)
    assert result is not None
    return result


def ids(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def nats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def head(**changes: object) -> pb.Trajectory:
    return pb.Trajectory(**{"group_id": "g", "index": 0, "reward": 1.0, **changes})  # type: ignore[arg-type]


def decoded(segments: list[pb.TokenSegment], **changes: object) -> Trajectory:
    return decode_trajectory(head(**changes), segments, LIMITS)


def refused(segments: list[pb.TokenSegment], **changes: object) -> tuple[DropReason, str]:
    with pytest.raises(TrajectoryError) as caught:
        decoded(segments, **changes)
    return caught.value.defect.reason, caught.value.defect.message


def test_a_single_turn_needs_no_mask() -> None:
    made = decoded(
        [
            pb.TokenSegment(source=ENVIRONMENT, tokens=ids(5, 6)),
            pb.TokenSegment(source=ASSISTANT, tokens=ids(7, 8, 9), logprobs=nats(-1, -2, -3)),
        ],
        dispatched_version=3,
        completed_version=3,
        finish_reason=pb.FINISH_REASON_LENGTH,
    )
    assert made.prompt_tokens.tolist() == [5, 6]
    assert made.completion_tokens.tolist() == [7, 8, 9]
    assert made.sampling_logprobs is not None
    assert made.sampling_logprobs.tolist() == [-1, -2, -3]
    assert made.loss_mask is None and made.trainable_tokens == 3
    assert (made.policy_version, made.newest_policy_version) == (3, None)
    assert made.finish_reason == "length"


def test_several_turns_train_only_what_was_sampled() -> None:
    made = decoded(
        [
            pb.TokenSegment(source=ENVIRONMENT, tokens=ids(1)),
            pb.TokenSegment(source=ENVIRONMENT, tokens=ids(2)),
            pb.TokenSegment(source=ASSISTANT, tokens=ids(10, 11), logprobs=nats(-1, -2)),
            pb.TokenSegment(source=ENVIRONMENT, tokens=ids(20, 21, 22)),
            pb.TokenSegment(
                source=ASSISTANT, tokens=ids(30, 31), logprobs=nats(-3, -4), loss_mask=b"\1\0"
            ),
            pb.TokenSegment(source=ENVIRONMENT, tokens=ids(40)),
        ]
    )
    assert made.prompt_tokens.tolist() == [1, 2]
    assert made.completion_tokens.tolist() == [10, 11, 20, 21, 22, 30, 31, 40]
    assert made.loss_mask is not None and made.sampling_logprobs is not None
    assert made.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 0, 0]
    assert made.sampling_logprobs.tolist() == [-1, -2, 0, 0, 0, -3, -4, 0]
    assert made.trainable_tokens == 3


def test_c7_a_rollout_across_a_weight_sync_keeps_both_versions() -> None:
    made = decoded(
        [pb.TokenSegment(source=ASSISTANT, tokens=ids(1), logprobs=nats(-1))],
        dispatched_version=1,
        completed_version=2,
    )
    assert (made.policy_version, made.newest_policy_version) == (1, 2)
    reason, message = refused(
        [pb.TokenSegment(source=ASSISTANT, tokens=ids(1))],
        dispatched_version=2,
        completed_version=1,
    )
    assert reason is DropReason.MALFORMED
    assert "completed_version is 1" in message and "2" in message


def test_a12_an_empty_completion_is_a_trajectory_of_its_group() -> None:
    made = decoded([pb.TokenSegment(source=ENVIRONMENT, tokens=ids(1, 2))])
    assert made.completion_tokens.shape == (0,)
    assert made.sampling_logprobs is not None and made.sampling_logprobs.shape == (0,)
    reason, message = refused([])
    assert reason is DropReason.MALFORMED and "no tokens" in message


def test_a4_logprobs_of_some_assistant_segments_only_are_refused() -> None:
    reason, message = refused(
        [
            pb.TokenSegment(source=ASSISTANT, tokens=ids(1), logprobs=nats(-1)),
            pb.TokenSegment(source=ENVIRONMENT, tokens=ids(2)),
            pb.TokenSegment(source=ASSISTANT, tokens=ids(3)),
        ]
    )
    assert reason is DropReason.MISSING_FIELD
    assert "segments[0]" in message and "segments[2]" in message


@pytest.mark.parametrize(
    ("segment", "reason", "words"),
    [
        (dict(tokens=b"\0" * 7), DropReason.MALFORMED, "7 bytes"),
        (dict(tokens=ids(1, 2), logprobs=nats(-1)), DropReason.MALFORMED, "4 bytes for 2 tokens"),
        (dict(tokens=ids(1), logprobs=b"\0\0\0"), DropReason.MALFORMED, "3 bytes for 1 tokens"),
        (dict(tokens=ids(1, 2), loss_mask=b"\1"), DropReason.MALFORMED, "1 bytes for 2 tokens"),
        (dict(tokens=ids(1), loss_mask=b"\2"), DropReason.MALFORMED, "holds 2"),
        (dict(tokens=ids(1), loss_mask=b"\1", source=ENVIRONMENT), DropReason.MALFORMED, "a 1 at"),
        (
            dict(tokens=ids(1), logprobs=nats(-1), source=ENVIRONMENT),
            DropReason.UNEXPECTED_FIELD,
            "nobody sampled",
        ),
        (dict(tokens=ids(1), source=0), DropReason.MALFORMED, "source is 0"),
        (dict(tokens=ids(1), source=9), DropReason.MALFORMED, "source is 9"),
        (dict(tokens=ids(1), routed_experts=b"\0\0"), DropReason.ROUTING_MISMATCH, "2 bytes"),
    ],
)
def test_a_segment_of_wrong_form_is_refused(
    segment: dict[str, object], reason: DropReason, words: str
) -> None:
    made = pb.TokenSegment(**{"source": ASSISTANT, **segment})  # type: ignore[arg-type]
    found, message = refused([pb.TokenSegment(source=ENVIRONMENT, tokens=ids(0)), made])
    assert found is reason
    assert words in message and "segments[1]" in message and "group 'g' index 0" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(group_id=""), "0 characters"),
        (dict(group_id="x" * 257), "257 characters"),
        (dict(group_id="line\nbreak"), "printable"),
        (dict(task="t" * 257), "257 characters"),
        (dict(finish_reason=17), "finish_reason is 17"),
        (dict(dispatched_version=2**63, completed_version=2**63), "count up"),
        (dict(moe_layers=2), "both or neither"),
        (dict(moe_layers=2**31, top_k=2**31), "more than"),
        (dict(moe_layers=2, top_k=2), "no segment has routed_experts"),
    ],
)
def test_a_header_of_wrong_form_is_refused(changes: dict[str, object], words: str) -> None:
    _, message = refused(
        [pb.TokenSegment(source=ASSISTANT, tokens=ids(1), logprobs=nats(-1))], **changes
    )
    assert words in message
    assert len(message) < 600, "a message quotes no more than a part of a name"


def test_f1_routing_rows_and_tokens_must_match() -> None:
    routing = np.zeros((5, 2, 3), np.int16).tobytes()
    reason, message = refused(
        [pb.TokenSegment(source=ASSISTANT, tokens=ids(1, 2, 3, 4), routed_experts=routing)],
        moe_layers=2,
        top_k=3,
    )
    assert reason is DropReason.ROUTING_MISMATCH
    assert "60 bytes" in message and "48" in message


def test_f8_an_assistant_segment_without_routing_is_refused_and_an_environment_one_is_unset() -> (
    None
):
    with_routing = pb.TokenSegment(
        source=ASSISTANT,
        tokens=ids(1),
        logprobs=nats(-1),
        routed_experts=np.array([[[300, 4]]], "<i2").tobytes(),
    )
    made = decoded(
        [pb.TokenSegment(source=ENVIRONMENT, tokens=ids(8, 9)), with_routing],
        moe_layers=1,
        top_k=2,
    )
    assert made.routed_experts is not None
    assert made.routed_experts.tolist() == [[[-1, -1]], [[-1, -1]], [[300, 4]]]
    reason, message = refused(
        [with_routing, pb.TokenSegment(source=ASSISTANT, tokens=ids(2), logprobs=nats(-1))],
        moe_layers=1,
        top_k=2,
    )
    assert reason is DropReason.MISSING_FIELD and "segments[1]" in message


def test_routing_that_is_made_up_is_bounded_by_a_limit_and_not_by_the_header() -> None:
    tight = replace(LIMITS, max_filled_bytes=1000)
    segments = [
        pb.TokenSegment(source=ENVIRONMENT, tokens=ids(*range(10))),
        pb.TokenSegment(source=ASSISTANT, tokens=b"", routed_experts=b""),
        pb.TokenSegment(
            source=ASSISTANT, tokens=ids(1), routed_experts=np.zeros((1, 100, 1), "<i2").tobytes()
        ),
    ]
    with pytest.raises(TrajectoryError, match="2000 bytes"):
        decode_trajectory(head(moe_layers=100, top_k=1), segments, tight)


def test_more_tokens_than_any_row_are_refused_before_arrays_are_joined() -> None:
    tight = replace(LIMITS, max_tokens=4)
    segments = [pb.TokenSegment(source=ASSISTANT, tokens=ids(1, 2, 3)) for _ in range(2)]
    with pytest.raises(TrajectoryError) as caught:
        decode_trajectory(head(), segments, tight)
    assert caught.value.defect.reason is DropReason.LONGER_THAN_ROW


# -- messages ---------------------------------------------------------------------------------


def test_many_empty_segments_are_refused_before_they_become_objects() -> None:
    request = pb.SubmitTrajectoriesRequest(
        submit=pb.Submit(trajectory=head(segments=[pb.TokenSegment() for _ in range(5000)]))
    )
    tight = replace(LIMITS, max_segments=100)
    with pytest.raises(MessageError, match="more than 864 fields"):
        parse_request(request.SerializeToString(), tight)
    parts = TrajectoryParts(replace(LIMITS, max_segments=100))
    result = parts.add(request.submit)
    assert isinstance(result, Rejected) and "more than 100 segments" in result.message


def test_a_message_over_the_limit_is_refused_with_both_sizes() -> None:
    with pytest.raises(MessageError, match=r"101 bytes; at most 100"):
        parse_request(b"\0" * 101, replace(LIMITS, max_message_bytes=100))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x12",
        b"\x12\xff\xff\xff\xff\x0f",
        b"\xff" * 11,
        b"\x0b\x0c",
        b"\x09\0",
        b"\x0a\x02\x0a\xff",
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        parse_request(data, LIMITS)


@settings(max_examples=300, deadline=None)
@for_all(st.binary(max_size=200))
def test_no_bytes_crash_the_decoder(data: bytes) -> None:
    try:
        request = parse_request(data, LIMITS)
    except MessageError as error:
        assert str(error)
        return
    if request.WhichOneof("part") == "submit":
        TrajectoryParts(LIMITS).add(request.submit)


@settings(max_examples=300, deadline=None)
@for_all(st.data())
def test_a_damaged_message_is_refused_or_means_something(data: st.DataObject) -> None:
    rollout = Rollout(
        group_id="g",
        index=1,
        segments=(given([1, 2]), sampled([3, 4], [-1.0, -2.0])),
        reward=0.5,
        dispatched_version=1,
    )
    (request,) = encode(rollout).requests(3)
    whole = bytearray(request.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.integers(0, 255))
    try:
        parsed = parse_request(bytes(whole), LIMITS)
    except MessageError:
        return
    if parsed.WhichOneof("part") == "submit":
        result = TrajectoryParts(LIMITS).add(parsed.submit)
        assert result is None or isinstance(result, Rejected | Trajectory)


def test_the_scan_counts_what_the_parser_would_make() -> None:
    request = pb.SubmitTrajectoriesRequest(
        submit=pb.Submit(
            offset=1, trajectory=head(segments=[pb.TokenSegment(source=ASSISTANT)] * 3)
        )
    )
    data = request.SerializeToString()
    # submit; offset, trajectory; group_id, reward, 3 segments; 3 sources.
    nested = {2: {2: {3: {}}}}
    assert count_fields(data, nested, most=11) == 11
    with pytest.raises(ScanError, match="more than 10"):
        count_fields(data, nested, most=10)


# -- round trip ---------------------------------------------------------------------------------


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    routing = draw(st.booleans())
    masked = draw(st.booleans())

    def experts(count: int) -> np.ndarray | None:
        return rng.integers(-1, 400, (count, 2, 3)).astype(np.int16) if routing else None

    segments = []
    for number in range(draw(st.integers(1, 5))):
        count = draw(st.integers(1, 40))
        tokens = rng.integers(0, 1000, count)
        if number % 2 == 0:
            segments.append(given(tokens, routed_experts=experts(count)))
        else:
            mask = rng.integers(0, 2, count).astype(np.uint8) if masked else None
            segments.append(
                sampled(tokens, -rng.random(count), loss_mask=mask, routed_experts=experts(count))
            )
    version = draw(st.integers(0, 9))
    return Rollout(
        group_id=draw(st.text("abc/@0", min_size=1, max_size=9)),
        index=draw(st.integers(0, 99)),
        segments=tuple(segments),
        reward=draw(st.floats(width=32, allow_nan=False)),
        dispatched_version=version,
        completed_version=draw(st.sampled_from([None, version, version + 2])),
        finish=draw(st.sampled_from(list(Finish))),
        task=draw(st.text("ab", max_size=3)),
    )


@settings(max_examples=60, deadline=None)
@for_all(rollouts(), st.integers(40, 2000))
def test_how_a_rollout_is_cut_into_messages_does_not_matter(
    rollout: Rollout, part_bytes: int
) -> None:
    whole, cut = through_the_wire(rollout), through_the_wire(rollout, part_bytes)
    assert isinstance(whole, Trajectory) and isinstance(cut, Trajectory)
    assert whole.same_content(cut)
    sampled_tokens = [s for s in rollout.segments if s.is_sampled]
    trained = sum(
        s.tokens.size if s.loss_mask is None else int(s.loss_mask.sum()) for s in sampled_tokens
    )
    assert whole.trainable_tokens == trained
    assert whole.total_tokens == sum(s.tokens.size for s in rollout.segments)
    again = through_the_wire(Rollout.of(whole))
    assert isinstance(again, Trajectory) and again.same_content(whole)


def test_parts_of_two_trajectories_may_not_be_mixed() -> None:
    parts = TrajectoryParts(LIMITS)
    assert parts.add(pb.Submit(offset=0, trajectory=head(), more=True)) is None
    assert parts.open
    with pytest.raises(MessageError, match="offset 1 came while the parts of 0"):
        parts.add(pb.Submit(offset=1, trajectory=head()))


def test_parts_beyond_the_limit_are_not_kept() -> None:
    parts = TrajectoryParts(replace(LIMITS, max_trajectory_bytes=1000))
    segment = pb.TokenSegment(source=ASSISTANT, tokens=b"\0" * 400)
    for number in range(5):
        part = pb.Trajectory(segments=[segment]) if number else head(segments=[segment])
        assert parts.add(pb.Submit(offset=0, trajectory=part, more=True)) is None
    assert len(parts._segments) == 0
    result = parts.add(pb.Submit(offset=0, trajectory=pb.Trajectory()))
    assert isinstance(result, Rejected) and "at most 1000" in result.message
    assert not parts.open


def test_a_later_part_cannot_change_the_header() -> None:
    parts = TrajectoryParts(LIMITS)
    parts.add(pb.Submit(offset=0, trajectory=head(), more=True))
    result = parts.add(pb.Submit(offset=0, trajectory=pb.Trajectory(reward=2.0)))
    assert isinstance(result, Rejected) and "later part" in result.message
