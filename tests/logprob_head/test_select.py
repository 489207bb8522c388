"""Which head runs, what the log says, and what is refused before anything runs."""

import logging
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from tests.logprob_head.cases import Case, sample
from trainer_worker.logprob_head import (
    HeadConfig,
    HeadConfigError,
    head_param_spec,
    token_logprobs,
    token_spec,
)
from trainer_worker.logprob_head.layout import Layout, Misfit, fit_layout
from trainer_worker.logprob_head.select import Choice, choose_head

AXES = ("fsdp", "context", "expert")
OFF = "[logps-head] sharded head off, using the chunked head: "


def mesh_of(*sizes: int, axes: tuple[str, ...] = AXES) -> Mesh:
    return Mesh(np.array(jax.devices()[: prod(sizes)]).reshape(sizes), axes)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.message.startswith("[logps-head]")]


def score(
    case: Case, caplog: pytest.LogCaptureFixture, mesh: Mesh | None, *, chunk_tokens: int = 8
) -> tuple[list[str], np.ndarray]:
    """The log lines of one trace, and the log-probs."""
    s = sample(case)
    config = HeadConfig(chunk_tokens=chunk_tokens, mode=case.mode)
    caplog.clear()

    def head() -> jax.Array:
        table = None if case.vocab == case.features else s.table
        return jax.jit(token_logprobs, static_argnums=3)(
            s.hidden, table, s.targets, config, s.norm_scale
        ).logprobs

    with caplog.at_level(logging.INFO):
        if mesh is None:
            return [*lines(caplog)], np.asarray(head())
        with jax.set_mesh(mesh):
            got = np.asarray(head())
    return lines(caplog), got


SMALL = Case(rows=4, tokens=16, features=16, vocab=24)


def test_engaging_is_logged_with_its_steps(caplog: pytest.LogCaptureFixture) -> None:
    said, _ = score(SMALL, caplog, mesh_of(2, 2, 2), chunk_tokens=4)
    assert len(said) == 1
    assert said[0].startswith("[logps-head] sharded head local: ")
    assert said[0].endswith("1x8 local tokens in 2 steps of 4")


def test_the_vocab_head_is_logged_with_its_slice(caplog: pytest.LogCaptureFixture) -> None:
    said, _ = score(SMALL.replace(mode="vocab"), caplog, mesh_of(2, 2, 2), chunk_tokens=5)
    assert said[0].startswith("[logps-head] sharded head vocab: ")
    assert said[0].endswith("1x16 local tokens x 12 of 24 ids in 4 steps of 5")


def test_off_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert score(SMALL.replace(mode="off"), caplog, mesh_of(2, 2, 2))[0] == []


FALLBACKS = {
    "a mesh axis that holds nothing": (
        SMALL,
        lambda: mesh_of(2, 2, 2, axes=("fsdp", "context", "tensor")),
        "no token layout fits the mesh: axis 'tensor' has size 2",
    ),
    "no axis of the mesh is known": (
        SMALL,
        lambda: mesh_of(1, axes=("x",)),
        "no token layout fits the mesh: its axes ('x',)",
    ),
    "rows do not divide": (
        SMALL.replace(rows=3),
        lambda: mesh_of(2, 2, 2),
        "no token layout fits the mesh: 3 rows",
    ),
    "tokens do not divide": (
        SMALL.replace(tokens=15),
        lambda: mesh_of(2, 2, 2),
        "no token layout fits the mesh: 15 tokens",
    ),
    "no table": (
        SMALL.replace(features=24),
        lambda: mesh_of(2, 2, 2),
        "the head reads no model state",
    ),
    "the table does not divide": (
        SMALL.replace(features=12, vocab=20),
        lambda: mesh_of(2, 2, 2),
        "head parameter table (20, 12) has no dimension divisible by the 8 devices",
    ),
    "the norm scale does not divide": (
        SMALL.replace(features=12, norm=True),
        lambda: mesh_of(2, 2, 2),
        "head parameter norm_scale (12,) has no dimension divisible by the 8 devices",
    ),
    "the vocabulary does not divide over its slices": (
        SMALL.replace(mode="vocab", vocab=25),
        lambda: mesh_of(2, 2, 2),
        "vocabulary 25 is not divisible by the 2 devices",
    ),
    "features do not divide over all devices": (
        SMALL.replace(mode="vocab", features=12),
        lambda: mesh_of(2, 2, 2),
        "features 12 are not divisible by the 8 devices",
    ),
    "tokens are not split": (
        SMALL.replace(mode="vocab"),
        lambda: mesh_of(4, 1, 1),
        "no token layout fits the vocab head",
    ),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_falls_back_with_the_reason(name: str, caplog: pytest.LogCaptureFixture) -> None:
    case, mesh, reason = FALLBACKS[name]
    said, got = score(case, caplog, mesh())
    assert len(said) == 1 and said[0].startswith(OFF + reason)
    _, plain = score(case.replace(mode="off"), caplog, mesh())
    assert np.array_equal(got, plain)


def test_falls_back_without_a_mesh(caplog: pytest.LogCaptureFixture) -> None:
    s = sample(SMALL)
    with caplog.at_level(logging.INFO):
        got = token_logprobs(s.hidden, s.table, s.targets, HeadConfig(chunk_tokens=8, mode="local"))
    assert lines(caplog) == [OFF + "no mesh is set (jax.set_mesh)"]
    plain = token_logprobs(s.hidden, s.table, s.targets, HeadConfig(chunk_tokens=8))
    assert np.array_equal(got.logprobs, plain.logprobs)


def test_without_a_table_hidden_states_are_logits() -> None:
    s = sample(SMALL.replace(features=24))
    config = HeadConfig(chunk_tokens=5, temperature=0.5)
    got = token_logprobs(s.hidden, None, s.targets, config)
    log_p = jax.nn.log_softmax(s.hidden / 0.5)
    want = np.take_along_axis(np.asarray(log_p), s.targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(got.logprobs, want, atol=1e-5)


def test_explicit_axes_are_refused_with_the_fix() -> None:
    s = sample(SMALL)
    with (
        jax.set_mesh(jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Explicit,) * 3)),
        pytest.raises(HeadConfigError, match=r"are Explicit.*axis_types=\(AxisType.Auto,\) \* 3"),
    ):
        token_logprobs(s.hidden, s.table, s.targets, HeadConfig(chunk_tokens=8, mode="local"))


def test_inside_another_shard_map_only_the_chunked_head_runs() -> None:
    s = sample(SMALL)

    def inner(hidden: jax.Array, targets: jax.Array, mode: str) -> jax.Array:
        config = HeadConfig(chunk_tokens=8, mode=mode)
        return token_logprobs(hidden, jnp.asarray(s.table), targets, config).logprobs

    def outer(mode: str) -> jax.Array:
        spec = PartitionSpec("fsdp", "context")
        mapped = jax.shard_map(
            lambda h, y: inner(h, y, mode), in_specs=(spec, spec), out_specs=spec
        )
        return mapped(s.hidden, s.targets)

    plain = token_logprobs(s.hidden, s.table, s.targets, HeadConfig(chunk_tokens=8)).logprobs
    with jax.set_mesh(mesh_of(2, 2, 2)):
        np.testing.assert_allclose(outer("off"), plain, atol=1e-6)
        with pytest.raises(HeadConfigError, match="inside a shard_map"):
            outer("local")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens is 0: give 1 or more"),
        ({"chunk_tokens": -1}, "chunk_tokens is -1"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"final_softcap": 0.0}, "final_softcap is 0.0"),
        ({"norm_eps": -1.0}, "norm_eps is -1.0"),
        ({"mode": "on"}, "mode is 'on'"),
        ({"compute_dtype": "float64"}, "compute_dtype is 'float64'"),
        ({"row_axes": ("context",)}, "name an axis twice"),
    ],
)
def test_a_config_no_head_can_honour_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(HeadConfigError, match=said):
        HeadConfig(**{"chunk_tokens": 8, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden": np.zeros((4, 16), np.float32)}, "hidden has shape"),
        ({"targets": np.zeros((4, 15), np.int32)}, "targets have shape"),
        ({"targets": np.zeros((4, 16), np.float32)}, "targets have dtype"),
        ({"hidden": np.zeros((4, 16, 16), np.int32)}, "hidden has dtype"),
        ({"table": np.zeros((24, 15), np.float32)}, "table has shape"),
        ({"norm_scale": np.zeros((24,), np.float32)}, "norm_scale has shape"),
    ],
)
def test_shapes_that_do_not_match_are_refused(changes: dict[str, np.ndarray], said: str) -> None:
    s = sample(SMALL)
    inputs = {"hidden": s.hidden, "table": s.table, "targets": s.targets, **changes}
    with pytest.raises(HeadConfigError, match=said):
        token_logprobs(config=HeadConfig(chunk_tokens=8), **inputs)


def choose(vocab: int, tokens: int, *, context: int = 4, features: int = 1024) -> Choice:
    mesh = AbstractMesh((8, context, 2), AXES)
    config = HeadConfig(chunk_tokens=1024, mode="auto", compute_dtype="bfloat16")
    choice = choose_head(
        mesh, config, tokens=(16, tokens), table=(vocab, features), norm_scale=(features,)
    )
    assert isinstance(choice, Choice)
    return choice


def test_auto_takes_the_head_that_receives_fewer_bytes() -> None:
    """16 rows on 16 row ranks: one row of tokens / 4 a device, so vocab when tokens < V * 63 / 64."""
    assert choose(vocab=248_320, tokens=65_536).mode == "vocab"
    assert choose(vocab=32_768, tokens=65_536).mode == "local"
    assert choose(vocab=68_000, tokens=65_536).mode == "vocab"
    assert choose(vocab=64_512, tokens=65_536).mode == "local"


def test_auto_takes_the_local_head_where_the_other_does_not_fit() -> None:
    assert choose(vocab=248_320, tokens=64, context=1).mode == "local"
    assert choose(vocab=248_319, tokens=64).mode == "local"
    assert "not divisible" in choose(vocab=248_319, tokens=64).why


sizes = st.sampled_from([1, 2, 3, 4, 8])


@given(
    order=st.permutations(AXES),
    by_axis=st.fixed_dictionaries({axis: sizes for axis in AXES}),
    rows=st.integers(1, 64),
    tokens=st.integers(1, 64),
)
def test_a_layout_splits_the_tokens_whole_or_says_why_not(
    order: list[str], by_axis: dict[str, int], rows: int, tokens: int
) -> None:
    mesh = AbstractMesh(tuple(by_axis[axis] for axis in order), tuple(order))
    fit = fit_layout(mesh, HeadConfig(chunk_tokens=1), rows=rows, tokens=tokens)
    row_ranks, token_ranks = by_axis["fsdp"] * by_axis["expert"], by_axis["context"]
    if rows % row_ranks or tokens % token_ranks:
        assert isinstance(fit, Misfit) and fit.reason.startswith("no token layout fits the mesh")
        return
    assert isinstance(fit, Layout)
    assert (fit.row_axes, fit.token_axes) == (("fsdp", "expert"), ("context",))
    assert fit.local_rows * row_ranks == rows and fit.local_tokens * token_ranks == tokens


def test_storage_specs_split_over_all_devices_whatever_the_mesh_order() -> None:
    config = HeadConfig(chunk_tokens=1)
    everywhere = ("fsdp", "expert", "context")
    for order in (AXES, ("context", "expert", "fsdp")):
        mesh = AbstractMesh((2, 2, 2), order)
        assert head_param_spec((24, 16), mesh, config) == PartitionSpec(None, everywhere)
        assert head_param_spec((24, 15), mesh, config) == PartitionSpec(everywhere)
        assert head_param_spec((16,), mesh, config) == PartitionSpec(everywhere)
        assert head_param_spec((25, 15), mesh, config) == PartitionSpec()
        assert token_spec(mesh, config) == PartitionSpec(("fsdp", "expert"), ("context",))
