"""The journal's rows in SQLite: WAL, `synchronous=FULL`, one connection, used by one thread.

Knows tables and transactions; what rows mean is said in `order.py` and `snapshot.py`.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from orchestrator.groups import Verdict
from orchestrator.journal.errors import (
    JournalBusy,
    JournalDamaged,
    JournalError,
    JournalMismatch,
)
from orchestrator.journal.order import Event, Kind
from orchestrator.journal.payload import Record
from orchestrator.journal.segments import Probe, no_probe
from orchestrator.trajectory import Defect, DropReason

FORMAT: Final = "1"

_SCHEMA: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE producers (name TEXT PRIMARY KEY, next_offset INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE events (
  seq INTEGER PRIMARY KEY,        -- Place in the durable order, from 0.
  kind INTEGER NOT NULL,          -- order.Kind
  outcome TEXT NOT NULL,          -- groups.Outcome, and the reason where there is one.
  reason TEXT NOT NULL,
  producer TEXT NOT NULL,
  producer_offset INTEGER NOT NULL,
  group_id TEXT NOT NULL,
  message TEXT NOT NULL,          -- Of what was not accepted.
  defect TEXT NOT NULL,           -- DropReason of the trajectory by itself, or empty.
  member INTEGER,                 -- From here on: of a trajectory.
  reward REAL,
  policy_version INTEGER,
  prompt_tokens INTEGER,
  completion_tokens INTEGER,
  trainable_tokens INTEGER,
  first_masked_in INTEGER,
  digest BLOB,
  segment INTEGER,                -- Payload file, place in it and size; -1: not kept.
  position INTEGER,
  payload_bytes INTEGER
);
CREATE TABLE micro_batches (
  step INTEGER NOT NULL, number INTEGER NOT NULL, digest TEXT NOT NULL,
  groups TEXT NOT NULL,           -- JSON list of the groups with a segment in it.
  PRIMARY KEY (step, number)
) WITHOUT ROWID;
CREATE TABLE snapshot (
  id INTEGER PRIMARY KEY CHECK (id = 0), seq INTEGER NOT NULL, state TEXT NOT NULL
);
"""

_INSERT_EVENT: Final = "INSERT INTO events VALUES (" + ",".join("?" * 20) + ")"
_MESSAGE_CHARACTERS: Final = 500

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class NoSpace(Exception):
    """The disk is full: nothing of the transaction happened, and it can be made again later."""


def no_space(error: BaseException) -> bool:
    """Whether `error` says that the disk (or the quota) is full."""
    if isinstance(error, sqlite3.Error):
        # A full disk is also met when the log or its index grows.
        return error.sqlite_errorcode == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in _FULL


@dataclass(frozen=True, kw_only=True)
class MicroBatchRow:
    """The journaled plan of one micro-batch."""

    step: int
    index: int
    digest: str
    groups: tuple[str, ...]


class Database:
    """Tables of one journal."""

    def __init__(
        self,
        path: Path,
        fingerprint: Mapping[str, str],
        probe: Probe = no_probe,
        *,
        may_be_new: bool = True,
    ) -> None:
        """Open or make the database and hold it to `fingerprint`.

        `may_be_new`: False where there must be one, because it was written before.

        Raises: JournalMismatch naming the key, JournalDamaged, JournalError.
        """
        self._path = path
        self._probe = probe
        try:
            # Nobody else's eyes, whatever the folder allows; SQLite's other files follow this one.
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            self._connection = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=1.0
            )
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"{path} cannot be opened: {error}") from error
        try:
            self._set_up()
            self._check(fingerprint, may_be_new=may_be_new)
        except sqlite3.DatabaseError as error:
            self._connection.close()
            if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise JournalBusy(
                    f"{path} is open in another program (an SQLite shell?): close it there"
                ) from error
            if no_space(error):
                raise JournalError(f"{path}: the disk is full: make room, then start again") from (
                    error
                )
            raise JournalDamaged(
                f"{path} cannot be read ({error}): restore the folder from a copy, or start a new"
                " run with a folder of its own"
            ) from error
        except JournalError:
            self._connection.close()
            raise

    def _set_up(self) -> None:
        run = self._connection.execute
        # Exclusive: no shared index file, and no second writer by any other way.
        run("PRAGMA locking_mode=EXCLUSIVE")
        (mode,) = run("PRAGMA journal_mode=WAL").fetchone()
        if mode != "wal":
            raise JournalError(f"{self._path}: this disk does not support a write-ahead log")
        run("PRAGMA synchronous=FULL")
        run("PRAGMA temp_store=MEMORY")
        (verdict,) = run("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise JournalDamaged(
                f"{self._path} is damaged ({verdict}): restore the folder from a copy, or start a"
                " new run with a folder of its own"
            )

    def _check(self, fingerprint: Mapping[str, str], *, may_be_new: bool) -> None:
        run = self._connection.execute
        (tables,) = run("SELECT count(*) FROM sqlite_master").fetchone()
        wanted = {"format": FORMAT, **fingerprint}
        if not (tables or may_be_new):
            raise JournalDamaged(
                f"{self._path} is missing or empty, but payload files are there: restore it, or"
                " give this run a folder of its own"
            )
        if not tables:
            run("BEGIN IMMEDIATE")
            for statement in _SCHEMA.split(";\n"):
                run(statement)
            self._connection.executemany("INSERT INTO meta VALUES (?, ?)", wanted.items())
            run("COMMIT")
            return
        written = dict(run("SELECT key, value FROM meta").fetchall())
        for key in sorted({*wanted, *written}, key=lambda key: (key != "format", key)):
            if wanted.get(key) != written.get(key):
                raise JournalMismatch(
                    f"{self._path.parent} was written with {key} {written.get(key, '(none)')}, and"
                    f" this run says {wanted.get(key, '(none)')}: start with the same setting, or"
                    " give this run a folder of its own"
                )

    # -- writing ----------------------------------------------------------------------------------

    def commit(
        self,
        events: Sequence[tuple[Event, Verdict]],
        offsets: Mapping[str, int],
        micro_batches: Sequence[MicroBatchRow],
    ) -> None:
        """Write all of it durably, or nothing.

        Raises: NoSpace, JournalError.
        """
        with _Transaction(self._connection, self._probe, self._path):
            self._connection.executemany(_INSERT_EVENT, [_event_row(*event) for event in events])
            self._connection.executemany(
                "INSERT INTO producers VALUES (?, ?)"
                " ON CONFLICT (name) DO UPDATE SET next_offset = excluded.next_offset",
                offsets.items(),
            )
            self._connection.executemany(
                "INSERT INTO micro_batches VALUES (?, ?, ?, ?)",
                [
                    (row.step, row.index, row.digest, json.dumps(row.groups))
                    for row in micro_batches
                ],
            )

    def keep_only(self, state: str, *, seq: int, needed: set[int], from_step: int) -> None:
        """Store a snapshot and delete what it stands for, durably, or do nothing.

        Deletes the events up to `seq` that are not `needed` and micro-batches below `from_step`.

        Raises: NoSpace, JournalError.
        """
        with _Transaction(self._connection, self._probe, self._path):
            run = self._connection.execute
            run("CREATE TEMP TABLE IF NOT EXISTS needed (seq INTEGER PRIMARY KEY)")
            run("DELETE FROM needed")
            self._connection.executemany(
                "INSERT INTO needed VALUES (?)", ((place,) for place in needed)
            )
            run("DELETE FROM events WHERE seq <= ? AND seq NOT IN (SELECT seq FROM needed)", (seq,))
            run("DELETE FROM micro_batches WHERE step < ?", (from_step,))
            run("INSERT OR REPLACE INTO snapshot VALUES (0, ?, ?)", (seq, state))

    # -- reading, while opening -------------------------------------------------------------------

    def snapshot(self) -> tuple[int, str] | None:
        """The stored snapshot and the last event that it stands for."""
        row = self._connection.execute("SELECT seq, state FROM snapshot").fetchone()
        return None if row is None else (int(row[0]), str(row[1]))

    def producers(self) -> dict[str, int]:
        """Each producer's first offset that is not durable."""
        return dict(self._connection.execute("SELECT name, next_offset FROM producers").fetchall())

    def micro_batches(self) -> dict[tuple[int, int], str]:
        """Digests by (step, index)."""
        rows = self._connection.execute("SELECT step, number, digest FROM micro_batches")
        return {(step, index): digest for step, index, digest in rows}

    def events(self, first: int, last: int | None = None) -> Iterator[tuple[Event, str, str]]:
        """Events with `first` <= seq <= `last` in order, with their outcome and its reason."""
        bound = 1 << 62 if last is None else last
        rows = self._connection.execute(
            "SELECT * FROM events WHERE seq BETWEEN ? AND ? ORDER BY seq", (first, bound)
        )
        for row in rows:
            yield _event(row)

    def close(self) -> None:
        """Let the file go."""
        self._connection.close()


class _Transaction:
    """All or nothing, durable at its end."""

    def __init__(self, connection: sqlite3.Connection, probe: Probe, path: Path) -> None:
        self._connection = connection
        self._probe = probe
        self._path = path

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        del kind, trace
        try:
            if error is None:
                self._probe("rows.commit")
                self._connection.execute("COMMIT")
                self._probe("rows.committed")
                return
        except (sqlite3.Error, OSError) as failure:
            error = failure
        if not isinstance(error, sqlite3.Error | OSError):
            return  # Dying, or a fault in this program: leave everything as it is.
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
        self._raise(error)

    def _begin(self) -> None:
        try:
            self._probe("rows.begin")
            self._connection.execute("BEGIN IMMEDIATE")
        except (sqlite3.Error, OSError) as error:
            self._raise(error)

    def _raise(self, error: sqlite3.Error | OSError) -> None:
        if no_space(error):
            raise NoSpace(str(error)) from error
        raise JournalError(
            f"{self._path} cannot be written ({error}): check the disk. What was acknowledged is"
            " safe; start again to go on"
        ) from error


def _event_row(event: Event, verdict: Verdict) -> tuple[object, ...]:
    reason = "" if verdict.reason is None else verdict.reason.value
    head = (
        event.seq,
        event.kind.value,
        verdict.outcome.value,
        reason,
        event.producer,
        event.offset,
    )
    record = event.record
    if record is None:
        return (
            *head,
            event.group_id,
            f"{event.reason}: {event.message}"[:_MESSAGE_CHARACTERS],
            event.reason,
            *([None] * 11),
        )
    return (
        *head,
        record.group_id,
        verdict.message[:_MESSAGE_CHARACTERS],
        "" if event.defect is None else event.defect.reason.value,
        record.index,
        record.reward,
        record.policy_version,
        record.prompt_tokens,
        record.completion_tokens,
        record.trainable_tokens,
        int(record.first_token_masked_in),
        record.digest,
        record.segment,
        record.position,
        record.payload_bytes,
    )


_Row = tuple[
    int, int, str, str, str, int, str, str, str, int, float, int, int, int, int, int, bytes, int,
    int, int,
]  # fmt: skip


def _event(row: _Row) -> tuple[Event, str, str]:
    (
        seq, number, outcome, reason, producer, offset, group_id, message, defect, index, reward,
        version, prompt, completion, trainable, first_masked_in, digest, segment, position, size,
    ) = row  # fmt: skip
    kind = Kind(number)
    record = None
    if kind is Kind.TRAJECTORY:
        record = Record(
            seq=seq,
            group_id=group_id,
            index=index,
            # SQLite stores a NaN as NULL; such a reward is a defect, and never used.
            reward=float("nan") if reward is None else reward,
            policy_version=version,
            prompt_tokens=prompt,
            completion_tokens=completion,
            trainable_tokens=trainable,
            first_token_masked_in=bool(first_masked_in),
            digest=digest,
            segment=segment,
            position=position,
            payload_bytes=size,
        )
    event = Event(
        seq=seq,
        kind=kind,
        producer=producer,
        offset=offset,
        record=record,
        defect=Defect(reason=DropReason(defect), message=message)
        if record is not None and defect
        else None,
        group_id=group_id if record is None else "",
        reason=defect if record is None else "",
        message=message if record is None else "",
    )
    return event, outcome, reason
