"""Traces: every trainer call as one NDJSON line, and timelines in the Chrome/Perfetto format.

One line is one `TraceRecord` as a JSON object with sorted keys. Readers (`check-trace`, the frozen
sequences, the bench) depend on these names; the format version is in every file's first line.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final, TextIO

FORMAT: Final = "prestage-trace/1"


class TraceError(ValueError):
    """A trace file that cannot be read; names file, line and what is wrong."""


@dataclass(frozen=True, kw_only=True)
class TraceRecord:
    """One call as its side saw it. Times are seconds on that process's monotonic clock."""

    side: str  # "orchestrator" or "worker".
    call: str  # `prestage.protocol.Call` value, or "bookkeeping", "put_micro_batch", ...
    run_id: str = ""
    epoch: int = 0
    seq: int = 0  # 0 = unsequenced.
    incarnation: str = ""
    step: int = -1  # Micro-batch's step, or the step that the call closes or reads; -1 = none.
    index: int = -1  # Micro-batch's index; -1 = none.
    digest: str = ""
    used_staged_input: bool = False
    phase_before: str = ""
    phase_after: str = ""
    train_step_after: int = -1  # Policy version after the call; -1 = not known.
    outcome: str = "ok"  # "ok", "replayed", "lost", or a refusal's reason.
    started_s: float = 0.0
    seconds: float = 0.0

    def to_json(self) -> str:
        return json.dumps({"type": "call", **asdict(self)}, sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class DeviceRecord:
    """One stretch of work on the device (or its copy engine)."""

    kind: str  # "fwd_bwd", "update", "copy", "retry".
    step: int
    index: int  # -1 for an update.
    started_s: float
    finished_s: float

    def to_json(self) -> str:
        return json.dumps({"type": "device", **asdict(self)}, sort_keys=True)


Record = TraceRecord | DeviceRecord
_TYPES: Final[Mapping[str, type[TraceRecord] | type[DeviceRecord]]] = {
    "call": TraceRecord,
    "device": DeviceRecord,
}


class TraceWriter:
    """Appends records to a file, one line each, flushed. Safe from several threads."""

    def __init__(self, path: Path, *, side: str, clock_origin_s: float = 0.0) -> None:
        """`clock_origin_s`: wall time minus monotonic time, so that two processes' files align."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file: TextIO = path.open("w", encoding="utf-8")
        header = {
            "type": "header",
            "format": FORMAT,
            "side": side,
            "clock_origin_s": clock_origin_s,
        }
        self._file.write(json.dumps(header, sort_keys=True) + "\n")
        self._file.flush()

    def write(self, record: Record) -> None:
        with self._lock:
            if not self._file.closed:
                self._file.write(record.to_json() + "\n")
                self._file.flush()

    def close(self) -> None:
        with self._lock:
            self._file.close()


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One trace file, read whole."""

    side: str
    clock_origin_s: float
    records: tuple[Record, ...]

    @property
    def calls(self) -> tuple[TraceRecord, ...]:
        return tuple(record for record in self.records if isinstance(record, TraceRecord))

    @property
    def device(self) -> tuple[DeviceRecord, ...]:
        return tuple(record for record in self.records if isinstance(record, DeviceRecord))


def _parse(path: Path, number: int, line: str) -> Mapping[str, object]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # A number of too many digits is the former.
        raise TraceError(f"{path}:{number}: not JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise TraceError(f"{path}:{number}: not a trace record (an object with a 'type')")
    return value


def _fits(value: object, kind: str) -> bool:
    """Whether a JSON value is one of a field of this type. Numbers are finite and fit in 64 bits."""
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "str":
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if not -(2**63) <= value < 2**63:  # False for NaN, too.
        return False
    return kind == "float" or isinstance(value, int)


def read_trace(path: Path) -> Trace:
    """Read one NDJSON trace. Raises `TraceError` naming the line; a torn last line is an error."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    if not lines:
        raise TraceError(f"{path}: empty; expected a header line of format {FORMAT}")
    header = _parse(path, 1, lines[0])
    if header.get("format") != FORMAT:
        raise TraceError(f"{path}:1: format {header.get('format')!r}; this reader knows {FORMAT}")
    records: list[Record] = []
    for number, line in enumerate(lines[1:], start=2):
        value = dict(_parse(path, number, line))
        kind = str(value.pop("type"))
        record_type = _TYPES.get(kind)
        if record_type is None:
            raise TraceError(f"{path}:{number}: unknown record type {kind!r}")
        known = {item.name for item in fields(record_type)}
        unknown = sorted(set(value) - known)
        if unknown:
            raise TraceError(f"{path}:{number}: unknown field(s) {', '.join(unknown)}")
        for item in fields(record_type):
            if item.name in value and not _fits(value[item.name], str(item.type)):
                raise TraceError(
                    f"{path}:{number}: {item.name} is {str(value[item.name])[:80]!r}; it is"
                    f" {item.type}"
                )
        try:
            records.append(record_type(**value))  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise TraceError(f"{path}:{number}: {error}") from error
    origin = header.get("clock_origin_s")
    return Trace(
        side=str(header.get("side")),
        clock_origin_s=float(origin) if _fits(origin, "float") else 0.0,  # type: ignore[arg-type]
        records=tuple(records),
    )


_TRACKS: Final[Mapping[str, int]] = {"fwd_bwd": 1, "update": 1, "retry": 1, "copy": 2}


def _events(process: int, trace: Trace, zero_s: float) -> Iterator[dict[str, object]]:
    def micros(seconds: float) -> float:
        return round((seconds + trace.clock_origin_s - zero_s) * 1e6, 3)

    for record in trace.records:
        if isinstance(record, TraceRecord):
            name = (
                record.call if record.index < 0 else f"{record.call} {record.step},{record.index}"
            )
            yield {
                "ph": "X",
                "pid": process,
                "tid": 0,
                "name": name,
                "cat": "call",
                "ts": micros(record.started_s),
                "dur": round(record.seconds * 1e6, 3),
                "args": {"outcome": record.outcome, "seq": record.seq, "step": record.step},
            }
        else:
            name = f"{record.kind} {record.step}" + ("" if record.index < 0 else f",{record.index}")
            yield {
                "ph": "X",
                "pid": process,
                "tid": _TRACKS.get(record.kind, 3),
                "name": name,
                "cat": "device",
                "ts": micros(record.started_s),
                "dur": round((record.finished_s - record.started_s) * 1e6, 3),
                "args": {"step": record.step},
            }


def to_perfetto(traces: Sequence[Trace]) -> str:
    """Chrome/Perfetto trace JSON of several processes' traces on one time axis."""
    starts = [
        record.started_s + trace.clock_origin_s for trace in traces for record in trace.records
    ]
    zero_s = min(starts, default=0.0)
    events: list[dict[str, object]] = []
    for process, trace in enumerate(traces, start=1):
        events.append(_name("process_name", process, 0, trace.side))
        events.append(_name("thread_name", process, 0, "calls"))
        if trace.device:
            events.append(_name("thread_name", process, 1, "device"))
            events.append(_name("thread_name", process, 2, "input copy"))
        events.extend(_events(process, trace, zero_s))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, sort_keys=True)


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def call_lines(records: Iterable[TraceRecord]) -> Iterator[str]:
    """The call sequence as text, one call a line: what golden files hold. No times, no digests."""
    for record in records:
        line = record.call
        if record.step >= 0:
            line += f" step={record.step}"
        if record.index >= 0:
            line += f" index={record.index}"
        if record.used_staged_input:
            line += " staged"
        if record.outcome not in ("ok", "replayed"):
            line += f" -> {record.outcome}"
        yield line
