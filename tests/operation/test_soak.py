"""Memory over many calls and many steps. The whole count: `PRESTAGE_SOAK_CALLS=100000`."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from orchestrator.bench.conformance.driver import Driver, Refused
from prestage.microbatch import MicroBatchId
from prestage.protocol import Call
from prestage.trainer.v1 import trainer_pb2 as pb
from tests.operation.process import worker
from tests.operation.soak_steps import resident_bytes
from tests.support.rig import socket_folder

CALLS = int(os.environ.get("PRESTAGE_SOAK_CALLS", "12000"))
BYTES_PER_CALL = 64
NOISE_BYTES = 256 << 10
"""What an allocator takes or gives back in one piece; of no weight at the whole count."""
STEPS = 10_000


class Mix:
    """Ten calls a round: a put, a whole step, its metrics, a refusal, a cancel, five looks."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.step = 0
        self.calls = 0
        self._batch = driver.batch(0, 0)

    def round(self) -> None:
        driver, step = self.driver, self.step
        batch = dataclasses.replace(
            self._batch, id=MicroBatchId(run_id=driver.run_id, step=step, index=0)
        )
        driver.put(batch)
        driver.call(Call.FWD_BWD_APPLY, step, 0, digest=batch.digest)
        driver.read(Call.GET_METRICS, step)
        with pytest.raises(Refused):
            driver.call(Call.APPLY_DEFERRED_UPDATE)
        driver.stub.GetState.future(pb.GetStateRequest(), timeout=30).cancel()
        for _ in range(5):
            assert driver.state().step == step + 1
        self.step += 1
        self.calls += 10

    def until(self, calls: int) -> None:
        while self.calls < calls:
            self.round()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_r41_r42_a_workers_memory_over_many_calls() -> None:
    flags = ("--timed_fwd_bwd_s=0", "--timed_update_s=0", "--timed_copy_s=0")
    with socket_folder() as folder, worker(folder, *flags) as process:
        driver = Driver(address=f"unix://{folder}/w.sock")
        driver.open()
        driver.call(Call.COMPILE)
        mix = Mix(driver)
        pid = str(process.popen.pid)
        mix.until(CALLS // 2)
        half = resident_bytes(pid)
        mix.until(CALLS)
        grown = resident_bytes(pid) - half
        driver.close()
        second_half = CALLS - CALLS // 2
        per_call = grown / second_half
        print(f"{CALLS} calls: {half} bytes at half, {grown:+d} after: {per_call:.1f} a call")
        assert grown < second_half * BYTES_PER_CALL + (NOISE_BYTES if CALLS < 100_000 else 0)


@pytest.mark.slow
def test_e10_an_orchestrators_memory_over_ten_thousand_steps() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.operation.soak_steps", str(STEPS)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    (_, half), (last, end) = [line.split() for line in done.stdout.splitlines()]
    assert int(last) == STEPS
    grown = int(end) - int(half)
    print(f"{STEPS} steps: {half} bytes at half, {grown:+d} after")
    assert grown < (STEPS // 2) * BYTES_PER_CALL + NOISE_BYTES
