"""Every key that a recipe may have: kind, default, meaning, off-switch. One table; data only.

`docs/recipe-keys.md` is generated from it, and a test pins its names.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from orchestrator.recipes.values import Kind


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key. `default` is text as in a recipe; None: see `implied`, or must be set."""

    name: str
    section: str
    kind: Kind
    default: str | None
    meaning: str
    off: str = ""  # What turns it off, for switches.
    implied: str = ""  # What the value follows when nobody sets it.
    required: bool = False
    choices: tuple[str, ...] = ()
    least: int = 0  # Of numbers.
    maxtext: str = ""  # The MaxText setting that this key is.
    only_maxtext: bool = False  # Means nothing to any other engine.


def _key(section: str, name: str, kind: Kind, default: str | None, meaning: str) -> Key:
    return Key(name=name, section=section, kind=kind, default=default, meaning=meaning)


_TRAINER = "Trainer switches"
_BOUNDARY = "Step boundary"
_RUN = "Run"
_WORKER = "Worker"
_PLACE = "Placement"
_CLUSTER = "Cluster"

_BOUNDED: Final = "TRAINER_TUNED_FLAGS with a finite RAGGED_BUFFER_FACTOR"

_ALL: Final = (
    Key(
        name="TRAINER_TUNED_FLAGS",
        section=_TRAINER,
        kind=Kind.SWITCH,
        default="false",
        meaning="One libtpu flag, six MaxText settings and two precision keys, and the buffer"
        " layout that they were measured with. Each can be overridden by its own key.",
        off="false",
        only_maxtext=True,
    ),
    Key(
        name="RAGGED_BUFFER_FACTOR",
        section=_TRAINER,
        kind=Kind.BUFFER,
        default=None,
        implied="2.75 with TRAINER_TUNED_FLAGS, else -1",
        meaning="MoE buffers as a factor of the even load. Finite needs RETRY_WHEN_TOKENS_DROPPED.",
        off="-1: buffers that drop nothing",
        maxtext="ragged_buffer_factor",
    ),
    Key(
        name="RETRY_WHEN_TOKENS_DROPPED",
        section=_TRAINER,
        kind=Kind.SWITCH,
        default=None,
        implied=f"true with {_BOUNDED}, else false",
        meaning="Runs a micro-batch whose buffers overflowed again with a program that drops none.",
        off="false (with RAGGED_BUFFER_FACTOR: -1)",
        maxtext="retry_when_tokens_dropped",
    ),
    Key(
        name="LOGPS_SHARDED_HEAD",
        section=_TRAINER,
        kind=Kind.HEAD,
        default="off",
        meaning="Sharded log-prob head, in the worker only. local: each device scores its own"
        " tokens; vocab: its part of the vocabulary; auto: what moves less.",
        off="off (or 0, false, no)",
    ),
    Key(
        name="COMPUTE_LOGPS_CHUNK_SIZE",
        section=_TRAINER,
        kind=Kind.WHOLE,
        default=None,
        implied="engine maxtext: 1024 with TRAINER_TUNED_FLAGS, else 512, whatever the buffer"
        " factor; other engines: the preset's",
        meaning="Tokens of a row whose logits exist at a time. No switch: 0 is refused.",
        least=1,
    ),
    Key(
        name="NUM_MOE_TOKEN_CHUNKS",
        section=_TRAINER,
        kind=Kind.WHOLE,
        default=None,
        implied=f"2 with {_BOUNDED}, else 4",
        meaning="Token chunks of the MoE layers.",
        least=1,
        maxtext="num_moe_token_chunks",
        only_maxtext=True,
    ),
    Key(
        name="REMAT_CONTEXT",
        section=_TRAINER,
        kind=Kind.TEXT,
        choices=("device", "offload", "remat"),
        default=None,
        implied=f"device with {_BOUNDED}, else offload",
        meaning="Where attention's context waits for the backward pass.",
        maxtext="context",
        only_maxtext=True,
    ),
    Key(
        name="REMAT_POLICY",
        section=_TRAINER,
        kind=Kind.TEXT,
        choices=("custom", "full", "minimal"),
        default="custom",
        meaning="Rematerialisation. full is refused with state that is held on the device.",
        maxtext="remat_policy",
        only_maxtext=True,
    ),
    Key(
        name="MOE_EXCLUDE_PADDING",
        section=_TRAINER,
        kind=Kind.SWITCH,
        default=None,
        implied=f"true with {_BOUNDED}, else false",
        meaning="Padding tokens are not routed to experts.",
        off="false",
        maxtext="moe_exclude_padding_from_routing",
        only_maxtext=True,
    ),
    Key(
        name="LOG_MOE_DROPS",
        section=_TRAINER,
        kind=Kind.SWITCH,
        default=None,
        implied=f"true with {_BOUNDED}, else false",
        meaning="The drop audit: the run's record that no token was dropped.",
        off="false; a scored run insists on it",
        maxtext="log_moe_drops",
    ),
    Key(
        name="MAXTEXT_EXTRA_FLAGS",
        section=_TRAINER,
        kind=Kind.PAIRS,
        default="",
        meaning="More MaxText settings, merged setting by setting. A setting that has a key of"
        " its own here counts as that key.",
        only_maxtext=True,
    ),
    Key(
        name="LIBTPU_INIT_ARGS",
        section=_TRAINER,
        kind=Kind.PAIRS,
        default="",
        meaning="libtpu flags, merged flag by flag.",
    ),
    Key(
        name="RETURN_ROUTED_EXPERTS",
        section=_TRAINER,
        kind=Kind.SWITCH,
        default="false",
        meaning="Router replay: the rollouts' expert choices are trained with.",
        off="false",
    ),
    Key(
        name="PIPELINE_STEP_BOUNDARY",
        section=_BOUNDARY,
        kind=Kind.SWITCH,
        default="false",
        meaning="Packs and sends the next step's first micro-batch early. Same calls, same order.",
        off="false; turns staging off, too",
    ),
    Key(
        name="STAGE_NEXT_MICROBATCH",
        section=_BOUNDARY,
        kind=Kind.STAGING,
        default=None,
        implied="PIPELINE_STEP_BOUNDARY",
        meaning="Copies that micro-batch to the device before the update.",
        off="false: pipelined, not staged",
    ),
    Key(
        name="stage_before_update",
        section=_BOUNDARY,
        kind=Kind.SWITCH,
        default="true",
        meaning="Stages before the update rather than after it.",
        off="false",
    ),
    Key(
        name="dispatch_before_metrics",
        section=_BOUNDARY,
        kind=Kind.SWITCH,
        default="false",
        meaning="Dispatches the staged input before the metrics are read.",
        off="false",
    ),
    Key(
        name="rollouts",
        section=_RUN,
        kind=Kind.TEXT,
        default="",
        meaning="Recorded rollouts, a Parquet file; empty: producers send them (ingest).",
    ),
    Key(
        name="num_steps",
        section=_RUN,
        kind=Kind.WHOLE,
        default=None,
        required=True,
        least=1,
        meaning="Optimizer steps.",
    ),
    Key(
        name="rows",
        section=_RUN,
        kind=Kind.WHOLE,
        default=None,
        required=True,
        least=1,
        meaning="Rows of a micro-batch.",
    ),
    Key(
        name="tokens_per_row",
        section=_RUN,
        kind=Kind.WHOLE,
        default=None,
        required=True,
        least=2,
        meaning="Tokens of a row.",
    ),
    Key(
        name="groups_per_batch",
        section=_RUN,
        kind=Kind.WHOLE,
        default="4",
        least=1,
        meaning="Rollout groups of one batch.",
    ),
    Key(
        name="group_size",
        section=_RUN,
        kind=Kind.WHOLE,
        default="8",
        least=1,
        meaning="Trajectories of a group.",
    ),
    Key(
        name="num_minibatches",
        section=_RUN,
        kind=Kind.WHOLE,
        default="1",
        least=1,
        meaning="Optimizer steps that share a rollout batch.",
    ),
    Key(
        name="num_iterations",
        section=_RUN,
        kind=Kind.WHOLE,
        default="1",
        least=1,
        meaning="Times that a rollout batch is trained.",
    ),
    Key(
        name="old_logprobs",
        section=_RUN,
        kind=Kind.TEXT,
        choices=("current", "sampler", "trainer"),
        default="current",
        meaning="The importance ratio's denominator, on both sides.",
    ),
    _key(_RUN, "checkpoint_every", Kind.WHOLE, "0", "Steps between checkpoints; 0: none."),
    _key(_RUN, "weight_sync_every", Kind.WHOLE, "0", "Steps between weight syncs; 0: none."),
    _key(_RUN, "eval_every", Kind.WHOLE, "0", "Steps between evaluations; 0: none."),
    _key(
        _RUN,
        "eval_rollouts",
        Kind.TEXT,
        "",
        "Recorded rollouts that evaluations score, a Parquet file; read with eval_every.",
    ),
    _key(
        _RUN,
        "val_start_step",
        Kind.WHOLE,
        "0",
        "Checkpoints from this step on (counted from 1) are scored: the run is a scored run.",
    ),
    Key(
        name="require_drop_audit",
        section=_RUN,
        kind=Kind.SWITCH,
        default=None,
        implied="true in a scored run, else false",
        meaning="The start fails unless the worker keeps the drop audit.",
        off="false; refused in a scored run",
    ),
    Key(
        name="engine",
        section=_WORKER,
        kind=Kind.TEXT,
        choices=("jax", "timed", "maxtext"),
        default="jax",
        meaning="Trainer engine.",
    ),
    Key(
        name="trainer_factory",
        section=_WORKER,
        kind=Kind.TEXT,
        default="",
        only_maxtext=True,
        meaning="package.module:function that builds the trainer; needed there.",
    ),
    _key(_WORKER, "preset", Kind.TEXT, "", "Model preset of engine jax; empty: the engine's."),
    Key(
        name="max_inflight",
        section=_WORKER,
        kind=Kind.WHOLE,
        default="2",
        least=1,
        meaning="Micro-batches dispatched at a time.",
    ),
    Key(
        name="staging_memory_bytes",
        section=_WORKER,
        kind=Kind.WHOLE,
        default=str(1 << 30),
        meaning="Device memory that a staged input may take.",
    ),
    Key(
        name="store_memory_bytes",
        section=_WORKER,
        kind=Kind.WHOLE,
        default=str(4 << 30),
        least=1,
        meaning="Host memory for micro-batches that were put.",
    ),
    Key(
        name="shared_memory_bytes",
        section=_WORKER,
        kind=Kind.WHOLE,
        default=str(1 << 30),
        meaning="Shared memory for payloads in one pod; 0: streams.",
    ),
    _key(_WORKER, "checkpoint_dir", Kind.TEXT, "", "Folder of checkpoints; needed to save any."),
    Key(
        name="name",
        section=_PLACE,
        kind=Kind.NAME,
        default=None,
        required=True,
        meaning="Name of the run and of everything that is made for it.",
    ),
    Key(
        name="orchestrator_image",
        section=_PLACE,
        kind=Kind.IMAGE,
        default=None,
        required=True,
        meaning="Image of the orchestrator.",
    ),
    Key(
        name="worker_image",
        section=_PLACE,
        kind=Kind.IMAGE,
        default=None,
        required=True,
        meaning="Image of the worker.",
    ),
    Key(
        name="accelerator",
        section=_PLACE,
        kind=Kind.TEXT,
        choices=("cpu", "tpu"),
        default="cpu",
        meaning="What the worker computes on.",
    ),
    _key(_PLACE, "tpu_type", Kind.NAME, "tpu7x", "TPU type, as in the node label."),
    Key(
        name="tpu_topology",
        section=_PLACE,
        kind=Kind.TOPOLOGY,
        default=None,
        meaning="TPU slice; must be set with accelerator tpu.",
    ),
    Key(
        name="hosts",
        section=_PLACE,
        kind=Kind.WHOLE,
        default="1",
        least=1,
        meaning="Hosts of the worker.",
    ),
    Key(
        name="chips_per_host",
        section=_PLACE,
        kind=Kind.WHOLE,
        default="4",
        least=1,
        meaning="TPU chips of a host.",
    ),
    Key(
        name="layout",
        section=_PLACE,
        kind=Kind.TEXT,
        choices=("one-pod", "separate"),
        default=None,
        implied="one-pod with one host, else separate",
        meaning="one-pod: both in one pod, over a unix socket and shared memory. separate: a pod"
        " each, over mTLS.",
    ),
    _key(_CLUSTER, "namespace", Kind.NAME, "default", "Namespace."),
    _key(_CLUSTER, "queue", Kind.TEXT, "", "Kueue local queue; empty: none."),
    Key(
        name="max_restarts",
        section=_CLUSTER,
        kind=Kind.WHOLE,
        default="10",
        least=1,
        meaning="Restarts of the whole set after failures; preemptions do not count.",
    ),
    Key(
        name="compile_budget_s",
        section=_CLUSTER,
        kind=Kind.NUMBER,
        default="1800",
        least=1,
        meaning="Longest start of the worker with its compile.",
    ),
    Key(
        name="longest_micro_batch_s",
        section=_CLUSTER,
        kind=Kind.NUMBER,
        default="60",
        least=1,
        meaning="Longest micro-batch.",
    ),
    Key(
        name="checkpoint_s",
        section=_CLUSTER,
        kind=Kind.NUMBER,
        default="60",
        meaning="Longest checkpoint.",
    ),
    Key(
        name="grace_s",
        section=_CLUSTER,
        kind=Kind.NUMBER,
        default=None,
        implied="longest_micro_batch_s + checkpoint_s + 30",
        meaning="Seconds between SIGTERM and SIGKILL. Less than the sum of both and 10 s is refused.",
    ),
    _key(_CLUSTER, "worker_cpu", Kind.QUANTITY, "4", "CPU of a worker pod."),
    _key(_CLUSTER, "worker_memory", Kind.QUANTITY, "16Gi", "Memory of a worker pod."),
    _key(_CLUSTER, "orchestrator_cpu", Kind.QUANTITY, "2", "CPU of the orchestrator."),
    _key(_CLUSTER, "orchestrator_memory", Kind.QUANTITY, "8Gi", "Memory of the orchestrator."),
    _key(_CLUSTER, "state_size", Kind.QUANTITY, "100Gi", "Volume of the journal (local disk)."),
    _key(_CLUSTER, "state_class", Kind.TEXT, "", "Its storage class; empty: the cluster's."),
    _key(
        _CLUSTER,
        "shared_class",
        Kind.TEXT,
        "",
        "Storage class of a volume that many hosts can write; must be set with more than one host.",
    ),
    _key(
        _CLUSTER,
        "tls_secret",
        Kind.TEXT,
        "",
        "Secret with ca.crt, tls.crt and tls.key; must be set with layout separate or ingest.",
    ),
    _key(
        _CLUSTER,
        "token_secret",
        Kind.TEXT,
        "",
        "Secret with the role tokens drive, submit and read; must be set with tls_secret.",
    ),
    _key(
        _CLUSTER,
        "monitoring_namespace",
        Kind.NAME,
        "monitoring",
        "Namespace that may scrape metrics.",
    ),
)

KEYS: Final = MappingProxyType({key.name: key for key in _ALL})

TUNED_LIBTPU: Final = (("xla_tpu_enable_offloading_copy_to_sparsecore", "false"),)
TUNED_MAXTEXT: Final = (
    ("context_parallel_strategy", "all_gather"),
    ("sa_fuse_reciprocal", "true"),
    ("sa_use_base2_exp", "false"),
    ("gdn_cp_mode", "seq"),
    ("gdn_cp_state", "device"),
)
"""Five of the six settings; the sixth is NUM_MOE_TOKEN_CHUNKS, which has a key of its own."""
TUNED_PRECISION: Final = (
    ("gdn_cp_matmul_precision", "high"),
    ("cast_grads_after_all_reduce", "true"),
)
BY_MAXTEXT: Final = MappingProxyType({key.maxtext: key.name for key in _ALL if key.maxtext})
