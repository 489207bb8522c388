"""Measures both payload planes against memcpy and a plain unary call, and their peak memory.

`python -m orchestrator.bench.plane_bench [--mib 256,1024] [--reps 5] [--json PATH]`. Every way runs
between two fresh processes, from the start of the put until the arrays can be read at the other end
(the answer, after the checks, comes later); memcpy is measured in the same process between
the puts, so quote the ratios. Digest and value checks are on a line of their own: they run before
use, while the device computes something else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import grpc
import numpy as np
import xxhash

from prestage.microbatch import FIELDS, MicroBatch, MicroBatchId
from prestage.protocol import BatchRef
from prestage.tensor.v1 import tensor_pb2 as pb
from prestage.wire.channel import bind, make_server, open_channel, tune_allocator
from prestage.wire.digest import batch_digest, content_digest
from prestage.wire.errors import REASON_OF_ERROR, WireError, abort_with
from prestage.wire.layout import Layout, plan_layout
from prestage.wire.limits import WireLimits
from prestage.wire.planes import PayloadPlane
from prestage.wire.shm_plane import SharedMemoryOffer, SharedMemorySender, WorkerSlots
from prestage.wire.store import MicroBatchStore
from prestage.wire.stream_plane import Part, PutReceiver, StreamSender, put_method_handler
from prestage.wire.validate import check_values

WAYS: Final = ("unary", "stream unix", "stream tcp", "shm copy", "shm in place")
_SERVICE: Final = "prestage.bench.PlaneBench"
_TOKENS: Final = 8192
_UNLIMITED: Final = (  # Of the plain unary call alone, which needs it; nothing of ours does.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)
# What is promised, as ratios of one run.
STREAM_OVER_UNARY: Final = 8.0
STREAM_OF_MEMCPY: Final = 0.08
SHM_OF_MEMCPY: Final = 0.6
HAND_OVER_S: Final = 0.005
STREAM_PEAK: Final = 1.3
SHM_PEAK: Final = 1.05
PEAK_AT_MIB: Final = 1024


@dataclass(frozen=True, kw_only=True)
class WayResult:
    """One way at one size. Seconds are medians over the puts after the first."""

    way: str
    payload_bytes: int
    first_s: float
    median_s: float
    worst_s: float
    memcpy_s: float
    check_s: float
    sender_peak: float  # Peak resident memory above idle, of the payload.
    receiver_peak: float
    sender_cpu_s: float = 0.0  # Of all threads, a put; medians over the puts after the first.
    receiver_cpu_s: float = 0.0  # With the checks.

    @property
    def of_memcpy(self) -> float:
        """Speed as a share of memcpy's."""
        return self.memcpy_s / self.median_s


# -- memory ---------------------------------------------------------------------------------------


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _reset_peak() -> int:
    """Forget the peak; returns what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _peak() -> int:
    return _status_bytes("VmHWM")


# -- the payload ----------------------------------------------------------------------------------


def payload_layout(payload_bytes: int) -> Layout:
    """Full rows of 8,192 tokens with routing of a mixture-of-experts model, about that large."""
    required = [spec.name for spec in FIELDS.values() if spec.required]
    names = [*required, "sampling_logprobs"]
    per_token = 4096
    rows = max(1, payload_bytes // (_TOKENS * per_token))
    token_bytes = sum(FIELDS[name].dtype.itemsize for name in names)
    pairs = (payload_bytes // (rows * _TOKENS) - token_bytes) // 2
    fields: dict[str, Sequence[int]] = {name: () for name in names}
    fields["routed_experts"] = (max(1, pairs // 10), 10)
    return plan_layout(
        rows=rows, tokens_per_row=_TOKENS, row_lengths=[_TOKENS] * rows, fields=fields
    )


def fill(plane: PayloadPlane, layout: Layout) -> MicroBatch:
    """Pack a valid micro-batch into a reserved buffer, without temporaries of its size."""
    arrays = plane.reserve(layout).arrays()
    noise = np.random.default_rng(1).integers(0, 256, 1 << 20, np.int16)
    routing = arrays["routed_experts"].reshape(-1)
    for start in range(0, routing.size, noise.size):
        part = routing[start : start + noise.size]
        part[:] = noise[: part.size]
    arrays["tokens"][:] = np.arange(layout.tokens_per_row)
    arrays["segment_ids"][:] = 1
    arrays["positions"][:] = np.arange(layout.tokens_per_row)
    arrays["loss_mask"][:] = 1
    arrays["loss_mask"][:, 0] = 0
    arrays["advantages"][:] = 0.5
    arrays["sampling_logprobs"][:] = -0.25
    batch = MicroBatch(
        id=MicroBatchId(run_id="bench", step=0, index=0),
        rows=layout.rows,
        tokens_per_row=layout.tokens_per_row,
        row_lengths=layout.row_lengths,
        arrays=arrays,
    )
    return replace(batch, digest=batch_digest(batch))


# -- the receiving process ------------------------------------------------------------------------


class _TimedStore(MicroBatchStore):
    """Notes when the last micro-batch could be read: before its checks."""

    readable_s = 0.0

    def settle(self, ref: BatchRef, batch: MicroBatch, check: Callable[[], None]) -> None:
        self.readable_s = time.monotonic()
        super().settle(ref, batch, check)


class _Receiver:
    """What the receiving process answers."""

    def __init__(self, slots: WorkerSlots) -> None:
        self._slots = slots
        self._idle = 0
        self.store = _TimedStore(16 << 30, lambda: (0, 0))
        self._receiver = PutReceiver(
            self.store,
            WireLimits(),
            lambda header: None,
            lambda batch: check_values(batch, num_experts=256),
            shared_memory=slots,
        )

    def put(self, parts: Iterator[Part], context: grpc.ServicerContext) -> pb.PutMicroBatchResponse:
        try:
            return self._receiver.take(parts, context.is_active)
        except WireError as error:
            abort_with(context, REASON_OF_ERROR[type(error)], str(error))

    def unary(self, request: pb.PutMicroBatchChunk, context: grpc.ServicerContext) -> bytes:
        array = np.frombuffer(request.data, np.uint8)
        return bytes(array[:1])

    def control(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        command = json.loads(request)
        if command == "offer":
            return json.dumps(asdict(self._slots.offer)).encode()
        if command == "idle":
            self._idle = _reset_peak()
        elif command == "release":
            self.store.clear()
        elif command == "readable":
            return json.dumps(self.store.readable_s).encode()
        elif command == "cpu":
            return json.dumps(time.process_time()).encode()
        elif command == "peak":
            return json.dumps(_peak() - self._idle).encode()
        return b"null"


def serve(folder: Path) -> None:
    """Serve on a unix socket and a TCP port until stdin closes; prints the port."""
    tune_allocator()
    slots = WorkerSlots(folder / "shm")
    receiver = _Receiver(slots)
    server = make_server(4, name="bench")
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Control": grpc.unary_unary_rpc_method_handler(receiver.control),
    }
    server.add_generic_rpc_handlers(
        (
            put_method_handler(receiver.put),
            grpc.method_handlers_generic_handler(_SERVICE, handlers),
        )
    )
    bind(server, "--listen", f"unix://{folder}/plane.sock")
    port = bind(server, "--listen", "127.0.0.1:0")
    plain = grpc.server(
        futures.ThreadPoolExecutor(1), options=(("grpc.so_reuseport", 0), *_UNLIMITED)
    )
    unary: grpc.RpcMethodHandler[pb.PutMicroBatchChunk, bytes] = (
        grpc.unary_unary_rpc_method_handler(
            receiver.unary, request_deserializer=pb.PutMicroBatchChunk.FromString
        )
    )
    plain.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_SERVICE, {"Unary": unary}),)
    )
    bind(plain, "--listen", f"unix://{folder}/unary.sock")
    server.start()
    plain.start()
    print(port, flush=True)
    sys.stdin.read()
    server.stop(0).wait()
    plain.stop(0).wait()
    slots.close()


# -- the sending process --------------------------------------------------------------------------


def send(way: str, folder: Path, port: int, payload_bytes: int, reps: int) -> WayResult:
    """Measure one way from this process."""
    tune_allocator()
    unix = open_channel(f"unix://{folder}/plane.sock")
    control: grpc.UnaryUnaryMultiCallable[bytes, bytes] = unix.unary_unary(f"/{_SERVICE}/Control")

    def ask(command: str) -> object:
        return json.loads(control(json.dumps(command).encode()))

    layout = payload_layout(payload_bytes)
    size = layout.total_bytes
    ask("idle")
    idle = _reset_peak()
    channel = open_channel(f"127.0.0.1:{port}") if way == "stream tcp" else unix
    plane: PayloadPlane = StreamSender(channel)
    if way.startswith("shm"):
        answer = json.loads(control(json.dumps("offer").encode()))
        offer = SharedMemoryOffer(folder=str(answer["folder"]), nonce=str(answer["nonce"]))
        plane = SharedMemorySender(
            unix,
            lambda: offer,
            pool_bytes=layout.buffer_bytes + (1 << 20),
            fallback=StreamSender(unix),
        )
    batch = fill(StreamSender(unix) if way == "shm copy" else plane, layout)
    if way == "shm copy":
        idle = _reset_peak()  # The packer's own array is not the plane's.
    put = _unary(folder, batch)
    if way != "unary":
        # Both processes read the same monotonic clock.
        put = _put(plane, batch, lambda: float(str(ask("readable"))))

    first_s, _ = put()
    sender_peak = (_peak() - idle) / size
    receiver_peak = float(str(ask("peak"))) / size
    memcpy = _memcpy(size)
    memcpy()
    copies: list[float] = []
    puts: list[float] = []
    checks: list[float] = []
    sent: list[float] = []
    received: list[float] = []
    for _ in range(reps):
        ask("release")
        copies.append(memcpy())
        here_s, there_s = time.process_time(), float(str(ask("cpu")))
        put_s, check_s = put()
        sent.append(time.process_time() - here_s)
        received.append(float(str(ask("cpu"))) - there_s)
        puts.append(put_s)
        checks.append(check_s)
    if isinstance(plane, SharedMemorySender):
        expected = "copied_in" if way == "shm copy" else "handed_over"
        if asdict(plane.counters)[expected] != reps + 1:
            raise RuntimeError(f"{way}: {plane.counters}")
    return WayResult(
        way=way,
        payload_bytes=size,
        first_s=first_s,
        median_s=statistics.median(puts),
        worst_s=max(puts),
        memcpy_s=statistics.median(copies),
        check_s=statistics.median(checks),
        sender_peak=sender_peak,
        receiver_peak=receiver_peak,
        sender_cpu_s=statistics.median(sent),
        receiver_cpu_s=statistics.median(received),
    )


Put = Callable[[], tuple[float, float]]


def _put(plane: PayloadPlane, batch: MicroBatch, readable_s: Callable[[], float]) -> Put:
    def put() -> tuple[float, float]:
        started_s = time.monotonic()
        response = plane.put(batch, epoch=1, incarnation="bench", timeout_s=300.0)
        if response.duplicate or not response.stored:
            raise RuntimeError(f"the put was not carried out: {response}")
        return readable_s() - started_s, response.check_seconds

    return put


def _unary(folder: Path, batch: MicroBatch) -> Put:
    """The plain way: one protobuf message with everything in a bytes field."""
    channel = grpc.insecure_channel(f"unix://{folder}/unary.sock", options=_UNLIMITED)
    call: grpc.UnaryUnaryMultiCallable[pb.PutMicroBatchChunk, bytes] = channel.unary_unary(
        f"/{_SERVICE}/Unary", request_serializer=pb.PutMicroBatchChunk.SerializeToString
    )

    def put() -> tuple[float, float]:
        started_s = time.perf_counter()
        data = b"".join(batch.arrays[name].tobytes() for name in sorted(batch.arrays))
        call(pb.PutMicroBatchChunk(data=data), timeout=300.0)
        return time.perf_counter() - started_s, 0.0

    return put


def _memcpy(size: int) -> Callable[[], float]:
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    def copy() -> float:
        started_s = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - started_s

    return copy


def empty_calls(folder: Path, port: int, calls: int) -> dict[str, float]:
    """Latency of a call that carries nothing, in seconds: {"unix p50": ..., ...}."""
    found: dict[str, float] = {}
    for name, address in (("unix", f"unix://{folder}/plane.sock"), ("tcp", f"127.0.0.1:{port}")):
        channel = open_channel(address)
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            f"/{_SERVICE}/Control"
        )
        taken: list[float] = []
        for _ in range(calls):
            started_s = time.perf_counter()
            call(b'""')
            taken.append(time.perf_counter() - started_s)
        channel.close()
        cuts = statistics.quantiles(taken, n=100)
        found[f"{name} p50"], found[f"{name} p99"] = cuts[49], cuts[98]
    return found


# -- the whole bench ------------------------------------------------------------------------------


def measure(way: str, payload_bytes: int, reps: int) -> WayResult:
    """One way between two fresh processes."""
    answer = _between_processes("--send", way, "--bytes", str(payload_bytes), "--reps", str(reps))
    result: dict[str, float | int | str] = json.loads(answer)
    return WayResult(**result)  # type: ignore[arg-type]


def _between_processes(*arguments: str) -> str:
    """Run the sending process against a receiving one; returns the last line it prints."""
    module = [sys.executable, "-m", "orchestrator.bench.plane_bench"]
    with (
        tempfile.TemporaryDirectory(prefix="ps-", dir=_shm()) as name,
        subprocess.Popen(
            [*module, "--serve", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server,
    ):
        assert server.stdout is not None
        assert server.stdin is not None
        try:
            port = server.stdout.readline().strip()
            if not port:
                raise RuntimeError("the receiving process did not start")
            done = subprocess.run(
                [*module, *arguments, "--folder", name, "--port", port],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                timeout=600,
            )
        finally:
            server.stdin.close()
        return done.stdout.splitlines()[-1]


def _shm() -> str | None:
    """Where shared memory is memory: the folder of the sockets and the pools."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def digest_speeds() -> dict[str, float]:
    """GB/s of the hashes in this environment, on blocks of 1 MiB and of 32 KiB."""
    data = np.random.default_rng(0).integers(0, 256, 64 << 20, np.uint8).data
    hashes: dict[str, Callable[[memoryview], object]] = {
        "xxh3_128": xxhash.xxh3_128_digest,
        "blake2b": lambda block: hashlib.blake2b(block).digest(),
        "sha256": lambda block: hashlib.sha256(block).digest(),
        "crc32 (zlib)": zlib.crc32,
    }
    speeds: dict[str, float] = {}
    for name, function in hashes.items():
        for block in (1 << 20, 32 << 10):
            started_s = time.perf_counter()
            for start in range(0, len(data), block):
                function(data[start : start + block])
            elapsed_s = time.perf_counter() - started_s
            speeds[f"{name}, {block >> 10} KiB blocks"] = len(data) / elapsed_s / 1e9
    layout = payload_layout(64 << 20)
    buffer = np.ones(layout.buffer_bytes, np.uint8)
    started_s = time.perf_counter()
    content_digest(
        layout.arrays(buffer),
        rows=layout.rows,
        tokens_per_row=layout.tokens_per_row,
        row_lengths=layout.row_lengths,
    )
    speeds["content digest of a micro-batch"] = (
        layout.total_bytes / (time.perf_counter() - started_s) / 1e9
    )
    return speeds


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One promise and what was measured."""

    what: str
    measured: float
    bound: float
    at_least: bool

    @property
    def met(self) -> bool:
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound


def verdicts(results: Sequence[WayResult]) -> list[Verdict]:
    """Every promise, per size."""
    found: list[Verdict] = []
    for size in sorted({result.payload_bytes for result in results}):
        by = {result.way: result for result in results if result.payload_bytes == size}
        mib = f"{size / (1 << 20):.0f} MiB"
        for way in ("stream unix", "stream tcp"):
            if way in by and "unary" in by:
                ratio = by["unary"].median_s / by[way].median_s
                found.append(
                    _at_least(f"{way}, {mib}: times a unary call", ratio, STREAM_OVER_UNARY)
                )
            if way in by:
                found.append(
                    _at_least(f"{way}, {mib}: of memcpy", by[way].of_memcpy, STREAM_OF_MEMCPY)
                )
        if "shm copy" in by:
            found.append(
                _at_least(f"shm copy, {mib}: of memcpy", by["shm copy"].of_memcpy, SHM_OF_MEMCPY)
            )
        if "shm in place" in by:
            hand_over_s = by["shm in place"].median_s
            found.append(_at_most(f"shm in place, {mib}: hand-over s", hand_over_s, HAND_OVER_S))
        if size >= 0.95 * (PEAK_AT_MIB << 20):
            for way, result in by.items():
                bound = SHM_PEAK if way.startswith("shm") else STREAM_PEAK
                if way != "unary":
                    peak = max(result.sender_peak, result.receiver_peak)
                    found.append(_at_most(f"{way}, {mib}: peak memory of payload", peak, bound))
    return found


def _at_least(what: str, measured: float, bound: float) -> Verdict:
    return Verdict(what=what, measured=measured, bound=bound, at_least=True)


def _at_most(what: str, measured: float, bound: float) -> Verdict:
    return Verdict(what=what, measured=measured, bound=bound, at_least=False)


def report(
    results: Sequence[WayResult], speeds: dict[str, float], latencies: dict[str, float]
) -> str:
    """The tables."""
    lines = [
        f"{'way':14} {'MiB':>6} {'first s':>8} {'median s':>9} {'worst s':>8} {'GB/s':>8}"
        f" {'memcpy':>7} {'of it':>7} {'checks s':>9} {'peak sender':>12} {'receiver':>9}"
        f" {'CPU s/GB sender':>16} {'receiver':>9}"
    ]
    for r in results:
        lines.append(
            f"{r.way:14} {r.payload_bytes / (1 << 20):6.0f} {r.first_s:8.4f} {r.median_s:9.4f}"
            f" {r.worst_s:8.4f} {r.payload_bytes / r.median_s / 1e9:8.2f}"
            f" {r.payload_bytes / r.memcpy_s / 1e9:7.2f} {r.of_memcpy:7.3f} {r.check_s:9.4f}"
            f" {r.sender_peak:12.3f} {r.receiver_peak:9.3f}"
            f" {r.sender_cpu_s / r.payload_bytes * 1e9:16.3f}"
            f" {r.receiver_cpu_s / r.payload_bytes * 1e9:9.3f}"
        )
    lines.append("")
    lines += [f"{name:36} {speed:6.2f} GB/s" for name, speed in speeds.items()]
    lines.append("")
    lines += [f"empty call, {name:24} {value * 1e3:6.2f} ms" for name, value in latencies.items()]
    lines.append("")
    for verdict in verdicts(results):
        sign = ">=" if verdict.at_least else "<="
        lines.append(
            f"{'met   ' if verdict.met else 'MISSED'} {verdict.what:46}"
            f" {verdict.measured:9.4f} {sign} {verdict.bound:g}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, and JSON to `--json` when given. 1 when a promise was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", default="256,1024", help="payload sizes, MiB, comma-separated")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--serve", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--send", default="", help=argparse.SUPPRESS)
    parser.add_argument("--latency", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve is not None:
        serve(options.serve)
        return 0
    if options.latency:
        print(json.dumps(empty_calls(options.folder, options.port, options.latency)))
        return 0
    if options.send:
        result = send(options.send, options.folder, options.port, options.bytes, options.reps)
        print(json.dumps(asdict(result)))
        return 0
    ways = str(options.ways).split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"--ways: {unknown[0]!r} is none of {', '.join(WAYS)}")
    results = [
        # The plain call takes seconds: its median needs no more than a few.
        measure(way, int(mib) << 20, min(2, options.reps) if way == "unary" else options.reps)
        for mib in str(options.mib).split(",")
        for way in ways
    ]
    speeds = digest_speeds()
    latencies: dict[str, float] = json.loads(_between_processes("--latency", "2000"))
    print(report(results, speeds, latencies))
    judged = verdicts(results)
    if options.json is not None:
        value = {
            "cpus": os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "results": [{**asdict(r), "of_memcpy": r.of_memcpy} for r in results],
            "digest_gigabytes_per_second": speeds,
            "empty_call_seconds": latencies,
            "verdicts": [{**asdict(v), "met": v.met} for v in judged],
        }
        options.json.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    return 0 if all(verdict.met for verdict in judged) else 1


if __name__ == "__main__":
    raise SystemExit(main())
