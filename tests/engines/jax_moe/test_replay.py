"""Router replay against an independent float64 router: recorded experts are used, token by token."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from prestage.microbatch import MicroBatch
from tests.engines.jax_engine.small import ROWS, TOKENS, Trajectory, fresh, pack, sequences
from tests.engines.jax_moe.small import (
    LENGTHS,
    MOE,
    MOE_MODEL,
    REPLAY,
    engine_of,
    moe_config,
    reference,
    with_routing,
)
from trainer_worker.engine import InvalidBatch
from trainer_worker.engines.jax_engine.engine import JaxEngine, named_leaves
from trainer_worker.engines.jax_engine.model import decode
from trainer_worker.engines.jax_engine.moe import Buffers

pytestmark = pytest.mark.slow  # Each program is compiled once, which takes most of the time.
Rows = list[list[Trajectory]]
ITEMS = sequences(0, LENGTHS)


def rows_of() -> Rows:
    a, b, c, d, e, f, g = ITEMS
    return [[a, b], [c, d], [e, f], [g]]


def recorded_of(rows: Rows, *, unset: float = 0.0) -> list[np.ndarray]:
    """Experts that no router chose, distinct for each token; a share of the tokens left at -1."""
    found = []
    for items in rows:
        for item in items:
            rng = np.random.default_rng(int(item.tokens.sum()))
            shape = (item.length, MOE_MODEL.moe_layers)
            ids = np.argsort(rng.random((*shape, MOE.num_experts)), axis=-1)[..., : MOE.top_k]
            ids[rng.random(shape) < unset] = -1
            found.append(ids.astype(np.int16))
    return found


def used_experts(batch: MicroBatch) -> np.ndarray:
    """`[R, T, moe_layers, top_k]` that the engine's model used, with its first parameters."""
    params = engine_of(moe_config(), REPLAY).state.params
    arrays = {
        name: batch.arrays[name]
        for name in ("tokens", "positions", "segment_ids", "routed_experts")
    }
    run = jax.jit(lambda p, b: decode(MOE_MODEL, p, b, Buffers()).experts)
    return np.moveaxis(np.asarray(run(params, arrays)), 0, 2)


def check_against_reference(rows: Rows, recorded: list[np.ndarray]) -> None:
    batch = with_routing(rows, recorded)
    experts = used_experts(batch)
    scored = engine_of(moe_config(), REPLAY).compute_logprobs(batch).logprobs
    left = iter(recorded)
    for row, items in enumerate(rows):
        start = 0
        for item in items:
            logprobs, wanted = reference(item, next(left))
            here = slice(start, start + item.length)
            np.testing.assert_array_equal(experts[row, here], wanted)
            np.testing.assert_allclose(scored[row, here], logprobs, atol=1e-5)
            start += item.length


def test_recorded_experts_are_reproduced_for_every_real_token() -> None:
    rows = rows_of()
    recorded = recorded_of(rows)
    own = [reference(item)[1] for items in rows for item in items]
    assert any((a != b).any() for a, b in zip(own, recorded, strict=True))
    check_against_reference(rows, recorded)


def test_the_models_own_routing_replayed_changes_nothing() -> None:
    rows = rows_of()
    check_against_reference(rows, [reference(item)[1] for items in rows for item in items])


def test_minus_one_falls_back_token_by_token_and_layer_by_layer() -> None:
    rows = rows_of()
    recorded = recorded_of(rows, unset=0.4)
    assert any((one < 0).all(-1).any() and (one >= 0).all(-1).any() for one in recorded)
    check_against_reference(rows, recorded)


def gradients(engine: JaxEngine, *batches: MicroBatch) -> dict[str, np.ndarray]:
    for batch in batches:
        engine.check(batch)
        engine.fwd_bwd(engine.prepare_fwd_bwd_input(batch))
    assert engine.sums is not None
    return {name: np.asarray(leaf) for name, leaf in named_leaves(engine.sums.gradients).items()}


def test_the_gradient_does_not_depend_on_the_packing() -> None:
    a, b, c, d, e, f, g = ITEMS
    ways: list[list[Rows]] = [
        [[[a, b], [c, d], [e, f], [g]]],
        [[[d, c], [g]], [[f, b], [e], [a]]],
    ]
    found = []
    for packing in ways:
        batches = [
            with_routing(rows, recorded_of(rows, unset=0.2), index=index)
            for index, rows in enumerate(packing)
        ]
        found.append(gradients(engine_of(moe_config(), REPLAY), *batches))
    for name, leaf in found[0].items():
        norm = float(np.linalg.norm(leaf))
        assert norm > 0, name
        assert float(np.linalg.norm(found[1][name] - leaf)) <= 1e-5 * norm, name


def test_the_router_is_trained_by_what_is_replayed() -> None:
    """Weights are the router's own probabilities of the recorded experts."""
    rows = rows_of()
    own = gradients(engine_of(moe_config(), REPLAY), with_routing(rows, unset_all(rows)))
    replayed = gradients(engine_of(moe_config(), REPLAY), with_routing(rows, recorded_of(rows)))
    for name in ("moe_layers/router", "moe_layers/expert_up"):
        assert np.linalg.norm(replayed[name]) > 0
        assert (replayed[name] != own[name]).any()


def unset_all(rows: Rows) -> list[np.ndarray]:
    return [np.full_like(one, -1) for one in recorded_of(rows)]


def test_b6_a_logprob_pass_leaves_no_replay_state_behind() -> None:
    rows = rows_of()
    batch = with_routing(rows, recorded_of(rows))
    other = with_routing(rows, unset_all(rows))
    plain, disturbed = engine_of(moe_config(), REPLAY), engine_of(moe_config(), REPLAY)
    before = plain.compute_logprobs(other).logprobs
    wanted = gradients(plain, other)
    assert (disturbed.compute_logprobs(batch).logprobs != before).any()
    disturbed.evaluate(batch)
    found = gradients(disturbed, other)
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(found[name], leaf)
    np.testing.assert_array_equal(disturbed.compute_logprobs(other).logprobs, before)


def test_what_comes_without_routing_is_scored_by_the_own_router() -> None:
    rows = rows_of()
    engine = engine_of(moe_config(), REPLAY)
    np.testing.assert_array_equal(
        engine.compute_logprobs(pack(rows)).logprobs,
        engine.compute_logprobs(with_routing(rows, unset_all(rows))).logprobs,
    )


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([6, 0], r"routed_experts holds 6 at row 1, position 5; ids are -1 to 5"),
        ([300, 0], r"routed_experts holds 300 at row 1, position 5"),
        ([-2, 0], r"routed_experts holds -2 at row 1, position 5"),
        ([-1, 0], r"routed_experts holds \[-1, 0\] at row 1, position 5, MoE layer 1: give every"),
    ],
)
def test_f4_ids_are_checked_before_the_engine_is_touched(ids: list[int], message: str) -> None:
    rows = rows_of()
    engine, batch = engine_of(moe_config(), REPLAY), with_routing(rows, recorded_of(rows))
    engine.check(batch)
    batch.arrays["routed_experts"][1, 5, 1] = ids
    with pytest.raises(InvalidBatch, match=f"micro-batch t/0/0: .*{message}"):
        engine.check(batch)


def test_dense_layers_are_not_counted() -> None:
    rows = rows_of()
    able = engine_of(moe_config(), REPLAY).capabilities
    assert (able.moe_layers, able.top_k, able.num_experts) == (2, 2, 6)
    assert MOE_MODEL.num_layers == 3
    batch = with_routing(rows, recorded_of(rows))
    every = np.zeros((ROWS, TOKENS, 3, 2), np.int16)
    batch = replace(batch, arrays={**batch.arrays, "routed_experts": every})
    with pytest.raises(InvalidBatch, match=r"has 3 layers of 2 experts; the model has 2 layers"):
        engine_of(moe_config(), REPLAY).check(batch)


def test_a_dense_model_cannot_use_routing() -> None:
    batch = with_routing(rows_of(), recorded_of(rows_of()))
    assert "routed_experts" not in fresh().capabilities.optional_fields
    with pytest.raises(InvalidBatch, match="cannot use the field 'routed_experts'"):
        fresh().check(batch)
