"""What the ingest service counts. Safe from any thread; knows nothing of Prometheus."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from orchestrator.ingest.ports import Receipt
from prestage.rollout.refusals import RolloutReason

_WAIT_COUNTS_FROM_S: Final = 0.01
"""What took less was not held back: the log only took it in."""


def _held_back(seconds: float) -> float:
    return seconds if seconds > _WAIT_COUNTS_FROM_S else 0.0


@dataclass(frozen=True, kw_only=True)
class IngestCounts:
    """One reading. Monotonic except the gauges."""

    producers: int = 0  # Gauge: open streams of named producers.
    watchers: int = 0  # Gauge.
    accepted: int = 0
    accepted_tokens: int = 0
    duplicates: int = 0
    wait_seconds: float = 0.0  # Producers held back because a budget was full.
    lag_seconds: float = 0.0  # Gauge: age of the oldest trajectory that is not durable yet.
    dropped: Mapping[str, int]  # Trajectories by reason.
    dropped_tokens: Mapping[str, int]
    refusals: Mapping[str, int]  # Streams ended by the service, by reason.


class IngestCounters:
    """Adds up."""

    def __init__(self, on_refused: Callable[[RolloutReason], None] = lambda reason: None) -> None:
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._producers = 0
        self._watchers = 0
        self._accepted = 0
        self._accepted_tokens = 0
        self._duplicates = 0
        self._wait_s = 0.0
        self._waits: dict[object, float] = {}
        self._dropped: Counter[str] = Counter()
        self._dropped_tokens: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter({reason.value: 0 for reason in RolloutReason})

    def producers(self, change: int) -> None:
        with self._lock:
            self._producers += change

    def watchers(self, change: int) -> None:
        with self._lock:
            self._watchers += change

    def refused(self, reason: RolloutReason) -> None:
        with self._lock:
            self._refusals[reason.value] += 1
        self._on_refused(reason)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what a full budget may hold back; a wait counts while it still goes on."""
        started_s, key = time.monotonic(), object()
        with self._lock:
            self._waits[key] = started_s
        try:
            yield
        finally:
            with self._lock:
                del self._waits[key]
                self._wait_s += _held_back(time.monotonic() - started_s)

    def acknowledged(self, receipt: Receipt, tokens: int) -> None:
        """`tokens`: of the trajectory; 0 when it could not be read as one."""
        with self._lock:
            if receipt.duplicate:
                self._duplicates += 1
            elif receipt.accepted:
                self._accepted += 1
                self._accepted_tokens += tokens
            else:
                self._dropped[receipt.reason] += 1
                self._dropped_tokens[receipt.reason] += tokens

    def read(self, *, lag_seconds: float = 0.0) -> IngestCounts:
        now_s = time.monotonic()
        with self._lock:
            going_on_s = sum(_held_back(now_s - since_s) for since_s in self._waits.values())
            return IngestCounts(
                producers=self._producers,
                watchers=self._watchers,
                accepted=self._accepted,
                accepted_tokens=self._accepted_tokens,
                duplicates=self._duplicates,
                wait_seconds=self._wait_s + going_on_s,
                lag_seconds=lag_seconds,
                dropped=dict(self._dropped),
                dropped_tokens=dict(self._dropped_tokens),
                refusals=dict(self._refusals),
            )
