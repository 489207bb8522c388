"""Commands as messages: made by the leader, carried out by every process. Knows no threads.

`Executor` is the one place where a command meets an engine, on the leader as on a follower, so the
two cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prestage.hosts.v1 import hosts_pb2 as pb
from prestage.microbatch import MicroBatch
from trainer_worker.engine import (
    CheckpointEngine,
    CompileReport,
    CompileSpec,
    Dispatched,
    EngineError,
    EngineParts,
    PendingSave,
    PreparedInput,
    RunPosition,
    ScoreResult,
    ShardedInputs,
    UpdateResult,
    WeightExportEngine,
)
from trainer_worker.hosts import outcomes
from trainer_worker.hosts.errors import OutOfStep

GetShard = Callable[[pb.MicroBatchRef], MicroBatch]


def spec_of(message: pb.Compile) -> CompileSpec:
    return CompileSpec(
        rows=message.rows, tokens_per_row=message.tokens_per_row, fields=tuple(message.fields)
    )


def compile_command(spec: CompileSpec) -> pb.Command:
    return pb.Command(
        compile=pb.Compile(
            rows=spec.rows, tokens_per_row=spec.tokens_per_row, fields=list(spec.fields)
        )
    )


def position_of(message: pb.Save) -> RunPosition:
    return RunPosition(
        run_id=message.run_id,
        step=message.step,
        train_step=message.train_step,
        epoch=message.epoch,
        last_seq=message.last_seq,
        data_cursor=message.data_cursor,
    )


def save_command(position: RunPosition) -> pb.Command:
    return pb.Command(
        save=pb.Save(
            run_id=position.run_id,
            step=position.step,
            train_step=position.train_step,
            epoch=position.epoch,
            last_seq=position.last_seq,
            data_cursor=position.data_cursor,
        )
    )


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What a command came to: `outcome` for all to compare, the rest for the process itself."""

    outcome: str
    compiled: CompileReport | None = None
    prepared: PreparedInput | None = None
    dispatched: Dispatched | None = None
    update: UpdateResult | None = None
    save: PendingSave | None = None
    position: RunPosition | None = None
    scores: ScoreResult | None = None
    numbers: dict[str, float] | None = None
    digest: str = ""
    pinned_bytes: int = 0


class Executor:
    """One process's engine. `carry_out` raises what the engine raises."""

    def __init__(self, parts: EngineParts, shard: GetShard) -> None:
        if parts.shards is None:
            raise EngineError(
                f"engine {parts.training.capabilities.engine} cannot be one of several processes"
            )
        self._parts = parts
        self._shards: ShardedInputs = parts.shards
        self._shard = shard
        self._prepared: dict[int, PreparedInput] = {}  # By number: prepared and not trained.

    @property
    def parts(self) -> EngineParts:
        return self._parts

    def carry_out(self, command: pb.Command) -> Carried:
        """Execute one command here. Raises `OutOfStep` for one that makes no sense now."""
        training = self._parts.training
        match command.WhichOneof("what"):
            case "compile":
                report = training.compile(spec_of(command.compile))
                return Carried(outcome="compiled", compiled=report)
            case "prepare":
                shard = self._shard(command.prepare.batch)
                prepared = self._shards.prepare_shard(shard, command.prepare.denominator)
                self._prepared[command.number] = prepared
                return Carried(outcome=outcomes.of_prepare(prepared), prepared=prepared)
            case "fwd_bwd":
                held = self._prepared.pop(command.fwd_bwd.prepared, None)
                if held is None:
                    raise OutOfStep(f"no input was prepared by command {command.fwd_bwd.prepared}")
                work = training.fwd_bwd(held)
                return Carried(outcome="dispatched", dispatched=work)
            case "update":
                update = training.update()
                text = outcomes.of_update(update, training.train_step)
                return Carried(outcome=text, update=update)
            case "abort_step":
                training.abort_step()
                self._prepared.clear()
                return Carried(outcome=f"aborted at train_step {training.train_step}")
            case "parameter_digest":
                digest = training.parameter_digest()
                return Carried(outcome=digest, digest=digest)
            case "save":
                position = position_of(command.save)
                save = self._checkpoint.begin_save(position)
                return Carried(outcome=outcomes.of_position(position), save=save)
            case "restore":
                restored = self._checkpoint.restore(command.restore.step)
                if restored is not None:
                    self._prepared.clear()
                return Carried(outcome=outcomes.of_position(restored), position=restored)
            case "compute_logprobs":
                shard = self._shard(command.compute_logprobs.batch)
                scores = self._shards.compute_logprobs_shard(shard)
                return Carried(outcome=outcomes.of_scores(scores), scores=scores)
            case "evaluate":
                shard = self._shard(command.evaluate.batch)
                numbers = dict(self._shards.evaluate_shard(shard))
                return Carried(outcome=outcomes.of_numbers(numbers), numbers=numbers)
            case "pin_weights" | "release_weights":
                return self._weights_command(command, self._weights)
            case "close":
                training.close()
                return Carried(outcome="closed")
            case other:
                raise OutOfStep(f"{other!r} is not a command to carry out")

    def _weights_command(self, command: pb.Command, weights: WeightExportEngine) -> Carried:
        if command.HasField("release_weights"):
            weights.release_weight_sync(command.release_weights.version)
            return Carried(outcome=f"released {command.release_weights.version}")
        version = self._parts.training.train_step
        pinned = weights.prepare_weight_sync(command.pin_weights.memory_budget_bytes)
        text = outcomes.of_weights(version, weights.export_manifest(version))
        return Carried(outcome=text, pinned_bytes=pinned)

    @property
    def _checkpoint(self) -> CheckpointEngine:
        if self._parts.checkpoint is None:
            raise EngineError("this host keeps no checkpoints: start it with --checkpoint_dir")
        return self._parts.checkpoint

    @property
    def _weights(self) -> WeightExportEngine:
        if self._parts.weights is None:
            raise EngineError(
                f"engine {self._parts.training.capabilities.engine} cannot export weights"
            )
        return self._parts.weights
