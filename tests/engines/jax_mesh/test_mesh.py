"""The engine on several devices: what one device computes, however the axes are cut and ordered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from prestage.microbatch import MicroBatch
from tests.engines.jax_engine.small import EVERY_FIELD, MODEL, engine_config, pack, sequences
from trainer_worker.engine import CompileSpec, InvalidBatch
from trainer_worker.engines.jax_engine.config import (
    EngineConfig,
    EngineConfigInvalid,
    HeadMode,
    LossConfig,
    MeshShape,
)
from trainer_worker.engines.jax_engine.engine import JaxEngine, named_leaves
from trainer_worker.engines.jax_engine.mesh import make_mesh
from trainer_worker.engines.jax_engine.model import init_params
from trainer_worker.engines.jax_engine.programs import Programs

ROWS, TOKENS = 8, 24
SPEC = CompileSpec(rows=ROWS, tokens_per_row=TOKENS, fields=EVERY_FIELD)
LENGTHS = [(3, 6), (2, 1), (4, 8), (1, 5), (5, 9), (2, 7), (6, 4), (1, 20), (9, 2), (3, 3)]
MODEL_64 = replace(MODEL, vocab_size=64)  # The sharded heads split the table over all devices.
ONE = MeshShape()
CUBE = MeshShape(fsdp=2, context=2, expert=2)
MESHES = {
    "1x8x1": MeshShape(context=8),
    "expert-context-fsdp": replace(CUBE, order=("expert", "context", "fsdp")),
    "context-fsdp-expert": MeshShape(fsdp=4, context=2, order=("context", "fsdp", "expert")),
}


def config_on(mesh: MeshShape, head: HeadMode = "off") -> EngineConfig:
    loss = LossConfig(
        loss_agg_mode="sequence-mean-token-mean", kl_coefficient=0.1, entropy_coefficient=0.01
    )
    return replace(engine_config(loss), model=MODEL_64, mesh=mesh, head_mode=head)


@cache
def programs_of(config: EngineConfig) -> Programs:
    engine = JaxEngine(config, init_params(config.model, 3))
    engine.compile(SPEC)
    assert engine._programs is not None
    return engine._programs


def engine_of(config: EngineConfig) -> JaxEngine:
    """A fresh engine with programs that are compiled once."""
    programs = programs_of(config)
    engine = JaxEngine(config, init_params(config.model, 3))
    engine._programs, engine._spec = programs, SPEC
    return engine


def batch(seed: int, index: int = 0, step: int = 0) -> MicroBatch:
    a, b, c, d, e, f, g, h, i, j = sequences(seed, LENGTHS)
    rows = [[a, b], [c, d], [e, f], [g], [h], [i, j], [a]]  # The last row is padding.
    return pack(rows, index=index, step=step, shape=(ROWS, TOKENS))


def gradients(engine: JaxEngine) -> dict[str, np.ndarray]:
    assert engine.sums is not None
    return {name: np.asarray(leaf) for name, leaf in named_leaves(engine.sums.gradients).items()}


def parameters(engine: JaxEngine) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(engine.state.params).items()}


def assert_close(got: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    assert got.keys() == wanted.keys()
    for name, leaf in wanted.items():
        norm = float(np.linalg.norm(leaf))
        assert norm > 0, name
        assert float(np.linalg.norm(got[name] - leaf)) <= 1e-5 * norm, name


@cache
def wanted() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, float], np.ndarray]:
    """Of one device: gradient sums, updated parameters, metrics, log-probs."""
    return run(engine_of(config_on(ONE)))


def run(
    engine: JaxEngine,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, float], np.ndarray]:
    for index in range(2):
        one = batch(index, index)
        engine.check(one)
        engine.fwd_bwd(engine.prepare_fwd_bwd_input(one)).wait()
    found = gradients(engine)
    result = engine.update()
    metrics = dict(result.metrics.result())
    scored = engine.compute_logprobs(batch(5)).logprobs
    return found, parameters(engine), metrics, scored


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES.keys())
def test_any_mesh_computes_what_one_device_computes(mesh: MeshShape) -> None:
    engine = engine_of(config_on(mesh))
    assert engine.capabilities.device_count == 8
    found, params, metrics, scored = run(engine)
    assert_close(found, wanted()[0])
    assert_close(params, wanted()[1])
    assert metrics == pytest.approx(wanted()[2], rel=1e-5)
    np.testing.assert_allclose(scored, wanted()[3], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["local", "vocab"])
def test_any_head_computes_what_the_unsharded_one_computes(
    head: HeadMode, caplog: pytest.LogCaptureFixture
) -> None:
    programs_of.cache_clear()  # The head is chosen, and logged, while it compiles.
    with caplog.at_level("INFO"):
        engine = engine_of(config_on(CUBE, head))
    assert any("local tokens" in line and "steps of 7" in line for line in caplog.messages)
    assert not any("sharded head off" in line for line in caplog.messages)
    found, params, metrics, _ = run(engine)
    assert_close(found, wanted()[0])
    assert_close(params, wanted()[1])
    assert metrics == pytest.approx(wanted()[2], rel=1e-5)


@pytest.mark.slow
def test_a_head_that_does_not_fit_is_named_and_the_old_one_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = replace(
        config_on(MeshShape(fsdp=2, context=4), "local"), model=replace(MODEL, hidden_size=12)
    )
    with caplog.at_level("WARNING"):
        programs_of(config)
    assert any("[logps-head] sharded head off" in line for line in caplog.messages)


@pytest.mark.slow
def test_parameters_and_moments_are_shared_out() -> None:
    engine = engine_of(config_on(CUBE))
    leaves = jax.tree.leaves((engine.state.params, engine.state.optimizer))
    whole = sum(leaf.nbytes for leaf in leaves)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert held < 0.55 * whole  # Split over fsdp 2; the table over all 8.
    prepared = engine.prepare_fwd_bwd_input(batch(0))
    for array in prepared.arrays.values():
        assert array.addressable_shards[0].data.shape == (ROWS // 4, TOKENS // 2)


def run_steps(engine: JaxEngine, *, staged: bool) -> str:
    """Three steps of two micro-batches; staged: each next step's first is on the mesh before."""
    ahead = None
    for step in range(3):
        for index in range(2):
            mine = ahead
            if mine is None:
                mine = engine.prepare_fwd_bwd_input(batch(2 * step + index, index, step))
            ahead = None
            engine.fwd_bwd(mine)
        if staged:
            ahead = engine.prepare_fwd_bwd_input(batch(2 * step + 2, 0, step + 1))
            engine.wait_for_device()
        engine.update()
    return engine.parameter_digest()


@pytest.mark.slow
def test_staging_changes_no_bit_on_a_mesh() -> None:
    config = config_on(CUBE, "local")
    before = engine_of(config)
    compiled = before.backend_compiles
    digests = {run_steps(engine_of(config), staged=staged) for staged in (False, True, False)}
    assert len(digests) == 1
    assert digests != {before.parameter_digest()}
    assert before.backend_compiles - compiled <= 3 * 2  # Each engine makes its first state.


def test_the_product_must_be_the_device_count() -> None:
    with pytest.raises(EngineConfigInvalid, match=r"mesh_fsdp=2 x .* are 2 devices.* there are 8"):
        make_mesh(2, 1, 1)
    assert make_mesh(1, 1, 1).size == 1


@pytest.mark.parametrize(
    ("rows", "tokens", "message"),
    [(6, 24, "rows is 6, which 4 devices"), (8, 23, "tokens_per_row is 23, which 2 devices")],
)
def test_a_shape_that_cannot_be_shared_out_is_refused(rows: int, tokens: int, message: str) -> None:
    engine = JaxEngine(config_on(CUBE), init_params(MODEL_64, 3))
    with pytest.raises(InvalidBatch, match=message):
        engine.compile(CompileSpec(rows=rows, tokens_per_row=tokens, fields=EVERY_FIELD))
