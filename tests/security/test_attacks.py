"""A worker process over mTLS, attacked from outside: each attack is refused and counted, health answers
all the while, and a normal run works in the end."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from orchestrator.bench.synthetic import SyntheticShape, make_batch
from orchestrator.calls import Done, Send
from orchestrator.trainer_client import RunShape, TrainerClient
from prestage.protocol import Call, Reason
from prestage.tensor.v1 import tensor_pb2
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.trainer.v1 import trainer_pb2_grpc as pb_grpc
from prestage.wire.channel import open_channel
from prestage.wire.codec import make_manifest
from prestage.wire.errors import Refusal, Unknown, classify
from prestage.wire.security import Connections, Role, Security, SecurityConfig
from prestage.wire.stream_plane import PUT_METHOD
from tests.security.authority import Authority, put
from tests.security.raw_http2 import Connection
from tests.security.worker_process import HealthWatch, WorkerProcess, worker_process
from tests.support.rig import FIELDS

ROLLOUTS = Path(__file__).parents[1] / "data" / "rollouts.parquet"
STORE_BYTES = 64 << 20
STREAMS = 10_000
HEALTHY_S = 1.0
SHAPE = SyntheticShape()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("attacked")
    with worker_process(folder, f"--store_memory_bytes={STORE_BYTES}") as process:
        yield process


def _state(channel: grpc.Channel, token: str = "") -> Refusal | Unknown | None:
    """None = it was answered."""
    metadata = [("authorization", f"Bearer {token}")] if token else []
    try:
        pb_grpc.TrainerWorkerStub(channel).GetState(
            pb.GetStateRequest(), timeout=10, metadata=metadata
        )
    except grpc.RpcError as error:
        return classify(error)
    return None


def _client(worker: WorkerProcess) -> tuple[grpc.Channel, TrainerClient]:
    channel = worker.security().open_channel("--trainer", worker.address, Role.DRIVE)
    shape = RunShape(rows=SHAPE.rows, tokens_per_row=SHAPE.tokens_per_row, fields=FIELDS)
    return channel, TrainerClient(channel, run_id="run", shape=shape)


def _eventually(true: Callable[[], bool], what: str, patience_s: float = 30.0) -> None:
    give_up = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < give_up, f"never: {what}"
        time.sleep(0.1)


def _attack(worker: WorkerProcess, kind: str, count: int, *more: str) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.security.half_open", worker.address, str(count), kind]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    ends: dict[str, int] = json.loads(done.stdout)
    assert sum(ends.values()) == count
    return ends


@pytest.mark.slow
def test_clients_without_the_right_certificate(worker: WorkerProcess, tmp_path: Path) -> None:
    before = worker.metrics()["prestage_worker_refused_connections_total", ()]
    with HealthWatch(worker) as health:
        with open_channel(worker.address) as channel:  # Plain text.
            assert isinstance(_state(channel, worker.tokens["drive"]), Unknown)
        bare = grpc.ssl_channel_credentials(root_certificates=worker.authority.pem)
        with open_channel(worker.address, bare) as channel:
            assert isinstance(_state(channel, worker.tokens["drive"]), Unknown)
        stranger = Authority().folder(tmp_path / "stranger")
        put(stranger / "ca.crt", worker.authority.pem, 0o644)
        security = Security(SecurityConfig(tls_dir=stranger, token_dir=worker.folder / "tokens"))
        with security.open_channel("--trainer", worker.address, Role.DRIVE) as channel:
            assert isinstance(_state(channel), Unknown)
        _eventually(
            lambda: worker.metrics()["prestage_worker_refused_connections_total", ()] >= before + 3,
            "all three are counted",
            Connections.USE_S + 20,
        )
    assert not health.failures and health.slowest_s < HEALTHY_S


def test_wrong_tokens_and_roles(worker: WorkerProcess, tmp_path: Path) -> None:
    security = Security(SecurityConfig(tls_dir=worker.folder / "tls"))
    before = worker.refusals("get_state", "UNAUTHENTICATED")
    with security.open_channel("--trainer", worker.address, Role.DRIVE) as channel:
        for token in ("", "x" * 64):
            found = _state(channel, token)
            assert isinstance(found, Refusal) and found.reason is Reason.UNAUTHENTICATED
        assert _state(channel, worker.tokens["read"]) is None
        with pytest.raises(grpc.RpcError) as error:
            pb_grpc.TrainerWorkerStub(channel).OpenRun(
                pb.OpenRunRequest(run_id="run"),
                timeout=10,
                metadata=[("authorization", f"Bearer {worker.tokens['read']}")],
            )
        found = classify(error.value)
        assert isinstance(found, Refusal) and found.reason is Reason.PERMISSION_DENIED
    assert worker.refusals("get_state", "UNAUTHENTICATED") == before + 2
    assert worker.refusals("open_run", "PERMISSION_DENIED") == 1
    command = [sys.executable, "-m", "orchestrator.main", f"--trainer={worker.address}"]
    command += [f"--rollouts={ROLLOUTS}", f"--tls_dir={worker.folder}/tls"]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and time.monotonic() - started < 30
    assert "does not let this orchestrator in (UNAUTHENTICATED)" in done.stderr
    assert "--token_dir" in done.stderr


def test_a_stale_epoch(worker: WorkerProcess) -> None:
    first_channel, first = _client(worker)
    second_channel, second = _client(worker)
    before = worker.refusals("compile", "STALE_EPOCH")
    for client in (first, second):
        assert isinstance(client.call(Send(call=Call.OPEN_RUN), data_cursor="").event, Done)
    answer = first.call(Send(call=Call.COMPILE, seq=1), data_cursor="").event
    assert getattr(answer, "reason", None) is Reason.STALE_EPOCH, answer
    assert worker.refusals("compile", "STALE_EPOCH") == before + 1
    first_channel.close()
    second_channel.close()


def test_headers_that_claim_three_gibibytes(worker: WorkerProcess) -> None:
    channel, client = _client(worker)
    opened = client.call(Send(call=Call.OPEN_RUN), data_cursor="").event
    assert isinstance(opened, Done) and opened.view is not None
    refused = worker.refusals("put_micro_batch", "INVALID_REQUEST")
    before_bytes = worker.resident_bytes()
    with HealthWatch(worker) as health:
        manifest = make_manifest(make_batch(SHAPE, "run", opened.view.state.step, 0))
        rows, tokens = 64, (3 << 30) // (64 * 21)  # 21 bytes a token in this shape's fields.
        manifest.rows, manifest.tokens_per_row = rows, tokens
        del manifest.row_lengths[:]
        manifest.row_lengths.extend([tokens] * rows)
        offset = 0
        for tensor in manifest.tensors:
            itemsize = 1 if tensor.dtype == tensor_pb2.DATA_TYPE_UINT8 else 4
            tensor.shape[:] = [rows, tokens]
            tensor.offset, tensor.bytes = offset, rows * tokens * itemsize
            offset += tensor.bytes
        manifest.total_bytes = offset
        assert offset > 2.9 * (1 << 30)
        header = tensor_pb2.PutMicroBatchHeader(
            manifest=manifest, epoch=client.epoch, incarnation=client.incarnation
        )
        messages = [tensor_pb2.PutMicroBatchRequest(header=header)]
        messages.append(
            tensor_pb2.PutMicroBatchRequest(
                chunk=tensor_pb2.PutMicroBatchChunk(offset=0, data=b"x" * 1024)
            )
        )
        for _ in range(5):
            with pytest.raises(grpc.RpcError) as error:
                pb_grpc.TrainerWorkerStub(channel).PutMicroBatch(iter(messages), timeout=20)
            found = classify(error.value)
            assert isinstance(found, Refusal) and found.reason is Reason.INVALID_REQUEST
            assert "--store_memory_bytes" in found.message
        # The same claim one layer below: in gRPC's own length.
        for claimed in (3 << 30, 0xFFFFFFFF):
            raw = Connection(worker.address, worker.folder / "tls")
            raw.call(PUT_METHOD, worker.tokens["drive"])
            raw.message(claimed, b"x" * 8192)
            assert raw.ended() in ("trailers", "reset")
            raw.close()
        # And in metadata.
        with pytest.raises(grpc.RpcError):
            pb_grpc.TrainerWorkerStub(channel).GetState(
                pb.GetStateRequest(), timeout=10, metadata=[("x-large", "y" * (1 << 20))]
            )
    assert worker.refusals("put_micro_batch", "INVALID_REQUEST") >= refused + 5
    assert worker.resident_bytes() - before_bytes < 128 << 20
    assert not health.failures and health.slowest_s < HEALTHY_S
    channel.close()


@pytest.mark.slow
def test_ten_thousand_connections_that_say_nothing(worker: WorkerProcess) -> None:
    before = worker.metrics()["prestage_worker_refused_connections_total", ()]
    with HealthWatch(worker) as health:
        ends = _attack(worker, "sockets", STREAMS)
        _eventually(
            lambda: (
                worker.metrics()["prestage_worker_refused_connections_total", ()] >= before + 500
            ),
            "they are counted",
            Connections.USE_S + 20,
        )
    assert set(ends) <= {"closed", "ConnectionResetError"}, ends
    assert not health.failures and health.slowest_s < HEALTHY_S, health.slowest_s
    assert worker.open_files() < 200


@pytest.mark.slow
@pytest.mark.parametrize("with_token", [False, True])
def test_ten_thousand_half_open_streams(worker: WorkerProcess, with_token: bool) -> None:
    reason = "UPLOAD_SILENT" if with_token else "UNAUTHENTICATED"
    before, before_bytes = worker.refusals("put_micro_batch", reason), worker.resident_bytes()
    more = (worker.tokens["drive"],) if with_token else ()
    with HealthWatch(worker) as health:
        ends = _attack(worker, PUT_METHOD, STREAMS, str(worker.folder / "tls"), *more)
    # Those without a place in a full server are refused by gRPC itself.
    assert set(ends) <= {reason, "CANCELLED", "RESOURCE_EXHAUSTED"}, ends
    assert worker.refusals("put_micro_batch", reason) > before + 100
    assert worker.resident_bytes() - before_bytes < 256 << 20
    assert not health.failures and health.slowest_s < HEALTHY_S, health.slowest_s
    channel, client = _client(worker)
    _eventually(
        lambda: isinstance(client.call(Send(call=Call.OPEN_RUN), data_cursor="").event, Done),
        "the worker has room again",
    )
    channel.close()


def test_a_normal_run_over_mtls_with_tokens(worker: WorkerProcess, tmp_path: Path) -> None:
    """Whatever came before: tests of this file run in any order, on one worker."""
    result = tmp_path / "result.json"
    command = [
        sys.executable,
        "-m",
        "orchestrator.main",
        f"--trainer={worker.address}",
        f"--rollouts={ROLLOUTS}",
        "--run_id=run",
        "--num_steps=2",
        "--pipeline_step_boundary",
        "--stage_next_microbatch",
        "--noprogress",
        f"--tls_dir={worker.folder}/tls",
        f"--token_dir={worker.folder}/tokens",
        f"--result_file={result}",
    ]
    with HealthWatch(worker) as health:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        seen = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        output = process.communicate(timeout=120)[0].decode()
    assert process.returncode == 0, output
    assert len(json.loads(result.read_text())["steps"]) == 2
    assert not health.failures and health.slowest_s < HEALTHY_S
    # Secrets are nowhere to be seen.
    seen += Path(f"/proc/{worker.process.pid}/cmdline").read_bytes()
    key = (worker.folder / "tls" / "tls.key").read_text().splitlines()[1]
    shown = seen.decode() + output + worker.log
    assert not [text for text in (key, *worker.tokens.values()) if text in shown]
    expiry = worker.metrics()["prestage_worker_certificate_expiry_timestamp_seconds", ()]
    assert 9 * 86400 < expiry - time.time() < 11 * 86400
