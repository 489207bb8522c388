"""Streams that connect and say nothing do not take the service down."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from orchestrator.client import RolloutProducer
from orchestrator.ingest.limits import IngestLimits
from tests.ingest.rig import RUN, raw, resident_bytes, rollout, served

STREAMS = 10_000


@pytest.mark.slow
def test_ten_thousand_half_open_streams_are_ended_and_counted_while_a_producer_works() -> None:
    limits = replace(IngestLimits(), open_s=2.0)
    with served(limits=limits) as where:
        before_bytes = resident_bytes()
        attack = subprocess.Popen(
            [sys.executable, "-m", "tests.ingest.half_open", where.address, str(STREAMS)],
            stdout=subprocess.PIPE,
            text=True,
        )
        accepted = late_ones = 0
        most_threads = 0
        with RolloutProducer(where.address, producer="healthy", run_id=RUN) as producer:
            while attack.poll() is None or accepted < 20:
                assert producer.submit(rollout(f"g{accepted}")).result(timeout=30).accepted
                accepted += 1
                most_threads = max(most_threads, threading.active_count())
                if accepted % 100 == 0:  # One that comes in the middle of it gets in, too.
                    name = f"late-{accepted}"
                    with RolloutProducer(where.address, producer=name, run_id=RUN) as late:
                        assert late.submit(rollout(name)).result(timeout=30).accepted
                    late_ones += 1
        ends = json.loads(attack.communicate()[0])
        counts = where.server.counts()
        grown_bytes = resident_bytes() - before_bytes
    assert sum(ends.values()) == STREAMS
    # Some are told why. Those without a thread, and those that gRPC has no place to keep, are
    # refused by gRPC itself.
    by_grpc = {"RESOURCE_EXHAUSTED: Concurrent RPC limit exceeded!", "CANCELLED: CANCELLED"}
    assert set(ends) <= {"OPEN_LATE", *by_grpc}, ends
    assert counts.refusals["OPEN_LATE"] >= ends["OPEN_LATE"] > 0
    assert len(where.log.taken) == accepted + late_ones
    assert late_ones
    assert most_threads < 500
    assert grown_bytes < 200 << 20, grown_bytes


def test_a_newer_stream_ends_the_oldest_that_has_said_nothing() -> None:
    limits = replace(IngestLimits(), max_unopened=2, open_s=60.0)
    with served(limits=limits) as where, contextlib.ExitStack() as stack:
        for number in range(1, 6):
            stack.enter_context(raw(where, None))
            deadline = time.monotonic() + 10
            while where.server.counts().refusals["OPEN_LATE"] < number - 2:
                assert time.monotonic() < deadline, "the oldest was not ended"
        with raw(where, "healthy") as healthy:
            assert healthy.opened().next_offset == 0
