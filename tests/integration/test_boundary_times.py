"""What the boundary costs, exact on a virtual clock: 1.0 s micro-batches, 0.2 s update, 0.7 s copy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.bench import boundary
from orchestrator.plan import RunPlan
from tests.support.direct import run_direct
from trainer_worker.engines.timed import TimedConfig

RIG = TimedConfig(fwd_bwd_seconds=1.0, update_seconds=0.2, copy_seconds=0.7)
STEPS = 5
ARMS = {
    "stock": {},
    "pipelined": {"pipeline": True},
    "staged_after": {"pipeline": True, "stage": True, "stage_before_update": False},
    "staged": {"pipeline": True, "stage": True},
    "zero_gap": {"pipeline": True, "stage": True, "dispatch_before_metrics": True},
}


def plan(arm: str, **more: int | bool) -> RunPlan:
    return RunPlan(num_steps=STEPS, **{**ARMS[arm], **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("micro_batches", [1, 3, 9])
def test_idle_is_the_copy_in_stock_and_exactly_nothing_when_staged(micro_batches: int) -> None:
    stock = run_direct(plan("stock"), RIG, micro_batches=micro_batches)
    assert len(stock.idle) == STEPS - 1
    assert all(idle >= 0.7 - 1e-9 for idle in stock.idle)
    for arm in ("staged", "zero_gap"):
        run = run_direct(plan(arm), RIG, micro_batches=micro_batches)
        assert run.idle == (0.0,) * (STEPS - 1), arm
        assert run.digest == stock.digest
        assert run.seconds == pytest.approx(stock.seconds - 0.7 * (STEPS - 1))


def test_staged_step_time_is_the_compute_and_the_update() -> None:
    run = run_direct(plan("staged"), RIG)
    # The first step copies its own first input; the last one's update ends the run.
    assert [record.seconds for record in run.records[1:-1]] == pytest.approx([3.2] * 3)


def test_where_the_update_waits_only_staging_before_it_hides_the_whole_copy() -> None:
    """A dropless retry must know the last micro-batch's overflow flag before it updates, so a stage
    after the update can hide behind the update's own 0.2 s only."""
    rig = replace(
        RIG, replays=frozenset({(STEPS + 1, 0)})
    )  # Waits for the flag; nothing overflows.
    idle = {arm: run_direct(plan(arm), rig).idle for arm in ("stock", "staged_after", "staged")}
    boundaries = STEPS - 1
    assert idle["staged"] == (0.0,) * boundaries
    assert idle["staged_after"] == pytest.approx((0.5,) * boundaries)
    assert idle["stock"] == pytest.approx((0.7,) * boundaries)


@pytest.mark.parametrize("index", [0, 2])
def test_a_retry_inside_the_update_changes_time_only_also_after_a_stage(index: int) -> None:
    replays = frozenset((step, index) for step in range(STEPS))
    rig = replace(RIG, replays=replays, replay_seconds=1.0)
    plain = run_direct(plan("stock"), RIG)
    for arm in ARMS:
        run = run_direct(plan(arm), rig)
        assert run.digest == plain.digest, arm
        assert [record.dropless_replays for record in run.records] == [1] * STEPS, arm
        unretried = run_direct(plan(arm), RIG)
        if arm in ("stock", "staged", "zero_gap"):
            assert run.seconds == pytest.approx(unretried.seconds + STEPS), arm
        if arm in ("staged", "zero_gap"):
            assert run.idle == (0.0,) * (STEPS - 1), "the retry is work, and hides the copy as well"
            assert all(record.staged_input_used for record in run.records[1:])


def test_late_rollouts_apply_the_update_without_waiting() -> None:
    run = run_direct(plan("staged"), RIG, late=frozenset({2}))
    assert "stage_fwd_bwd 1 0" in run.listener.lines
    assert "stage_fwd_bwd 2 0" not in run.listener.lines
    assert "stage_fwd_bwd 3 0" in run.listener.lines
    assert run.digest == run_direct(plan("stock"), RIG).digest


def test_the_step_clock_starts_before_a_wait_for_groups_flags_on_or_off() -> None:
    for arm in ARMS:
        run = run_direct(plan(arm), RIG, late=frozenset({2}))
        assert all(record.started_s >= 0 for record in run.records)
        starts = [record.started_s for record in run.records]
        ends = [record.finished_s for record in run.records]
        assert starts == sorted(starts)
        assert all(end >= start for start, end in zip(starts, ends, strict=True))


@pytest.mark.slow
def test_on_the_real_clock_staging_hides_the_copy_and_zero_gap_the_rest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Two processes, medians of 10 boundaries; the bands are predicted before the first arm."""
    assert boundary.main([f"--out={tmp_path}"]) == 0, capsys.readouterr().out
    bands = {
        item["quantity"]: (item["low"], item["high"])
        for item in json.loads((tmp_path / "predictions.json").read_text())["predictions"]
    }
    assert bands["stock/boundary_idle"][0] >= 0.7
    assert bands["staged/boundary_idle"][1] <= 0.02
    assert bands["zero_gap/boundary_idle"][1] <= 0.005
