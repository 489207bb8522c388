"""Content digests of micro-batches: the same on every plane and however a micro-batch is split.

The digest is a hash over a manifest of block digests. A block is one row's tokens
[b * BLOCK_TOKENS, (b + 1) * BLOCK_TOKENS) of one tensor, real tokens only: any split by rows, or by
tokens at multiples of BLOCK_TOKENS, hashes the same blocks. XXH3-128 guards against damage and
mix-ups, not against an adversary; identity and access are the channel's matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import xxhash

from prestage.microbatch import Array, MicroBatch

BLOCK_TOKENS: Final = 8192


def block_digests(row: Array) -> list[str]:
    """Hex digests of one row's real tokens `[length, ...]`, C order, little endian."""
    return [
        xxhash.xxh3_128_hexdigest(np.ascontiguousarray(row[start : start + BLOCK_TOKENS]).data)
        for start in range(0, row.shape[0], BLOCK_TOKENS)
    ]


def combine(
    *,
    rows: int,
    tokens_per_row: int,
    row_lengths: Sequence[int],
    tensors: Iterable[tuple[str, str, tuple[int, ...], Sequence[Sequence[str]]]],
) -> str:
    """The digest of (name, dtype, trailing shape, block digests of each row) of every tensor."""
    whole = hashlib.blake2b(digest_size=16)
    whole.update(f"{rows} {tokens_per_row} {list(row_lengths)}\n".encode())
    for name, dtype, trailing, blocks in sorted(tensors, key=lambda item: item[0]):
        whole.update(f"{name} {dtype} {list(trailing)}\n".encode())
        for row in blocks:
            whole.update((" ".join(row) + "\n").encode())
    return whole.hexdigest()


def content_digest(
    arrays: Mapping[str, Array], *, rows: int, tokens_per_row: int, row_lengths: Sequence[int]
) -> str:
    """Digest of a micro-batch. Arrays are padded `[rows, tokens_per_row, ...]`; padding is not hashed."""
    return combine(
        rows=rows,
        tokens_per_row=tokens_per_row,
        row_lengths=row_lengths,
        tensors=[
            (
                name,
                array.dtype.name,
                array.shape[2:],
                [block_digests(array[row, :length]) for row, length in enumerate(row_lengths)],
            )
            for name, array in arrays.items()
        ],
    )


def batch_digest(batch: MicroBatch) -> str:
    """Digest of a micro-batch's arrays."""
    return content_digest(
        batch.arrays,
        rows=batch.rows,
        tokens_per_row=batch.tokens_per_row,
        row_lengths=batch.row_lengths,
    )
