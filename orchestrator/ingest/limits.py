"""What the ingest service accepts from producers. Checked before anything is allocated or kept."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class IngestLimits:
    """Bounds of the service. Memory outside the log stays below
    `max_producers * max_message_bytes + parts_in_hand * max_trajectory_bytes`."""

    max_producers: int = 64  # Open producers at a time.
    max_unopened: int = 32  # Streams that have not said who they are; a newer one ends the oldest.
    max_watchers: int = 64
    window: int = 256  # Trajectories of one producer that are not acknowledged yet.
    open_s: float = 10.0  # A stream says who it is within this.
    idle_s: float = 900.0  # A stream without a message and without anything to acknowledge.
    part_s: float = 60.0  # From one part of a trajectory to the next.
    settle_s: float = 30.0  # For what an older stream of the same producer still has in the log.
    linger_s: float = 6.0  # After the run, for producers that connect again (they pause up to 4 s).
    watch_poll_s: float = 0.2  # How often finished groups are looked for.
    max_message_bytes: int = 8 << 20
    max_trajectory_bytes: int = 256 << 20  # All parts of one trajectory.
    max_filled_bytes: int = 64 << 20  # Routing of one trajectory that is made up as unset (-1).
    parts_in_hand: int = (
        4  # Trajectories that come in several messages, at a time, over all streams.
    )
    max_segments: int = 65_536
    max_tokens: int = 16_777_216
    max_routing_slots: int = 65_536  # moe_layers * top_k

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"{name} is {value}; use a number above 0")
