"""Prometheus metrics of a live run's intake: read at each scrape from what counts anyway.

Always registered, so that the list of names does not depend on flags; without a live run there are
names and no values. Changes nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

_MARKS: Final = 4096


@dataclass(frozen=True, kw_only=True)
class LiveReading:
    """One reading. Counters are over the run, across restarts, where they are in tokens."""

    accepted_tokens: int
    dropped_tokens: Mapping[str, int]  # By reason.
    queue_depth: int  # Complete groups that no step has.
    formed_groups: int  # Complete groups over the whole run.
    queue_bytes: int
    queue_budget_bytes: int
    incomplete_groups: int
    producers: int
    producer_wait_seconds: float
    journal_lag_seconds: float
    journal_bytes: int
    journal_budget_bytes: int
    commit_bounds: Sequence[float]  # Upper bounds, seconds.
    commit_buckets: Sequence[int]  # Commits up to each bound and above the one before.
    commits: int
    commit_seconds: float
    policy_lag_updates: int | None  # None: no step was trained since the start.


@dataclass
class QueueAge:
    """How long the oldest waiting group has been there, from counts alone.

    Groups wait in their durable order, so the number of complete groups at each look says since when
    each of them is there, to within the time between two looks.
    """

    clock: Callable[[], float] = time.monotonic
    marks: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_MARKS))

    def look(self, formed: int, waiting: int) -> float:
        """Age of the oldest of `waiting` groups, of `formed` in all; 0 when none waits. Seconds."""
        now_s = self.clock()
        if not self.marks or self.marks[-1][0] != formed:
            self.marks.append((formed, now_s))
        if not waiting:
            return 0.0
        oldest = formed - waiting  # Its place, from 0.
        while len(self.marks) > 1 and self.marks[0][0] <= oldest:
            self.marks.popleft()
        return now_s - self.marks[0][1]


class LiveMetrics(Collector):
    """Everything that is planned about the queue, producers and the journal."""

    def __init__(self) -> None:
        self._read: Callable[[], LiveReading | None] = lambda: None
        self._age = QueueAge()

    def watch(self, read: Callable[[], LiveReading | None]) -> None:
        """Where readings come from; None = no live run, or none any more."""
        self._read = read

    def reading(self) -> LiveReading | None:
        """One reading now; None without a live run. Safe from any thread."""
        return self._read()

    def collect(self) -> Iterator[Metric]:
        reading = self._read()
        for name, text, counted in _COUNTERS:
            yield CounterMetricFamily(
                name, text, value=None if reading is None else counted(reading)
            )
        for name, text, gauged in _GAUGES:
            yield GaugeMetricFamily(name, text, value=None if reading is None else gauged(reading))
        dropped = CounterMetricFamily(
            "prestage_dropped_tokens",
            "Tokens of dropped trajectories, by reason.",
            labels=["reason"],
        )
        age = GaugeMetricFamily(
            "prestage_queue_age_seconds",
            "Age of the oldest group that waits; 0 when none does.",
        )
        lag = GaugeMetricFamily(
            "prestage_policy_lag_updates",
            "Largest policy-version distance among the trajectories of the last step.",
        )
        commits = HistogramMetricFamily(
            "prestage_journal_commit_seconds", "Seconds of a journal commit."
        )
        if reading is not None:
            for reason, tokens in sorted(reading.dropped_tokens.items()):
                dropped.add_metric([reason], tokens)
            age.add_metric([], self._age.look(reading.formed_groups, reading.queue_depth))
            if reading.policy_lag_updates is not None:
                lag.add_metric([], reading.policy_lag_updates)
            commits.add_metric([], _buckets(reading), reading.commit_seconds)
        yield from (dropped, age, lag, commits)


def _buckets(reading: LiveReading) -> list[tuple[str, float]]:
    """Cumulative, as the format wants them."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip(reading.commit_bounds, reading.commit_buckets, strict=True):
        total += count
        buckets.append((repr(float(bound)), total))
    return [*buckets, ("+Inf", reading.commits)]


_Row = tuple[str, str, Callable[[LiveReading], float]]
_COUNTERS: Final[Sequence[_Row]] = (
    (
        "prestage_accepted_tokens",
        "Tokens of trajectories that were acknowledged.",
        lambda reading: reading.accepted_tokens,
    ),
    (
        "prestage_producer_wait_seconds",
        "Seconds that producers were held back because a budget was full.",
        lambda reading: reading.producer_wait_seconds,
    ),
)
_GAUGES: Final[Sequence[_Row]] = (
    (
        "prestage_queue_depth",
        "Complete groups that wait to be trained.",
        lambda reading: reading.queue_depth,
    ),
    (
        "prestage_queue_bytes",
        "Memory held by rollouts that are not durable yet.",
        lambda reading: reading.queue_bytes,
    ),
    (
        "prestage_queue_budget_bytes",
        "Memory that rollouts which are not durable yet may hold; producers wait above it.",
        lambda reading: reading.queue_budget_bytes,
    ),
    (
        "prestage_incomplete_groups",
        "Groups that still miss a trajectory.",
        lambda reading: reading.incomplete_groups,
    ),
    (
        "prestage_producers",
        "Open SubmitTrajectories streams.",
        lambda reading: reading.producers,
    ),
    (
        "prestage_journal_lag_seconds",
        "Age of the oldest accepted trajectory that is not durable yet; 0 when none.",
        lambda reading: reading.journal_lag_seconds,
    ),
    (
        "prestage_journal_bytes",
        "Size of the journal's payload files.",
        lambda reading: reading.journal_bytes,
    ),
    (
        "prestage_journal_budget_bytes",
        "Size at which producers wait.",
        lambda reading: reading.journal_budget_bytes,
    ),
)
