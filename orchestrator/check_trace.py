"""`orchestrator check-trace FILE...`: checks NDJSON traces of either side against every rule.

Each file is checked by itself; files of one run's workers are one history, and a caller's calls are
looked up in the trace of the worker process that it called, where that file is given too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.invariants import (
    NEW_PROCESS,
    DeviceLedger,
    Ledger,
    Rule,
    Violation,
    new_process,
    observe,
    observe_device,
)
from prestage.trace import DeviceRecord, Trace, TraceError, TraceRecord, read_trace

FIRST_RECORD_LINE = 2  # The header is line 1.


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A broken rule and where."""

    path: Path
    line: int
    violation: Violation

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.violation}"


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What one file held."""

    path: Path
    side: str
    calls: int
    device_spans: int
    steps: int  # Steps closed.
    trained: int  # Micro-batches.
    staged_used: int
    lost: int
    replayed: int
    refused: int
    processes: int

    def __str__(self) -> str:
        text = (
            f"{self.path}: {self.side}, {self.calls} calls, {self.trained} micro-batches,"
            f" {self.steps} steps closed, {self.staged_used} staged inputs used,"
            f" {self.lost} lost, {self.replayed} replayed, {self.refused} refused"
        )
        return text + (f", {self.device_spans} device spans" if self.device_spans else "")


_CLOSING = ("fwd_bwd apply_optimizer", "apply_deferred_update", "update")
_NOT_REFUSED = ("ok", "lost", "replayed", "raised", "ENGINE_FAILED")


def check_traces(
    files: Sequence[tuple[Path, Trace]],
) -> tuple[tuple[Checked, ...], tuple[Finding, ...]]:
    """Check traces that were read already. Pure."""
    findings: list[Finding] = []
    workers = sorted(
        (file for file in files if file[1].side == "worker"), key=lambda file: _started_s(file[1])
    )
    ledgers: dict[str, Ledger] = {}  # Run to its workers' history so far.
    for path, trace in workers:
        findings.extend(_check_worker(path, trace, ledgers))
    for path, trace in files:
        if trace.side != "worker":
            findings.extend(_check_one(path, trace, Ledger())[1])
    findings.extend(_compare_sides(files))
    summaries = tuple(_summary(path, trace) for path, trace in files)
    return summaries, tuple(findings)


def _started_s(trace: Trace) -> float:
    first = min((record.started_s for record in trace.records), default=0.0)
    return trace.clock_origin_s + first


def _check_worker(path: Path, trace: Trace, ledgers: dict[str, Ledger]) -> list[Finding]:
    run_id = next((record.run_id for record in trace.calls if record.run_id), "")
    incarnation = next((record.incarnation for record in trace.calls if record.incarnation), "")
    before = ledgers.get(run_id)
    start = replace(NEW_PROCESS, incarnation=incarnation)
    if before is not None:
        start = new_process(before, incarnation)
    ledgers[run_id], findings = _check_one(path, trace, start)
    return findings


def _check_one(path: Path, trace: Trace, ledger: Ledger) -> tuple[Ledger, list[Finding]]:
    findings: list[Finding] = []
    device = DeviceLedger()
    for line, record in enumerate(trace.records, start=FIRST_RECORD_LINE):
        violations: Iterable[Violation]
        if isinstance(record, DeviceRecord):
            device, violations = observe_device(device, record)
        else:
            ledger, violations = observe(ledger, record)
        findings.extend(Finding(path=path, line=line, violation=item) for item in violations)
    return ledger, findings


_Key = tuple[str, str, int, int]
"""(run, incarnation, epoch, seq)"""


def _key(record: TraceRecord) -> _Key:
    return record.run_id, record.incarnation, record.epoch, record.seq


def _compare_sides(files: Sequence[tuple[Path, Trace]]) -> list[Finding]:
    """What a caller holds as done was carried out, as the same call, by the worker it called."""
    carried_out: dict[_Key, TraceRecord] = {}
    known: set[str] = set()
    for _, trace in files:
        if trace.side != "worker":
            continue
        known.update(record.incarnation for record in trace.calls)
        carried_out.update(
            {_key(item): item for item in trace.calls if item.seq and item.outcome == "ok"}
        )
    findings: list[Finding] = []
    for path, trace in files:
        if trace.side == "worker":
            continue
        for line, record in enumerate(trace.records, start=FIRST_RECORD_LINE):
            if isinstance(record, TraceRecord) and record.incarnation in known:
                findings.extend(_compare(path, line, record, carried_out))
    return findings


def _compare(
    path: Path, line: int, record: TraceRecord, carried_out: Mapping[_Key, TraceRecord]
) -> list[Finding]:
    if not record.seq or record.outcome != "ok":
        return []
    theirs = carried_out.get(_key(record))
    text = ""
    if theirs is None:
        text = f"{record.call} (seq {record.seq}) is done for the caller; the worker never did it"
    elif (theirs.call, theirs.index, theirs.digest) != (record.call, record.index, record.digest):
        text = (
            f"seq {record.seq} is {record.call} ({record.step}, {record.index}) for the caller and"
            f" {theirs.call} ({theirs.step}, {theirs.index}) for the worker"
        )
    if not text:
        return []
    violation = Violation(rule=Rule.CARRIED_OUT_ONCE, message=text)
    return [Finding(path=path, line=line, violation=violation)]


def _summary(path: Path, trace: Trace) -> Checked:
    calls = trace.calls
    done = [record for record in calls if record.outcome == "ok"]
    return Checked(
        path=path,
        side=trace.side,
        calls=len(calls),
        device_spans=len(trace.device),
        steps=sum(record.call in _CLOSING for record in done),
        trained=sum(record.call.startswith("fwd_bwd") for record in done),
        staged_used=sum(record.used_staged_input for record in done),
        lost=sum(record.outcome == "lost" for record in calls),
        replayed=sum(record.outcome == "replayed" for record in calls),
        refused=sum(record.outcome not in _NOT_REFUSED for record in calls),
        processes=len({record.incarnation for record in calls if record.incarnation}),
    )


def main(argv: Sequence[str]) -> int:
    """0: every rule holds. 1: a rule is broken. 2: a file cannot be read."""
    parser = argparse.ArgumentParser(
        prog="orchestrator check-trace",
        description="Check NDJSON traces of the orchestrator and the worker against every rule.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    paths: list[Path] = parser.parse_args(list(argv)).files
    files: list[tuple[Path, Trace]] = []
    for path in paths:
        try:
            files.append((path, read_trace(path)))
        except (TraceError, OSError) as error:
            sys.stderr.write(f"check-trace: {error}\n")
            return 2
    summaries, findings = check_traces(files)
    for summary in summaries:
        sys.stdout.write(f"{summary}\n")
    for finding in findings:
        sys.stdout.write(f"{finding}\n")
    if findings:
        rules = sorted({finding.violation.rule.value for finding in findings})
        sys.stdout.write(f"BROKEN: {len(findings)} finding(s): {', '.join(rules)}\n")
        return 1
    calls = sum(summary.calls for summary in summaries)
    sys.stdout.write(f"ok: {len(Rule)} rules hold over {calls} calls in {len(files)} file(s)\n")
    return 0
