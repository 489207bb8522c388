"""The timed engine is the instrument of the boundary's proofs: its times and its memory are exact."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.bench.synthetic import SyntheticShape, make_batch
from prestage.microbatch import MicroBatch
from trainer_worker.clock import RealClock, VirtualClock
from trainer_worker.engine import DeviceFailure, EngineError, RunPosition
from trainer_worker.engines.timed import TimedConfig, TimedEngine, create_timed

SHAPE = SyntheticShape(rows=1, tokens_per_row=16, real_length=12, micro_batches=9)
RIG = TimedConfig(fwd_bwd_seconds=1.0, update_seconds=0.2, copy_seconds=0.7)
Ids = Sequence[tuple[int, int]]


def batch(step: int, index: int) -> MicroBatch:
    return make_batch(SHAPE, "run", step, index)


def engine(config: TimedConfig = RIG) -> tuple[TimedEngine, VirtualClock]:
    clock = VirtualClock()
    return TimedEngine(config, clock), clock


def train(made: TimedEngine, steps: Sequence[Ids]) -> str:
    """Each inner sequence is one step's micro-batches; returns the parameters' digest."""
    for ids in steps:
        for step, index in ids:
            made.fwd_bwd(made.prepare_fwd_bwd_input(batch(step, index)))
        made.update()
    return made.parameter_digest()


# -- time -----------------------------------------------------------------------------------------


def test_an_unstaged_input_is_copied_before_it_computes() -> None:
    made, clock = engine()
    work = made.fwd_bwd(made.prepare_fwd_bwd_input(batch(0, 0)))
    assert clock.now() == 0.0, "both calls only dispatch"
    assert (work.span.started_s, work.span.finished_s) == (0.7, 1.7)


def test_a_copy_overlaps_compute_and_copies_come_one_after_another() -> None:
    made, _ = engine()
    first = made.fwd_bwd(made.prepare_fwd_bwd_input(batch(0, 0)))
    inputs = [made.prepare_fwd_bwd_input(batch(0, index)) for index in (1, 2)]
    assert [i.span.started_s for i in inputs] == pytest.approx([0.7, 1.4])
    assert [i.span.finished_s for i in inputs] == pytest.approx([1.4, 2.1])
    second = made.fwd_bwd(inputs[0])
    assert first.span.finished_s == second.span.started_s == 1.7


def test_at_most_max_inflight_are_dispatched() -> None:
    made, clock = engine(replace(RIG, copy_seconds=0.0, max_inflight=2))
    ended = []
    for index in range(4):
        made.fwd_bwd(made.prepare_fwd_bwd_input(batch(0, index)))
        ended.append(clock.now())
    assert ended == [0.0, 0.0, 1.0, 2.0]


def test_a_rate_makes_copies_as_long_as_their_bytes() -> None:
    one = batch(0, 0)
    made, _ = engine(replace(RIG, copy_seconds=0.5, copy_bytes_per_second=one.payload_bytes * 2))
    assert made.prepare_fwd_bwd_input(one).span.finished_s == 1.0


def test_a_wait_on_an_idle_device_reads_the_idle_wait() -> None:
    made, _ = engine(replace(RIG, idle_wait_seconds=2.8))
    assert made.wait_for_device() == pytest.approx(2.8)
    assert made.wait_for_device() == pytest.approx(2.8)
    plain, _ = engine()
    assert plain.wait_for_device() == 0.0
    plain.fwd_bwd(plain.prepare_fwd_bwd_input(batch(0, 0)))
    assert plain.wait_for_device() == pytest.approx(1.7)


def test_a_wait_on_the_real_clock_never_ends_early() -> None:
    clock = RealClock()
    made = TimedEngine(replace(RIG, fwd_bwd_seconds=0.05, copy_seconds=0.0), clock)
    work = made.fwd_bwd(made.prepare_fwd_bwd_input(batch(0, 0)))
    work.wait()
    assert work.span.finished_s is not None
    assert clock.now() >= work.span.finished_s


# -- memory of what was applied -------------------------------------------------------------------


ORDER: list[list[tuple[int, int]]] = [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
WRONG: dict[str, list[list[tuple[int, int]]]] = {
    "doubled": [[(0, 0), (0, 1), (0, 1)], [(1, 0), (1, 1)]],
    "lost": [[(0, 0)], [(1, 0), (1, 1)]],
    "reordered": [[(0, 1), (0, 0)], [(1, 0), (1, 1)]],
    "moved to the next step": [[(0, 0)], [(0, 1), (1, 0), (1, 1)]],
    "one update for two steps": [[(0, 0), (0, 1), (1, 0), (1, 1)]],
    "steps swapped": [[(1, 0), (1, 1)], [(0, 0), (0, 1)]],
    "other content": [[(0, 0), (0, 2)], [(1, 0), (1, 1)]],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_any_other_order_or_count_shows_in_the_parameters(wrong: str) -> None:
    assert train(engine()[0], WRONG[wrong]) != train(engine()[0], ORDER)


@given(
    seconds=st.tuples(*[st.floats(0, 3)] * 3),
    max_inflight=st.integers(1, 4),
    replays=st.frozensets(st.sampled_from([(0, 0), (0, 1), (1, 1)])),
    staged=st.booleans(),
)
def test_times_replays_and_staging_never_show_in_the_parameters(
    seconds: tuple[float, float, float],
    max_inflight: int,
    replays: frozenset[tuple[int, int]],
    staged: bool,
) -> None:
    fwd_bwd_s, update_s, copy_s = seconds
    config = TimedConfig(
        fwd_bwd_seconds=fwd_bwd_s,
        update_seconds=update_s,
        copy_seconds=copy_s,
        max_inflight=max_inflight,
        replays=replays,
        replay_seconds=1.0,
    )
    made, _ = engine(config)
    counted = 0
    prepared = made.prepare_fwd_bwd_input(batch(0, 0))
    for step in range(2):
        made.fwd_bwd(prepared)
        made.fwd_bwd(made.prepare_fwd_bwd_input(batch(step, 1)))
        if staged:
            prepared = made.prepare_fwd_bwd_input(batch(step + 1, 0))
        counted += made.update().dropless_replays
        if not staged:
            prepared = made.prepare_fwd_bwd_input(batch(step + 1, 0))
    assert made.parameter_digest() == train(engine()[0], ORDER)
    assert counted == len(replays)


def test_a_replay_takes_its_time_inside_the_update_also_after_a_stage() -> None:
    made, clock = engine(replace(RIG, replays=frozenset({(0, 0)}), replay_seconds=0.5))
    made.fwd_bwd(made.prepare_fwd_bwd_input(batch(0, 0)))
    staged = made.prepare_fwd_bwd_input(batch(1, 0))
    update = made.update()
    assert clock.now() == pytest.approx(1.7), "it waits for the overflow flag"
    assert update.completion.peek().finished_s == pytest.approx(2.4)
    work = made.fwd_bwd(staged)
    assert work.span.started_s == pytest.approx(2.4), "the staged input was ready at 1.4"


def test_an_aborted_step_leaves_no_trace() -> None:
    made, _ = engine()
    made.fwd_bwd(made.prepare_fwd_bwd_input(batch(0, 1)))
    made.abort_step()
    assert train(made, ORDER) == train(engine()[0], ORDER)


def test_a_step_without_denominator_is_skipped_and_keeps_the_parameters() -> None:
    made, _ = engine()
    before = made.parameter_digest()
    empty = batch(0, 0)
    arrays = {**empty.arrays, "loss_mask": empty.arrays["loss_mask"] * 0}
    made.fwd_bwd(made.prepare_fwd_bwd_input(MicroBatch(**{**empty.__dict__, "arrays": arrays})))
    assert not made.update().applied
    assert (made.train_step, made.parameter_digest()) == (0, before)


# -- failures, checkpoints, weights ---------------------------------------------------------------


def test_planned_failures_come_at_the_call_or_on_the_device() -> None:
    made, _ = engine(
        replace(RIG, fail_call=frozenset({"stage 1 0"}), fail_device=frozenset({(0, 0)}))
    )
    work = made.fwd_bwd(made.prepare_fwd_bwd_input(batch(0, 0)))
    with pytest.raises(DeviceFailure, match="planned failure on the device") as failed:
        work.wait()
    assert failed.value.batch_id == batch(0, 0).id
    with pytest.raises(EngineError, match="planned failure of stage 1 0"):
        made.prepare_fwd_bwd_input(batch(1, 0))


def test_r30_a_checkpoint_counts_once_it_is_durable_and_brings_its_own_step_back(
    tmp_path: Path,
) -> None:
    clock = VirtualClock()
    made = TimedEngine(RIG, clock, tmp_path)
    train(made, ORDER[:1])
    digest = made.parameter_digest()
    position = RunPosition(
        run_id="run", step=1, train_step=1, epoch=3, last_seq=9, data_cursor="here"
    )
    save = made.begin_save(position)
    train(made, ORDER[1:])
    assert made.durable_step() is None
    save.wait()
    assert made.durable_step() == 1
    fresh = TimedEngine(RIG, clock, tmp_path)
    assert fresh.restore(2) is None
    assert fresh.restore(None) == position
    assert (fresh.train_step, fresh.parameter_digest()) == (1, digest)
    (tmp_path / "step-2.partial").write_text("torn")  # What a kill leaves behind.
    assert fresh.durable_step() == 1


def test_a_save_may_be_finished_from_another_thread(tmp_path: Path) -> None:
    made = TimedEngine(replace(RIG, checkpoint_seconds=0.01), RealClock(), tmp_path)
    save = made.begin_save(
        RunPosition(run_id="run", step=0, train_step=0, epoch=1, last_seq=0, data_cursor="")
    )
    thread = threading.Thread(target=save.wait)
    thread.start()
    thread.join(timeout=10)
    assert made.durable_step() == 0


def test_a_pinned_version_stays_as_it_was_and_a_budget_is_kept() -> None:
    made, _ = engine()
    train(made, ORDER[:1])
    pinned_bytes = made.prepare_weight_sync(1000)
    before = made.export_tensor(1, "chain").tobytes()
    train(made, ORDER[1:])
    assert made.export_tensor(1, "chain").tobytes() == before
    assert len(before) == pinned_bytes
    with pytest.raises(MemoryError, match="budget"):
        made.prepare_weight_sync(pinned_bytes - 1)
    made.release_weight_sync(1)
    with pytest.raises(EngineError, match="not pinned"):
        made.export_manifest(1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fwd_bwd_seconds", -1.0),
        ("update_seconds", float("nan")),
        ("copy_seconds", float("inf")),
        ("checkpoint_seconds", -0.1),
        ("compile_seconds", 1e7),
        ("copy_bytes_per_second", -1.0),
        ("max_inflight", 0),
    ],
)
def test_a_device_that_cannot_be_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        replace(RIG, **{field: value})  # type: ignore[arg-type]


def test_it_offers_every_face() -> None:
    parts = create_timed(RIG, VirtualClock())
    assert parts.scoring is not None and parts.weights is not None
    assert parts.checkpoint is None, "without a folder it keeps none, and says so"
    assert not parts.training.capabilities.can_checkpoint
