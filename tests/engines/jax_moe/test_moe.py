"""MoE layers, their buffers and the dropless retry, on one device."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from prestage.microbatch import MicroBatch
from tests.engines.jax_engine.small import engine_config, pack, sequences
from tests.engines.jax_moe.small import LENGTHS, MOE, MOE_MODEL, engine_of, moe_config, reference
from trainer_worker.engines.jax_engine.config import (
    EngineConfigInvalid,
    MeshShape,
    ragged_buffer_factor,
)
from trainer_worker.engines.jax_engine.engine import JaxEngine, named_leaves
from trainer_worker.engines.jax_engine.moe import Buffers

pytestmark = pytest.mark.slow  # Each program is compiled once, which takes most of the time.
DROPLESS = moe_config()
RETRY = moe_config(factor=0.3, retry=True)  # Overflows in every micro-batch but an empty one.
DROPPING = moe_config(factor=0.3)
SOMETIMES = moe_config(factor=0.5, retry=True)  # Room for 96 assignments of a layer.


def rows_of(seed: int = 0) -> list[list]:  # type: ignore[type-arg]
    a, b, c, d, e, f, g = sequences(seed, LENGTHS)
    return [[a, b], [c, d], [e, f], [g]]


def batches(step: int = 0, count: int = 3) -> list[MicroBatch]:
    return [pack(rows_of(10 * step + i), index=i, step=step) for i in range(count)]


def arrays(tree: Mapping[str, object]) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}  # type: ignore[arg-type]


def audit(metrics: Mapping[str, float]) -> tuple[float, float, float]:
    names = ("moe_dropped_assignments", "dropless_replays", "dropped_assignments_used")
    return tuple(metrics[name] for name in names)  # type: ignore[return-value]


def train(engine: JaxEngine, given: list[MicroBatch]) -> None:
    for batch in given:
        engine.check(batch)
        engine.fwd_bwd(engine.prepare_fwd_bwd_input(batch))


def test_logprobs_are_those_of_a_naive_float64_decoder() -> None:
    rows = rows_of()
    scored = engine_of(DROPLESS).compute_logprobs(pack(rows)).logprobs
    for row, items in enumerate(rows):
        start = 0
        for item in items:
            got = scored[row, start : start + item.length]
            np.testing.assert_allclose(got, reference(item)[0], atol=1e-5)
            start += item.length


def test_a_dropless_step_reports_an_empty_audit_and_trains_every_parameter() -> None:
    engine = engine_of(DROPLESS)
    before = arrays(engine.state.params)
    train(engine, batches())
    assert not engine.capabilities.update_waits_for_device
    assert audit(engine.update().metrics.result()) == (0, 0, 0)
    for name, leaf in arrays(engine.state.params).items():
        assert (leaf != before[name]).any(), name


def test_forced_overflow_gives_the_dropless_step_bit_for_bit() -> None:
    """The first pass adds nothing; the retry is the dropless program, in the same order."""
    engine, wanted = engine_of(RETRY), engine_of(DROPLESS)
    assert engine.capabilities.update_waits_for_device
    for step in range(2):
        for one in (engine, wanted):
            train(one, batches(step))
        result, other = engine.update(), wanted.update()
        found, expected = dict(result.metrics.result()), dict(other.metrics.result())
        dropped, replays, used = audit(found)
        assert dropped > 0
        assert (replays, used) == (3, 0)
        assert (result.dropless_replays, result.dropped_assignments) == (3, 0)
        for values in (found, expected):
            for name in ("moe_dropped_assignments", "dropless_replays"):
                del values[name]
        assert found == expected
        assert engine.parameter_digest() == wanted.parameter_digest()


def test_the_gradient_of_the_first_pass_is_not_in_the_sums() -> None:
    engine, wanted = engine_of(RETRY), engine_of(DROPLESS)
    train(engine, batches()[:1])
    assert engine.sums is not None
    assert all(not leaf.any() for leaf in arrays(engine.sums.gradients).values())
    train(wanted, batches()[:1])
    engine._settle()
    assert engine.sums is not None and wanted.sums is not None
    found, expected = arrays(engine.sums.gradients), arrays(wanted.sums.gradients)
    for name, leaf in expected.items():
        np.testing.assert_array_equal(found[name], leaf)
        assert leaf.any(), name


def run_steps(engine: JaxEngine, *, staged: bool) -> str:
    ahead = None
    for step in range(3):
        for batch in batches(step):
            prepared = ahead or engine.prepare_fwd_bwd_input(batch)
            assert prepared.batch_id == batch.id
            ahead = None
            engine.fwd_bwd(prepared)
        if staged:
            ahead = engine.prepare_fwd_bwd_input(batches(step + 1)[0])
            engine.wait_for_device()
        assert engine.update().dropless_replays == 3
    return engine.parameter_digest()


def test_staging_changes_no_bit_with_every_micro_batch_retried() -> None:
    digests = {run_steps(engine_of(RETRY), staged=staged) for staged in (False, True, False)}
    assert len(digests) == 1


def test_only_what_overflowed_is_run_again() -> None:
    """A short micro-batch fits; the sums differ from the dropless ones by rounding alone."""
    engine, wanted = engine_of(SOMETIMES), engine_of(DROPLESS)
    (short,) = sequences(5, [(3, 9)])
    mixed = [pack(rows_of(0)), pack([[short]], index=1), pack(rows_of(2), index=2)]
    for one in (engine, wanted):
        train(one, mixed)
    result = engine.update()
    wanted.update()
    assert result.dropless_replays == 2
    assert audit(result.metrics.result())[2] == 0
    found, expected = arrays(engine.state.params), arrays(wanted.state.params)
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, rtol=1e-4, atol=1e-5)


def test_without_a_retry_drops_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(DROPPING)
    with caplog.at_level(logging.WARNING):
        for step in range(2):
            train(engine, batches(step))
            result = engine.update()
            dropped, replays, used = audit(result.metrics.result())
            assert dropped == used == result.dropped_assignments > 0
            assert replays == 0
    said = [line for line in caplog.messages if "left out of the gradient" in line]
    assert len(said) == 1
    assert "--ragged_buffer_factor=0.3" in said[0]


def test_the_number_dropped_is_what_the_buffer_had_no_room_for() -> None:
    engine = engine_of(DROPPING)
    batch = batches()[0]
    train(engine, [batch])
    room = Buffers(factor=0.3).rows(4 * 24 * MOE.top_k, 1)
    wanted = max(0, batch.real_tokens * MOE.top_k - room) * MOE_MODEL.moe_layers
    assert wanted > 0
    assert engine.update().dropped_assignments == wanted


def test_padding_takes_no_room_unless_it_is_routed() -> None:
    """A micro-batch whose real tokens fit; counted with padding they would not."""
    (item,) = sequences(3, [(4, 20)])
    assert item.length * MOE.top_k <= Buffers(factor=0.3).rows(4 * 24 * MOE.top_k, 1)
    for excludes, drops in ((True, False), (False, True)):
        config = replace(DROPPING, exclude_padding_from_routing=excludes)
        engine = engine_of(config)
        train(engine, [pack([[item]])])
        assert (engine.update().dropped_assignments > 0) == drops


def test_an_aborted_step_leaves_nothing_to_settle() -> None:
    engine, wanted = engine_of(RETRY), engine_of(RETRY)
    train(engine, batches(7))
    engine.abort_step()
    for one in (engine, wanted):
        train(one, batches(0))
        assert one.update().dropless_replays == 3
    assert engine.parameter_digest() == wanted.parameter_digest()


def test_scoring_drops_nothing() -> None:
    batch = pack(rows_of())
    one, other = engine_of(DROPPING), engine_of(DROPLESS)
    np.testing.assert_array_equal(
        one.compute_logprobs(batch).logprobs, other.compute_logprobs(batch).logprobs
    )


@pytest.mark.parametrize("text", ["-1", "-1.0", "-1e0", " -1 ", "-01"])
def test_any_spelling_of_minus_one_is_dropless(text: str) -> None:
    assert ragged_buffer_factor(text) == -1


@pytest.mark.parametrize("text", ["0", "-2", "nan", "inf", "", "2.75x"])
def test_other_factors_are_refused(text: str) -> None:
    with pytest.raises(EngineConfigInvalid, match="ragged_buffer_factor is"):
        ragged_buffer_factor(text)
    assert ragged_buffer_factor("2.75") == 2.75


def test_contradictions_are_refused() -> None:
    with pytest.raises(EngineConfigInvalid, match="retry_when_tokens_dropped does nothing"):
        moe_config(retry=True)
    with pytest.raises(EngineConfigInvalid, match="the model has no experts"):
        replace(engine_config(), ragged_buffer_factor=2.0)
    with pytest.raises(EngineConfigInvalid, match="mesh_expert is 4: it must divide the 6 experts"):
        replace(moe_config(), mesh=MeshShape(expert=4))
