"""Another run's checkpoint is refused before it is loaded: the worker goes on as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.bench.conformance.driver import Driver, Refused
from orchestrator.plan import RunPlan
from orchestrator.runner import RunFailed
from prestage.protocol import Call, Reason
from tests.engines.jax_engine.small import fresh
from tests.support.rig import FAST, address_of, run_against, served
from trainer_worker.clock import RealClock
from trainer_worker.engine import RunPosition
from trainer_worker.engines.jax_engine.checkpoints import JaxCheckpoints
from trainer_worker.engines.timed import create_timed


def save_another_run(folder: Path) -> None:
    plan = RunPlan(num_steps=2, checkpoint_every=1)
    with served(create_timed(FAST, RealClock(), folder)) as server:
        run_against(address_of(server), plan, run_id="other")


def test_a_restore_of_another_runs_checkpoint_is_refused_and_changes_nothing(
    tmp_path: Path,
) -> None:
    save_another_run(tmp_path)
    with served(create_timed(FAST, RealClock(), tmp_path)) as server:
        driver = Driver(address=address_of(server))
        driver.open()
        driver.call(Call.COMPILE)
        driver.put(driver.batch(0, 0))
        driver.call(Call.FWD_BWD, 0, 0)
        seq = driver.seq
        with pytest.raises(Refused) as refused:
            driver.call(Call.RESTORE_CHECKPOINT)
        assert refused.value.reason is Reason.WRONG_RUN
        assert "is of run 'other', not 'run'" in refused.value.refusal.message
        assert "--checkpoint_dir" in refused.value.refusal.message
        state = server.service.state()
        assert (state.step, state.micro_step, state.train_step) == (0, 1, 0)
        assert state.last_seq == seq
        driver.seq = seq
        driver.put(driver.batch(0, 1))
        driver.call(Call.FWD_BWD_APPLY, 0, 1)  # The open step goes on.
        assert server.service.state().train_step == 1
        driver.close()


def test_a_run_on_another_runs_folder_ends_and_says_why(tmp_path: Path) -> None:
    save_another_run(tmp_path)
    with served(create_timed(FAST, RealClock(), tmp_path)) as server:
        plan = RunPlan(num_steps=2, checkpoint_every=1)
        with pytest.raises(RunFailed, match="is of run 'other', not 'run': give each run"):
            run_against(address_of(server), plan)


def test_a_jax_checkpoint_names_its_run_without_being_loaded(tmp_path: Path) -> None:
    engine = fresh()
    checkpoints = JaxCheckpoints(engine, tmp_path)
    assert checkpoints.saved_run(None) is None
    position = RunPosition(
        run_id="other", step=0, train_step=0, epoch=1, last_seq=1, data_cursor=""
    )
    checkpoints.begin_save(position).wait()
    before = engine.parameter_digest()
    for tensors in tmp_path.rglob("*.safetensors"):
        tensors.write_bytes(b"\0" * tensors.stat().st_size)  # Nothing to load.
    assert JaxCheckpoints(engine, tmp_path).saved_run(None) == "other"
    assert checkpoints.saved_run(0) == "other"
    assert checkpoints.saved_run(3) is None
    assert engine.parameter_digest() == before
