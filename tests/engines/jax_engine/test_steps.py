"""Steps of the JAX engine: accumulation, staging, skipping, aborting, scoring, failing."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace

import jax
import numpy as np
import pytest

from prestage.microbatch import MicroBatch
from tests.engines.jax_engine.reference import decoder_logprobs
from tests.engines.jax_engine.small import (
    MODEL,
    SPEC,
    Trajectory,
    compiled,
    engine_config,
    fresh,
    pack,
    sequence,
    sequences,
    twin,
)
from trainer_worker.engine import (
    CompileReport,
    CompileSpec,
    DeviceFailure,
    DeviceSpan,
    EngineError,
    InvalidBatch,
    UpdateResult,
)
from trainer_worker.engines.jax_engine.config import LossConfig
from trainer_worker.engines.jax_engine.engine import JaxEngine, named_leaves

LENGTHS = [(3, 6), (2, 1), (4, 8), (1, 5), (5, 9), (2, 7), (6, 4)]
Rows = list[list[Trajectory]]


@pytest.fixture(scope="module")
def brought_up() -> tuple[JaxEngine, str, CompileReport]:
    """(engine, parameter digest before its compile, what the compile reported)."""
    engine = fresh()
    digest = engine.parameter_digest()
    return engine, digest, engine.compile(SPEC)


@pytest.fixture(scope="module")
def base(brought_up: tuple[JaxEngine, str, CompileReport]) -> JaxEngine:
    """Compiled once; each test takes a twin with the first parameters."""
    return brought_up[0]


@pytest.fixture
def engine(base: JaxEngine) -> JaxEngine:
    return twin(base)


@pytest.fixture(scope="module")
def gated() -> JaxEngine:
    return compiled(engine_config(LossConfig(logp_gate=1.0)))


def rows_of(seed: int = 0) -> Rows:
    """Four rows."""
    a, b, c, d, e, f, g = sequences(seed, LENGTHS)
    return [[a, b], [c, d], [e, f], [g]]


def feed(engine: JaxEngine, *batches: MicroBatch) -> None:
    for batch in batches:
        engine.check(batch)
        engine.fwd_bwd(engine.prepare_fwd_bwd_input(batch))


def gradient(engine: JaxEngine) -> dict[str, np.ndarray]:
    assert engine.sums is not None
    return {name: np.asarray(leaf) for name, leaf in named_leaves(engine.sums.gradients).items()}


def assert_close(got: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    """Each leaf within 1e-5, relative to the leaf's norm."""
    assert got.keys() == wanted.keys()
    for name, leaf in wanted.items():
        norm = float(np.linalg.norm(leaf))
        assert norm > 0, name
        assert float(np.linalg.norm(got[name] - leaf)) <= 1e-5 * norm, name


def params64(engine: JaxEngine) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(leaf, np.float64)
        for name, leaf in named_leaves(engine.state.params).items()
    }


def numbers(result: UpdateResult) -> dict[str, float]:
    return dict(result.metrics.result())


# -- the model, its log-probs and its gradient ------------------------------------------------------


def test_packed_logprobs_are_those_of_a_naive_float64_decoder(engine: JaxEngine) -> None:
    """Packed anywhere in a row equals alone: the reference sees one sequence at a time."""
    rows = rows_of()
    scored = engine.compute_logprobs(pack(rows)).logprobs
    params = params64(engine)
    for row, items in enumerate(rows):
        start = 0
        for item in items:
            wanted = decoder_logprobs(MODEL, params, item.tokens)
            got = scored[row, start : start + item.length]
            np.testing.assert_allclose(got, wanted, atol=1e-5)
            start += item.length
        assert not scored[row, start:].any()


def test_the_gradient_is_that_of_the_float64_loss(engine: JaxEngine) -> None:
    """Central differences of the float64 loss along random directions, leaf by leaf."""
    rows = rows_of()
    feed(engine, pack(rows))
    found, params = gradient(engine), params64(engine)

    def loss(changed: Mapping[str, np.ndarray]) -> float:
        # Its gradient at old = current: the sum of -advantage * log-prob.
        return sum(
            float(
                -(item.advantages * item.loss_mask) @ decoder_logprobs(MODEL, changed, item.tokens)
            )
            for items in rows[:2]
            for item in items
        )

    engine.abort_step()
    feed(engine, pack(rows[:2]))
    found = gradient(engine)
    rng = np.random.default_rng(2)
    for name in ("embed", "final_norm", "layers/wq", "layers/wv", "layers/w_gate"):
        direction = rng.standard_normal(params[name].shape)
        step = 1e-5
        ahead = loss({**params, name: params[name] + step * direction})
        behind = loss({**params, name: params[name] - step * direction})
        slope = (ahead - behind) / (2 * step)
        assert float((found[name] * direction).sum()) == pytest.approx(slope, rel=1e-4, abs=1e-4)


def test_leaving_chunks_out_of_the_head_changes_nothing(base: JaxEngine) -> None:
    whole = compiled(engine_config(skips_prompts=False))
    skipping = twin(base)
    assert skipping._config.skips_prompts  # The default on CPUs.
    for one in (whole, skipping):
        feed(one, pack(rows_of()))
    assert_close(gradient(skipping), gradient(whole))
    np.testing.assert_allclose(
        skipping.compute_logprobs(pack(rows_of())).logprobs,
        whole.compute_logprobs(pack(rows_of())).logprobs,
        atol=1e-6,
    )


# -- accumulation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4])
def test_b3_b5_b15_more_micro_batches_change_neither_gradient_nor_loss(
    engine: JaxEngine, base: JaxEngine, count: int
) -> None:
    rows = rows_of()
    feed(engine, pack(rows))
    split = twin(base)
    share = len(rows) // count
    feed(split, *(pack(rows[i * share : (i + 1) * share], index=i) for i in range(count)))
    assert_close(gradient(split), gradient(engine))
    one, many = numbers(engine.update()), numbers(split.update())
    assert many.pop("micro_batches") == count
    assert one.pop("micro_batches") == 1
    assert many == pytest.approx(one, rel=1e-5)
    assert one["grad_norm"] > 0
    assert one["update_norm"] > 0


@pytest.mark.parametrize("at", [0, 1, 2])
def test_b4_b12_an_all_padding_micro_batch_changes_nothing(
    engine: JaxEngine, base: JaxEngine, at: int
) -> None:
    rows = rows_of()
    batches = [pack(rows[:2]), pack(rows[2:])]
    feed(engine, *batches)
    padded = twin(base)
    feed(padded, *batches[:at], pack([]), *batches[at:])
    assert_close(gradient(padded), gradient(engine))
    one, other = numbers(engine.update()), numbers(padded.update())
    assert (one.pop("micro_batches"), other.pop("micro_batches")) == (2, 3)
    assert one == pytest.approx(other, rel=1e-6)


def trained(losses: list[float]) -> Trajectory:
    """A sequence whose tokens have these losses: at ratio 1 a token's loss is -advantage."""
    (item,) = sequences(4, [(2, len(losses))])
    advantages = np.asarray([0, 0, *(-loss for loss in losses)], np.float32)
    return replace(item, advantages=advantages)


def test_b1_b2_b4_one_division_by_the_steps_own_total(engine: JaxEngine) -> None:
    feed(engine, pack([[trained([1, 1])]]), pack([[trained([0] * 8)]]))
    assert numbers(engine.update())["loss"] == pytest.approx(0.2)
    feed(engine, pack([[trained([4])]]), pack([[trained([0, 0, 0])]]))
    assert numbers(engine.update())["loss"] == pytest.approx(1)
    feed(engine, pack([[trained([4])]]), pack([[trained([0, 0, 0])]]), pack([]))
    assert numbers(engine.update())["loss"] == pytest.approx(1)


def test_b13_the_denominator_is_of_every_micro_batch(engine: JaxEngine) -> None:
    feed(engine, pack([[trained([1] * 5)]]), pack([[trained([1] * 7)]]), pack([]))
    assert numbers(engine.update())["denominator"] == 12


def test_b7_later_micro_batches_add_to_earlier_ones(engine: JaxEngine, base: JaxEngine) -> None:
    a, b, *_ = rows_of()
    (silent,) = sequences(9, [(4, 5)])
    silent = replace(silent, loss_mask=np.zeros_like(silent.loss_mask))
    feed(engine, pack([a]), pack([b]), pack([[silent]]))
    whole = twin(base)
    feed(whole, pack([a, b, [silent]]))
    assert_close(gradient(engine), gradient(whole))
    assert numbers(engine.update())["grad_norm"] == pytest.approx(
        numbers(whole.update())["grad_norm"], rel=1e-5
    )


def test_b9_a_masked_completion_is_not_in_the_denominator(engine: JaxEngine) -> None:
    rng = np.random.default_rng(1)
    kept, cut = sequence(rng, 2, 4), sequence(rng, 2, 6, masked=True)
    feed(engine, pack([[kept, cut]]))
    assert numbers(engine.update())["denominator"] == 4


def test_a_step_of_denominator_0_is_skipped(engine: JaxEngine) -> None:
    feed(engine, pack(rows_of()))
    engine.update()
    before, count = engine.parameter_digest(), engine.train_step
    cut = sequence(np.random.default_rng(1), 2, 6, masked=True)
    feed(engine, pack([[cut], [cut]]), pack([]))
    result = engine.update()
    assert not result.applied
    values = numbers(result)
    assert (values["loss"], values["denominator"], values["grad_norm"]) == (0, 0, 0)
    assert (engine.parameter_digest(), engine.train_step) == (before, count)
    result.completion.wait()
    feed(engine, pack(rows_of()))
    assert engine.update().applied
    assert engine.train_step == count + 1
    assert engine.parameter_digest() != before


def test_b11_nan_at_masked_positions_does_not_leak(engine: JaxEngine, base: JaxEngine) -> None:
    clean, dirty = pack(rows_of()), pack(rows_of())
    unused = dirty.arrays["loss_mask"] == 0
    for name in ("advantages", "sampling_logprobs", "old_logprobs", "ref_logprobs"):
        dirty.arrays[name][unused] = np.nan
    other = twin(base)
    engine.fwd_bwd(engine.prepare_fwd_bwd_input(clean)).wait()
    other.fwd_bwd(other.prepare_fwd_bwd_input(dirty)).wait()
    one, two = gradient(engine), gradient(other)
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])


def test_b14_a_loss_that_is_not_finite_fails_the_step(engine: JaxEngine) -> None:
    before = engine.parameter_digest()
    bad = pack([[trained([1, 1, 1, 1])]], index=3)
    bad.arrays["advantages"][0, 4] = np.nan
    with pytest.raises(InvalidBatch, match=r"t/0/3.*advantages.*row 0, position 4.*nan"):
        engine.check(bad)
    feed(engine, pack([[trained([1, 1, 1, 1])]]))
    work = engine.fwd_bwd(engine.prepare_fwd_bwd_input(bad))
    with pytest.raises(DeviceFailure, match=r"micro-batch t/0/3 failed.*loss is nan"):
        work.wait()
    with pytest.raises(DeviceFailure, match="t/0/3"):
        work.peek()
    completion = engine.update().completion
    with pytest.raises(DeviceFailure, match=r"grad_norm is nan: the parameters were left"):
        completion.wait()
    assert engine.parameter_digest() == before


# -- order, buffers, compiles -----------------------------------------------------------------------


def run_steps(engine: JaxEngine, *, staged: bool) -> list[str]:
    """Digest after each of three steps of two micro-batches."""
    batches = [
        [pack(rows_of(step)[2 * i : 2 * i + 2], step=step, index=i) for i in range(2)]
        for step in range(3)
    ]
    digests = []
    first = engine.prepare_fwd_bwd_input(batches[0][0])
    for step in range(3):
        engine.fwd_bwd(first)
        engine.fwd_bwd(engine.prepare_fwd_bwd_input(batches[step][1]))
        last = step == 2
        if staged and not last:
            first = engine.prepare_fwd_bwd_input(batches[step + 1][0])
            engine.wait_for_device()
        engine.update()
        digests.append(engine.parameter_digest())
        if not staged and not last:
            first = engine.prepare_fwd_bwd_input(batches[step + 1][0])
    return digests


def test_staged_order_is_bit_identical_to_stock(engine: JaxEngine, base: JaxEngine) -> None:
    stock, staged = run_steps(engine, staged=False), run_steps(twin(base), staged=True)
    assert stock == staged
    assert len(set(stock)) == 3
    assert engine.train_step == 3


def test_host_arrays_may_be_reused_once_ready(engine: JaxEngine, base: JaxEngine) -> None:
    kept, reused = pack(rows_of()), pack(rows_of())
    other = twin(base)
    prepared = other.prepare_fwd_bwd_input(reused)
    assert prepared.wait_ready() == DeviceSpan()
    for array in reused.arrays.values():
        array[...] = 1
    feed(engine, kept)
    other.fwd_bwd(prepared)
    for name, leaf in gradient(engine).items():
        np.testing.assert_array_equal(gradient(other)[name], leaf)


def test_no_step_compiles(engine: JaxEngine) -> None:
    before = engine.backend_compiles
    assert before > 0
    run_steps(engine, staged=True)
    run_steps(engine, staged=False)
    feed(engine, pack(rows_of()))
    engine.evaluate(pack(rows_of()))
    engine.abort_step()
    feed(engine, pack(rows_of()), pack([]))
    engine.compute_logprobs(pack(rows_of()))
    result = engine.update()
    result.completion.wait()
    result.metrics.result()
    feed(engine, pack([]))
    engine.update()
    assert engine.backend_compiles == before
    jax.jit(lambda x: x + 1).lower(np.float32(before)).compile()
    assert engine.backend_compiles == before + 1  # The counter counts.


def test_compile_changes_no_parameter_and_measures_the_idle_device(
    brought_up: tuple[JaxEngine, str, CompileReport],
) -> None:
    engine, before, report = brought_up
    assert engine.parameter_digest() == before
    assert engine.train_step == 0
    assert report.programs >= 5
    assert len(report.idle_wait_seconds) == 5
    assert all(0 <= seconds < 5 for seconds in report.idle_wait_seconds)
    other = twin(engine)
    assert other.compile(SPEC).programs == 0
    feed(other, pack(rows_of()))
    with pytest.raises(EngineError, match="while a step is open"):
        other.compile(SPEC)


def test_at_most_max_inflight_micro_batches_are_dispatched(engine: JaxEngine) -> None:
    assert engine._config.max_inflight == 2
    waited: list[int] = []
    seen: list[int] = []

    class Marker:
        def __init__(self, number: int) -> None:
            self.number = number

        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            waited.append(self.number)
            return np.zeros(2, np.float32)

    def dispatch(params: object, sums: object, batch: object) -> tuple[object, Marker]:
        seen.append(len(seen) - len(waited))
        return sums, Marker(len(seen) - 1)

    assert engine._programs is not None
    engine._programs = replace(engine._programs, fwd_bwd=dispatch)  # type: ignore[arg-type]
    feed(engine, *(pack([], index=i) for i in range(5)))
    assert seen == [0, 1, 1, 1, 1]  # In flight before each dispatch.
    assert waited == [0, 1, 2]  # The oldest first.


# -- abort, failure, scoring ------------------------------------------------------------------------


def test_an_aborted_step_leaves_no_trace(engine: JaxEngine, base: JaxEngine) -> None:
    before = engine.parameter_digest()
    feed(engine, pack(rows_of(7)))
    engine.abort_step()
    assert (engine.parameter_digest(), engine.train_step) == (before, 0)
    never = twin(base)
    for one in (engine, never):
        feed(one, pack(rows_of()))
    assert numbers(engine.update()) == numbers(never.update())
    assert engine.parameter_digest() == never.parameter_digest()


class FailedMarker:
    """A result that is known to have failed, as the backend shows it: reading it raises."""

    def is_ready(self) -> bool:
        return True

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        raise RuntimeError("planned failure")


@pytest.mark.parametrize("when", ["at dispatch", "later"])
def test_a_failure_on_the_device_names_its_micro_batch(
    engine: JaxEngine, base: JaxEngine, when: str
) -> None:
    real = engine._programs
    assert real is not None

    def broken(params: object, sums: object, batch: object) -> tuple[object, FailedMarker]:
        if when == "at dispatch":
            raise RuntimeError("planned failure")
        return real.fwd_bwd(params, sums, batch)[0], FailedMarker()

    engine._programs = replace(real, fwd_bwd=broken)  # type: ignore[arg-type]
    named = r"micro-batch t/0/4 failed on the device: RuntimeError: planned failure"
    prepared = engine.prepare_fwd_bwd_input(pack(rows_of(7), index=4))
    if when == "at dispatch":
        with pytest.raises(DeviceFailure, match=named):
            engine.fwd_bwd(prepared)
    else:
        work = engine.fwd_bwd(prepared)
        for ask in (work.wait, work.peek, engine.wait_for_device):
            with pytest.raises(DeviceFailure, match=named):
                ask()
    engine._programs = real
    engine.abort_step()
    never = twin(base)
    for one in (engine, never):
        feed(one, pack(rows_of()))
        one.update()
    assert engine.parameter_digest() == never.parameter_digest()


def test_b6_scoring_between_micro_batches_is_harmless(engine: JaxEngine, base: JaxEngine) -> None:
    a, b, c, d = rows_of()
    plain = twin(base)
    before = engine.evaluate(pack([a, b, c, d]))
    staged = engine.prepare_fwd_bwd_input(pack([d]))
    feed(engine, pack([a]))
    assert engine.evaluate(pack([a, b, c, d])) == before
    feed(engine, pack([b]))
    engine.compute_logprobs(pack([c]))
    feed(engine, pack([c]))
    engine.fwd_bwd(staged)
    feed(plain, pack([a]), pack([b]), pack([c]), pack([d]))
    for name, leaf in gradient(plain).items():
        np.testing.assert_array_equal(gradient(engine)[name], leaf)
    engine.update()
    assert engine.evaluate(pack([a, b, c, d])) != before


def test_evaluate_is_the_mean_of_the_trained_logprobs(engine: JaxEngine) -> None:
    batch = pack(rows_of())
    mask = batch.arrays["loss_mask"] == 1
    values = engine.evaluate(batch)
    scored = engine.compute_logprobs(batch).logprobs
    assert values["tokens"] == mask.sum()
    assert values["logprob"] == pytest.approx(float(scored[mask].mean()), rel=1e-5)
    assert engine.evaluate(pack([])) == {"logprob": 0, "entropy": 0, "tokens": 0}


def test_the_forward_metric_is_the_mean_gap_to_the_sampler(engine: JaxEngine) -> None:
    batch = pack(rows_of())
    mask = batch.arrays["loss_mask"] == 1
    gaps = np.abs(engine.compute_logprobs(batch).logprobs - batch.arrays["sampling_logprobs"])
    feed(engine, batch)
    found = numbers(engine.update())["sampler_is/token_logdiff_absmean"]
    assert found == pytest.approx(float(gaps[mask].mean()), rel=1e-5)


def test_metrics_are_read_from_other_threads_while_the_next_step_runs(engine: JaxEngine) -> None:
    feed(engine, pack(rows_of()))
    pending = engine.update().metrics
    feed(engine, pack(rows_of(1)))
    found: list[Mapping[str, float]] = []
    threads = [threading.Thread(target=lambda: found.append(pending.result())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(values == found[0] for values in found)
    assert found[0]["micro_batches"] == 1


# -- gates ------------------------------------------------------------------------------------------


def test_gates_drop_whole_sequences_and_may_skip_the_step(gated: JaxEngine) -> None:
    engine = twin(gated)
    assert engine.capabilities.update_waits_for_device
    batch = pack(rows_of())
    real = engine.compute_logprobs(batch).logprobs
    near, far = batch.arrays["sampling_logprobs"], pack(rows_of())
    near[...] = real
    near[0] += 5  # Every token of row 0 is off: both of its sequences go.
    feed(engine, batch)
    result = engine.update()
    values = numbers(result)
    mask = batch.arrays["loss_mask"] == 1
    assert result.applied
    assert values["trained_tokens"] == mask.sum()
    assert values["denominator"] == mask[1:].sum()
    assert values["kept_sequence_fraction"] == pytest.approx(5 / 7)
    far.arrays["sampling_logprobs"][...] = -50
    before = engine.parameter_digest()
    feed(engine, far)
    result = engine.update()
    assert not result.applied
    assert (engine.parameter_digest(), engine.train_step) == (before, 1)
    assert numbers(result)["kept_fraction"] == 0


# -- refusals ---------------------------------------------------------------------------------------


def test_calls_out_of_order_are_refused(engine: JaxEngine) -> None:
    with pytest.raises(EngineError, match="update without a micro-batch"):
        engine.update()
    bare = fresh()
    with pytest.raises(EngineError, match="not compiled"):
        bare.fwd_bwd(bare.prepare_fwd_bwd_input(pack([])))
    with pytest.raises(InvalidBatch, match="'old_logprobs' is missing"):
        fresh(engine_config(LossConfig(old_logprobs="trainer"))).compile(
            replace(SPEC, fields=tuple(f for f in SPEC.fields if f != "old_logprobs"))
        )
    with pytest.raises(InvalidBatch, match="cannot use the field 'routed_experts'"):
        bare.compile(CompileSpec(rows=1, tokens_per_row=8, fields=(*SPEC.fields, "routed_experts")))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", 61, r"field tokens holds 61 at row 1, position 5; ids are 0 to 60"),
        ("tokens", -1, r"field tokens holds -1 at row 1, position 5"),
        (
            "sampling_logprobs",
            np.inf,
            r"field sampling_logprobs is not finite at row 1, position 5",
        ),
        ("loss_mask", 2, r"field loss_mask holds 2 at row 1, position 5"),
        ("segment_ids", 400, r"field segment_ids holds 400 at row 1, position 5"),
    ],
)
def test_check_names_field_row_position_and_value(
    engine: JaxEngine, field: str, value: float, message: str
) -> None:
    batch = pack(rows_of())
    engine.check(batch)
    batch.arrays[field][1, 5] = value
    if field == "segment_ids":
        batch.arrays["loss_mask"][...] = 0
    with pytest.raises(InvalidBatch, match=f"micro-batch t/0/0: {message}"):
        engine.check(batch)


def test_check_refuses_another_shape_and_other_fields(engine: JaxEngine) -> None:
    with pytest.raises(InvalidBatch, match=r"is \[2, 24\]; the engine is compiled for \[4, 24\]"):
        engine.check(pack([], shape=(2, 24)))
    with pytest.raises(InvalidBatch, match="has the fields"):
        engine.check(pack([], fields=SPEC.fields[:5]))
    with pytest.raises(EngineError, match="not this engine's input"):
        engine.fwd_bwd(object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "values", "fault"),
    [
        ("positions", [3, 4, 5, 6, 7], "positions holds 3 at row 0, position 0"),
        ("positions", [0, 1, 2, 2, 3], "positions holds 2 at row 0, position 3"),
        ("segment_ids", [1, 1, 2, 2, 1], "segment_ids holds 1 at row 0, position 4"),
        ("segment_ids", [2, 2, 1, 1, 1], "segment_ids holds 1 at row 0, position 2"),
    ],
)
def test_check_refuses_rows_whose_segments_are_not_whole(
    engine: JaxEngine, field: str, values: list[int], fault: str
) -> None:
    batch = pack([sequences(1, [(3, 2)])])
    batch.arrays["loss_mask"][:] = 0
    batch.arrays[field][0, :5] = values
    if field == "segment_ids":
        changes = np.diff(values, prepend=0) != 0
        starts = np.maximum.accumulate(np.where(changes, np.arange(5), 0))
        batch.arrays["positions"][0, :5] = np.arange(5) - starts
    with pytest.raises(InvalidBatch, match=fault):
        engine.check(batch)
