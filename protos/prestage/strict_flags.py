"""Flags and environment variables that parse strictly: a value is understood, or it is an error.

`true`, `1`, `on`, `yes` and their opposites in any case; anything else (`TRUEE`, `2`, empty) is
refused by name, never read as "off".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from absl import flags

flags.disclaim_key_flags()  # A flag that is defined through here belongs to the module that defines it.

_TRUE: Final = frozenset({"1", "true", "on", "yes"})
_FALSE: Final = frozenset({"0", "false", "off", "no"})


def parse_strict_bool(name: str, text: str) -> bool:
    """Parse a switch. Raises `ValueError` naming it, its value and the accepted spellings."""
    value = text.strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ValueError(f"{name} is {text!r}: use one of 1/0, true/false, on/off, yes/no (any case)")


def environment_bool(environment: Mapping[str, str], name: str) -> bool | None:
    """A switch from the environment; None when it is not set. Raises `ValueError`."""
    text = environment.get(name)
    return None if text is None else parse_strict_bool(f"environment variable {name}", text)


class _StrictBoolParser(flags.ArgumentParser[bool]):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def parse(self, argument: str | bool) -> bool:
        if isinstance(argument, bool):
            return argument
        return parse_strict_bool(f"--{self._name}", argument)

    def flag_type(self) -> str:
        return "bool"


class _StrictBoolFlag(flags.Flag[bool]):
    def __init__(self, name: str, default: bool | None, help_text: str) -> None:
        super().__init__(
            parser=_StrictBoolParser(name),
            serializer=flags.ArgumentSerializer(),
            name=name,
            default=default,
            help_string=help_text,
            boolean=True,
        )


def define_strict_bool(
    name: str, default: bool | None, help_text: str
) -> flags.FlagHolder[bool | None]:
    """Define `--name`, `--noname` and `--name=VALUE` with strict values."""
    return flags.DEFINE_flag(_StrictBoolFlag(name, default, help_text))


class _FiniteFloatParser(flags.FloatParser):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def parse(self, argument: str | float) -> float:
        value = float(super().parse(argument))
        if not math.isfinite(value):
            raise ValueError(f"--{self._name} is {argument!r}: use a finite number")
        return value


def define_finite_float(name: str, default: float, help_text: str) -> flags.FlagHolder[float]:
    """Define a float flag that refuses NaN and infinities."""
    return flags.DEFINE(
        _FiniteFloatParser(name), name, default, help_text, serializer=flags.ArgumentSerializer()
    )


class _SecondsParser(_FiniteFloatParser):
    def __init__(self, name: str, *, zero: bool) -> None:
        super().__init__(name)
        self._zero = zero
        self._own_name = name

    def parse(self, argument: str | float) -> float:
        value = super().parse(argument)
        if value < 0 or (value == 0 and not self._zero):
            least = "0 or more" if self._zero else "more than 0"
            raise ValueError(f"--{self._own_name} is {argument!r}: use {least} seconds")
        return value


def define_seconds(
    name: str, default: float, help_text: str, *, zero: bool = False
) -> flags.FlagHolder[float]:
    """Define a duration that refuses negative values and, unless `zero`, 0."""
    return flags.DEFINE(
        _SecondsParser(name, zero=zero),
        name,
        default,
        help_text,
        serializer=flags.ArgumentSerializer(),
    )
