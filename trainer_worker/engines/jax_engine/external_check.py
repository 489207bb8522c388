"""An external check: this engine's log-probs against two other implementations' on the same weights.

`python -m trainer_worker.engines.jax_engine.external_check --rollouts=FILE`: SmolLM2-135M in f32
scores recorded trajectories. The recorded `logprobs` were made by a NumPy f32 engine, and
`logprobs_llamacpp` by llama.cpp with 8-bit activations. Each trajectory is scored alone in a row,
and packed first, last and in the middle of a row: where it lies must not matter.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from prestage.microbatch import Array, MicroBatch, MicroBatchId
from trainer_worker.engine import CompileSpec, EngineParts
from trainer_worker.engines.jax_engine.config import EngineConfig, EngineConfigInvalid
from trainer_worker.engines.jax_engine.presets import TINY, create

FloatArray = npt.NDArray[np.float32]
FIELDS: Final = ("advantages", "loss_mask", "positions", "segment_ids", "tokens")
MEAN_BOUND: Final = 1e-3
MAX_BOUND: Final = 2e-2
LLAMACPP_MEAN_BOUND: Final = 0.05
PLACE_BOUND: Final = 2e-3
ROWS: Final = 2
MAX_TOKENS: Final = 341  # So that three fit a row of 1,024.
PLACED: Final = 6  # Trajectories that are scored alone and in every place.


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One recorded trajectory."""

    tokens: npt.NDArray[np.int32]
    prompt_length: int
    logprobs: FloatArray
    logprobs_llamacpp: FloatArray


@dataclass(frozen=True, kw_only=True)
class Result:
    """Absolute per-token gaps in nats."""

    trajectories: int
    tokens: int
    mean_gap: float
    max_gap: float
    llamacpp_mean_gap: float
    llamacpp_max_gap: float
    place_max_gap: float  # Alone against packed, any place in the row.

    @property
    def rows(self) -> list[tuple[str, float, float, bool]]:
        """(what, seen, bound, holds)."""
        lines = [
            ("mean gap to the recorded log-probs", self.mean_gap, MEAN_BOUND),
            ("max gap to the recorded log-probs", self.max_gap, MAX_BOUND),
            ("mean gap to llama.cpp (8-bit)", self.llamacpp_mean_gap, LLAMACPP_MEAN_BOUND),
            ("max gap between alone, first, middle, last", self.place_max_gap, PLACE_BOUND),
        ]
        return [(what, seen, bound, seen <= bound) for what, seen, bound in lines]


def read_recorded(path: Path, count: int) -> list[Recorded]:
    """`count` trajectories of at most `MAX_TOKENS` tokens, spread over the file."""
    columns = ["prompt_tokens", "completion_tokens", "logprobs", "logprobs_llamacpp"]
    table = pq.read_table(path, columns=columns)
    lengths = [
        len(prompt) + len(completion)
        for prompt, completion in zip(
            table["prompt_tokens"].to_pylist(), table["completion_tokens"].to_pylist(), strict=True
        )
    ]
    short = np.flatnonzero(np.asarray(lengths) <= MAX_TOKENS)
    picks = short[np.linspace(0, short.size - 1, count).astype(int)]
    found = []
    for pick in picks:
        prompt = np.asarray(table["prompt_tokens"][pick].as_py(), np.int32)
        completion = np.asarray(table["completion_tokens"][pick].as_py(), np.int32)
        found.append(
            Recorded(
                tokens=np.concatenate([prompt, completion]),
                prompt_length=len(prompt),
                logprobs=np.asarray(table["logprobs"][pick].as_py(), np.float32),
                logprobs_llamacpp=np.asarray(table["logprobs_llamacpp"][pick].as_py(), np.float32),
            )
        )
    return found


def _batch(rows: Sequence[Sequence[Recorded]], tokens: int, index: int) -> MicroBatch:
    shape = (len(rows), tokens)
    arrays: dict[str, Array] = {
        "tokens": np.zeros(shape, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
        "positions": np.zeros(shape, np.int32),
        "loss_mask": np.zeros(shape, np.uint8),
        "advantages": np.zeros(shape, np.float32),
    }
    lengths = []
    for row, items in enumerate(rows):
        start = 0
        for segment, item in enumerate(items, start=1):
            end = start + len(item.tokens)
            arrays["tokens"][row, start:end] = item.tokens
            arrays["segment_ids"][row, start:end] = segment
            arrays["positions"][row, start:end] = np.arange(len(item.tokens))
            arrays["loss_mask"][row, start + item.prompt_length : end] = 1
            start = end
        lengths.append(start)
    return MicroBatch(
        id=MicroBatchId(run_id="check", step=0, index=index),
        rows=shape[0],
        tokens_per_row=tokens,
        row_lengths=tuple(lengths),
        arrays=arrays,
    )


def _scores(
    parts: EngineParts, rows: list[list[Recorded]], tokens: int
) -> dict[tuple[int, int], FloatArray]:
    """Completion log-probs by (id of the trajectory, place in its row)."""
    assert parts.scoring is not None
    found: dict[tuple[int, int], FloatArray] = {}
    padded = rows + [[] for _ in range(-len(rows) % ROWS)]
    for start in range(0, len(padded), ROWS):
        chunk = padded[start : start + ROWS]
        scored = parts.scoring.compute_logprobs(_batch(chunk, tokens, start // ROWS)).logprobs
        for row, items in enumerate(chunk):
            at = 0
            for place, item in enumerate(items):
                end = at + len(item.tokens)
                found[id(item), place] = scored[row, at + item.prompt_length : end]
                at = end
    return found


def run_check(rollouts: Path, count: int) -> Result:
    """Score `count` trajectories four ways. Raises `EngineConfigInvalid` without the weights."""
    recorded = read_recorded(rollouts, count)
    tokens = -(-3 * max(len(item.tokens) for item in recorded) // 64) * 64
    parts = create("smollm2-135m", EngineConfig(model=TINY, logprob_chunk=64))
    parts.training.compile(CompileSpec(rows=ROWS, tokens_per_row=tokens, fields=FIELDS))
    # Some are scored alone and in every place of a row, the others packed three to a row.
    moved_about, others = recorded[:PLACED], recorded[PLACED:]
    alone = _scores(parts, [[item] for item in moved_about], tokens)
    turns = [moved_about[turn:] + moved_about[:turn] for turn in range(3)]
    places = _scores(parts, [list(row) for row in zip(*turns, strict=True)], tokens)
    rows = [others[start : start + 3] for start in range(0, len(others), 3)]
    mine = {key: scores for (key, _), scores in (alone | _scores(parts, rows, tokens)).items()}
    gaps = [np.abs(mine[id(item)] - item.logprobs) for item in recorded]
    llamacpp = [np.abs(mine[id(item)] - item.logprobs_llamacpp) for item in recorded]
    moved = [
        np.abs(mine[id(item)] - places[id(item), place])
        for item in moved_about
        for place in range(3)
    ]
    all_gaps, all_llamacpp = np.concatenate(gaps), np.concatenate(llamacpp)
    return Result(
        trajectories=count,
        tokens=all_gaps.size,
        mean_gap=float(all_gaps.mean()),
        max_gap=float(all_gaps.max()),
        llamacpp_mean_gap=float(all_llamacpp.mean()),
        llamacpp_max_gap=float(all_llamacpp.max()),
        place_max_gap=float(np.concatenate(moved).max()),
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=Path, default=Path("tests/data/rollouts.parquet"))
    parser.add_argument("--count", type=int, default=32)
    arguments = parser.parse_args(argv)
    try:
        result = run_check(arguments.rollouts, arguments.count)
    except EngineConfigInvalid as error:
        print(f"external_check: {error}", file=sys.stderr)  # noqa: T201
        return 2
    lines = [f"{result.trajectories} trajectories, {result.tokens} completion tokens", ""]
    lines.append(f"{'per token, nats':<46}{'seen':>10}{'bound':>10}")
    for what, seen, bound, holds in result.rows:
        lines.append(f"{what:<46}{seen:>10.2e}{bound:>10.0e}  {'ok' if holds else 'MISS'}")
    lines.append(f"{'max gap to llama.cpp (8-bit)':<46}{result.llamacpp_max_gap:>10.2e}")
    print("\n".join(lines))  # noqa: T201
    return 0 if all(holds for *_, holds in result.rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
