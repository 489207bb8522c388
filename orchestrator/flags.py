"""The orchestrator's flags and environment, parsed strictly into one frozen config.

Precedence for every key: an explicit flag, then the environment, then the default. A conflict
between flag and environment is returned as a note.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from absl import flags

from orchestrator.ingest.flags import LiveFlags, live_from_flags
from orchestrator.plan import PlanError, RunPlan
from orchestrator.routing import Routing
from prestage.strict_flags import (
    define_seconds,
    define_strict_bool,
    environment_bool,
    parse_strict_bool,
)
from prestage.wire.channel import check_address
from prestage.wire.codec import check_run_id
from prestage.wire.errors import CodecError


class ConfigError(ValueError):
    """Flags that cannot be used; names the flag, its value and the fix."""


class Staging(enum.Enum):
    """--stage_next_microbatch: `auto` warns and runs unstaged where the worker cannot stage."""

    OFF = "off"
    ON = "on"
    AUTO = "auto"


PIPELINE_ENV: Final = "PIPELINE_STEP_BOUNDARY"
STAGE_ENV: Final = "STAGE_NEXT_MICROBATCH"


class _StagingParser(flags.ArgumentParser[str]):
    def parse(self, argument: str | bool) -> str:
        return _staging("--stage_next_microbatch", str(argument)).value

    def flag_type(self) -> str:
        return "on, off or auto"


def _staging(name: str, text: str) -> Staging:
    if text.strip().lower() == "auto":
        return Staging.AUTO
    try:
        return Staging.ON if parse_strict_bool(name, text) else Staging.OFF
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from error


class _StagingFlag(flags.Flag[str]):
    def __init__(self) -> None:
        super().__init__(
            parser=_StagingParser(),
            serializer=flags.ArgumentSerializer(),
            name="stage_next_microbatch",
            default="off",
            help_string="Stage the next step's first micro-batch: on, off or auto (needs"
            " --pipeline_step_boundary).",
            boolean=True,
        )


TRAINER = flags.DEFINE_string("trainer", None, "The worker: unix:///path or host:port.")
ROLLOUTS = flags.DEFINE_string("rollouts", None, "Recorded rollouts, a Parquet file.")
RUN_ID = flags.DEFINE_string("run_id", "run", "Name of the run.")
NUM_STEPS = flags.DEFINE_integer("num_steps", 4, "Optimizer steps.")
ROWS = flags.DEFINE_integer("rows", 4, "Rows of a micro-batch.")
TOKENS = flags.DEFINE_integer("tokens_per_row", 1024, "Tokens per row.")
GROUPS = flags.DEFINE_integer("groups_per_batch", 4, "Rollout groups of one rollout batch.")
GROUP_SIZE = flags.DEFINE_integer("group_size", 8, "Trajectories of a group.")
MINIBATCHES = flags.DEFINE_integer(
    "num_minibatches", 1, "Optimizer steps that share a rollout batch out between them."
)
ITERATIONS = flags.DEFINE_integer("num_iterations", 1, "Times that a rollout batch is trained.")
ADVANTAGE = flags.DEFINE_enum(
    "advantage", "grpo", ("grpo", "dr_grpo", "rloo"), "Advantage estimator."
)
ADVANTAGE_STD = flags.DEFINE_enum(
    "advantage_std", "population", ("population", "sample"), "Standard deviation of a group."
)
ZERO_SPREAD = flags.DEFINE_enum(
    "zero_spread", "keep", ("keep", "drop"), "Groups whose rewards are all equal."
)
OLD_LOGPROBS = flags.DEFINE_enum(
    "old_logprobs",
    "current",
    ("current", "sampler", "trainer"),
    "The importance ratio's denominator; must match the worker's.",
)
VOCAB = flags.DEFINE_integer("vocab_size", 0, "Token ids below this; 0 = the worker's.")
PIPELINE = define_strict_bool(
    "pipeline_step_boundary", False, f"Pipeline the step boundary (environment: {PIPELINE_ENV})."
)
flags.DEFINE_flag(_StagingFlag())
BEFORE_UPDATE = define_strict_bool("stage_before_update", True, "Stage before the update.")
ZERO_GAP = define_strict_bool(
    "dispatch_before_metrics", False, "Dispatch the staged input before reading the metrics."
)
ROUTER_REPLAY = define_strict_bool(
    "router_replay",
    False,
    "Train each token through the experts that its rollout recorded; every trajectory must bring"
    " them.",
)
DROP_AUDIT = define_strict_bool(
    "require_drop_audit", False, "Refuse a worker that does not report dropped MoE assignments."
)
CHECKPOINT_EVERY = flags.DEFINE_integer("checkpoint_every", 0, "Steps; 0 = never.")
SYNC_EVERY = flags.DEFINE_integer("weight_sync_every", 0, "Steps; 0 = never.")
EVAL_EVERY = flags.DEFINE_integer("eval_every", 0, "Steps between evaluations; 0 = never.")
EVAL_ROLLOUTS = flags.DEFINE_string(
    "eval_rollouts", "", "Recorded rollouts that evaluations score, a Parquet file."
)
SCORES_DIR = flags.DEFINE_string(
    "scores_dir",
    "",
    "Folder for trainer-computed old log-probs, so that another process can go on within a rollout"
    " batch; default: in --journal_dir, else none.",
)
VAL_START = flags.DEFINE_integer(
    "val_start_step", 0, "Checkpoints from this step (from 1) are scored: not staged; 0 = none."
)
LATCH_AFTER = flags.DEFINE_integer(
    "latch_after", 3, "Boundaries in a row that hid nothing before staging turns itself off."
)
LATCH_HIDDEN = define_seconds(
    "latch_hidden_seconds", 0.05, "A stage that hid less than this hid nothing, s.", zero=True
)
TRAINER_WAIT = define_seconds("trainer_wait_s", 60.0, "Wait for the worker to come up, s.")
DATA_WAIT = define_seconds("data_wait_s", 3600.0, "Wait for the next micro-batch, s.")
TRACE_DIR = flags.DEFINE_string("trace_dir", "", "Folder for NDJSON traces; empty: none.")
RESULT = flags.DEFINE_string("result_file", "", "Where to write the run's result as JSON.")
PROGRESS = define_strict_bool("progress", True, "Show a progress bar on the terminal.")
SHARED_MEMORY = flags.DEFINE_integer(
    "shared_memory_bytes",
    1 << 30,
    "Shared memory for payloads when the worker is on this host; 0 = gRPC streams.",
    lower_bound=0,
)


@dataclass(frozen=True, kw_only=True)
class OrchestratorConfig:
    """Everything one run is told."""

    trainer: str
    rollouts: Path | None  # Recorded rollouts; None: a live run.
    run_id: str
    plan: RunPlan  # With `stage` as asked; `staging` says whether it may fall back.
    staging: Staging
    rows: int
    tokens_per_row: int
    groups_per_batch: int
    group_size: int
    num_minibatches: int
    num_iterations: int
    advantage: str
    advantage_std: str
    zero_spread: str
    old_logprobs: str
    vocab_size: int
    trainer_wait_s: float
    data_wait_s: float
    trace_dir: Path | None
    result_file: Path | None
    progress: bool
    router_replay: bool = False
    routing: Routing | None = None  # What is replayed; known once the worker is reached.
    require_drop_audit: bool = False
    live: LiveFlags | None = None  # Where rollouts come in; None: a recorded run.
    shared_memory_bytes: int = 0
    eval_rollouts: Path | None = None  # With plan.eval_every.
    scores_dir: Path | None = None  # Keeps trainer-computed old log-probs of a rollout batch.
    notes: tuple[str, ...] = ()


def _positive(name: str, value: int, least: int = 1) -> int:
    if value < least:
        raise ConfigError(f"--{name} is {value}; use {least} or more")
    return value


def _switches(environment: Mapping[str, str]) -> tuple[bool, Staging, tuple[str, ...]]:
    """Pipelining and staging, by the one rule of precedence."""
    values = flags.FLAGS
    notes: list[str] = []
    pipeline = bool(PIPELINE.value)
    from_env = environment_bool(environment, PIPELINE_ENV)
    if from_env is not None:
        if values["pipeline_step_boundary"].present:
            if from_env != pipeline:
                notes.append(
                    f"--pipeline_step_boundary={pipeline} overrides {PIPELINE_ENV}={from_env}"
                )
        else:
            pipeline = from_env
    staging = Staging(values["stage_next_microbatch"].value)
    present = bool(values["stage_next_microbatch"].present)
    text = environment.get(STAGE_ENV)
    if text is not None:
        wanted = _staging(f"environment variable {STAGE_ENV}", text)
        if not present:
            staging = wanted
        elif wanted is not staging:
            notes.append(
                f"--stage_next_microbatch={staging.value} overrides {STAGE_ENV}={wanted.value}"
            )
    elif from_env and not present and not values["pipeline_step_boundary"].present:
        staging = Staging.ON  # The recipe's switch: staging follows pipelining unless set.
    return pipeline, staging, tuple(notes)


def _intake() -> tuple[Path | None, LiveFlags | None]:
    """Where the rollouts come from: one of the two. Raises `ConfigError`, `ValueError`."""
    live = live_from_flags()
    if live is not None:
        if ROLLOUTS.value:
            raise ConfigError(
                f"--rollouts is {ROLLOUTS.value} and --listen is {live.listen}: a run trains on"
                " recorded rollouts or takes live ones; leave one of them out"
            )
        return None, live
    if not ROLLOUTS.value:
        raise ConfigError(
            "--rollouts is not set: give a Parquet file of recorded rollouts, or --listen and"
            " --journal_dir to take live ones"
        )
    rollouts = Path(ROLLOUTS.value)
    if not rollouts.is_file():
        raise ConfigError(f"--rollouts {rollouts} is no file")
    return rollouts, None


def _scores_dir(live: LiveFlags | None) -> Path | None:
    if SCORES_DIR.value:
        return Path(SCORES_DIR.value)
    return None if live is None else live.journal_dir / "scores"


def _eval_rollouts() -> Path | None:
    """What evaluations read; None without any. Raises `ConfigError`."""
    every = _positive("eval_every", EVAL_EVERY.value, 0)
    if bool(every) != bool(EVAL_ROLLOUTS.value):
        have, lack = ("eval_every", "eval_rollouts") if every else ("eval_rollouts", "eval_every")
        raise ConfigError(
            f"--{have} is set without --{lack}: an evaluation needs both, the recorded rollouts and"
            f" how often; give --{lack}, or drop --{have}"
        )
    if not every:
        return None
    path = Path(EVAL_ROLLOUTS.value or "")
    if not path.is_file():
        raise ConfigError(f"--eval_rollouts {path} is no file")
    return path


def config_from_flags(environment: Mapping[str, str]) -> OrchestratorConfig:
    """Build the config. Raises `ConfigError` or `ValueError` naming the flag."""
    if not TRAINER.value:
        raise ConfigError(
            "--trainer is not set: give the worker's address, unix:///path or host:port"
        )
    check_address("--trainer", TRAINER.value)
    rollouts, live = _intake()
    try:
        check_run_id(RUN_ID.value or "")
    except CodecError as error:
        raise ConfigError(f"--{error}") from error
    eval_rollouts = _eval_rollouts()
    pipeline, staging, notes = _switches(environment)
    try:
        plan = RunPlan(
            num_steps=_positive("num_steps", NUM_STEPS.value),
            pipeline=pipeline,
            stage=staging is not Staging.OFF,
            stage_before_update=bool(BEFORE_UPDATE.value),
            dispatch_before_metrics=bool(ZERO_GAP.value),
            checkpoint_every=CHECKPOINT_EVERY.value,
            weight_sync_every=SYNC_EVERY.value,
            eval_every=EVAL_EVERY.value,
            val_start_step=VAL_START.value,
            trainer_logprobs=OLD_LOGPROBS.value == "trainer",
            latch_after=LATCH_AFTER.value,
            latch_hidden_seconds=LATCH_HIDDEN.value,
        )
    except PlanError as error:
        raise ConfigError(str(error)) from error
    return OrchestratorConfig(
        trainer=TRAINER.value,
        rollouts=rollouts,
        live=live,
        run_id=RUN_ID.value or "",
        plan=plan,
        staging=staging,
        rows=_positive("rows", ROWS.value),
        tokens_per_row=_positive("tokens_per_row", TOKENS.value, 2),
        groups_per_batch=_positive("groups_per_batch", GROUPS.value),
        group_size=_positive("group_size", GROUP_SIZE.value),
        num_minibatches=_positive("num_minibatches", MINIBATCHES.value),
        num_iterations=_positive("num_iterations", ITERATIONS.value),
        advantage=ADVANTAGE.value or "",
        advantage_std=ADVANTAGE_STD.value or "",
        zero_spread=ZERO_SPREAD.value or "",
        old_logprobs=OLD_LOGPROBS.value or "",
        vocab_size=VOCAB.value,
        trainer_wait_s=TRAINER_WAIT.value,
        data_wait_s=DATA_WAIT.value,
        trace_dir=Path(TRACE_DIR.value) if TRACE_DIR.value else None,
        result_file=Path(RESULT.value) if RESULT.value else None,
        progress=bool(PROGRESS.value),
        router_replay=bool(ROUTER_REPLAY.value),
        require_drop_audit=bool(DROP_AUDIT.value),
        shared_memory_bytes=SHARED_MEMORY.value,
        eval_rollouts=eval_rollouts,
        scores_dir=_scores_dir(live),
        notes=notes,
    )
