"""From settings to the two command lines and their environments, for one layout. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from orchestrator.recipes.flagnames import (
    ENV_LIBTPU,
    ENV_MAXTEXT,
    ENV_PIPELINE,
    ENV_STAGE,
    ORCHESTRATOR,
    WORKER,
)
from orchestrator.recipes.keys import KEYS
from orchestrator.recipes.resolve import EXIT_MARGIN_S, STATE_DIR, Settings
from orchestrator.recipes.values import Value, value_text

WORKER_PORT: Final = 7443
WORKER_STATUS_PORT: Final = 7444
WORKER_PROBE_PORT: Final = 7445
WORKER_METRICS_PORT: Final = 9465
COORDINATOR_PORT: Final = 8476
"""Of jax.distributed on host 0; the group's own port is the next one."""
INGEST_PORT: Final = 7453
ORCHESTRATOR_STATUS_PORT: Final = 7454
ORCHESTRATOR_PROBE_PORT: Final = 7455
ORCHESTRATOR_METRICS_PORT: Final = 9464

RUN_DIR: Final = "/run/prestage"
TLS_DIR: Final = "/etc/prestage/tls"
TOKEN_DIR: Final = "/etc/prestage/tokens"

INTERRUPTED: Final = 75
"""Exit status after SIGTERM in a Job (EX_TEMPFAIL): with 0, a pod that was preempted in the middle
of a run would count as succeeded, and the run as complete."""

# The allocator keeps the buffers of payload chunks: twice the throughput of a stream.
_ALLOCATOR: Final = (
    ("MALLOC_MMAP_THRESHOLD_", "67108864"),
    ("MALLOC_TOP_PAD_", "16777216"),
    ("MALLOC_TRIM_THRESHOLD_", "268435456"),
)


@dataclass(frozen=True, kw_only=True)
class Program:
    """One process: what runs, with what environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Both processes."""

    orchestrator: Program
    worker: Program


@dataclass(frozen=True, kw_only=True)
class Site:
    """What a form of deployment decides: addresses and folders."""

    trainer: str  # What the orchestrator dials.
    worker_listen: str
    reachable: bool  # Whether probes and metrics are read from outside the process's network.
    in_a_job: bool  # Whether an exit status of 0 means "complete" to what runs us.
    coordinator: str = ""  # Where the hosts of a worker meet; empty = it is one process.
    run_dir: str = RUN_DIR
    state_dir: str = STATE_DIR


def _flag(table: Mapping[str, str], name: str, value: Value) -> str:
    """`--flag=value`; a switch is `--flag` or `--noflag`."""
    if isinstance(value, bool):
        return f"--{table[name]}" if value else f"--no{table[name]}"
    return f"--{table[name]}={value_text(value)}"


def serves_tls(s: Settings, role: str) -> bool:
    """Whether other hosts reach the program, or it reaches others. A unix socket needs no TLS."""
    return s.text("layout") == "separate" or (role == "orchestrator" and not s.text("rollouts"))


def _serving(
    table: Mapping[str, str], site: Site, s: Settings, role: str, probe: int, metrics: int
) -> list[str]:
    """Flags that both programs have: probes, metrics, certificates, how they end."""
    host = "0.0.0.0" if site.reachable else "127.0.0.1"
    flags = [
        _flag(table, "probe_listen", f"{host}:{probe}"),
        _flag(table, "metrics_address", host),
        _flag(table, "metrics_port", metrics),
    ]
    if serves_tls(s, role):
        flags.append(_flag(table, "tls_dir", TLS_DIR))
        flags.append(_flag(table, "token_dir", TOKEN_DIR))
    # The program ends by itself before it is killed.
    flags.append(_flag(table, "grace_s", s.number("grace_s") - EXIT_MARGIN_S))
    if site.in_a_job:
        flags.append(_flag(table, "interrupted_exit_code", INTERRUPTED))
    return flags


_PLAIN: Final = (
    "num_steps",
    "rows",
    "tokens_per_row",
    "groups_per_batch",
    "group_size",
    "num_minibatches",
    "num_iterations",
    "old_logprobs",
    "stage_before_update",
    "dispatch_before_metrics",
    "checkpoint_every",
    "weight_sync_every",
    "eval_every",
    "val_start_step",
    "require_drop_audit",
    "RETURN_ROUTED_EXPERTS",
)


def orchestrator_program(s: Settings, site: Site) -> Program:
    shared = s.whole("shared_memory_bytes") if site.trainer.startswith("unix:") else 0
    flags = [
        _flag(ORCHESTRATOR, "trainer", site.trainer),
        _flag(ORCHESTRATOR, "run_id", s.text("name")),
    ]
    if s.text("rollouts"):
        flags.append(_flag(ORCHESTRATOR, "rollouts", s.text("rollouts")))
    else:
        flags.append(_flag(ORCHESTRATOR, "listen", f"0.0.0.0:{INGEST_PORT}"))
        flags.append(_flag(ORCHESTRATOR, "journal_dir", f"{site.state_dir}/journal"))
    flags += [
        _flag(ORCHESTRATOR, "health_listen", f"127.0.0.1:{ORCHESTRATOR_STATUS_PORT}"),
        *_serving(
            ORCHESTRATOR,
            site,
            s,
            "orchestrator",
            ORCHESTRATOR_PROBE_PORT,
            ORCHESTRATOR_METRICS_PORT,
        ),
        *(_flag(ORCHESTRATOR, name, s.values[name]) for name in _PLAIN),
        *(
            [_flag(ORCHESTRATOR, "eval_rollouts", s.text("eval_rollouts"))]
            if s.whole("eval_every")
            else []
        ),
        _flag(ORCHESTRATOR, "shared_memory_bytes", shared),
        _flag(ORCHESTRATOR, "trainer_wait_s", s.number("compile_budget_s")),
        _flag(ORCHESTRATOR, "progress", False),
    ]
    environment = {
        ENV_PIPELINE: value_text(s.values["PIPELINE_STEP_BOUNDARY"]),
        ENV_STAGE: s.text("STAGE_NEXT_MICROBATCH"),
        **dict(_ALLOCATOR),
    }
    return Program(argv=("orchestrator", *flags), environment=MappingProxyType(environment))


def worker_program(s: Settings, site: Site) -> Program:
    unix = site.worker_listen.startswith("unix:")
    status = f"{site.worker_listen}.health" if unix else f"127.0.0.1:{WORKER_STATUS_PORT}"
    flags = [
        _flag(WORKER, "listen", site.worker_listen),
        _flag(WORKER, "health_listen", status),
        *_serving(WORKER, site, s, "worker", WORKER_PROBE_PORT, WORKER_METRICS_PORT),
        # Its probes and its watchdog give a compile as long as the startup probe does.
        _flag(WORKER, "compile_budget_s", s.number("compile_budget_s")),
        _flag(WORKER, "state_dir", f"{site.state_dir}/worker"),
        _flag(WORKER, "engine", s.text("engine")),
    ]
    for name in ("trainer_factory", "preset", "checkpoint_dir"):
        if s.text(name):
            flags.append(_flag(WORKER, name, s.text(name)))
    if site.coordinator:
        # Every pod has the same command: which host it is, it reads from JOB_COMPLETION_INDEX.
        flags.append(_flag(WORKER, "num_processes", s.whole("hosts")))
        flags.append(_flag(WORKER, "coordinator_address", site.coordinator))
    names = ("max_inflight", "staging_memory_bytes", "store_memory_bytes", "old_logprobs")
    flags += [_flag(WORKER, name, s.values[name]) for name in names]
    flags.append(_flag(WORKER, "shared_memory", unix and s.whole("shared_memory_bytes") > 0))
    flags.append(_flag(WORKER, "LOGPS_SHARDED_HEAD", s.text("LOGPS_SHARDED_HEAD")))
    if s.values["COMPUTE_LOGPS_CHUNK_SIZE"] is not None:
        flags.append(
            _flag(WORKER, "COMPUTE_LOGPS_CHUNK_SIZE", s.values["COMPUTE_LOGPS_CHUNK_SIZE"])
        )
    for name in ("RAGGED_BUFFER_FACTOR", "RETRY_WHEN_TOKENS_DROPPED"):
        flags.append(_flag(WORKER, name, s.values[name]))
    environment: dict[str, str] = {}
    if s.pairs("LIBTPU_INIT_ARGS"):
        environment[ENV_LIBTPU] = " ".join(
            f"--{name}={value}" for name, value in s.pairs("LIBTPU_INIT_ARGS")
        )
    if s.text("engine") == "maxtext":
        environment[ENV_MAXTEXT] = value_text(maxtext_settings(s))
    environment |= dict(_ALLOCATOR)
    return Program(argv=("trainer_worker", *flags), environment=MappingProxyType(environment))


def maxtext_settings(s: Settings) -> tuple[tuple[str, str], ...]:
    """Every MaxText setting, each once: the keys' own, then the extra ones."""
    own = tuple(
        (key.maxtext, value_text(s.values[name])) for name, key in KEYS.items() if key.maxtext
    )
    return (*own, *s.pairs("MAXTEXT_EXTRA_FLAGS"))


def launch(s: Settings, site: Site) -> Launch:
    return Launch(orchestrator=orchestrator_program(s, site), worker=worker_program(s, site))
