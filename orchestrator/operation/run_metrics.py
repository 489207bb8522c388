"""Prometheus metrics that follow from a run's steps, calls and notes. Changes nothing.

Families are always there; a value that is not known yet has no sample, rather than a 0.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrator.calls import Note, NoteKind
from orchestrator.report import FORWARD_METRIC
from orchestrator.steps import StepRecord

BOUNDARIES: Final = ("staged", "late", "ineligible", "unstaged")
_OF_A_STEP: Final = (
    ("prestage_loss", "loss", "Loss of the last closed step."),
    ("prestage_grad_norm", "grad_norm", "Global gradient norm of the last closed step."),
    ("prestage_entropy", "entropy", "Token entropy of the last closed step."),
    (
        "prestage_token_logdiff_absmean",
        FORWARD_METRIC,
        "Mean absolute gap per token between trainer and rollout log-probs, last closed step.",
    ),
)
_WHY: Final = {NoteKind.LATE: "late", NoteKind.INELIGIBLE: "ineligible"}


class RunMetrics(Collector):
    """Thread-safe: written by the runner's thread, read by a scrape."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._boundaries: Counter[str] = Counter()
        self._why: dict[int, str] = {}  # Of boundaries whose step is not booked yet.
        self._retries: Counter[str] = Counter()
        self._worker_restarts = 0
        self.staging: Callable[[], bool | None] = lambda: None  # None = not decided yet.
        self.put_bytes: Callable[[], int] = lambda: 0
        self.put_retries: Callable[[], int] = lambda: 0

    def resent(self, call: str) -> None:
        """A call is sent again with the same key."""
        with self._lock:
            self._retries[call] += 1

    def on_note(self, note: Note) -> None:
        with self._lock:
            if note.kind is NoteKind.WORKER_RESTARTED:
                self._worker_restarts += 1
            if note.kind in _WHY:
                self._why[note.step] = _WHY[note.kind]

    def on_step(self, record: StepRecord) -> None:
        """A step's bookkeeping: its boundary is over, too."""
        with self._lock:
            why = self._why.pop(record.step, "unstaged")
            self._boundaries["staged" if record.stage_seconds >= 0 else why] += 1
            for old in [step for step in self._why if step < record.step]:
                del self._why[old]
            for _, name, _ in _OF_A_STEP:
                if name in record.metrics:
                    self._values[name] = record.metrics[name]

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            values, boundaries = dict(self._values), Counter(self._boundaries)
            retries, restarts = Counter(self._retries), self._worker_restarts
        for name, key, text in _OF_A_STEP:
            gauge = GaugeMetricFamily(name, text)
            if key in values:
                gauge.add_metric((), values[key])
            yield gauge
        staging = GaugeMetricFamily(
            "prestage_staging_enabled",
            "1 when the run stages the next micro-batch (what start-up decided, before any latch).",
        )
        decided = self.staging()
        if decided is not None:
            staging.add_metric((), 1.0 if decided else 0.0)
        yield staging
        yield _labelled(
            "prestage_staged_boundaries",
            "Step boundaries, by what became of staging: staged, late, ineligible, unstaged.",
            "outcome",
            {outcome: boundaries[outcome] for outcome in BOUNDARIES},
        )
        yield _labelled(
            "prestage_retries",
            "Trainer calls sent again with the same key, by call.",
            "call",
            retries,
        )
        for name, text, total in (
            (
                "prestage_worker_restarts",
                "New incarnations of the worker that this orchestrator met.",
                restarts,
            ),
            ("prestage_put_bytes", "Payload bytes brought to the worker.", self.put_bytes()),
            (
                "prestage_put_retries",
                "Puts sent again after a transport failure.",
                self.put_retries(),
            ),
        ):
            yield CounterMetricFamily(name, text, value=float(total))


def _labelled(name: str, text: str, label: str, counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=(label,))
    for value, count in sorted(counts.items()):
        family.add_metric((value,), float(count))
    return family
