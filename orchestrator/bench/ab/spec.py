"""The spec of an A/B: what the arms are and by which rule they are judged. A TOML or JSON file.

Two kinds of rule. `band`: every metric of the `on` arm lies, at every judged step, between the two
`off` arms. `bounds`: at the judged steps, the `on` arm differs from the mean of the `off` arms by
no more than the metric's bound. The file's hash is printed before the first arm starts.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

FORWARD_METRIC: Final = "sampler_is/token_logdiff_absmean"
METRICS: Final = ("loss", "grad_norm", "entropy", FORWARD_METRIC)


class SpecError(ValueError):
    """A spec that cannot be used; names the file, the key and the fix."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """How far `on` may lie from the mean of the off arms.

    At most `passes`: PASS. Above `fails`: FAIL. Between: INCONCLUSIVE. Relative to the mean, unless
    `absolute`.
    """

    passes: float
    fails: float
    absolute: bool = False


# The production change's own bounds: relative, but for the forward metric, which is in nats.
DEFAULT_BOUNDS: Final[Mapping[str, Bound]] = MappingProxyType(
    {
        "loss": Bound(passes=1e-5, fails=1e-5),
        FORWARD_METRIC: Bound(passes=5e-5, fails=5e-4, absolute=True),
        "entropy": Bound(passes=1e-4, fails=1e-3),
        "grad_norm": Bound(passes=2e-3, fails=1e-2),
    }
)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Flags of one arm's two processes, and variables of its worker's environment."""

    worker: tuple[str, ...]
    orchestrator: tuple[str, ...]
    environment: tuple[str, ...] = ()  # NAME=VALUE: what no flag reaches, such as libtpu's.


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One A/B."""

    name: str
    kind: str  # "band" or "bounds".
    steps: tuple[int, ...]  # Judged steps, from 0.
    num_steps: int
    off: Arm
    on: Arm
    bounds: Mapping[str, Bound]
    sha256: str
    on_stages: bool = False  # The `on` arm must consume a staged input at every boundary.


def _strings(path: Path, where: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise SpecError(f"{path}: {where} is {value!r}; it is a list of flags")
    return tuple(value)


def _table(path: Path, data: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise SpecError(f"{path}: [{key}] is no table")
    unknown = sorted(set(value) - {"worker", "orchestrator", "environment"})
    if unknown and key != "bounds":
        raise SpecError(f"{path}: [{key}] has the unknown key {unknown[0]!r}")
    return value


_OURS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "worker": frozenset({"listen", "ready_file"}),
        "orchestrator": frozenset({"trainer", "rollouts", "run_id", "num_steps", "result_file"}),
    }
)
"""Flags that the tool gives itself: in a spec they would undo what makes the arms comparable."""


def _no_flag_of_ours(path: Path, key: str, flags: tuple[str, ...]) -> tuple[str, ...]:
    for flag in flags:
        name = flag.lstrip("-").partition("=")[0]
        if name in _OURS[key]:
            raise SpecError(f"{path}: {key} flag {flag}: the A/B sets --{name} itself; remove it")
    return flags


def _arm(path: Path, common: Mapping[str, object], own: Mapping[str, object], name: str) -> Arm:
    def both(key: str) -> tuple[str, ...]:
        flags = (
            *_strings(path, f"common.{key}", common.get(key, [])),
            *_strings(path, f"{name}.{key}", own.get(key, [])),
        )
        return _no_flag_of_ours(path, key, flags)

    return Arm(
        worker=both("worker"),
        orchestrator=both("orchestrator"),
        environment=_environment(path, common, own, name),
    )


def _environment(
    path: Path, common: Mapping[str, object], own: Mapping[str, object], name: str
) -> tuple[str, ...]:
    """Variables of the arm's worker; the arm's own replace the common ones of the same name."""
    found: dict[str, str] = {}
    for where, table in (("common", common), (name, own)):
        words = _strings(path, f"{where}.environment", table.get("environment", []))
        for word in words:
            variable, equals, value = word.partition("=")
            if not variable or not equals:
                raise SpecError(f"{path}: {where}.environment has {word!r}; write NAME=VALUE")
            found[variable] = value
    return tuple(f"{variable}={value}" for variable, value in found.items())


def _limit(path: Path, where: str, value: object) -> float:
    """A number of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SpecError(f"{path}: {where} is {value!r}; it is a number")
    if value < 0:
        raise SpecError(f"{path}: {where} is {value}; it is a distance, 0 or more")
    return float(value)


def _switch(path: Path, where: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise SpecError(f"{path}: {where} is {value!r}; use true or false")
    return value


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _bounds(path: Path, data: Mapping[str, object]) -> Mapping[str, Bound]:
    bounds = dict(DEFAULT_BOUNDS)
    for name, value in _table(path, data, "bounds").items():
        if name not in METRICS or not isinstance(value, dict):
            raise SpecError(f"{path}: [bounds.{name}] is not one of {', '.join(METRICS)}")
        unknown = sorted(set(value) - {"passes", "fails", "absolute"})
        if unknown:
            raise SpecError(f"{path}: [bounds.{name}] has the unknown key {unknown[0]!r}")
        where, default = f"bounds.{name}", bounds[name]
        bound = Bound(
            passes=_limit(path, f"{where}.passes", value.get("passes", default.passes)),
            fails=_limit(path, f"{where}.fails", value.get("fails", default.fails)),
            absolute=_switch(path, f"{where}.absolute", value.get("absolute", default.absolute)),
        )
        if bound.passes > bound.fails:
            raise SpecError(f"{path}: [{where}] needs passes <= fails, got {bound}")
        bounds[name] = bound
    return MappingProxyType(bounds)


def read_spec(path: Path) -> Spec:
    """Raises `SpecError`."""
    try:
        data = path.read_bytes()
        text = data.decode()
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:  # ValueError: what both readers' own errors are.
        raise SpecError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise SpecError(f"{path}: is no table of keys")
    known = {"name", "kind", "steps", "num_steps", "on_stages", "common", "off", "on", "bounds"}
    unknown = sorted(set(content) - known)
    if unknown:
        raise SpecError(f"{path}: unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}")
    kind = content.get("kind")
    if kind not in ("band", "bounds"):
        raise SpecError(f"{path}: kind is {kind!r}; use 'band' or 'bounds'")
    default_steps = [0, 1, 2] if kind == "band" else [0]
    steps = content.get("steps", default_steps)
    if not isinstance(steps, list) or not steps or not all(_whole(step) for step in steps):
        raise SpecError(f"{path}: steps is {steps!r}; it is a list of step numbers from 0")
    num_steps = content.get("num_steps", max(steps) + 2)
    if not _whole(num_steps) or num_steps <= max(steps):
        raise SpecError(f"{path}: num_steps is {num_steps!r}; it must exceed step {max(steps)}")
    common = _table(path, content, "common")
    off = _arm(path, common, _table(path, content, "off"), "off")
    on = _arm(path, common, _table(path, content, "on"), "on")
    if off == on:
        raise SpecError(f"{path}: the arms have the same flags, so nothing is compared; fill [on]")
    return Spec(
        name=str(content.get("name", path.stem)),
        kind=kind,
        steps=tuple(steps),
        num_steps=num_steps,
        off=off,
        on=on,
        bounds=_bounds(path, content),
        sha256=hashlib.sha256(data).hexdigest(),
        on_stages=_switch(path, "on_stages", content.get("on_stages", False)),
    )
