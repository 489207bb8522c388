"""What a producer sends: one rollout as stretches of tokens, and its messages on the wire.

Values and encoding only: no I/O. Everything is checked here too, so that a mistake shows where it
is made and not in an ack.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from orchestrator.trajectory import FAILED, Float32, Int16, Int32, Trajectory, Uint8
from prestage.rollout.v1 import rollout_pb2 as pb

# Messages are cut near this size; the service reads up to 8 MiB.
PART_BYTES: Final = 4 << 20


class RolloutValueError(ValueError):
    """A rollout that cannot be sent; names the field, the value and the fix."""


class Finish(enum.Enum):
    """Why a completion ended."""

    UNKNOWN = ""
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    FAILED = FAILED  # It never came; see `RolloutProducer.fail`.


_FINISH: Final = {
    Finish.UNKNOWN: pb.FINISH_REASON_UNSPECIFIED,
    Finish.STOP: pb.FINISH_REASON_STOP,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
    Finish.ABORTED: pb.FINISH_REASON_ABORTED,
    Finish.FAILED: pb.FINISH_REASON_FAILED,
}

Tokens = Sequence[int] | npt.NDArray[np.integer]
Logprobs = Sequence[float] | npt.NDArray[np.floating]


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """A stretch of n tokens from one source. Made by `given` and `sampled`."""

    tokens: Int32  # [n]
    is_sampled: bool
    logprobs: Float32 | None = None  # [n] nats; only of sampled tokens.
    loss_mask: Uint8 | None = None  # [n]; None: train all sampled tokens.
    routed_experts: Int16 | None = None  # [n, moe_layers, top_k]; -1 = unset.


def given(tokens: Tokens, *, routed_experts: Int16 | None = None) -> Segment:
    """Prompt, tool output or anything else that the policy did not sample: never trained."""
    return Segment(
        tokens=_ids(tokens), is_sampled=False, routed_experts=_routing(routed_experts, len(tokens))
    )


def sampled(
    tokens: Tokens,
    logprobs: Logprobs | None,
    *,
    loss_mask: Sequence[int] | Uint8 | None = None,
    routed_experts: Int16 | None = None,
) -> Segment:
    """Tokens that the policy sampled, each with its log-prob (natural log, of the sampled token).

    `loss_mask`: 0 for tokens that are not to be trained; None: all are.
    """
    ids = _ids(tokens)
    count = ids.shape[0]
    values = None if logprobs is None else np.ascontiguousarray(logprobs, dtype=np.float32)
    if values is not None and values.shape != (count,):
        raise RolloutValueError(
            f"logprobs has shape {list(values.shape)} for {count} tokens; give one a token"
        )
    mask = None if loss_mask is None else np.ascontiguousarray(loss_mask, dtype=np.uint8)
    if mask is not None and (mask.shape != (count,) or (count and int(mask.max()) > 1)):
        raise RolloutValueError(
            f"loss_mask has shape {list(mask.shape)} for {count} tokens; give a 0 or 1 a token"
        )
    return Segment(
        tokens=ids,
        is_sampled=True,
        logprobs=values,
        loss_mask=mask,
        routed_experts=_routing(routed_experts, count),
    )


def _ids(tokens: Tokens) -> Int32:
    wide = np.ascontiguousarray(tokens)
    if wide.size == 0:
        return np.zeros(0, np.int32)
    if wide.ndim != 1 or wide.dtype.kind not in "iu":
        raise RolloutValueError(
            f"tokens are {wide.dtype} of shape {list(wide.shape)}; give a flat list of integer ids"
        )
    if int(wide.min()) < 0 or int(wide.max()) > np.iinfo(np.int32).max:
        raise RolloutValueError(
            f"tokens go from {int(wide.min())} to {int(wide.max())}; ids are 0 to 2147483647"
        )
    return wide.astype(np.int32, copy=False)


def _routing(values: Int16 | None, count: int) -> Int16 | None:
    if values is None:
        return None
    if values.dtype != np.int16 or values.ndim != 3 or values.shape[0] != count:
        raise RolloutValueError(
            f"routed_experts is {values.dtype} of shape {list(values.shape)} for {count} tokens;"
            " give int16 [tokens, moe_layers, top_k]"
        )
    return np.ascontiguousarray(values)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """One completion with its prompt, as the sampler knows it."""

    group_id: str  # All completions of one prompt; unique within the run. 1 to 256 characters.
    index: int  # Within the group, from 0.
    segments: tuple[Segment, ...]
    reward: float
    dispatched_version: int  # Policy version when the request was sent to the sampler.
    completed_version: int | None = None  # When its last token came; None: the same.
    finish: Finish = Finish.UNKNOWN
    task: str = ""

    @staticmethod
    def of(trajectory: Trajectory) -> Rollout:
        """A trajectory of this program's own kind, such as one that was recorded.

        Raises `RolloutValueError` for what the wire has no place for: a prompt that is trained,
        old or reference log-probs, an advantage.
        """
        where = f"group {trajectory.group_id!r} index {trajectory.index}"
        prompt_tokens = trajectory.prompt_tokens.shape[0]
        mask = trajectory.loss_mask
        if mask is not None and mask[:prompt_tokens].any():
            raise RolloutValueError(f"{where}: its loss_mask trains prompt tokens; clear it there")
        for name, value in (
            ("old_logprobs", trajectory.old_logprobs),
            ("ref_logprobs", trajectory.ref_logprobs),
            ("advantage", trajectory.advantage),
        ):
            if value is not None:
                raise RolloutValueError(f"{where}: {name} cannot be sent; leave it out")
        routing = trajectory.routed_experts
        segments = (
            given(
                trajectory.prompt_tokens,
                routed_experts=None if routing is None else routing[:prompt_tokens],
            ),
            sampled(
                trajectory.completion_tokens,
                trajectory.sampling_logprobs,
                loss_mask=None if mask is None else mask[prompt_tokens:],
                routed_experts=None if routing is None else routing[prompt_tokens:],
            ),
        )
        try:
            finish = Finish(trajectory.finish_reason)
        except ValueError:
            finish = Finish.UNKNOWN  # Recorded by another sampler; it is not trained on.
        return Rollout(
            group_id=trajectory.group_id,
            index=trajectory.index,
            segments=segments,
            reward=trajectory.reward,
            dispatched_version=trajectory.policy_version,
            completed_version=trajectory.newest_policy_version,
            finish=finish,
            task=trajectory.task,
        )


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A rollout's messages without their offset, and how many bytes they take in all."""

    parts: tuple[pb.Trajectory, ...]
    payload_bytes: int

    def requests(self, offset: int) -> Iterator[pb.SubmitTrajectoriesRequest]:
        """What is sent for it at `offset`."""
        last = len(self.parts) - 1
        for number, part in enumerate(self.parts):
            yield pb.SubmitTrajectoriesRequest(
                submit=pb.Submit(offset=offset, trajectory=part, more=number < last)
            )


def encode(rollout: Rollout, *, part_bytes: int = PART_BYTES) -> Encoded:
    """Raises `RolloutValueError`."""
    where = f"group {rollout.group_id[:64]!r} index {rollout.index}"
    if not 0 <= rollout.index < 2**32:
        raise RolloutValueError(f"{where}: members count from 0 to {2**32 - 1}")
    completed = rollout.completed_version
    if completed is None:
        completed = rollout.dispatched_version
    if not 0 <= rollout.dispatched_version <= completed < 2**63:
        raise RolloutValueError(
            f"{where}: dispatched_version is {rollout.dispatched_version} and completed_version"
            f" {completed}; updates count up from 0"
        )
    shapes = {
        segment.routed_experts.shape[1:]
        for segment in rollout.segments
        if segment.routed_experts is not None
    }
    if len(shapes) > 1:
        raise RolloutValueError(f"{where}: routed_experts has several shapes: {sorted(shapes)}")
    layers, top_k = shapes.pop() if shapes else (0, 0)
    head = pb.Trajectory(
        group_id=rollout.group_id,
        index=rollout.index,
        reward=rollout.reward,
        dispatched_version=rollout.dispatched_version,
        completed_version=completed,
        finish_reason=_FINISH[rollout.finish],
        task=rollout.task,
        moe_layers=layers,
        top_k=top_k,
    )
    per_token = 9 + 2 * layers * top_k
    step = max(1, part_bytes // per_token)
    parts, used = [head], 0
    for segment in rollout.segments:
        for start in range(0, segment.tokens.shape[0], step):
            piece = _piece(segment, start, start + step)
            size = piece.ByteSize()
            if used and used + size > part_bytes:
                parts.append(pb.Trajectory())
                used = 0
            parts[-1].segments.append(piece)
            used += size
    return Encoded(parts=tuple(parts), payload_bytes=sum(part.ByteSize() for part in parts))


def _piece(segment: Segment, start: int, end: int) -> pb.TokenSegment:
    return pb.TokenSegment(
        source=pb.SEGMENT_SOURCE_ASSISTANT if segment.is_sampled else pb.SEGMENT_SOURCE_ENVIRONMENT,
        tokens=_bytes(segment.tokens[start:end], "<i4"),
        logprobs=b"" if segment.logprobs is None else _bytes(segment.logprobs[start:end], "<f4"),
        loss_mask=b"" if segment.loss_mask is None else segment.loss_mask[start:end].tobytes(),
        routed_experts=b""
        if segment.routed_experts is None
        else _bytes(segment.routed_experts[start:end], "<i2"),
    )


def _bytes(values: npt.NDArray[np.generic], dtype: str) -> bytes:
    return values.astype(dtype, copy=False).tobytes()
