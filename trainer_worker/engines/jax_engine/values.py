"""Device values as the rest of the worker sees them: inputs, dispatched work, pending metrics.

Everything here may be waited for from another thread than the one that dispatched it, and turns a
failure on the device into a `DeviceFailure` that names the micro-batch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np
import numpy.typing as npt
from jax import Array

from prestage.microbatch import MicroBatchId
from trainer_worker.engine import DeviceFailure, DeviceSpan, EngineError
from trainer_worker.engines.jax_engine.loss import SUM_NAMES
from trainer_worker.engines.jax_engine.programs import DROPPED, GRAD_NORM, UPDATE_METRICS

FloatArray = npt.NDArray[np.float32]


@contextlib.contextmanager
def failing_as(batch_id: MicroBatchId | None) -> Iterator[None]:
    """Turns what the backend raises within into a `DeviceFailure` of this micro-batch."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # Backends raise types of their own; here they mean the same.
        raise DeviceFailure(batch_id, f"{type(error).__name__}: {error}") from error


def read(values: Array, batch_id: MicroBatchId | None) -> FloatArray:
    """The values on the host; waits. Raises `DeviceFailure`."""
    with failing_as(batch_id):
        return np.asarray(values)


def _known(values: Array) -> bool:
    ready: bool = values.is_ready()  # type: ignore[attr-defined]  # Missing in jax.Array's stub.
    return ready


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A micro-batch whose copy to the device has begun. Owns all memory that the copy reads."""

    batch_id: MicroBatchId
    digest: str
    device_bytes: int
    arrays: Mapping[str, Array]
    denominator: float  # As the host knows it: tokens or sequences.

    def wait_ready(self) -> DeviceSpan:
        with failing_as(self.batch_id):
            jax.block_until_ready(list(self.arrays.values()))
        return DeviceSpan()


@dataclass(frozen=True, kw_only=True)
class DispatchedBatch:
    """A micro-batch's forward and backward."""

    batch_id: MicroBatchId
    marker: Array  # f32, in the order of MARKER; never donated; ready when the program is.

    def wait(self) -> DeviceSpan:
        """Raises `DeviceFailure` also for a loss that is not finite: its tokens are in the step's
        denominator, so leaving it out silently would be wrong too."""
        loss, denominator, *_ = (float(value) for value in read(self.marker, self.batch_id))
        if not np.isfinite(loss):
            raise DeviceFailure(
                self.batch_id, f"its loss is {loss} (denominator {denominator:g}): abort the step"
            )
        return DeviceSpan()

    def peek(self) -> DeviceSpan:
        return self.wait() if _known(self.marker) else DeviceSpan()

    def dropped(self) -> int:
        """MoE assignments that its buffers had no room for. Waits; raises as `wait` does."""
        self.wait()
        return int(read(self.marker, self.batch_id)[DROPPED])


@dataclass(frozen=True, kw_only=True)
class DropAudit:
    """What MoE buffers left out in one step."""

    dropped_assignments: int = 0  # By any pass, also one that was run again.
    dropless_replays: int = 0  # Micro-batches that were run again.
    dropped_assignments_used: int = 0  # By passes whose gradient is in the step.

    def values(self) -> dict[str, float]:
        return {
            "moe_dropped_assignments": float(self.dropped_assignments),
            "dropless_replays": float(self.dropless_replays),
            "dropped_assignments_used": float(self.dropped_assignments_used),
        }


@dataclass(frozen=True, kw_only=True)
class DispatchedUpdate:
    """An optimizer update."""

    update: Array  # f32, in the order of UPDATE_METRICS.

    def wait(self) -> DeviceSpan:
        norm = float(read(self.update, None)[GRAD_NORM])
        if not np.isfinite(norm):
            raise DeviceFailure(None, f"grad_norm is {norm}: the parameters were left as they were")
        return DeviceSpan()

    def peek(self) -> DeviceSpan:
        return self.wait() if _known(self.update) else DeviceSpan()


class StepNumbers:
    """`PendingMetrics` of one step. Once read, holds plain numbers and no device memory."""

    def __init__(
        self,
        *,
        totals: Array,
        update: Array,
        micro_batches: int,
        has_sampler: bool,
        audit: DropAudit | None = None,
    ) -> None:
        """`audit`: of a model with experts."""
        self._audit = audit
        self._pending: tuple[Array, Array] | None = (totals, update)
        self._micro_batches = micro_batches
        self._has_sampler = has_sampler
        self._values: Mapping[str, float] = {}
        self._lock = threading.Lock()

    def result(self) -> Mapping[str, float]:
        """Block until known. Raises `DeviceFailure`. Safe from any thread."""
        with self._lock:
            if self._pending is not None:
                totals, update = (read(array, None) for array in self._pending)
                self._values = self._derive(totals, update)
                self._pending = None
            return self._values

    def _derive(self, totals: FloatArray, update: FloatArray) -> Mapping[str, float]:
        total = dict(zip(SUM_NAMES, map(float, totals), strict=True))
        tokens, kept = max(total["tokens"], 1.0), max(total["kept_tokens"], 1.0)
        values = dict(zip(UPDATE_METRICS, map(float, update), strict=True))
        values |= {
            "loss": total["loss"] / max(total["denominator"], 1.0),
            "denominator": total["denominator"],
            "entropy": total["entropy"] / tokens,
            "kept_fraction": total["kept_tokens"] / tokens,
            "kept_sequence_fraction": total["kept_sequences"] / max(total["sequences"], 1.0),
            "clip_fraction": total["clipped_tokens"] / kept,
            "kl": total["kl"] / kept,
            "trained_tokens": total["tokens"],
            "sequences": total["sequences"],
            "micro_batches": float(self._micro_batches),
        }
        if self._has_sampler:
            values["sampler_is/token_logdiff_absmean"] = total["logprob_gap"] / tokens
        return values if self._audit is None else values | self._audit.values()
