"""The loss family against a float64 reference, and the loss cases."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engines.jax_engine.reference import Scored, reference_loss
from tests.engines.jax_engine.small import ROWS, TOKENS, Trajectory, pack, sequences
from trainer_worker.engines.jax_engine.config import LossConfig
from trainer_worker.engines.jax_engine.loss import SUM_NAMES, host_denominator, loss_sums

LENGTHS = [(3, 6), (2, 1), (4, 8), (1, 5), (5, 9)]
ROWS_OF = ([0, 1], [2, 3], [4])  # Which sequence lies in which row; the last row is padding.


def config(**changes: object) -> LossConfig:
    return replace(LossConfig(norm_tokens=9), **changes)  # type: ignore[arg-type]


CONFIGS = {
    **{
        f"{mode} {old}": config(loss_agg_mode=mode, old_logprobs=old)
        for mode in (
            "token-mean",
            "sequence-mean-token-mean",
            "sequence-mean-token-sum",
            "sequence-mean-token-sum-norm",
        )
        for old in ("current", "sampler", "trainer")
    },
    "asymmetric clip": config(old_logprobs="trainer", epsilon_low=0.1, epsilon_high=0.5),
    "dual clip": config(old_logprobs="trainer", dual_clip=1.5),
    "kl": config(kl_coefficient=0.3, kl_estimator="kl"),
    "mse_kl": config(kl_coefficient=0.3, kl_estimator="mse_kl"),
    "low_var_kl": config(kl_coefficient=0.3, kl_estimator="low_var_kl"),
    "tis current": config(tis_cap=1.3),
    "tis trainer": config(tis_cap=1.3, old_logprobs="trainer"),
    "gate": config(logp_gate=0.9),
    "gate sequences": config(logp_gate=0.9, loss_agg_mode="sequence-mean-token-mean"),
    "entropy": config(entropy_coefficient=0.2),
    "everything": config(
        loss_agg_mode="sequence-mean-token-mean",
        old_logprobs="trainer",
        epsilon_high=0.28,
        dual_clip=3.0,
        kl_coefficient=0.1,
        tis_cap=2.0,
        logp_gate=0.9,
        entropy_coefficient=0.01,
    ),
}


def place(values: list[np.ndarray], items: list[Trajectory]) -> np.ndarray:
    """Per-token values of each sequence, as `[R, T]` of the predicting position (one earlier)."""
    out = np.full((ROWS, TOKENS), 7.25)  # What lies elsewhere must not matter.
    for row, picks in enumerate(ROWS_OF):
        start = 0
        for pick in picks:
            out[row, start : start + items[pick].length - 1] = values[pick][1:]
            start += items[pick].length
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_its_gradient_are_the_reference(name: str) -> None:
    settings = CONFIGS[name]
    items = sequences(5, LENGTHS)
    rng = np.random.default_rng(8)
    # Near the recorded log-probs, so that ratios lie on both sides of every clip.
    new = [item.old_logprobs + rng.normal(0, 0.4, item.length) for item in items]
    items = [
        replace(item, sampling_logprobs=(item.old_logprobs + rng.normal(0, spread, item.length)))
        for item, spread in zip(items, (0.2, 0.4, 1.6, 0.1, 0.7), strict=True)
    ]
    entropy = [rng.uniform(0.5, 2, item.length) for item in items]
    batch = pack([[items[i] for i in picks] for picks in ROWS_OF])
    expected = reference_loss(
        settings,
        [
            Scored(
                new=logprobs[item.loss_mask == 1],
                entropy=spread[item.loss_mask == 1],
                advantages=item.advantages[item.loss_mask == 1].astype(np.float64),
                sampling=item.sampling_logprobs.astype(np.float32)[item.loss_mask == 1].astype(
                    np.float64
                ),
                old=item.old_logprobs[item.loss_mask == 1].astype(np.float64),
                ref=item.ref_logprobs[item.loss_mask == 1].astype(np.float64),
            )
            for item, logprobs, spread in zip(items, new, entropy, strict=True)
        ],
    )
    arrays = {name: jnp.asarray(array) for name, array in batch.arrays.items()}

    def loss(logprobs: jax.Array, entropy: jax.Array) -> tuple[jax.Array, jax.Array]:
        return loss_sums(settings, logprobs, entropy, arrays)

    (value, sums), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
        jnp.asarray(place(new, items), jnp.float32), jnp.asarray(place(entropy, items), jnp.float32)
    )
    total = dict(zip(SUM_NAMES, map(float, sums), strict=True))
    assert float(value) == pytest.approx(expected.loss, rel=1e-5, abs=1e-5)
    assert total["denominator"] == expected.denominator
    assert total["logprob_gap"] == pytest.approx(expected.gap, rel=1e-5)
    assert total["kl"] == pytest.approx(expected.kl, rel=1e-4, abs=1e-5)
    assert (total["tokens"], total["kept_tokens"], total["clipped_tokens"]) == (
        expected.tokens,
        expected.kept,
        expected.clipped,
    )
    assert total["sequences"] == len(items)
    for got, wanted in zip(gradients, (expected.by_logprob, expected.by_entropy), strict=True):
        whole = np.zeros((ROWS, TOKENS))
        mask = place([item.loss_mask.astype(np.float64) for item in items], items) == 1
        whole[mask] = np.concatenate(wanted)
        np.testing.assert_allclose(got, whole, rtol=2e-5, atol=2e-6)
    if not settings.logp_gate:
        assert host_denominator(settings, batch.arrays) == expected.denominator
    if name in ("asymmetric clip", "dual clip"):
        assert 0 < expected.clipped < expected.kept
    if settings.logp_gate:
        assert 0 < expected.kept < expected.tokens


def one_row(
    settings: LossConfig,
    mask: list[int],
    logprobs: list[float] | None = None,
    **fields: list[float],
) -> dict[str, float]:
    """Sums of one row with one segment; lists are per predicted token, one prompt token first."""
    width = len(mask) + 1
    batch = {
        "segment_ids": jnp.ones((1, width), jnp.int32),
        "loss_mask": jnp.asarray([[0, *mask]], jnp.uint8),
    }
    for name, values in {"advantages": [0.0] * len(mask), **fields}.items():
        batch[name] = jnp.asarray([[0.0, *values]], jnp.float32)
    new = jnp.asarray([[*(logprobs or [-1.0] * len(mask)), 0.0]], jnp.float32)
    _, sums = loss_sums(settings, new, jnp.zeros_like(new), batch)
    return dict(zip(SUM_NAMES, map(float, sums), strict=True))


@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean-token-mean"])
def test_b10_advantages_at_padding_do_not_matter(mode: str) -> None:
    settings = config(loss_agg_mode=mode)
    clean = one_row(settings, [1, 1, 0, 0], advantages=[1, 1, 0, 0])
    assert clean == one_row(settings, [1, 1, 0, 0], advantages=[1, 1, 10, 10])
    assert clean["loss"] == (-2 if mode == "token-mean" else -1)


def test_b11_a_nan_kl_at_a_masked_position_does_not_leak() -> None:
    settings = config(kl_coefficient=1.0, kl_estimator="kl")
    sums = one_row(
        settings, [1, 0], logprobs=[-1.0, float("nan")], ref_logprobs=[-1.1, float("nan")]
    )
    assert sums["loss"] == pytest.approx(0.1, abs=1e-6)
    assert sums["denominator"] == 1


def test_b11_an_old_logprob_that_would_overflow_exp_stays_finite() -> None:
    settings = config(old_logprobs="trainer", tis_cap=2.0)

    def loss(new: jax.Array) -> jax.Array:
        batch = {
            "segment_ids": jnp.ones((1, 3), jnp.int32),
            "loss_mask": jnp.asarray([[0, 1, 0]], jnp.uint8),
            "advantages": jnp.asarray([[0, 1, 1]], jnp.float32),
            "old_logprobs": jnp.asarray([[0, -1, -800]], jnp.float32),
            "sampling_logprobs": jnp.asarray([[0, -1, -1e30]], jnp.float32),
        }
        return loss_sums(settings, new, jnp.zeros_like(new), batch)[0]

    value, gradient = jax.value_and_grad(loss)(jnp.asarray([[-1.0, 0.0, 0.0]], jnp.float32))
    assert float(value) == -1
    np.testing.assert_array_equal(gradient, [[-1, 0, 0]])


def test_a8_the_first_response_token_is_trained_and_nothing_else() -> None:
    (item,) = sequences(1, [(3, 2)])
    batch = pack([[item]])
    arrays = {name: jnp.asarray(array) for name, array in batch.arrays.items()}
    gradient = jax.grad(lambda x: loss_sums(config(), x, x * 0, arrays)[0])(
        jnp.zeros((ROWS, TOKENS))
    )
    assert [tuple(map(int, at)) for at in np.argwhere(gradient)] == [(0, 2), (0, 3)]


def test_a9_no_prediction_crosses_a_segment() -> None:
    batch = {
        "segment_ids": jnp.asarray([[1, 1, 2, 2]], jnp.int32),
        "loss_mask": jnp.ones((1, 4), jnp.uint8),  # Also on first tokens, which is wrong.
        "advantages": jnp.ones((1, 4), jnp.float32),
    }
    gradient = jax.grad(lambda x: loss_sums(config(), x, x * 0, batch)[0])(jnp.zeros((1, 4)))
    np.testing.assert_array_equal(gradient, [[-1, 0, -1, 0]])


def test_a14_an_all_masked_batch_has_loss_0_and_denominator_0() -> None:
    for mode in ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum"):
        sums = one_row(config(loss_agg_mode=mode), [0, 0], advantages=[1, 1])
        assert (sums["loss"], sums["denominator"], sums["tokens"]) == (0, 0, 0)


def test_a_nan_log_prob_gap_closes_the_gate() -> None:
    sums = one_row(config(logp_gate=1.0), [1, 1], sampling_logprobs=[float("nan"), -1.0])
    assert (sums["kept_tokens"], sums["denominator"], sums["loss"]) == (0, 0, 0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("low", "high"), [(0.0, 0.2), (0.2, 0.0), (0.0, 0.0)])
def test_at_a_ratio_of_1_no_clip_range_halves_the_gradient(
    low: float, high: float, advantage: float
) -> None:
    batch = {
        "segment_ids": jnp.ones((1, 2), jnp.int32),
        "loss_mask": jnp.asarray([[0, 1]], jnp.uint8),
        "advantages": jnp.asarray([[0, advantage]], jnp.float32),
    }
    settings = config(epsilon_low=low, epsilon_high=high)
    gradient = jax.grad(lambda x: loss_sums(settings, x, x * 0, batch)[0])(jnp.full((1, 2), -1.0))
    np.testing.assert_array_equal(gradient, [[-advantage, 0]])
