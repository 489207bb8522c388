"""A trainer of MaxText's surface, driven over gRPC in every arm, and what is said of a wrong one."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.bench.synthetic import SyntheticShape, make_batch
from orchestrator.plan import RunPlan
from tests.engines.maxtext.trainer import (
    SEEN,
    FusedTrainer,
    PlainTrainer,
    Saved,
    StagedTrainer,
    setup_of,
)
from tests.support.rig import address_of, run_against, served
from trainer_worker.engine import CompileSpec, EngineError, EngineParts, RunPosition
from trainer_worker.engines.errors import EngineConfigError
from trainer_worker.engines.maxtext.create import SETTINGS_ENV, create_maxtext
from trainer_worker.engines.maxtext.engine import MaxTextCheckpoints, MaxTextEngine
from trainer_worker.engines.maxtext.payload import rl_payload

ARMS = {
    "stock": RunPlan(num_steps=4),
    "pipelined": RunPlan(num_steps=4, pipeline=True),
    "staged": RunPlan(num_steps=4, pipeline=True, stage=True),
    "staged after": RunPlan(num_steps=4, pipeline=True, stage=True, stage_before_update=False),
    "zero-gap": RunPlan(num_steps=4, pipeline=True, stage=True, dispatch_before_metrics=True),
}
HERE = "tests.engines.maxtext.trainer"


def shape(micro_batches: int) -> SyntheticShape:
    return SyntheticShape(
        rows=2, tokens_per_row=32, micro_batches=micro_batches, real_length=24, vocab_size=100
    )


def batch(index: int = 0):
    return make_batch(shape(3), "run", 0, index)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_every_arm_trains_the_same_parameters(micro_batches: int) -> None:
    digests = {}
    for name, plan in ARMS.items():
        trainer = StagedTrainer()
        start = trainer.named()["mix"].copy()
        parts = EngineParts(training=MaxTextEngine(setup_of(trainer)))
        with served(parts) as server:
            result = run_against(address_of(server), plan, shape=shape(micro_batches))
        digests[name] = result.digest
        assert trainer.train_step == 4
        assert not np.array_equal(trainer.named()["mix"], start)
        assert trainer.calls.count("update") == 4
        records = result.book.records()
        assert all(np.isfinite(record.metrics["loss"]) for record in records)
        assert all(record.metrics["grad_norm"] > 0 for record in records)
        staged = [call for call in result.recorder.records if call.call == "stage_fwd_bwd"]
        assert sum(record.staged_input_used for record in records) == len(staged)
        assert plan.stage or not staged
    assert len(set(digests.values())) == 1, digests


def test_an_input_staged_before_the_update_trains_what_a_plain_one_does() -> None:
    digests = []
    for staged in (False, True):
        trainer = StagedTrainer()
        engine = MaxTextEngine(setup_of(trainer))
        engine.fwd_bwd(engine.prepare_fwd_bwd_input(batch(0)))
        ahead = engine.prepare_fwd_bwd_input(batch(1)) if staged else None
        assert engine.wait_for_device() >= 0
        engine.update()
        engine.fwd_bwd(ahead or engine.prepare_fwd_bwd_input(batch(1)))
        engine.update()
        expected = ["prepare", "fwd_bwd", "prepare", "update"]
        assert (trainer.calls[:4] == expected) == staged
        digests.append(engine.parameter_digest())
    assert digests[0] == digests[1]


def test_the_payload_is_a_packed_row_under_tunixs_names() -> None:
    given = batch(2)
    payload = rl_payload(given)
    assert payload.prompt_ids.shape == payload.prompt_mask.shape == (2, 0)
    assert payload.completion_ids is given.arrays["tokens"]
    assert payload.segment_positions is given.arrays["positions"]
    assert payload.completion_mask.dtype == np.int32
    assert np.array_equal(payload.completion_mask, given.arrays["loss_mask"])
    assert payload.num_segments == 2
    assert payload.old_per_token_logps is given.arrays["sampling_logprobs"]
    assert payload.ref_per_token_logps is None and payload.routed_experts is None


def test_the_trainer_is_compiled_against_padding_of_the_runs_shape() -> None:
    trainer = StagedTrainer()
    engine = MaxTextEngine(setup_of(trainer))
    report = engine.compile(
        CompileSpec(rows=2, tokens_per_row=32, fields=tuple(sorted(batch().arrays)))
    )
    assert trainer.compiled is not None and trainer.compiled.completion_ids.shape == (2, 32)
    assert not trainer.compiled.completion_mask.any()
    assert len(report.idle_wait_seconds) == 3
    before = engine.backend_compiles
    engine._idle_wait_s()
    assert engine.backend_compiles == before


def test_metrics_are_sums_over_denominators_under_our_names() -> None:
    trainer = PlainTrainer()
    engine = MaxTextEngine(setup_of(trainer))
    for index in range(2):
        engine.fwd_bwd(engine.prepare_fwd_bwd_input(batch(index)))
    losses = [float(loss) for loss in trainer._losses]  # type: ignore[arg-type]
    trained = sum(int(batch(i).arrays["loss_mask"].sum()) for i in range(2))
    values = engine.update().metrics.result()
    assert values["loss"] == pytest.approx(sum(losses) / trained, rel=1e-6)
    assert values["denominator"] == trained and values["micro_batches"] == 2
    assert "gradient_norm" not in values and values["grad_norm"] > 0


def test_a_step_without_trained_tokens_is_dropped_not_applied() -> None:
    trainer = PlainTrainer()
    engine = MaxTextEngine(setup_of(trainer))
    empty = batch()
    empty.arrays["loss_mask"][:] = 0
    before = engine.parameter_digest()
    engine.fwd_bwd(engine.prepare_fwd_bwd_input(empty))
    result = engine.update()
    assert not result.applied
    assert (engine.train_step, trainer.calls) == (0, ["fwd_bwd"])
    assert engine.parameter_digest() == before
    assert result.metrics.result()["denominator"] == 0


def test_a_trainer_that_cannot_forget_gradients_says_so() -> None:
    engine = MaxTextEngine(setup_of(PlainTrainer(), drop_gradients=None))
    engine.abort_step()  # Nothing is accumulated.
    engine.fwd_bwd(engine.prepare_fwd_bwd_input(batch()))
    with pytest.raises(EngineError, match="drop_gradients"):
        engine.abort_step()


def test_an_update_fused_into_fwd_bwd_is_named() -> None:
    engine = MaxTextEngine(setup_of(FusedTrainer()))
    with pytest.raises(EngineError, match="fuses the update"):
        engine.fwd_bwd(engine.prepare_fwd_bwd_input(batch()))


def test_checkpoints_carry_the_runs_position_and_restore_it() -> None:
    trainer = StagedTrainer()
    setup = setup_of(trainer, checkpoints=Saved(trainer).hooks())
    engine = MaxTextEngine(setup)
    checkpoints = MaxTextCheckpoints(engine, setup)
    assert checkpoints.restore(None) is None
    position = RunPosition(
        run_id="run", step=1, train_step=1, epoch=2, last_seq=9, data_cursor='{"next_step":1}'
    )
    engine.fwd_bwd(engine.prepare_fwd_bwd_input(batch()))
    with pytest.raises(EngineError, match="close the step first"):
        checkpoints.begin_save(position)
    engine.update()
    checkpoints.begin_save(position).wait()
    digest = engine.parameter_digest()
    engine.fwd_bwd(engine.prepare_fwd_bwd_input(batch(1)))
    engine.update()
    engine.fwd_bwd(engine.prepare_fwd_bwd_input(batch(2)))
    assert engine.parameter_digest() != digest
    assert checkpoints.restore(None) == position
    assert (engine.parameter_digest(), engine.train_step) == (digest, 1)
    assert not engine.step_is_open, "the open step went with the weights it was computed with"
    assert checkpoints.durable_step() == 1


def test_a_checkpoint_of_another_train_step_is_refused() -> None:
    trainer = StagedTrainer()
    setup = setup_of(trainer, checkpoints=Saved(trainer).hooks())
    engine = MaxTextEngine(setup)
    checkpoints = MaxTextCheckpoints(engine, setup)
    checkpoints.begin_save(
        RunPosition(run_id="r", step=3, train_step=3, epoch=1, last_seq=1, data_cursor="")
    )
    with pytest.raises(EngineError, match="not of one checkpoint"):
        checkpoints.restore(None)


def test_the_factory_gets_the_recipes_settings() -> None:
    parts = create_maxtext(
        f"{HERE}:factory", {SETTINGS_ENV: "ici_fsdp_parallelism=32 gdn_cp_mode=seq"}
    )
    assert SEEN[-1] == ["ici_fsdp_parallelism=32", "gdn_cp_mode=seq"]
    able = parts.training.capabilities
    assert able.engine == "maxtext" and able.can_stage and not able.can_checkpoint


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("", "package.module:function"),
        ("no.such.module:make", "no.such"),
        (f"{HERE}:nothing", "no such function"),
        (f"{HERE}:returns_nothing", "returned NoneType"),
        (f"{HERE}:claims_to_stage", "prepare_fwd_bwd_input"),
        (f"{HERE}:lacks_methods", "lacks close, compile, fwd_bwd, get_metrics, train_step, update"),
    ],
)
def test_a_wrong_factory_is_one_clear_error(name: str, match: str) -> None:
    with pytest.raises(EngineConfigError, match=match):
        create_maxtext(name, {})


def test_odd_settings_are_refused() -> None:
    with pytest.raises(EngineConfigError, match="'alone' is not name=value"):
        create_maxtext(f"{HERE}:factory", {SETTINGS_ENV: "a=1 alone"})
