"""Measures the packer: rows against a true lower bound, and writing speed against memcpy.

`python -m orchestrator.bench.packing_bench [--json PATH] [--trajectories N]`. All numbers of one
run come from one process on one core; compare ratios, not absolute speeds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from orchestrator.bench.lp_bound import gilmore_gomory_bound
from orchestrator.packing import (
    FieldSet,
    PackingConfig,
    Positions,
    StepPlan,
    allocate,
    check_plan,
    common_fields,
    plan_step,
    write_micro_batch,
)
from orchestrator.trajectory import Group, Trajectory

Int64 = npt.NDArray[np.int64]

TOKENS_PER_ROW: Final = 65_536
ROWS: Final = 64
GROUP_SIZE: Final = 8
LOOSE_BOUND: Final = 0.005  # Beyond this, the slow bound tells whether packing or bound is loose.


def _lognormal(rng: np.random.Generator, count: int, sigma: float) -> Int64:
    """Lengths around 24k tokens with the given spread, cut at the row."""
    raw = rng.lognormal(0.0, sigma, count)
    lengths: Int64 = np.clip(raw / raw.mean() * 24_000, 16, TOKENS_PER_ROW).astype(np.int64)
    return lengths


def _bimodal(rng: np.random.Generator, count: int, short: int, long: int, share: float) -> Int64:
    """Two kinds of tasks: short answers and long ones, each with a tenth of spread."""
    centre = np.where(rng.random(count) < share, short, long)
    return np.clip(rng.normal(centre, centre / 10), 16, TOKENS_PER_ROW).astype(np.int64)


DISTRIBUTIONS: Final[dict[str, Callable[[np.random.Generator, int], Int64]]] = {
    "lognormal, sigma 0.35": lambda rng, n: _lognormal(rng, n, 0.35),
    "lognormal, sigma 0.6": lambda rng, n: _lognormal(rng, n, 0.6),
    "lognormal, sigma 1.0": lambda rng, n: _lognormal(rng, n, 1.0),
    "bimodal 4k / 48k": lambda rng, n: _bimodal(rng, n, 4_000, 48_000, 0.5),
    "bimodal 12k / 40k": lambda rng, n: _bimodal(rng, n, 12_000, 40_000, 0.7),
    "all equal, 24k": lambda rng, n: np.full(n, 24_000, np.int64),
    "all equal, a third of a row": lambda rng, n: np.full(n, TOKENS_PER_ROW // 3, np.int64),
    "0.51 of a row": lambda rng, n: np.full(n, int(0.51 * TOKENS_PER_ROW), np.int64),
    "uniform to a row": lambda rng, n: rng.integers(16, TOKENS_PER_ROW + 1, n),
    "short, 100 to 600": lambda rng, n: rng.integers(100, 601, n),
}


@dataclass(frozen=True, kw_only=True)
class RowsResult:
    """Rows of one step of one distribution."""

    distribution: str
    trajectories: int
    tokens: int
    rows: int
    fast_bound: int  # The packer's own: L2 and Fekete-Schepers.
    lower_bound: int  # The larger of it and, where it looks loose, Gilmore-Gomory.
    first_fit_decreasing: int
    over_bound: float  # rows / lower_bound - 1
    micro_batches: int
    early_groups: int
    groups: int
    plan_seconds: float
    rank_gap_segments: float  # Largest token gap between 4 ranks, in longest segments.


@dataclass(frozen=True, kw_only=True)
class WriteResult:
    """Writing one micro-batch into touched buffers."""

    case: str
    tokens: int
    payload_bytes: int
    seconds: float
    mtokens_per_second: float
    gigabytes_per_second: float
    memcpy_gigabytes_per_second: float
    of_memcpy: float


def synthetic_groups(
    lengths: Int64, *, routing: tuple[int, int] | None = None, prompt_share: float = 0.1
) -> list[Group]:
    """Groups of 8 with the given total lengths; token values are views of shared arrays."""
    longest = int(lengths.max())
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 32_000, longest, dtype=np.int32)
    logprobs = -rng.random(longest, dtype=np.float32)
    experts = None if routing is None else rng.integers(0, 128, (longest, *routing), dtype=np.int16)
    groups = []
    for start in range(0, len(lengths), GROUP_SIZE):
        group_id = f"g{start // GROUP_SIZE:06d}"
        members = []
        for index, total in enumerate(lengths[start : start + GROUP_SIZE].tolist()):
            prompt = max(1, int(total * prompt_share))
            members.append(
                Trajectory(
                    group_id=group_id,
                    index=index,
                    prompt_tokens=ids[:prompt],
                    completion_tokens=ids[prompt:total],
                    sampling_logprobs=logprobs[prompt:total],
                    routed_experts=None if experts is None else experts[:total],
                    reward=0.0,
                    policy_version=0,
                    advantage=0.5,
                )
            )
        groups.append(Group(group_id=group_id, trajectories=tuple(members)))
    return groups


def rows_of(name: str, count: int, seed: int = 0) -> RowsResult:
    """Plan one step of `count` trajectories and hold it to the bound."""
    lengths = DISTRIBUTIONS[name](np.random.default_rng(seed), count)
    groups = synthetic_groups(lengths)
    begin = time.perf_counter()
    plan = plan_step(groups, PackingConfig(rows=ROWS, tokens_per_row=TOKENS_PER_ROW))
    seconds = time.perf_counter() - begin
    check_plan(groups, plan)
    bound = plan.lower_bound_rows
    if plan.used_rows > bound * (1 + LOOSE_BOUND):
        bound = max(bound, gilmore_gomory_bound(lengths, TOKENS_PER_ROW))
    ranked = plan_step(
        groups, PackingConfig(rows=ROWS, tokens_per_row=TOKENS_PER_ROW, data_parallel_ranks=4)
    )
    gap = max(max(b.rank_tokens) - min(b.rank_tokens) for b in ranked.micro_batches)
    return RowsResult(
        distribution=name,
        trajectories=count,
        tokens=int(lengths.sum()),
        rows=plan.used_rows,
        fast_bound=plan.lower_bound_rows,
        lower_bound=bound,
        first_fit_decreasing=plan.first_fit_decreasing_rows,
        over_bound=plan.used_rows / bound - 1,
        micro_batches=len(plan.micro_batches),
        early_groups=plan.early_groups,
        groups=len(groups),
        plan_seconds=seconds,
        rank_gap_segments=gap / int(lengths.max()),
    )


def _best_seconds(work: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best


def memcpy_gigabytes_per_second(payload_bytes: int, repeats: int = 5) -> float:
    """Copying `payload_bytes` between two touched arrays."""
    source = np.ones(payload_bytes, np.uint8)
    target = np.zeros(payload_bytes, np.uint8)
    return payload_bytes / _best_seconds(lambda: np.copyto(target, source), repeats) / 1e9


def write_speed(
    case: str,
    lengths: Int64,
    *,
    rows: int,
    routing: tuple[int, int] | None = None,
    only_routing: bool = False,
    repeats: int = 5,
) -> WriteResult:
    """Write the step's first micro-batch into touched buffers.

    `only_routing`: the time and bytes of the token fields, measured apart, are taken off.
    """
    config = PackingConfig(rows=rows, tokens_per_row=TOKENS_PER_ROW)
    groups = synthetic_groups(lengths, routing=routing)
    plan = plan_step(groups, config)
    seconds, fields = _write_seconds(plan, groups, rows, repeats)
    payload = fields.payload_bytes(rows, TOKENS_PER_ROW)
    if only_routing:
        bare = synthetic_groups(lengths)
        token_seconds, token_fields = _write_seconds(plan, bare, rows, repeats)
        seconds -= token_seconds
        payload -= token_fields.payload_bytes(rows, TOKENS_PER_ROW)
    tokens = plan.micro_batches[0].real_tokens
    memcpy = memcpy_gigabytes_per_second(payload, repeats)
    speed = payload / seconds / 1e9
    return WriteResult(
        case=case,
        tokens=tokens,
        payload_bytes=payload,
        seconds=seconds,
        mtokens_per_second=tokens / seconds / 1e6,
        gigabytes_per_second=speed,
        memcpy_gigabytes_per_second=memcpy,
        of_memcpy=speed / memcpy,
    )


def _write_seconds(
    plan: StepPlan, groups: list[Group], rows: int, repeats: int
) -> tuple[float, FieldSet]:
    members = {t.key: t for group in groups for t in group.trajectories}
    fields = common_fields(members.values())
    out = allocate(rows, TOKENS_PER_ROW, fields)
    for array in out.values():
        array.fill(1)  # Touch every page: a send buffer is pooled.
    positions = Positions(TOKENS_PER_ROW)
    seconds = _best_seconds(
        lambda: write_micro_batch(plan.micro_batches[0], members, out, positions), repeats
    )
    return seconds, fields


def measure(trajectories: int = 1024) -> tuple[list[RowsResult], list[WriteResult]]:
    """Everything, in under a minute."""
    rows = [rows_of(name, trajectories) for name in DISTRIBUTIONS]
    rng = np.random.default_rng(1)
    writes = [
        write_speed("token fields, lengths around 24k", _lognormal(rng, 256, 0.6), rows=64),
        write_speed("token fields, 2k to 6k", rng.integers(2_000, 6_000, 1200), rows=64),
        write_speed("token fields, 100 to 600", rng.integers(100, 600, 6400), rows=32),
        write_speed(
            "routing [60 layers, top 10], around 24k",
            _lognormal(rng, 32, 0.6),
            rows=8,
            routing=(60, 10),
            only_routing=True,
            repeats=3,
        ),
    ]
    return rows, writes


def main(arguments: list[str] | None = None) -> int:
    """Print both tables, and JSON to `--json` when given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--trajectories", type=int, default=1024)
    options = parser.parse_args(arguments)
    rows, writes = measure(options.trajectories)
    print(
        f"{'distribution':28} {'rows':>5} {'bound':>6} {'FFD':>5} {'over':>7} {'M':>3}"
        f" {'early':>8} {'plan ms':>8} {'rank gap':>9}"
    )
    for r in rows:
        print(
            f"{r.distribution:28} {r.rows:5d} {r.lower_bound:6d} {r.first_fit_decreasing:5d}"
            f" {r.over_bound:7.2%} {r.micro_batches:3d} {r.early_groups:3d}/{r.groups:<4d}"
            f" {r.plan_seconds * 1e3:8.0f} {r.rank_gap_segments:9.2f}"
        )
    print()
    print(
        f"{'writing':42} {'MB':>6} {'Mtok/s':>8} {'GB/s':>6} {'memcpy GB/s':>12} {'of memcpy':>10}"
    )
    for w in writes:
        print(
            f"{w.case:42} {w.payload_bytes / 1e6:6.0f} {w.mtokens_per_second:8.0f}"
            f" {w.gigabytes_per_second:6.2f} {w.memcpy_gigabytes_per_second:12.2f}"
            f" {w.of_memcpy:10.2f}"
        )
    if options.json is not None:
        value = {"rows": [asdict(r) for r in rows], "writes": [asdict(w) for w in writes]}
        options.json.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
