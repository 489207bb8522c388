"""Time as an input: a monotonic clock that is real or virtual."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds."""

    def now(self) -> float: ...

    def sleep_until(self, when_s: float) -> None:
        """Return at `when_s` or at once when it has passed."""
        ...


class RealClock:
    """`time.monotonic`, with a short spin at the end so that waits end on time."""

    _SPIN_S = 0.0005

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, when_s: float) -> None:
        while (left := when_s - time.monotonic()) > 0:
            time.sleep(left - self._SPIN_S if left > self._SPIN_S else 0.0)


class VirtualClock:
    """Moves only when somebody waits. For one thread."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def sleep_until(self, when_s: float) -> None:
        self._now_s = max(self._now_s, when_s)

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds
