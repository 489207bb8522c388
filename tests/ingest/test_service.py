"""The service on a real socket, with a log that can be held up."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import grpc
import pytest

from orchestrator.ingest.limits import IngestLimits
from orchestrator.ingest.streams import RecentNames
from prestage.rollout.refusals import RolloutReason, RolloutRefusal
from prestage.rollout.v1 import rollout_pb2 as pb
from prestage.rollout.v1.rollout_pb2_grpc import RolloutIngestStub
from prestage.wire.channel import open_channel
from tests.ingest.fake_log import FakeLog
from tests.ingest.rig import RUN, RawProducer, opening, raw, rollout, served, submission

LIMITS = IngestLimits()


def reason_of(producer: RawProducer) -> RolloutReason:
    refusal = producer.refusal()
    assert isinstance(refusal, RolloutRefusal), refusal
    return refusal.reason


def test_acks_come_in_order_and_only_after_they_are_durable() -> None:
    with served() as where, raw(where) as producer:
        assert producer.opened().next_offset == 0
        where.log.hold()
        producer.send(*(submission(n, rollout(f"g{n}", 0)) for n in range(3)))
        where.log.wait_for(lambda log: len(log.taken) == 3)
        got: list[int] = []
        reader = threading.Thread(
            target=lambda: got.extend(producer.ack().offset for _ in range(3))
        )
        reader.start()
        reader.join(timeout=0.3)
        assert got == [], "an ack came before its trajectory was durable"
        where.log.release()
        reader.join(timeout=10)
        assert got == [0, 1, 2]


def test_an_ack_says_what_became_of_the_trajectory() -> None:
    with served(FakeLog(group_size=2)) as where, raw(where) as producer:
        producer.opened()
        nan = replace(rollout("bad", 0), reward=float("nan"))
        other = replace(rollout("g", 0), reward=0.25)
        for offset, what in enumerate(
            [rollout("g", 0), rollout("g", 0), other, nan, rollout("g", 1), rollout("g", 1)]
        ):
            producer.send(submission(offset, what))
        acks = [producer.ack() for _ in range(6)]
    said = [(ack.accepted, ack.duplicate, ack.reason) for ack in acks]
    assert said == [
        (True, False, ""),
        (True, True, ""),
        (False, False, "conflict"),
        (False, False, "nonfinite_reward"),
        (True, False, ""),
        (True, True, ""),
    ]
    counts = where.server.counts()
    assert (counts.accepted, counts.duplicates) == (2, 2)
    assert counts.accepted_tokens == 10
    assert counts.dropped == {"conflict": 1, "nonfinite_reward": 1}
    assert where.log.assembler.ledger().tokens_in == 15  # 2 kept, 1 dropped: doubles not counted.


def test_a_trajectory_that_cannot_be_read_takes_its_offset_and_is_counted() -> None:
    with served() as where, raw(where) as producer:
        producer.opened()
        broken = submission(0)
        broken.submit.trajectory.segments[0].tokens = b"123"
        producer.send(broken, submission(1))
        ack = producer.ack()
        assert not ack.accepted and ack.reason == "malformed" and "3 bytes" in ack.message
        assert producer.ack().accepted
    assert where.log.rejected == [("p", 0, "malformed")]
    assert where.server.counts().dropped == {"malformed": 1}


def test_a_gap_is_refused_and_names_both_offsets() -> None:
    with served() as where, raw(where) as producer:
        producer.opened()
        producer.send(submission(0))
        # First its ack: a refusal ends the stream and what it still owes.
        assert producer.ack().offset == 0
        producer.send(submission(2))
        refusal = producer.refusal()
        assert isinstance(refusal, RolloutRefusal)
        assert refusal.reason is RolloutReason.OFFSET_GAP
        assert "2" in refusal.message and "1" in refusal.message
        assert producer.call.code() is grpc.StatusCode.OUT_OF_RANGE


def test_an_offset_that_came_before_is_a_duplicate() -> None:
    with served() as where, raw(where) as producer:
        producer.opened()
        producer.send(submission(0), submission(0))
        assert not producer.ack().duplicate
        assert producer.ack().duplicate
        assert len(where.log.taken) == 1


def test_a_producer_comes_back_to_where_it_was() -> None:
    with served() as where:
        with raw(where) as producer:
            assert producer.opened().next_offset == 0
            producer.send(submission(0), submission(1))
            producer.ack(), producer.ack()
        with raw(where) as again:
            assert again.opened().next_offset == 2
        with raw(where, "another") as other:
            assert other.opened().next_offset == 0


def test_a_newer_stream_takes_over_and_hears_of_what_the_older_one_left_in_the_log() -> None:
    with served() as where, raw(where) as older:
        older.opened()
        where.log.hold()
        older.send(submission(0))
        where.log.wait_for(lambda log: log.queued == 1)
        with raw(where) as newer:
            assert reason_of(older) is RolloutReason.SUPERSEDED
            where.log.release()  # The newer one waits for this: its next_offset must count it.
            assert newer.opened().next_offset == 1
            newer.send(submission(1))
            assert newer.ack().offset == 1
    assert where.log.order == [("p", 0), ("p", 1)]


def test_a_full_log_makes_the_producer_wait_and_drops_nothing() -> None:
    limits = replace(LIMITS, window=4)
    with served(FakeLog(budget=3), limits) as where, raw(where) as producer:
        assert producer.opened().window == 4
        producer.send(*(submission(n, rollout(f"g{n}")) for n in range(10)))
        assert [producer.ack().offset for _ in range(3)] == [0, 1, 2]
        where.log.wait_for(lambda log: log.blocked == 1)
        assert len(where.log.taken) == 3
        deadline = time.monotonic() + 10
        while not where.server.counts().wait_seconds:  # Counted while it still waits.
            assert time.monotonic() < deadline
        where.log.raise_budget(1000)
        assert [producer.ack().offset for _ in range(7)] == list(range(3, 10))
    assert len(where.log.taken) == 10
    assert where.server.counts().wait_seconds > 0


def test_a_producer_that_ignores_the_window_is_not_read_beyond_it() -> None:
    limits = replace(LIMITS, window=4)
    with served(limits=limits) as where, raw(where) as producer:
        producer.opened()
        where.log.hold()
        producer.send(*(submission(n, rollout(f"g{n}")) for n in range(50)))
        where.log.wait_for(lambda log: log.queued == 4)
        where.log.release(2)
        assert [producer.ack().offset for _ in range(2)] == [0, 1]
        where.log.wait_for(lambda log: log.queued == 4)
        where.log.release()
        assert [producer.ack().offset for _ in range(48)] == list(range(2, 50))
    assert where.log.most_queued == 4


def test_a_full_log_lets_go_of_a_producer_that_left() -> None:
    with served(FakeLog(budget=0)) as where:
        with raw(where) as producer:
            producer.opened()
            producer.send(submission(0))
            where.log.wait_for(lambda log: log.blocked == 1)
        with raw(where) as again:
            assert again.opened().next_offset == 0
            where.log.raise_budget(10)
            again.send(submission(0))
            assert again.ack().accepted
    assert where.log.order == [("p", 0)]


def test_the_end_does_not_wait_for_room_in_a_full_log() -> None:
    with served(FakeLog(budget=1)) as where, raw(where) as producer:
        producer.opened()
        producer.send(submission(0), submission(1))
        where.log.wait_for(lambda log: len(log.taken) == 1 and log.blocked == 1)
        started = time.monotonic()
        where.server.stop(finished=True)
        assert time.monotonic() - started < 5
        assert reason_of(producer) is RolloutReason.RUN_ENDED
    assert where.log.order == [("p", 0)]


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (submission(0), RolloutReason.OPEN_MISSING),
        (opening(run_id="another"), RolloutReason.WRONG_RUN),
        (opening(producer=""), RolloutReason.INVALID_REQUEST),
        (opening(producer="p" * 129), RolloutReason.INVALID_REQUEST),
        (opening(producer="a\nb"), RolloutReason.INVALID_REQUEST),
        (pb.SubmitTrajectoriesRequest(), RolloutReason.INVALID_REQUEST),
    ],
)
def test_a_stream_that_begins_wrongly_is_refused(
    first: pb.SubmitTrajectoriesRequest, reason: RolloutReason
) -> None:
    with served() as where, raw(where, None) as producer:
        producer.send(first)
        assert reason_of(producer) is reason
        assert where.server.counts().refusals[reason.value] == 1
        with raw(where, "healthy") as healthy:
            assert healthy.opened().next_offset == 0


def test_a_second_open_is_refused() -> None:
    with served() as where, raw(where) as producer:
        producer.send(opening())
        assert reason_of(producer) is RolloutReason.OPEN_MISSING


def test_a_message_over_the_limit_ends_the_stream_and_nothing_else() -> None:
    limits = replace(LIMITS, max_message_bytes=10_000)
    with served(limits=limits) as where, raw(where) as producer:
        producer.opened()
        producer.send(submission(0, rollout(tokens=3000)))
        refusal = producer.refusal()
        assert isinstance(refusal, RolloutRefusal)
        assert refusal.reason is RolloutReason.INVALID_REQUEST
        assert "10000" in refusal.message
        with raw(where) as again:  # Far beyond it, gRPC refuses before the bytes are kept.
            again.opened()
            again.send(submission(0, rollout(tokens=30_000)))
            assert again.refusal()
        with raw(where) as healthy:
            assert healthy.opened().next_offset == 0


def test_streams_that_do_not_open_end_in_time_and_are_counted() -> None:
    limits = replace(LIMITS, open_s=0.2)
    with served(limits=limits) as where, raw(where, None) as silent:
        silent.call.initial_metadata  # noqa: B018
        assert reason_of(silent) is RolloutReason.OPEN_LATE
        assert where.server.counts().refusals["OPEN_LATE"] == 1


def test_a_quiet_producer_is_let_go_but_not_while_its_acks_are_owed() -> None:
    limits = replace(LIMITS, idle_s=0.3)
    with served(limits=limits) as where, raw(where) as producer:
        producer.opened()
        where.log.hold()
        producer.send(submission(0))
        where.log.wait_for(lambda log: log.queued == 1)
        time.sleep(0.6)  # Longer than the limit: the ack is owed, so it does not count.
        where.log.release()
        assert producer.ack().offset == 0
        assert reason_of(producer) is RolloutReason.IDLE


def test_parts_that_stop_coming_end_the_stream_and_free_their_place() -> None:
    limits = replace(LIMITS, part_s=0.2, parts_in_hand=1)
    head = submission(0)
    head.submit.more = True
    with served(limits=limits) as where, raw(where, "a") as first, raw(where, "b") as second:
        first.opened(), second.opened()
        first.send(head)
        assert reason_of(first) is RolloutReason.IDLE
        rest = pb.SubmitTrajectoriesRequest(submit=pb.Submit(offset=0))
        second.send(head, rest)
        assert second.ack().accepted
    assert where.log.order == [("b", 0)]


def test_too_many_producers_are_refused_and_one_may_come_when_another_leaves() -> None:
    limits = replace(LIMITS, max_producers=2)
    with served(limits=limits) as where, raw(where, "a") as first, raw(where, "b") as second:
        first.opened(), second.opened()
        with raw(where, "c") as third:
            assert reason_of(third) is RolloutReason.TOO_MANY_PRODUCERS
        with raw(where, "b") as again:  # One that is known may take over.
            again.opened()
        first.half_close()
        assert list(first.call) == []
        with raw(where, "c") as third:
            third.opened()


def test_a_log_that_fails_ends_the_stream_with_the_reason() -> None:
    with served() as where, raw(where) as producer:
        producer.opened()
        where.log.hold()
        producer.send(submission(0))
        where.log.wait_for(lambda log: log.queued == 1)
        where.log.fail(OSError("no space left on device"))
        refusal = producer.refusal()
        assert isinstance(refusal, RolloutRefusal)
        assert refusal.reason is RolloutReason.LOG_FAILED and "no space left" in refusal.message


def test_the_end_of_the_run_is_told_and_nothing_more_is_acknowledged() -> None:
    with served() as where, raw(where) as producer, raw(where, "quiet") as quiet:
        producer.opened(), quiet.opened()
        where.log.hold()
        producer.send(submission(0))
        where.log.wait_for(lambda log: log.queued == 1)
        stopping = threading.Thread(target=lambda: where.server.stop(finished=True))
        stopping.start()
        assert reason_of(producer) is RolloutReason.RUN_ENDED
        assert reason_of(quiet) is RolloutReason.RUN_ENDED
        where.log.release()
        stopping.join(timeout=10)
        assert not stopping.is_alive()


def test_a_producer_between_two_connections_hears_of_the_end_and_one_that_left_is_not_waited_for() -> (
    None
):
    with served() as where:
        with raw(where, "away") as producer, raw(where, "left") as left:
            producer.opened(), left.opened()
            left.half_close()
            assert list(left.call) == []
            producer.drop(where)
        stopping = threading.Thread(target=lambda: where.server.stop(finished=True))
        stopping.start()
        with raw(where, "away") as again:
            assert reason_of(again) is RolloutReason.RUN_ENDED
        stopping.join(timeout=5)  # Not the whole time for which it would have waited.
        assert not stopping.is_alive()


def test_the_end_of_the_run_does_not_wait_for_ever_for_a_producer_that_is_gone() -> None:
    with served(limits=replace(LIMITS, linger_s=0.3)) as where:
        with raw(where, "gone") as producer:
            producer.opened()
            producer.drop(where)
        started = time.monotonic()
        where.server.stop(finished=True)
        assert 0.3 <= time.monotonic() - started < 5


def test_a_process_that_stops_says_that_the_run_goes_on() -> None:
    with served() as where, raw(where) as producer:
        producer.opened()
        where.server.stop(finished=False)
        assert reason_of(producer) is RolloutReason.STOPPING


def test_producers_that_come_and_go_under_ever_new_names_leave_nothing() -> None:
    names = RecentNames(most=3)
    for number in range(10):
        names.add(str(number))
    names.add("8")
    assert len(names) == 3 and "8" in names and "6" not in names
    with served(limits=replace(LIMITS, max_producers=2)) as where:
        for number in range(50):
            with raw(where, f"p{number}") as producer:
                producer.opened()
                if number % 2:
                    producer.drop(where)
                else:
                    producer.half_close()
                    assert list(producer.call) == []
        streams = where.server._streams
        deadline = time.monotonic() + 10
        while streams._named or streams._unopened:  # The last one was dropped just now.
            assert time.monotonic() < deadline, streams._named
        assert where.server.counts().producers == 0


# -- WatchPolicy ----------------------------------------------------------------------------------


def watching(address: str, run_id: str = RUN, after: int = 0):  # type: ignore[no-untyped-def]
    channel = open_channel(address)
    call = RolloutIngestStub(channel).WatchPolicy(
        pb.WatchPolicyRequest(run_id=run_id, after=after), timeout=30
    )
    return channel, call


def test_a_watcher_is_told_the_newest_state_at_once_and_then_every_change() -> None:
    with served() as where:
        where.server.board.publish(3)
        channel, call = watching(where.address)
        assert next(call).policy_version == 3
        where.server.board.publish(4)
        assert next(call).policy_version == 4
        where.log.finish_group("g7")
        told = next(call)
        assert list(told.cancel_groups) == ["g7"] and told.policy_version == 4
        where.log.finish_group("g8")
        assert list(next(call).cancel_groups) == ["g8"]
        again_channel, again = watching(where.address, after=told.cursor)
        assert list(next(again).cancel_groups) == ["g8"]
        where.server.stop(finished=True)
        assert next(call).finished
        assert next(again).finished
        channel.close(), again_channel.close()


def test_many_finished_groups_come_in_several_answers_and_each_once() -> None:
    with served() as where:
        names = [f"group-{number}" for number in range(10_000)]
        for name in names:
            where.log.finish_group(name)
        channel, call = watching(where.address)
        told: list[str] = []
        cursor = 0
        while len(told) < len(names):
            answer = next(call)
            told += answer.cancel_groups
            cursor = answer.cursor
        assert told == names and cursor == len(names)
        channel.close()


def test_watchers_are_bounded_and_held_to_the_run() -> None:
    limits = replace(LIMITS, max_watchers=1)
    with served(limits=limits) as where:
        channel, call = watching(where.address)
        next(call)
        for run_id, code in ((RUN, "TOO_MANY_WATCHERS"), ("another", "WRONG_RUN")):
            other, refused = watching(where.address, run_id)
            with pytest.raises(grpc.RpcError):
                next(refused)
            assert where.server.counts().refusals[code] == 1
            other.close()
        call.cancel()
        channel.close()
        deadline = time.monotonic() + 10
        while where.server.counts().watchers:
            assert time.monotonic() < deadline
        last, call = watching(where.address)
        assert next(call).policy_version == 0
        last.close()
