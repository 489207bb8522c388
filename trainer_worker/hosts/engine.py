"""HostsEngine: the engine ports on process 0 of a group. Everything that it does, the others do too.

Each call is a numbered command to every follower and is carried out here as well, on a thread of its
own: a collective that waits for a dead host keeps that thread, never the caller, who gets `HostLost`
with the reason. Input goes to each host as its own part, and is confirmed by all before any command
uses it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from prestage.hosts.v1 import hosts_pb2 as pb
from prestage.microbatch import MicroBatch, MicroBatchId
from prestage.wire.layout import ShardRange
from prestage.wire.stream_plane import shard_to_proto
from trainer_worker.device_thread import DeviceThread
from trainer_worker.engine import (
    CheckpointEngine,
    CompileReport,
    CompileSpec,
    DeviceSpan,
    Dispatched,
    EngineCapabilities,
    EngineError,
    EngineParts,
    InvalidBatch,
    PendingMetrics,
    PendingSave,
    PreparedInput,
    RunPosition,
    ScoreResult,
    TensorInfo,
    UpdateResult,
    WeightExportEngine,
)
from trainer_worker.hosts import outcomes
from trainer_worker.hosts.chain import COMPUTED, FAILED, numbers_digest
from trainer_worker.hosts.commands import Carried, Executor, compile_command, save_command
from trainer_worker.hosts.errors import HostLost
from trainer_worker.hosts.group import HostGroup
from trainer_worker.hosts.shards import Offers, check_shards, cut, ref_of

log = logging.getLogger("prestage.hosts")

T = TypeVar("T")

CLOSE_S = 20.0
"""For the followers to let go of their engines, at the end."""


class _Threads:
    """Where waits for the backend happen, so that whoever asked can leave them behind."""

    def __init__(self, group: HostGroup) -> None:
        self._group = group
        self._engine = DeviceThread("hosts-engine")
        self._copies = DeviceThread("hosts-copies")
        self._compute = DeviceThread("hosts-compute")
        self._metrics = DeviceThread("hosts-metrics")

    def engine(self, name: str, work: Callable[[], T]) -> T:
        return self._group.guarded(self._engine.submit(name, work))

    def copy(self, work: Callable[[], T]) -> T:
        return self._group.guarded(self._copies.submit("copy", work))

    def compute(self, work: Callable[[], T]) -> T:
        return self._group.guarded(self._compute.submit("compute", work))

    def metrics(self, work: Callable[[], T]) -> T:
        return self._group.guarded(self._metrics.submit("metrics", work))

    def drain(self, timeout_s: float) -> None:
        for thread in (self._engine, self._copies, self._compute, self._metrics):
            thread.drain(timeout_s)


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """This host's part of a prepared input, and the command that prepared it everywhere."""

    inner: PreparedInput
    number: int
    whole_bytes: int
    threads: _Threads

    @property
    def batch_id(self) -> MicroBatchId:
        return self.inner.batch_id

    @property
    def digest(self) -> str:
        return self.inner.digest

    @property
    def device_bytes(self) -> int:
        """Over the devices of every host."""
        return self.whole_bytes

    def wait_ready(self) -> DeviceSpan:
        return self.threads.copy(self.inner.wait_ready)


@dataclass(frozen=True, kw_only=True)
class _Dispatched:
    """`settled` hears what it came to here, to be compared with the other hosts'."""

    inner: Dispatched
    threads: _Threads
    settled: Callable[[bool], None]

    def wait(self) -> DeviceSpan:
        try:
            span = self.threads.compute(self.inner.wait)
        except HostLost:
            raise
        except Exception:
            self.settled(False)
            raise
        self.settled(True)
        return span

    def peek(self) -> DeviceSpan:
        return self.inner.peek()


@dataclass(frozen=True, kw_only=True)
class _Metrics:
    inner: PendingMetrics
    threads: _Threads

    def result(self) -> Mapping[str, float]:
        return self.threads.metrics(self.inner.result)


class HostsEngine:
    """See the module. Implements the ports that the wrapped engine has."""

    def __init__(self, parts: EngineParts, group: HostGroup, offers: Offers) -> None:
        """`parts`: this process's own engine, whose `shards` say how input is split."""
        if parts.shards is None:
            raise EngineError(
                f"engine {parts.training.capabilities.engine} cannot be one of several processes"
            )
        self._parts = parts
        self._split = parts.shards
        self._group = group
        self._offers = offers
        self._threads = _Threads(group)
        self._shards: tuple[ShardRange, ...] = ()
        self._shape = (0, 0)  # Rows and tokens that the shards split.
        self._own: MicroBatch | None = None  # This host's part, of the command that runs.
        self._executor = Executor(parts, self._own_part)

    def _own_part(self, ref: pb.MicroBatchRef) -> MicroBatch:
        assert self._own is not None and self._own.digest == ref.digest
        return self._own

    # -- running a command everywhere -------------------------------------------------------------

    def _everywhere(self, command: pb.Command, *, settle: bool) -> Carried:
        """Carry out here and on every follower; `settle`: wait until all of them have done so."""
        number = self._group.command(command)
        name = command.WhichOneof("what") or ""
        try:
            carried = self._threads.engine(name, lambda: self._executor.carry_out(command))
        except HostLost:
            raise
        except Exception as error:
            self._group.executed(number, outcomes.of_error(error))
            self._group.await_done(number)  # Raised everywhere, or the group is lost.
            raise
        self._group.executed(number, carried.outcome)
        if settle:
            self._group.await_done(number)
        return carried

    def bring(self, batch: MicroBatch) -> int:
        """Every follower holds its part, checked, when this returns. Bytes sent. Any thread."""
        if (batch.rows, batch.tokens_per_row) != self._shape:
            return 0  # Not compiled, or not for this shape: nobody can say who needs what.
        ref = self._offers.offer(batch, self._shards)
        try:
            holds = {
                who: pb.Command(hold=pb.Hold(batch=ref, shard=shard_to_proto(shard)))
                for who, shard in enumerate(self._shards)
                if who
            }
            return self._group.guarded(self._group.hold(ref, holds))
        finally:
            self._offers.withdraw(ref)

    def bring_early(self, batch: MicroBatch) -> None:
        """`bring` for an upload: what comes of a lost host is the next call's to say."""
        with contextlib.suppress(HostLost):
            self.bring(batch)

    def _with_input(self, batch: MicroBatch, command: pb.Command, *, settle: bool) -> Carried:
        """A command that reads a micro-batch: confirmed on every host before it is sent."""
        if not self._shards:
            raise EngineError("the engine is not compiled: call compile first")
        if (batch.rows, batch.tokens_per_row) != self._shape:
            raise InvalidBatch(
                f"micro-batch {batch.id} is [{batch.rows}, {batch.tokens_per_row}]; the hosts are"
                f" compiled for {list(self._shape)}: pack for that shape or compile again"
            )
        self.bring(batch)
        self._own = cut(batch, self._shards[0])
        try:
            return self._everywhere(command, settle=settle)
        finally:
            self._own = None

    # -- training ---------------------------------------------------------------------------------

    @property
    def capabilities(self) -> EngineCapabilities:
        return replace(self._parts.training.capabilities, process_count=self._group.size)

    @property
    def train_step(self) -> int:
        return self._parts.training.train_step

    @property
    def backend_compiles(self) -> int:
        return self._parts.training.backend_compiles

    def compile(self, spec: CompileSpec) -> CompileReport:
        shards = self._split.input_shards(spec)
        try:
            check_shards(shards, rows=spec.rows, tokens_per_row=spec.tokens_per_row)
        except ValueError as error:
            raise InvalidBatch(f"compile: {error}") from error
        if len(shards) != self._group.size:
            raise EngineError(
                f"the engine splits input over {len(shards)} processes; the group has"
                f" {self._group.size}"
            )
        carried = self._everywhere(compile_command(spec), settle=True)
        self._shards, self._shape = shards, (spec.rows, spec.tokens_per_row)
        assert carried.compiled is not None
        for who, shard in enumerate(shards):
            log.info(
                "host %d holds rows %d to %d and tokens %d to %d of each micro-batch",
                who,
                shard.row_start,
                shard.row_start + shard.row_count - 1,
                shard.token_start,
                shard.token_start + shard.token_count - 1,
            )
        return carried.compiled

    def check(self, batch: MicroBatch) -> None:
        self._parts.training.check(batch)

    def input_bytes(self, batch: MicroBatch) -> int:
        return self._parts.training.input_bytes(batch)

    def prepare_fwd_bwd_input(self, batch: MicroBatch) -> _Prepared:
        denominator = self._split.denominator(batch)
        command = pb.Command(prepare=pb.Prepare(batch=ref_of(batch), denominator=denominator))
        carried = self._with_input(batch, command, settle=False)
        assert carried.prepared is not None
        return _Prepared(
            inner=carried.prepared,
            number=command.number,
            whole_bytes=self.input_bytes(batch),
            threads=self._threads,
        )

    def fwd_bwd(self, prepared: PreparedInput) -> _Dispatched:
        if not isinstance(prepared, _Prepared):
            raise EngineError(f"fwd_bwd got {type(prepared).__name__}, not this engine's input")
        command = pb.Command(fwd_bwd=pb.FwdBwd(prepared=prepared.number))
        carried = self._everywhere(command, settle=False)
        assert carried.dispatched is not None
        number = command.number

        def settled(computed: bool) -> None:
            self._group.settled(0, number, COMPUTED if computed else FAILED)

        return _Dispatched(inner=carried.dispatched, threads=self._threads, settled=settled)

    def wait_for_device(self) -> float:
        """Of this host's devices: what they wait for, the others' do too."""
        return self._threads.engine("wait_for_device", self._parts.training.wait_for_device)

    def update(self) -> UpdateResult:
        command = pb.Command(update=pb.Update())
        update = self._everywhere(command, settle=False).update
        assert update is not None
        number, metrics = command.number, update.metrics

        def settled(computed: bool) -> None:
            values = self._threads.metrics(metrics.result) if computed else None
            self._group.settled(0, number, FAILED if values is None else numbers_digest(values))

        return replace(
            update,
            completion=_Dispatched(inner=update.completion, threads=self._threads, settled=settled),
            metrics=_Metrics(inner=metrics, threads=self._threads),
        )

    def abort_step(self) -> None:
        self._everywhere(pb.Command(abort_step=pb.AbortStep()), settle=True)

    def parameter_digest(self) -> str:
        command = pb.Command(parameter_digest=pb.ParameterDigest())
        return self._everywhere(command, settle=True).digest

    def close(self) -> None:
        """The followers end, too; theirs is not waited for once the group is lost."""
        self._group.closing()
        if self._group.lost.done():
            return
        self._everywhere(pb.Command(close=pb.Close()), settle=True)
        for who, size in sorted(self._group.facts().shard_bytes.items()):
            log.info("host %d received %d bytes of micro-batches", who, size)
        self._threads.drain(CLOSE_S)

    # -- scoring ----------------------------------------------------------------------------------

    def compute_logprobs(self, batch: MicroBatch) -> ScoreResult:
        self._split.check_scored(batch)
        command = pb.Command(compute_logprobs=pb.ComputeLogprobs(batch=ref_of(batch)))
        scores = self._with_input(batch, command, settle=True).scores
        assert scores is not None
        return scores

    def evaluate(self, batch: MicroBatch) -> Mapping[str, float]:
        self._split.check_scored(batch)
        command = pb.Command(evaluate=pb.Evaluate(batch=ref_of(batch)))
        numbers = self._with_input(batch, command, settle=True).numbers
        assert numbers is not None
        return numbers


class HostsCheckpoints:
    """Process 0 writes; every process takes part in the snapshot and reads at a restore."""

    def __init__(self, engine: HostsEngine, inner: CheckpointEngine) -> None:
        self._engine = engine
        self._inner = inner

    def begin_save(self, position: RunPosition) -> PendingSave:
        save = self._engine._everywhere(save_command(position), settle=True).save
        assert save is not None
        return save

    def saved_run(self, step: int | None) -> str | None:
        return self._inner.saved_run(step)

    def restore(self, step: int | None) -> RunPosition | None:
        """The leader names the step: hosts that look for themselves could find different ones."""
        chosen = self._inner.durable_step() if step is None else step
        if chosen is None:
            return None
        command = pb.Command(restore=pb.Restore(step=chosen))
        return self._engine._everywhere(command, settle=True).position

    def durable_step(self) -> int | None:
        return self._inner.durable_step()


class HostsWeights:
    """Every process takes part in pinning; what was pinned is read here."""

    def __init__(self, engine: HostsEngine, inner: WeightExportEngine) -> None:
        self._engine = engine
        self._inner = inner

    def prepare_weight_sync(self, memory_budget_bytes: int) -> int:
        command = pb.Command(pin_weights=pb.PinWeights(memory_budget_bytes=memory_budget_bytes))
        return self._engine._everywhere(command, settle=True).pinned_bytes

    def export_manifest(self, version: int) -> tuple[TensorInfo, ...]:
        return self._inner.export_manifest(version)

    def export_tensor(self, version: int, name: str) -> npt.NDArray[np.generic]:
        return self._inner.export_tensor(version, name)

    def release_weight_sync(self, version: int) -> None:
        command = pb.Command(release_weights=pb.ReleaseWeights(version=version))
        self._engine._everywhere(command, settle=True)


def hosts_parts(parts: EngineParts, group: HostGroup, offers: Offers) -> EngineParts:
    """The leader's engine, with the faces that its own engine has."""
    engine = HostsEngine(parts, group, offers)
    return EngineParts(
        training=engine,
        scoring=None if parts.scoring is None else engine,
        checkpoint=None if parts.checkpoint is None else HostsCheckpoints(engine, parts.checkpoint),
        weights=None if parts.weights is None else HostsWeights(engine, parts.weights),
        lost=group.lost_reason,
        bring=engine.bring_early,
    )
