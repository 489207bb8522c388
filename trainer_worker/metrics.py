"""Prometheus metrics of the worker. Reads the worker's state when it is asked; changes nothing.

One process owns the registry. `docs/metrics.md` is generated from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prestage.protocol import Call, Lifecycle, Phase
from prestage.state_proto import lifecycle_from_proto, phase_from_proto
from prestage.trace import DeviceRecord
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.wire.store import StoreStats
from trainer_worker.worker import WorkerCounters

_SECONDS: Final = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)
_NO_STORE: Final = StoreStats(refs=(), stored_bytes=0, limit_bytes=0, evicted=0, waited=0, failed=0)


class WorkerMetrics(Collector):
    """All of the worker's metrics. Safe from any thread."""

    def __init__(
        self,
        state: Callable[[], pb.WorkerState],
        *,
        store: Callable[[], StoreStats] = lambda: _NO_STORE,
        counters: Callable[[], WorkerCounters] = WorkerCounters,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.registry = registry or CollectorRegistry()
        self._state = state
        self._store = store
        self._counters = counters
        r = self.registry
        self._calls = Counter(
            "prestage_worker_calls",
            "Calls that the device thread dealt with, by call and outcome.",
            ("call", "outcome"),
            registry=r,
        )
        self._call_seconds = Histogram(
            "prestage_worker_call_seconds",
            "Seconds of a call on the device thread.",
            ("call",),
            buckets=_SECONDS,
            registry=r,
        )
        self._device = Counter(
            "prestage_worker_device_seconds",
            "Seconds that the device (or its copy engine) worked, by kind of work.",
            ("kind",),
            registry=r,
        )
        self._idle = Histogram(
            "prestage_worker_boundary_idle_seconds",
            "Device seconds without work at a step boundary.",
            buckets=_SECONDS,
            registry=r,
        )
        for kind in ("fwd_bwd", "update", "copy"):
            self._device.labels(kind)  # So that a rate over a first event is seen.
        r.register(self)

    # -- told -------------------------------------------------------------------------------------

    def on_call(self, call: Call, outcome: str, seconds: float) -> None:
        self._calls.labels(call.value, outcome).inc()
        self._call_seconds.labels(call.value).observe(seconds)

    def on_device(self, record: DeviceRecord) -> None:
        self._device.labels(record.kind).inc(max(0.0, record.finished_s - record.started_s))

    def on_boundary(self, idle_seconds: float) -> None:
        self._idle.observe(idle_seconds)

    # -- asked ------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        state, store, counters = self._state(), self._store(), self._counters()
        lifecycle = lifecycle_from_proto(state.lifecycle)
        yield _one_of(
            "prestage_worker_lifecycle",
            "1 for where the process stands.",
            "lifecycle",
            [item.value for item in Lifecycle],
            lifecycle.value,
        )
        yield _one_of(
            "prestage_worker_phase",
            "1 for the phase of the open step.",
            "phase",
            [item.value for item in Phase],
            phase_from_proto(state.phase).value,
        )
        gauges: tuple[tuple[str, str, float], ...] = (
            ("step", "The open or next step: steps closed so far.", state.step),
            ("micro_step", "Micro-batches of the open step.", state.micro_step),
            ("train_step", "Updates applied: the policy version.", state.train_step),
            ("epoch", "The newest caller's epoch.", state.epoch),
            (
                "durable_step",
                "Step of the newest durable checkpoint; -1 = none.",
                state.durable_step,
            ),
            (
                "parameters_suspect",
                "1 when only a restore (or restart) helps.",
                state.parameters_suspect,
            ),
            (
                "background_failure",
                "1 when the last background save failed.",
                bool(state.background_failure),
            ),
            ("staged", "1 while the next step's first input is staged.", state.HasField("staged")),
            ("backend_compiles", "Programs that the backend compiled.", state.backend_compiles),
            (
                "seconds_since_progress",
                "Seconds since the device thread last made progress.",
                state.seconds_since_progress,
            ),
            ("busy", "1 while the device thread runs a call.", bool(state.running_call)),
            ("store_bytes", "Bytes of put micro-batches.", store.stored_bytes),
            ("store_limit_bytes", "Limit of put micro-batches, bytes.", store.limit_bytes),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"prestage_worker_{name}", text, value=float(value))
        totals: tuple[tuple[str, str, int], ...] = (
            ("updates", "Updates applied.", counters.updates),
            (
                "skipped_updates",
                "Steps closed without an update: summed denominator 0.",
                counters.skipped_updates,
            ),
            (
                "dropless_replays",
                "Micro-batches run again without drops.",
                counters.dropless_replays,
            ),
            (
                "late_failures",
                "Device failures found after their call was answered.",
                counters.late_failures,
            ),
            ("store_evicted", "Trained micro-batches let go to make room.", store.evicted),
            ("store_waited", "Puts that had to wait for room.", store.waited),
            ("store_failed", "Puts whose bytes did not pass their checks.", store.failed),
        )
        for name, text, total in totals:
            yield CounterMetricFamily(f"prestage_worker_{name}", text, value=float(total))


def _one_of(name: str, text: str, label: str, values: list[str], current: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for value in values:
        family.add_metric((value,), 1.0 if value == current else 0.0)
    return family


def serve(metrics: WorkerMetrics, port: int) -> Callable[[], None]:
    """Serve `/metrics` on the loopback address; returns what stops it. Raises `OSError`."""
    server, thread = start_http_server(port, addr="127.0.0.1", registry=metrics.registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)

    return stop
