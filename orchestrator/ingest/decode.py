"""From wire messages to trajectories: strict, and nothing is allocated from an unchecked header.

Judges form only (lengths, sources, order of parts). Content, such as a reward that is not finite,
is judged by the log, which knows the group that a bad trajectory belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from orchestrator.ingest.limits import IngestLimits
from orchestrator.trajectory import (
    FAILED,
    Defect,
    DropReason,
    Float32,
    Int16,
    Int32,
    Trajectory,
    TrajectoryError,
    Uint8,
)
from prestage.rollout.v1 import rollout_pb2 as pb
from prestage.wire.scan import Nested, ScanError, count_fields

MAX_GROUP_ID: Final = 256
MAX_PRODUCER: Final = 128
MAX_TASK: Final = 256
MAX_VERSION: Final = 2**63 - 1

# SubmitTrajectoriesRequest.submit.trajectory.segments: the only path on which fields repeat.
_NESTED: Final[Nested] = {1: {}, 2: {2: {3: {}}}}
_FIELDS_PER_SEGMENT: Final = 8
_FIELDS_ELSEWHERE: Final = 64

_FINISH: Final = {
    pb.FINISH_REASON_UNSPECIFIED: "",
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORTED: "aborted",
    pb.FINISH_REASON_FAILED: FAILED,
}
_TOKENS: Final = np.dtype("<i4")
_LOGPROBS: Final = np.dtype("<f4")
_ROUTING: Final = np.dtype("<i2")
Number = TypeVar("Number", bound=np.generic)


class MessageError(ValueError):
    """A message that is not one of this stream; its stream cannot go on."""


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """What came at an offset and cannot be a trajectory."""

    reason: DropReason
    message: str


def parse_request(data: bytes, limits: IngestLimits) -> pb.SubmitTrajectoriesRequest:
    """One message of the stream. Raises `MessageError`."""
    if len(data) > limits.max_message_bytes:
        raise MessageError(
            f"a message has {len(data)} bytes; at most {limits.max_message_bytes} are read: send"
            " the trajectory in parts (`more`)"
        )
    try:
        count_fields(
            data, _NESTED, most=limits.max_segments * _FIELDS_PER_SEGMENT + _FIELDS_ELSEWHERE
        )
        request = pb.SubmitTrajectoriesRequest.FromString(data)
    except (ScanError, DecodeError) as error:
        raise MessageError(f"a message is not a SubmitTrajectoriesRequest: {error}") from error
    if request.WhichOneof("part") is None:
        raise MessageError("a message has neither `open` nor `submit`; set one of them")
    return request


def check_name(field: str, value: str, most: int) -> None:
    """Names go into logs and metrics: printable, not empty, bounded. Raises `MessageError`."""
    if not 1 <= len(value) <= most or not value.isprintable():
        raise MessageError(
            f"{field} is {value[:64]!r} ({len(value)} characters); give 1 to {most} printable ones"
        )


class TrajectoryParts:
    """Collects the parts of one trajectory until the last one. Bounded; not thread-safe."""

    def __init__(self, limits: IngestLimits) -> None:
        self._limits = limits
        self._head: pb.Trajectory | None = None
        self._segments: list[pb.TokenSegment] = []
        self._bytes = 0
        self._rejected: Rejected | None = None
        self._offset = 0

    @property
    def open(self) -> bool:
        """Whether a trajectory has begun and its last part has not come."""
        return self._head is not None

    def add(self, submit: pb.Submit) -> Trajectory | Rejected | None:
        """Take one part; what the trajectory is once it was the last, else None.

        Raises `MessageError` when the part belongs to another trajectory.
        """
        part = submit.trajectory
        if self._head is None:
            self._head, self._offset = part, submit.offset
        elif submit.offset != self._offset:
            raise MessageError(
                f"offset {submit.offset} came while the parts of {self._offset} were not all"
                " there; the last part has `more` unset"
            )
        elif _has_header(part) and self._rejected is None:
            self._reject("a later part sets more than `segments`; only the first one has the rest")
        if self._rejected is None:
            self._bytes += submit.ByteSize()
            self._segments.extend(part.segments)
            if self._bytes > self._limits.max_trajectory_bytes:
                self._reject(
                    f"its parts have {self._bytes} bytes so far; at most"
                    f" {self._limits.max_trajectory_bytes} are taken"
                )
            elif len(self._segments) > self._limits.max_segments:
                self._reject(f"it has more than {self._limits.max_segments} segments; join them")
        if submit.more:
            return None
        head, segments, rejected = self._head, self._segments, self._rejected
        self._head, self._segments, self._rejected, self._bytes = None, [], None, 0
        if rejected is not None:
            return rejected
        try:
            return decode_trajectory(head, segments, self._limits)
        except TrajectoryError as error:
            return Rejected(reason=error.defect.reason, message=error.defect.message)

    def _reject(self, what: str) -> None:
        head = self._head
        assert head is not None
        self._rejected = Rejected(
            reason=DropReason.MALFORMED, message=_where(head.group_id, head.index) + what
        )
        self._segments = []  # Its memory is not kept while the rest comes in.
        head.ClearField("segments")


def _has_header(part: pb.Trajectory) -> bool:
    return any(field.name != "segments" for field, _ in part.ListFields())


def _where(group_id: str, index: int) -> str:
    shown = group_id if len(group_id) <= MAX_GROUP_ID else group_id[:64] + "…"
    return f"group {shown!r} index {index}: "


def decode_trajectory(
    head: pb.Trajectory, segments: Sequence[pb.TokenSegment], limits: IngestLimits
) -> Trajectory:
    """One trajectory. The environment segments before the first assistant one are its prompt.

    In what follows, environment tokens have loss mask 0 and log-prob 0. Arrays are views of the
    message's bytes where one segment makes them. Raises `TrajectoryError` naming group, segment,
    value and fix.
    """
    decoder = _Decoder(head, limits)
    decoder.check_header()
    for number, segment in enumerate(segments):
        decoder.add(number, segment)
    return decoder.finish()


@dataclass(frozen=True, kw_only=True)
class _Stretch:
    """One checked segment."""

    number: int
    sampled: bool
    tokens: Int32
    logprobs: Float32 | None
    mask: Uint8 | None
    routing: Int16 | None


class _Decoder:
    def __init__(self, head: pb.Trajectory, limits: IngestLimits) -> None:
        self._head = head
        self._limits = limits
        self._where = _where(head.group_id, head.index)
        self._stretches: list[_Stretch] = []
        self._tokens = 0

    def _wrong(self, what: str, reason: DropReason = DropReason.MALFORMED) -> TrajectoryError:
        return TrajectoryError(Defect(reason=reason, message=self._where + what))

    def check_header(self) -> None:
        head, limits = self._head, self._limits
        try:
            check_name("group_id", head.group_id, MAX_GROUP_ID)
        except MessageError as error:
            raise self._wrong(str(error)) from error
        if len(head.task) > MAX_TASK or not (head.task.isprintable() or not head.task):
            raise self._wrong(
                f"task is {head.task[:64]!r} ({len(head.task)} characters); at most {MAX_TASK}"
                " printable ones"
            )
        if head.dispatched_version > head.completed_version:
            raise self._wrong(
                f"completed_version is {head.completed_version}, before dispatched_version"
                f" {head.dispatched_version}; give the version of the weights at each time"
            )
        if head.completed_version > MAX_VERSION:
            raise self._wrong(f"completed_version is {head.completed_version}; updates count up")
        if head.finish_reason not in _FINISH:
            raise self._wrong(f"finish_reason is {head.finish_reason}; it is not a known one")
        if head.moe_layers * head.top_k > limits.max_routing_slots:
            raise self._wrong(
                f"moe_layers {head.moe_layers} x top_k {head.top_k} is more than"
                f" {limits.max_routing_slots} experts a token",
                DropReason.ROUTING_MISMATCH,
            )
        if bool(head.moe_layers) != bool(head.top_k):
            raise self._wrong(
                f"moe_layers is {head.moe_layers} and top_k {head.top_k}; give both or neither",
                DropReason.ROUTING_MISMATCH,
            )

    def add(self, number: int, segment: pb.TokenSegment) -> None:
        name = f"segments[{number}]"
        if segment.source not in (pb.SEGMENT_SOURCE_ASSISTANT, pb.SEGMENT_SOURCE_ENVIRONMENT):
            raise self._wrong(f"{name}.source is {segment.source}; use ASSISTANT or ENVIRONMENT")
        if len(segment.tokens) % 4:
            raise self._wrong(
                f"{name}.tokens has {len(segment.tokens)} bytes; int32 ids take 4 each"
            )
        count = len(segment.tokens) // 4
        self._tokens += count
        if self._tokens > self._limits.max_tokens:
            raise self._wrong(
                f"more than {self._limits.max_tokens} tokens; no row is that long",
                DropReason.LONGER_THAN_ROW,
            )
        sampled = segment.source == pb.SEGMENT_SOURCE_ASSISTANT
        if segment.logprobs and not sampled:
            raise self._wrong(
                f"{name} is environment but has logprobs; nobody sampled its tokens",
                DropReason.UNEXPECTED_FIELD,
            )
        if segment.logprobs and len(segment.logprobs) != 4 * count:
            raise self._wrong(
                f"{name}.logprobs has {len(segment.logprobs)} bytes for {count} tokens; give one"
                f" float32 a token ({4 * count} bytes)"
            )
        self._stretches.append(
            _Stretch(
                number=number,
                sampled=sampled,
                tokens=np.frombuffer(segment.tokens, dtype=_TOKENS),
                logprobs=np.frombuffer(segment.logprobs, dtype=_LOGPROBS)
                if segment.logprobs
                else None,
                mask=self._mask(name, segment.loss_mask, count, sampled),
                routing=self._routing(name, segment.routed_experts, count),
            )
        )

    def _mask(self, name: str, data: bytes, count: int, sampled: bool) -> Uint8 | None:
        if not data:
            return None
        if len(data) != count:
            raise self._wrong(
                f"{name}.loss_mask has {len(data)} bytes for {count} tokens; give one byte a token"
            )
        mask = np.frombuffer(data, dtype=np.uint8)
        highest = int(mask.max())
        if highest > 1:
            raise self._wrong(f"{name}.loss_mask holds {highest}; it is 0 or 1")
        if highest and not sampled:
            raise self._wrong(
                f"{name} is environment but its loss_mask has a 1 at {int(np.argmax(mask))}; only"
                " sampled tokens are trained"
            )
        return mask

    def _routing(self, name: str, data: bytes, count: int) -> Int16 | None:
        if not data:
            return None
        layers, top_k = self._head.moe_layers, self._head.top_k
        wanted = 2 * count * layers * top_k
        if len(data) != wanted:
            raise self._wrong(
                f"{name}.routed_experts has {len(data)} bytes; {count} tokens x {layers} layers x"
                f" {top_k} experts of int16 are {wanted} (cut tokens and routing alike, and set"
                " moe_layers and top_k)",
                DropReason.ROUTING_MISMATCH,
            )
        return np.frombuffer(data, dtype=_ROUTING).reshape(count, layers, top_k)

    def finish(self) -> Trajectory:
        stretches = [stretch for stretch in self._stretches if stretch.tokens.size]
        if not stretches and self._head.finish_reason != pb.FINISH_REASON_FAILED:
            raise self._wrong("it has no tokens; a trajectory has at least its prompt")
        first = next(
            (at for at, stretch in enumerate(stretches) if stretch.sampled), len(stretches)
        )
        prompt, completion = stretches[:first], stretches[first:]
        head = self._head
        return Trajectory(
            group_id=head.group_id,
            index=head.index,
            prompt_tokens=_joined([stretch.tokens for stretch in prompt], np.dtype(np.int32)),
            completion_tokens=_joined(
                [stretch.tokens for stretch in completion], np.dtype(np.int32)
            ),
            reward=head.reward,
            policy_version=head.dispatched_version,
            newest_policy_version=head.completed_version
            if head.completed_version != head.dispatched_version
            else None,
            loss_mask=_loss_mask(prompt, completion),
            sampling_logprobs=self._logprobs(completion),
            routed_experts=self._all_routing(stretches),
            finish_reason=_FINISH[head.finish_reason],
            task=head.task,
        )

    def _logprobs(self, completion: Sequence[_Stretch]) -> Float32 | None:
        sampled = [stretch for stretch in completion if stretch.sampled]
        without = next((stretch for stretch in sampled if stretch.logprobs is None), None)
        if without is not None:
            given = next((stretch for stretch in sampled if stretch.logprobs is not None), None)
            if given is None:
                return None
            raise self._wrong(
                f"segments[{given.number}] has logprobs and segments[{without.number}] has none;"
                " give them for every assistant segment or for none",
                DropReason.MISSING_FIELD,
            )
        if not sampled:
            return np.zeros(0, np.float32)
        return _joined(
            [
                np.zeros(stretch.tokens.shape[0], np.float32)
                if stretch.logprobs is None
                else stretch.logprobs
                for stretch in completion
            ],
            np.dtype(np.float32),
        )

    def _all_routing(self, stretches: Sequence[_Stretch]) -> Int16 | None:
        if all(stretch.routing is None for stretch in stretches):
            if self._head.moe_layers:
                raise self._wrong(
                    f"moe_layers is {self._head.moe_layers} but no segment has routed_experts",
                    DropReason.MISSING_FIELD,
                )
            return None
        shape = (self._head.moe_layers, self._head.top_k)
        parts: list[Int16] = []
        for stretch in stretches:
            if stretch.routing is not None:
                parts.append(stretch.routing)
            elif stretch.sampled:
                raise self._wrong(
                    f"segments[{stretch.number}] has no routed_experts and others have; give them"
                    " for every assistant segment (-1 where one is not known)",
                    DropReason.MISSING_FIELD,
                )
            else:
                self._check_filled(stretches)
                parts.append(np.full((stretch.tokens.shape[0], *shape), -1, np.int16))
        return _joined(parts, np.dtype(np.int16))

    def _check_filled(self, stretches: Sequence[_Stretch]) -> None:
        tokens = sum(stretch.tokens.shape[0] for stretch in stretches if stretch.routing is None)
        filled = 2 * tokens * self._head.moe_layers * self._head.top_k
        if filled > self._limits.max_filled_bytes:
            raise self._wrong(
                f"the routing of {tokens} environment tokens is left out and would take {filled}"
                f" bytes; at most {self._limits.max_filled_bytes} are filled in: send it",
                DropReason.ROUTING_MISMATCH,
            )


def _joined(parts: Sequence[npt.NDArray[Number]], dtype: np.dtype[Number]) -> npt.NDArray[Number]:
    if not parts:
        return np.zeros(0, dtype)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _loss_mask(prompt: Sequence[_Stretch], completion: Sequence[_Stretch]) -> Uint8 | None:
    """[N], or None when every completion token is trained."""
    if all(stretch.sampled and stretch.mask is None for stretch in completion):
        return None
    parts: list[Uint8] = [
        np.zeros(sum(stretch.tokens.shape[0] for stretch in prompt), np.uint8),
    ]
    for stretch in completion:
        if stretch.mask is not None:
            parts.append(stretch.mask)
        else:
            parts.append(np.full(stretch.tokens.shape[0], 1 if stretch.sampled else 0, np.uint8))
    return np.concatenate(parts)
