"""What this side accepts from the other. Checked before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class WireLimits:
    """Upper bounds on a micro-batch as its header announces it."""

    max_rows: int = 65_536
    max_tokens_per_row: int = 16_777_216
    max_tensors: int = 16
    max_trailing: int = 65_536  # Product of the axes after [rows, tokens].
    max_payload_bytes: int = 64 << 30
    max_padded_bytes: int = 128 << 30
    max_chunk_bytes: int = 4 << 20


MAX_PART_BYTES: Final = (4 << 20) + (64 << 10)
"""A message of an upload: a chunk, or a header with the block digests of a whole micro-batch."""
MAX_PART_FIELDS: Final = 65_536 + 1024
"""In it, at all levels: a length for each row, and little else."""
MAX_CONTROL_BYTES: Final = 1 << 20
"""Every other request."""
MAX_CONTROL_FIELDS: Final = 4096
