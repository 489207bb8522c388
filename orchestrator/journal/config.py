"""Settings of a live run's journal. A value only; which of them a journal is tied to is said here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.advantages import AdvantageConfig
from orchestrator.groups import GroupPolicy
from orchestrator.packing import FieldSet, PackingConfig
from orchestrator.sources.batches import BatchShape
from orchestrator.trajectory import TrajectoryLimits


@dataclass(frozen=True, kw_only=True)
class LiveConfig:
    """Everything that a live run's journal and source are told."""

    folder: Path  # Made when missing; one run, one process at a time.
    run_id: str
    limits: TrajectoryLimits  # `required_fields` must be set: it decides the run's field set.
    policy: GroupPolicy
    packing: PackingConfig
    batches: BatchShape
    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)
    # Tuning: may differ between two openings of one journal.
    group_timeout_s: float = 3600.0  # A group still open after this is dropped whole.
    budget_bytes: int = 16 << 30  # Payload files; above it producers wait.
    pending_bytes: int = 64 << 20  # Submitted and not yet durable, in memory.
    segment_bytes: int = 64 << 20  # A payload file is closed at this size.

    def __post_init__(self) -> None:
        if self.limits.required_fields is None:
            raise ValueError(
                "limits.required_fields is not set; a live run says which fields it trains with"
            )
        if not (math.isfinite(self.group_timeout_s) and self.group_timeout_s > 0):
            raise ValueError(f"group_timeout_s is {self.group_timeout_s}; use seconds above 0")
        for name, value in (
            ("budget_bytes", self.budget_bytes),
            ("pending_bytes", self.pending_bytes),
            ("segment_bytes", self.segment_bytes),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; use at least 1")

    @property
    def fields(self) -> FieldSet:
        """The fields that every micro-batch of the run has."""
        required = self.limits.required_fields or ()
        routing = None
        if "routed_experts" in required:
            if self.limits.moe_layers is None or self.limits.top_k is None:
                raise ValueError(
                    "limits.moe_layers and limits.top_k are not set; routed_experts needs them"
                )
            routing = (self.limits.moe_layers, self.limits.top_k)
        ordered = FieldSet(optional=required, routing_shape=routing)
        return FieldSet(
            optional=tuple(name for name in ordered.names if name in required),
            routing_shape=routing,
        )

    @property
    def fingerprint(self) -> dict[str, str]:
        """What groups, steps and bytes depend on: a journal is reopened with the same only.

        Left out is what may change between two openings: time, room, and how many dead groups in a
        row are borne (a run that ended for that reason can be told to bear more).
        """
        limits, policy, packing = self.limits, self.policy, self.packing
        values: dict[str, object] = {
            "run_id": self.run_id,
            "rows": packing.rows,
            "tokens_per_row": packing.tokens_per_row,
            "data_parallel_ranks": packing.data_parallel_ranks,
            "align_tokens": packing.align_tokens,
            "max_segments_per_row": packing.max_segments_per_row,
            "early_first_micro_batch": packing.early_first_micro_batch,
            "longest_trajectory": limits.tokens_per_row,
            "vocab_size": limits.vocab_size,
            "fields": ",".join(self.fields.optional),
            "num_experts": limits.num_experts,
            "moe_layers": limits.moe_layers,
            "top_k": limits.top_k,
            "group_size": policy.group_size,
            "extra": policy.extra,
            "max_staleness": policy.max_staleness,
            "zero_spread": policy.zero_spread.value,
            "remembered_groups": policy.remembered_groups,
            "advantage": self.advantages.estimator.value,
            "advantage_std": self.advantages.std.value,
            "advantage_epsilon": self.advantages.epsilon,
            "groups_per_batch": self.batches.groups_per_batch,
            "num_minibatches": self.batches.num_minibatches,
            "num_iterations": self.batches.num_iterations,
        }
        return {key: "none" if value is None else str(value) for key, value in values.items()}
