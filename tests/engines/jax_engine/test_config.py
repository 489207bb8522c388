"""Settings that contradict themselves are refused with their name, value and fix."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from tests.engines.jax_engine.small import MODEL
from trainer_worker.engines.jax_engine.config import (
    EngineConfig,
    EngineConfigInvalid,
    LossConfig,
    OptimizerConfig,
)
from trainer_worker.engines.jax_engine.presets import create
from trainer_worker.engines.jax_engine.programs import learning_rate

GOOD = {
    "model": MODEL,
    "loss": LossConfig(),
    "optimizer": OptimizerConfig(),
    "engine": EngineConfig(model=MODEL),
}


@pytest.mark.parametrize(
    ("what", "name", "value"),
    [
        ("model", "vocab_size", 0),
        ("model", "num_heads", 3),
        ("model", "num_kv_heads", 0),
        ("model", "head_dim", 5),
        ("model", "compute_dtype", "float16"),
        ("model", "rope_theta", float("nan")),
        ("model", "norm_eps", 0.0),
        ("model", "query_block", 0),
        ("loss", "loss_agg_mode", "seq-mean"),
        ("loss", "old_logprobs", "rollout"),
        ("loss", "kl_estimator", "k3"),
        ("loss", "epsilon_low", 1.0),
        ("loss", "epsilon_high", -0.1),
        ("loss", "dual_clip", 0.5),
        ("loss", "kl_coefficient", float("nan")),
        ("loss", "tis_cap", -1.0),
        ("loss", "logp_gate", float("inf")),
        ("loss", "entropy_coefficient", float("nan")),
        ("loss", "loss_agg_mode", "sequence-mean-token-sum-norm"),
        ("optimizer", "learning_rate", -1.0),
        ("optimizer", "weight_decay", float("nan")),
        ("optimizer", "beta1", 1.0),
        ("optimizer", "epsilon", 0.0),
        ("engine", "max_inflight", 0),
        ("engine", "logprob_chunk", 0),
        ("engine", "head_mode", "on"),
        ("engine", "matmul_precision", "low"),
    ],
)
def test_a_bad_setting_is_named_with_its_value(what: str, name: str, value: object) -> None:
    with pytest.raises(EngineConfigInvalid) as caught:
        replace(GOOD[what], **{name: value})  # type: ignore[type-var]
    assert name in str(caught.value)
    assert str(value) in str(caught.value)


def test_truncated_importance_sampling_needs_an_old_policy_that_is_not_the_sampler() -> None:
    LossConfig(tis_cap=2.0, old_logprobs="trainer")
    with pytest.raises(EngineConfigInvalid, match=r"tis_cap is 2\.0 with old_logprobs sampler"):
        LossConfig(tis_cap=2.0, old_logprobs="sampler")


def test_only_the_unsharded_head_can_skip_chunks() -> None:
    with pytest.raises(EngineConfigInvalid, match="skips_prompts with head_mode local"):
        EngineConfig(model=MODEL, head_mode="local", skips_prompts=True)


def test_the_loss_says_which_fields_it_reads() -> None:
    assert LossConfig().required_fields == ()
    assert LossConfig(old_logprobs="trainer", kl_coefficient=0.1, tis_cap=2).required_fields == (
        "old_logprobs",
        "ref_logprobs",
        "sampling_logprobs",
    )
    assert LossConfig(old_logprobs="sampler").required_fields == ("sampling_logprobs",)


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(EngineConfigInvalid, match=r"preset is 'small'; use one of tiny"):
        create("small", EngineConfig(model=MODEL))


def test_warm_up_rises_to_the_rate_and_starts_above_0() -> None:
    config = OptimizerConfig(learning_rate=0.8, warmup_steps=4)
    rates = [float(learning_rate(config, jnp.asarray(step))) for step in range(6)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
