"""Every (phase, call) pair of the step table, over a real gRPC connection."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.bench.conformance.driver import Driver, Refused
from prestage.protocol import SEQUENCED_CALLS, TABLE, Call, Phase, Reason
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.wire.channel import open_channel
from prestage.wire.errors import CODE_OF_REASON
from tests.support.rig import address_of, served, socket_folder
from trainer_worker.clock import RealClock
from trainer_worker.engines.timed import TimedConfig, create_timed

STEP = 1  # Step 0 is trained, saved and pinned before, so that reads and restores find something.


@pytest.fixture(params=list(Phase), ids=lambda phase: phase.value)
def in_phase(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Driver, Phase, str]]:
    phase: Phase = request.param
    config = TimedConfig(
        fwd_bwd_seconds=0.001,
        update_seconds=0.001,
        copy_seconds=0.001,
        fail_call=frozenset({f"fwd_bwd {STEP} 1"} if phase is Phase.FAILED else ()),
    )
    parts = create_timed(config, RealClock(), tmp_path / "checkpoints")
    with socket_folder() as folder, served(parts, folder=folder) as server:
        driver = Driver(address=address_of(server))
        driver.open()
        driver.call(Call.COMPILE)
        for index in range(3):
            driver.put(driver.batch(STEP, index))
        driver.put(driver.batch(STEP + 1, 0))
        driver.put(driver.batch(0, 0))
        driver.call(Call.FWD_BWD_APPLY, 0, 0)
        driver.call(Call.SAVE_CHECKPOINT)
        driver.call(Call.PREPARE_WEIGHT_SYNC)
        if phase is not Phase.CLOSED:
            driver.call(Call.FWD_BWD, STEP, 0)
        if phase is Phase.UPDATE_DEFERRED:
            driver.call(Call.FWD_BWD_DEFER, STEP, 1)
        if phase is Phase.FAILED:
            with pytest.raises(Refused) as failed:
                driver.call(Call.FWD_BWD, STEP, 1)
            assert failed.value.reason is Reason.ENGINE_FAILED
            driver.seq += 1  # A failure is a result: it took its seq.
        assert driver.phase is phase
        yield driver, phase, server.health_address
        driver.close()


def target(phase: Phase, call: Call) -> tuple[int, int]:
    """The micro-batch that the call would have to name."""
    index = {Phase.CLOSED: 0, Phase.ACCUMULATING: 1, Phase.UPDATE_DEFERRED: 2, Phase.FAILED: 1}
    if call is Call.STAGE_FWD_BWD:
        return (STEP + 1, 0) if phase is Phase.UPDATE_DEFERRED else (STEP, 0)
    return STEP, index[phase]


def make(driver: Driver, health: str, phase: Phase, call: Call) -> object:
    step, index = target(phase, call)
    if call is Call.PUT_MICRO_BATCH:
        return driver.put(driver.batch(STEP + 1, 1))
    if call is Call.OPEN_RUN:
        return driver.open()
    if call is Call.HEALTH:
        with open_channel(health) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            response = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert response.status == health_pb2.HealthCheckResponse.SERVING
            return response
    if call in SEQUENCED_CALLS:
        return driver.call(call, step, index)
    if call is Call.GET_METRICS:
        return driver.read(call, 0)
    if call is Call.EXPORT_WEIGHTS:
        request = pb.ExportWeightsRequest(run_id=driver.run_id, epoch=driver.epoch, version=1)
        try:
            return list(driver.stub.ExportWeights(request, timeout=10))
        except grpc.RpcError as error:
            from prestage.wire.errors import Refusal, classify

            outcome = classify(error)
            assert isinstance(outcome, Refusal)
            raise Refused(outcome) from error
    return driver.read(call, STEP, 2)


def frozen(driver: Driver) -> bytes:
    """The state without what may move by itself."""
    state = driver.state()
    state.seconds_since_progress = 0
    state.durable_step = 0
    state.in_flight = 0
    return state.SerializeToString(deterministic=True)


@pytest.mark.parametrize("call", list(Call), ids=lambda call: call.name)
def test_the_worker_answers_as_the_table_says(
    in_phase: tuple[Driver, Phase, str], call: Call
) -> None:
    driver, phase, health = in_phase
    cell = TABLE[call][phase]
    before = frozen(driver)
    if isinstance(cell, Reason):
        with pytest.raises(Refused) as refused:
            make(driver, health, phase, call)
        refusal = refused.value.refusal
        assert refusal.reason is cell
        assert refusal.code is CODE_OF_REASON[cell]
        assert refusal.metadata["phase"] == phase.value
        assert refusal.metadata["step"] == str(STEP)
        assert call.value not in refusal.metadata["allowed"].split(", ")
        assert refusal.message
        assert frozen(driver) == before
        return
    make(driver, health, phase, call)
    if call is not Call.HEALTH:
        assert driver.phase is cell


def test_every_pair_is_tried() -> None:
    assert len(list(itertools.product(Phase, Call))) == 84
