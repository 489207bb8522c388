"""A live run's rollouts: the journal, the source of steps, and the service that producers talk to.

Made by `main`, opened by the application once the worker has said what it trains, closed with the
run. An observer of the run: it tells samplers the policy version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from orchestrator.advantages import AdvantageConfig, Estimator, Std
from orchestrator.boundary import BoundaryState
from orchestrator.calls import Done, Note
from orchestrator.feeder import SourceError, StepSource
from orchestrator.flags import OrchestratorConfig
from orchestrator.groups import GroupPolicy, ZeroSpread
from orchestrator.ingest.board import PolicyBoard
from orchestrator.ingest.flags import LiveFlags
from orchestrator.ingest.limits import IngestLimits
from orchestrator.ingest.metrics import LiveReading
from orchestrator.ingest.server import IngestServer
from orchestrator.journal.config import LiveConfig
from orchestrator.journal.errors import JournalError
from orchestrator.journal.log import COMMIT_BUCKETS
from orchestrator.journal.open import LiveRun, open_live
from orchestrator.packing import PackingConfig
from orchestrator.ports import Answer
from orchestrator.routing import routed
from orchestrator.sources.batches import BatchShape
from orchestrator.trainer_client import RunShape
from orchestrator.trajectory import RolloutError, TrajectoryLimits
from prestage.protocol import Call
from prestage.trace import TraceRecord
from prestage.wire.channel import ServerGuard
from prestage.wire.layout import Layout
from prestage.wire.planes import SendBuffer

log = logging.getLogger("prestage.orchestrator")


class LiveIntake:
    """The rollouts of one live run. `open` is its `SourceFactory`."""

    def __init__(
        self,
        flags: LiveFlags,
        guard: ServerGuard | None = None,
        on_refused: Callable[[str, str], None] = lambda service, reason: None,
    ) -> None:
        """`guard`: certificates and tokens of the service; None = none. `on_refused`: hears the
        service and the reason of every stream that the service ended.
        """
        self._flags = flags
        self._guard = guard
        self._on_refused = on_refused
        self._run: LiveRun | None = None
        self._config: LiveConfig | None = None
        self._step = self._version = 0
        self._server: IngestServer | None = None
        self._sync_every = 0
        self._training = False
        self.board = PolicyBoard()

    def open(
        self, config: OrchestratorConfig, vocab_size: int, reserve: Callable[[Layout], SendBuffer]
    ) -> tuple[StepSource, RunShape]:
        """Open the journal and take rollouts.

        Raises `SourceError` (the journal), `AddressError` (the address).
        """
        try:
            settings = live_config(config, self._flags, vocab_size)
            run = open_live(settings, reserve=reserve)
        except (JournalError, RolloutError, ValueError) as error:
            raise SourceError(f"--journal_dir {self._flags.journal_dir}: {error}") from error
        self._run, self._config = run, settings
        self._sync_every = config.plan.weight_sync_every
        self._server = IngestServer(
            run.log,
            run_id=config.run_id,
            listen=self._flags.listen,
            board=self.board,
            limits=IngestLimits(max_producers=self._flags.max_producers),
            guard=self._guard,
            on_refused=self._on_refused,
        )
        self._server.start()
        return run.source, RunShape(
            rows=config.rows,
            tokens_per_row=config.tokens_per_row,
            fields=tuple(sorted(run.fields.names)),
        )

    def read(self) -> LiveReading | None:
        """For metrics; None while nothing is open."""
        run, server, config = self._run, self._server, self._config
        if run is None or server is None or config is None:
            return None
        counts, gauges, counters = server.counts(), run.log.gauges(), run.log.counters
        ledger = run.source.ledger()
        oldest = None if self._step < 1 else run.source.oldest_policy_version(self._step - 1)
        return LiveReading(
            accepted_tokens=ledger.tokens_in,
            dropped_tokens={reason.value: drop.tokens for reason, drop in ledger.dropped.items()},
            queue_depth=run.source.waiting_groups(),
            formed_groups=gauges.formed_groups,
            queue_bytes=gauges.pending_bytes,
            queue_budget_bytes=config.pending_bytes,
            incomplete_groups=gauges.open_groups,
            producers=counts.producers,
            producer_wait_seconds=counts.wait_seconds,
            journal_lag_seconds=counts.lag_seconds,
            journal_bytes=gauges.held_bytes,
            journal_budget_bytes=config.budget_bytes,
            commit_bounds=COMMIT_BUCKETS,
            commit_buckets=tuple(counters.commit_buckets),
            commits=counters.commits,
            commit_seconds=counters.commit_seconds,
            # Its update made the newest version: it was trained with the one before.
            policy_lag_updates=None if oldest is None else max(0, self._version - 1 - oldest),
        )

    def stop(self, *, finished: bool) -> None:
        """Before the feeder is closed. `finished`: the run trained to its end.

        Nothing is acknowledged any more when this returns. Idempotent.
        """
        if self._server is not None:
            self._server.stop(finished=finished)
            self._server = None
        if self._run is not None:
            self._run.close()
            self._run = None

    # -- Observer ---------------------------------------------------------------------------------

    def on_call(self, record: TraceRecord, answer: Answer) -> None:
        """With weight syncs, what is offered for sampling is the version that was last prepared."""
        self._training = self._training or record.call.startswith("fwd_bwd")
        prepared = record.call == Call.PREPARE_WEIGHT_SYNC.value
        if self._sync_every and prepared and isinstance(answer.event, Done):
            self.board.publish(answer.train_step)

    def on_note(self, note: Note) -> None:
        del note

    def on_state(self, state: BoundaryState) -> None:
        """Without weight syncs, samplers read the weights by other ways: tell every update."""
        step, train_step = state.mirror.step, state.mirror.train_step
        self._step, self._version = step, train_step
        if not self._sync_every:
            self.board.publish(train_step)
        elif not self._training:
            # A run that is resumed: the last sync was this many steps ago, or a little later.
            self.board.publish(max(0, train_step - step % self._sync_every))


def live_config(config: OrchestratorConfig, flags: LiveFlags, vocab_size: int) -> LiveConfig:
    """A live run's journal settings. Raises `RolloutError`, `ValueError`."""
    return LiveConfig(
        folder=flags.journal_dir,
        run_id=config.run_id,
        limits=routed(
            TrajectoryLimits(
                tokens_per_row=config.tokens_per_row,
                vocab_size=vocab_size or 2**31 - 1,  # An engine without a vocabulary takes any.
                required_fields=("sampling_logprobs",),
            ),
            config.routing,
        ),
        policy=GroupPolicy(
            group_size=config.group_size,
            extra=flags.extra,
            max_staleness=flags.max_staleness,
            zero_spread=ZeroSpread(config.zero_spread),
        ),
        packing=PackingConfig(rows=config.rows, tokens_per_row=config.tokens_per_row),
        batches=BatchShape(
            groups_per_batch=config.groups_per_batch,
            num_minibatches=config.num_minibatches,
            num_iterations=config.num_iterations,
        ),
        advantages=AdvantageConfig(
            estimator=Estimator(config.advantage), std=Std(config.advantage_std)
        ),
        group_timeout_s=flags.group_timeout_s,
        budget_bytes=flags.journal_budget_bytes,
        pending_bytes=flags.journal_pending_bytes,
    )
