"""Trajectories as bytes, and the small record that stays in memory for each. Values only, no I/O.

Layout: magic, header length, canonical JSON header (padded to 8 bytes), then the arrays one after
another in C order, little endian. The digest covers all of it: it tells damage, and it tells
whether a trajectory that comes again under the same key is the same one.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from orchestrator.journal.errors import JournalDamaged
from orchestrator.trajectory import RolloutError, Trajectory

_MAGIC: Final = b"PsT1"
_PREFIX: Final = struct.Struct("<4sI")
DIGEST_BYTES: Final = 16

if sys.byteorder != "little":  # Payload files are little endian and read without a swap.
    raise ImportError("the journal supports little-endian machines only")

Array = npt.NDArray[np.generic]
_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What stays in memory of one durable trajectory. Implements `orchestrator.groups.Member`."""

    seq: int  # Its place in the durable order.
    group_id: str
    index: int
    reward: float
    policy_version: int
    prompt_tokens: int  # Counts, not ids.
    completion_tokens: int
    trainable_tokens: int  # Loss mask set on arrival.
    first_token_masked_in: bool  # Its mask asks to train the first token, which nothing predicts.
    digest: bytes
    segment: int = -1  # Payload file, place in it and size; -1: not kept.
    position: int = 0
    payload_bytes: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """(group_id, index)."""
        return (self.group_id, self.index)

    @property
    def total_tokens(self) -> int:
        """Prompt and completion tokens together."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def trained_tokens(self) -> int:
        """Tokens that will be trained once packed."""
        if not self.completion_tokens:
            return 0
        return self.trainable_tokens - int(self.first_token_masked_in)

    def same_content(self, other: Record) -> bool:
        """Whether both were made from the same bytes."""
        return self.digest == other.digest


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A trajectory as buffers to be written in this order. Views of its arrays: no copy is made."""

    buffers: tuple[memoryview, ...]
    payload_bytes: int
    digest: bytes


def _arrays(trajectory: Trajectory) -> dict[str, Array]:
    """The arrays that are there, four-byte types first so that all stay aligned."""
    found: dict[str, Array | None] = {
        "prompt_tokens": trajectory.prompt_tokens,
        "completion_tokens": trajectory.completion_tokens,
        "sampling_logprobs": trajectory.sampling_logprobs,
        "old_logprobs": trajectory.old_logprobs,
        "ref_logprobs": trajectory.ref_logprobs,
        "routed_experts": trajectory.routed_experts,
        "loss_mask": trajectory.loss_mask,
    }
    return {name: array for name, array in found.items() if array is not None}


_DTYPES: Final[Mapping[str, np.dtype[np.generic]]] = {
    "prompt_tokens": np.dtype(np.int32),
    "completion_tokens": np.dtype(np.int32),
    "sampling_logprobs": np.dtype(np.float32),
    "old_logprobs": np.dtype(np.float32),
    "ref_logprobs": np.dtype(np.float32),
    "routed_experts": np.dtype(np.int16),
    "loss_mask": np.dtype(np.uint8),
}


def encode(trajectory: Trajectory) -> Encoded:
    """The trajectory's bytes. Advantages are not stored: they follow from the group's rewards."""
    arrays = _arrays(trajectory)
    header = json.dumps(
        {
            "group_id": trajectory.group_id,
            "index": trajectory.index,
            "reward": trajectory.reward,
            "policy_version": trajectory.policy_version,
            "newest_policy_version": trajectory.newest_policy_version,
            "finish_reason": trajectory.finish_reason,
            "task": trajectory.task,
            "truncated_tokens": trajectory.truncated_tokens,
            "arrays": {name: list(array.shape) for name, array in arrays.items()},
        },
        sort_keys=True,
        separators=(",", ":"),
    ).encode()
    header += b" " * (-(len(header) + _PREFIX.size) % 8)
    buffers = [memoryview(_PREFIX.pack(_MAGIC, len(header)) + header)]
    for array in arrays.values():
        if array.size:
            flat = np.ascontiguousarray(array).reshape(-1)
            buffers.append(flat.view(np.uint8).data)
    hasher = xxhash.xxh3_128()
    for buffer in buffers:
        hasher.update(buffer)
    return Encoded(
        buffers=tuple(buffers),
        payload_bytes=sum(buffer.nbytes for buffer in buffers),
        digest=hasher.digest(),
    )


def decode(payload: bytes, record: Record, where: str) -> Trajectory:
    """The trajectory of `record`; its arrays are read-only views of `payload`.

    Raises: JournalDamaged naming `where` when the bytes are not those that were acknowledged.
    """
    if len(payload) != record.payload_bytes or xxhash.xxh3_128_digest(payload) != record.digest:
        raise JournalDamaged(
            f"{where}: group {record.group_id!r} index {record.index} (byte {record.position},"
            f" {record.payload_bytes} bytes) is not what was acknowledged: the file is torn or was"
            " changed. Restore the folder from a copy, or start a new run"
        )
    try:
        return _decode(payload)
    except (ValueError, KeyError, TypeError, struct.error, RolloutError) as error:
        raise JournalDamaged(
            f"{where}: group {record.group_id!r} index {record.index} cannot be read: {error}; it"
            " was written by another version"
        ) from error


def _decode(payload: bytes) -> Trajectory:
    magic, length = _PREFIX.unpack_from(payload)
    if magic != _MAGIC:
        raise ValueError(f"it begins with {magic!r}")
    header = json.loads(payload[_PREFIX.size : _PREFIX.size + length])
    at = _PREFIX.size + length
    arrays: dict[str, Array] = {}
    for name in _DTYPES:
        if name not in header["arrays"]:
            continue
        shape, dtype = header["arrays"][name], _DTYPES[name]
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(payload, dtype, count, at).reshape(shape)
        at += count * dtype.itemsize
    if at != len(payload):
        raise ValueError(f"its arrays take {at} of {len(payload)} bytes")
    return Trajectory(
        group_id=header["group_id"],
        index=header["index"],
        prompt_tokens=_typed(arrays["prompt_tokens"], np.int32),
        completion_tokens=_typed(arrays["completion_tokens"], np.int32),
        sampling_logprobs=_optional(arrays, "sampling_logprobs", np.float32),
        old_logprobs=_optional(arrays, "old_logprobs", np.float32),
        ref_logprobs=_optional(arrays, "ref_logprobs", np.float32),
        routed_experts=_optional(arrays, "routed_experts", np.int16),
        loss_mask=_optional(arrays, "loss_mask", np.uint8),
        reward=header["reward"],
        policy_version=header["policy_version"],
        newest_policy_version=header["newest_policy_version"],
        finish_reason=header["finish_reason"],
        task=header["task"],
        truncated_tokens=header["truncated_tokens"],
    )


def _typed(array: Array, dtype: type[_T]) -> npt.NDArray[_T]:
    return array.astype(dtype, copy=False)


def _optional(arrays: Mapping[str, Array], name: str, dtype: type[_T]) -> npt.NDArray[_T] | None:
    return _typed(arrays[name], dtype) if name in arrays else None
