"""Packs planned micro-batches and names them by their digest: what every source does alike.

Writes where it is told to (a send buffer, or fresh arrays); decides nothing about steps or groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from orchestrator.packing import FieldSet, MicroBatchPlan, Written, pack_micro_batch
from orchestrator.trajectory import Trajectory
from prestage.microbatch import Array, MicroBatch, MicroBatchId
from prestage.wire.digest import batch_digest
from prestage.wire.layout import Layout, plan_layout
from prestage.wire.planes import SendBuffer

Reserve = Callable[[Layout], SendBuffer]
"""Gives the memory that one micro-batch is written into."""


class Packer:
    """Packs the micro-batches of one run."""

    def __init__(self, run_id: str, fields: FieldSet, reserve: Reserve | None) -> None:
        """`reserve`: None gives each micro-batch fresh arrays."""
        self._run_id = run_id
        self._fields = fields
        self._reserve = reserve

    def pack(
        self,
        step: int,
        index: int,
        plan: MicroBatchPlan,
        members: Mapping[tuple[str, int], Trajectory],
    ) -> tuple[MicroBatch, Written]:
        """The micro-batch with its digest, and what was written.

        Raises: PackingError before anything is written.
        """
        identity = MicroBatchId(run_id=self._run_id, step=step, index=index)
        batch, written = pack_micro_batch(identity, plan, members, self._fields, self._memory(plan))
        return replace(batch, digest=batch_digest(batch)), written

    def _memory(self, plan: MicroBatchPlan) -> Mapping[str, Array] | None:
        """Where the micro-batch is written: straight into the send buffer."""
        if self._reserve is None:
            return None
        shapes = {
            name: self._fields.shape(name, plan.rows, plan.tokens_per_row)[2:]
            for name in self._fields.names
        }
        layout = plan_layout(
            rows=plan.rows,
            tokens_per_row=plan.tokens_per_row,
            row_lengths=plan.row_lengths,
            fields=shapes,
        )
        return self._reserve(layout).arrays()
