"""`orchestrator bench payload`: routing of about 512 MiB a micro-batch through each plane.

The timed engine, stock and staged. Says whether bytes were ever waited for.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from orchestrator.bench.processes import ProcessError, worker_process
from orchestrator.bench.synthetic import SyntheticShape, SyntheticSource, make_batch
from orchestrator.bench.trainer import arm_plan, drive, summary
from orchestrator.feeder import StepFeed, always
from orchestrator.runner import RunFailed
from prestage.microbatch import MicroBatch, MicroBatchId
from prestage.trace import read_trace


class _Same(SyntheticSource):
    """The same content in every micro-batch: making it must not be what is measured."""

    def __init__(self, shape: SyntheticShape, batch: MicroBatch) -> None:
        super().__init__(shape, "bench")
        self._batch = batch
        self._count = shape.micro_batches

    def open_step(self, step: int, *, wanted: Callable[[], bool] = always) -> StepFeed | None:
        feed = super().open_step(step, wanted=wanted)
        assert feed is not None

        def batches() -> Iterator[MicroBatch]:
            for index in range(self._count):
                name = MicroBatchId(run_id="bench", step=step, index=index)
                yield dataclasses.replace(self._batch, id=name)

        return dataclasses.replace(feed, micro_batches=batches())


def _most_waited_s(folder: Path) -> float:
    """The longest pause of the device between two micro-batches of one step."""
    (path,) = folder.glob("*.ndjson")
    spans = [span for span in read_trace(path).device if span.kind == "fwd_bwd"]
    spans.sort(key=lambda span: (span.step, span.index))
    pairs = itertools.pairwise(spans)
    return max(b.started_s - a.finished_s for a, b in pairs if a.step == b.step)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator bench payload", description=__doc__)
    parser.add_argument("--rows", type=int, default=7, help="of 65,536 tokens, 1,200 bytes each")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--update_s", type=float, default=0.2)
    parser.add_argument("--copy_s", type=float, default=0.5)
    parser.add_argument("--out", type=Path, default=Path("out/payload"))
    arguments = parser.parse_args(argv)
    shape = SyntheticShape(
        rows=arguments.rows, tokens_per_row=65536, real_length=65536, routing=(60, 10)
    )
    batch = make_batch(shape, "bench", 0, 0)
    print(f"payload {batch.payload_bytes / 2**20:.0f} MiB a micro-batch", flush=True)
    flags = ["--engine=timed", "--timed_fwd_bwd_s=1.0", f"--timed_update_s={arguments.update_s}"]
    flags.append(f"--timed_copy_s={arguments.copy_s}")
    step_s = 1.005 * (shape.micro_batches + arguments.update_s)
    missed = False
    for name, shared in (("shared-memory", 4 << 30), ("stream", 0)):
        stock_s = 0.0
        for arm in ("stock", "staged_before"):
            folder: Path = arguments.out / name / arm
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("*.ndjson"):
                old.unlink()
            try:
                with worker_process(
                    [*flags, f"--trace_dir={folder}"], folder / "worker.log"
                ) as worker:
                    run = drive(
                        worker.address,
                        arm_plan(arm, arguments.steps),
                        shape,
                        lambda: _Same(shape, batch),
                        shared_memory_bytes=shared,
                    )
            except (ProcessError, RunFailed) as error:
                print(f"orchestrator bench payload: {error}", file=sys.stderr)
                return 1
            values = summary(run, shape)
            idle_s, waited_s = values["boundary_idle_seconds"], _most_waited_s(folder)
            print(
                f"{run.plane} {arm}: idle {idle_s:.4f} s, step {values['step_seconds']:.4f} s,"
                f" longest wait inside a step {waited_s:.4f} s",
                flush=True,
            )
            if arm == "stock":
                stock_s = idle_s
                continue
            met = idle_s <= max(0.01 * stock_s, 0.005) and waited_s <= 0.005
            met = met and values["step_seconds"] <= step_s and run.plane == name
            missed = missed or not met
            print(f"{'ok  ' if met else 'MISS'} {name} (step bound {step_s:.4f} s)")
    return 1 if missed else 0
