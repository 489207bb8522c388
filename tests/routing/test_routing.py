"""`--router_replay` and `--require_drop_audit`: refused before a start, and what recorded files bring."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.routing import (
    Routing,
    RoutingUnusable,
    check_drop_audit,
    resolve_routing,
    routed,
)
from orchestrator.sources.parquet import RecordedRollouts
from orchestrator.trajectory import RolloutError, TrajectoryLimits
from prestage.trainer.v1 import trainer_pb2 as pb
from tests.scoring.runs import write_rollouts

ABLE = pb.GetCapabilitiesResponse(
    engine="jax",
    optional_fields=["routed_experts"],
    moe_layers=2,
    top_k=2,
    num_experts=8,
    reports_drop_audit=True,
)
LIMITS = TrajectoryLimits(tokens_per_row=64, vocab_size=100, required_fields=("sampling_logprobs",))
ROUTING = Routing(moe_layers=2, top_k=2, num_experts=8)


def test_what_is_replayed_is_what_the_workers_model_has() -> None:
    assert resolve_routing(False, ABLE) is None
    assert resolve_routing(True, ABLE) == ROUTING
    assert routed(LIMITS, None) == LIMITS
    limits = routed(LIMITS, ROUTING)
    assert limits.required_fields == ("sampling_logprobs", "routed_experts")
    assert (limits.moe_layers, limits.top_k, limits.num_experts) == (2, 2, 8)


def test_replay_on_a_model_without_experts_is_refused() -> None:
    with pytest.raises(RoutingUnusable, match=r"--router_replay .*engine 'dense'"):
        resolve_routing(True, pb.GetCapabilitiesResponse(engine="dense"))


def test_a_worker_that_does_not_report_drops_is_refused_where_the_audit_is_required() -> None:
    silent = pb.GetCapabilitiesResponse(engine="silent")
    with pytest.raises(RoutingUnusable, match=r"--require_drop_audit .*engine 'silent'"):
        check_drop_audit(True, silent)
    check_drop_audit(False, silent)
    check_drop_audit(True, ABLE)


def recorded(path: Path, change: dict[int, list[int] | None] | None = None) -> Path:
    """Made-up rollouts with routing; `change`: other ids in some rows."""
    table = pq.read_table(write_rollouts(path, groups=2))
    lengths = [
        len(prompt) + len(completion)
        for prompt, completion in zip(
            table["prompt_tokens"].to_pylist(), table["completion_tokens"].to_pylist(), strict=True
        )
    ]
    rng = np.random.default_rng(0)
    ids = [rng.integers(-1, 8, length * 4).tolist() for length in lengths]
    for row, other in (change or {}).items():
        ids[row] = other
    column = pa.array(ids, pa.list_(pa.int16()))
    pq.write_table(table.append_column("routed_experts", column), path)
    return path


def test_a_recorded_routing_is_read_token_by_token(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r.parquet")
    flat = pq.read_table(path)["routed_experts"].to_pylist()
    source = RecordedRollouts(path, routed(LIMITS, ROUTING))
    trajectories = [one for group in source.groups() for one in group.trajectories]
    assert len(trajectories) == len(flat)
    for trajectory, ids in zip(trajectories, flat, strict=True):
        assert trajectory.routed_experts is not None
        assert trajectory.routed_experts.shape[1:] == (2, 2)
        assert trajectory.routed_experts.reshape(-1).tolist() == ids


def test_a_run_without_replay_does_not_read_the_routing(tmp_path: Path) -> None:
    source = RecordedRollouts(recorded(tmp_path / "r.parquet"), LIMITS)
    assert all(
        one.routed_experts is None for group in source.groups() for one in group.trajectories
    )


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], r"row 5: group 'g1' index 1: routed_experts is missing"),
        (None, r"row 5: column 'routed_experts' is null"),
        ([0] * 5, r"row 5: column 'routed_experts' holds 5 ids; .* a multiple of 4"),
        ([8, 0, 0, 0], r"routed_experts"),
        ([0] * 4, r"routed_experts has 1 rows but there are"),
    ],
)
def test_f1_f8_a_sample_whose_routing_does_not_fit_is_refused_before_packing(
    tmp_path: Path, ids: list[int] | None, message: str
) -> None:
    path = recorded(tmp_path / "r.parquet", {5: ids})
    with pytest.raises(RolloutError, match=message):
        RecordedRollouts(path, routed(LIMITS, ROUTING))


def test_f8_a_file_without_the_column_is_refused_where_it_is_replayed(tmp_path: Path) -> None:
    path = write_rollouts(tmp_path / "r.parquet", groups=2)
    with pytest.raises(RolloutError, match="routed_experts is missing"):
        RecordedRollouts(path, routed(LIMITS, ROUTING))
