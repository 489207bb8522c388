"""The feeder's sender: puts micro-batches on the plane that the worker and this host settle on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import grpc

from prestage.microbatch import MicroBatch
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.wire.planes import PayloadPlane
from prestage.wire.shm_plane import SharedMemoryOffer, choose_plane


class PlanePut:
    """`PutPort` on a payload plane. `session` gives (epoch, incarnation) at the time of a put."""

    def __init__(
        self,
        plane: PayloadPlane,
        session: Callable[[], tuple[int, str]],
        *,
        timeout_s: float = 900.0,
    ) -> None:
        self._plane = plane
        self._session = session
        self._timeout_s = timeout_s

    def put(self, batch: MicroBatch) -> int:
        epoch, incarnation = self._session()
        response = self._plane.put(
            batch, epoch=epoch, incarnation=incarnation, timeout_s=self._timeout_s
        )
        return 0 if response.duplicate else int(response.received_bytes)


def offer_from(able: pb.GetCapabilitiesResponse) -> SharedMemoryOffer | None:
    """The worker's offer of shared memory, if it makes one."""
    if "shared-memory" not in able.payload_planes:
        return None
    return SharedMemoryOffer(folder=able.shared_memory_folder, nonce=able.shared_memory_nonce)


RECEIVE_BUFFERS: Final = 8
"""Micro-batches that a step and the next one's first may have at the worker at a time."""


def receive_buffers(plane: PayloadPlane) -> int:
    """What the worker should make ready for this plane; shared memory is the sender's own."""
    return RECEIVE_BUFFERS if plane.name == "stream" else 0


def open_plane(
    channel: grpc.Channel,
    capabilities: Callable[[], pb.GetCapabilitiesResponse],
    *,
    shared_memory_bytes: int,
) -> PayloadPlane:
    """Shared memory where both ends are on one host, else the stream.

    `shared_memory_bytes`: limit of the sender's pool; 0 = the stream.
    """
    return choose_plane(channel, lambda: offer_from(capabilities()), pool_bytes=shared_memory_bytes)
