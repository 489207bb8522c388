"""Prometheus metrics of the orchestrator. An observer: it hears of everything and changes nothing.

One process owns the registry. `docs/metrics.md` is generated from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrator.boundary import BoundaryState
from orchestrator.calls import Lost, Note, NoteKind, Refused
from orchestrator.feeder import FeederCounters
from orchestrator.ingest.metrics import LiveMetrics
from orchestrator.operation.run_metrics import RunMetrics
from orchestrator.ports import Answer
from orchestrator.steps import StepBook, StepRecord
from prestage.operation.security_metrics import SecurityMetrics
from prestage.protocol import Phase
from prestage.trace import TraceRecord

_SECONDS: Final = (0.001, 0.005, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class _Read(Collector):
    """Counters that others keep."""

    def __init__(self) -> None:
        self.probe_restarts: Callable[[], int] = lambda: 0
        self.data_wait_s: Callable[[], float] = lambda: 0.0

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "prestage_data_wait_seconds",
            "Seconds that the run had nothing to send until a micro-batch came.",
            value=self.data_wait_s(),
        )
        yield CounterMetricFamily(
            "prestage_probe_restarts",
            "Times that the process which answers probes was started again.",
            value=float(self.probe_restarts()),
        )


class OrchestratorMetrics:
    """All of the orchestrator's metrics, and the observer that feeds them."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        r = self.registry
        self._calls = Counter(
            "prestage_calls",
            "Trainer calls made, by call and outcome.",
            ("call", "outcome"),
            registry=r,
        )
        self._call_seconds = Histogram(
            "prestage_call_seconds",
            "Seconds that a trainer call took, as the orchestrator waited.",
            ("call",),
            buckets=_SECONDS,
            registry=r,
        )
        self._notes = Counter(
            "prestage_fallbacks",
            "Fallbacks and other things that a person must hear of, by kind.",
            ("kind",),
            registry=r,
        )
        for kind in NoteKind:
            self._notes.labels(kind.value)  # So that a rate over a first event is seen.
        self._step = Gauge("prestage_step", "Optimizer steps closed.", registry=r)
        self._train_step = Gauge(
            "prestage_train_step", "Updates applied: the policy version.", registry=r
        )
        self._phase = Gauge(
            "prestage_phase",
            "1 for the trainer's phase as the orchestrator knows it.",
            ("phase",),
            registry=r,
        )
        self._latched = Gauge(
            "prestage_staging_latched", "1 when staging turned itself off for the run.", registry=r
        )
        self._step_seconds = Histogram(
            "prestage_step_seconds", "Seconds of an optimizer step.", buckets=_SECONDS, registry=r
        )
        self._idle = Gauge(
            "prestage_boundary_idle_seconds",
            "Device seconds without work at the last boundary that is known.",
            registry=r,
        )
        self._stage = Gauge("prestage_stage_seconds", "Seconds of the last stage call.", registry=r)
        self._wait = Gauge(
            "prestage_device_wait_seconds",
            "Seconds that the last micro-batch still computed after the last stage call.",
            registry=r,
        )
        self._trained = Counter("prestage_trained_tokens", "Tokens trained.", registry=r)
        self._dropped = Counter(
            "prestage_dropped_trajectories",
            "Trajectories dropped, by reason.",
            ("reason",),
            registry=r,
        )
        self.run = RunMetrics()
        r.register(self.run)
        self._age = Gauge(
            "prestage_progress_age_seconds",
            "Seconds since the orchestrator last made progress.",
            registry=r,
        )
        self._allowance = Gauge(
            "prestage_progress_allowance_seconds",
            "Seconds that the present state may take without progress.",
            registry=r,
        )
        self._allowance.set(math.inf)
        self._durable_step = Gauge(
            "prestage_durable_step",
            "Newest step that a durable checkpoint covers; -1 when none.",
            registry=r,
        )
        self._durable_step.set(-1)
        self._refusals = Counter(
            "prestage_refusals",
            "Requests that the orchestrator's own services refused, by service and reason.",
            ("service", "reason"),
            registry=r,
        )
        self.security = SecurityMetrics("prestage", r)
        self.live = LiveMetrics()
        r.register(self.live)
        self._liveness = _Read()
        r.register(self._liveness)
        self._dropped_seen: dict[str, int] = {}

    def watch_feeder(self, counters: FeederCounters) -> None:
        self.run.put_bytes = lambda: counters.put_bytes
        self.run.put_retries = lambda: counters.put_retries

    def watch_liveness(
        self,
        age_s: Callable[[], float],
        allowance_s: Callable[[], float],
        probe_restarts: Callable[[], int],
    ) -> None:
        """Where progress age, its allowance and the probe process's restarts are read. Seconds."""
        self._age.set_function(age_s)
        self._allowance.set_function(allowance_s)
        self._liveness.probe_restarts = probe_restarts

    def watch_data_wait(self, seconds: Callable[[], float]) -> None:
        """Where the time without anything to send is read."""
        self._liveness.data_wait_s = seconds

    def durable(self, step: int) -> None:
        """A checkpoint that covers this step is durable."""
        self._durable_step.set(step)

    def refused(self, service: str, reason: str) -> None:
        """A service of the orchestrator refused a request. Its full name, or the last part."""
        self._refusals.labels(service.rpartition(".")[2], reason).inc()

    # -- Observer ---------------------------------------------------------------------------------

    def on_call(self, record: TraceRecord, answer: Answer) -> None:
        outcome = record.outcome
        if isinstance(answer.event, Lost):
            outcome = "lost"
        elif isinstance(answer.event, Refused):
            outcome = answer.event.reason.value
        self._calls.labels(record.call, outcome).inc()
        self._call_seconds.labels(record.call).observe(record.seconds)

    def on_note(self, note: Note) -> None:
        self._notes.labels(note.kind.value).inc()
        self.run.on_note(note)

    def on_state(self, state: BoundaryState) -> None:
        self._step.set(state.mirror.step)
        self._train_step.set(state.mirror.train_step)
        self._latched.set(1 if state.latched else 0)
        for phase in Phase:
            self._phase.labels(phase.value).set(1 if phase is state.mirror.phase else 0)

    def on_step(self, book: StepBook, step: int) -> None:
        """A step's bookkeeping."""
        record = book.get(step)
        self.run.on_step(record)
        if record.seconds >= 0:
            self._step_seconds.observe(record.seconds)
        for gauge, value in (
            (self._idle, _newest_idle(book, step)),
            (self._stage, record.stage_seconds),
            (self._wait, record.device_wait_seconds),
        ):
            if value >= 0:
                gauge.set(value)
        summary = record.summary
        if summary is None:
            return
        self._trained.inc(summary.trained_tokens)
        for reason, count in summary.dropped.items():
            # The source counts over the run so far.
            before = self._dropped_seen.get(reason, 0)
            if count > before:
                self._dropped.labels(reason).inc(count - before)
                self._dropped_seen[reason] = count


def _newest_idle(book: StepBook, step: int) -> float:
    """Boundary idle is known once the next step has started: usually the step before's."""
    candidates: list[StepRecord] = [book.get(step), book.get(step - 1)]
    return next(
        (item.boundary_idle_seconds for item in candidates if item.boundary_idle_seconds >= 0), -1.0
    )
