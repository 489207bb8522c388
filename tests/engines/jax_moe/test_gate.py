"""One whole run over gRPC of what a production run needs at once: a MoE model, checkpoints, a staged
boundary, router replay of recorded rollouts, and buffers that overflow and are run again dropless.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.bench.processes import ProcessError, run_orchestrator, worker_process
from prestage.trace import read_trace
from tests.engines.jax_engine.reference import decoder
from trainer_worker.engines.jax_engine.engine import named_leaves
from trainer_worker.engines.jax_engine.model import init_params
from trainer_worker.engines.jax_engine.presets import TINY_MOE

RECORDED = Path(__file__).parents[2] / "data" / "rollouts.parquet"
STEPS, GROUP_SIZE = 3, 8
TRAJECTORIES = STEPS * GROUP_SIZE  # One group a step.
READ = (
    "group_id",
    "index_in_group",
    "prompt_tokens",
    "completion_tokens",
    "logprobs",
    "reward",
    "policy_version",
)


def with_routing(path: Path, *, lacking: int | None = None) -> int:
    """The first recorded trajectories with the experts that an independent router records for them.

    `lacking`: the row that has none. Returns the number of tokens that a run trains.
    """
    table = pq.read_table(RECORDED, columns=list(READ)).slice(0, TRAJECTORIES)
    named = named_leaves(init_params(TINY_MOE, 0))  # type: ignore[arg-type]
    params = {name: np.asarray(leaf, np.float64) for name, leaf in named.items()}
    routing: list[list[int]] = []
    completions = table["completion_tokens"].to_pylist()
    for row, (prompt, completion) in enumerate(
        zip(table["prompt_tokens"].to_pylist(), completions, strict=True)
    ):
        tokens = np.asarray([*prompt, *completion], np.int32)
        _, experts = decoder(TINY_MOE, params, tokens, scores=False)
        assert experts.shape == (len(tokens), 2, 2)
        routing.append([] if row == lacking else experts.reshape(-1).tolist())
    column = pa.array(routing, pa.list_(pa.int16()))
    pq.write_table(table.append_column("routed_experts", column), path)
    return sum(len(completion) for completion in completions)


def orchestrator(
    folder: Path, address: str, rollouts: Path, *more: str, name: str
) -> dict[str, object]:
    result = folder / f"{name}.json"
    run_orchestrator(
        [
            f"--trainer={address}",
            f"--rollouts={rollouts}",
            f"--run_id={name}",
            "--rows=2",
            "--tokens_per_row=1024",
            "--groups_per_batch=1",
            f"--num_steps={STEPS}",
            f"--trace_dir={folder}",
            f"--result_file={result}",
            "--router_replay",
            *more,
        ],
        folder / f"{name}.log",
    )
    loaded: dict[str, object] = json.loads(result.read_text())
    return loaded


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gate_3_staged_replayed_retried_and_checkpointed_drops_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rollouts, broken = tmp_path / "routed.parquet", tmp_path / "broken.parquet"
    tokens = with_routing(rollouts)
    table = pq.read_table(rollouts)
    lists = table["routed_experts"].to_pylist()
    lists[5] = []
    at = table.schema.get_field_index("routed_experts")
    column = pa.array(lists, pa.list_(pa.int16()))
    pq.write_table(table.set_column(at, "routed_experts", column), broken)
    worker = [
        "--engine=jax",
        "--preset=tiny-moe",
        "--learning_rate=1e-3",
        "--ragged_buffer_factor=0.4",
        "--retry_when_tokens_dropped",
        f"--checkpoint_dir={tmp_path / 'checkpoints'}",
    ]
    log = tmp_path / "worker.log"
    with worker_process(worker, log) as running:
        # F8: one sample of a group lacks its routing. Refused before anything is packed or trained.
        with pytest.raises(ProcessError, match=r"the orchestrator ended with 2"):
            orchestrator(tmp_path, running.address, broken, name="broken")
        assert "index 5: routed_experts is missing" in capfd.readouterr().err
        result = orchestrator(
            tmp_path,
            running.address,
            rollouts,
            "--pipeline_step_boundary",
            "--stage_next_microbatch",
            "--require_drop_audit",
            "--checkpoint_every=1",
            name="gate",
        )
    steps = result["steps"]
    assert isinstance(steps, list)
    assert len(steps) == STEPS
    assert result["backend_compiles_in_steps"] == 0
    assert [step["staged_input_used"] for step in steps] == [False, True, True]
    for step in steps:
        metrics = step["metrics"]
        assert metrics["moe_dropped_assignments"] > 0  # The buffers overflowed,
        assert step["dropless_replays"] == metrics["dropless_replays"] >= 1  # it was run again,
        assert metrics["dropped_assignments_used"] == 0  # and no gradient lacks a token.
        assert np.isfinite(metrics["loss"])
        assert metrics["grad_norm"] > 0
        assert metrics["update_norm"] > 0
    assert sum(step["metrics"]["trained_tokens"] for step in steps) == tokens
    calls = [
        record.call
        for path in sorted(tmp_path.glob("*.ndjson"))
        for record in read_trace(path).calls
        if record.run_id == "gate"
    ]
    order = [call for call in calls if call in ("stage_fwd_bwd", "apply_deferred_update")]
    # Each staged input was on the device before the update that ran the overflowed ones again.
    assert order[:4] == ["stage_fwd_bwd", "apply_deferred_update"] * 2
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == [f"step-{STEPS - 1}", f"step-{STEPS}"]
    assert "run again without drops" in log.read_text()
