"""One process's place among those of a trainer that runs on several hosts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Names as `jax.distributed` has them."""

    num_processes: int
    process_id: int
    coordinator_address: str  # host:port; process 0 serves it.
