"""Prometheus metrics of the worker. Reads the worker's state when it is asked; changes nothing.

One process owns the registry. `docs/metrics.md` is generated from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prestage.operation.security_metrics import SecurityMetrics
from prestage.protocol import Lifecycle, Phase, Reason
from prestage.state_proto import lifecycle_from_proto, phase_from_proto
from prestage.trace import DeviceRecord
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.wire.store import StoreStats
from trainer_worker.worker import WorkerCounters

_SECONDS: Final = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)
_NO_STORE: Final = StoreStats(refs=(), stored_bytes=0, limit_bytes=0, evicted=0, waited=0, failed=0)


class Liveness(Protocol):
    """How long ago progress was made, and how long it may take. Seconds."""

    @property
    def age_s(self) -> float: ...

    @property
    def allowance_s(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """What the state message does not say."""

    counters: WorkerCounters = field(default_factory=WorkerCounters)
    in_flight: int = 0
    staged_bytes: int = 0


class WorkerMetrics(Collector):
    """All of the worker's metrics. Safe from any thread."""

    def __init__(
        self,
        state: Callable[[], pb.WorkerState],
        *,
        facts: Callable[[], WorkerFacts] = WorkerFacts,
        store: Callable[[], StoreStats] = lambda: _NO_STORE,
        staging_budget_bytes: int = 0,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.registry = registry or CollectorRegistry()
        self._state = state
        self._facts = facts
        self._store = store
        self._staging_budget_bytes = staging_budget_bytes
        self._heartbeat: Liveness | None = None
        self._probe_restarts: Callable[[], int] = lambda: 0

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"prestage_worker_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(
                f"prestage_worker_{name}",
                text,
                labels,
                buckets=_SECONDS,
                registry=self.registry,
            )

        self._calls = counter("calls", "Calls answered, by call and gRPC code.", "call", "code")
        self._refusals = counter(
            "refusals", "Calls refused or failed, by call and reason.", "call", "reason"
        )
        self._call_seconds = histogram(
            "call_seconds", "Seconds from a call's arrival to its answer.", "call"
        )
        self._puts = counter("put_bytes", "Payload bytes received, by plane.", "plane")
        self._mismatches = counter("digest_mismatches", "Payloads whose digest did not match.")
        self._busy = counter(
            "device_busy_seconds", "Seconds that the device computed, by kind of work.", "kind"
        )
        self._copies = counter("copy_seconds", "Seconds that inputs were copied to the device.")
        self._idle = Gauge(
            "prestage_worker_boundary_idle_seconds",
            "Device seconds without work at the last step boundary.",
            registry=self.registry,
        )
        self._all_idle = counter(
            "idle_seconds", "Device seconds without work at all step boundaries."
        )
        self._boundaries = counter("boundaries", "Step boundaries whose idle time is known.")
        self._saves = histogram(
            "checkpoint_seconds", "Seconds from the snapshot to a durable checkpoint."
        )
        self._failed_saves = counter(
            "checkpoint_failures", "Checkpoints that failed in the background."
        )
        for kind in ("fwd_bwd", "update"):  # So that a rate over a first event is seen.
            self._busy.labels(kind)
        for plane in ("shared-memory", "stream"):
            self._puts.labels(plane)
        self.registry.register(self)
        self.security = SecurityMetrics("prestage_worker", self.registry)

    def watch_liveness(self, heartbeat: Liveness, probe_restarts: Callable[[], int]) -> None:
        """Where progress age, its allowance and the probe process's restarts are read."""
        self._heartbeat = heartbeat
        self._probe_restarts = probe_restarts

    # -- told -------------------------------------------------------------------------------------

    def on_call(self, call: str, code: str, reason: str, seconds: float) -> None:
        self._calls.labels(call, code).inc()
        self._call_seconds.labels(call).observe(seconds)
        if reason:
            self._refusals.labels(call, reason).inc()
        if reason == Reason.DIGEST_MISMATCH.value:
            self._mismatches.inc()

    def on_put(self, plane: str, stored_bytes: int) -> None:
        self._puts.labels(plane).inc(stored_bytes)

    def on_device(self, record: DeviceRecord) -> None:
        counter = self._copies if record.kind == "copy" else self._busy.labels(record.kind)
        counter.inc(max(0.0, record.finished_s - record.started_s))

    def on_boundary(self, idle_seconds: float) -> None:
        self._idle.set(idle_seconds)
        self._all_idle.inc(idle_seconds)
        self._boundaries.inc()

    def on_save(self, durable: bool, seconds: float) -> None:
        if durable:
            self._saves.observe(seconds)
        else:
            self._failed_saves.inc()

    # -- asked ------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        state, facts, store = self._state(), self._facts(), self._store()
        heartbeat = self._heartbeat
        lifecycle = lifecycle_from_proto(state.lifecycle)
        yield _one_of(
            "prestage_worker_lifecycle",
            "1 for where the process stands.",
            "state",
            [item.value for item in Lifecycle],
            lifecycle.value,
        )
        yield _one_of(
            "prestage_worker_phase",
            "1 for the phase of the step protocol.",
            "phase",
            [item.value for item in Phase],
            phase_from_proto(state.phase).value,
        )
        gauges: tuple[tuple[str, str, float], ...] = (
            ("step", "Steps closed.", state.step),
            ("micro_step", "Micro-batches of the open step.", state.micro_step),
            ("train_step", "Updates applied: the policy version.", state.train_step),
            ("epoch", "Epoch of the caller that may change the worker.", state.epoch),
            (
                "durable_step",
                "Newest step that a durable checkpoint covers; -1 when none.",
                state.durable_step,
            ),
            (
                "parameters_suspect",
                "1 when only a restore (or a restart) helps.",
                state.parameters_suspect,
            ),
            ("inflight", "Micro-batches dispatched and not done.", facts.in_flight),
            (
                "staged_bytes",
                "Device memory of the staged input; 0 when none.",
                facts.staged_bytes,
            ),
            (
                "staging_budget_bytes",
                "Device memory that a staged input may take.",
                self._staging_budget_bytes,
            ),
            ("store_bytes", "Bytes of put micro-batches.", store.stored_bytes),
            ("store_budget_bytes", "Bytes that put micro-batches may take.", store.limit_bytes),
            ("busy", "1 while the device thread runs a call.", bool(state.running_call)),
            (
                "progress_age_seconds",
                "Seconds since the device thread last made progress.",
                state.seconds_since_progress if heartbeat is None else heartbeat.age_s,
            ),
            (
                "progress_allowance_seconds",
                "Seconds that the present state may take without progress.",
                math.inf if heartbeat is None else heartbeat.allowance_s,
            ),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"prestage_worker_{name}", text, value=float(value))
        counters = facts.counters
        totals: tuple[tuple[str, str, float], ...] = (
            ("updates", "Updates applied.", counters.updates),
            (
                "update_skipped",
                "Updates skipped because the step's denominator was 0.",
                counters.skipped_updates,
            ),
            (
                "dropless_retries",
                "Micro-batches run again with the dropless program.",
                counters.dropless_replays,
            ),
            (
                "moe_dropped_assignments",
                "Token-to-expert assignments dropped in applied updates. Anything above 0 is a fault"
                " of the run.",
                counters.moe_dropped_assignments,
            ),
            ("engine_failures", "Times that the engine raised.", counters.engine_failures),
            (
                "late_failures",
                "Device failures found after their call was answered.",
                counters.late_failures,
            ),
            ("compile_seconds", "Seconds of compile calls.", counters.compile_seconds),
            ("store_evicted", "Trained micro-batches let go to make room.", store.evicted),
            ("store_waited", "Puts that had to wait for room.", store.waited),
            (
                "probe_restarts",
                "Times that the process which answers probes was started again.",
                self._probe_restarts(),
            ),
        )
        for name, text, total in totals:
            yield CounterMetricFamily(f"prestage_worker_{name}", text, value=float(total))
        compiles = CounterMetricFamily(
            "prestage_worker_compiles", "Backend compiles, by when.", labels=("when",)
        )
        compiles.add_metric(("warm_up",), counters.warm_up_compiles)
        serving = state.backend_compiles - counters.warm_up_compiles if state.compiled else 0
        compiles.add_metric(("serving",), max(0, serving))
        yield compiles


def _one_of(name: str, text: str, label: str, values: list[str], current: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for value in values:
        family.add_metric((value,), 1.0 if value == current else 0.0)
    return family
