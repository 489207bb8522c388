"""Messages from the network: uploads, shared-memory slots, rollouts, tokens, statuses."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status.rpc_status import GRPC_DETAILS_METADATA_KEY
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.client.rollout import encode
from orchestrator.ingest.decode import MessageError, TrajectoryParts, parse_request
from orchestrator.ingest.limits import IngestLimits
from orchestrator.trajectory import TrajectoryError
from prestage.rollout.refusals import RolloutRefusal, classify_rollout
from prestage.tensor.v1 import tensor_pb2 as pb
from prestage.wire.codec import layout_of, make_manifest
from prestage.wire.errors import CodecError, Refusal, Unknown, WireError, classify
from prestage.wire.limits import MAX_PART_BYTES, WireLimits
from prestage.wire.scan import ScanError, count_fields, nested_fields
from prestage.wire.security import Guard, Role
from prestage.wire.shm_plane import WorkerSlots
from prestage.wire.store import MicroBatchStore
from prestage.wire.stream_plane import (
    Chunk,
    PutReceiver,
    end_part,
    parse_part,
    parse_parts,
    serialize_part,
)
from prestage.wire.token_files import TokenFiles
from prestage.wire.validate import check_values
from tests.fuzz.harness import THOROUGH, guarded, mutated
from tests.ingest.rig import opening, rollout, submission
from tests.security.authority import token_folder
from tests.wire.samples import sample

MANIFEST = make_manifest(sample())
SHARDED = make_manifest(sample(), with_blocks=True)
HEADER = pb.PutMicroBatchRequest(header=pb.PutMicroBatchHeader(manifest=MANIFEST, epoch=1))
SHARD = pb.PutMicroBatchRequest(
    header=pb.PutMicroBatchHeader(
        manifest=SHARDED, epoch=1, shard=pb.Shard(row_count=4, token_count=64)
    )
)
SLOT = pb.PutMicroBatchRequest(
    header=pb.PutMicroBatchHeader(
        manifest=MANIFEST,
        epoch=1,
        shared_memory=pb.SharedMemorySlot(pool="pool-x", slot=1, generation=1, offset=4096),
    )
)
CHUNK = serialize_part(Chunk(0, memoryview(b"x" * 300)))
SECOND = serialize_part(Chunk(300, memoryview(b"y" * 300)))
END = end_part(layout_of(MANIFEST)).SerializeToString()
PARTS = [
    HEADER.SerializeToString(),
    SHARD.SerializeToString(),
    SLOT.SerializeToString(),
    CHUNK,
    SECOND,
    END,
]

one_part = st.one_of(*(mutated(part) for part in PARTS), st.sampled_from(PARTS), st.binary())


@THOROUGH
@given(message=st.binary(max_size=200) | mutated(CHUNK) | mutated(PARTS[0]))
def test_a_part_decodes_as_the_protobuf_library_does_or_is_refused(message: bytes) -> None:
    part = guarded(lambda: parse_part(message), errors=(CodecError,), most_bytes=1 << 20)
    library = pb.PutMicroBatchRequest()
    try:
        library.ParseFromString(message)
    except DecodeError:
        assert part is None or isinstance(part, Chunk)
        return
    if isinstance(part, Chunk):
        assert library.WhichOneof("part") == "chunk"
        assert part.offset % 2**64 == library.chunk.offset
        assert b"".join(part.pieces) == library.chunk.data
    elif part is not None:
        assert part == library


@THOROUGH
@given(messages=st.lists(one_part, max_size=8))
def test_any_upload_is_taken_or_refused(messages: list[bytes]) -> None:
    store = MicroBatchStore(1 << 20, lambda: (0, 0))
    receiver = PutReceiver(
        store, WireLimits(), lambda header: None, lambda batch: check_values(batch), wait_s=0.0
    )
    guarded(
        lambda: receiver.take(parse_parts(iter(messages))), errors=(WireError,), most_bytes=8 << 20
    )
    assert store.stats().stored_bytes <= 2 << 20


def _amplified(count: int) -> bytes:
    """A manifest of so many empty tensors: 2 bytes each here, about 70 in the parser."""
    tag = (pb.Manifest.DESCRIPTOR.fields_by_name["tensors"].number << 3) | 2
    inner = bytes([tag, 0]) * count
    header = pb.PutMicroBatchHeader(manifest=pb.Manifest.FromString(inner))
    return pb.PutMicroBatchRequest(header=header).SerializeToString()


def test_a_message_is_not_parsed_into_many_times_its_size() -> None:
    small = parse_part(_amplified(10))
    assert not isinstance(small, Chunk) and len(small.header.manifest.tensors) == 10
    with pytest.raises(CodecError, match="more than 66560 fields"):
        parse_part(_amplified(100_000))
    with pytest.raises(CodecError, match=f"at most {MAX_PART_BYTES}"):
        parse_part(PARTS[0] + b"\x00" * MAX_PART_BYTES)


@THOROUGH
@given(data=st.binary(max_size=300) | one_part)
def test_counting_fields_ends_and_is_never_less_than_what_is_there(data: bytes) -> None:
    nested = nested_fields(pb.PutMicroBatchRequest)
    count = guarded(
        lambda: count_fields(data, nested, most=1000), errors=(ScanError,), most_bytes=1 << 20
    )
    message = pb.PutMicroBatchRequest()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return
    if count is not None:
        there = len(message.header.manifest.tensors) + len(message.ListFields())
        assert count >= there


# -- shared memory --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slots() -> Iterator[WorkerSlots]:
    with tempfile.TemporaryDirectory(prefix="ps-", dir="/dev/shm") as folder:
        Path(folder).chmod(0o700)
        found = WorkerSlots(Path(folder))
        (Path(folder) / f"pool-{secrets.token_hex(8)}").write_bytes(b"no pool")
        yield found
        found.close()


names = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ("", ".", "..", "/etc/passwd", "../../etc/passwd", "nonce", "pool-", "pool-" + "a" * 300)
    ),
    st.from_regex(r"pool-[0-9a-f]{1,40}", fullmatch=True),
)


@THOROUGH
@given(
    slot=st.builds(
        pb.SharedMemorySlot,
        pool=names,
        slot=st.integers(0, 2**32 - 1),
        generation=st.integers(0, 2**64 - 1),
        offset=st.integers(0, 2**64 - 1),
    ),
    size=st.integers(0, 2**63),
)
def test_any_slot_is_refused(slots: WorkerSlots, slot: pb.SharedMemorySlot, size: int) -> None:
    leased = guarded(lambda: slots.lease(slot, size), errors=(CodecError,), most_bytes=1 << 20)
    assert leased is None
    slots.let_go(slot)


def test_every_real_file_of_the_folder_is_no_pool(slots: WorkerSlots) -> None:
    folder = Path(slots.offer.folder)
    for path in folder.iterdir():
        for name in (path.name, f"../{folder.name}/{path.name}"):
            with pytest.raises(CodecError):
                slots.lease(pb.SharedMemorySlot(pool=name, generation=1), 10)


# -- rollouts -------------------------------------------------------------------------------------

LIMITS = IngestLimits()
OPEN = opening().SerializeToString()
SUBMIT = submission(0).SerializeToString()
MANY = [
    item.SerializeToString() for item in encode(rollout("g", 1, 400), part_bytes=256).requests(0)
]


@THOROUGH
@given(
    messages=st.lists(
        st.binary(max_size=200)
        | mutated(OPEN)
        | mutated(SUBMIT)
        | st.sampled_from(MANY)
        | mutated(MANY[0]),
        max_size=6,
    )
)
def test_any_rollout_is_taken_rejected_or_refused(messages: list[bytes]) -> None:
    parts = TrajectoryParts(LIMITS)

    def take() -> None:
        for message in messages:
            with contextlib.suppress(MessageError):
                request = parse_request(message, LIMITS)
                if request.WhichOneof("part") == "submit":
                    parts.add(request.submit)

    guarded(take, errors=(MessageError, TrajectoryError), most_bytes=16 << 20)


# -- tokens ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenFiles, dict[str, str]]:
    folder = tmp_path_factory.mktemp("tokens")
    made = token_folder(folder)
    return TokenFiles(folder), made


@THOROUGH
@given(
    metadata=st.none()
    | st.lists(
        st.tuples(
            st.sampled_from(("authorization", "Authorization", "x")),
            st.text(max_size=80) | st.binary(max_size=80) | st.just("Bearer "),
        ),
        max_size=4,
    ),
    method=st.text(max_size=60),
)
def test_no_metadata_gets_through_by_chance(
    tokens: tuple[TokenFiles, dict[str, str]],
    metadata: list[tuple[str, str | bytes]] | None,
    method: str,
) -> None:
    files, made = tokens
    guard = Guard(tokens=files)
    refused = guarded(lambda: guard._judge(method, metadata), errors=(), most_bytes=1 << 20)
    assert refused is not None
    drive = "/prestage.trainer.v1.TrainerWorker/FwdBwd"
    with_token = [("authorization", f"Bearer {made['drive']}")]
    assert guard._judge(drive, with_token) is None
    assert files.role_of(made["read"][:-1]) is None
    assert Role.DRIVE in files.roles()


# -- what a client is answered ----------------------------------------------------------------------


class _Ended(grpc.RpcError, grpc.Call):
    """A call that ended with these trailers."""

    def __init__(self, code: grpc.StatusCode, details: bytes) -> None:
        super().__init__()
        self._code = code
        self._details = details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "why"

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return ((GRPC_DETAILS_METADATA_KEY, self._details),)

    def initial_metadata(self) -> tuple[()]:
        return ()

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float:
        return 0.0

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: object) -> bool:
        return False


def _status() -> bytes:
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason="STEP_OPEN", domain="prestage"))
    code = grpc.StatusCode.FAILED_PRECONDITION.value[0]
    status = status_pb2.Status(code=code, message="why", details=[packed])
    return status.SerializeToString()


@THOROUGH
@given(
    details=st.binary(max_size=200) | mutated(_status()) | st.just(_status()),
    code=st.sampled_from(list(grpc.StatusCode)),
)
def test_any_status_is_a_refusal_or_an_unknown_outcome(
    details: bytes, code: grpc.StatusCode
) -> None:
    """A damaged status must never read as "not carried out" without our words in it."""
    found = guarded(lambda: classify(_Ended(code, details)), errors=(), most_bytes=1 << 20)
    assert isinstance(found, Unknown | Refusal)
    if isinstance(found, Refusal):
        assert b"prestage" in details
    assert isinstance(classify_rollout(_Ended(code, details)), Unknown | RolloutRefusal)


def test_a_refusal_whose_words_are_damaged_is_an_unknown_outcome() -> None:
    packed = any_pb2.Any(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\x0a\xff")
    code = grpc.StatusCode.FAILED_PRECONDITION
    status = status_pb2.Status(code=code.value[0], message="why", details=[packed])
    call = _Ended(code, status.SerializeToString())
    assert isinstance(classify(call), Unknown)
