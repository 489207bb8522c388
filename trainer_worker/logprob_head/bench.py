"""Compares the three heads on one mesh: CPU time, table traffic, FLOPs and temporary memory.

    python -m trainer_worker.logprob_head.bench [--mesh fsdp=2,context=4,expert=1] [--json FILE]

Counts come from the compiled program and are exact; times are medians of interleaved runs and only
their ratios mean anything. Exits 1 when a ratio is above its bar (bars hold for the default shape).
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from trainer_worker.logprob_head.config import ComputeDtype, HeadConfig, HeadMode, TokenLogprobs
from trainer_worker.logprob_head.hlo_count import (
    Program,
    gathers,
    looped_collectives,
    received_bytes,
    reductions,
)
from trainer_worker.logprob_head.layout import head_param_spec, token_spec
from trainer_worker.logprob_head.select import token_logprobs

MODES: tuple[HeadMode, ...] = ("off", "local", "vocab")
DEFAULT_MESHES = ("fsdp=2,context=2,expert=2", "fsdp=2,context=4,expert=1")
CPU_RATIO_BARS = {2: 0.60, 4: 0.35}
"""Context size -> largest allowed CPU time of the local head over the chunked head's."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One micro-batch: hidden [rows, tokens, features], table [vocab, features]."""

    rows: int = 4
    tokens: int = 1024
    features: int = 256
    vocab: int = 4096
    chunk_tokens: int = 64
    compute_dtype: ComputeDtype = "float32"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One head on one mesh, forward with gradients. Ratios are to the chunked head.

    table_gathers, table_reductions: of the whole table or, for `vocab`, of one slice, per run.
    """

    mode: str
    cpu_seconds: float
    cpu_ratio: float
    wall_ratio: float
    table_gathers: int
    table_reductions: int
    looped_collectives: int
    received_bytes: float
    matmul_flops: int
    flops_ratio: float
    temp_bytes: int
    compile_seconds: float


Params = tuple[jax.Array, jax.Array, jax.Array]


class _Head:
    """One head, compiled and placed."""

    def __init__(self, mode: HeadMode, mesh: Mesh, shape: Shape) -> None:
        dtype = shape.compute_dtype
        config = HeadConfig(chunk_tokens=shape.chunk_tokens, mode=mode, compute_dtype=dtype)
        rng = np.random.default_rng(0)
        size = (shape.rows, shape.tokens)
        hidden = rng.standard_normal((*size, shape.features), np.float32)
        table = rng.standard_normal((shape.vocab, shape.features), np.float32) / 16
        scale = np.ones(shape.features, np.float32)
        tokens = NamedSharding(mesh, token_spec(mesh, config))
        self._params: Params = (
            jax.device_put(jnp.asarray(hidden, dtype), tokens),
            _place(jnp.asarray(table, dtype), mesh, config),
            _place(jnp.asarray(scale, dtype), mesh, config),
        )
        self._targets = jax.device_put(rng.integers(0, shape.vocab, size).astype(np.int32), tokens)

        def objective(params: Params, targets: jax.Array) -> tuple[jax.Array, TokenLogprobs]:
            """Both results are returned, or the compiler would drop the forward."""
            hidden, table, scale = params
            scored = token_logprobs(hidden, table, targets, config, norm_scale=scale)
            return jnp.sum(scored.logprobs) + 0.01 * jnp.sum(scored.entropy), scored

        start = time.perf_counter()
        gradient = jax.jit(jax.value_and_grad(objective, has_aux=True))
        self._compiled = gradient.lower(self._params, self._targets).compile()
        self.compile_seconds = time.perf_counter() - start

    def seconds(self) -> tuple[float, float]:
        """CPU seconds of this process and wall seconds of one run."""
        cpu, wall = time.process_time(), time.perf_counter()
        for result in jax.tree.leaves(self._compiled(self._params, self._targets)):
            result.block_until_ready()
        return time.process_time() - cpu, time.perf_counter() - wall

    def program(self) -> Program:
        return Program(self._compiled.as_text() or "")

    def temp_bytes(self) -> int:
        analysis = self._compiled.memory_analysis()
        if analysis is None:
            raise RuntimeError(f"{jax.default_backend()} reports no memory analysis")
        return int(analysis.temp_size_in_bytes)


def _place(parameter: jax.Array, mesh: Mesh, config: HeadConfig) -> jax.Array:
    sharding = NamedSharding(mesh, head_param_spec(parameter.shape, mesh, config))
    placed: jax.Array = jax.device_put(parameter, sharding)
    return placed


def compare(axes: dict[str, int], shape: Shape, *, repeats: int) -> list[Measured]:
    """All heads on one mesh, `repeats` runs each, interleaved.

    Raises ValueError when a table part and a row group's hidden states have the same size, as
    table traffic is counted by size.
    """
    group = shape.rows * shape.tokens // (axes.get("fsdp", 1) * axes.get("expert", 1))
    if group in (shape.vocab, shape.vocab // axes.get("context", 1)):
        raise ValueError(
            f"vocab {shape.vocab} on mesh {axes} gives table parts of the size of the hidden"
            f" states ({group} x {shape.features}): give another --vocab, or the counts would mix"
        )
    devices = np.array(jax.devices()[: prod(axes.values())]).reshape(list(axes.values()))
    mesh = Mesh(devices, list(axes))
    with jax.set_mesh(mesh):
        heads = {mode: _Head(mode, mesh, shape) for mode in MODES}
        times: dict[HeadMode, list[tuple[float, float]]] = {mode: [] for mode in MODES}
        for mode in MODES:
            heads[mode].seconds()
        for _ in range(repeats):
            for mode in MODES:
                times[mode].append(heads[mode].seconds())
    cpu = {mode: statistics.median(c for c, _ in times[mode]) for mode in MODES}
    wall = {mode: statistics.median(w for _, w in times[mode]) for mode in MODES}
    chunked_flops = heads["off"].program().matmul_flops()
    measured = []
    for mode in MODES:
        program = heads[mode].program()
        parts = axes.get("context", 1) if mode == "vocab" else 1
        table = shape.vocab * shape.features // parts
        measured.append(
            Measured(
                mode=mode,
                cpu_seconds=cpu[mode],
                cpu_ratio=cpu[mode] / cpu["off"],
                wall_ratio=wall[mode] / wall["off"],
                table_gathers=gathers(program, table),
                table_reductions=reductions(program, table),
                looped_collectives=looped_collectives(program),
                received_bytes=received_bytes(program),
                matmul_flops=program.matmul_flops(),
                flops_ratio=program.matmul_flops() / chunked_flops,
                temp_bytes=heads[mode].temp_bytes(),
                compile_seconds=heads[mode].compile_seconds,
            )
        )
    return measured


def table_text(name: str, rows: list[Measured]) -> str:
    """One mesh's results as a Markdown table."""
    lines = [
        f"mesh {name}",
        "| head | CPU time | wall | table gathers | table reductions | collectives in loops |"
        " received MB | matmul GFLOP | FLOP ratio | temp MB | compile s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for m in rows:
        lines.append(
            f"| {m.mode} | {m.cpu_ratio:.2f} | {m.wall_ratio:.2f} | {m.table_gathers} |"
            f" {m.table_reductions} | {m.looped_collectives} | {m.received_bytes / 1e6:.2f} |"
            f" {m.matmul_flops / 1e9:.2f} | {m.flops_ratio:.3f} | {m.temp_bytes / 1e6:.1f} |"
            f" {m.compile_seconds:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Runs the comparison; returns the exit status."""
    parser = argparse.ArgumentParser(description="Compare the log-prob heads.")
    parser.add_argument("--mesh", action="append", help="axis=size,... in mesh order; repeatable")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    for name, value in asdict(Shape()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    options = parser.parse_args(argv)
    names: list[str] = options.mesh or list(DEFAULT_MESHES)
    meshes = {n: {a: int(s) for a, s in (p.split("=") for p in n.split(","))} for n in names}
    shape = replace(Shape(), **{key: vars(options)[key] for key in asdict(Shape())})
    # The CPU backend gives one device unless told before it starts; others ignore this.
    devices = max(prod(axes.values()) for axes in meshes.values())
    jax.config.update("jax_num_cpu_devices", devices)  # type: ignore[no-untyped-call]
    missed = []
    results: dict[str, list[dict[str, object]]] = {}
    for name, axes in meshes.items():
        rows = compare(axes, shape, repeats=options.repeats)
        sys.stdout.write(table_text(name, rows) + "\n")
        results[name] = [asdict(row) for row in rows]
        bar = CPU_RATIO_BARS.get(axes.get("context", 1))
        local = next(row for row in rows if row.mode == "local")
        if bar is not None and local.cpu_ratio > bar:
            missed.append(f"mesh {name}: local / off CPU time {local.cpu_ratio:.2f}, bar {bar}")
    text = json.dumps({"shape": asdict(shape), "meshes": results, "missed": missed})
    sys.stdout.write(text + "\n")
    if options.json:
        options.json.write_text(text + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
