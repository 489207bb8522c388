"""The `timed` engine as one of several processes: rows are split evenly, and nothing is exchanged.

For tests and rehearsals of a group of hosts. Each process keeps the same hash chain over whole
micro-batches, so their parameters are equal as long as they executed the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from prestage.microbatch import MicroBatch
from prestage.wire.layout import ShardRange
from trainer_worker.clock import Clock
from trainer_worker.engine import CompileSpec, EngineParts, InvalidBatch, PreparedInput, ScoreResult
from trainer_worker.engines.processes import Processes
from trainer_worker.engines.timed import TimedConfig, TimedEngine


class TimedShards:
    """`ShardedInputs` of a timed engine."""

    def __init__(self, engine: TimedEngine, processes: Processes) -> None:
        self._engine = engine
        self._processes = processes
        self._spec = CompileSpec(rows=0, tokens_per_row=0, fields=())

    @property
    def process_id(self) -> int:
        return self._processes.process_id

    def input_shards(self, spec: CompileSpec) -> tuple[ShardRange, ...]:
        count = self._processes.num_processes
        if spec.rows % count:
            raise InvalidBatch(f"{spec.rows} rows cannot be split over {count} processes")
        self._spec = spec
        rows = spec.rows // count
        return tuple(
            ShardRange(
                row_start=who * rows,
                row_count=rows,
                token_start=0,
                token_count=spec.tokens_per_row,
            )
            for who in range(count)
        )

    def denominator(self, batch: MicroBatch) -> float:
        return float(batch.trained_tokens)

    def check_scored(self, batch: MicroBatch) -> None:
        self._engine.check(batch)

    def prepare_shard(self, shard: MicroBatch, denominator: float) -> PreparedInput:
        return replace(self._engine.prepare_fwd_bwd_input(shard), denominator=denominator)

    def compute_logprobs_shard(self, shard: MicroBatch) -> ScoreResult:
        count = self._processes.num_processes
        shape = (shard.rows * count, shard.tokens_per_row)
        return ScoreResult(logprobs=np.zeros(shape, np.float32), metrics={})

    def evaluate_shard(self, shard: MicroBatch) -> Mapping[str, float]:
        return {"rows": float(shard.rows * self._processes.num_processes)}


def create_timed_host(
    config: TimedConfig, clock: Clock, processes: Processes, checkpoint_dir: Path | None = None
) -> EngineParts:
    """One process's timed engine."""
    engine = TimedEngine(config, clock, checkpoint_dir)
    return EngineParts(
        training=engine,
        scoring=engine,
        checkpoint=None if checkpoint_dir is None else engine,
        weights=engine,
        shards=TimedShards(engine, processes),
    )
