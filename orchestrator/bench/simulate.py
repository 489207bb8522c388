"""`orchestrator simulate`: step time, boundary idle and a Gantt chart for every flag setting.

Drives the live plan and boundary core on a virtual clock. From a file of flags-off measurements
(`--from_measurements`) it predicts what the switches would gain there. Starts nothing and waits
for nothing; the arithmetic is in docs/simulator.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Final

from orchestrator.bench import plots
from orchestrator.bench.sim import derive
from orchestrator.bench.sim.gantt import (
    LEGEND,
    BoundaryView,
    GanttError,
    boundary_view,
    scale,
    text_lines,
)
from orchestrator.bench.sim.model import Shape, SimError
from orchestrator.bench.sim.run import FLAGS, SETTINGS, SimResult, plan_for, simulate
from orchestrator.calls import NoteKind
from orchestrator.plan import PlanError, RunPlan
from prestage.trace import DeviceRecord, TraceWriter

_HELP: Final[Mapping[str, str]] = {
    "micro_batches": "micro-batches of a step",
    "fwd_bwd_s": "one micro-batch on the device",
    "update_s": "the optimizer update on the device",
    "copy_s": "one micro-batch's input copy to the device",
    "put_s": "one micro-batch's bytes to a worker host",
    "pack_s": "packing one micro-batch",
    "rpc_s": "each trainer call, before it takes effect",
    "stage_s": "the stage call's own time",
    "metrics_s": "the metrics fetch, after the update is done",
    "bookkeeping_s": "closing a step on the orchestrator (logging, publishing)",
    "checkpoint_s": "a checkpoint's snapshot",
    "weight_sync_s": "preparing a weight sync",
    "eval_s": "an evaluation",
    "score_s": "trainer-computed log-probs of one step",
    "max_inflight": "micro-batches dispatched at a time",
    "wait_after_dispatch": "fwd_bwd answers only when a slot is free again",
    "update_waits": "the update waits for the last micro-batch (dropless retry)",
    "rollout_s": "generating one step's groups",
    "rollouts_ahead": "steps that generation may run ahead of training",
    "hosts": "worker hosts; each transfer ends with its slowest host",
    "link_jitter": "log-normal sigma of each host's transfer time",
    "slow_links": "hosts with a slow link",
    "slow_link_factor": "how many times longer a slow link takes",
    "rollout_jitter": "log-normal sigma of each step's rollout time",
    "seed": "of every random draw",
}


def _late(text: str) -> tuple[int, float]:
    step, found, seconds = text.partition(":")
    try:
        if not found:
            raise ValueError
        return int(step), float(seconds)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: use STEP:SECONDS") from None


def _settings(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    unknown = [name for name in names if name not in SETTINGS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"{text!r}: unknown {', '.join(unknown) or 'nothing'}; known: {', '.join(SETTINGS)}"
        )
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="orchestrator simulate",
        description="Step time, boundary idle and a Gantt chart for every flag setting.",
    )
    shape = parser.add_argument_group("shape (seconds unless said otherwise)")
    defaults = Shape()
    for item in fields(Shape):
        if item.name == "late":
            continue
        default: int | float | bool = defaults.__dict__[item.name]
        if isinstance(default, bool):
            shape.add_argument(f"--{item.name}", action="store_true", help=_HELP[item.name])
        else:
            shape.add_argument(
                f"--{item.name}",
                type=type(default),
                default=default,
                help=f"{_HELP[item.name]} (default {default})",
            )
    shape.add_argument(
        "--late",
        type=_late,
        action="append",
        default=[],
        metavar="STEP:SECONDS",
        help="that step's groups arrive so long after the step before closed; may be repeated",
    )
    plan = parser.add_argument_group("plan")
    plan.add_argument("--num_steps", type=int, default=50, help="optimizer steps (default 50)")
    for name in ("checkpoint_every", "weight_sync_every", "eval_every", "val_start_step"):
        plan.add_argument(f"--{name}", type=int, default=0, help="steps; 0 = never (default)")
    plan.add_argument(
        "--trainer_logprobs", action="store_true", help="old log-probs come from the trainer"
    )
    plan.add_argument(
        "--latch_after",
        type=int,
        default=RunPlan(num_steps=1).latch_after,
        help="staging turns itself off after so many stages in a row that hid nothing",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--settings", type=_settings, default=tuple(SETTINGS), help="comma-separated names"
    )
    output.add_argument("--picture", type=int, default=None, help="step whose boundary is drawn")
    output.add_argument("--no_gantt", action="store_true", help="print the table only")
    output.add_argument("--svg", type=Path, default=None, help="write the Gantt chart as SVG")
    output.add_argument("--trace_dir", type=Path, default=None, help="write traces of the boundary")
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument(
        "--tokens_per_micro_batch_per_chip", type=float, default=0.0, help="for tok/s/chip"
    )
    files = parser.add_argument_group("prediction from flags-off measurements")
    files.add_argument("--from_measurements", type=Path, default=None, metavar="FILE")
    files.add_argument(
        "--score", type=Path, default=None, metavar="FILE", help="measured arms to compare with"
    )
    return parser


def _shape(args: argparse.Namespace) -> Shape:
    values = vars(args)
    late = dict(args.late)
    if len(late) != len(args.late):
        raise SimError("--late names a step twice; give each step once")
    return Shape(late=late, **{name: values[name] for name in _HELP})


def _plan(args: argparse.Namespace) -> RunPlan:
    return RunPlan(
        num_steps=args.num_steps,
        checkpoint_every=args.checkpoint_every,
        weight_sync_every=args.weight_sync_every,
        eval_every=args.eval_every,
        val_start_step=args.val_start_step,
        trainer_logprobs=args.trainer_logprobs,
        latch_after=args.latch_after,
    )


# ---------------------------------------------------------------------------------------------
# Text.


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned text under a heading; text columns to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    numeric = [
        all(row[column][:1] in "-+0123456789" and row[column][:2] != "--" for row in rows[1:])
        for column in range(len(rows[0]))
    ]
    lines = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def _table(results: Mapping[str, SimResult], shape: Shape, tokens: float) -> list[str]:
    base = results.get("stock")
    heading = ["setting", "s/step", "boundary idle s", "idle inside s", "saved s", "saved %"]
    heading += ["staged"] + (["tok/s/chip"] if tokens else []) + ["flags"]
    rows = [heading]
    for name, result in results.items():
        saved = None if base is None else base.step_seconds - result.step_seconds
        row = [name, f"{result.step_seconds:.3f}", f"{result.boundary_idle_s:.3f}"]
        row.append(f"{result.inside_idle_s:.3f}")
        if saved is None or base is None:
            row += ["-", "-"]
        else:
            row += [f"{saved:.3f}", f"{saved / base.step_seconds:.1%}"]
        row.append(f"{result.staged_boundaries}/{len(result.steps) - 1}")
        if tokens:
            row.append(f"{tokens * shape.micro_batches / result.step_seconds:,.0f}")
        rows.append([*row, FLAGS[name]])
    return columns(rows)


def _notes(results: Mapping[str, SimResult]) -> list[str]:
    said = {
        NoteKind.LATE: "next step not ready in time",
        NoteKind.INELIGIBLE: "not eligible for staging (the run ends, a scored checkpoint, ...)",
        NoteKind.STAGE_OUTLASTED: "the stage hid nothing",
        NoteKind.LATCHED_NOTHING_HIDDEN: "staging turned itself off",
    }
    lines = []
    for name, result in results.items():
        for kind, count in sorted(result.notes.items(), key=lambda item: item[0].value):
            lines.append(f"{name}: {count} x {said.get(kind, kind.value)}")
    return lines


def views(results: Mapping[str, SimResult], picture: int) -> list[BoundaryView]:
    """The same boundary of every setting. Raises `GanttError`."""
    return [
        boundary_view(result.spans, picture, title=name, host=result.host)
        for name, result in results.items()
    ]


def _gantt_lines(drawn: Sequence[BoundaryView]) -> list[str]:
    from_s, per_column = scale(drawn)
    lines = [f"One boundary (after step {drawn[0].step}); one column is {per_column:.3f} s", ""]
    for view in drawn:
        lines += [*text_lines(view, from_s=from_s, seconds_per_column=per_column), ""]
    return [*lines, LEGEND]


def as_json(results: Mapping[str, SimResult], shape: Shape) -> str:
    """Per setting: mean step and idle seconds, staged boundaries, notes."""
    out = {
        "shape": asdict(shape),
        "settings": {
            name: {
                "step_seconds": result.step_seconds,
                "boundary_idle_seconds": result.boundary_idle_s,
                "inside_idle_seconds": result.inside_idle_s,
                "staged_boundaries": result.staged_boundaries,
                "steps": len(result.steps),
                "total_seconds": result.total_s,
                "notes": {kind.value: count for kind, count in result.notes.items()},
            }
            for name, result in results.items()
        },
    }
    return json.dumps(out, indent=1, sort_keys=True)


def _write_traces(results: Mapping[str, SimResult], folder: Path) -> None:
    for name, result in results.items():
        writer = TraceWriter(folder / f"simulated-{name}.ndjson", side=f"simulated {name}")
        try:
            records: list[DeviceRecord] = list(result.spans)
            for record in records:
                writer.write(record)
            for call in result.host:
                writer.write(call)
        finally:
            writer.close()


# ---------------------------------------------------------------------------------------------
# Commands.


def _simulate(args: argparse.Namespace) -> int:
    shape, plan = _shape(args), _plan(args)
    picture = plan.num_steps // 2 - 1 if args.picture is None else args.picture
    if not 0 <= picture < plan.num_steps - 1:
        raise SimError(f"picture is {picture}; use a step from 0 to {plan.num_steps - 2}")
    results = {
        name: simulate(shape, plan_for(name, plan), picture=picture) for name in args.settings
    }
    drawn = views(results, picture)
    if args.json:
        print(as_json(results, shape))
    else:
        print(
            f"{plan.num_steps} steps of {shape.micro_batches} micro-batches"
            f" (means over steps 1-{plan.num_steps - 1}; seconds on a virtual clock)\n"
        )
        print("\n".join(_table(results, shape, args.tokens_per_micro_batch_per_chip)))
        notes = _notes(results)
        if not shape.copy_s:
            notes.append(
                "copy_s is 0, so there is nothing to hide: give --copy_s, the boundary idle of a"
                " flags-off run"
            )
        if notes:
            print("\n" + "\n".join(notes))
        if not args.no_gantt:
            print("\n" + "\n".join(_gantt_lines(drawn)))
    if args.svg is not None:
        plots.write_svg(args.svg, plots.boundary_svg(drawn))
    if args.trace_dir is not None:
        _write_traces(results, args.trace_dir)
    return 0


def prediction_lines(derived: derive.Derived, rows: Sequence[derive.Row], about: str) -> list[str]:
    """One case: the arithmetic, then predicted against measured."""
    table = [["setting", "s/step", "boundary idle s", "inside s", "saved s"]]
    table[0] += ["measured s/step", "idle s", "error"]
    for row in rows:
        line = [row.setting, f"{row.step_s:.3f}", f"{row.idle_s:.3f}"]
        line += [f"{row.inside_s:.3f}", f"{row.saved_s:.3f}"]
        if row.measured is None or row.error is None:
            line += ["-", "-", "-"]
        else:
            idle = "-" if row.measured.idle_s is None else f"{row.measured.idle_s:.3f}"
            line += [f"{row.measured.step_s:.3f}", idle, f"{row.error:+.2%}"]
        table.append(line)
    lines = [f"case {derived.name}: {about}" if about else f"case {derived.name}"]
    lines += [f"  {line}" for line in derived.lines]
    return [*lines, *(f"  {line}" for line in columns(table))]


def _predict(args: argparse.Namespace) -> int:
    path: Path = args.from_measurements
    measured = {} if args.score is None else derive.read_measured(args.score)
    cases = derive.read_flags_off(path)
    unknown = sorted(set(measured) - {case.name for case in cases})
    if unknown:
        raise derive.DeriveError(f"{args.score}: no such case in {path}: {', '.join(unknown)}")
    out: dict[str, object] = {}
    for case in cases:
        derived = derive.derive(case, path.parent)
        rows = derive.rows(derived, derive.predict(derived), measured.get(case.name, {}))
        out[case.name] = {
            row.setting: {
                "step_seconds": row.step_s,
                "boundary_idle_seconds": row.idle_s,
                "inside_idle_seconds": row.inside_s,
                "saved_seconds": row.saved_s,
                "error": row.error,
            }
            for row in rows
        }
        if not args.json:
            print("\n".join(prediction_lines(derived, rows, case.about)) + "\n")
    if args.json:
        print(json.dumps(out, indent=1, sort_keys=True))
    return 0


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code (2: wrong settings or files)."""
    args = _parser().parse_args(argv)
    try:
        if args.score is not None and args.from_measurements is None:
            raise SimError("--score compares a prediction: give --from_measurements too")
        return _simulate(args) if args.from_measurements is None else _predict(args)
    except (SimError, PlanError, GanttError, derive.DeriveError) as error:
        print(f"orchestrator simulate: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
