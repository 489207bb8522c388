"""`orchestrator bench COMMAND`: benchmarks and proof tools."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Final, cast

COMMANDS: Final = {
    "all": ("orchestrator.bench.suite", "every quick bench, one after the other"),
    "ab": ("orchestrator.bench.ab.main", "a real-gradient A/B by rules written before the run"),
    "boundary": ("orchestrator.bench.boundary", "boundary idle on the real clock, by arm"),
    "latency": ("orchestrator.bench.latency", "health and state while the jax engine works"),
    "packing": ("orchestrator.bench.packing_bench", "packing against bounds and memcpy"),
    "payload": ("orchestrator.bench.payload", "half a gigabyte a micro-batch, on each plane"),
    "plot": ("orchestrator.bench.plots", "a timeline as SVG, from a trace or the simulator"),
    "planes": ("orchestrator.bench.plane_bench", "payload planes against memcpy and unary"),
    "predictions": ("orchestrator.bench.predictions", "write, check and score prediction files"),
    "read": ("orchestrator.bench.read", "step ruler lines of logs to means and deltas"),
    "rig": ("orchestrator.bench.rig", "recorded groups, five arms, predicted and scored"),
    "run": ("orchestrator.bench.run", "the main job: recorded rollouts, flags off and on"),
    "trainer": ("orchestrator.bench.trainer", "the trainer alone on synthetic micro-batches"),
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        print("usage: orchestrator bench COMMAND [flags]\n", file=sys.stderr)
        for name, (_, text) in COMMANDS.items():
            print(f"  {name:<10} {text}", file=sys.stderr)
        return 2
    module = importlib.import_module(COMMANDS[argv[0]][0])
    command = cast(Callable[[Sequence[str]], int], module.main)
    return command(argv[1:])
