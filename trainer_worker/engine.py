"""What a trainer engine must offer: small typed ports, and the values that cross them.

The service knows engines only through these `Protocol`s. What an engine lacks it says in its
`EngineCapabilities`; nothing is probed with `hasattr`. Every method runs on the worker's one device
thread, except those that say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from prestage.microbatch import MicroBatch, MicroBatchId
from prestage.wire.layout import ShardRange


class EngineError(Exception):
    """The engine failed while it worked. Ends the open step (phase FAILED)."""


class InvalidBatch(Exception):
    """The micro-batch is not one this engine can train. Raised before any device work."""


class DeviceFailure(EngineError):
    """A dispatched computation failed later; names its micro-batch."""

    def __init__(self, batch_id: MicroBatchId | None, cause: str) -> None:
        name = "the optimizer update" if batch_id is None else f"micro-batch {batch_id}"
        super().__init__(f"{name} failed on the device: {cause}")
        self.batch_id = batch_id


@dataclass(frozen=True, kw_only=True)
class EngineCapabilities:
    """What this engine can do. Asked for at bring-up, before anything compiles."""

    engine: str  # "jax", "timed", ...
    can_stage: bool  # prepare_fwd_bwd_input starts a copy that overlaps compute.
    can_defer_update: bool  # fwd_bwd never updates by itself.
    can_checkpoint: bool = False
    can_export_weights: bool = False
    can_score: bool = False  # ComputeLogprobs and Evaluate.
    update_waits_for_device: bool = (
        False  # Dropless retry or log-prob gates: update() needs a flag.
    )
    reports_drop_audit: bool = False  # Says what MoE buffers dropped; also when nothing can drop.
    optional_fields: tuple[str, ...] = ()  # Optional micro-batch fields it can use.
    required_fields: tuple[str, ...] = ()  # Optional fields that it insists on.
    vocab_size: int = 0  # 0 = any token id.
    moe_layers: int = 0
    top_k: int = 0
    num_experts: int = 0
    device_kind: str = ""
    device_count: int = 1
    process_count: int = 1
    row_multiple: int = 1  # rows of a micro-batch must be a multiple of this.


@dataclass(frozen=True, kw_only=True)
class CompileSpec:
    """The one shape that a run trains: every micro-batch is `[rows, tokens_per_row]`."""

    rows: int
    tokens_per_row: int
    fields: tuple[str, ...]  # Names of the arrays that every micro-batch carries.


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """What warm-up did."""

    seconds: float
    programs: int  # Backend compiles made.
    idle_wait_seconds: tuple[float, ...] = ()
    """What waiting for next to nothing takes on the idle device, several times, by the same kind of
    wait as `Dispatched.wait`: staged boundaries are judged by the one against the other."""


@dataclass(frozen=True, kw_only=True)
class DeviceSpan:
    """When a computation ran on the device, on the engine's monotonic clock, in seconds.

    `None` where the engine cannot tell; the worker then uses when it saw the result.
    """

    started_s: float | None = None
    finished_s: float | None = None


class PreparedInput(Protocol):
    """One micro-batch on its way to (or on) the device."""

    @property
    def batch_id(self) -> MicroBatchId: ...

    @property
    def digest(self) -> str: ...

    @property
    def device_bytes(self) -> int:
        """Device memory that it holds, summed over devices."""
        ...

    def wait_ready(self) -> DeviceSpan:
        """Block until the copy is done; from then on the host arrays may be reused.

        Called from the watcher thread, never from the device thread.
        """
        ...


class Dispatched(Protocol):
    """A computation given to the device."""

    def wait(self) -> DeviceSpan:
        """Block until it is computed. Raises `DeviceFailure`. Called from the watcher thread."""
        ...

    def peek(self) -> DeviceSpan:
        """What is known now, without waiting. Raises `DeviceFailure` when it is known to fail."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Metrics of one closed step. `values`: name to number (nats, counts, ratios as documented)."""

    step: int
    train_step: int  # Policy version after the update.
    values: Mapping[str, float] = field(default_factory=dict)


class PendingMetrics(Protocol):
    """Metrics of a step whose update may still compute."""

    def result(self) -> Mapping[str, float]:
        """Block until they are known. Safe from any thread; never touches later steps' work."""
        ...


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """What `update()` did. `applied` is False when the step's summed denominator is 0 (skipped)."""

    applied: bool
    completion: Dispatched
    metrics: PendingMetrics
    dropless_replays: int = 0  # Micro-batches run again without drops since the last update.
    dropped_assignments: int = 0  # Of tokens to experts, left out of the gradient that was applied.


class TrainingEngine(Protocol):
    """Trains micro-batches: accumulate with `fwd_bwd`, close the step with `update`."""

    @property
    def capabilities(self) -> EngineCapabilities: ...

    @property
    def train_step(self) -> int:
        """Updates applied (the policy version). Moves only inside `update()` and a restore."""
        ...

    @property
    def backend_compiles(self) -> int:
        """Programs compiled by the backend so far; must not move inside a timed step."""
        ...

    def compile(self, spec: CompileSpec) -> CompileReport:
        """Compile everything a step needs and measure a wait on the idle device."""
        ...

    def check(self, batch: MicroBatch) -> None:
        """Refuse a micro-batch that cannot be trained. Raises `InvalidBatch`; changes nothing.

        May be called from any thread.
        """
        ...

    def input_bytes(self, batch: MicroBatch) -> int:
        """Device bytes that `prepare_fwd_bwd_input` would take for this micro-batch."""
        ...

    def prepare_fwd_bwd_input(self, batch: MicroBatch) -> PreparedInput:
        """Start the copy to the device and return at once."""
        ...

    def fwd_bwd(self, prepared: PreparedInput) -> Dispatched:
        """Dispatch forward and backward; adds the gradient of the unreduced sum.

        Returns when dispatched; blocks while `max_inflight` micro-batches are in flight.
        """
        ...

    def wait_for_device(self) -> float:
        """Block until all dispatched work is computed; seconds waited."""
        ...

    def update(self) -> UpdateResult:
        """Divide by the summed denominator, apply the optimizer, reset the accumulators."""
        ...

    def abort_step(self) -> None:
        """Drop the accumulated gradients; parameters and `train_step` stay."""
        ...

    def parameter_digest(self) -> str:
        """Hex digest over every parameter's name, dtype, shape and bytes."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ScoreResult:
    """Log-probs of a micro-batch under the current weights."""

    logprobs: npt.NDArray[np.float32]  # [rows, tokens], token-aligned, 0 where nothing predicts.
    metrics: Mapping[str, float]


class ScoringEngine(Protocol):
    """Forward passes that leave accumulated gradients and staged input untouched."""

    def compute_logprobs(self, batch: MicroBatch) -> ScoreResult: ...

    def evaluate(self, batch: MicroBatch) -> Mapping[str, float]: ...


@dataclass(frozen=True, kw_only=True)
class RunPosition:
    """What a checkpoint stores beside the weights, as one durable unit."""

    run_id: str
    step: int  # Steps closed.
    train_step: int
    epoch: int  # For audit: a restore never lowers the worker's epoch.
    last_seq: int  # For audit.
    data_cursor: str  # The orchestrator's own JSON: the first untrained item.


class CheckpointEngine(Protocol):
    """Durable snapshots. `begin_save` answers when the snapshot is taken."""

    def begin_save(self, position: RunPosition) -> PendingSave: ...

    def saved_run(self, step: int | None) -> str | None:
        """Run id of what `restore` would load, without loading it; None when that is not known."""
        ...

    def restore(self, step: int | None) -> RunPosition | None:
        """Load the newest complete checkpoint, or the one of `step`; None when there is none."""
        ...

    def durable_step(self) -> int | None:
        """Step of the newest complete checkpoint, None when there is none."""
        ...


class PendingSave(Protocol):
    """A save under way."""

    @property
    def step(self) -> int: ...

    def wait(self) -> None:
        """Block until durable. Raises the background error. Safe from any thread."""
        ...


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One exported parameter."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


class WeightExportEngine(Protocol):
    """Pinned, versioned copies of the weights for samplers."""

    def prepare_weight_sync(self, memory_budget_bytes: int) -> int:
        """Pin the current version (a copy). Returns bytes pinned. Raises `MemoryError` over budget."""
        ...

    def export_manifest(self, version: int) -> tuple[TensorInfo, ...]:
        """Manifest of a pinned version. Safe from any thread."""
        ...

    def export_tensor(self, version: int, name: str) -> npt.NDArray[np.generic]:
        """One tensor of a pinned version. Safe from any thread."""
        ...

    def release_weight_sync(self, version: int) -> None: ...


class ShardedInputs(Protocol):
    """The face of an engine that is one of several processes, each with a part of every input.

    Where a `TrainingEngine` method takes a micro-batch, `check` and `input_bytes` take the whole one
    and are asked of process 0 only; input itself comes through here, as this process's own part.
    """

    @property
    def process_id(self) -> int: ...

    def input_shards(self, spec: CompileSpec) -> tuple[ShardRange, ...]:
        """Which rows and tokens each process holds, by process; several may hold the same.

        Raises `InvalidBatch` for a shape that cannot be split over the processes.
        """
        ...

    def denominator(self, batch: MicroBatch) -> float:
        """What the whole micro-batch adds to the step's denominator."""
        ...

    def check_scored(self, batch: MicroBatch) -> None:
        """Refuse a whole micro-batch that cannot be scored. Raises `InvalidBatch`; changes nothing."""
        ...

    def prepare_shard(self, shard: MicroBatch, denominator: float) -> PreparedInput:
        """`prepare_fwd_bwd_input` of this process's part. Waits for no other process."""
        ...

    def compute_logprobs_shard(self, shard: MicroBatch) -> ScoreResult:
        """Of the whole micro-batch, `[rows, tokens]`, on every process."""
        ...

    def evaluate_shard(self, shard: MicroBatch) -> Mapping[str, float]:
        """Of the whole micro-batch, on every process."""
        ...


def _never_lost() -> str:
    return ""


def _stays_here(batch: MicroBatch) -> None:
    del batch


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """One engine with its optional faces; `None` means it lacks that face."""

    training: TrainingEngine
    scoring: ScoringEngine | None = None
    checkpoint: CheckpointEngine | None = None
    weights: WeightExportEngine | None = None
    shards: ShardedInputs | None = None  # Of one process among several.
    lost: Callable[[], str] = _never_lost  # Why nothing can go on, for good. Any thread.
    # Hears of each checked upload, on its thread, before it is answered: to bring it where it is needed.
    bring: Callable[[MicroBatch], None] = _stays_here
