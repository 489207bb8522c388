"""Streams that say nothing give their places back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from orchestrator.bench.conformance.driver import Driver
from prestage.protocol import BatchRef, Call, Reason
from prestage.tensor.v1 import tensor_pb2
from prestage.wire.channel import open_channel
from prestage.wire.codec import make_manifest
from prestage.wire.errors import LimitError, Refusal, classify
from prestage.wire.store import MicroBatchStore
from prestage.wire.stream_plane import PUT_METHOD
from prestage.wire.stream_slots import Ended, Slot, StreamSlots
from tests.support.rig import address_of, served
from trainer_worker.service import MAX_UPLOADS


def _messages(*texts: str) -> Iterator[str]:
    yield from texts


def test_a_newer_stream_takes_the_place_of_the_oldest_that_has_not_begun() -> None:
    ended: list[int] = []
    slots = StreamSlots(2, clock=lambda: 0.0)
    first = slots.take(_messages("a"), lambda: ended.append(1))
    second = slots.take(_messages("b"), lambda: ended.append(2))
    assert first is not None and second is not None
    assert next(first) == "a"
    third = slots.take(_messages("c"), lambda: ended.append(3))
    assert third is not None and next(third) == "c"
    assert (ended, second.ended, slots.ended) == ([2], Ended.REPLACED, {Ended.REPLACED: 1})
    assert slots.take(_messages("d"), lambda: ended.append(4)) is None, "both have begun"
    with first:
        pass
    assert slots.take(_messages("d"), lambda: ended.append(4)) is not None
    second.__exit__(None, None, None)  # It leaves late: nobody's place goes with it.
    assert slots.take(_messages("e"), lambda: ended.append(5)) is not None
    assert ended == [2, 4]


def test_silence_counts_only_while_the_server_waits_for_the_client() -> None:
    now = [0.0]
    slots = StreamSlots(4, first_s=10.0, silent_s=60.0, clock=lambda: now[0])
    ended: list[str] = []
    silent = slots.take(_messages("a"), lambda: ended.append("silent"))
    busy = slots.take(_messages("a"), lambda: ended.append("busy"))
    assert silent is not None and busy is not None
    assert next(busy) == "a"  # The server has it and works: that is not the client's silence.
    now[0] = 10.0
    slots.end_silent()
    assert not ended
    now[0] = 1000.0
    slots.end_silent()
    slots.end_silent()
    assert ended == ["silent"]
    assert silent.ended is Ended.FIRST_LATE
    waiting: Slot[str] | None = slots.take(_messages("a", "b"), lambda: ended.append("waiting"))
    assert waiting is not None and next(waiting) == "a"
    waiting.waits_since_s = now[0]
    now[0] += 60.0
    slots.end_silent()
    assert ended == ["silent"]
    now[0] += 0.1
    slots.end_silent()
    assert (ended, waiting.ended) == (["silent", "waiting"], Ended.SILENT)


def _hold(
    channel: grpc.Channel, method: str, first: bytes | None
) -> tuple[object, threading.Event]:
    """A stream that sends at most one message and then nothing."""
    let_go = threading.Event()

    def requests() -> Iterator[bytes]:
        if first is not None:
            yield first
        let_go.wait(60)

    return channel.stream_unary(method).future(requests(), timeout=60), let_go


def _wait(true: object, what: str) -> None:
    deadline = time.monotonic() + 20
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_uploads_that_say_nothing_leave_their_places_to_real_ones() -> None:
    with served(upload_first_s=60.0) as server:
        driver = Driver(address=address_of(server))
        driver.open()
        driver.call(Call.COMPILE)
        held = [_hold(driver.channel, PUT_METHOD, None) for _ in range(3 * MAX_UPLOADS)]
        slots = server.service._uploads
        _wait(lambda: slots.ended[Ended.REPLACED] == 2 * MAX_UPLOADS, "the older ones go")
        for index in range(3):
            driver.put(driver.batch(0, index))
            driver.call(Call.FWD_BWD, 0, index)
        for _, let_go in held:
            let_go.set()
        driver.close()


def test_an_upload_that_falls_silent_is_ended_and_counted() -> None:
    with served(upload_first_s=60.0, upload_silent_s=0.2) as server:
        driver = Driver(address=address_of(server))
        driver.open()
        driver.call(Call.COMPILE)
        batch = driver.batch(0, 0)
        header = tensor_pb2.PutMicroBatchHeader(
            epoch=driver.epoch, incarnation=driver.incarnation, manifest=make_manifest(batch)
        )
        message = tensor_pb2.PutMicroBatchRequest(header=header).SerializeToString()
        call, let_go = _hold(driver.channel, PUT_METHOD, message)
        with pytest.raises(grpc.RpcError) as error:
            call.result(timeout=20)  # type: ignore[attr-defined]
        assert error.value.code() is grpc.StatusCode.CANCELLED
        let_go.set()
        registry = server.metrics.registry
        labels = {"call": "put_micro_batch", "reason": Reason.UPLOAD_SILENT.value}
        _wait(
            lambda: registry.get_sample_value("prestage_worker_refusals_total", labels) == 1,
            "it is counted",
        )
        driver.put(batch)
        driver.call(Call.FWD_BWD, 0, 0)
        driver.close()


def test_a_malformed_first_message_leaves_no_place_taken() -> None:
    with served() as server:
        driver = Driver(address=address_of(server))
        driver.open()
        driver.call(Call.COMPILE)
        bad = driver.channel.stream_unary(PUT_METHOD)
        for _ in range(2 * MAX_UPLOADS):
            with pytest.raises(grpc.RpcError) as error:
                bad(iter([b"\xff\xff\xff"]), timeout=20)
            outcome = classify(error.value)
            assert isinstance(outcome, Refusal) and outcome.reason is Reason.INVALID_REQUEST
        driver.put(driver.batch(0, 0))
        driver.close()


def test_streams_of_reflection_leave_threads_to_health() -> None:
    with served() as server, open_channel(server.health_address) as channel:
        let_go = threading.Event()

        def requests() -> Iterator[reflection_pb2.ServerReflectionRequest]:
            yield reflection_pb2.ServerReflectionRequest(list_services="")
            let_go.wait(60)

        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        held = [stub.ServerReflectionInfo(requests(), timeout=60) for _ in range(2)]
        assert all(next(call).list_services_response.service for call in held)
        more = [stub.ServerReflectionInfo(requests(), timeout=60) for _ in range(20)]
        for call in more:
            with pytest.raises(grpc.RpcError) as error:
                next(call)
            outcome = classify(error.value)
            assert isinstance(outcome, Refusal) and outcome.reason is Reason.TOO_MANY_STREAMS
        check = health_pb2_grpc.HealthStub(channel).Check
        assert check(health_pb2.HealthCheckRequest(), timeout=1).status == 1
        let_go.set()


# -- the store ------------------------------------------------------------------------------------


def _ref(step: int, index: int, digit: str) -> BatchRef:
    return BatchRef(step=step, index=index, digest=digit * 32)


def test_nothing_larger_than_the_store_is_ever_waited_for() -> None:
    store = MicroBatchStore(1000, lambda: (0, 0))
    for place in ((0, 0), (0, 1), (5, 0)):
        with pytest.raises(LimitError, match="takes 1001 bytes; this worker keeps at most 1000"):
            store.reserve(_ref(*place, "a"), size=1001, key=b"", wait_s=60.0)
    assert store.stats().stored_bytes == 0


def test_headers_of_one_id_and_many_contents_do_not_fill_the_memory() -> None:
    store = MicroBatchStore(1000, lambda: (0, 0))
    for number in range(50):
        store.reserve(
            BatchRef(step=0, index=0, digest=f"{number:032x}"), size=600, key=b"", wait_s=5.0
        )
        assert store.stats().stored_bytes <= 2000
