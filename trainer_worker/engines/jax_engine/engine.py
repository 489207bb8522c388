"""JaxEngine: the training and scoring ports on one JAX backend.

Every call dispatches and returns; what it must wait for is said where it waits. Inputs are copied
into private host arrays before they are handed to JAX, because JAX on CPU may alias a NumPy buffer
for as long as the array lives.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np
import numpy.typing as npt

from prestage.microbatch import MicroBatch, MicroBatchId
from trainer_worker.engine import (
    CompileReport,
    CompileSpec,
    DeviceFailure,
    DeviceSpan,
    EngineCapabilities,
    EngineError,
    InvalidBatch,
    PreparedInput,
    ScoreResult,
    UpdateResult,
)
from trainer_worker.engines.jax_engine.compiles import compile_count
from trainer_worker.engines.jax_engine.config import EngineConfig
from trainer_worker.engines.jax_engine.loss import SUM_NAMES, host_denominator
from trainer_worker.engines.jax_engine.programs import (
    UPDATE_METRICS,
    Programs,
    compile_programs,
    make_optimizer,
    zero_sums,
)

IDLE_WAITS: Final = 5
Tree = Any  # A JAX pytree; its structure is the model's.


@dataclass(kw_only=True)
class _Prepared:
    batch_id: MicroBatchId
    digest: str
    device_bytes: int
    arrays: Mapping[str, jax.Array]
    denominator: float

    def wait_ready(self) -> DeviceSpan:
        try:
            jax.block_until_ready(dict(self.arrays))
        except Exception as error:
            raise DeviceFailure(self.batch_id, str(error)) from error
        return DeviceSpan()


@dataclass(kw_only=True)
class _Dispatched:
    batch_id: MicroBatchId | None
    marker: jax.Array  # Never donated; ready when the computation is.

    def wait(self) -> DeviceSpan:
        try:
            self.marker.block_until_ready()
        except Exception as error:
            raise DeviceFailure(self.batch_id, str(error)) from error
        return DeviceSpan()

    def peek(self) -> DeviceSpan:
        return DeviceSpan()


@dataclass(kw_only=True)
class _Metrics:
    """Device arrays of one step; read from any thread, after which they are plain numbers."""

    sums: jax.Array | None
    update: jax.Array | None
    micro_batches: int
    values: Mapping[str, float] | None = None

    def result(self) -> Mapping[str, float]:
        values = self.values
        if values is None:
            sums, update = self.sums, self.update
            assert sums is not None and update is not None
            values = _metric_values(np.asarray(sums), np.asarray(update), self.micro_batches)
            self.values = values
            self.sums = self.update = None  # Keep no device memory for the 128 kept steps.
        return values


def _metric_values(
    sums: npt.NDArray[np.float32], update: npt.NDArray[np.float32], micro_batches: int
) -> Mapping[str, float]:
    total = dict(zip(SUM_NAMES, (float(value) for value in sums), strict=True))
    tokens = max(total["tokens"], 1.0)
    kept = max(total["kept_tokens"], 1.0)
    values = dict(zip(UPDATE_METRICS, (float(value) for value in update), strict=True))
    values.update(
        {
            "loss": total["loss"] / max(total["denominator"], 1.0),
            "denominator": total["denominator"],
            "entropy": total["entropy"] / tokens,
            "sampler_is/token_logdiff_absmean": total["logprob_gap"] / tokens,
            "kept_fraction": total["kept_tokens"] / tokens,
            "clip_fraction": total["clipped_tokens"] / kept,
            "kl": total["kl"] / kept,
            "trained_tokens": total["tokens"],
            "sequences": total["sequences"],
            "micro_batches": float(micro_batches),
        }
    )
    return values


class JaxEngine:
    """See the module. Made with its initial parameters on the host."""

    def __init__(self, config: EngineConfig, params: Mapping[str, object], name: str) -> None:
        self._config = config
        self._name = name
        on_device = jax.tree.map(lambda p: jax.device_put(np.array(p, np.float32)), params)
        optimizer_state = make_optimizer(config.optimizer).init(on_device)
        self._state: Tree = (on_device, optimizer_state)
        self._sums: Tree = zero_sums(on_device)
        self._programs: Programs | None = None
        self._spec: CompileSpec | None = None
        self._train_step = 0
        self._denominator = 0.0
        self._micro_batches = 0
        self._inflight: deque[jax.Array] = deque()

    # -- what it is ---------------------------------------------------------------------------

    @property
    def capabilities(self) -> EngineCapabilities:
        device = jax.devices()[0]
        return EngineCapabilities(
            engine="jax",
            can_stage=True,
            can_defer_update=True,
            can_score=True,
            update_waits_for_device=bool(self._config.loss.logp_gate),
            optional_fields=("sampling_logprobs", "old_logprobs", "ref_logprobs"),
            required_fields=self._config.loss.required_fields,
            vocab_size=self._config.model.vocab_size,
            device_kind=device.device_kind,
            device_count=1,
        )

    @property
    def train_step(self) -> int:
        return self._train_step

    @property
    def backend_compiles(self) -> int:
        return compile_count()

    @property
    def params(self) -> Tree:
        """The parameters on the device (tests)."""
        return self._state[0]

    # -- bring-up -------------------------------------------------------------------------------

    def compile(self, spec: CompileSpec) -> CompileReport:
        started_s = time.monotonic()
        before = compile_count()
        if self._programs is None or spec != self._spec:
            self._programs = compile_programs(self._config, self._state[0], self._state, spec)
            self._spec = spec
        jax.block_until_ready((self._state, self._sums))
        waits = tuple(self.wait_for_device() for _ in range(IDLE_WAITS))
        return CompileReport(
            seconds=time.monotonic() - started_s,
            programs=compile_count() - before,
            idle_wait_seconds=waits,
        )

    def _ready(self) -> Programs:
        if self._programs is None:
            raise EngineError("the engine is not compiled")
        return self._programs

    def check(self, batch: MicroBatch) -> None:
        spec = self._spec
        if spec is not None:
            if (batch.rows, batch.tokens_per_row) != (spec.rows, spec.tokens_per_row):
                raise InvalidBatch(
                    f"micro-batch {batch.id} is [{batch.rows}, {batch.tokens_per_row}]; the engine"
                    f" is compiled for [{spec.rows}, {spec.tokens_per_row}]"
                )
            if sorted(batch.arrays) != sorted(spec.fields):
                raise InvalidBatch(
                    f"micro-batch {batch.id} has the fields {sorted(batch.arrays)}; the engine is"
                    f" compiled for {sorted(spec.fields)}"
                )
        missing = sorted(set(self._config.loss.required_fields) - set(batch.arrays))
        if missing:
            raise InvalidBatch(
                f"micro-batch {batch.id} lacks the field {missing[0]!r}, which the loss needs"
            )
        tokens = batch.arrays["tokens"]
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._config.model.vocab_size:
            raise InvalidBatch(
                f"micro-batch {batch.id}: field tokens holds id {low if low < 0 else high}; the"
                f" vocabulary is 0 to {self._config.model.vocab_size - 1}"
            )

    def input_bytes(self, batch: MicroBatch) -> int:
        return batch.payload_bytes

    # -- the step -------------------------------------------------------------------------------

    def prepare_fwd_bwd_input(self, batch: MicroBatch) -> _Prepared:
        arrays = self._to_device(batch)
        return _Prepared(
            batch_id=batch.id,
            digest=batch.digest,
            device_bytes=batch.payload_bytes,
            arrays=arrays,
            denominator=host_denominator(self._config.loss, batch.arrays),
        )

    def _to_device(self, batch: MicroBatch) -> dict[str, jax.Array]:
        return {name: jax.device_put(np.array(array)) for name, array in batch.arrays.items()}

    def fwd_bwd(self, prepared: PreparedInput) -> _Dispatched:
        if not isinstance(prepared, _Prepared):
            raise EngineError(f"fwd_bwd got {type(prepared).__name__}, not this engine's input")
        programs = self._ready()
        while len(self._inflight) >= self._config.max_inflight:
            self._inflight.popleft().block_until_ready()
        self._sums, marker = programs.fwd_bwd(self._state[0], self._sums, dict(prepared.arrays))
        self._inflight.append(marker)
        self._denominator += prepared.denominator
        self._micro_batches += 1
        return _Dispatched(batch_id=prepared.batch_id, marker=marker)

    def wait_for_device(self) -> float:
        started_s = time.monotonic()
        jax.block_until_ready((self._state, self._sums))
        self._inflight.clear()
        return time.monotonic() - started_s

    def update(self) -> UpdateResult:
        programs = self._ready()
        denominator = self._denominator
        if self._config.loss.logp_gate:
            # The gates decide on the device what is kept: the step may turn out to be empty.
            denominator = float(np.asarray(self._sums[1])[SUM_NAMES.index("denominator")])
        applied = denominator > 0
        self._state, self._sums, update, total = programs.update(self._state, self._sums)
        metrics = _Metrics(sums=total, update=update, micro_batches=self._micro_batches)
        if applied:
            self._train_step += 1
        self._denominator, self._micro_batches = 0.0, 0
        return UpdateResult(
            applied=applied,
            completion=_Dispatched(batch_id=None, marker=update),
            metrics=metrics,
        )

    def abort_step(self) -> None:
        if self._programs is not None and self._micro_batches:
            self._sums = self._programs.reset(self._sums)
        self._denominator, self._micro_batches = 0.0, 0

    # -- scoring --------------------------------------------------------------------------------

    def compute_logprobs(self, batch: MicroBatch) -> ScoreResult:
        scored = self._ready().score(self._state[0], self._to_device(batch))
        return ScoreResult(logprobs=np.asarray(scored), metrics={})

    def evaluate(self, batch: MicroBatch) -> Mapping[str, float]:
        sums = np.asarray(self._ready().evaluate(self._state[0], self._to_device(batch)))
        tokens = max(float(sums[2]), 1.0)
        return {
            "logprob": float(sums[0]) / tokens,
            "entropy": float(sums[1]) / tokens,
            "tokens": float(sums[2]),
        }

    # -- parameters -----------------------------------------------------------------------------

    def parameter_digest(self) -> str:
        whole = hashlib.sha256()
        for name, leaf in sorted(named_leaves(self._state[0]).items()):
            array = np.asarray(leaf)
            whole.update(f"{name} {array.dtype.name} {array.shape}\n".encode())
            whole.update(np.ascontiguousarray(array).tobytes())
        return whole.hexdigest()

    def close(self) -> None:
        jax.block_until_ready((self._state, self._sums))


def named_leaves(tree: Tree) -> dict[str, Any]:
    """Leaves of a pytree by their path, such as `layers/wq`."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        parts = []
        for key in path:
            match key:
                case jax.tree_util.DictKey(key=name):
                    parts.append(str(name))
                case jax.tree_util.SequenceKey(idx=index):
                    parts.append(str(index))
                case jax.tree_util.GetAttrKey(name=name):
                    parts.append(name)
                case _:
                    parts.append(str(key))
        found["/".join(parts)] = leaf
    return found
