"""Any bytes and any values to any call of a serving worker: its own answer, every time, and it goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.bench.conformance.driver import Driver
from orchestrator.calls import Done, Raised, Refused, Send
from orchestrator.trainer_client import RunShape, TrainerClient
from prestage.protocol import Call
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.wire.errors import Refusal, classify
from tests.ingest.rig import resident_bytes
from tests.support.rig import FIELDS, address_of, served
from trainer_worker.server import WorkerServer

SERVICE = pb.DESCRIPTOR.services_by_name["TrainerWorker"]
UNARY = sorted(method.name for method in SERVICE.methods if method.name not in ("PutMicroBatch",))
CALLS = settings(max_examples=60, deadline=None)

_F = FieldDescriptor
_BOUNDS = {
    _F.TYPE_INT32: (-(2**31), 2**31 - 1),
    _F.TYPE_INT64: (-(2**63), 2**63 - 1),
    _F.TYPE_UINT32: (0, 2**32 - 1),
    _F.TYPE_UINT64: (0, 2**64 - 1),
}


def _values(field: FieldDescriptor) -> st.SearchStrategy[object]:
    if field.type in _BOUNDS:
        low, high = _BOUNDS[field.type]
        return st.sampled_from((low, 0, 1, 2, high)) | st.integers(low, high)
    if field.type == _F.TYPE_BOOL:
        return st.booleans()
    if field.type == _F.TYPE_STRING:
        odd = ("", "run", "a" * 5000, "tokens", "../../x", "\x00")
        return st.sampled_from(odd) | st.text(max_size=20)
    if field.type == _F.TYPE_BYTES:
        return st.binary(max_size=40)
    if field.type == _F.TYPE_ENUM:
        return st.integers(-1, 20)
    if field.type in (_F.TYPE_DOUBLE, _F.TYPE_FLOAT):
        return st.floats(width=32)
    assert field.type == _F.TYPE_MESSAGE, field.full_name
    return messages(field.message_type)


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor) -> Message:
    """Any message of this type; each field is set or left out."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if not draw(st.booleans()):
            continue
        if field.is_repeated:
            found = draw(st.lists(_values(field), max_size=3))
            getattr(message, field.name).extend(found)
        elif field.type == _F.TYPE_MESSAGE:
            getattr(message, field.name).CopyFrom(draw(_values(field)))
        else:
            setattr(message, field.name, draw(_values(field)))
    return message


@pytest.fixture(scope="module")
def worker() -> Iterator[tuple[WorkerServer, Driver]]:
    with served(store_memory_bytes=1 << 20) as server:
        driver = Driver(address=address_of(server))
        yield server, driver
        driver.close()


def _ask(driver: Driver, name: str, request: bytes) -> None:
    """Fails the test for an answer that is not the worker's own."""
    method = f"/{SERVICE.full_name}/{name}"
    try:
        if name == "ExportWeights":
            for _ in driver.channel.unary_stream(method)(request, timeout=20):
                pass
        else:
            driver.channel.unary_unary(method)(request, timeout=20)
    except grpc.RpcError as error:
        outcome = classify(error)
        assert isinstance(outcome, Refusal), f"{name}: {outcome}"
        assert outcome.message


@pytest.mark.parametrize("name", UNARY)
@CALLS
@given(data=st.data())
def test_any_request_has_the_workers_own_answer(
    worker: tuple[WorkerServer, Driver], name: str, data: st.DataObject
) -> None:
    _, driver = worker
    driver.open()
    request = data.draw(messages(SERVICE.methods_by_name[name].input_type))
    if "key" in request.DESCRIPTOR.fields_by_name and data.draw(st.booleans()):
        state = driver.state()
        key = pb.CallKey(
            run_id="run",
            incarnation=state.incarnation,
            epoch=state.epoch,
            seq=state.last_seq + 1,
            payload_digest=data.draw(st.sampled_from(("", "0" * 32))),
        )
        request.key.CopyFrom(key)  # type: ignore[attr-defined]
    _ask(driver, name, request.SerializeToString())


@pytest.mark.parametrize("name", UNARY)
@CALLS
@given(request=st.binary(max_size=60))
def test_any_bytes_have_the_workers_own_answer(
    worker: tuple[WorkerServer, Driver], name: str, request: bytes
) -> None:
    _ask(worker[1], name, request)


def test_a_large_request_is_refused_with_words(worker: tuple[WorkerServer, Driver]) -> None:
    _, driver = worker
    for fields in (["x"] * 5000, ["x" * (2 << 20)]):
        request = pb.CompileRequest(fields=fields).SerializeToString()
        with pytest.raises(grpc.RpcError) as error:
            driver.channel.unary_unary(f"/{SERVICE.full_name}/Compile")(request, timeout=20)
        outcome = classify(error.value)
        assert isinstance(outcome, Refusal) and "not a request of this call" in outcome.message


@pytest.mark.parametrize(
    "shape",
    [
        RunShape(
            rows=2**32 - 1, tokens_per_row=2**32 - 1, fields=FIELDS, receive_buffers=2**32 - 1
        ),
        RunShape(rows=2**31, tokens_per_row=2, fields=FIELDS, receive_buffers=16),
        RunShape(rows=1, tokens_per_row=2**31, fields=FIELDS, receive_buffers=16),
        RunShape(
            rows=2,
            tokens_per_row=64,
            fields=(*FIELDS, "routed_experts"),
            routing_shape=(2**32 - 1, 2**32 - 1),
            receive_buffers=16,
        ),
        RunShape(
            rows=2,
            tokens_per_row=64,
            fields=(*FIELDS, "routed_experts"),
            routing_shape=(1,) * 1000,
            receive_buffers=16,
        ),
        RunShape(rows=0, tokens_per_row=0, fields=("x", "tokens", "tokens")),
    ],
)
def test_a_shape_that_nobody_trains_takes_no_memory(
    worker: tuple[WorkerServer, Driver], shape: RunShape
) -> None:
    """By the real client, so that nothing but the shape is wrong."""
    _, driver = worker
    before_bytes = resident_bytes()
    client = TrainerClient(driver.channel, run_id="run", shape=shape)
    assert isinstance(client.call(Send(call=Call.OPEN_RUN), data_cursor="").event, Done)
    event = client.call(Send(call=Call.COMPILE, seq=1), data_cursor="").event
    assert isinstance(event, Refused | Raised), event
    assert resident_bytes() - before_bytes < 64 << 20


def test_the_worker_still_works(worker: tuple[WorkerServer, Driver]) -> None:
    """In whatever order these tests run."""
    _, driver = worker
    driver.open()
    with contextlib.suppress(Exception):
        driver.call(Call.ABORT_STEP)
    driver.open()
    assert driver.state().run_id == "run"
