"""Precision options: bf16 compute over f32 masters, and where gradients are cast.

1. A dense product's gradient, summed in f32 or in bf16, against the float64 sum of the same inputs.
2. bf16 log-probs and gradients against f32 within bf16's rounding, with either cast.
3. Masters are f32: updates too small for bf16 add up.
4. Options that contradict are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import Array

from tests.engines.jax_engine.small import MODEL, engine_config, fresh, pack, sequences
from trainer_worker.engine import CompileSpec
from trainer_worker.engines.jax_engine.config import (
    EngineConfig,
    EngineConfigInvalid,
    ModelConfig,
    OptimizerConfig,
)
from trainer_worker.engines.jax_engine.engine import JaxEngine, named_leaves
from trainer_worker.engines.jax_engine.precision import dense

ROWS, TOKENS, IN, OUT = 4, 512, 24, 40
F64 = np.ndarray
BF16 = replace(MODEL, compute_dtype="bfloat16")
AFTER = replace(BF16, cast_grads_after_all_reduce=True)
LENGTHS = [(3, 6), (2, 1), (4, 8), (1, 5), (5, 9), (2, 7), (6, 4)]


def _rounded(values: F64) -> F64:
    """The same values as bf16 holds them, in float64."""
    return values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def _product(cast_after: bool) -> tuple[Array, Array, Array, F64, F64, F64]:
    """(product, gradient of x, gradient of the master, and x, master, cotangent as given)."""
    rng = np.random.default_rng(0)
    x, master, cotangent = (
        rng.standard_normal(shape) for shape in ((ROWS, TOKENS, IN), (IN, OUT), (ROWS, TOKENS, OUT))
    )
    x, cotangent = _rounded(x), _rounded(cotangent)

    def scalar(x: Array, master: Array) -> tuple[Array, Array]:
        out = dense(x, master, cast_after=cast_after)
        weighted = out.astype(jnp.float32) * cotangent.astype(np.float32)
        return jnp.sum(weighted), out

    given = (jnp.asarray(x, jnp.bfloat16), jnp.asarray(master, jnp.float32))
    (by_x, by_master), out = jax.jit(jax.grad(scalar, argnums=(0, 1), has_aux=True))(*given)
    return out, by_x, by_master, x, master, cotangent


def _error(got: Array, wanted: F64) -> float:
    """Relative to the whole."""
    return float(np.linalg.norm(np.asarray(got, np.float64) - wanted) / np.linalg.norm(wanted))


def test_a_gradient_summed_in_f32_is_exact_and_one_summed_in_bf16_is_rounded_once() -> None:
    errors = {}
    for cast_after in (False, True):
        out, by_x, by_master, x, master, cotangent = _product(cast_after)
        assert (out.dtype, by_x.dtype) == (jnp.bfloat16, jnp.bfloat16)
        assert by_master.dtype == jnp.float32
        assert _error(out, x @ _rounded(master)) <= 3e-3
        assert _error(by_x, cotangent @ _rounded(master).T) <= 3e-3
        wanted = np.einsum("rti,rto->io", x, cotangent)
        errors[cast_after] = _error(by_master, wanted)
        held = np.asarray(by_master)
        assert (held == held.astype(ml_dtypes.bfloat16).astype(np.float32)).all() == cast_after
    assert errors[False] <= 1e-6
    assert 5e-4 <= errors[True] <= 4e-3


def test_with_f32_compute_both_are_the_plain_product() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 8, IN)).astype(np.float32)
    master = rng.standard_normal((IN, OUT)).astype(np.float32)

    def gradient(product: Callable[[Array, Array], Array]) -> Array:
        return jax.jit(jax.grad(lambda m: jnp.sum(jnp.sin(product(x, m)))))(master)

    plain = gradient(lambda a, b: a @ b)
    for cast_after in (False, True):
        np.testing.assert_array_equal(
            gradient(lambda a, b, after=cast_after: dense(a, b, cast_after=after)), plain
        )


FIELDS = ("tokens", "segment_ids", "positions", "loss_mask", "advantages")
SPEC = CompileSpec(rows=4, tokens_per_row=24, fields=FIELDS)


def _engine(model: ModelConfig, rate: float = 1e-2) -> JaxEngine:
    config: EngineConfig = replace(
        engine_config(), model=model, optimizer=OptimizerConfig(learning_rate=rate)
    )
    made = fresh(config)
    made.compile(SPEC)
    return made


def _rows() -> list[list[object]]:
    a, b, c, d, e, f, g = sequences(0, LENGTHS)
    return [[a, b], [c, d], [e, f], [g]]


@pytest.mark.slow
def test_bf16_compute_stays_within_its_rounding_with_f32_masters() -> None:
    batch = pack(_rows(), fields=FIELDS)  # type: ignore[arg-type]
    scored, gradients = {}, {}
    for name, model in (("f32", MODEL), ("before", BF16), ("after", AFTER)):
        engine = _engine(model)
        scored[name] = engine.compute_logprobs(batch).logprobs.astype(np.float64)
        engine.fwd_bwd(engine.prepare_fwd_bwd_input(batch))
        assert engine.sums is not None
        gradients[name] = {
            leaf: np.asarray(value) for leaf, value in named_leaves(engine.sums.gradients).items()
        }
        for leaf, value in named_leaves(engine.state.params).items():
            assert value.dtype == jnp.float32, leaf
        assert {value.dtype for value in gradients[name].values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(scored["before"], scored["after"])  # The forward is one.
    there = scored["f32"] != 0
    relative = np.abs(scored["before"] - scored["f32"])[there] / np.abs(scored["f32"][there])
    assert 0 < relative.mean() <= 1e-2
    for name in ("before", "after"):
        for leaf, wanted in gradients["f32"].items():
            distance = np.linalg.norm(gradients[name][leaf] - wanted) / np.linalg.norm(wanted)
            assert 0 < distance <= 5e-2, (name, leaf)
    changed = [
        leaf
        for leaf, value in gradients["after"].items()
        if not np.array_equal(value, gradients["before"][leaf])
    ]
    assert "layers/w_up" in changed


@pytest.mark.slow
def test_updates_too_small_for_bf16_add_up_in_the_masters() -> None:
    engine = _engine(BF16, rate=1e-5)
    batch = pack(_rows(), fields=FIELDS)  # type: ignore[arg-type]
    first = {name: np.asarray(leaf) for name, leaf in named_leaves(engine.state.params).items()}
    for _ in range(8):
        engine.fwd_bwd(engine.prepare_fwd_bwd_input(batch))
        engine.update().completion.wait()
    last = {name: np.asarray(leaf) for name, leaf in named_leaves(engine.state.params).items()}
    name = "layers/attn_norm"  # Ones: bf16's next number is 0.4% away.
    assert np.abs(last[name] - first[name]).max() > 5e-5
    as_bf16 = last[name].astype(ml_dtypes.bfloat16)
    assert (as_bf16 == first[name].astype(ml_dtypes.bfloat16)).all()


def test_options_that_contradict_or_are_unknown_are_refused() -> None:
    with pytest.raises(EngineConfigInvalid, match="cast_grads_after_all_reduce does nothing"):
        replace(MODEL, cast_grads_after_all_reduce=True)
    with pytest.raises(EngineConfigInvalid, match="compute_dtype is 'float16'"):
        replace(MODEL, compute_dtype="float16")
    with pytest.raises(EngineConfigInvalid, match="matmul_precision is 'medium'"):
        replace(engine_config(), matmul_precision="medium")
