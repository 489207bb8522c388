"""Synthetic micro-batches of a stated shape: real arrays and digests, made from the step's number."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from orchestrator.feeder import StepFeed, always
from orchestrator.ports import StepSummary
from prestage.microbatch import Array, MicroBatch, MicroBatchId
from prestage.wire.digest import content_digest


@dataclass(frozen=True, kw_only=True)
class SyntheticShape:
    """What the bench trains on. Tokens unless said otherwise."""

    rows: int = 2
    tokens_per_row: int = 64
    micro_batches: int = 3
    real_length: int = 60  # Real tokens of each row.
    padding_rows: int = 0  # Padding rows of the last micro-batch.
    segments_per_row: int = 2
    vocab_size: int = 100
    routing: tuple[int, int] | None = None  # (moe_layers, top_k)
    num_experts: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.segments_per_row * 2 <= self.real_length <= self.tokens_per_row:
            raise ValueError(
                f"real_length is {self.real_length}: it must hold {self.segments_per_row} segments"
                f" of 2 tokens and fit a row of {self.tokens_per_row}"
            )
        if not 0 <= self.padding_rows < self.rows:
            raise ValueError(f"padding_rows is {self.padding_rows}; rows is {self.rows}")


def make_batch(shape: SyntheticShape, run_id: str, step: int, index: int) -> MicroBatch:
    """One micro-batch; the same one whenever it is made again."""
    rng = np.random.default_rng((shape.seed, step, index))
    rows, tokens = shape.rows, shape.tokens_per_row
    padding = shape.padding_rows if index == shape.micro_batches - 1 else 0
    lengths = tuple(shape.real_length if row < rows - padding else 0 for row in range(rows))
    cuts = np.linspace(0, shape.real_length, shape.segments_per_row + 1).astype(int)
    segment_ids = np.zeros((rows, tokens), np.int32)
    positions = np.zeros((rows, tokens), np.int32)
    mask = np.zeros((rows, tokens), np.uint8)
    real = rows - padding
    for number, (start, end) in enumerate(itertools.pairwise(cuts), start=1):
        segment_ids[:real, start:end] = number
        positions[:real, start:end] = np.arange(end - start)
        mask[:real, start + 1 : end] = 1
    content = segment_ids > 0

    def only_real(values: Array) -> Array:
        return np.where(content, values, np.zeros((), values.dtype))

    arrays: dict[str, Array] = {
        "tokens": only_real(rng.integers(0, shape.vocab_size, (rows, tokens), np.int32)),
        "segment_ids": segment_ids,
        "positions": positions,
        "loss_mask": mask,
        "advantages": only_real(rng.standard_normal((rows, tokens)).astype(np.float32)),
        "sampling_logprobs": only_real(-rng.random((rows, tokens)).astype(np.float32)),
    }
    if shape.routing is not None:
        routing = rng.integers(0, shape.num_experts, (rows, tokens, *shape.routing), np.int16)
        arrays["routed_experts"] = np.where(content[..., None, None], routing, np.int16(-1))
    digest = content_digest(arrays, rows=rows, tokens_per_row=tokens, row_lengths=lengths)
    return MicroBatch(
        id=MicroBatchId(run_id=run_id, step=step, index=index),
        rows=rows,
        tokens_per_row=tokens,
        row_lengths=lengths,
        arrays=arrays,
        digest=digest,
    )


class SyntheticSource:
    """A `StepSource` that never waits and never ends."""

    def __init__(self, shape: SyntheticShape, run_id: str) -> None:
        self._shape = shape
        self._run_id = run_id

    def open_step(self, step: int, *, wanted: Callable[[], bool] = always) -> StepFeed | None:
        del wanted
        shape = self._shape
        rows = shape.rows * shape.micro_batches - shape.padding_rows

        def batches() -> Iterator[MicroBatch]:
            for index in range(shape.micro_batches):
                yield make_batch(shape, self._run_id, step, index)

        return StepFeed(
            summary=StepSummary(
                step=step,
                micro_batches=shape.micro_batches,
                groups=0,
                trajectories=rows * shape.segments_per_row,
                real_tokens=rows * shape.real_length,
                trained_tokens=rows * (shape.real_length - shape.segments_per_row),
                rows=rows,
                reward_mean=0.0,
            ),
            micro_batches=batches(),
        )

    def first_micro_batch(self, step: int, *, wanted: Callable[[], bool] = always) -> None:
        del step, wanted

    def data_cursor(self, next_step: int) -> str:
        return f'{{"next_step": {next_step}}}'

    def step_durable(self, step: int) -> None:
        del step
