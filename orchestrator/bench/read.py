"""`orchestrator bench read LOG...`: what step ruler lines say, by decimal arithmetic as printed.

Reads logs only; starts nothing. A line that looks like a ruler or stage line but cannot be read is
an error that names file and line; every other line is counted, and the count is printed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Final, TypeVar


class ReadError(ValueError):
    """A log that cannot be read; names the file, the line and what is wrong."""


_NUMBER: Final = r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_RULER_MARK: Final = "completed step:"
_RULER: Final = re.compile(
    rf"completed step: (?P<step>\d+), seconds: (?P<seconds>{_NUMBER}),"
    rf" micro_steps: (?P<micro_steps>\d+), seconds/micro_step: (?P<per_micro>{_NUMBER}),"
    rf" fwd_bwd dispatch s: \[(?P<dispatch>{_NUMBER}(?:, {_NUMBER})*)?\]\s*$"
)
_BENCH_STAGE_MARK: Final = "STAGE_BEFORE_UPDATE step="
_BENCH_STAGE: Final = re.compile(
    rf"STAGE_BEFORE_UPDATE step=(?P<step>\d+) staged=(?P<staged>\S+)"
    rf" stage_s=(?P<stage>{_NUMBER}) device_wait_s=(?P<wait>{_NUMBER})\s*$"
)
_OWN_STAGE_MARK: Final = "[pipeline] staged step "
_OWN_STAGE: Final = re.compile(
    rf"\[pipeline\] staged step (?P<next>\d+)'s first micro-batch on the trainer in"
    rf" (?P<stage>{_NUMBER}) s; the last micro-batch then still computed for"
    rf" (?P<wait>{_NUMBER}) s\s*$"
)
# "off 14:12:19 completed step: ...": a word before the time of day names the arm.
_ARM: Final = re.compile(r"^\s*(?P<arm>[A-Za-z][\w.+-]*)\s+\d{1,2}:\d{2}:\d{2}\b")


@dataclass(frozen=True, kw_only=True)
class Ruler:
    """One step's ruler line. Seconds, as printed."""

    step: int
    seconds: Decimal
    dispatch: tuple[Decimal, ...]  # Of each fwd_bwd call, as the caller waited.
    where: str  # "file:line"

    @property
    def micro_steps(self) -> int:
        return len(self.dispatch)

    @property
    def tail(self) -> Decimal:
        """What follows the last fwd_bwd call: the last micro-batch, the update, the drain."""
        return self.seconds - sum(self.dispatch, Decimal(0))

    def gap(self, boundary_calls: int) -> Decimal | None:
        """The call that waits for the boundary minus a regular one; None without regular calls.

        `boundary_calls` = 2: dispatch s[1] minus the median of dispatch s[2:].
        """
        regular = self.dispatch[boundary_calls:]
        if not regular or boundary_calls < 1:
            return None
        return self.dispatch[boundary_calls - 1] - statistics.median(regular)

    def boundary_part(self, boundary_calls: int) -> Decimal:
        """The first `boundary_calls` calls and the tail."""
        return sum(self.dispatch[:boundary_calls], Decimal(0)) + self.tail

    def regular_part(self, boundary_calls: int) -> Decimal:
        return sum(self.dispatch[boundary_calls:], Decimal(0))


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One staged boundary's line. Seconds, as printed."""

    step: int  # The step before the boundary.
    stage_seconds: Decimal
    device_wait_seconds: Decimal
    where: str


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One arm's lines, in step order."""

    name: str
    rulers: tuple[Ruler, ...]
    stages: tuple[Stage, ...]


@dataclass(frozen=True, kw_only=True)
class Logs:
    """Everything that was read."""

    arms: tuple[Arm, ...]
    ignored_lines: int  # Neither ruler nor stage lines.
    repeated_lines: int  # The same ruler or stage line again (a log that ends with a summary).


_Line = TypeVar("_Line", Ruler, Stage)


@dataclass(kw_only=True)
class _Collected:
    rulers: dict[int, Ruler] = field(default_factory=dict)
    stages: dict[int, Stage] = field(default_factory=dict)


def _malformed(where: str, kind: str, line: str, why: str) -> ReadError:
    shown = line.strip()
    shown = shown if len(shown) <= 160 else shown[:157] + "..."
    return ReadError(f"{where}: malformed {kind} line: {why}: {shown!r}")


def _ruler(line: str, where: str) -> Ruler:
    found = _RULER.search(line)
    if found is None:
        raise _malformed(
            where,
            "step ruler",
            line,
            "expected 'completed step: N, seconds: S, micro_steps: M, seconds/micro_step: S,"
            " fwd_bwd dispatch s: [S, ...]'",
        )
    dispatch = tuple(Decimal(text) for text in (found["dispatch"] or "").split(", ") if text)
    micro_steps = int(found["micro_steps"])
    if micro_steps != len(dispatch) or micro_steps < 1:
        why = f"micro_steps is {micro_steps}, but {len(dispatch)} dispatch times follow"
        raise _malformed(where, "step ruler", line, why)
    seconds = Decimal(found["seconds"])
    per_micro = Decimal(found["per_micro"])
    if abs(seconds / micro_steps - per_micro) > Decimal("0.0011"):
        why = f"seconds/micro_step is {per_micro}, but {seconds} / {micro_steps} is not"
        raise _malformed(where, "step ruler", line, why)
    return Ruler(step=int(found["step"]), seconds=seconds, dispatch=dispatch, where=where)


def _stage(line: str, where: str) -> Stage:
    if _OWN_STAGE_MARK in line:
        found = _OWN_STAGE.search(line)
        if found is None:
            raise _malformed(where, "stage", line, "expected '... in S s; ... for S s'")
        step = int(found["next"]) - 1
    else:
        found = _BENCH_STAGE.search(line)
        if found is None:
            why = "expected 'step=K staged=ID stage_s=S device_wait_s=S'"
            raise _malformed(where, "stage", line, why)
        step = int(found["step"])
    return Stage(
        step=step,
        stage_seconds=Decimal(found["stage"]),
        device_wait_seconds=Decimal(found["wait"]),
        where=where,
    )


def _arm_name(line: str, default: str) -> str:
    found = _ARM.match(line)
    return default if found is None else found["arm"]


def read_lines(lines: Iterable[str], *, source: str, arm: str, force_arm: bool = False) -> Logs:
    """Parse one log. `arm` names lines without a word before their time; or all (`force_arm`).

    Raises `ReadError` for a malformed line, and for a step that has two different lines.
    """
    arms: dict[str, _Collected] = {}
    ignored = repeated = 0
    for number, whole in enumerate(lines, start=1):
        for line in whole.rstrip("\n").split("\r"):  # A progress bar writes several on one line.
            where = f"{source}:{number}"
            is_ruler = _RULER_MARK in line
            if not is_ruler and _BENCH_STAGE_MARK not in line and _OWN_STAGE_MARK not in line:
                ignored += bool(line.strip())
                continue
            name = arm if force_arm else _arm_name(line, arm)
            into = arms.setdefault(name, _Collected())
            if is_ruler:
                repeated += _add(into.rulers, _ruler(line, where), name)
            else:
                repeated += _add(into.stages, _stage(line, where), name)
    return Logs(
        arms=tuple(
            Arm(
                name=name,
                rulers=tuple(got.rulers[step] for step in sorted(got.rulers)),
                stages=tuple(got.stages[step] for step in sorted(got.stages)),
            )
            for name, got in arms.items()
        ),
        ignored_lines=ignored,
        repeated_lines=repeated,
    )


def _content(item: Ruler | Stage) -> tuple[object, ...]:
    if isinstance(item, Ruler):
        return (item.seconds, item.dispatch)
    return (item.stage_seconds, item.device_wait_seconds)


def _add(into: dict[int, _Line], item: _Line, arm: str) -> int:
    """Returns 1 for a repeated line. Raises `ReadError` for another line of the same step."""
    before = into.setdefault(item.step, item)
    if before is item:
        return 0
    if _content(before) != _content(item):
        raise ReadError(
            f"{item.where}: step {item.step} of arm {arm!r} was already read from {before.where},"
            " with other numbers: give each arm (or each run) its own log, or NAME=LOG"
        )
    return 1


def merge(logs: Sequence[Logs]) -> Logs:
    """Several logs as one. Raises `ReadError` when two hold different lines for one step."""
    arms: dict[str, _Collected] = {}
    repeated = sum(log.repeated_lines for log in logs)
    for log in logs:
        for arm in log.arms:
            into = arms.setdefault(arm.name, _Collected())
            repeated += sum(_add(into.rulers, item, arm.name) for item in arm.rulers)
            repeated += sum(_add(into.stages, item, arm.name) for item in arm.stages)
    return Logs(
        arms=tuple(
            Arm(
                name=name,
                rulers=tuple(got.rulers[step] for step in sorted(got.rulers)),
                stages=tuple(got.stages[step] for step in sorted(got.stages)),
            )
            for name, got in arms.items()
        ),
        ignored_lines=sum(log.ignored_lines for log in logs),
        repeated_lines=repeated,
    )


# ---------------------------------------------------------------------------------------------
# Numbers.


@dataclass(frozen=True, kw_only=True)
class ArmNumbers:
    """What one arm's scored steps say. Seconds; exact decimal arithmetic on the printed values."""

    name: str
    steps: tuple[int, ...]  # Scored.
    seconds_mean: Decimal
    gaps: tuple[Decimal, ...]  # Of each scored step; empty without regular calls.
    regular_median: Decimal | None
    tail_median: Decimal
    tokens_per_second_per_chip: Decimal | None
    stages: tuple[Stage, ...]


@dataclass(frozen=True, kw_only=True)
class Delta:
    """Arm minus base. Seconds. The parts are over the steps that both arms have, the last left out.

    The run's last step has no boundary after it, so nothing is staged there.
    """

    arm: str
    base: str
    mean: Decimal
    parts_steps: tuple[int, ...]
    step: Decimal | None
    boundary_part: Decimal | None
    regular_part: Decimal | None


def _mean(values: Sequence[Decimal]) -> Decimal:
    return sum(values, Decimal(0)) / len(values)


def scored(arm: Arm, *, skip_before: int) -> tuple[Ruler, ...]:
    """The steps from `skip_before` on (step 0 is warm-up). Raises `ReadError` when none is left."""
    rulers = tuple(ruler for ruler in arm.rulers if ruler.step >= skip_before)
    if not rulers:
        raise ReadError(
            f"arm {arm.name!r} has no ruler line of step {skip_before} or later:"
            " run more steps, or lower --first_step"
        )
    return rulers


def arm_numbers(
    arm: Arm,
    *,
    skip_before: int = 1,
    boundary_calls: int = 2,
    tokens_per_micro_batch_per_chip: Decimal | None = None,
) -> ArmNumbers:
    """One arm's numbers. Raises `ReadError` when it has no scored step."""
    rulers = scored(arm, skip_before=skip_before)
    regular = [value for ruler in rulers for value in ruler.dispatch[boundary_calls:]]
    rate = None
    if tokens_per_micro_batch_per_chip is not None:
        micro = _mean([Decimal(ruler.micro_steps) for ruler in rulers])
        rate = tokens_per_micro_batch_per_chip * micro / _mean([r.seconds for r in rulers])
    gaps = [gap for ruler in rulers if (gap := ruler.gap(boundary_calls)) is not None]
    return ArmNumbers(
        name=arm.name,
        steps=tuple(ruler.step for ruler in rulers),
        seconds_mean=_mean([ruler.seconds for ruler in rulers]),
        gaps=tuple(gaps),
        regular_median=statistics.median(regular) if regular else None,
        tail_median=statistics.median(ruler.tail for ruler in rulers),
        tokens_per_second_per_chip=rate,
        stages=arm.stages,
    )


def delta(base: Arm, arm: Arm, *, skip_before: int = 1, boundary_calls: int = 2) -> Delta:
    """What changed from `base` to `arm`. Raises `ReadError` when an arm has no scored step."""
    rulers = {ruler.step: ruler for ruler in scored(arm, skip_before=skip_before)}
    others = {ruler.step: ruler for ruler in scored(base, skip_before=skip_before)}
    last = min(max(rulers), max(others))
    steps = sorted(step for step in rulers.keys() & others.keys() if step < last)

    def moved(part: str) -> Decimal | None:
        if not steps:
            return None
        sums = []
        for of in (rulers, others):
            values = []
            for step in steps:
                ruler = of[step]
                values.append(
                    {
                        "step": ruler.seconds,
                        "boundary": ruler.boundary_part(boundary_calls),
                        "regular": ruler.regular_part(boundary_calls),
                    }[part]
                )
            sums.append(_mean(values))
        return sums[0] - sums[1]

    return Delta(
        arm=arm.name,
        base=base.name,
        mean=_mean([r.seconds for r in rulers.values()])
        - _mean([r.seconds for r in others.values()]),
        parts_steps=tuple(steps),
        step=moved("step"),
        boundary_part=moved("boundary"),
        regular_part=moved("regular"),
    )


# ---------------------------------------------------------------------------------------------
# Text.


def fixed(value: Decimal, digits: int = 3) -> str:
    """Rounded half up, as people round: 107.7265 is 107.727."""
    return str(value.quantize(Decimal(1).scaleb(-digits), rounding=ROUND_HALF_UP))


def signed(value: Decimal) -> str:
    text = fixed(value)
    return text if text.startswith("-") else "+" + text


def _range(values: Sequence[Decimal]) -> str:
    return f"{fixed(min(values))} to {fixed(max(values))}"


def _steps(steps: Sequence[int]) -> str:
    if len(steps) > 1 and list(steps) == list(range(steps[0], steps[-1] + 1)):
        return f"{steps[0]}-{steps[-1]}"
    return ", ".join(str(step) for step in steps)


def report_lines(
    logs: Logs,
    *,
    skip_before: int = 1,
    boundary_calls: int = 2,
    tokens_per_micro_batch_per_chip: Decimal | None = None,
) -> list[str]:
    """The report, one line a fact. Raises `ReadError` when an arm has no scored step."""
    lines: list[str] = []
    for arm in logs.arms:
        got = arm_numbers(
            arm,
            skip_before=skip_before,
            boundary_calls=boundary_calls,
            tokens_per_micro_batch_per_chip=tokens_per_micro_batch_per_chip,
        )
        lines.append(f"arm {got.name} (steps {_steps(got.steps)})")
        lines.append(f"  step time, mean            {fixed(got.seconds_mean)} s/step")
        if got.tokens_per_second_per_chip is not None:
            rate = fixed(got.tokens_per_second_per_chip, 0)
            lines.append(f"  throughput                 {int(rate):,} tok/s/chip")
        if got.gaps:
            gaps = " / ".join(fixed(gap) for gap in got.gaps)
            lines.append(f"  gap of call {boundary_calls} of a step    {gaps} s")
        if got.regular_median is not None:
            lines.append(f"  regular call, median       {fixed(got.regular_median)} s")
        lines.append(f"  step tail, median          {fixed(got.tail_median)} s")
        if got.stages:
            stage = _range([item.stage_seconds for item in got.stages])
            wait = _range([item.device_wait_seconds for item in got.stages])
            lines.append(
                f"  staged boundaries          {len(got.stages)}; stage {stage} s;"
                f" device then busy {wait} s"
            )
    for arm in logs.arms[1:]:
        moved = delta(logs.arms[0], arm, skip_before=skip_before, boundary_calls=boundary_calls)
        lines.append(f"{moved.arm} minus {moved.base}")
        lines.append(f"  step time, mean            {signed(moved.mean)} s")
        if moved.step is None or moved.boundary_part is None or moved.regular_part is None:
            lines.append("  parts                      too few common steps")
            continue
        over = f"(steps {_steps(moved.parts_steps)})"
        lines.append(f"  step time                  {signed(moved.step)} s {over}")
        lines.append(f"  boundary part              {signed(moved.boundary_part)} s {over}")
        lines.append(f"  regular calls              {signed(moved.regular_part)} s {over}")
    lines.append(
        f"ignored {logs.ignored_lines} other line(s); {logs.repeated_lines} repeated line(s)"
    )
    return lines


def report_json(logs: Logs, *, skip_before: int = 1, boundary_calls: int = 2) -> str:
    """The same numbers as JSON (seconds), unrounded."""
    out: dict[str, object] = {
        "arms": [
            {
                "name": got.name,
                "steps": got.steps,
                "step_seconds_mean": float(got.seconds_mean),
                "gap_seconds": [float(gap) for gap in got.gaps],
                "regular_call_seconds_median": None
                if got.regular_median is None
                else float(got.regular_median),
                "tail_seconds_median": float(got.tail_median),
                "staged_boundaries": len(got.stages),
            }
            for got in (
                arm_numbers(arm, skip_before=skip_before, boundary_calls=boundary_calls)
                for arm in logs.arms
            )
        ],
        "ignored_lines": logs.ignored_lines,
        "repeated_lines": logs.repeated_lines,
    }
    return json.dumps(out, indent=1, sort_keys=True)


def read_files(arguments: Sequence[str]) -> Logs:
    """Read `LOG` or `NAME=LOG` arguments. Raises `ReadError`."""
    logs = []
    for argument in arguments:
        name, found, path_text = argument.partition("=")
        named = bool(found) and not Path(argument).exists()
        path = Path(path_text if named else argument)
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ReadError(f"{path}: cannot be read ({error.strerror})") from error
        logs.append(
            read_lines(
                text.split("\n"),
                source=str(path),
                arm=name if named else path.stem,
                force_arm=named,
            )
        )
    merged = merge(logs)
    if not any(arm.rulers for arm in merged.arms):
        raise ReadError(
            f"no 'completed step:' line in {', '.join(arguments)}"
            f" ({merged.ignored_lines} other lines): is it the orchestrator's log?"
        )
    return merged


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="orchestrator bench read",
        description="Means, boundary gaps and deltas from step ruler lines.",
    )
    parser.add_argument("logs", nargs="+", metavar="LOG", help="a log, or NAME=LOG for one arm")
    parser.add_argument(
        "--first_step", type=int, default=1, help="first scored step (default 1: 0 is warm-up)"
    )
    parser.add_argument(
        "--boundary_calls",
        type=int,
        default=2,
        help="how many first calls of a step belong to its boundary; the last of them waits for"
        " the input (default 2; 3 where a call returns before the one before it has computed)",
    )
    parser.add_argument(
        "--tokens_per_micro_batch_per_chip",
        type=Decimal,
        default=None,
        help="token slots of one micro-batch on one chip, for tok/s/chip (e.g. 32768)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code (2: a log could not be read)."""
    args = _parser().parse_args(argv)
    try:
        logs = read_files(args.logs)
        if args.json:
            text = report_json(
                logs, skip_before=args.first_step, boundary_calls=args.boundary_calls
            )
        else:
            text = "\n".join(
                report_lines(
                    logs,
                    skip_before=args.first_step,
                    boundary_calls=args.boundary_calls,
                    tokens_per_micro_batch_per_chip=args.tokens_per_micro_batch_per_chip,
                )
            )
    except ReadError as error:
        print(f"orchestrator bench read: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
