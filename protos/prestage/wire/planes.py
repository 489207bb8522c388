"""The ports that payload planes implement. A plane brings micro-batches to a worker's store.

`stream` works everywhere; `shared-memory` needs both ends on one host. Which one a run uses is
settled at the handshake; both answer the same conformance tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from prestage.microbatch import Array, MicroBatch
from prestage.tensor.v1 import tensor_pb2 as pb
from prestage.wire.layout import Buffer, Layout, ShardRange


@dataclass(frozen=True, kw_only=True)
class SendBuffer:
    """Memory for one micro-batch, to be packed into and then put."""

    layout: Layout
    buffer: Buffer
    zeroed: bool  # Every byte is 0 now; else it holds what was there before.

    def arrays(self) -> dict[str, Array]:
        """Writable padded arrays `[rows, tokens_per_row, ...]`; padding is the writer's to fill."""
        return self.layout.arrays(self.buffer)

    def fill_padding(self) -> None:
        """For a writer that writes real content only."""
        self.layout.fill_padding(self.buffer, zeroed=self.zeroed)


class PayloadPlane(Protocol):
    """The sender's half of a plane. Safe from several threads."""

    @property
    def name(self) -> str:
        """As in `GetCapabilitiesResponse.payload_planes`."""
        ...

    def reserve(self, layout: Layout) -> SendBuffer:
        """Memory that `put` can send without copying it first. Goes back when nothing refers to it."""
        ...

    def put(
        self,
        batch: MicroBatch,
        *,
        epoch: int,
        incarnation: str,
        timeout_s: float,
        shard: ShardRange | None = None,
    ) -> pb.PutMicroBatchResponse:
        """Bring one micro-batch (with its digest set) to the worker. Harmless to repeat.

        Raises `grpc.RpcError`.
        """
        ...

    def close(self) -> None: ...


class SlotReader(Protocol):
    """The worker's half of the shared-memory plane."""

    def lease(self, slot: pb.SharedMemorySlot, size: int) -> Buffer:
        """Readonly bytes of a slot; the slot is the sender's again when nothing refers to them.

        Raises `CodecError` for a slot that is not what the header says.
        """
        ...

    def let_go(self, slot: pb.SharedMemorySlot) -> None:
        """Tell the sender that the slot is free, unless a lease of it is alive. Never raises."""
        ...
