"""Opens a live run: its journal, its source of steps, and what closes both.

The one place that an application calls. Needs no trainer and no network: producers may be served
before the worker is up, and `LiveSource.write_into` says later where micro-batches are written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.journal.config import LiveConfig
from orchestrator.journal.log import DurableLog
from orchestrator.packing import FieldSet
from orchestrator.sources.live import LiveSource
from prestage.wire.layout import Layout
from prestage.wire.planes import SendBuffer


@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """A journal that is open, and the source that reads it."""

    log: DurableLog  # Implements `orchestrator.ingest.ports.RolloutLog`.
    source: LiveSource  # Implements `orchestrator.feeder.StepSource`.
    fields: FieldSet  # Of every micro-batch of the run.

    def end_source(self) -> None:
        """No rollouts come any more, durably: open groups are dropped, the last steps are given.

        Returns at once; `open_step` answers None after the last whole step.
        """
        self.log.end_source()

    def close(self, *, drain_s: float = 10.0) -> None:
        """Take nothing more, make what was taken durable (within `drain_s`), let the folder go.

        Idempotent. A waiting `open_step` gives up, a waiting `append` raises `IngestClosed`.
        """
        self.source.close()
        self.log.close(drain_s=drain_s)


def open_live(
    config: LiveConfig, *, reserve: Callable[[Layout], SendBuffer] | None = None
) -> LiveRun:
    """Open (or make) the journal in `config.folder` and replay it.

    `reserve` gives the memory that micro-batches are written into; None: fresh arrays, until
    `source.write_into(reserve)` is called.

    Raises: JournalBusy (another process, named by its pid), JournalMismatch (another run's, or
    other settings: names the key), JournalDamaged, JournalError (the folder cannot be used).
    """
    log = DurableLog(config)
    return LiveRun(log=log, source=LiveSource(log, config, reserve=reserve), fields=config.fields)
