"""A served ingest in this process, and producers on the raw wire."""

from __future__ import annotations

import contextlib
import queue
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc

from orchestrator.client.rollout import Rollout, encode, given, sampled
from orchestrator.ingest.limits import IngestLimits
from orchestrator.ingest.server import IngestServer
from prestage.rollout.refusals import RolloutRefusal, classify_rollout
from prestage.rollout.v1 import rollout_pb2 as pb
from prestage.rollout.v1.rollout_pb2_grpc import RolloutIngestStub
from prestage.wire.channel import open_channel
from prestage.wire.errors import Unknown
from tests.ingest.fake_log import FakeLog

RUN = "run-1"


@dataclass(kw_only=True)
class Served:
    log: FakeLog
    server: IngestServer
    address: str


@contextlib.contextmanager
def served(log: FakeLog | None = None, limits: IngestLimits | None = None) -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="ps-") as folder:
        log = log or FakeLog()
        address = f"unix://{folder}/i.sock"
        server = IngestServer(log, run_id=RUN, listen=address, limits=limits)
        server.start()
        try:
            yield Served(log=log, server=server, address=address)
        finally:
            log.release()
            server.stop(finished=False, grace_s=0.5)


def resident_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def rollout(group: str = "g", index: int = 0, tokens: int = 3, version: int = 0) -> Rollout:
    return Rollout(
        group_id=group,
        index=index,
        segments=(given([1, 2]), sampled(list(range(10, 10 + tokens)), [-1.0] * tokens)),
        reward=float(index % 2),
        dispatched_version=version,
    )


def opening(producer: str = "p", run_id: str = RUN) -> pb.SubmitTrajectoriesRequest:
    return pb.SubmitTrajectoriesRequest(open=pb.OpenProducer(producer=producer, run_id=run_id))


def submission(offset: int, what: Rollout | None = None) -> pb.SubmitTrajectoriesRequest:
    (request,) = encode(what or rollout(index=offset)).requests(offset)
    return request


class RawProducer:
    """One stream, message by message."""

    def __init__(self, address: str) -> None:
        self.channel: grpc.Channel = open_channel(address)
        self._queue: queue.Queue[pb.SubmitTrajectoriesRequest | None] = queue.Queue()
        self.call = RolloutIngestStub(self.channel).SubmitTrajectories(  # type: ignore[call-overload]
            iter(self._queue.get, None), timeout=60
        )

    def send(self, *requests: pb.SubmitTrajectoriesRequest) -> None:
        for request in requests:
            self._queue.put(request)

    def half_close(self) -> None:
        self._queue.put(None)

    def opened(self) -> pb.ProducerOpened:
        answer = next(self.call)
        assert answer.WhichOneof("part") == "opened", answer
        return answer.opened

    def ack(self) -> pb.Ack:
        answer = next(self.call)
        assert answer.WhichOneof("part") == "ack", answer
        return answer.ack

    def refusal(self) -> RolloutRefusal | Unknown:
        """How the stream ended; answers before that are passed over."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError as error:
            return classify_rollout(error)
        raise AssertionError("the stream ended well")

    def drop(self, where: Served) -> None:
        """Lose the connection, and wait until the service has noticed."""
        before = where.server.counts().producers
        self.call.cancel()
        deadline = time.monotonic() + 10
        while where.server.counts().producers >= before:
            assert time.monotonic() < deadline, "the service did not notice"

    def close(self) -> None:
        self.half_close()
        self.call.cancel()
        self.channel.close()


@contextlib.contextmanager
def raw(where: Served, producer: str | None = "p", run_id: str = RUN) -> Iterator[RawProducer]:
    made = RawProducer(where.address)
    try:
        if producer is not None:
            made.send(opening(producer, run_id))
        yield made
    finally:
        made.close()
