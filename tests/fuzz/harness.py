"""Anything from outside either decodes or is a typed error, within a bound of memory and time."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st

T = TypeVar("T")

THOROUGH = settings(max_examples=150, deadline=None)
SECONDS = 10.0
"""Far above what any example takes: only a hang or a blow-up reaches it, also on a busy machine."""


def guarded(
    call: Callable[[], T], *, errors: tuple[type[Exception], ...], most_bytes: int
) -> T | None:
    """The result, or None after one of `errors`; anything else fails the test, as does what takes
    more than `most_bytes` (of Python's and numpy's memory) or too long."""
    tracemalloc.start()
    started_s = time.monotonic()
    try:
        return call()
    except errors as error:
        assert len(str(error)) < 20_000, "an error is for a person to read"
        return None
    finally:
        seconds = time.monotonic() - started_s
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= most_bytes, f"{peak} bytes for at most {most_bytes}"
        assert seconds < SECONDS


@st.composite
def mutated(draw: st.DrawFn, good: bytes) -> bytes:
    """Good bytes with a few changes: flips, cuts, repeats, and numbers at their limits."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("flip", "cut", "drop", "insert", "repeat", "extreme"))):
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at:]
            case "drop":
                del data[at : at + draw(st.integers(1, 16))]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=16))
            case "repeat":
                piece = data[at : at + draw(st.integers(1, 64))]
                data[at:at] = piece * draw(st.integers(1, 20))
            case "extreme":
                value = draw(st.sampled_from((b"\xff" * 9 + b"\x01", b"\x00" * 8, b"\x7f" * 8)))
                data[at : at + len(value)] = value
    return bytes(data)


def spoil(good: bytes, seed: int) -> bytes:
    """The same without hypothesis: for large files, and for another process."""
    choose = random.Random(seed)
    data = bytearray(good)
    for _ in range(choose.randint(1, 8)):
        at = choose.randrange(len(data))
        match choose.randrange(4):
            case 0:
                data[at] = choose.randrange(256)
            case 1:
                data[at : at + 8] = choose.randbytes(8)
            case 2:
                data[at : at + 4] = b"\xff\xff\xff\x7f"
            case 3:
                del data[at : at + choose.randint(1, 64)]
    return bytes(data)
