"""Content digests of micro-batches: the same on every plane and however a micro-batch is split.

The digest is a hash over the manifest (rows, tokens, row lengths; each tensor's name, dtype, trailing
shape) and its block digests. A block is one row's real tokens `[b * n, (b + 1) * n)` of one tensor
with `n = block_tokens(tokens_per_row)`, so any split by rows, or by tokens at multiples of `n`,
hashes the same blocks.

What guards what: XXH3-128 over blocks guards against damage and mix-ups (it runs at the speed of
memory); BLAKE2b-128 over the manifest makes the short name that calls carry. Neither guards against
an adversary who can write to the channel: that is the channel's matter (mTLS, socket mode 0600).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import xxhash

from prestage.microbatch import Array, MicroBatch

BLOCK_DIGEST_BYTES: Final = 16
_MIN_BLOCK_TOKENS: Final = 128
_MAX_BLOCK_TOKENS: Final = 8192


def block_tokens(tokens_per_row: int) -> int:
    """Tokens of a block: an eighth of a row within bounds, so that token shards fall on blocks."""
    return max(_MIN_BLOCK_TOKENS, min(_MAX_BLOCK_TOKENS, tokens_per_row // 8))


def blocks_of(length: int, size: int) -> int:
    """Blocks of a row with `length` real tokens."""
    return -(-length // size)


def tensor_blocks(array: Array, row_lengths: Sequence[int], size: int) -> bytes:
    """Digests of a padded array's blocks of `size` tokens, row by row, 16 bytes each."""
    contiguous = np.ascontiguousarray(array)
    flat = contiguous.reshape(-1).view(np.uint8).data
    token_bytes = contiguous.dtype.itemsize * int(np.prod(contiguous.shape[2:], dtype=np.int64))
    row_bytes = contiguous.shape[1] * token_bytes
    step = size * token_bytes
    digest = xxhash.xxh3_128_digest
    found: list[bytes] = []
    for row, length in enumerate(row_lengths):
        start = row * row_bytes
        end = start + length * token_bytes
        found.extend(digest(flat[at : min(at + step, end)]) for at in range(start, end, step))
    return b"".join(found)


def combine(
    *,
    rows: int,
    tokens_per_row: int,
    row_lengths: Sequence[int],
    tensors: Iterable[tuple[str, str, Sequence[int], bytes]],
) -> str:
    """Hex digest over (name, dtype, trailing shape, block digests) of every tensor."""
    whole = hashlib.blake2b(digest_size=16)
    whole.update(f"{rows} {tokens_per_row} {list(row_lengths)}\n".encode())
    for name, dtype, trailing, blocks in sorted(tensors, key=lambda item: item[0]):
        whole.update(f"{name} {dtype} {list(trailing)} {len(blocks)}\n".encode())
        whole.update(blocks)
    return whole.hexdigest()


def content_digest(
    arrays: Mapping[str, Array], *, rows: int, tokens_per_row: int, row_lengths: Sequence[int]
) -> str:
    """Digest of a micro-batch. Arrays are padded `[rows, tokens_per_row, ...]`; padding is not hashed."""
    size = block_tokens(tokens_per_row)
    return combine(
        rows=rows,
        tokens_per_row=tokens_per_row,
        row_lengths=row_lengths,
        tensors=[
            (name, array.dtype.name, array.shape[2:], tensor_blocks(array, row_lengths, size))
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


def shard_blocks(
    blocks: bytes,
    row_lengths: Sequence[int],
    size: int,
    *,
    rows: slice,
    token_start: int,
    token_count: int,
) -> bytes:
    """Of a whole tensor's block digests, those of a shard that starts and ends at block bounds."""
    found: list[bytes] = []
    at = 0
    for row, length in enumerate(row_lengths):
        if rows.start <= row < rows.stop:
            inside = min(max(length - token_start, 0), token_count)
            first = at + token_start // size
            found.append(
                blocks[
                    first * BLOCK_DIGEST_BYTES : (first + blocks_of(inside, size))
                    * BLOCK_DIGEST_BYTES
                ]
            )
        at += blocks_of(length, size)
    return b"".join(found)
