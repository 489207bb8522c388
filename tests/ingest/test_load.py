"""Three producers at full speed against a trainer that is slower than they are.

6,000 trajectories, of which some are doubled, some cannot be trained and some are malformed. The
journal's budget is a third of what comes in, so producers wait for checkpoints most of the time.
"""

from __future__ import annotations

import re
import socket
import threading
import urllib.request
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.client import Receipt, Rollout, RolloutProducer, given, sampled
from tests.ingest.processes import LiveProcess, digest_from_file
from tests.ingest.rig import resident_bytes
from tests.support.rig import address_of, served, socket_folder
from trainer_worker.clock import RealClock
from trainer_worker.engines.timed import TimedConfig, create_timed

pytestmark = pytest.mark.slow

PRODUCERS = 3
PER_PRODUCER = 2000
GROUP_SIZE = 8
BAD_EVERY = 25  # Of so many groups, one has a reward that is not a number.
GROUPS_PER_BATCH = 15
GROUPS = PRODUCERS * PER_PRODUCER // GROUP_SIZE
BAD_GROUPS = PRODUCERS * (PER_PRODUCER // GROUP_SIZE // BAD_EVERY)
STEPS = (GROUPS - BAD_GROUPS) // GROUPS_PER_BATCH
TOKENS = (600, 1400)  # Of a completion; 8 bytes each in the journal.
BUDGET_BYTES = 16 << 20
PENDING_BYTES = 4 << 20
# What the process may grow by once rollouts come in: those on their way (their bytes exist as a
# message, as arrays and as what is written), micro-batches, and the allocator's slack.
ALLOWED_GROWTH_BYTES = 96 << 20


def members(producer: int) -> list[Rollout]:
    rng = np.random.default_rng(producer)
    made = []
    for number in range(PER_PRODUCER):
        group, index = divmod(number, GROUP_SIZE)
        count = int(rng.integers(*TOKENS))
        reward = float(rng.integers(0, 100)) / 100
        if group % BAD_EVERY == BAD_EVERY - 1 and index == 3:
            reward = float("nan")
        made.append(
            Rollout(
                group_id=f"p{producer}-{group}",
                index=index,
                segments=(
                    given(rng.integers(0, 30_000, 60)),
                    sampled(rng.integers(0, 30_000, count), -rng.random(count)),
                ),
                reward=reward,
                dispatched_version=0,
            )
        )
    return made


@dataclass(kw_only=True)
class Sent:
    """What one producer sent and was answered."""

    rollouts: list[Rollout]
    receipts: list[Future[Receipt]] = field(default_factory=list)
    error: BaseException | None = None


def produce(address: str, number: int, sent: Sent) -> None:
    try:
        with RolloutProducer(address, producer=f"p{number}", run_id="run") as producer:
            for place, rollout in enumerate(sent.rollouts):
                sent.receipts.append(producer.submit(rollout))
                if place % 100 == 50:  # As after a sampler's own retry.
                    sent.receipts.append(producer.submit(rollout))
                if place % 500 == 250:
                    other = replace(rollout, reward=rollout.reward + 1)
                    sent.receipts.append(producer.submit(other))
            producer.flush()
    except BaseException as error:
        sent.error = error


def write_parquet(groups: list[str], everything: dict[tuple[str, int], Rollout], to: Path) -> None:
    rows = [everything[group, index] for group in groups for index in range(GROUP_SIZE)]
    pq.write_table(
        pa.table(
            {
                "group_id": [row.group_id for row in rows],
                "index_in_group": pa.array([row.index for row in rows], pa.int32()),
                "prompt_tokens": pa.array(
                    [row.segments[0].tokens for row in rows], pa.list_(pa.int32())
                ),
                "completion_tokens": pa.array(
                    [row.segments[1].tokens for row in rows], pa.list_(pa.int32())
                ),
                "logprobs": pa.array(
                    [row.segments[1].logprobs for row in rows], pa.list_(pa.float32())
                ),
                "reward": pa.array([row.reward for row in rows], pa.float32()),
                "policy_version": pa.array([0] * len(rows), pa.int32()),
            }
        ),
        to,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def metrics_of(port: int) -> dict[str, float]:
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    return {
        name: float(value)
        for name, value in re.findall(r"^(prestage_\S+) (\S+)$", page, re.MULTILINE)
    }


@dataclass(kw_only=True)
class Watched:
    """Read from outside while the run goes on."""

    resident: list[int] = field(default_factory=list)
    held: list[float] = field(default_factory=list)  # prestage_journal_bytes
    queued: list[float] = field(default_factory=list)  # prestage_queue_bytes
    last: dict[str, float] = field(default_factory=dict)


def watch(run: LiveProcess, port: int, seen: Watched, over: threading.Event) -> None:
    while not over.wait(0.1):
        try:
            found = metrics_of(port)
            size = resident_bytes(run.process.pid) if run.process is not None else 0
        except (OSError, IndexError):
            continue
        if "prestage_queue_bytes" in found:
            seen.resident.append(size)
            seen.held.append(found["prestage_journal_bytes"])
            seen.queued.append(found["prestage_queue_bytes"])
            seen.last = found


def closed_groups(address: str, into: list[str]) -> None:
    """Every group in the order in which it was closed, as samplers are told."""
    with RolloutProducer(address, producer="observer", run_id="run") as observer:
        for update in observer.watch():
            into.extend(update.cancel_groups)


def test_producers_at_full_speed_wait_for_a_slow_trainer_and_lose_nothing() -> None:
    slow = TimedConfig(fwd_bwd_seconds=0.03, update_seconds=0.005, copy_seconds=0.002)
    port = free_port()
    shape = ("--rows=4", "--tokens_per_row=8192", f"--num_steps={STEPS}")
    sent = [Sent(rollouts=members(number)) for number in range(PRODUCERS)]
    with (
        socket_folder() as folder,
        served(create_timed(slow, RealClock(), folder / "checkpoints")) as server,
    ):
        run = LiveProcess(
            folder=folder,
            worker=address_of(server),
            flags=(
                *shape,
                f"--groups_per_batch={GROUPS_PER_BATCH}",
                f"--journal_budget_bytes={BUDGET_BYTES}",
                f"--journal_pending_bytes={PENDING_BYTES}",
                "--checkpoint_every=2",
                "--shared_memory_bytes=0",
                f"--metrics_port={port}",
            ),
        )
        run.start()
        order: list[str] = []
        seen, over = Watched(), threading.Event()
        threads = [
            threading.Thread(target=produce, args=(run.address, number, sent[number]), daemon=True)
            for number in range(PRODUCERS)
        ]
        threads.append(
            threading.Thread(target=closed_groups, args=(run.address, order), daemon=True)
        )
        watcher = threading.Thread(target=watch, args=(run, port, seen, over), daemon=True)
        for thread in [*threads, watcher]:
            thread.start()
        try:
            result = run.finish(timeout_s=150)
            for thread in threads:
                thread.join(timeout=30)
                assert not thread.is_alive()
        finally:
            over.set()
            watcher.join(timeout=10)
            run.stop()
        print(
            f"resident {min(seen.resident) >> 20} to {max(seen.resident) >> 20} MiB, journal up to"
            f" {max(seen.held) / 2**20:.1f} MiB, queue up to {max(seen.queued) / 2**20:.1f} MiB,"
            f" producers held back {seen.last['prestage_producer_wait_seconds_total']:.1f} s"
        )
        check_receipts(sent)
        check_everything_is_accounted_for(sent, result, seen, order)
        same_from_a_file(folder, sent, order, result, shape)
    assert max(seen.resident) - seen.resident[0] < ALLOWED_GROWTH_BYTES
    assert max(seen.queued) <= PENDING_BYTES
    assert seen.last["prestage_producer_wait_seconds_total"] > 1, "nobody had to wait"


def check_receipts(sent: list[Sent]) -> None:
    """Every submission has exactly one answer, and it is the right one."""
    for producer in sent:
        assert producer.error is None, producer.error
        receipts = [future.result(timeout=0) for future in producer.receipts]
        assert [receipt.offset for receipt in receipts] == list(range(len(receipts)))
        assert sum(receipt.duplicate for receipt in receipts) == PER_PRODUCER // 100
        reasons = Counter(receipt.reason for receipt in receipts if not receipt.accepted)
        bad = PER_PRODUCER // GROUP_SIZE // BAD_EVERY
        # The one that is not a number ends its group; the four after it come too late.
        assert reasons == {
            "conflict": PER_PRODUCER // 500,
            "nonfinite_reward": bad,
            "group_already_dropped": 4 * bad,
        }


def check_everything_is_accounted_for(
    sent: list[Sent], result: dict[str, object], seen: Watched, order: list[str]
) -> None:
    """Tokens in = trained + dropped by a reason, by the metrics and by the steps."""
    steps = result["steps"]
    assert isinstance(steps, list) and len(steps) == STEPS
    assert sum(step["summary"]["trajectories"] for step in steps) == (
        (GROUPS - BAD_GROUPS) * GROUP_SIZE
    )
    everything = [rollout for producer in sent for rollout in producer.rollouts]
    lengths = {
        (rollout.group_id, rollout.index): sum(s.tokens.size for s in rollout.segments)
        for rollout in everything
    }
    assert len(order) == len(set(order)) == GROUPS
    last = seen.last
    dropped = sum(
        value for name, value in last.items() if name.startswith("prestage_dropped_tokens_total")
    )
    assert last["prestage_accepted_tokens_total"] == sum(lengths.values())
    assert dropped == sum(
        tokens
        for (group, _), tokens in lengths.items()
        if int(group.rpartition("-")[2]) % BAD_EVERY == BAD_EVERY - 1
    )
    in_steps = sum(step["summary"]["real_tokens"] for step in steps)
    assert in_steps == sum(lengths.values()) - dropped


def same_from_a_file(
    folder: Path,
    sent: list[Sent],
    order: list[str],
    result: dict[str, object],
    shape: tuple[str, ...],
) -> None:
    """The timed engine's digest says that each group was trained once, in the durable order."""
    everything = {
        (rollout.group_id, rollout.index): rollout
        for producer in sent
        for rollout in producer.rollouts
    }
    good = [g for g in order if int(g.rpartition("-")[2]) % BAD_EVERY != BAD_EVERY - 1]
    write_parquet(good, everything, folder / "ordered.parquet")
    with served(create_timed(TimedConfig(fwd_bwd_seconds=0.0), RealClock())) as server:
        digest = digest_from_file(
            folder / "ordered.parquet",
            folder,
            address_of(server),
            STEPS,
            *shape,
            f"--groups_per_batch={GROUPS_PER_BATCH}",
        )
    assert result["parameter_digest"] == digest
