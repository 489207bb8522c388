"""A follower's metrics: those of a worker's that a process without calls can have, by the same names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prestage.operation.heartbeat import Heartbeat


class FollowerMetrics(Collector):
    """Read when asked; safe from any thread."""

    def __init__(self, heartbeat: Heartbeat, shard_bytes: Callable[[], int]) -> None:
        """`shard_bytes`: of micro-batches, received so far."""
        self._heartbeat = heartbeat
        self._shard_bytes = shard_bytes
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        allowance_s = self._heartbeat.allowance_s
        for name, text, value in (
            (
                "prestage_worker_progress_age_seconds",
                "Seconds since the device thread last made progress.",
                self._heartbeat.age_s,
            ),
            (
                "prestage_worker_progress_allowance_seconds",
                "Seconds that the present state may take without progress.",
                allowance_s,
            ),
            (
                "prestage_worker_busy",
                "1 while the device thread runs a call.",
                float(math.isfinite(allowance_s)),
            ),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        received = CounterMetricFamily(
            "prestage_worker_put_bytes", "Payload bytes received, by plane.", labels=["plane"]
        )
        received.add_metric(["hosts"], self._shard_bytes())
        yield received
