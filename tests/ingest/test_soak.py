"""A long-lived service does not grow: not with trajectories, nor with streams that come and go."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from orchestrator.ingest.ports import OffsetGap, Receipt
from orchestrator.ingest.server import IngestServer
from orchestrator.trajectory import Trajectory
from tests.ingest.rig import RUN, resident_bytes

CALLS = 100_000
STREAMS = 4_000
BYTES_PER_CALL = 64
BYTES_PER_STREAM = 1024

# Its own process, so that the producer's memory is not the service's.
PRODUCER = """
import sys
from orchestrator.client import Rollout, RolloutProducer, given, sampled
address, calls, streams = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rollout = Rollout(group_id="g", index=0, segments=(given([1]), sampled([2, 3], [-1.0, -1.0])),
                  reward=0.5, dispatched_version=0)
with RolloutProducer(address, producer="steady", run_id="run-1") as producer:
    for _ in range(calls):
        producer.submit(rollout)
for number in range(streams):
    with RolloutProducer(address, producer=f"new-{number}", run_id="run-1") as producer:
        producer.submit(rollout)
"""


class NullLog:
    """Remembers how far each producer is, and of those the last one only."""

    def __init__(self) -> None:
        self.calls = 0
        self._lock = threading.Lock()
        self._producer = ""
        self._next = 0

    def open_producer(self, producer: str) -> int:
        with self._lock:
            if producer != self._producer:
                self._producer, self._next = producer, 0
            return self._next

    def producers(self) -> frozenset[str]:
        return frozenset()

    def append(
        self,
        producer: str,
        offset: int,
        trajectory: Trajectory,
        *,
        cancelled: Callable[[], bool],
    ) -> Future[Receipt]:
        del trajectory, cancelled
        with self._lock:
            if (producer, offset) != (self._producer, self._next):
                raise OffsetGap(f"{producer} {offset}")
            self._next += 1
            self.calls += 1
        done: Future[Receipt] = Future()
        done.set_result(Receipt(offset=offset, accepted=True))
        return done

    def reject(self, producer: str, offset: int, reason: str, message: str) -> Future[Receipt]:
        raise NotImplementedError

    def cancellable_groups(self, after: int) -> tuple[int, tuple[str, ...]]:
        return after, ()


@pytest.mark.slow
def test_e10_r42_memory_does_not_grow_with_calls_or_streams() -> None:
    log = NullLog()
    with tempfile.TemporaryDirectory(prefix="ps-") as folder:
        address = f"unix://{folder}/i.sock"
        server = IngestServer(log, run_id=RUN, listen=address)
        server.start()
        command = [sys.executable, "-c", PRODUCER, address, str(CALLS), str(STREAMS)]
        sizes: dict[int, int] = {}
        marks = (CALLS // 2, CALLS, CALLS + STREAMS // 2, CALLS + STREAMS)
        with subprocess.Popen(command) as producer:
            for mark in marks:
                while log.calls < mark and producer.poll() is None:
                    threading.Event().wait(0.02)
                sizes[mark] = resident_bytes()
            assert producer.wait(timeout=60) == 0
        server.stop(finished=True)
    assert log.calls == CALLS + STREAMS
    middle, end, streams_middle, streams_end = (sizes[mark] for mark in marks)
    print(
        f"{(end - middle) / (CALLS // 2):.1f} bytes a call,"
        f" {(streams_end - streams_middle) / (STREAMS // 2):.1f} bytes a stream"
    )
    assert end - middle < BYTES_PER_CALL * CALLS // 2
    assert streams_end - streams_middle < BYTES_PER_STREAM * STREAMS // 2
