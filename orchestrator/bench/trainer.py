"""`orchestrator bench trainer`: the trainer alone, on synthetic micro-batches of a stated shape.

The real runner, feeder and client drive a worker process, one arm after the other; a fresh worker
for each arm, so that all start from the same parameters. Checks what the calls did, exactly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from orchestrator.bench.processes import ProcessError, worker_process
from orchestrator.bench.synthetic import SyntheticShape, SyntheticSource
from orchestrator.boundary import BoundaryState
from orchestrator.calls import Note
from orchestrator.clock import RealClock
from orchestrator.feeder import Feeder, StepSource
from orchestrator.invariants import FROM_SCRATCH, Expectation, finished, observe
from orchestrator.plan import RunPlan
from orchestrator.ports import Answer
from orchestrator.put_client import PlanePut, open_plane, receive_buffers
from orchestrator.runner import RunFailed, Runner
from orchestrator.steps import StepRecord
from orchestrator.trainer_client import RunShape, TrainerClient
from prestage.trace import TraceRecord
from prestage.wire.channel import open_channel

ARMS: Final = ("stock", "pipelined", "staged_after", "staged_before", "zero_gap")
_TRAINING: Final = "fwd_bwd"
_STAGE: Final = "stage_fwd_bwd"


def arm_plan(arm: str, num_steps: int) -> RunPlan:
    """The plan of one arm. Staging never latches off: a bench measures what it was told to."""
    return RunPlan(
        num_steps=num_steps,
        pipeline=arm != "stock",
        stage=arm not in ("stock", "pipelined"),
        stage_before_update=arm != "staged_after",
        dispatch_before_metrics=arm == "zero_gap",
        latch_after=1_000_000,
    )


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """What one arm did."""

    records: tuple[StepRecord, ...]
    calls: tuple[TraceRecord, ...]
    parameter_digest: str
    plane: str


@dataclass(kw_only=True)
class _Calls:
    records: list[TraceRecord] = field(default_factory=list)

    def on_call(self, record: TraceRecord, answer: Answer) -> None:
        del answer
        self.records.append(record)

    def on_note(self, note: Note) -> None:
        del note

    def on_state(self, state: BoundaryState) -> None:
        del state


def drive(
    address: str,
    plan: RunPlan,
    shape: SyntheticShape,
    make_source: Callable[[], StepSource],
    *,
    shared_memory_bytes: int,
) -> ArmRun:
    """One run against a serving worker. Raises `RunFailed`."""
    fields = ["advantages", "loss_mask", "positions", "sampling_logprobs", "segment_ids", "tokens"]
    if shape.routing is not None:
        fields.append("routed_experts")
    channel = open_channel(address)
    compiled = RunShape(
        rows=shape.rows,
        tokens_per_row=shape.tokens_per_row,
        fields=tuple(sorted(fields)),
        routing_shape=shape.routing or (),
    )
    probe = TrainerClient(channel, run_id="bench", shape=compiled)
    plane = open_plane(channel, probe.capabilities, shared_memory_bytes=shared_memory_bytes)
    compiled = replace(compiled, receive_buffers=receive_buffers(plane))
    client = TrainerClient(channel, run_id="bench", shape=compiled)
    feeder = Feeder(make_source(), PlanePut(plane, lambda: (client.epoch, client.incarnation)))
    calls = _Calls()
    try:
        runner = Runner(
            run_id="bench",
            plan=plan,
            trainer=client,
            feeder=feeder,
            clock=RealClock(),
            observers=(calls,),
        )
        book = runner.run()
        for record in book.records():  # A boundary's idle is known once the next step began.
            for facts in client.read_metrics(record.step, 1):
                book.measured(facts)
        return ArmRun(
            records=book.records(),
            calls=tuple(calls.records),
            parameter_digest=client.parameter_digest(),
            plane=plane.name,
        )
    finally:
        feeder.close()
        plane.close()
        channel.close()


def trained(calls: Sequence[TraceRecord]) -> list[tuple[int, int, str]]:
    """(step, index, fingerprint) of every micro-batch, in the order that they were trained."""
    return [
        (call.step, call.index, call.digest)
        for call in calls
        if call.call.startswith(_TRAINING) and call.outcome == "ok"
    ]


def check_arm(
    calls: Sequence[TraceRecord], plan: RunPlan, micro_batches: int, stock: Sequence[TraceRecord]
) -> list[str]:
    """What is wrong with an arm's calls: against every rule, its plan, and the stock arm's order."""
    expect = Expectation(plan=plan, micro_batches=micro_batches, may_skip_updates=False)
    ledger = FROM_SCRATCH
    wrong: list[str] = []
    for call in calls:
        ledger, violations = observe(ledger, call, expect)
        wrong.extend(str(violation) for violation in violations)
    wrong.extend(str(violation) for violation in finished(ledger, num_steps=plan.num_steps))
    if trained(calls) != trained(stock):
        wrong.append("the micro-batches, or their order, are not those of the stock arm")
    stages = [call.step for call in calls if call.call == _STAGE and call.outcome == "ok"]
    planned = [
        step + 1
        for step in range(plan.num_steps)
        if plan.staging_refused(step, latched=False) is None
    ]
    if stages != planned:
        wrong.append(f"staged the first micro-batch of steps {stages}; the plan says {planned}")
    used = [call.step for call in calls if call.used_staged_input]
    if used != planned:
        wrong.append(f"staged inputs were used in steps {used}; the plan says {planned}")
    return wrong


def steady(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Without the first step (warm-up) and the last one (no boundary), where enough are left."""
    return list(records[1:-1]) if len(records) > 2 else list(records)


def summary(run: ArmRun, shape: SyntheticShape) -> dict[str, float]:
    """Medians over the steady steps. Seconds, and tokens per second on the one device."""
    kept = steady(run.records)
    idle = [r.boundary_idle_seconds for r in kept if r.boundary_idle_seconds >= 0]
    seconds = statistics.median(record.seconds for record in kept)
    real_rows = shape.rows * shape.micro_batches - shape.padding_rows
    return {
        "boundary_idle_seconds": statistics.median(idle) if idle else -1.0,
        "step_seconds": seconds,
        "tokens_per_second_with_padding": shape.rows
        * shape.micro_batches
        * shape.tokens_per_row
        / seconds,
        "tokens_per_second": real_rows * shape.real_length / seconds,
    }


def table(results: Mapping[str, Mapping[str, float]]) -> list[str]:
    lines = [f"{'arm':<15}{'idle s':>9}{'step s':>9}{'slots/s':>12}{'real tok/s':>12}"]
    for arm, values in results.items():
        lines.append(
            f"{arm:<15}{values['boundary_idle_seconds']:>9.4f}{values['step_seconds']:>9.4f}"
            f"{values['tokens_per_second_with_padding']:>12.0f}{values['tokens_per_second']:>12.0f}"
        )
    return lines


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator bench trainer", description=__doc__)
    parser.add_argument("--arms", default="stock,staged_before", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--micro_steps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens_per_row", type=int, default=64)
    parser.add_argument("--real_length", type=int, default=60)
    parser.add_argument("--padding_rows", type=int, default=1, help="of the last micro-batch")
    parser.add_argument("--segments_per_row", type=int, default=2)
    parser.add_argument("--routing", default="", help="moe_layers,top_k; empty: none")
    parser.add_argument("--shared_memory_bytes", type=int, default=1 << 30, help="0: the stream")
    parser.add_argument("--out", type=Path, default=Path("out/trainer"))
    parser.add_argument(
        "worker",
        nargs="*",
        default=["--engine=timed", "--timed_fwd_bwd_s=0.1", "--timed_copy_s=0.07"],
        help="the worker's flags, after --",
    )
    arguments = parser.parse_args(argv)
    arms = str(arguments.arms).split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"--arms: {unknown[0]!r} is none of {', '.join(ARMS)}")
    try:
        routing = tuple(int(part) for part in arguments.routing.split(",") if part)
        if len(routing) not in (0, 2):
            raise ValueError(f"--routing is {arguments.routing!r}: use moe_layers,top_k")
        shape = SyntheticShape(
            rows=arguments.rows,
            tokens_per_row=arguments.tokens_per_row,
            micro_batches=arguments.micro_steps,
            real_length=arguments.real_length,
            padding_rows=arguments.padding_rows,
            segments_per_row=arguments.segments_per_row,
            routing=(routing[0], routing[1]) if routing else None,
        )
    except ValueError as error:
        parser.error(str(error))
    arguments.out.mkdir(parents=True, exist_ok=True)
    runs: dict[str, ArmRun] = {}
    try:
        for arm in arms:
            with worker_process(arguments.worker, arguments.out / f"{arm}.worker.log") as worker:
                runs[arm] = drive(
                    worker.address,
                    arm_plan(arm, arguments.steps),
                    shape,
                    lambda: SyntheticSource(shape, "bench"),
                    shared_memory_bytes=arguments.shared_memory_bytes,
                )
            for record in runs[arm].records:
                print(f"{arm} {record.ruler_line()}")
    except (ProcessError, RunFailed) as error:
        print(f"orchestrator bench trainer: {error}", file=sys.stderr)
        return 1
    first = runs[arms[0]]
    for step, index, digest in trained(first.calls):
        print(f"micro-batch ({step}, {index}) {digest}")
    failed = False
    for arm, run in runs.items():
        plan = arm_plan(arm, arguments.steps)
        wrong = check_arm(run.calls, plan, shape.micro_batches, first.calls)
        if run.parameter_digest != first.parameter_digest:
            wrong.append(f"final parameters differ from those of {arms[0]}")
        failed = failed or bool(wrong)
        print(f"{'FAIL' if wrong else 'ok  '} {arm}: {'; '.join(wrong) or 'every check holds'}")
    results = {arm: summary(run, shape) for arm, run in runs.items()}
    print("\n".join(table(results)))
    value = {"shape": asdict(shape), "arms": results, "checks_hold": not failed}
    (arguments.out / "trainer.json").write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    return 1 if failed else 0
