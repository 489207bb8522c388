"""The engine ports over a trainer of MaxText's shape.

The trainer says nothing of when its work is computed, so a marker is dispatched behind it: one
addition on every device. A device computes in the order of dispatch, so the marker is there when the
work before it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from prestage.microbatch import FIELDS, MicroBatch, MicroBatchId
from trainer_worker.engine import (
    CompileReport,
    CompileSpec,
    DeviceFailure,
    DeviceSpan,
    EngineCapabilities,
    EngineError,
    InvalidBatch,
    PreparedInput,
    RunPosition,
    UpdateResult,
)
from trainer_worker.engines.jax_engine.compiles import compile_count
from trainer_worker.engines.maxtext.api import (
    MetricsBuffer,
    Payload,
    StagingTrainer,
    TrainerSetup,
)

_next = jax.jit(lambda marker: marker + 1)


@contextlib.contextmanager
def _failing_as(batch_id: MicroBatchId | None) -> Iterator[None]:
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # The trainer and its backend raise types of their own.
        raise DeviceFailure(batch_id, f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A payload that was mapped, and (where the trainer stages) is being copied."""

    batch_id: MicroBatchId
    digest: str
    device_bytes: int
    payload: Payload
    denominator: int  # Trained tokens, as the host counts them.

    def wait_ready(self) -> DeviceSpan:
        """The payload may still read the host's arrays: they are kept until its step is closed."""
        return DeviceSpan()


@dataclass(frozen=True, kw_only=True)
class _Marked:
    """Work of the trainer's, with the marker behind it."""

    batch_id: MicroBatchId | None
    marker: Array

    def wait(self) -> DeviceSpan:
        with _failing_as(self.batch_id):
            jax.block_until_ready(self.marker)
        return DeviceSpan()

    def peek(self) -> DeviceSpan:
        ready: bool = self.marker.is_ready()  # type: ignore[attr-defined]  # Not in the stub.
        return self.wait() if ready else DeviceSpan()


class _StepMetrics:
    """`PendingMetrics` of one step's buffer. Once read, holds plain numbers."""

    def __init__(
        self, buffer: MetricsBuffer | None, names: Mapping[str, str], known: Mapping[str, float]
    ) -> None:
        self._buffer = buffer
        self._names = names
        self._values = known
        self._lock = threading.Lock()

    def result(self) -> Mapping[str, float]:
        with self._lock:
            if self._buffer is not None:
                with _failing_as(None):
                    self._values = {**self._read(self._buffer), **self._values}
                self._buffer = None
            return self._values

    def _read(self, buffer: MetricsBuffer) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, metric in buffer.weighted_metrics.items():
            total = float(np.sum(np.asarray(metric.unreduced_sum), dtype=np.float64))
            weight = float(np.sum(np.asarray(metric.denominator), dtype=np.float64))
            values[self._names.get(name, name)] = total / weight if weight else 0.0
        for name, scalar in buffer.scalar_metrics.items():
            array = np.asarray(scalar, dtype=np.float64)
            if array.size:
                values[self._names.get(name, name)] = float(array.mean())
        return values


class MaxTextEngine:
    """`TrainingEngine` over a user's trainer. Raises `EngineError` naming what the trainer did."""

    def __init__(self, setup: TrainerSetup) -> None:
        self._setup = setup
        self._trainer = setup.trainer
        self._staging = setup.trainer if isinstance(setup.trainer, StagingTrainer) else None
        self._spec: CompileSpec | None = None
        self._denominator = 0
        self._micro_batches = 0
        everywhere = NamedSharding(
            Mesh(np.array(jax.devices()), ("device",)), PartitionSpec("device")
        )
        self._marker = jax.device_put(np.zeros(jax.device_count(), np.int32), everywhere)

    @property
    def capabilities(self) -> EngineCapabilities:
        setup = self._setup
        device = jax.devices()[0]
        return EngineCapabilities(
            engine="maxtext",
            can_stage=setup.can_stage,
            can_defer_update=True,
            can_checkpoint=setup.checkpoints is not None,
            update_waits_for_device=setup.update_waits_for_device,
            optional_fields=setup.optional_fields,
            required_fields=setup.required_fields,
            vocab_size=setup.vocab_size,
            moe_layers=setup.moe_layers,
            top_k=setup.top_k,
            num_experts=setup.num_experts,
            device_kind=device.device_kind,
            device_count=jax.device_count(),
            row_multiple=setup.row_multiple,
        )

    @property
    def train_step(self) -> int:
        return self._trainer.train_step

    @property
    def backend_compiles(self) -> int:
        return compile_count()

    def compile(self, spec: CompileSpec) -> CompileReport:
        """Compile the trainer's programs against a micro-batch of padding of the run's shape."""
        started_s, before = time.monotonic(), compile_count()
        if self._micro_batches:
            raise EngineError("compile while a step is open: close or abort it first")
        with _failing_as(None):
            self._trainer.compile(self._setup.to_payload(self._padding(spec)))
        self._spec = spec
        self._idle_wait_s()  # Compiles the marker.
        waits = tuple(self._idle_wait_s() for _ in range(3))
        return CompileReport(
            seconds=time.monotonic() - started_s,
            programs=compile_count() - before,
            idle_wait_seconds=waits,
        )

    def _padding(self, spec: CompileSpec) -> MicroBatch:
        trailing = (self._setup.moe_layers, self._setup.top_k)
        arrays = {}
        for name in spec.fields:
            field = FIELDS[name]
            shape: tuple[int, ...] = (spec.rows, spec.tokens_per_row)
            shape = (*shape, *trailing) if field.trailing_dims else shape
            arrays[name] = np.full(shape, field.pad_value, field.dtype)
        return MicroBatch(
            id=MicroBatchId(run_id="compile", step=0, index=0),
            rows=spec.rows,
            tokens_per_row=spec.tokens_per_row,
            row_lengths=(0,) * spec.rows,
            arrays=arrays,
        )

    def _idle_wait_s(self) -> float:
        started_s = time.monotonic()
        self._mark(None).wait()
        return time.monotonic() - started_s

    def _mark(self, batch_id: MicroBatchId | None) -> _Marked:
        return _Marked(batch_id=batch_id, marker=_next(self._marker))

    def check(self, batch: MicroBatch) -> None:
        spec = self._spec
        if spec is None:
            return
        if (batch.rows, batch.tokens_per_row) != (spec.rows, spec.tokens_per_row):
            raise InvalidBatch(
                f"micro-batch {batch.id} is [{batch.rows}, {batch.tokens_per_row}]; the trainer is"
                f" compiled for [{spec.rows}, {spec.tokens_per_row}]"
            )
        if sorted(batch.arrays) != sorted(spec.fields):
            raise InvalidBatch(
                f"micro-batch {batch.id} has the fields {sorted(batch.arrays)}; the trainer is"
                f" compiled for {sorted(spec.fields)}"
            )

    def input_bytes(self, batch: MicroBatch) -> int:
        return batch.payload_bytes

    def prepare_fwd_bwd_input(self, batch: MicroBatch) -> _Prepared:
        with _failing_as(batch.id):
            payload = self._setup.to_payload(batch)
            if self._staging is not None and self._setup.can_stage:
                payload = self._staging.prepare_fwd_bwd_input(payload)
        return _Prepared(
            batch_id=batch.id,
            digest=batch.digest,
            device_bytes=batch.payload_bytes,
            payload=payload,
            denominator=int(batch.arrays["loss_mask"].sum(dtype=np.int64)),
        )

    def fwd_bwd(self, prepared: PreparedInput) -> _Marked:
        """The trainer's own throttler bounds how much is in flight."""
        if not isinstance(prepared, _Prepared):
            raise EngineError(f"fwd_bwd got {type(prepared).__name__}, not this engine's input")
        before = self._trainer.train_step
        with _failing_as(prepared.batch_id):
            self._trainer.fwd_bwd(prepared.payload)
        after = self._trainer.train_step
        if after != before:
            raise EngineError(
                f"the trainer's train_step moved from {before} to {after} inside fwd_bwd: it fuses"
                " the update into it, so no update can be held back; use a trainer that does not"
            )
        self._denominator += prepared.denominator
        self._micro_batches += 1
        return self._mark(prepared.batch_id)

    def wait_for_device(self) -> float:
        if self._staging is not None and self._setup.can_stage:
            with _failing_as(None):
                return float(self._staging.wait_for_device())
        return self._idle_wait_s()

    def update(self) -> UpdateResult:
        """A step that trained no token is dropped, not applied."""
        if not self._micro_batches:
            raise EngineError("update without a micro-batch: nothing was accumulated")
        known = {
            "denominator": float(self._denominator),
            "micro_batches": float(self._micro_batches),
        }
        if not self._denominator:
            self.abort_step()
            return UpdateResult(
                applied=False,
                completion=self._mark(None),
                metrics=_StepMetrics(None, self._setup.metric_names, known),
            )
        before = self._trainer.train_step
        with _failing_as(None):
            after = self._trainer.update()
            buffer = self._trainer.get_metrics(clear_cache=True)
        if after != before + 1:
            raise EngineError(
                f"the trainer's update moved train_step from {before} to {after}; it must move by 1"
            )
        self._denominator = self._micro_batches = 0
        return UpdateResult(
            applied=True,
            completion=self._mark(None),
            metrics=_StepMetrics(buffer, self._setup.metric_names, known),
        )

    def abort_step(self) -> None:
        if self._micro_batches:
            if self._setup.drop_gradients is None:
                raise EngineError(
                    "the trainer cannot forget accumulated gradients (its factory gives no"
                    " drop_gradients): restart the worker and restore a checkpoint"
                )
            self._setup.drop_gradients()
        self._denominator = self._micro_batches = 0

    def restored(self) -> None:
        """The trainer loaded a checkpoint: the open step is gone with what was there before."""
        if self._micro_batches and self._setup.drop_gradients is not None:
            self._setup.drop_gradients()
        self._denominator = self._micro_batches = 0

    @property
    def step_is_open(self) -> bool:
        return self._micro_batches > 0

    def parameter_digest(self) -> str:
        """Empty where the factory gives no parameters."""
        if self._setup.parameters is None:
            return ""
        whole = hashlib.sha256()
        with _failing_as(None):
            for name, leaf in sorted(self._setup.parameters().items()):
                array = np.ascontiguousarray(leaf)
                whole.update(f"{name} {array.dtype.name} {array.shape}\n".encode())
                whole.update(array.view(np.uint8).data)
        return whole.hexdigest()

    def close(self) -> None:
        self._trainer.close()


class _Save:
    """A save under way."""

    def __init__(self, setup: TrainerSetup, step: int) -> None:
        self._setup = setup
        self.step = step

    def wait(self) -> None:
        assert self._setup.checkpoints is not None
        self._setup.checkpoints.wait()


class MaxTextCheckpoints:
    """`CheckpointEngine` over the trainer's own checkpoints; the run's position is their metadata."""

    def __init__(self, engine: MaxTextEngine, setup: TrainerSetup) -> None:
        assert setup.checkpoints is not None
        self._engine = engine
        self._setup = setup
        self._hooks = setup.checkpoints

    def begin_save(self, position: RunPosition) -> _Save:
        if self._engine.step_is_open:
            raise EngineError("a checkpoint inside a step: close the step first")
        with _failing_as(None):
            self._hooks.save(
                position.step,
                {
                    "run_id": position.run_id,
                    "step": position.step,
                    "train_step": position.train_step,
                    "epoch": position.epoch,
                    "last_seq": position.last_seq,
                    "data_cursor": position.data_cursor,
                },
            )
        return _Save(self._setup, position.step)

    def saved_run(self, step: int | None) -> str | None:
        """Not known: the trainer's hooks tell a checkpoint's metadata with its weights only."""
        del step
        return None

    def restore(self, step: int | None) -> RunPosition | None:
        with _failing_as(None):
            stored = self._hooks.restore(step)
        if stored is None:
            return None
        self._engine.restored()
        try:
            position = RunPosition(
                run_id=str(stored["run_id"]),
                step=int(str(stored["step"])),
                train_step=int(str(stored["train_step"])),
                epoch=int(str(stored["epoch"])),
                last_seq=int(str(stored["last_seq"])),
                data_cursor=str(stored["data_cursor"]),
            )
        except (KeyError, ValueError) as error:
            raise EngineError(
                f"the checkpoint's metadata lacks {error}: it was not written by this worker"
            ) from error
        if self._engine.train_step != position.train_step:
            raise EngineError(
                f"the restored trainer is at train_step {self._engine.train_step}, but its metadata"
                f" says {position.train_step}: they are not of one checkpoint"
            )
        return position

    def durable_step(self) -> int | None:
        return self._hooks.durable_step()
