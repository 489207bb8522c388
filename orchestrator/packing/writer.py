"""Writes a planned micro-batch's arrays, once, straight into the caller's buffers.

`out` holds views of a send buffer or shared-memory slot: every element is written exactly once
(padding included), whatever the buffer held before. No temporary copy of a field, no loop per
token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from orchestrator.packing.layout import MicroBatchPlan, Segment
from orchestrator.trajectory import PackingError, Trajectory
from prestage.microbatch import FIELDS, Array, MicroBatch, MicroBatchId

Int32 = npt.NDArray[np.int32]

REQUIRED_FIELDS: Final = tuple(name for name, spec in FIELDS.items() if spec.required)
OPTIONAL_FIELDS: Final = tuple(name for name, spec in FIELDS.items() if not spec.required)


@dataclass(frozen=True, kw_only=True)
class FieldSet:
    """Which fields the micro-batches of a run have. The same for all of them."""

    optional: tuple[str, ...] = ()  # In field-table order.
    routing_shape: tuple[int, int] | None = None  # (moe_layers, top_k); with routed_experts.

    def __post_init__(self) -> None:
        unknown = [name for name in self.optional if name not in OPTIONAL_FIELDS]
        if unknown:
            raise PackingError(f"{unknown[0]!r} is no optional field; they are {OPTIONAL_FIELDS}")
        if ("routed_experts" in self.optional) != (self.routing_shape is not None):
            raise PackingError("routed_experts needs routing_shape (moe_layers, top_k), and back")

    @property
    def names(self) -> tuple[str, ...]:
        """All fields, in field-table order."""
        return tuple(n for n, spec in FIELDS.items() if spec.required or n in self.optional)

    def shape(self, name: str, rows: int, tokens_per_row: int) -> tuple[int, ...]:
        """Shape of field `name` for micro-batches of `rows` rows."""
        if name != "routed_experts":
            return (rows, tokens_per_row)
        if self.routing_shape is None:
            raise PackingError("routed_experts is not in this field set")
        return (rows, tokens_per_row, *self.routing_shape)

    def payload_bytes(self, rows: int, tokens_per_row: int) -> int:
        """Bytes of all fields of one micro-batch, padding included."""
        total = 0
        for name in self.names:
            size = FIELDS[name].dtype.itemsize
            for extent in self.shape(name, rows, tokens_per_row):
                size *= extent
            total += size
        return total


def common_fields(trajectories: Iterable[Trajectory]) -> FieldSet:
    """The optional fields that all trajectories have.

    Raises: PackingError naming the first trajectory that has other fields, or routing of another
    shape, than the ones before it. Absent values are never filled in or shifted.
    """
    fields: FieldSet | None = None
    first: Trajectory | None = None
    for trajectory in trajectories:
        if fields is None or first is None:
            fields = FieldSet(
                optional=trajectory.optional_fields, routing_shape=trajectory.routing_shape
            )
            first = trajectory
        elif (present := trajectory.optional_fields) != fields.optional:
            lacks = sorted(set(fields.optional) - set(present))
            extra = sorted(set(present) - set(fields.optional))
            what = f"has no {lacks[0]}" if lacks else f"has {extra[0]}"
            raise PackingError(
                f"{_name(trajectory)} {what}, unlike {_name(first)}: a step's trajectories all have a field or none"
                " has it; fix the producer, or drop the field everywhere"
            )
        elif trajectory.routing_shape != fields.routing_shape:
            raise PackingError(
                f"{_name(trajectory)} has routing of {trajectory.routing_shape} (layers, top_k), unlike"
                f" {_name(first)} with {fields.routing_shape}"
            )
    return FieldSet() if fields is None else fields


def _name(trajectory: Trajectory) -> str:
    return f"group {trajectory.group_id!r} index {trajectory.index}"


def allocate(rows: int, tokens_per_row: int, fields: FieldSet) -> dict[str, Array]:
    """Uninitialised arrays for one micro-batch; `write_micro_batch` fills all of them."""
    return {
        name: np.empty(fields.shape(name, rows, tokens_per_row), FIELDS[name].dtype)
        for name in fields.names
    }


@dataclass(frozen=True, kw_only=True)
class Written:
    """What one `write_micro_batch` wrote."""

    tokens: int  # Of all segments.
    trained_tokens: int  # Loss mask set.
    unpredictable_tokens: int  # Mask was set on a segment's first token, which nothing predicts.


class Positions:
    """0, 1, 2, ... up to the row size; made once and copied from."""

    def __init__(self, tokens_per_row: int) -> None:
        self.ramp: Int32 = np.arange(tokens_per_row, dtype=np.int32)
        self.ramp.flags.writeable = False


def write_micro_batch(
    plan: MicroBatchPlan,
    trajectories: Mapping[tuple[str, int], Trajectory],
    out: Mapping[str, Array],
    positions: Positions | None = None,
) -> Written:
    """Write the micro-batch that `plan` describes into `out`.

    `trajectories`: by (group_id, index), at least those of the plan, with advantages.
    `out`: field name to array as in `FIELDS`, C order; its names are exactly the required fields
    and the optional ones that the trajectories have.

    Raises: PackingError before anything is written.
    """
    members = [_member(segment, trajectories) for segment in plan.segments]
    _check_out(plan, members, out)
    ramp = (Positions(plan.tokens_per_row) if positions is None else positions).ramp
    writer = _Writer(out, ramp)
    trained = unpredictable = 0
    row, end, number = 0, 0, 0
    for segment, trajectory in zip(plan.segments, members, strict=True):
        while row < segment.row:
            writer.pad(row, end, plan.tokens_per_row)
            row, end, number = row + 1, 0, 0
        if end < segment.offset:
            writer.pad(row, end, segment.offset)
        number += 1
        set_tokens, lost = writer.segment(segment, number, trajectory)
        trained += set_tokens
        unpredictable += lost
        end = segment.end
    while row < plan.rows:
        writer.pad(row, end, plan.tokens_per_row)
        row, end = row + 1, 0
    return Written(
        tokens=plan.real_tokens, trained_tokens=trained, unpredictable_tokens=unpredictable
    )


class _Writer:
    """Slices of the output arrays, by segment and by stretch of padding."""

    def __init__(self, out: Mapping[str, Array], ramp: Int32) -> None:
        self._out = out
        self._ramp = ramp
        self._pads = [(out[name], FIELDS[name].pad_value) for name in out]
        self._tokens = out["tokens"]
        self._segment_ids = out["segment_ids"]
        self._positions = out["positions"]
        self._loss_mask = out["loss_mask"]
        self._advantages = out["advantages"]
        self._sampling = out.get("sampling_logprobs")
        self._old = out.get("old_logprobs")
        self._ref = out.get("ref_logprobs")
        self._routing = out.get("routed_experts")

    def pad(self, row: int, start: int, stop: int) -> None:
        """Padding in row `row` from place `start` to `stop`."""
        if start < stop:
            for array, value in self._pads:
                array[row, start:stop] = value

    def segment(self, segment: Segment, number: int, trajectory: Trajectory) -> tuple[int, int]:
        """One segment. Returns (trained tokens, mask dropped from the first token)."""
        row, start, end = segment.row, segment.offset, segment.end
        middle = start + trajectory.prompt_tokens.shape[0]
        tokens = self._tokens[row]
        tokens[start:middle] = trajectory.prompt_tokens
        tokens[middle:end] = trajectory.completion_tokens
        self._segment_ids[row, start:end] = number
        self._positions[row, start:end] = self._ramp[: end - start]
        mask = self._loss_mask[row]
        # The first token has no predictor, even where there is no prompt.
        trained_from = max(middle, start + 1)
        if trajectory.loss_mask is None:
            mask[start:trained_from] = 0
            mask[trained_from:end] = 1
            wanted, first = end - middle, middle == start
        else:
            mask[start:end] = trajectory.loss_mask
            mask[start] = 0
            wanted, first = trajectory.trainable_tokens, bool(trajectory.loss_mask[0])
        advantages = self._advantages[row]
        advantages[start:middle] = 0
        advantages[middle:end] = trajectory.advantage
        if self._sampling is not None and trajectory.sampling_logprobs is not None:
            self._sampling[row, start:middle] = 0
            self._sampling[row, middle:end] = trajectory.sampling_logprobs
        if self._old is not None and trajectory.old_logprobs is not None:
            self._old[row, start:middle] = 0
            self._old[row, middle:end] = trajectory.old_logprobs
        if self._ref is not None and trajectory.ref_logprobs is not None:
            self._ref[row, start:middle] = 0
            self._ref[row, middle:end] = trajectory.ref_logprobs
        if self._routing is not None and trajectory.routed_experts is not None:
            self._routing[row, start:end] = trajectory.routed_experts
        return wanted - int(first), int(first)


def _member(segment: Segment, trajectories: Mapping[tuple[str, int], Trajectory]) -> Trajectory:
    trajectory = trajectories.get(segment.key)
    if trajectory is None:
        raise PackingError(
            f"group {segment.group_id!r} index {segment.index} is in the plan but not among the"
            " trajectories"
        )
    if trajectory.total_tokens != segment.length:
        raise PackingError(
            f"{_name(trajectory)} has {trajectory.total_tokens} tokens; the plan says {segment.length}: it was"
            " made from other data"
        )
    if trajectory.advantage is None:
        raise PackingError(
            f"{_name(trajectory)} has no advantage; compute advantages before packing"
        )
    return trajectory


def _check_out(plan: MicroBatchPlan, members: list[Trajectory], out: Mapping[str, Array]) -> None:
    unknown = [name for name in out if name not in FIELDS]
    if unknown:
        raise PackingError(f"{unknown[0]!r} is no micro-batch field; they are {tuple(FIELDS)}")
    for name in REQUIRED_FIELDS:
        if name not in out:
            raise PackingError(f"no buffer for the required field {name!r}")
    optional = tuple(name for name in OPTIONAL_FIELDS if name in out)
    fields = common_fields(members)
    if members and fields.optional != optional:
        raise PackingError(
            f"buffers are for the optional fields {optional}, but the trajectories have"
            f" {fields.optional}; the micro-batches of a run all have the same fields"
        )
    for name, array in out.items():
        spec = FIELDS[name]
        shape: tuple[int, ...] = (plan.rows, plan.tokens_per_row)
        if spec.trailing_dims:
            trailing = fields.routing_shape or tuple(array.shape[2:])
            shape = (*shape, *trailing)
        if (
            array.dtype != spec.dtype
            or array.shape != shape
            or array.ndim != 2 + spec.trailing_dims
        ):
            raise PackingError(
                f"the buffer for {name} is {array.dtype} {list(array.shape)}; it must be"
                f" {spec.dtype} {list(shape)}"
            )
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise PackingError(f"the buffer for {name} must be writable and in C order")


def pack_micro_batch(
    identity: MicroBatchId,
    plan: MicroBatchPlan,
    trajectories: Mapping[tuple[str, int], Trajectory],
    fields: FieldSet,
    out: Mapping[str, Array] | None = None,
) -> tuple[MicroBatch, Written]:
    """Write into `out` (fresh arrays when None) and wrap it as a `MicroBatch` without a digest."""
    arrays = allocate(plan.rows, plan.tokens_per_row, fields) if out is None else out
    written = write_micro_batch(plan, trajectories, arrays)
    batch = MicroBatch(
        id=identity,
        rows=plan.rows,
        tokens_per_row=plan.tokens_per_row,
        row_lengths=plan.row_lengths,
        arrays=arrays,
    )
    return batch, written
