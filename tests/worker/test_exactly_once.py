"""Each sequenced call is carried out once, whatever the transport does. Real gRPC, timed engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from orchestrator.bench.conformance.driver import SHAPE, Driver, Refused
from orchestrator.bench.synthetic import make_batch
from prestage.microbatch import MicroBatch
from prestage.protocol import Call, Phase, Reason
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.wire.channel import AddressError
from prestage.wire.digest import batch_digest
from tests.support.rig import FAST, address_of, served, socket_folder
from trainer_worker.clock import RealClock
from trainer_worker.engine import EngineParts
from trainer_worker.engines.timed import TimedConfig, TimedEngine, create_timed
from trainer_worker.epoch_file import EpochFile, StateFolderError
from trainer_worker.server import InsecureAddress, ServerConfig, WorkerServer


class GatedEngine(TimedEngine):
    """A timed engine whose fwd_bwd waits for a gate."""

    def __init__(self) -> None:
        super().__init__(FAST, RealClock())
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.fwd_bwds = 0

    def fwd_bwd(self, prepared):  # type: ignore[no-untyped-def]
        self.fwd_bwds += 1
        self.entered.set()
        assert self.gate.wait(30)
        return super().fwd_bwd(prepared)


def ready(driver: Driver, *, steps: int = 1) -> Driver:
    driver.open()
    driver.call(Call.COMPILE)
    for step in range(steps):
        for index in range(2):
            driver.put(driver.batch(step, index))
    return driver


@pytest.fixture
def gated() -> Iterator[tuple[GatedEngine, WorkerServer, Driver]]:
    engine = GatedEngine()
    with served(EngineParts(training=engine)) as server:
        driver = ready(Driver(address=address_of(server)))
        yield engine, server, driver
        engine.gate.set()
        driver.close()


@pytest.fixture
def driver() -> Iterator[Driver]:
    with served() as server:
        made = ready(Driver(address=address_of(server)), steps=3)
        yield made
        made.close()


def test_d1_r1_the_same_key_returns_the_first_result_and_applies_once(driver: Driver) -> None:
    driver.call(Call.FWD_BWD, 0, 0)
    first = driver.call(Call.FWD_BWD_APPLY, 0, 1)
    before = driver.digest()
    again = driver.call(Call.FWD_BWD_APPLY, 0, 1, seq=driver.seq)
    assert again == first
    assert driver.digest() == before
    assert driver.state().train_step == 1


def test_d1_the_same_key_with_another_payload_is_refused(driver: Driver) -> None:
    driver.call(Call.FWD_BWD, 0, 0)
    with pytest.raises(Refused) as refused:
        driver.call(Call.ABORT_STEP, seq=driver.seq)
    assert refused.value.reason is Reason.KEY_REUSED
    assert refused.value.refusal.code is grpc.StatusCode.ALREADY_EXISTS
    assert driver.phase is Phase.ACCUMULATING


def test_a_gap_is_refused_and_consumes_nothing(driver: Driver) -> None:
    with pytest.raises(Refused) as refused:
        driver.call(Call.FWD_BWD, 0, 0, seq=driver.seq + 2)
    assert refused.value.reason is Reason.SEQUENCE_GAP
    assert refused.value.refusal.code is grpc.StatusCode.OUT_OF_RANGE
    driver.call(Call.FWD_BWD, 0, 0)


def test_a_refusal_consumes_no_seq(driver: Driver) -> None:
    for _ in range(3):
        with pytest.raises(Refused):
            driver.call(Call.UPDATE)
    driver.call(Call.FWD_BWD, 0, 0)
    assert driver.state().last_seq == driver.seq


def test_abort_consumes_a_seq_and_keeps_the_version(driver: Driver) -> None:
    driver.call(Call.FWD_BWD_APPLY, 0, 0)
    driver.put(driver.batch(1, 0))
    driver.call(Call.FWD_BWD, 1, 0)
    before = driver.state().last_seq
    driver.call(Call.ABORT_STEP)
    state = driver.state()
    assert (state.last_seq, state.train_step, state.micro_step) == (before + 1, 1, 0)


def test_r4_a_deadline_does_not_stop_the_call_and_the_resend_joins_it(
    gated: tuple[GatedEngine, WorkerServer, Driver],
) -> None:
    engine, _, driver = gated
    engine.gate.clear()
    driver.timeout_s = 0.3
    with pytest.raises(grpc.RpcError) as lost:
        driver.call(Call.FWD_BWD, 0, 0)
    assert not isinstance(lost.value, Refused)
    assert engine.entered.wait(10)
    driver.timeout_s = 30
    joined: list[object] = []
    thread = threading.Thread(
        target=lambda: joined.append(driver.call(Call.FWD_BWD, 0, 0, seq=driver.seq + 1))
    )
    thread.start()
    engine.gate.set()
    thread.join(timeout=30)
    assert isinstance(joined[0], pb.FwdBwdResponse)
    assert engine.fwd_bwds == 1
    assert driver.state().micro_step == 1


def test_r20_open_run_fences_off_the_older_epoch_and_its_queued_calls(
    gated: tuple[GatedEngine, WorkerServer, Driver],
) -> None:
    engine, server, old = gated
    engine.gate.clear()
    outcomes: dict[str, object] = {}

    def run(name: str, make: object) -> threading.Thread:
        def target() -> None:
            try:
                outcomes[name] = make()  # type: ignore[operator]
            except Refused as refused:
                outcomes[name] = refused.reason

        thread = threading.Thread(target=target)
        thread.start()
        return thread

    seq = old.seq
    running = run("running", lambda: old.call(Call.FWD_BWD, 0, 0, seq=seq + 1))
    assert engine.entered.wait(10)
    queued = run("queued", lambda: old.call(Call.FWD_BWD, 0, 1, seq=seq + 2))
    device = server.service._device
    while device.waiting < 1:
        threading.Event().wait(0.005)
    new = Driver(address=old.address)
    opening = run("opening", new.open)
    while device.waiting < 2:
        threading.Event().wait(0.005)
    engine.gate.set()
    for thread in (running, queued, opening):
        thread.join(timeout=30)
    assert isinstance(outcomes["running"], pb.FwdBwdResponse)
    assert outcomes["queued"] is Reason.STALE_EPOCH
    opened = outcomes["opening"]
    assert isinstance(opened, pb.WorkerState)
    assert (opened.epoch, opened.micro_step, opened.last_seq) == (2, 1, 0)
    with pytest.raises(Refused) as refused:
        old.call(Call.FWD_BWD, 0, 1)
    assert refused.value.reason is Reason.STALE_EPOCH
    new.call(Call.FWD_BWD_APPLY, 0, 1)
    new.close()


def test_health_and_state_answer_while_a_call_blocks(
    gated: tuple[GatedEngine, WorkerServer, Driver],
) -> None:
    """Case R27: device work does not hold up who asks."""
    engine, server, driver = gated
    engine.gate.clear()
    thread = threading.Thread(target=lambda: driver.call(Call.FWD_BWD, 0, 0))
    thread.start()
    assert engine.entered.wait(10)
    state = driver.state()
    assert state.running_call == "fwd_bwd"
    engine.gate.set()
    thread.join(timeout=30)
    del server


def test_an_older_incarnation_is_refused(driver: Driver) -> None:
    driver.incarnation = "0123456789abcdef"
    with pytest.raises(Refused) as refused:
        driver.call(Call.FWD_BWD, 0, 0)
    assert refused.value.reason is Reason.STALE_INCARNATION


def test_a_damaged_call_is_refused(driver: Driver) -> None:
    batch = driver.batch(0, 0)
    key = pb.CallKey(
        run_id="run",
        incarnation=driver.incarnation,
        epoch=driver.epoch,
        seq=driver.seq + 1,
        payload_digest="00" * 16,
    )
    ref = pb.BatchRef(step=0, index=0, digest=batch.digest)
    with pytest.raises(grpc.RpcError) as failed:
        driver.stub.FwdBwd(pb.FwdBwdRequest(key=key, batch=ref), timeout=10)
    assert failed.value.code() is grpc.StatusCode.DATA_LOSS


def test_a_micro_batch_that_was_not_put_is_refused_by_name(driver: Driver) -> None:
    with pytest.raises(Refused) as refused:
        driver.call(Call.FWD_BWD, 0, 0, digest="ab" * 16)
    assert refused.value.reason is Reason.MICRO_BATCH_MISSING
    assert driver.phase is Phase.CLOSED


def tampered(batch: MicroBatch, **arrays: object) -> MicroBatch:
    made = MicroBatch(
        id=batch.id,
        rows=batch.rows,
        tokens_per_row=batch.tokens_per_row,
        row_lengths=batch.row_lengths,
        arrays={**batch.arrays, **arrays},  # type: ignore[dict-item]
    )
    return MicroBatch(**{**made.__dict__, "digest": batch_digest(made)})


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("tokens", np.int32(100), "outside|ids are 0 to 99"),
        ("tokens", np.int32(-1), "ids are 0 to 99"),
        ("sampling_logprobs", np.float32("nan"), "sampling_logprobs is not finite"),
        ("advantages", np.float32("inf"), "advantages is not finite"),
    ],
)
def test_bad_tensors_are_refused_before_the_engine(field: str, value: object, says: str) -> None:
    config = TimedConfig(fwd_bwd_seconds=0.001, vocab_size=100)
    with served(create_timed(config, RealClock())) as server:
        driver = Driver(address=address_of(server))
        driver.open()
        batch = make_batch(SHAPE, "run", 0, 0)
        array = batch.arrays[field].copy()
        array[0, 3] = value
        with pytest.raises(Refused, match=says) as refused:
            driver.put(tampered(batch, **{field: array}))
        assert refused.value.reason is Reason.INVALID_BATCH
        assert refused.value.refusal.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "row 0, position 3" in str(refused.value)
        assert driver.phase is Phase.CLOSED
        assert not driver.state().stored
        driver.close()


def test_bytes_that_do_not_give_their_digest_are_refused() -> None:
    with served() as server:
        driver = Driver(address=address_of(server))
        driver.open()
        driver.call(Call.COMPILE)
        batch = driver.batch(0, 0)
        array = batch.arrays["advantages"].copy()
        array[0, 3] += 1
        lying = MicroBatch(**{**batch.__dict__, "arrays": {**batch.arrays, "advantages": array}})
        for attempt in (lambda: driver.put(lying), lambda: driver.call(Call.FWD_BWD, 0, 0)):
            with pytest.raises(Refused) as refused:
                attempt()
            assert refused.value.reason is Reason.DIGEST_MISMATCH
        driver.put(batch)
        driver.call(Call.FWD_BWD, 0, 0)
        driver.close()


def test_a_late_device_failure_names_its_micro_batch_and_poisons_the_step() -> None:
    config = TimedConfig(fwd_bwd_seconds=0.001, copy_seconds=0.0, fail_device=frozenset({(0, 0)}))
    with served(create_timed(config, RealClock())) as server:
        driver = ready(Driver(address=address_of(server)))
        driver.call(Call.FWD_BWD, 0, 0)
        server.service._worker.watcher.settle()
        with pytest.raises(Refused, match=r"micro-batch \(0, 0\) failed on the device") as refused:
            driver.call(Call.FWD_BWD_APPLY, 0, 1)
        assert refused.value.reason is Reason.STEP_FAILED
        assert driver.phase is Phase.FAILED
        assert "micro-batch (0, 0)" in driver.state().failure
        driver.call(Call.ABORT_STEP)
        assert (driver.phase, driver.state().train_step) == (Phase.CLOSED, 0)
        driver.close()


def test_d19_a_failed_micro_batch_poisons_its_step() -> None:
    config = TimedConfig(fwd_bwd_seconds=0.001, fail_call=frozenset({"fwd_bwd 0 1"}))
    with served(create_timed(config, RealClock())) as server:
        driver = ready(Driver(address=address_of(server)))
        driver.call(Call.FWD_BWD, 0, 0)
        with pytest.raises(Refused) as failed:
            driver.call(Call.FWD_BWD, 0, 1)
        assert failed.value.reason is Reason.ENGINE_FAILED
        assert failed.value.refusal.code is grpc.StatusCode.ABORTED
        # The same key again gets the same failure; the step cannot be applied in part.
        with pytest.raises(Refused) as again:
            driver.call(Call.FWD_BWD, 0, 1)
        assert again.value.reason is Reason.ENGINE_FAILED
        driver.seq += 1
        for call in (Call.UPDATE, Call.APPLY_DEFERRED_UPDATE, Call.FWD_BWD_APPLY):
            with pytest.raises(Refused) as refused:
                driver.call(call, 0, 1)
            assert refused.value.reason is Reason.STEP_FAILED
        assert driver.state().train_step == 0
        driver.close()


def test_r14_d17_a_failed_update_moves_no_version_and_makes_the_parameters_suspect() -> None:
    config = TimedConfig(fwd_bwd_seconds=0.001, fail_call=frozenset({"update 0"}))
    with served(create_timed(config, RealClock())) as server:
        driver = ready(Driver(address=address_of(server)))
        driver.call(Call.FWD_BWD, 0, 0)
        with pytest.raises(Refused):
            driver.call(Call.FWD_BWD_APPLY, 0, 1)
        driver.seq += 1
        state = driver.state()
        assert (state.train_step, state.parameters_suspect) == (0, True)
        with pytest.raises(Refused) as refused:
            driver.call(Call.ABORT_STEP)
        assert refused.value.reason is Reason.PARAMETERS_SUSPECT
        driver.close()


def test_c11_a_step_without_a_trained_token_is_skipped_and_moves_no_version() -> None:
    with served() as server:
        driver = Driver(address=address_of(server))
        driver.open()
        driver.call(Call.COMPILE)
        batch = driver.batch(0, 0)
        empty = tampered(batch, loss_mask=np.zeros_like(batch.arrays["loss_mask"]))
        driver.put(empty)
        before = driver.digest()
        response = driver.call(Call.FWD_BWD_APPLY, 0, 0, digest=empty.digest)
        assert isinstance(response, pb.FwdBwdResponse)
        assert not response.update.applied
        state = driver.state()
        assert (state.step, state.train_step) == (1, 0)
        assert driver.digest() == before
        metrics = driver.read(Call.GET_METRICS, 0)
        assert isinstance(metrics, pb.GetMetricsResponse)
        assert not metrics.steps[0].applied
        driver.close()


def test_r11_metrics_are_read_by_cursor_and_stay() -> None:
    with served() as server:
        driver = ready(Driver(address=address_of(server)), steps=3)
        for step in range(3):
            driver.call(Call.FWD_BWD_APPLY, step, 0)
        reads = [driver.read(Call.GET_METRICS, 1) for _ in range(2)]
        assert reads[0].steps[0].step == reads[1].steps[0].step == 1  # type: ignore[attr-defined]
        assert reads[0].next_step == 2  # type: ignore[attr-defined]
        with pytest.raises(Refused) as refused:
            driver.read(Call.GET_METRICS, 3)
        assert refused.value.reason is Reason.METRICS_NOT_KEPT
        driver.close()


def test_a_stage_over_the_memory_limit_is_refused_before_the_copy() -> None:
    with served(staging_memory_bytes=10) as server:
        driver = ready(Driver(address=address_of(server)))
        with pytest.raises(Refused, match="--staging_memory_bytes") as refused:
            driver.call(Call.STAGE_FWD_BWD, 0, 0)
        assert refused.value.reason is Reason.STAGING_MEMORY
        driver.call(Call.FWD_BWD, 0, 0)
        driver.close()


def test_an_engine_that_fuses_its_update_cannot_defer() -> None:
    config = TimedConfig(fwd_bwd_seconds=0.001, fuses_update=True)
    with served(create_timed(config, RealClock())) as server:
        driver = ready(Driver(address=address_of(server)))
        with pytest.raises(Refused, match="UPDATE_FUSED"):
            driver.call(Call.FWD_BWD_DEFER, 0, 0)
        driver.close()


def test_r46_a_second_worker_on_the_same_address_is_refused() -> None:
    with socket_folder() as folder, served(folder=folder) as server:
        config = ServerConfig(listen=address_of(server))
        with pytest.raises(AddressError, match="another process already listens"):
            WorkerServer(config, create_timed(FAST, RealClock()))


def test_a_stale_socket_is_taken_over_and_is_private() -> None:
    with socket_folder() as folder:
        import socket

        stale = socket.socket(socket.AF_UNIX)
        stale.bind(f"{folder}/w.sock")
        stale.close()
        with served(folder=folder):
            assert (folder / "w.sock").stat().st_mode & 0o777 == 0o600
            assert (folder / "w.sock.health").stat().st_mode & 0o777 == 0o600


def test_an_address_that_others_can_reach_needs_a_word() -> None:
    with pytest.raises(InsecureAddress, match="--insecure"):
        WorkerServer(ServerConfig(listen="0.0.0.0:0"), create_timed(FAST, RealClock()))


def test_the_epoch_is_durable_and_only_grows(tmp_path: Path) -> None:
    first = EpochFile(tmp_path / "state")
    assert (first.advance(), first.advance()) == (1, 2)
    second = EpochFile(tmp_path / "state")
    assert second.advance() == 3
    (tmp_path / "state" / "epoch").write_text("soon")
    with pytest.raises(StateFolderError, match="not a number"):
        EpochFile(tmp_path / "state")
