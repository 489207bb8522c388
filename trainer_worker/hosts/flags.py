"""Flags of a trainer that runs as several processes. Imports no engine."""

from __future__ import annotations

import os

from absl import flags

from prestage.strict_flags import define_seconds
from prestage.wire.security import SecurityConfig
from trainer_worker.hosts.group import HostBudgets
from trainer_worker.hosts.settings import HostSettings, host_settings
from trainer_worker.liveness import Budgets

_COUNT = flags.DEFINE_integer(
    "num_processes",
    None,
    "Processes of this trainer, one a host; default: JAX_NUM_PROCESSES, else 1.",
)
_ID = flags.DEFINE_integer(
    "process_id",
    None,
    "Which of them this is; 0 leads and serves. Default: JAX_PROCESS_ID, else JOB_COMPLETION_INDEX.",
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator_address",
    "",
    "host:port of process 0 for jax.distributed; default: JAX_COORDINATOR_ADDRESS.",
)
_HOSTS = flags.DEFINE_string(
    "hosts_address",
    "",
    "host:port of process 0 for its followers; default: the coordinator's, port + 1.",
)
_JOIN = define_seconds(
    "hosts_join_s", 600.0, "Processes that have not met within this end with an error, s."
)
_SILENCE = define_seconds(
    "hosts_silence_s",
    300.0,
    "A follower whose Python does not run for this long is lost, s; compile_budget_s in a compile.",
)


def settings_from_flags(security: SecurityConfig) -> HostSettings | None:
    """None for a trainer of one process. Raises `EngineConfigError`, `AddressError`."""
    return host_settings(
        num_processes=_COUNT.value,
        process_id=_ID.value,
        coordinator_address=_COORDINATOR.value or "",
        hosts_address=_HOSTS.value or "",
        protected=security.tls_dir is not None,
        insecure=security.insecure,
        environment=os.environ,
    )


def host_budgets(worker: Budgets) -> HostBudgets:
    """What the hosts may take, given what the worker may."""
    return HostBudgets(
        join_s=_JOIN.value,
        compile_s=worker.compile_s,
        stall_s=worker.stall_s,
        silence_s=_SILENCE.value,
    )


def engine_settings(engine: str) -> dict[str, str]:
    """Flags that every process must share, name to value."""
    found = {"engine": engine}
    for module, defined in flags.FLAGS.flags_by_module_dict().items():
        if module.startswith("trainer_worker.engines."):
            found |= {flag.name: str(flag.value) for flag in defined}
    return found
