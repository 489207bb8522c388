"""The jax engine as 2 processes x 4 CPU devices, driven over gRPC by the real orchestrator.

1. Staged and unstaged, restored and never stopped, in one group and in a fresh one: the same bits.
2. One process x 8 devices comes to the same within 1e-5 (all-reduces add in another order).
3. A process that is killed in the middle of a run ends it with an error, in stated time.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from orchestrator.bench.conformance.driver import Driver
from orchestrator.bench.synthetic import SyntheticShape, make_batch
from orchestrator.plan import RunPlan
from orchestrator.runner import RunFailed
from prestage.protocol import Call
from prestage.trainer.v1 import trainer_pb2 as pb
from tests.hosts.processes import Group, group_of
from tests.support.rig import run_against, socket_folder
from trainer_worker.hosts.link import DEAD_S
from trainer_worker.hosts.run import LINGER_S, LOST_EXIT_CODE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 3
SAVED = 2  # The step whose checkpoint is compared and restored.
SHAPE = SyntheticShape(
    rows=4,
    tokens_per_row=32,
    real_length=30,
    segments_per_row=2,
    micro_batches=2,
    vocab_size=49_152,
)
FLAGS = (
    "--engine=jax",
    "--preset=tiny",
    "--mesh_fsdp=4",
    "--mesh_context=2",
    "--learning_rate=1e-3",
    "--checkpoint_keep=5",
)
UNSTAGED = RunPlan(num_steps=STEPS, latch_after=1000)
STAGED = RunPlan(num_steps=STEPS, pipeline=True, stage=True, latch_after=1000)
RELATIVE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Came:
    """What a run came to."""

    digest: str
    metrics: tuple[Mapping[str, float], ...]
    staged: int  # Boundaries that were.


@contextlib.contextmanager
def jax_hosts(count: int, checkpoints: Path) -> Iterator[Group]:
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(8 // count)}
    flags = (*FLAGS, f"--checkpoint_dir={checkpoints}")
    with (
        socket_folder() as folder,
        group_of(folder, count, flags, environment=environment, wait_s=120.0) as group,
    ):
        yield group


def run(group: Group, plan: RunPlan) -> Came:
    result = run_against(group.address, plan, shape=SHAPE)
    records = result.book.records()
    return Came(
        digest=result.digest,
        metrics=tuple(record.metrics for record in records),
        staged=sum(record.staged_input_used for record in records),
    )


def driver(group: Group) -> Driver:
    made = Driver(address=group.address, shape=SHAPE, timeout_s=120.0)
    made.open()
    return made


def save_first(group: Group) -> None:
    """A checkpoint of the initial weights, to begin again from."""
    with contextlib.closing(driver(group)) as first:
        first.call(Call.COMPILE)
        first.call(Call.SAVE_CHECKPOINT)
        limit_s = time.monotonic() + 30
        while first.state().durable_step < 0:
            assert time.monotonic() < limit_s
            time.sleep(0.05)


def begin_again(group: Group) -> int:
    """Restore the newest checkpoint; returns its step."""
    with contextlib.closing(driver(group)) as again:
        again.call(Call.RESTORE_CHECKPOINT)
        return again.state().step


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What is read of the initial weights, and of an open step that is then dropped."""

    logprobs: npt.NDArray[np.float32]
    values: Mapping[str, float]
    weights: Mapping[str, str]  # Name to digest.


def look(group: Group) -> Looked:
    """At step 0: score, export, and abort a step; leaves everything as it was."""
    with contextlib.closing(driver(group)) as seen:
        seen.call(Call.COMPILE)
        seen.put(seen.batch(0, 0))
        seen.call(Call.FWD_BWD, 0, 0)
        scored = seen.read(Call.COMPUTE_LOGPROBS)
        evaluated = seen.read(Call.EVALUATE)
        assert isinstance(scored, pb.ComputeLogprobsResponse)
        assert isinstance(evaluated, pb.EvaluateResponse)
        seen.call(Call.ABORT_STEP)
        seen.call(Call.PREPARE_WEIGHT_SYNC)
        parts = seen.read(Call.EXPORT_WEIGHTS)
        assert isinstance(parts, list)
        manifest = parts[0].manifest
        seen.call(Call.RELEASE_WEIGHT_SYNC)
    logprobs = np.frombuffer(scored.logprobs, np.float32)
    return Looked(
        logprobs=logprobs.reshape(scored.rows, scored.tokens_per_row),
        values=dict(evaluated.values),
        weights={tensor.name: tensor.digest for tensor in manifest.tensors},
    )


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What two processes came to, in every way that was tried."""

    runs: Mapping[str, Came]
    looked: Looked
    checkpoint: Mapping[str, npt.NDArray[np.float32]]
    received_bytes: int
    parts: int
    exits: tuple[int, ...]
    logs: str


def checkpoint_of(folder: Path, step: int) -> Mapping[str, npt.NDArray[np.float32]]:
    return load_file(folder / f"step-{step}" / "state.safetensors")


Alone = tuple[Came, Looked, Mapping[str, npt.NDArray[np.float32]]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    runs: dict[str, Came] = {}
    with jax_hosts(2, folder) as group:
        save_first(group)
        runs["unstaged"] = run(group, UNSTAGED)
        assert begin_again(group) == 0
        looked = look(group)
        half = RunPlan(
            num_steps=SAVED, pipeline=True, stage=True, latch_after=1000, checkpoint_every=SAVED
        )
        runs["half"] = run(group, half)
        runs["never stopped"] = run(group, STAGED)
        assert begin_again(group) == SAVED
        runs["restored"] = run(group, STAGED)
        for who in (1, 0):
            group.signal(who, signal.SIGTERM)
        exits = tuple(group.ended(who, 40.0) for who in (0, 1))
        said = re.search(r"received (\d+) bytes in (\d+) parts", group.log(1))
        assert said is not None, group.logs()
        return Pair(
            runs=runs,
            looked=looked,
            checkpoint=checkpoint_of(folder, SAVED),
            received_bytes=int(said[1]),
            parts=int(said[2]),
            exits=exits,
            logs=group.logs(),
        )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """One process x 8 devices."""
    folder = tmp_path_factory.mktemp("alone")
    plan = RunPlan(
        num_steps=STEPS, pipeline=True, stage=True, latch_after=1000, checkpoint_every=SAVED
    )
    with jax_hosts(1, folder) as group:
        looked = look(group)
        return run(group, plan), looked, checkpoint_of(folder, SAVED)


def test_staged_unstaged_restored_and_never_stopped_are_the_same_bits(pair: Pair) -> None:
    digests = {name: pair.runs[name].digest for name in ("unstaged", "never stopped", "restored")}
    assert len(set(digests.values())) == 1, digests
    assert pair.runs["unstaged"].staged == 0
    assert pair.runs["half"].staged == SAVED - 1
    assert pair.runs["half"].digest != pair.runs["restored"].digest
    once = [*pair.runs["half"].metrics, *pair.runs["restored"].metrics[-1:]]
    assert list(map(dict, pair.runs["unstaged"].metrics)) == list(map(dict, once))
    assert pair.runs["unstaged"].metrics[0]["grad_norm"] > 0


def test_d8_the_follower_received_its_rows_only(pair: Pair) -> None:
    whole = sum(
        len(array[row, :length].tobytes())
        for batch in [make_batch(SHAPE, "run", 0, 0)]
        for array in batch.arrays.values()
        for row, length in enumerate(batch.row_lengths)
    )
    # Four runs of 3, 2, 1 and 1 steps, and a part that is fetched again once it was scored. With each
    # part comes a manifest with block digests.
    assert 0 <= pair.parts - 2 * (STEPS + SAVED + 2 * (STEPS - SAVED)) <= 3
    header = pair.received_bytes / pair.parts - whole / 2
    assert 0 < header < 2000


def test_they_end_in_order_on_sigterm(pair: Pair) -> None:
    assert pair.exits == (0, 0), pair.logs
    assert "CRITICAL" not in pair.logs


def test_one_process_with_as_many_devices_comes_to_the_same(pair: Pair, alone: Alone) -> None:
    came, _, checkpoint = alone
    for here, there in zip(pair.runs["unstaged"].metrics, came.metrics, strict=True):
        for name in ("loss", "grad_norm", "entropy", "update_norm", "denominator"):
            assert here[name] == pytest.approx(there[name], rel=RELATIVE, abs=1e-7), name
    assert sorted(pair.checkpoint) == sorted(checkpoint)
    worst = 0.0
    for name, there_leaf in checkpoint.items():
        here_leaf = pair.checkpoint[name].astype(np.float64)
        scale = max(float(np.linalg.norm(there_leaf)), 1e-12)
        worst = max(worst, float(np.linalg.norm(here_leaf - there_leaf)) / scale)
    print(f"largest relative difference of a leaf: {worst:.2e}; bits equal: {worst == 0}")
    assert worst <= RELATIVE


def test_what_is_read_is_what_one_process_reads(pair: Pair, alone: Alone) -> None:
    """And the runs that follow are those that nothing was read in, so nothing was disturbed."""
    _, looked, _ = alone
    assert np.abs(looked.logprobs).max() > 1
    np.testing.assert_allclose(pair.looked.logprobs, looked.logprobs, rtol=RELATIVE, atol=1e-6)
    assert pair.looked.values == pytest.approx(looked.values, rel=RELATIVE)
    assert pair.looked.weights == looked.weights


def test_a_fresh_group_comes_to_the_same_bits_and_a_killed_host_ends_the_run(
    pair: Pair, tmp_path: Path
) -> None:
    with jax_hosts(2, tmp_path) as group:
        again = run(group, STAGED)
        assert again.digest == pair.runs["unstaged"].digest
        assert again.staged == STEPS - 1
        said: list[str] = []

        def train_on() -> None:
            try:
                run(group, RunPlan(num_steps=10_000, pipeline=True, stage=True, latch_after=10**6))
            except (RunFailed, grpc.RpcError) as error:
                said.append(str(error))

        thread = threading.Thread(target=train_on, daemon=True)
        thread.start()
        limit_s = time.monotonic() + 60
        while group.state().step < STEPS + 1:
            assert time.monotonic() < limit_s
            time.sleep(0.02)
        killed_s = time.monotonic()
        group.signal(1, signal.SIGKILL)
        thread.join(timeout=DEAD_S)
        heard_s = time.monotonic() - killed_s
        assert said and "host 1 is gone" in said[0], (said, group.logs())
        state = group.state()
        assert state.phase == pb.PHASE_FAILED and "host 1 is gone" in state.failure
        assert group.ended(0, DEAD_S + LINGER_S) == LOST_EXIT_CODE
        print(f"the caller heard of it after {heard_s:.2f} s")
        assert heard_s < DEAD_S
