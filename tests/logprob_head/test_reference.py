"""Log-probs, entropies and every gradient leaf against float64, per leaf and per token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trainer_worker.logprob_head as package
from tests.logprob_head import checks
from tests.logprob_head.cases import Case, expected, leaf_error, outcome, sample
from tests.logprob_head.reference import reference

PLAIN = Case()
FULL = Case(temperature=1.3, final_softcap=6.0, norm=True)
MODES = pytest.mark.parametrize("mode", ["off", "local", "vocab"])


def orders(*axes: str, size: int = 2) -> tuple[tuple[str, int], ...]:
    return tuple((axis, size) for axis in axes)


CASES = {
    "plain": PLAIN,
    "temperature": PLAIN.replace(temperature=0.6),
    "softcap": PLAIN.replace(final_softcap=3.0),
    "norm": PLAIN.replace(norm=True),
    "one chunk larger than the row": FULL.replace(chunk_tokens=1000),
    "one token a chunk": FULL.replace(chunk_tokens=1, tokens=16),
    "context-fsdp-expert": FULL.replace(mesh=orders("context", "fsdp", "expert")),
    "expert-context-fsdp": FULL.replace(mesh=orders("expert", "context", "fsdp")),
    "expert-fsdp-context": FULL.replace(mesh=orders("expert", "fsdp", "context")),
    "context of 4 first": FULL.replace(mesh=(("context", 4), ("fsdp", 2), ("expert", 1))),
    "one device": FULL.replace(mesh=orders("fsdp", "context", "expert", size=1)),
    "no expert axis, 2 rows a device": FULL.replace(mesh=(("context", 4), ("fsdp", 2))),
    "tokens over two axes, not in mesh order": FULL.replace(
        mesh=orders("tensor", "fsdp", "context"),
        row_axes=("fsdp",),
        token_axes=("context", "tensor"),
    ),
}


# The compiler lays the chunked head out, whatever the mesh: one order of axes is enough for it.
COMBINATIONS = [
    (name, mode)
    for name, case in CASES.items()
    for mode in ("local", "vocab", "off")
    if mode != "off" or case.mesh == PLAIN.mesh
]


@pytest.mark.parametrize(("name", "mode"), COMBINATIONS)
def test_float32_agrees_with_float64(name: str, mode: str) -> None:
    case = CASES[name].replace(mode=mode)
    checks.check_logprobs(package, case)
    checks.check_entropy(package, case)
    checks.check_hidden_gradient(package, case)
    checks.check_table_gradient(package, case)
    if case.norm:
        checks.check_norm_gradient(package, case)


def test_gradients_have_the_dtypes_of_what_they_are_of() -> None:
    """Float32 master weights and a bfloat16 matmul: the table's gradient is never rounded."""
    case = FULL.replace(features=64, tokens=128)
    s = sample(case)
    hidden = jnp.asarray(s.hidden, jnp.bfloat16)
    want = expected(case).d_table
    for mode in ("local", "vocab"):
        config = package.HeadConfig(
            chunk_tokens=10,
            temperature=case.temperature,
            final_softcap=case.final_softcap,
            mode=mode,
            compute_dtype="bfloat16",
        )

        def objective(
            params: tuple[jax.Array, ...], config: package.HeadConfig = config
        ) -> jax.Array:
            hidden, table, scale = params
            got = package.token_logprobs(hidden, table, s.targets, config, norm_scale=scale)
            return jnp.sum(s.a * got.logprobs + s.b * got.entropy)

        with jax.set_mesh(case.make_mesh()):
            grads = jax.jit(jax.grad(objective))((hidden, s.table, s.norm_scale))
        assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.float32, jnp.float32]
        assert leaf_error(np.asarray(grads[1]), want) <= 1e-2
        assert np.any(grads[1] != grads[1].astype(jnp.bfloat16).astype(jnp.float32))


BF16 = Case(dtype="bfloat16", rows=4, tokens=256, features=64, vocab=256, norm=True)


@MODES
def test_bfloat16_agrees_with_float64(mode: str) -> None:
    case = BF16.replace(mode=mode, chunk_tokens=32)
    got, want = outcome(package, case), expected(case)
    assert leaf_error(got.logprobs, want.logprobs) <= 1.5e-3
    assert leaf_error(got.entropy, want.entropy) <= 1.5e-3
    assert leaf_error(got.d_hidden.astype(np.float32), want.d_hidden) <= 8e-3
    bound = 4e-3 if mode != "off" else 8e-3
    assert leaf_error(got.d_table.astype(np.float32), want.d_table) <= bound


def table_error(mode: str, steps: int, tokens: int) -> float:
    case = BF16.replace(mode=mode, chunk_tokens=tokens // steps)
    got = outcome(package, case).d_table.astype(np.float32)
    return leaf_error(got, expected(case).d_table)


@pytest.mark.parametrize(("mode", "tokens"), [("local", 128), ("vocab", 256)])
def test_bfloat16_table_gradient_does_not_grow_with_chunks(mode: str, tokens: int) -> None:
    assert table_error(mode, 64, tokens) <= 1.1 * table_error(mode, 4, tokens)


def test_the_chunked_heads_bfloat16_table_gradient_does() -> None:
    """The positive control: it sums chunks in the table's dtype."""
    assert table_error("off", 64, 256) > 1.5 * table_error("off", 4, 256)


@MODES
def test_results_are_the_same_bits_for_every_chunk_size(mode: str) -> None:
    """Only sums over tokens may round differently; a token's own numbers never."""
    few, many = (outcome(package, FULL.replace(mode=mode, chunk_tokens=n)) for n in (8, 24))
    assert np.array_equal(few.logprobs, many.logprobs)
    assert np.array_equal(few.entropy, many.entropy)
    assert np.array_equal(few.d_hidden, many.d_hidden)


def test_the_reference_agrees_with_finite_differences() -> None:
    case = FULL.replace(rows=2, tokens=3, features=4, vocab=5)
    inputs = {k: np.asarray(v, np.float64) for k, v in vars(sample(case)).items() if k != "targets"}
    options = dict(temperature=1.3, final_softcap=6.0, norm_eps=1e-6, targets=sample(case).targets)

    def objective(values: dict[str, np.ndarray]) -> float:
        got = reference(**values, **options)
        return float(np.sum(values["a"] * got.logprobs + values["b"] * got.entropy))

    grads = reference(**inputs, **options)
    for name in ("hidden", "table", "norm_scale"):
        want = getattr(grads, f"d_{name}")
        for index in np.ndindex(want.shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = {**inputs, name: inputs[name].copy()}
                moved[name][index] += step
                ends.append(objective(moved))
            assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(want[index], rel=1e-5, abs=1e-7)
