"""The `timed` engine: a device that is busy for given seconds and remembers what it applied.

For tests, chaos, the transport bench and rehearsals. It copies real bytes, keeps a copy lane and a
compute lane on a real or virtual clock, and its parameters are a hash chain over the micro-batches
and updates that it applied: a doubled, lost or reordered one shows in `parameter_digest`.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from prestage.microbatch import MicroBatch, MicroBatchId
from trainer_worker.clock import Clock
from trainer_worker.engine import (
    CompileReport,
    CompileSpec,
    DeviceFailure,
    DeviceSpan,
    EngineCapabilities,
    EngineError,
    EngineParts,
    InvalidBatch,
    PreparedInput,
    RunPosition,
    ScoreResult,
    TensorInfo,
    UpdateResult,
)

_FIRST_DIGEST: Final = hashlib.sha256(b"prestage timed engine").hexdigest()


class IdleWait(enum.Enum):
    """Why a wait on an idle device takes `idle_wait_seconds`."""

    LATE = "late"  # All that the host learns of the device, it learns so late.
    LEAST = "least"  # Every wait takes at least so long; reading metrics does not.


@dataclass(frozen=True, kw_only=True)
class TimedConfig:
    """How the made-up device behaves. Times in seconds."""

    fwd_bwd_seconds: float = 0.05
    update_seconds: float = 0.01
    copy_seconds: float = 0.02  # Fixed part of an input copy.
    copy_bytes_per_second: float = 0.0  # 0 = the fixed part only.
    compile_seconds: float = 0.0
    idle_wait_seconds: float = 0.0  # What a wait reads on an idle device.
    idle_wait: IdleWait = IdleWait.LEAST
    stage_call_seconds: float = 0.0  # Host time of a prepare_fwd_bwd_input call itself.
    max_inflight: int = 2
    can_stage: bool = True
    can_defer_update: bool = True
    fuses_update: bool = False  # The last fwd_bwd of a step updates by itself (for the guard).
    update_waits: bool = False  # For the last micro-batch, whether or not any can overflow.
    replay_seconds: float = 0.0  # A replay inside update(), each.
    replays: frozenset[tuple[int, int]] = frozenset()  # (step, index) that overflow.
    fail_call: frozenset[str] = frozenset()  # "fwd_bwd 1 2", "update 1", "stage 2 0" raise at once.
    fail_device: frozenset[tuple[int, int]] = frozenset()  # (step, index) that fail later.
    vocab_size: int = 0
    checkpoint_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in (
            "fwd_bwd_seconds",
            "update_seconds",
            "copy_seconds",
            "replay_seconds",
            "idle_wait_seconds",
            "stage_call_seconds",
            "compile_seconds",
            "checkpoint_seconds",
        ):
            value = float(self.__dict__[name])
            if not 0 <= value < 1e6:
                raise ValueError(f"{name} is {value}; use seconds between 0 and 1e6")
        if not 0 <= self.copy_bytes_per_second < 1e15:
            raise ValueError(
                f"copy_bytes_per_second is {self.copy_bytes_per_second}; use bytes/s, or 0 for"
                " copy_seconds alone"
            )
        if self.max_inflight < 1:
            raise ValueError(f"max_inflight is {self.max_inflight}; use at least 1")

    @property
    def waits(self) -> bool:
        """Whether the update is held for the last micro-batch."""
        return self.update_waits or bool(self.replays)

    @property
    def answers_late_s(self) -> float:
        """How late the host holds a result that it reads."""
        return self.idle_wait_seconds if self.idle_wait is IdleWait.LATE else 0.0

    def heard_s(self, finished_s: float, asked_s: float) -> float:
        """When a wait that is begun at `asked_s` hears of the end at `finished_s`.

        Every wait of this engine goes by it, so that the idle baseline and what is compared with it
        are of one kind.
        """
        if self.idle_wait is IdleWait.LATE:
            return max(finished_s + self.idle_wait_seconds, asked_s)
        return max(finished_s, asked_s + self.idle_wait_seconds)


@dataclass(kw_only=True)
class _Prepared:
    batch_id: MicroBatchId
    digest: str
    device_bytes: int
    span: DeviceSpan
    denominator: float
    clock: Clock

    def wait_ready(self) -> DeviceSpan:
        assert self.span.finished_s is not None
        self.clock.sleep_until(self.span.finished_s)
        return self.span


@dataclass(kw_only=True)
class _Dispatched:
    span: DeviceSpan
    clock: Clock
    hears: Callable[[float, float], float]
    failure: DeviceFailure | None = None

    def wait(self) -> DeviceSpan:
        assert self.span.finished_s is not None
        self.clock.sleep_until(self.hears(self.span.finished_s, self.clock.now()))
        return self.peek()

    def peek(self) -> DeviceSpan:
        if self.failure is not None:
            raise self.failure
        return self.span


@dataclass(kw_only=True)
class _Metrics:
    values: Mapping[str, float]
    known_at_s: float
    clock: Clock

    def result(self) -> Mapping[str, float]:
        self.clock.sleep_until(self.known_at_s)
        return self.values


@dataclass(kw_only=True)
class _Open:
    """The open step's accumulation."""

    digests: list[str] = field(default_factory=list)
    ids: list[tuple[int, int]] = field(default_factory=list)
    denominator: float = 0.0


class TimedEngine:
    """See the module. Implements training, scoring, checkpointing and weight export."""

    def __init__(
        self, config: TimedConfig, clock: Clock, checkpoint_dir: Path | None = None
    ) -> None:
        self._config = config
        self._clock = clock
        self._folder = checkpoint_dir
        self._open = _Open()
        self._chain = _FIRST_DIGEST
        self._train_step = 0
        self._compute_free_s = 0.0
        self._copy_free_s = 0.0
        self._inflight: deque[float] = deque()
        self._compiled = False
        self._pinned: dict[int, str] = {}
        self._device_copy: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    @property
    def capabilities(self) -> EngineCapabilities:
        config = self._config
        return EngineCapabilities(
            engine="timed",
            can_stage=config.can_stage,
            can_defer_update=config.can_defer_update,
            can_checkpoint=self._folder is not None,
            can_export_weights=True,
            can_score=True,
            update_waits_for_device=config.waits,
            optional_fields=(
                "sampling_logprobs",
                "old_logprobs",
                "ref_logprobs",
                "routed_experts",
            ),
            vocab_size=config.vocab_size,
            device_kind="timed",
        )

    @property
    def train_step(self) -> int:
        return self._train_step

    @property
    def backend_compiles(self) -> int:
        return 1 if self._compiled else 0

    def compile(self, spec: CompileSpec) -> CompileReport:
        del spec
        started_s = self._clock.now()
        self._clock.sleep_until(started_s + self._config.compile_seconds)
        self._compiled = True
        waits = tuple(self.wait_for_device() for _ in range(3))
        return CompileReport(
            seconds=self._clock.now() - started_s, programs=1, idle_wait_seconds=waits
        )

    def check(self, batch: MicroBatch) -> None:
        tokens = batch.arrays.get("tokens")
        if tokens is None or not self._config.vocab_size or not tokens.size:
            return
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._config.vocab_size:
            bad = low if low < 0 else high
            raise InvalidBatch(
                f"micro-batch {batch.id}: field tokens holds id {bad}, outside the vocabulary"
                f" (0 to {self._config.vocab_size - 1})"
            )

    def input_bytes(self, batch: MicroBatch) -> int:
        return batch.payload_bytes

    def _raise_if_planned(self, what: str) -> None:
        if what in self._config.fail_call:
            raise EngineError(f"planned failure of {what}")

    def prepare_fwd_bwd_input(self, batch: MicroBatch) -> _Prepared:
        self._raise_if_planned(f"stage {batch.id.step} {batch.id.index}")
        started_s = max(self._clock.now(), self._copy_free_s)
        payload_bytes = batch.payload_bytes
        self._copy_bytes(batch)
        if self._config.stage_call_seconds:
            self._clock.sleep_until(self._clock.now() + self._config.stage_call_seconds)
        seconds = self._config.copy_seconds
        if self._config.copy_bytes_per_second:
            seconds += payload_bytes / self._config.copy_bytes_per_second
        self._copy_free_s = max(started_s + seconds, self._clock.now())
        mask = batch.arrays.get("loss_mask")
        return _Prepared(
            batch_id=batch.id,
            digest=batch.digest,
            device_bytes=payload_bytes,
            span=DeviceSpan(started_s=started_s, finished_s=self._copy_free_s),
            denominator=1.0 if mask is None else float(np.count_nonzero(mask)),
            clock=self._clock,
        )

    def _copy_bytes(self, batch: MicroBatch) -> None:
        """A real copy of the real bytes into pooled (already touched) memory."""
        need = batch.payload_bytes
        if self._device_copy.size < need:
            self._device_copy = np.zeros(need, np.uint8)
        offset = 0
        for array in batch.arrays.values():
            target = self._device_copy[offset : offset + array.nbytes]
            np.copyto(target.view(array.dtype).reshape(array.shape), array)
            offset += array.nbytes

    def fwd_bwd(self, prepared: PreparedInput) -> _Dispatched:
        if not isinstance(prepared, _Prepared):
            raise EngineError(f"fwd_bwd got {type(prepared).__name__}, not this engine's input")
        step, index = prepared.batch_id.step, prepared.batch_id.index
        self._raise_if_planned(f"fwd_bwd {step} {index}")
        while len(self._inflight) >= self._config.max_inflight:
            self._wait_until(self._inflight.popleft())
        assert prepared.span.finished_s is not None
        started_s = max(self._clock.now(), prepared.span.finished_s, self._compute_free_s)
        self._compute_free_s = started_s + self._config.fwd_bwd_seconds
        self._inflight.append(self._compute_free_s)
        self._open.digests.append(prepared.digest)
        self._open.ids.append((step, index))
        self._open.denominator += prepared.denominator
        failure = None
        if (step, index) in self._config.fail_device:
            failure = DeviceFailure(prepared.batch_id, "planned failure on the device")
        if self._config.fuses_update:
            self._apply()
        span = DeviceSpan(started_s=started_s, finished_s=self._compute_free_s)
        return _Dispatched(
            span=span, clock=self._clock, hears=self._config.heard_s, failure=failure
        )

    def _wait_until(self, finished_s: float) -> None:
        self._clock.sleep_until(self._config.heard_s(finished_s, self._clock.now()))

    def wait_for_device(self) -> float:
        """A wait on a marker that is dispatched now, behind all other work."""
        started_s = self._clock.now()
        self._wait_until(max(self._compute_free_s, started_s))
        self._inflight.clear()
        return self._clock.now() - started_s

    def _apply(self) -> None:
        text = " ".join([self._chain, *self._open.digests])
        self._chain = hashlib.sha256(text.encode()).hexdigest()
        self._train_step += 1
        self._open = _Open()

    def update(self) -> UpdateResult:
        self._raise_if_planned(f"update {self._open.ids[0][0] if self._open.ids else -1}")
        replayed = [key for key in self._open.ids if key in self._config.replays]
        if self._config.waits:
            # The overflow flag of the last micro-batch decides: the update waits for it.
            self._wait_until(self._compute_free_s)
        # The retries are the device's work like the update that they are part of.
        started_s = max(self._clock.now(), self._compute_free_s)
        seconds = len(replayed) * self._config.replay_seconds + self._config.update_seconds
        self._compute_free_s = started_s + seconds
        denominator, count = self._open.denominator, len(self._open.ids)
        applied = denominator > 0
        if applied:
            self._apply()
        else:
            self._open = _Open()
        span = DeviceSpan(started_s=started_s, finished_s=self._compute_free_s)
        return UpdateResult(
            applied=applied,
            completion=_Dispatched(span=span, clock=self._clock, hears=self._config.heard_s),
            metrics=_Metrics(
                values={"denominator": denominator, "micro_batches": float(count)},
                known_at_s=self._compute_free_s + self._config.answers_late_s,
                clock=self._clock,
            ),
            dropless_replays=len(replayed),
        )

    def abort_step(self) -> None:
        self._open = _Open()

    def parameter_digest(self) -> str:
        return hashlib.sha256(f"{self._train_step} {self._chain}".encode()).hexdigest()

    def close(self) -> None:
        self._inflight.clear()

    # -- scoring ------------------------------------------------------------------------------

    def compute_logprobs(self, batch: MicroBatch) -> ScoreResult:
        """Made up of the parameters and the tokens: other weights give other scores."""
        self.check(batch)
        self._raise_if_planned(f"score {batch.id.step} {batch.id.index}")
        segments = batch.arrays["segment_ids"]
        predicted = np.zeros(segments.shape, np.bool_)
        predicted[:, 1:] = np.equal(segments[:, 1:], segments[:, :-1]) & (segments[:, 1:] != 0)
        salt = int(self.parameter_digest()[:6], 16)
        values = -1.0 - (batch.arrays["tokens"].astype(np.int64) + salt) % 1009 / 1009
        return ScoreResult(logprobs=np.where(predicted, values, 0).astype(np.float32), metrics={})

    def evaluate(self, batch: MicroBatch) -> Mapping[str, float]:
        self.check(batch)
        return {"tokens": float(batch.real_tokens)}

    # -- checkpoints --------------------------------------------------------------------------

    def begin_save(self, position: RunPosition) -> _Save:
        if self._folder is None:
            raise EngineError("no checkpoint folder: start the worker with --checkpoint_dir")
        self._raise_if_planned(f"save {position.step}")
        record = {**position.__dict__, "chain": self._chain}
        text = json.dumps(record, sort_keys=True)
        return _Save(
            step=position.step,
            folder=self._folder,
            text=text,
            clock=self._clock,
            durable_at_s=self._clock.now() + self._config.checkpoint_seconds,
        )

    def durable_step(self) -> int | None:
        steps = self._saved_steps()
        return steps[-1] if steps else None

    def _saved_steps(self) -> list[int]:
        if self._folder is None or not self._folder.exists():
            return []
        return sorted(
            int(path.stem.removeprefix("step-")) for path in self._folder.glob("step-*.json")
        )

    def saved_run(self, step: int | None) -> str | None:
        saved = self._saved(step)
        return None if saved is None else saved[1].run_id

    def _saved(self, step: int | None) -> tuple[str, RunPosition] | None:
        """(chain, position) of the newest checkpoint, or of the one of `step`."""
        steps = self._saved_steps()
        if not steps or (step is not None and step not in steps):
            return None
        assert self._folder is not None
        chosen = steps[-1] if step is None else step
        record = json.loads((self._folder / f"step-{chosen}.json").read_text())
        chain = str(record.pop("chain"))
        return chain, RunPosition(**record)

    def restore(self, step: int | None) -> RunPosition | None:
        saved = self._saved(step)
        if saved is None:
            return None
        self._chain, position = saved
        self._train_step = position.train_step
        self._open = _Open()
        return position

    # -- weight export --------------------------------------------------------------------------

    def prepare_weight_sync(self, memory_budget_bytes: int) -> int:
        if len(self._chain) > memory_budget_bytes:
            raise MemoryError(
                f"pinning takes {len(self._chain)} bytes; the budget is {memory_budget_bytes}"
            )
        self._pinned[self._train_step] = self._chain
        return len(self._chain)

    def _pinned_chain(self, version: int) -> str:
        if version not in self._pinned:
            raise EngineError(f"version {version} is not pinned; pinned: {sorted(self._pinned)}")
        return self._pinned[version]

    def export_manifest(self, version: int) -> tuple[TensorInfo, ...]:
        digest = hashlib.sha256(self._pinned_chain(version).encode()).hexdigest()
        return (TensorInfo(name="chain", dtype="uint8", shape=(64,), digest=digest),)

    def export_tensor(self, version: int, name: str) -> npt.NDArray[np.generic]:
        if name != "chain":
            raise EngineError(f"no parameter {name!r}; there is only 'chain'")
        return np.frombuffer(self._pinned_chain(version).encode(), np.uint8)

    def release_weight_sync(self, version: int) -> None:
        self._pinned.pop(version, None)


@dataclass(kw_only=True)
class _Save:
    step: int
    folder: Path
    text: str
    clock: Clock
    durable_at_s: float

    def wait(self) -> None:
        """Durable by write, fsync, rename, fsync of the folder. Safe from any thread."""
        self.clock.sleep_until(self.durable_at_s)
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / f"step-{self.step}.json"
        partial = target.with_suffix(".partial")
        with partial.open("w") as file:
            file.write(self.text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def create_timed(
    config: TimedConfig, clock: Clock, checkpoint_dir: Path | None = None
) -> EngineParts:
    """One timed engine with all its faces."""
    engine = TimedEngine(config, clock, checkpoint_dir)
    return EngineParts(
        training=engine,
        scoring=engine,
        checkpoint=engine if checkpoint_dir is not None else None,
        weights=engine,
    )
