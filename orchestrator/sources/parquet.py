"""Recorded rollouts from a Parquet file: read strictly, checked whole before the first group.

Reads one row group at a time, so memory is bounded by the largest row group. Never unpickles.
Decides nothing about groups: anything wrong is one `SourceError` that names file, row and fix.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.trajectory import (
    Group,
    RolloutError,
    SourceError,
    Trajectory,
    TrajectoryLimits,
    check_trajectory,
)

log = logging.getLogger("prestage.orchestrator")

# Columns that are read, and their types.
REQUIRED_COLUMNS: Final = MappingProxyType(
    {
        "group_id": pa.string(),
        "index_in_group": pa.int32(),
        "prompt_tokens": pa.list_(pa.int32()),
        "completion_tokens": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "reward": pa.float32(),
        "policy_version": pa.int32(),
    }
)
# Read when present.
OPTIONAL_COLUMNS: Final = MappingProxyType({"task": pa.string(), "finish_reason": pa.string()})
# `[tokens, moe_layers, top_k]` of prompt and completion, flat; read by runs that replay it.
ROUTING_COLUMN: Final = "routed_experts"
ROUTING_TYPE: Final = pa.list_(pa.int16())
# Allowed in the file, not read.
AUXILIARY_COLUMNS: Final = frozenset(
    {
        "prompt_id",
        "prompt_text",
        "completion_text",
        "logprobs_llamacpp",
        "seed",
        "has_answer_tag",
        "extracted_answer",
        "oracle_answer",
        "entry_json",
        "engine_worker",
        "finished_at_s",
    }
)

Number = TypeVar("Number", bound=np.generic)

_METADATA_BYTES: Final = 64 << 20


@dataclass(frozen=True, kw_only=True)
class ParquetLimits:
    """How large a file may be."""

    max_file_bytes: int = 64 << 30
    max_row_group_bytes: int = 2 << 30  # Uncompressed; this much is held in memory.
    max_rows: int = 50_000_000


@dataclass(frozen=True, kw_only=True)
class _Stamp:
    """Tells whether the file is still the one that was checked."""

    size_bytes: int
    modified_ns: int


class RecordedRollouts:
    """A checked file of recorded rollouts. Its groups, in file order, are the durable order."""

    def __init__(
        self,
        path: Path,
        limits: TrajectoryLimits,
        *,
        group_size: int | None = None,
        parquet_limits: ParquetLimits | None = None,
    ) -> None:
        """Open `path` and check every row of it.

        `group_size`: members of each group; None: as many as the file's highest index says.

        Raises: SourceError.
        """
        self._path = path
        self._limits = limits
        self._parquet_limits = ParquetLimits() if parquet_limits is None else parquet_limits
        self._stamp = self._read_stamp()
        with self._open() as file:
            self._columns = self._check_schema(file)
            self._check_sizes(file)
            self.group_size = self._find_group_size(file) if group_size is None else group_size
        if self.group_size < 1:
            raise SourceError(f"{path}: group_size is {self.group_size}; use at least 1")
        self.group_count = 0
        self.trajectory_count = 0
        seen: set[str] = set()
        for group in self._read_groups():
            if group.group_id in seen:
                raise SourceError(
                    f"{path}: group {group.group_id!r} comes again after other groups; the rows of"
                    " a group lie together"
                )
            seen.add(group.group_id)
            self.group_count += 1
            self.trajectory_count += len(group.trajectories)
        if not self.group_count:
            raise SourceError(f"{path}: no rows; a run needs at least one group")

    def groups(self, *, epochs: int | None = 1, start: int = 0) -> Iterator[Group]:
        """Groups in durable order from position `start`; `epochs` passes, None: for ever.

        The group `name` of the file is `name@0` in the first pass, `name@1` in the second, so that
        no two steps share an identity. Position counts groups over all passes: it is the data
        cursor.

        Raises: SourceError when the file changed since it was checked.
        """
        if start < 0:
            raise SourceError(f"{self._path}: start is {start}; positions count from 0")
        first, skip = divmod(start, self.group_count)
        passes = itertools.count(first) if epochs is None else range(first, epochs)
        for epoch in passes:
            if self._read_stamp() != self._stamp:
                raise SourceError(
                    f"{self._path} changed while the run reads it; record to a new file instead"
                )
            if epoch > first:
                log.warning(
                    "%s: all %d groups are used; pass %d over them begins",
                    self._path,
                    self.group_count,
                    epoch + 1,
                )
            yield from itertools.islice(self._read_groups(epoch), skip, None)
            skip = 0

    def _read_stamp(self) -> _Stamp:
        try:
            stat = self._path.stat()
        except OSError as error:
            raise SourceError(f"{self._path}: cannot be read: {error.strerror}") from error
        if not self._path.is_file():
            raise SourceError(f"{self._path}: not a file; give one Parquet file")
        if stat.st_size > self._parquet_limits.max_file_bytes:
            raise SourceError(
                f"{self._path}: {stat.st_size} bytes; at most"
                f" {self._parquet_limits.max_file_bytes} are read, split it"
            )
        return _Stamp(size_bytes=stat.st_size, modified_ns=stat.st_mtime_ns)

    def _open(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(
                self._path,
                memory_map=False,
                page_checksum_verification=True,  # Where the writer left checksums.
                thrift_string_size_limit=_METADATA_BYTES,
                thrift_container_size_limit=_METADATA_BYTES,
            )
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise SourceError(f"{self._path}: not a readable Parquet file: {error}") from error

    def _check_schema(self, file: pq.ParquetFile) -> list[str]:
        try:
            schema = file.schema_arrow
            names = list(schema.names)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise SourceError(f"{self._path}: its schema cannot be read: {error}") from error
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SourceError(f"{self._path}: column {twice[0]!r} is there twice")
        known = {**REQUIRED_COLUMNS, **OPTIONAL_COLUMNS, ROUTING_COLUMN: ROUTING_TYPE}
        for name in names:
            if name not in known and name not in AUXILIARY_COLUMNS:
                raise SourceError(
                    f"{self._path}: unknown column {name!r}; remove or rename it. Known columns:"
                    f" {', '.join(sorted([*known, *AUXILIARY_COLUMNS]))}"
                )
        for name in REQUIRED_COLUMNS:
            if name not in names:
                raise SourceError(f"{self._path}: column {name!r} is missing")
        for name, wanted in known.items():
            if name in names and not _same_type(schema.field(name).type, wanted):
                raise SourceError(
                    f"{self._path}: column {name!r} is {schema.field(name).type}; it must be"
                    f" {_type_text(wanted)}"
                )
        replays = ROUTING_COLUMN in (self._limits.required_fields or ())
        read = [name for name in known if name != ROUTING_COLUMN or replays]
        return [name for name in read if name in names]

    def _check_sizes(self, file: pq.ParquetFile) -> None:
        metadata = file.metadata
        if metadata.num_rows > self._parquet_limits.max_rows:
            raise SourceError(
                f"{self._path}: {metadata.num_rows} rows; at most"
                f" {self._parquet_limits.max_rows} are read"
            )
        for number in range(metadata.num_row_groups):
            size = _decoded_bytes(metadata.row_group(number))
            if size > self._parquet_limits.max_row_group_bytes:
                raise SourceError(
                    f"{self._path}: row group {number} holds {size} bytes; at most"
                    f" {self._parquet_limits.max_row_group_bytes} are held at once: write smaller"
                    " row groups"
                )

    def _find_group_size(self, file: pq.ParquetFile) -> int:
        highest = -1
        for number in range(file.num_row_groups):
            column = self._row_group(file, number, ["index_in_group"], 0).column(0)
            if len(column):
                highest = max(highest, int(np.max(column.to_numpy())))
        return max(1, highest + 1)

    def _row_group(
        self, file: pq.ParquetFile, number: int, columns: list[str], first_row: int
    ) -> pa.Table:
        """Row group `number`, without nulls."""
        try:
            table = file.read_row_group(number, columns=columns)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise SourceError(
                f"{self._path}: row group {number} cannot be read: {error}"
            ) from error
        for name in columns:
            column = table.column(name)
            if column.null_count:
                at = int(np.argmax(column.is_null().to_numpy()))
                raise SourceError(
                    f"{self._path}: row {first_row + at}: column {name!r} is null; every row needs"
                    " every value"
                )
        return table

    def _read_groups(self, epoch: int | None = None) -> Iterator[Group]:
        """The file's groups. `epoch` is appended to their names; None: names as in the file."""
        members: list[Trajectory] = []
        with self._open() as file:
            for row, trajectory in self._read_trajectories(file):
                if members and trajectory.group_id != members[0].group_id:
                    yield self._close(members, epoch)
                    members = []
                self._check_place(row, trajectory, members)
                members.append(trajectory)
        if members:
            yield self._close(members, epoch)

    def _check_place(self, row: int, trajectory: Trajectory, members: list[Trajectory]) -> None:
        where = f"{self._path}: row {row}: group {trajectory.group_id!r}"
        if trajectory.index >= self.group_size:
            raise SourceError(
                f"{where} has a member {trajectory.index}; groups have members 0 to"
                f" {self.group_size - 1}"
            )
        if any(member.index == trajectory.index for member in members):
            raise SourceError(f"{where} has index {trajectory.index} twice")

    def _close(self, members: list[Trajectory], epoch: int | None) -> Group:
        present = {member.index for member in members}
        # The size may be any number that the file says: nothing is made of that length.
        missing = next((index for index in range(self.group_size) if index not in present), None)
        group_id = members[0].group_id
        if missing is not None:
            raise SourceError(
                f"{self._path}: group {group_id!r} has no member {missing}; each group has"
                f" {self.group_size} (0 to {self.group_size - 1}), complete it or leave it out"
            )
        ordered = sorted(members, key=lambda member: member.index)
        if epoch is None:
            return Group(group_id=group_id, trajectories=tuple(ordered))
        return rename_group(Group(group_id=group_id, trajectories=tuple(ordered)), epoch)

    def _read_trajectories(self, file: pq.ParquetFile) -> Iterator[tuple[int, Trajectory]]:
        first_row = 0
        for number in range(file.num_row_groups):
            table = self._row_group(file, number, self._columns, first_row).combine_chunks()
            try:
                rows = _Rows(table, self._path, first_row, self._limits)
            except UnicodeDecodeError as error:
                raise SourceError(
                    f"{self._path}: row group {number} holds text that is not UTF-8: {error}"
                ) from error
            for place in range(table.num_rows):
                row = first_row + place
                try:
                    trajectory = rows.trajectory(place)
                    check_trajectory(trajectory, self._limits)
                except SourceError:
                    raise
                except RolloutError as error:
                    raise SourceError(f"{self._path}: row {row}: {error}") from error
                yield row, trajectory
            first_row += table.num_rows


def rename_group(group: Group, epoch: int) -> Group:
    """The group under the name it has in pass `epoch`."""
    name = f"{group.group_id}@{epoch}"
    return Group(
        group_id=name,
        trajectories=tuple(replace(member, group_id=name) for member in group.trajectories),
    )


def _same_type(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_list(wanted):
        # Field names and nullability of the elements may differ; nulls are checked by content.
        return bool(pa.types.is_list(found) and found.value_type == wanted.value_type)
    return bool(found == wanted)


def _type_text(wanted: pa.DataType) -> str:
    return f"list<{wanted.value_type}>" if pa.types.is_list(wanted) else str(wanted)


class _Rows:
    """One row group as arrays; trajectories are views of them."""

    def __init__(
        self, table: pa.Table, path: Path, first_row: int, limits: TrajectoryLimits
    ) -> None:
        self._path = path
        self._routing = None
        self._routing_shape = (limits.moe_layers or 0, limits.top_k or 0)
        if ROUTING_COLUMN in table.column_names:
            self._routing = self._lists(table, ROUTING_COLUMN)
        self._first_row = first_row
        self._group_ids = _texts(table, "group_id")
        self._tasks = _texts(table, "task")
        self._finish = _texts(table, "finish_reason")
        self._indices = _numbers(table, "index_in_group")
        self._versions = _numbers(table, "policy_version")
        self._rewards = _numbers(table, "reward")
        self._prompts = self._lists(table, "prompt_tokens")
        self._completions = self._lists(table, "completion_tokens")
        self._logprobs = self._lists(table, "logprobs")

    def _lists(
        self, table: pa.Table, name: str
    ) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.int64]]:
        """(values, offsets [rows + 1]) of a list column."""
        chunks = table.column(name).chunks
        if not chunks:
            return np.zeros(0, np.int32), np.zeros(1, np.int64)
        column = chunks[0]
        offsets = column.offsets.to_numpy().astype(np.int64)
        values = column.values
        used = values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        if used.null_count:
            at = int(offsets[0]) + int(np.argmax(used.is_null().to_numpy(zero_copy_only=False)))
            place = int(np.searchsorted(offsets, at, "right")) - 1
            raise SourceError(
                f"{self._path}: row {self._first_row + place}: column {name!r} holds a null at"
                f" position {at - int(offsets[place])}; every token needs a value"
            )
        return used.to_numpy(), offsets - offsets[0]

    def _routing_of(self, place: int) -> npt.NDArray[np.int16] | None:
        if self._routing is None:
            return None
        flat = _slice(self._routing, place, np.int16)
        layers, top_k = self._routing_shape
        if not flat.size:
            return None  # As if it had none: the run says which trajectory lacks it.
        if flat.size % (layers * top_k):
            raise SourceError(
                f"{self._path}: row {self._first_row + place}: column {ROUTING_COLUMN!r} holds"
                f" {flat.size} ids; the model has {layers} layers with experts (dense layers do not"
                f" count) of {top_k}, so a multiple of {layers * top_k} is needed"
            )
        return flat.reshape(-1, layers, top_k)

    def trajectory(self, place: int) -> Trajectory:
        """Row `place` of the row group."""
        return Trajectory(
            group_id=self._group_ids[place],
            index=int(self._indices[place]),
            prompt_tokens=_slice(self._prompts, place, np.int32),
            completion_tokens=_slice(self._completions, place, np.int32),
            sampling_logprobs=_slice(self._logprobs, place, np.float32),
            routed_experts=self._routing_of(place),
            reward=float(self._rewards[place]),
            policy_version=int(self._versions[place]),
            task=self._tasks[place] if self._tasks else "",
            finish_reason=self._finish[place] if self._finish else "",
        )


def _decoded_bytes(group: pq.RowGroupMetaData) -> int:
    """What the group takes in memory: repeated values are few bytes in the file, and many there."""
    decoded = 0
    for number in range(group.num_columns):
        column = group.column(number)
        width = 8 if column.physical_type in ("INT64", "DOUBLE") else 4
        decoded += max(int(column.total_uncompressed_size), int(column.num_values) * width)
    return max(int(group.total_byte_size), decoded)


def _texts(table: pa.Table, name: str) -> list[str]:
    return table.column(name).to_pylist() if name in table.column_names else []


def _numbers(table: pa.Table, name: str) -> npt.NDArray[np.generic]:
    values: npt.NDArray[np.generic] = table.column(name).to_numpy()
    return values


def _slice(
    lists: tuple[npt.NDArray[np.generic], npt.NDArray[np.int64]],
    place: int,
    dtype: type[Number],
) -> npt.NDArray[Number]:
    values, offsets = lists
    return values[int(offsets[place]) : int(offsets[place + 1])].astype(dtype, copy=False)
