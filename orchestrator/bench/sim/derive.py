"""What a flags-off run says about the device: parameters for the simulator, and what was assumed.

Input: measurements with every switch off. Nothing measured with a switch on may enter here; such
figures live in a file of their own and are only compared with, after the prediction.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from orchestrator.bench.read import ReadError, arm_numbers, read_files
from orchestrator.bench.sim.model import Shape
from orchestrator.bench.sim.run import SETTINGS, SimResult, plan_for, simulate
from orchestrator.plan import RunPlan

FLAGS_OFF_FORMAT: Final = "prestage-flags-off/1"
MEASURED_FORMAT: Final = "prestage-measured/1"
_STEPS: Final = 12
_ROUNDING_S: Final = 1e-6  # Less below zero than this is rounding.
_NEVER_LATCHES: Final = 1_000_000


class DeriveError(ValueError):
    """A measurements file that cannot be used; names the file, the case and the field."""


@dataclass(frozen=True, kw_only=True)
class FlagsOff:
    """One flags-off measurement. Seconds; None = not measured."""

    name: str
    about: str = ""
    micro_batches: int
    step_s: float | None = None  # Step time, mean or median as published.
    fwd_bwd_s: float | None = None  # A regular micro-batch.
    waiting_call_s: tuple[float, ...] = ()  # The fwd_bwd call that waits for the boundary.
    boundary_idle_s: float | None = None
    update_s: float | None = None
    copy_s: float | None = None  # Of the first micro-batch's input, from the same payload.
    ruler_log: str = ""  # Step ruler lines of a flags-off run, beside the file ...
    ruler_arm: str = ""  # ... and which of its arms.
    update_waits: bool = False  # The update waits for the last micro-batch (dropless retry).
    wait_after_dispatch: bool = False  # Ruler lines show the wait in a step's second call.
    latch: bool = True  # False: a stage that hides nothing is not noticed there.


@dataclass(frozen=True, kw_only=True)
class Derived:
    """Simulator parameters, how they came about, and how well they give the input back."""

    name: str
    shape: Shape
    latch: bool
    step_s: float
    idle_s: float
    lines: tuple[str, ...]  # The arithmetic, one line a parameter.
    stock: SimResult


def derive(case: FlagsOff, folder: Path = Path()) -> Derived:
    """Parameters from one flags-off measurement. Raises `DeriveError`."""
    micro = case.micro_batches
    step_s, fwd_s, idle_s = case.step_s, case.fwd_bwd_s, case.boundary_idle_s
    lines: list[str] = []
    if case.ruler_log:
        step_s, fwd_s, idle_s = _from_ruler(case, folder)
        lines.append(
            f"step {step_s:.3f}, regular call {fwd_s:.3f}, gap {idle_s:.3f} s: from ruler lines"
        )
    if step_s is None:
        raise DeriveError(f"case {case.name!r}: no step_s (and no ruler_log to take it from)")
    if case.waiting_call_s:
        if fwd_s is None or idle_s is not None:
            raise DeriveError(
                f"case {case.name!r}: waiting_call_s needs fwd_bwd_s, and no boundary_idle_s"
            )
        idle_s = statistics.fmean(case.waiting_call_s) - fwd_s
        lines.append(f"idle = waiting call - regular call = {idle_s:.3f} s")
    update_s = case.update_s
    known = sum(value is not None for value in (idle_s, fwd_s, update_s))
    if known == 3:
        raise DeriveError(
            f"case {case.name!r}: idle, fwd_bwd_s and update_s together say more than step_s:"
            " leave update_s out"
        )
    if idle_s is None:
        if fwd_s is None or update_s is None:
            raise DeriveError(
                f"case {case.name!r}: give boundary_idle_s, or waiting_call_s with fwd_bwd_s, or"
                " fwd_bwd_s with update_s"
            )
        idle_s = step_s - micro * fwd_s - update_s
        lines.append(f"idle = step - {micro} x fwd_bwd - update = {idle_s:.3f} s")
    elif fwd_s is not None:
        update_s = step_s - idle_s - micro * fwd_s
        lines.append(f"update = step - idle - {micro} x fwd_bwd = {update_s:.3f} s")
    else:
        if update_s is None:
            update_s = 0.0
            lines.append("update = 0 s: not measured, so it counts as part of the micro-batches")
        fwd_s = (step_s - idle_s - update_s) / micro
        lines.append(f"fwd_bwd = (step - idle - update) / {micro} = {fwd_s:.3f} s")
    assert fwd_s is not None and update_s is not None
    for name, value in (("idle", idle_s), ("fwd_bwd", fwd_s), ("update", update_s)):
        if value < -_ROUNDING_S:
            raise DeriveError(
                f"case {case.name!r}: {name} comes out as {value:.3f} s: the step time is shorter"
                " than its parts; check the input"
            )
    idle_s, fwd_s, update_s = max(0.0, idle_s), max(0.0, fwd_s), max(0.0, update_s)
    copy_s = _copy(case, idle_s, fwd_s, lines)
    closing_s = idle_s - copy_s
    lines.append(f"closing = idle - copy = {closing_s:.3f} s, taken as bookkeeping")
    shape = Shape(
        micro_batches=micro,
        fwd_bwd_s=fwd_s,
        update_s=update_s,
        copy_s=copy_s,
        bookkeeping_s=closing_s,
        update_waits=case.update_waits,
        wait_after_dispatch=case.wait_after_dispatch,
    )
    stock = simulate(shape, plan_for("stock", RunPlan(num_steps=_STEPS)))
    if abs(stock.step_seconds - step_s) > 1e-3 * step_s:
        raise DeriveError(
            f"case {case.name!r}: the derived device gives {stock.step_seconds:.3f} s a step with"
            f" the switches off, not the measured {step_s:.3f} s; the input contradicts itself"
        )
    return Derived(
        name=case.name,
        shape=shape,
        latch=case.latch,
        step_s=step_s,
        idle_s=idle_s,
        lines=tuple(lines),
        stock=stock,
    )


def _copy(case: FlagsOff, idle_s: float, fwd_s: float, lines: list[str]) -> float:
    """How much of the idle time is the copy: never more than a micro-batch hides in its turn."""
    if case.copy_s is not None:
        if case.copy_s > idle_s:
            raise DeriveError(
                f"case {case.name!r}: copy_s {case.copy_s:.3f} is more than the idle time"
                f" {idle_s:.3f} s that contains it"
            )
        lines.append(f"copy = {case.copy_s:.3f} s: measured with the same payload")
        return case.copy_s
    if idle_s <= fwd_s:
        lines.append(f"copy = idle = {idle_s:.3f} s: the most that it can be")
        return idle_s
    lines.append(
        f"copy = fwd_bwd = {fwd_s:.3f} s: the most that it can be, since regular micro-batches"
        " do not wait for theirs"
    )
    return fwd_s


def _from_ruler(case: FlagsOff, folder: Path) -> tuple[float, float, float]:
    for name, value in (
        ("step_s", case.step_s),
        ("fwd_bwd_s", case.fwd_bwd_s),
        ("boundary_idle_s", case.boundary_idle_s),
    ):
        if value is not None:
            raise DeriveError(f"case {case.name!r}: {name} comes from ruler_log; leave it out")
    try:
        logs = read_files([str(folder / case.ruler_log)])
        arm = next((arm for arm in logs.arms if arm.name == case.ruler_arm), None)
        if arm is None:
            names = ", ".join(arm.name for arm in logs.arms)
            raise DeriveError(
                f"case {case.name!r}: {case.ruler_log} has no arm {case.ruler_arm!r}; it has {names}"
            )
        if arm.stages:
            raise DeriveError(
                f"case {case.name!r}: arm {arm.name!r} staged its boundaries; a prediction starts"
                " from a flags-off arm"
            )
        got = arm_numbers(arm)
    except ReadError as error:
        raise DeriveError(f"case {case.name!r}: {error}") from error
    if not got.gaps or got.regular_median is None:
        raise DeriveError(f"case {case.name!r}: its ruler lines have no regular calls")
    gap = float(sum(got.gaps)) / len(got.gaps)
    return float(got.seconds_mean), float(got.regular_median), gap


# ---------------------------------------------------------------------------------------------
# Predictions and their comparison.


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one arm measured, to compare a prediction with. Seconds; None = not measured."""

    step_s: float
    idle_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting of one case."""

    case: str
    setting: str
    step_s: float
    idle_s: float  # At the boundary.
    inside_s: float  # Idle between a step's own micro-batches.
    saved_s: float
    measured: Measured | None

    @property
    def error(self) -> float | None:
        """Predicted step time over measured, minus 1."""
        return None if self.measured is None else self.step_s / self.measured.step_s - 1


def predict(derived: Derived) -> dict[str, SimResult]:
    """Every setting, simulated with the derived parameters."""
    plan = RunPlan(num_steps=_STEPS)
    if not derived.latch:
        plan = RunPlan(num_steps=_STEPS, latch_after=_NEVER_LATCHES)
    return {name: simulate(derived.shape, plan_for(name, plan)) for name in SETTINGS}


def rows(
    derived: Derived, results: Mapping[str, SimResult], measured: Mapping[str, Measured]
) -> list[Row]:
    stock_s = results["stock"].step_seconds
    return [
        Row(
            case=derived.name,
            setting=name,
            step_s=result.step_seconds,
            idle_s=result.boundary_idle_s,
            inside_s=result.inside_idle_s,
            saved_s=stock_s - result.step_seconds,
            measured=measured.get(name),
        )
        for name, result in results.items()
    ]


# ---------------------------------------------------------------------------------------------
# Files.


def _load(path: Path, expected: str) -> Mapping[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise DeriveError(f"{path}: cannot be read ({error})") from error
    if not isinstance(value, dict) or value.get("format") != expected:
        raise DeriveError(f"{path}: not a file of format {expected}")
    return value


def _number(where: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DeriveError(f"{where}: {name} is {value!r}; use a number")
    return float(value)


_NUMBERS: Final = ("step_s", "fwd_bwd_s", "boundary_idle_s", "update_s", "copy_s")
_FLAGS: Final = ("update_waits", "wait_after_dispatch", "latch")
_TEXTS: Final = ("name", "about", "ruler_log", "ruler_arm")


def read_flags_off(path: Path) -> tuple[FlagsOff, ...]:
    """The cases of a flags-off file. Raises `DeriveError`; an unknown field is an error."""
    found = _load(path, FLAGS_OFF_FORMAT).get("cases")
    if not isinstance(found, list) or not found:
        raise DeriveError(f"{path}: no 'cases'")
    return tuple(_case(f"{path}: case {number}", item) for number, item in enumerate(found))


def _case(where: str, item: object) -> FlagsOff:
    if not isinstance(item, dict):
        raise DeriveError(f"{where}: not an object")
    known = {*_NUMBERS, *_FLAGS, *_TEXTS, "micro_batches", "waiting_call_s"}
    unknown = sorted(set(item) - known)
    if unknown:
        raise DeriveError(f"{where}: unknown field(s) {', '.join(unknown)}; known: {sorted(known)}")
    if "name" not in item or "micro_batches" not in item:
        raise DeriveError(f"{where}: needs a name and micro_batches")
    texts = {name: item.get(name, "") for name in _TEXTS}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise DeriveError(f"{where}: {name} is {value!r}; use text")
    flags = {name: item.get(name, name == "latch") for name in _FLAGS}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise DeriveError(f"{where}: {name} is {value!r}; use true or false")
    micro = item["micro_batches"]
    if isinstance(micro, bool) or not isinstance(micro, int) or micro < 1:
        raise DeriveError(f"{where}: micro_batches is {micro!r}; use a whole number from 1")
    numbers = {
        name: _number(where, name, item[name]) if name in item else None for name in _NUMBERS
    }
    waiting = item.get("waiting_call_s", [])
    if not isinstance(waiting, list):
        raise DeriveError(f"{where}: waiting_call_s is {waiting!r}; use a list of seconds")
    return FlagsOff(
        name=str(texts["name"]),
        about=str(texts["about"]),
        micro_batches=micro,
        step_s=numbers["step_s"],
        fwd_bwd_s=numbers["fwd_bwd_s"],
        boundary_idle_s=numbers["boundary_idle_s"],
        update_s=numbers["update_s"],
        copy_s=numbers["copy_s"],
        waiting_call_s=tuple(_number(where, "waiting_call_s", value) for value in waiting),
        ruler_log=str(texts["ruler_log"]),
        ruler_arm=str(texts["ruler_arm"]),
        update_waits=bool(flags["update_waits"]),
        wait_after_dispatch=bool(flags["wait_after_dispatch"]),
        latch=bool(flags["latch"]),
    )


def read_measured(path: Path) -> dict[str, dict[str, Measured]]:
    """Case to setting to what was measured. Raises `DeriveError`."""
    found = _load(path, MEASURED_FORMAT).get("cases")
    if not isinstance(found, dict):
        raise DeriveError(f"{path}: no 'cases'")
    out: dict[str, dict[str, Measured]] = {}
    for case, settings in found.items():
        if not isinstance(settings, dict):
            raise DeriveError(f"{path}: case {case!r} is not an object")
        out[case] = {}
        for setting, values in settings.items():
            where = f"{path}: {case}/{setting}"
            if setting not in SETTINGS or not isinstance(values, dict) or "step_s" not in values:
                raise DeriveError(f"{where}: needs a known setting with step_s")
            unknown = sorted(set(values) - {"step_s", "idle_s"})
            if unknown:
                raise DeriveError(f"{where}: unknown field(s) {', '.join(unknown)}")
            out[case][setting] = Measured(
                step_s=_number(where, "step_s", values["step_s"]),
                idle_s=_number(where, "idle_s", values["idle_s"]) if "idle_s" in values else None,
            )
    return out
