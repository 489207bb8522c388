"""Kinds of recipe values and their one parser from text. YAML scalars arrive here as text, too.

Every refusal names the key, the value and what is accepted.
"""

from __future__ import annotations

import enum
import math
import re
from typing import Final

from prestage.strict_flags import parse_strict_bool

Pairs = tuple[tuple[str, str], ...]
Value = bool | int | float | str | Pairs | None
"""`None`: not set, and nothing is rendered for it."""


class RecipeError(ValueError):
    """A recipe that cannot be rendered; names the key, its value and the fix."""


class Kind(enum.Enum):
    """What a key's text is read as."""

    SWITCH = "switch"
    STAGING = "on, off or auto"
    HEAD = "off, local, vocab or auto"
    WHOLE = "whole number"
    NUMBER = "number"
    BUFFER = "-1, or a number of 1 or more"
    TEXT = "text"
    NAME = "DNS label"
    IMAGE = "image by digest"
    QUANTITY = "Kubernetes quantity"
    TOPOLOGY = "chips per axis, as 4x4x8"
    PAIRS = "list of NAME=VALUE"


MAX_VALUE_CHARACTERS: Final = 16_384
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_IMAGE: Final = re.compile(r"[a-z0-9][a-z0-9._:/-]*[a-z0-9]@sha256:[0-9a-f]{64}")
_QUANTITY: Final = re.compile(r"[0-9]+(\.[0-9]+)?(m|Ki|Mi|Gi|Ti|k|M|G|T)?")
_TOPOLOGY: Final = re.compile(r"[1-9][0-9]*(x[1-9][0-9]*){1,2}")
_PAIR: Final = re.compile(r"(?:--)?([A-Za-z_][A-Za-z0-9_.]*)=(\S*)")
_HEADS: Final = ("off", "local", "vocab", "auto")


def parse_pairs(name: str, text: str) -> Pairs:
    """`A=1 B=2`, separated by white space; a name may appear once. Raises `RecipeError`."""
    found: dict[str, str] = {}
    for word in text.split():
        match = _PAIR.fullmatch(word)
        if match is None:
            raise RecipeError(f"{name} has {word!r}: write NAME=VALUE, separated by spaces")
        if match[1] in found:
            raise RecipeError(f"{name} sets {match[1]} twice: keep one")
        found[match[1]] = match[2]
    return tuple(found.items())


def _switch(name: str, text: str) -> bool:
    try:
        return parse_strict_bool(name, text)
    except ValueError as error:
        raise RecipeError(str(error)) from error


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise RecipeError(f"{name} is {text!r}: use a number") from None
    if not math.isfinite(value):
        raise RecipeError(f"{name} is {text!r}: use a finite number")
    return value


def _whole(name: str, text: str, least: int) -> int:
    if re.fullmatch(r"-?[0-9]{1,18}", text) is None:
        raise RecipeError(f"{name} is {text!r}: use a whole number")
    value = int(text)
    if value < least:
        raise RecipeError(f"{name} is {value}: use {least} or more")
    return value


def _buffer(name: str, text: str) -> float:
    """A MoE buffer factor. Read as a number, so that -1, -1.0 and -1e0 are the same."""
    value = _number(name, text)
    if value != -1 and value < 1:
        raise RecipeError(f"{name} is {text!r}: use -1 (no token is dropped) or a factor from 1 on")
    return value


def _head(name: str, text: str) -> str:
    value = text.lower()
    if value in _HEADS:
        return value
    if value in ("0", "false", "no"):
        return "off"
    raise RecipeError(f"{name} is {text!r}: use one of {', '.join(_HEADS)}")


def _staging(name: str, text: str) -> str:
    if text.lower() == "auto":
        return "auto"
    try:
        return "on" if parse_strict_bool(name, text) else "off"
    except ValueError as error:
        raise RecipeError(f"{error}, or auto") from error


def _matching(name: str, text: str, pattern: re.Pattern[str], what: str) -> str:
    if pattern.fullmatch(text) is None:
        raise RecipeError(f"{name} is {text!r}: {what}")
    return text


def parse_value(name: str, kind: Kind, text: str, *, least: int = 0) -> Value:
    """Read one key's text. `least` bounds whole numbers. Raises `RecipeError`."""
    text = text.strip()
    if len(text) > MAX_VALUE_CHARACTERS:
        raise RecipeError(
            f"{name} has {len(text)} characters; at most {MAX_VALUE_CHARACTERS} are read"
        )
    match kind:
        case Kind.SWITCH:
            return _switch(name, text)
        case Kind.STAGING:
            return _staging(name, text)
        case Kind.HEAD:
            return _head(name, text)
        case Kind.WHOLE:
            return _whole(name, text, least)
        case Kind.NUMBER:
            value = _number(name, text)
            if value < least:
                raise RecipeError(f"{name} is {text!r}: use {least} or more")
            return value
        case Kind.BUFFER:
            return _buffer(name, text)
        case Kind.TEXT:
            if "\n" in text or "\0" in text:
                raise RecipeError(f"{name} is {text!r}: it is one line")
            return text
        case Kind.NAME:
            what = "use lower-case letters, digits and '-', at most 40, as in DNS names"
            return _matching(name, text, _NAME, what)
        case Kind.IMAGE:
            what = "name the image by digest, registry/name@sha256:<64 hex>; tags can move"
            return _matching(name, text, _IMAGE, what)
        case Kind.QUANTITY:
            return _matching(name, text, _QUANTITY, "use a Kubernetes quantity such as 4 or 16Gi")
        case Kind.TOPOLOGY:
            return _matching(name, text, _TOPOLOGY, "write the chips per axis, as 4x4x8")
        case Kind.PAIRS:
            return parse_pairs(name, text)


def value_text(value: Value) -> str:
    """A value as it is printed, and as `parse_value` reads it back."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return " ".join(f"{name}={item}" for name, item in value)
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value)
