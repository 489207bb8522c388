"""The recorded-rollouts source of a run, from its config."""

from __future__ import annotations

from orchestrator._data0 import RecordedSource
from orchestrator.feeder import StepSource
from orchestrator.flags import OrchestratorConfig
from orchestrator.trainer_client import RunShape

FIELDS = (
    "advantages",
    "loss_mask",
    "positions",
    "sampling_logprobs",
    "segment_ids",
    "tokens",
)


def recorded_source(config: OrchestratorConfig, vocab_size: int) -> tuple[StepSource, RunShape]:
    """Reads the file whole and checks it, so that bad input ends the run before it trains."""
    del vocab_size
    source = RecordedSource(
        config.rollouts, config.run_id, config.rows, config.tokens_per_row, config.groups_per_batch
    )
    return source, RunShape(rows=config.rows, tokens_per_row=config.tokens_per_row, fields=FIELDS)
