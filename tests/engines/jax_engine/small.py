"""A model small enough for tests, micro-batches from plain sequences, and engines that share programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prestage.microbatch import FIELDS, Array, MicroBatch, MicroBatchId
from trainer_worker.engine import CompileSpec
from trainer_worker.engines.jax_engine.config import (
    EngineConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
)
from trainer_worker.engines.jax_engine.engine import JaxEngine
from trainer_worker.engines.jax_engine.model import init_params

ROWS, TOKENS = 4, 24
MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=24,
    query_block=10,  # Does not divide TOKENS.
)
EVERY_FIELD = tuple(name for name in FIELDS if name != "routed_experts")
SPEC = CompileSpec(rows=ROWS, tokens_per_row=TOKENS, fields=EVERY_FIELD)


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One trajectory; arrays are per token, of equal length."""

    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    advantages: npt.NDArray[np.float32]
    sampling_logprobs: npt.NDArray[np.float32]
    old_logprobs: npt.NDArray[np.float32]
    ref_logprobs: npt.NDArray[np.float32]

    @property
    def length(self) -> int:
        return len(self.tokens)


def sequence(
    rng: np.random.Generator, prompt: int, completion: int, *, masked: bool = False
) -> Trajectory:
    """A random trajectory; `masked`: its loss mask is all 0."""
    length = prompt + completion
    mask = (np.arange(length) >= prompt).astype(np.uint8)

    def logprobs() -> npt.NDArray[np.float32]:
        return (mask * -rng.uniform(2.5, 5.5, length)).astype(np.float32)

    return Trajectory(
        tokens=rng.integers(0, MODEL.vocab_size, length).astype(np.int32),
        loss_mask=mask * np.uint8(not masked),
        advantages=(mask * rng.normal(0, 1, length)).astype(np.float32),
        sampling_logprobs=logprobs(),
        old_logprobs=logprobs(),
        ref_logprobs=logprobs(),
    )


def sequences(seed: int, lengths: Sequence[tuple[int, int]]) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    return [sequence(rng, prompt, completion) for prompt, completion in lengths]


def aligned(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """Zeros at a 64-byte boundary, as shared memory is: what JAX on CPU may alias."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def pack(
    rows: Sequence[Sequence[Trajectory]],
    *,
    index: int = 0,
    step: int = 0,
    shape: tuple[int, int] = (ROWS, TOKENS),
    fields: tuple[str, ...] = EVERY_FIELD,
) -> MicroBatch:
    """A micro-batch that holds these sequences, row by row; missing rows are padding."""
    arrays = {name: aligned(shape, FIELDS[name].dtype) for name in fields}
    lengths = [0] * shape[0]
    for row, items in enumerate(rows):
        start = 0
        for segment, item in enumerate(items, start=1):
            end = start + item.length
            arrays["segment_ids"][row, start:end] = segment
            arrays["positions"][row, start:end] = np.arange(item.length)
            for name in fields:
                if name not in ("segment_ids", "positions"):
                    arrays[name][row, start:end] = getattr(item, name)
            start = end
        lengths[row] = start
    return MicroBatch(
        id=MicroBatchId(run_id="t", step=step, index=index),
        rows=shape[0],
        tokens_per_row=shape[1],
        row_lengths=tuple(lengths),
        arrays=arrays,
    )


def engine_config(
    loss: LossConfig | None = None, *, skips_prompts: bool | None = None
) -> EngineConfig:
    return EngineConfig(
        model=MODEL,
        loss=loss or LossConfig(),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        logprob_chunk=7,  # Does not divide TOKENS.
        skips_prompts=skips_prompts,
    )


def fresh(config: EngineConfig | None = None) -> JaxEngine:
    """An engine that is not compiled."""
    return JaxEngine(config or engine_config(), init_params(MODEL, 3))


def compiled(config: EngineConfig | None = None, spec: CompileSpec = SPEC) -> JaxEngine:
    engine = fresh(config)
    engine.compile(spec)
    return engine


def twin(engine: JaxEngine) -> JaxEngine:
    """A new engine with the first parameters and the other's compiled programs."""
    other = JaxEngine(engine._config, init_params(MODEL, 3))
    other._programs, other._spec = engine._programs, engine._spec
    return other
