"""Bounds how many fields a message has before the parser makes an object of each.

An empty inner message is 2 bytes on the wire and dozens in memory: a message within its byte limit could
otherwise take a hundred times its size. Reads bytes only; knows nothing of what a message means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message


class ScanError(ValueError):
    """Not a message that is parsed here; says what and where."""


Nested = Mapping[int, "Nested"]
"""Field number to the fields below it, for those that are messages."""

_VARINT: Final = 0
_FIXED64: Final = 1
_LENGTH: Final = 2
_FIXED32: Final = 5


def count_fields(data: bytes, nested: Nested, *, most: int) -> int:
    """Fields in `data`, with those of the `nested` messages.

    Raises `ScanError` for more than `most`, a length beyond the end, or a deprecated wire type.
    """
    count = 0
    ranges: list[tuple[int, int, Nested]] = [(0, len(data), nested)]
    while ranges:
        at, end, below = ranges.pop()
        while at < end:
            count += 1
            if count > most:
                raise ScanError(f"the message has more than {most} fields")
            tag, at = _varint(data, at, end)
            kind = tag & 7
            if kind == _VARINT:
                _, at = _varint(data, at, end)
            elif kind == _LENGTH:
                length, at = _varint(data, at, end)
                if length > end - at:
                    raise ScanError(
                        f"field {tag >> 3} says {length} bytes at byte {at}; {end - at} are left"
                    )
                inner = below.get(tag >> 3)
                if inner is not None:
                    ranges.append((at, at + length, inner))
                at += length
            elif kind in (_FIXED64, _FIXED32):
                at += 8 if kind == _FIXED64 else 4
                if at > end:
                    raise ScanError(f"field {tag >> 3} ends beyond the message")
            else:
                raise ScanError(f"field {tag >> 3} has wire type {kind}, which is not used")
    return count


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise ScanError("the message ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ScanError(f"a number at byte {at} has more than 10 bytes")


def nested_fields(message: type[Message]) -> Nested:
    """The fields of a message that are messages, at all levels. For messages that are not recursive."""
    return _below(cast(Descriptor, message.DESCRIPTOR))  # The C runtime's has the same fields.


def _below(descriptor: Descriptor) -> Nested:
    return {
        field.number: _below(field.message_type)
        for field in descriptor.fields
        if field.message_type is not None
    }
