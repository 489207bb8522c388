"""The client against the served ingest, over connections that break."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest

from orchestrator.client import (
    ProducerClosed,
    ProducerRefused,
    ProducerUnreachable,
    Rollout,
    RolloutProducer,
    RolloutValueError,
    RunEnded,
    given,
    sampled,
)
from orchestrator.ingest.limits import IngestLimits
from orchestrator.ingest.server import IngestServer
from tests.ingest.fake_log import FakeLog
from tests.ingest.rig import RUN, Served, rollout, served

LIMITS = IngestLimits()


def connect(where: Served, name: str = "p", **changes: object) -> RolloutProducer:
    return RolloutProducer(
        where.address,
        **{"producer": name, "run_id": RUN, "unreachable_s": 20.0, **changes},  # type: ignore[arg-type]
    )


@pytest.fixture(name="where")
def _where() -> Iterator[Served]:
    with served() as where:
        yield where


def test_receipts_say_what_became_of_each_rollout(where: Served) -> None:
    with connect(where) as producer:
        nan = replace(rollout("bad"), reward=float("nan"))
        futures = [producer.submit(what) for what in (rollout("g", 0), rollout("g", 0), nan)]
        receipts = [future.result(timeout=10) for future in futures]
    assert [receipt.offset for receipt in receipts] == [0, 1, 2]
    assert [receipt.accepted for receipt in receipts] == [True, True, False]
    assert [receipt.duplicate for receipt in receipts] == [False, True, False]
    assert receipts[2].reason == "nonfinite_reward"
    assert all(receipt.verdict_known for receipt in receipts)


def test_a_restarted_producer_goes_on_under_its_name(where: Served) -> None:
    with connect(where) as producer:
        assert producer.next_offset(timeout_s=10) == 0
        producer.submit(rollout("a"))
    with connect(where) as producer:
        assert producer.next_offset(timeout_s=10) == 1
        assert producer.submit(rollout("b")).result(timeout=10).offset == 1


def test_submit_waits_while_too_much_is_not_acknowledged(where: Served) -> None:
    where.log.hold()
    producer = connect(where, max_pending=2)
    producer.submit(rollout("a")), producer.submit(rollout("b"))
    with pytest.raises(TimeoutError, match=r"2 rollouts .* the trainer is slower"):
        producer.submit(rollout("c"), timeout_s=0.2)
    third: list[object] = []
    waiting = threading.Thread(target=lambda: third.append(producer.submit(rollout("c"))))
    waiting.start()
    where.log.wait_for(lambda log: log.queued == 2)
    where.log.release()
    waiting.join(timeout=10)
    producer.close(timeout_s=10)
    assert len(third) == 1
    assert len(where.log.taken) == 3


def test_d12_d14_a_rollout_larger_than_a_message_goes_in_parts(where: Served) -> None:
    tokens = 3_000_000  # 24 MiB of tokens and log-probs: more than a message.
    large = Rollout(
        group_id="large",
        index=0,
        segments=(given([1]), sampled([7] * tokens, [-0.5] * tokens)),
        reward=1.0,
        dispatched_version=0,
    )
    with connect(where) as producer:
        receipt = producer.submit(large).result(timeout=60)
    assert receipt.reason == "longer_than_row"
    assert where.log.taken[0].total_tokens == tokens + 1


def test_d12_a_completion_that_never_comes_does_not_keep_its_group_waiting() -> None:
    with served(FakeLog(group_size=2, extra=1)) as where, connect(where) as producer:
        given_up = producer.fail("spare", 0).result(timeout=10)
        assert (given_up.accepted, given_up.reason) == (False, "producer_failed")
        # One more was made than is needed: the group goes on.
        assert [producer.submit(rollout("spare", n)).result(10).accepted for n in (1, 2)] == [
            True,
            True,
        ]
        producer.submit(rollout("lost", 0)), producer.fail("lost", 1), producer.fail("lost", 2)
        producer.flush()
        assert [group.group_id for group in where.log.assembler.ready] == ["spare"]
        assert where.log.assembler.open_group_ids == ()
        _, finished = where.log.cancellable_groups(0)
        assert finished == ("spare", "lost")
        ledger = where.log.assembler.ledger()
        ledger.check()


def test_what_cannot_be_sent_is_said_where_it_is_made(where: Served) -> None:
    with connect(where) as producer:
        with pytest.raises(RolloutValueError, match=r"index -1|members count"):
            producer.submit(replace(rollout(), index=-1))
        with pytest.raises(RolloutValueError, match="one a token"):
            sampled([1, 2], [-1.0])


def test_another_run_is_refused_and_says_so(where: Served) -> None:
    producer = connect(where, run_id="another")
    with pytest.raises(ProducerRefused, match=r"another.*run-1"):
        producer.next_offset(timeout_s=10)
    with pytest.raises(ProducerRefused):
        producer.submit(rollout())
    with pytest.raises(ProducerRefused):
        producer.close()


def test_two_processes_with_one_name_end_with_a_clear_error(where: Served) -> None:
    first = connect(where)
    first.next_offset(timeout_s=10)
    with connect(where) as second:
        second.submit(rollout()).result(timeout=10)
        with pytest.raises(ProducerRefused, match="give each its own"):
            first.submit(rollout()).result(timeout=10)
            first.flush(timeout_s=10)
    with pytest.raises(ProducerRefused):
        first.close()


def test_an_idle_producer_connects_again_when_it_has_something() -> None:
    with served(limits=replace(LIMITS, idle_s=0.1)) as where, connect(where) as producer:
        producer.submit(rollout("a")).result(timeout=10)
        deadline = time.monotonic() + 10
        while where.server.counts().refusals["IDLE"] == 0:
            assert time.monotonic() < deadline
        assert producer.submit(rollout("b")).result(timeout=10).accepted
        assert producer.reconnections >= 1
    assert where.log.order == [("p", 0), ("p", 1)]


def test_no_service_is_told_after_the_patience(tmp_path: object) -> None:
    producer = RolloutProducer(
        "unix:///tmp/no-such-ingest.sock", producer="p", run_id=RUN, unreachable_s=0.3
    )
    future = producer.submit(rollout())
    with pytest.raises(ProducerUnreachable, match="no connection for"):
        future.result(timeout=20)
    with pytest.raises(ProducerUnreachable):
        producer.close()


def test_a_producer_that_is_closed_early_says_which_acks_are_missing(where: Served) -> None:
    where.log.hold()
    producer = connect(where)
    future = producer.submit(rollout())
    where.log.wait_for(lambda log: log.queued == 1)
    with pytest.raises(TimeoutError):
        producer.close(timeout_s=0.1)
    with pytest.raises(ProducerClosed):
        future.result(timeout=1)
    with pytest.raises(ProducerClosed):
        producer.submit(rollout())


def test_the_end_of_the_run_reaches_futures_and_watchers(where: Served) -> None:
    where.log.hold()
    producer = connect(where)
    updates = producer.watch()
    assert next(updates).policy_version == 0
    future = producer.submit(rollout())
    where.log.wait_for(lambda log: log.queued == 1)
    stopping = threading.Thread(target=lambda: where.server.stop(finished=True))
    stopping.start()
    assert [update.finished for update in updates] == [True]
    with pytest.raises(RunEnded):
        future.result(timeout=10)
    with pytest.raises(RunEnded):
        producer.submit(rollout())
    where.log.release()
    stopping.join(timeout=20)
    with pytest.raises(RunEnded):
        producer.close()


def test_a_producer_that_the_run_has_taken_everything_from_closes_well(where: Served) -> None:
    with connect(where) as producer:
        producer.submit(rollout()).result(timeout=10)
        where.server.stop(finished=True)
        with pytest.raises(RunEnded):
            while True:
                producer.next_offset(timeout_s=10)  # Says so once the client has heard.
    with connect(where) as producer:  # Nobody is there any more, and nothing is owed.
        pass


def _restart(where: Served) -> None:
    """The service's process ends, without a word to anybody, and another one takes over."""
    where.server._server.stop(0).wait()
    where.server = IngestServer(where.log, run_id=RUN, listen=where.address, board=None)
    where.server.start()


def test_rollouts_survive_any_number_of_restarts_once_each(where: Served) -> None:
    total = 400
    with connect(where, "a") as first, connect(where, "b") as second:
        futures = []
        for number in range(total):
            futures.append(first.submit(rollout(f"a{number}")))
            futures.append(second.submit(rollout(f"b{number}")))
            if number % 80 == 40:
                futures[-40].result(timeout=30)  # Connected, with some still on their way.
                _restart(where)
        first.flush(timeout_s=60), second.flush(timeout_s=60)
        assert first.reconnections >= 3
    receipts = [future.result(timeout=0) for future in futures]
    assert all(receipt.accepted for receipt in receipts)
    assert len(where.log.taken) == 2 * total
    assert len({trajectory.key for trajectory in where.log.taken}) == 2 * total
    for name in "ab":
        offsets = [offset for producer, offset in where.log.order if producer == name]
        assert offsets == list(range(total))
        groups = [t.group_id for t in where.log.taken if t.group_id.startswith(name)]
        assert groups == [f"{name}{number}" for number in range(total)]


def test_an_ack_that_is_lost_is_settled_by_the_next_connection(where: Served) -> None:
    with connect(where) as producer:
        producer.submit(rollout("a")).result(timeout=10)
        where.log.hold()
        future = producer.submit(rollout("b"))
        where.log.wait_for(lambda log: log.queued == 1)
        where.server._server.stop(0).wait()  # The connection goes; what is queued becomes durable.
        where.log.release()
        _restart(where)
        receipt = future.result(timeout=20)
    assert receipt.duplicate and not receipt.verdict_known
    assert [t.group_id for t in where.log.taken] == ["a", "b"]


def test_a_journal_that_was_replaced_is_noticed(where: Served) -> None:
    producer = connect(where)
    for number in range(3):
        producer.submit(rollout(f"g{number}"))
    producer.flush(timeout_s=10)
    where.log = FakeLog()
    _restart(where)
    with pytest.raises(ProducerRefused, match="was it replaced"):
        producer.submit(rollout("g3")).result(timeout=20)
    with pytest.raises(ProducerRefused):
        producer.close()


def test_r11_a_watcher_connects_again_and_misses_no_group(where: Served) -> None:
    with connect(where) as producer:
        updates = producer.watch()
        seen: list[str] = []
        where.log.finish_group("g0")
        while "g0" not in seen:
            seen += next(updates).cancel_groups
        where.server._server.stop(0).wait()
        where.log.finish_group("g1")
        _restart(where)
        while "g1" not in seen:
            seen += next(updates).cancel_groups
    assert seen == ["g0", "g1"]
    assert list(updates) == []


def test_producers_and_watchers_leave_no_thread_behind(where: Served) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    with connect(where, "x") as producer:
        updates = producer.watch()
        next(updates)
        producer.submit(rollout()).result(timeout=10)
    deadline = time.monotonic() + 10
    while left := [
        thread.name
        for thread in threading.enumerate()
        if thread.ident not in before and thread.name.startswith(("rollout-", "ingest-reader"))
    ]:
        assert time.monotonic() < deadline, left
    counts = where.server.counts()
    while counts.producers or counts.watchers:
        assert time.monotonic() < deadline, counts
        counts = where.server.counts()


def test_a_stock_stub_is_refused_readably(where: Served) -> None:
    """What a team sees that writes its own client: the code, the reason and the sentence."""
    from prestage.rollout.v1 import rollout_pb2 as pb
    from prestage.rollout.v1.rollout_pb2_grpc import RolloutIngestStub

    with grpc.insecure_channel(where.address) as channel:
        call = RolloutIngestStub(channel).SubmitTrajectories(
            iter([pb.SubmitTrajectoriesRequest(submit=pb.Submit())])
        )
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "before `open`" in caught.value.details()
