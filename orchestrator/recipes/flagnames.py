"""The one table of flag and environment names that rendering uses. Nothing else spells a flag.

A test holds every name against the two programs' own `--help`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

ORCHESTRATOR: Final = MappingProxyType(
    {
        # Recipe key or fact of the layout -> flag.
        "trainer": "trainer",
        "rollouts": "rollouts",
        "listen": "listen",
        "journal_dir": "journal_dir",
        "run_id": "run_id",
        "num_steps": "num_steps",
        "rows": "rows",
        "tokens_per_row": "tokens_per_row",
        "groups_per_batch": "groups_per_batch",
        "group_size": "group_size",
        "num_minibatches": "num_minibatches",
        "num_iterations": "num_iterations",
        "old_logprobs": "old_logprobs",
        "stage_before_update": "stage_before_update",
        "dispatch_before_metrics": "dispatch_before_metrics",
        "checkpoint_every": "checkpoint_every",
        "weight_sync_every": "weight_sync_every",
        "eval_every": "eval_every",
        "eval_rollouts": "eval_rollouts",
        "val_start_step": "val_start_step",
        "require_drop_audit": "require_drop_audit",
        "RETURN_ROUTED_EXPERTS": "router_replay",
        "shared_memory_bytes": "shared_memory_bytes",
        "trainer_wait_s": "trainer_wait_s",
        "progress": "progress",
        "health_listen": "health_listen",
        "probe_listen": "probe_listen",
        "metrics_port": "metrics_port",
        "metrics_address": "metrics_address",
        "tls_dir": "tls_dir",
        "token_dir": "token_dir",
        "grace_s": "grace_s",
        "interrupted_exit_code": "interrupted_exit_code",
    }
)
WORKER: Final = MappingProxyType(
    {
        "listen": "listen",
        "health_listen": "health_listen",
        "probe_listen": "probe_listen",
        "engine": "engine",
        "trainer_factory": "trainer_factory",
        "preset": "preset",
        "state_dir": "state_dir",
        "checkpoint_dir": "checkpoint_dir",
        "num_processes": "num_processes",
        "coordinator_address": "coordinator_address",
        "compile_budget_s": "compile_budget_s",
        "max_inflight": "max_inflight",
        "staging_memory_bytes": "staging_memory_bytes",
        "store_memory_bytes": "store_memory_bytes",
        "shared_memory": "shared_memory",
        "old_logprobs": "loss_old_logprobs",
        "LOGPS_SHARDED_HEAD": "logps_sharded_head",
        "COMPUTE_LOGPS_CHUNK_SIZE": "compute_logps_chunk_size",
        "RAGGED_BUFFER_FACTOR": "ragged_buffer_factor",
        "RETRY_WHEN_TOKENS_DROPPED": "retry_when_tokens_dropped",
        "metrics_port": "metrics_port",
        "metrics_address": "metrics_address",
        "tls_dir": "tls_dir",
        "token_dir": "token_dir",
        "grace_s": "grace_s",
        "interrupted_exit_code": "interrupted_exit_code",
    }
)

ENV_PIPELINE: Final = "PIPELINE_STEP_BOUNDARY"
ENV_STAGE: Final = "STAGE_NEXT_MICROBATCH"
ENV_LIBTPU: Final = "LIBTPU_INIT_ARGS"
ENV_MAXTEXT: Final = "MAXTEXT_EXTRA_FLAGS"
