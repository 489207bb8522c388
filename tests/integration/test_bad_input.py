"""Bad input ends in one clear error that names it, before anything was trained."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from absl import flags

from orchestrator import app
from orchestrator import flags as orchestrator_flags
from orchestrator.bringup import WorkerUnreachable
from orchestrator.feeder import SourceError
from orchestrator.flags import ConfigError, config_from_flags
from orchestrator.recorded import recorded_source
from tests.support.rig import address_of, served
from trainer_worker.clock import RealClock
from trainer_worker.engines.timed import TimedConfig, create_timed

ROLLOUTS = Path(__file__).parent.parent / "data" / "rollouts.parquet"


def run(
    address: str, rollouts: Path, *extra: str, environment: dict[str, str] | None = None
) -> app.RunResult:
    """One run in this process, as the console script would make it."""
    flags.FLAGS.unparse_flags()
    flags.FLAGS(
        [
            "orchestrator",
            f"--trainer={address}",
            f"--rollouts={rollouts}",
            "--num_steps=1",
            "--trainer_wait_s=0.2",
            "--noprogress",
            *extra,
        ]
    )
    try:
        return app.run(config_from_flags(environment or {}), recorded_source)
    finally:
        flags.FLAGS.unparse_flags()
        for name in flags.FLAGS.flags_by_module_dict()[orchestrator_flags.__name__]:
            name.unparse()


def rows(count: int = 8) -> list[dict[str, object]]:
    return pq.read_table(ROLLOUTS).slice(0, count).to_pylist()


def write(path: Path, items: list[dict[str, object]], schema: pa.Schema | None = None) -> Path:
    schema = schema or pq.read_schema(ROLLOUTS)
    pq.write_table(pa.Table.from_pylist(items, schema=schema), path)
    return path


def _set(name: str, change: Callable[[object], object], at: int = 3) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        items = rows()
        items[at][name] = change(items[at][name])
        return write(path, items)

    return make


def _item(position: int, value: object) -> Callable[[object], object]:
    def change(values: object) -> object:
        assert isinstance(values, list)
        return [*values[:position], value, *values[position + 1 :]]

    return change


def _unknown_column(path: Path) -> Path:
    table = pq.read_table(ROLLOUTS).slice(0, 8)
    pq.write_table(table.append_column("surprise", pa.array([1] * 8)), path)
    return path


def _wrong_dtype(path: Path) -> Path:
    table = pq.read_table(ROLLOUTS).slice(0, 8)
    index = table.schema.get_field_index("reward")
    text = pa.array([str(value) for value in table["reward"].to_pylist()])
    pq.write_table(table.set_column(index, "reward", text), path)
    return path


def _missing_member(path: Path) -> Path:
    return write(path, [*rows()[:3], *rows()[4:]])


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "unknown column": (_unknown_column, "surprise"),
    "wrong dtype": (_wrong_dtype, "reward"),
    "ragged lengths": (_set("logprobs", lambda values: list(values)[:-1]), "logprobs"),  # type: ignore[call-overload]
    "token id beyond the vocabulary": (_set("completion_tokens", _item(0, 49_152)), "49152"),
    "NaN log-prob": (_set("logprobs", _item(0, float("nan"))), "(?i)nan|finite"),
    "NaN reward": (_set("reward", lambda value: float("nan")), "(?i)nan|finite"),
    "missing group member": (_missing_member, "train-"),
    "duplicate index": (_set("index_in_group", lambda value: 2), "index"),
    "empty completion": (_set("completion_tokens", lambda values: []), "completion"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_file_is_refused_before_anything_is_trained(bad: str, tmp_path: Path) -> None:
    make, says = BAD[bad]
    rollouts = make(tmp_path / "bad.parquet")
    parts = create_timed(TimedConfig(vocab_size=49_152), RealClock())
    with served(parts) as server:
        with pytest.raises(SourceError, match=says) as error:
            run(address_of(server), rollouts)
        assert len(str(error.value).splitlines()) == 1
        state = server.service.state()
        assert (state.epoch, state.step, state.micro_step, state.compiled) == (0, 0, 0, False)


def test_a_trajectory_longer_than_a_row_is_refused_with_both_numbers() -> None:
    parts = create_timed(TimedConfig(vocab_size=49_152), RealClock())
    with served(parts) as server:
        with pytest.raises(SourceError, match=r"\b256\b"):
            run(address_of(server), ROLLOUTS, "--tokens_per_row=256")
        assert server.service.state().epoch == 0


def test_an_unreachable_worker_is_named() -> None:
    with pytest.raises(WorkerUnreachable, match=r"/nowhere\.sock"):
        run("unix:///tmp/nowhere.sock", ROLLOUTS)


def test_staging_without_pipelining_is_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline_step_boundary"):
        run("unix:///tmp/nowhere.sock", ROLLOUTS, "--stage_next_microbatch")


@pytest.mark.parametrize("name", ["PIPELINE_STEP_BOUNDARY", "STAGE_NEXT_MICROBATCH"])
def test_an_odd_environment_switch_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*TRUEE"):
        run("unix:///tmp/nowhere.sock", ROLLOUTS, environment={name: "TRUEE"})


def test_a_worker_that_cannot_stage_is_refused_at_bring_up_by_what_it_lacks() -> None:
    parts = create_timed(TimedConfig(can_stage=False, can_defer_update=False), RealClock())
    with served(parts) as server:
        staged = ("--pipeline_step_boundary", "--stage_next_microbatch")
        with pytest.raises(ConfigError, match=r"prepare_fwd_bwd_input.*defer_update"):
            run(address_of(server), ROLLOUTS, *staged)
        assert not server.service.state().compiled


def test_auto_runs_unstaged_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    parts = create_timed(TimedConfig(can_stage=False, fwd_bwd_seconds=0.001), RealClock())
    with served(parts) as server:
        run(
            address_of(server),
            ROLLOUTS,
            "--pipeline_step_boundary",
            "--stage_next_microbatch=auto",
        )
        assert server.service.state().step == 1
    warnings = [r for r in caplog.records if "cannot stage" in r.getMessage()]
    assert len(warnings) == 1


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )


def test_the_console_scripts_say_it_in_one_line_and_exit_with_2() -> None:
    odd = command(
        "orchestrator.main", "--trainer=unix:///tmp/x.sock", "--pipeline_step_boundary=TRUEE"
    )
    assert odd.returncode != 0
    assert "TRUEE" in odd.stderr and "pipeline_step_boundary" in odd.stderr
    missing = command("orchestrator.main", "--trainer=unix:///tmp/x.sock")
    assert missing.returncode == 2
    assert missing.stderr.strip() == (
        "orchestrator: --rollouts is not set: give a Parquet file of recorded rollouts,"
        " or --listen and --journal_dir to take live ones"
    )
    unknown = command("orchestrator.main", "fly")
    assert unknown.returncode == 2 and "unknown command 'fly'" in unknown.stderr
    with served() as server:
        second = command("trainer_worker.main", f"--listen={address_of(server)}", "--engine=timed")
    assert second.returncode == 2
    assert "another process already listens" in second.stderr


def test_a_micro_batch_larger_than_the_worker_keeps_is_refused_at_start() -> None:
    with (
        served(create_timed(TimedConfig(), RealClock())) as server,
        pytest.raises(ConfigError, match=r"--rows=1000000 .* the worker keeps at most"),
    ):
        run(address_of(server), ROLLOUTS, "--rows=1000000", "--tokens_per_row=65536")


def test_a_second_pass_over_the_file_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with served(create_timed(TimedConfig(fwd_bwd_seconds=0.001), RealClock())) as server:
        run(address_of(server), ROLLOUTS, "--num_steps=3", "--groups_per_batch=24")
    passes = [r.getMessage() for r in caplog.records if "pass 2 over them begins" in r.getMessage()]
    assert len(passes) == 1
    assert "groups are used" in passes[0]


def test_a_run_that_is_over_says_that_nothing_was_left_to_train() -> None:
    with served(create_timed(TimedConfig(fwd_bwd_seconds=0.001), RealClock())) as server:
        first = run(address_of(server), ROLLOUTS)
        again = run(address_of(server), ROLLOUTS)
    assert "nothing was trained" not in app.summary_text(first)
    text = app.summary_text(again)
    assert "nothing was trained: this run is at its last step already" in text
    assert "step 0: an earlier process of this run trained and closed it" in text


def test_checkpoints_that_the_worker_cannot_make_are_refused_at_start() -> None:
    with (
        served(create_timed(TimedConfig(), RealClock())) as server,
        pytest.raises(ConfigError, match=r"--checkpoint_every is 2.*--checkpoint_dir"),
    ):
        run(address_of(server), ROLLOUTS, "--checkpoint_every=2")


def test_a_flag_that_cannot_be_used_ends_with_2_and_help_with_0() -> None:
    for module in ("orchestrator.main", "trainer_worker.main"):
        odd = command(module, "--no_such_flag=1")
        assert odd.returncode == 2 and "no_such_flag" in odd.stderr
        assert "Traceback" not in odd.stderr
        assert command(module, "--help").returncode == 0


def test_a_restarted_run_keeps_the_trace_of_the_process_before(tmp_path: Path) -> None:
    with served(create_timed(TimedConfig(fwd_bwd_seconds=0.001), RealClock())) as server:
        for _ in range(2):
            run(address_of(server), ROLLOUTS, f"--trace_dir={tmp_path}")
    names = sorted(path.name for path in tmp_path.glob("orchestrator*.ndjson"))
    assert names == ["orchestrator-2.ndjson", "orchestrator.ndjson"]
