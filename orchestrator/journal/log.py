"""The durable log of a run: takes trajectories, makes them durable in one order, acknowledges them.

One writer thread groups what is waiting into one commit: payload bytes, sync, rows, commit. Only
then are receipts given and groups shown to the reader. What an event means is decided by `Order`
before it is written; when the write fails for want of room, that decision is undone by reading the
order again from disk, and made again later. Any other failed write ends the log: after a failed
sync nobody knows what the disk holds, so a new process has to look.

Who waits for what: `append` for room (in memory, and in the byte budget), a receipt for its commit,
`await_group` for a group's commit, `commit_micro_batch` for its own. A full budget cannot stop the
trainer: while it waits for groups, trajectories are admitted beyond the budget, and counted.
"""

from __future__ import annotations

import bisect
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from orchestrator.groups import (
    NO_DROPS,
    Closed,
    Drops,
    Formed,
    Outcome,
    Verdict,
)
from orchestrator.ingest.ports import IngestClosed, OffsetGap, Receipt
from orchestrator.journal.config import LiveConfig
from orchestrator.journal.database import Database, MicroBatchRow, NoSpace, no_space
from orchestrator.journal.errors import JournalDamaged, JournalError
from orchestrator.journal.lock import FolderLock
from orchestrator.journal.order import Event, Kind, Order
from orchestrator.journal.payload import Encoded, Record, decode, encode
from orchestrator.journal.reserve import Reserve
from orchestrator.journal.segments import Place, Probe, Segments, no_probe, sync_folder
from orchestrator.journal.snapshot import RetentionPoint, Snapshot
from orchestrator.trajectory import Defect, DropReason, Trajectory, find_defect

log = logging.getLogger("prestage.journal")

_BATCH_ITEMS: Final = 512
_BATCH_BYTES: Final = 32 << 20
_POLL_SECONDS: Final = 0.2  # How soon a caller that went away is noticed.
_TICK_SECONDS: Final = 1.0
_LONGEST_TICK_SECONDS: Final = 5.0  # A stopped process does not make groups older than this.
_ITEM_BYTES: Final = 512  # Counted for what has no payload, so that nothing is free.
_BIGGEST: Final = 1 << 62
COMMIT_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_DATABASE: Final = "journal.sqlite"


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Tokens of everything durable so far, before assignment to steps."""

    tokens_in: int = 0
    tokens_open: int = 0
    tokens_formed: int = 0
    drops: Drops = field(default_factory=lambda: NO_DROPS)
    duplicates: int = 0


@dataclass(kw_only=True)
class JournalCounters:
    """Counted for metrics since this process opened the journal. Monotonic."""

    trajectories: int = 0  # Durable, accepted or dropped.
    resent: int = 0  # Answered as duplicates by their offset.
    commits: int = 0
    commit_seconds: float = 0.0
    payload_bytes: int = 0
    deleted_bytes: int = 0
    over_budget_trajectories: int = 0  # Admitted because the trainer waited for them.
    over_budget_bytes: int = 0
    no_space_waits: int = 0
    groups_timed_out: int = 0
    # Commits that took at most `COMMIT_BUCKETS[i]` seconds and longer than the one before.
    commit_buckets: list[int] = field(default_factory=lambda: [0] * len(COMMIT_BUCKETS))

    def committed(self, seconds: float) -> None:
        self.commits += 1
        self.commit_seconds += seconds
        at = bisect.bisect_left(COMMIT_BUCKETS, seconds)
        if at < len(self.commit_buckets):
            self.commit_buckets[at] += 1


@dataclass(frozen=True, kw_only=True)
class JournalGauges:
    """How full a journal is."""

    pending_bytes: int  # In memory, not durable yet.
    held_bytes: int  # Payload files.
    open_groups: int  # Groups that still miss a member.
    formed_groups: int  # Complete groups over the whole run.
    durable_step: int  # Steps that a durable checkpoint covers, as far as this journal was told.


@dataclass(kw_only=True, eq=False)
class _Submit:
    """One trajectory, or a rejection, on its way to the disk."""

    producer: str
    offset: int
    record: Record | None
    defect: Defect | None = None
    encoded: Encoded | None = None
    reason: str = ""
    message: str = ""
    future: Future[Receipt] = field(default_factory=lambda: Future[Receipt]())
    receipt: Receipt | None = None  # Once it is durable.

    @property
    def pending_bytes(self) -> int:
        return _ITEM_BYTES + (0 if self.encoded is None else self.encoded.payload_bytes)


@dataclass(kw_only=True, eq=False)
class _Resent:
    """Came again while the first one is on its way: answered once that one is durable."""

    first: _Submit
    future: Future[Receipt] = field(default_factory=lambda: Future[Receipt]())


@dataclass(kw_only=True, eq=False)
class _End:
    """The source ends here."""


_Item = _Submit | _Resent | _End


@dataclass(kw_only=True, eq=False)
class _Plan:
    """A micro-batch's plan on its way to the disk."""

    row: MicroBatchRow
    future: Future[None] = field(default_factory=lambda: Future[None]())


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """What a journal holds."""

    order: Order
    groups: list[Formed[Record]]
    point: RetentionPoint
    next_seq: int
    closed: list[tuple[int, str]]


@dataclass(kw_only=True)
class _Written:
    """What one batch did to the order. Shown to others once it is durable."""

    rows: list[tuple[Event, Verdict]] = field(default_factory=list)
    answers: list[tuple[_Submit, Receipt]] = field(default_factory=list)
    offsets: dict[str, int] = field(default_factory=dict)
    closed: list[tuple[int, Closed[Record]]] = field(default_factory=list)
    kept: list[Record] = field(default_factory=list)
    timed_out: int = 0


class DurableLog:
    """Implements `orchestrator.ingest.ports.RolloutLog`; `LiveSource` reads it."""

    def __init__(
        self,
        config: LiveConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        probe: Probe = no_probe,
    ) -> None:
        """Open or make the journal in `config.folder` and replay it.

        `clock`: monotonic seconds. `probe` hears of durable operations before they happen.

        Raises: JournalBusy, JournalMismatch, JournalDamaged, JournalError.
        """
        self._config = config
        self._clock = clock
        folder = config.folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise JournalError(f"{folder} cannot be made: {error.strerror}") from error
        self._lock = FolderLock(folder)
        try:
            self._open(probe)
        except BaseException:
            self._lock.release()
            raise
        self._thread = threading.Thread(target=self._serve, name="journal", daemon=True)
        self._thread.start()

    def _open(self, probe: Probe) -> None:
        config, folder = self._config, self._config.folder
        path = folder / _DATABASE
        segment_bytes = max(1, min(config.segment_bytes, config.budget_bytes // 8))
        self._segments = Segments(folder, segment_bytes=segment_bytes, probe=probe)
        self._database = Database(
            path, config.fingerprint, probe, may_be_new=not self._segments.sizes
        )
        try:
            sync_folder(folder)
            self._take_over(self._replay())
        except BaseException:
            self._database.close()
            raise

    def _take_over(self, opened: _Opened) -> None:
        """Go on from what the journal holds. Raises `JournalDamaged`."""
        self._producers = self._database.producers()
        self._micro_batches = self._database.micro_batches()
        self._order = opened.order
        self._next_seq = opened.next_seq
        # Shared with readers, under the condition.
        self._changed = threading.Condition()
        self._queue: deque[_Item] = deque()
        self._on_the_way: dict[tuple[str, int], _Submit] = {}
        self._plans: deque[_Plan] = deque()
        self._queued = dict(self._producers)
        self._pending_bytes = 0
        self._groups = opened.groups
        self._point = opened.point
        self._closed_groups = opened.closed
        self._retention: RetentionPoint | None = None
        self._ending = self._ended = opened.order.ended
        self._failure = opened.order.failure
        self._stalled = ""
        self._waiting = 0  # Readers that wait for a group.
        self._oldest_usable = 0  # Policy version; no step takes a group with older members.
        self._too_old: list[str] = []  # Open groups below it. Of the writer, once it runs.
        self._looked_below = 0  # The version that they were last looked for with.
        self._blocked = 0  # Callers that wait for the byte budget.
        self._closing = False
        self._abandoned = False
        self.counters = JournalCounters()
        self._totals = self._make_totals()
        # Time during which groups could have been completed, and when each was first seen in it.
        self._open_seconds = 0.0
        self._ticked_at = self._clock()
        self._first_seen = dict.fromkeys(self._order.formation.open_group_ids, 0.0)
        self._live = _live(self._order, self._groups)
        self._reserve = Reserve(self._config.folder)
        self._check_segments()
        self._sweep()

    def _replay(self) -> _Opened:
        """The order from the disk. Raises `JournalDamaged`."""
        policy = self._config.policy
        stored = self._database.snapshot()
        snapshot = Snapshot()
        if stored is not None:
            last, text = stored
            kept = {
                event.seq: event.record
                for event, _, _ in self._database.events(0, last)
                if event.record is not None
            }
            snapshot = Snapshot.from_json(text, lambda seq: kept[seq])
        order = Order(policy, snapshot.formation)
        order.ended = snapshot.ended
        groups = list(snapshot.groups)
        closed_groups: list[tuple[int, str]] = []
        next_seq = snapshot.seq + 1
        for event, outcome, reason in self._database.events(next_seq):
            if event.seq != next_seq:
                raise JournalDamaged(
                    f"{self._config.folder}: event {next_seq} is missing (the next one is"
                    f" {event.seq}): restore the folder from a copy, or start a new run"
                )
            verdict, closed = order.apply(event)
            found = "" if verdict.reason is None else verdict.reason.value
            if (verdict.outcome.value, found) != (outcome, reason):
                raise JournalDamaged(
                    f"{self._config.folder}: event {event.seq} was {outcome} {reason}, and is"
                    f" {verdict.outcome.value} {found} now: the journal was written by another"
                    " version; go on with that one, or start a new run"
                )
            next_seq += 1
            for group in closed:
                closed_groups.append((event.seq, group.group_id))
                if group.formed is not None:
                    groups.append(group.formed)
        return _Opened(
            order=order,
            groups=groups,
            point=snapshot.point,
            next_seq=next_seq,
            closed=closed_groups,
        )

    def _check_segments(self) -> None:
        """Every payload that is still needed lies whole in a file."""
        ends: dict[int, Record] = {}
        for record in _held(self._order, self._groups):
            last = ends.get(record.segment)
            if last is None or record.position > last.position:
                ends[record.segment] = record
        for number, record in ends.items():
            size = self._segments.sizes.get(number, -1)
            if size < record.position + record.payload_bytes:
                raise JournalDamaged(
                    f"{self._segments.path(number)} "
                    + ("is missing" if size < 0 else f"ends at byte {size}")
                    + f"; group {record.group_id!r} index {record.index} lies at byte"
                    f" {record.position} with {record.payload_bytes} bytes: restore the folder"
                    " from a copy, or start a new run"
                )

    # -- RolloutLog -------------------------------------------------------------------------------

    def open_producer(self, producer: str) -> int:
        """The first offset of this producer that is not durable. Raises `IngestClosed`."""
        with self._changed:
            self._check_open()
            return self._producers.get(producer, 0)

    def producers(self) -> frozenset[str]:
        """Names of every producer that has something durable."""
        with self._changed:
            return frozenset(self._producers)

    def append(
        self,
        producer: str,
        offset: int,
        trajectory: Trajectory,
        *,
        cancelled: Callable[[], bool],
    ) -> Future[Receipt]:
        """Queue one trajectory for the durable order; its receipt comes once it is durable.

        Blocks while there is no room for it (in memory, or in the byte budget). When `cancelled`
        says that the caller is gone, nothing is queued and the future is cancelled. The
        trajectory's arrays must not be changed before the receipt.

        Receipts are given on the writer thread: callbacks must not block. An offset below the
        producer's next one is answered as a duplicate; what came of the first one is told while
        that is on its way, and `verdict_known` is False afterwards.

        Raises: IngestClosed, OffsetGap.
        """
        defect = find_defect(trajectory, self._config.limits, allow_empty=True)
        if defect is None and trajectory.policy_version > _BIGGEST:
            defect = Defect(
                reason=DropReason.MALFORMED,
                message=f"group {trajectory.group_id!r} index {trajectory.index}: policy_version"
                f" is {trajectory.policy_version}, which is no number of updates",
            )
        encoded = encode(trajectory)
        item = _Submit(
            producer=producer,
            offset=offset,
            record=_record(trajectory, encoded),
            defect=defect,
            encoded=encoded if defect is None else None,
        )
        return self._enqueue(item, cancelled)

    def reject(self, producer: str, offset: int, reason: str, message: str) -> Future[Receipt]:
        """Record that what came at `offset` cannot be a trajectory: counted, and the offset moves on.

        The receipt says so once that is durable. Raises `IngestClosed`, `OffsetGap`.
        """
        item = _Submit(
            producer=producer, offset=offset, record=None, reason=reason, message=message
        )
        return self._enqueue(item, _never)

    def cancellable_groups(self, after: int) -> tuple[int, tuple[str, ...]]:
        """Groups that take no more members since the cursor `after`, and a new cursor.

        The cursor is a place in the durable order, so it outlives this process; the first call
        passes 0. What was closed before the last durable checkpoint may be left out after a
        restart.
        """
        with self._changed:
            # The cursor is one beyond a place, so that 0 is before everything.
            start = bisect.bisect_left(self._closed_groups, (after, ""))
            found = self._closed_groups[start:]
        if not found:
            return after, ()
        return found[-1][0] + 1, tuple(group_id for _, group_id in found)

    def _enqueue(self, item: _Submit, cancelled: Callable[[], bool]) -> Future[Receipt]:
        size = 0 if item.encoded is None else item.encoded.payload_bytes
        with self._changed:
            while True:
                self._check_open()
                again = self._place(item)
                if again is not None:
                    return again
                if self._has_room(item, size):
                    break
                if cancelled():
                    item.future.cancel()
                    return item.future
                self._wait_for_room(size)
            if size and not self._within_budget(size):
                self.counters.over_budget_trajectories += 1
                self.counters.over_budget_bytes += size
                if self.counters.over_budget_trajectories == 1:
                    log.warning(
                        "the journal's budget of %d bytes is full and the trainer waits for groups:"
                        " admitting beyond it. Take checkpoints more often (a durable checkpoint"
                        " frees what it covers), or raise the budget",
                        self._config.budget_bytes,
                    )
            item.future.set_running_or_notify_cancel()  # From here on it will be durable.
            self._queued[item.producer] = item.offset + 1
            self._on_the_way[item.producer, item.offset] = item
            self._pending_bytes += item.pending_bytes
            self._queue.append(item)
            self._changed.notify_all()
        return item.future

    def _place(self, item: _Submit) -> Future[Receipt] | None:
        """The answer to an offset that is not the next one; None: it is. Raises `OffsetGap`."""
        expected = self._queued.get(item.producer, 0)
        if item.offset == expected:
            return None
        if item.offset > expected:
            raise OffsetGap(
                f"producer {item.producer!r} sent offset {item.offset}, and {expected} is next:"
                " send what lies between, or open the stream again and go on from the offset that"
                " it names"
            )
        self.counters.resent += 1
        first = self._on_the_way.get((item.producer, item.offset))
        if first is None:
            # Durable long ago: what came of it is not remembered by offset.
            item.future.set_result(
                Receipt(offset=item.offset, accepted=True, duplicate=True, verdict_known=False)
            )
            return item.future
        resent = _Resent(first=first)
        resent.future.set_running_or_notify_cancel()
        self._queue.append(resent)
        self._changed.notify_all()
        return resent.future

    def _has_room(self, item: _Submit, size: int) -> bool:
        if self._pending_bytes and (
            self._pending_bytes + item.pending_bytes > self._config.pending_bytes
        ):
            return False
        return not size or self._waiting > 0 or self._within_budget(size)

    def _within_budget(self, size: int) -> bool:
        held = self._segments.total_bytes + self._pending_bytes
        return not held or held + size <= self._config.budget_bytes

    def _wait_for_room(self, size: int) -> None:
        over = not self._within_budget(size)
        self._blocked += over
        self._changed.wait(_POLL_SECONDS)
        self._blocked -= over

    def _check_open(self) -> None:
        if self._failure:
            raise IngestClosed(f"the run cannot go on: {self._failure}")
        if self._closing:
            raise IngestClosed("the orchestrator is stopping; send again when it is back")
        if self._ending:
            raise IngestClosed("the run takes no more rollouts: its source has ended")

    # -- for the source of steps ------------------------------------------------------------------

    @property
    def point(self) -> RetentionPoint:
        """Where the oldest rollout batch that can be asked for begins."""
        with self._changed:
            return self._point

    @property
    def first_planned_step(self) -> int | None:
        """The oldest step of which a micro-batch's plan is kept; None: of none."""
        with self._changed:
            return min((step for step, _ in self._micro_batches), default=None)

    def group(self, position: int) -> Formed[Record] | None:
        """The complete group at `position` in the durable order, if it is in."""
        with self._changed:
            return self._group(position)

    def _group(self, position: int) -> Formed[Record] | None:
        at = position - self._point.position
        if at < 0:
            raise JournalError(f"group {position} was let go: a durable checkpoint covers it")
        return self._groups[at] if at < len(self._groups) else None

    def await_group(self, position: int, wanted: Callable[[], bool]) -> Formed[Record] | None:
        """Wait for the complete group at `position`. None: it never comes, or is not `wanted`.

        While somebody waits here, trajectories are admitted beyond the byte budget.

        Raises: JournalError when the log failed or was closed.
        """
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            try:
                while True:
                    group = self._group(position)
                    if group is not None:
                        return group
                    if self._failure:
                        raise JournalError(self._failure)
                    if self._ended or not wanted():
                        return None
                    if self._closing:
                        raise JournalError("the journal was closed while a step waited for groups")
                    self._changed.wait(_POLL_SECONDS)
            finally:
                self._waiting -= 1

    def drop_older_than(self, version: int) -> None:
        """No step takes members of an older policy version any more: open groups that have one are
        dropped, durably, so that samplers stop working on them."""
        with self._changed:
            if version > self._oldest_usable:
                self._oldest_usable = version
                self._changed.notify_all()

    def waiting_groups(self, position: int) -> tuple[Formed[Record], ...]:
        """Complete groups from `position` on."""
        with self._changed:
            return tuple(self._groups[max(0, position - self._point.position) :])

    def standing(self, position: int) -> tuple[Totals, int]:
        """The totals, and the tokens of complete groups from `position` on, at one moment."""
        with self._changed:
            totals = self._totals
            waiting = self._groups[max(0, position - self._point.position) :]
        return totals, sum(group.total_tokens for group in waiting)

    def load(self, record: Record) -> Trajectory:
        """The trajectory of a record, without its advantage.

        Raises: JournalDamaged, JournalError.
        """
        where = str(self._segments.path(record.segment))
        try:
            return decode(self._segments.read(record), record, where)
        except OSError as error:
            raise JournalError(f"{where} cannot be read: {error.strerror}") from error

    def commit_micro_batch(self, step: int, index: int, digest: str, groups: Sequence[str]) -> None:
        """Make a micro-batch's plan durable, or hold it to the one that is.

        Must return before the micro-batch is first sent.

        Raises: JournalError when it differs from what was journaled, or cannot be journaled.
        """
        plan = _Plan(row=MicroBatchRow(step=step, index=index, digest=digest, groups=tuple(groups)))
        with self._changed:
            known = self._micro_batches.get((step, index))
            if known is None:
                if self._failure:
                    raise JournalError(self._failure)
                if self._closing:
                    raise JournalError("the journal was closed before a micro-batch was sent")
                self._plans.append(plan)
                self._changed.notify_all()
        if known is None:
            plan.future.result()
        elif known != digest:
            raise JournalError(
                f"micro-batch {step}/{index} was journaled with digest {known}, and packs to"
                f" {digest} now: it was not sent. The same rollouts must give the same bytes: is"
                " this another version of the program? Go on with the one that began the run"
            )

    def totals(self) -> Totals:
        """Tokens of everything durable so far."""
        with self._changed:
            return self._totals

    def retain_from(self, point: RetentionPoint) -> None:
        """What lies before `point` will not be asked for again: delete it, soon."""
        with self._changed:
            newest = self._point if self._retention is None else self._retention
            if point.durable_step > newest.durable_step:
                self._retention = point
                self._changed.notify_all()

    def gauges(self) -> JournalGauges:
        """How full the journal is now."""
        with self._changed:
            return JournalGauges(
                pending_bytes=self._pending_bytes,
                held_bytes=self._segments.total_bytes,
                open_groups=len(self._first_seen),
                formed_groups=self._point.position + len(self._groups),
                durable_step=self._point.durable_step,
            )

    @property
    def held_bytes(self) -> int:
        """Bytes of all payload files."""
        return self._segments.total_bytes

    @property
    def stalled(self) -> str:
        """Why nothing can be written right now (a full disk); empty: it can."""
        return self._stalled

    @property
    def failure(self) -> str:
        """Why the run cannot go on; empty: it can."""
        return self._failure

    # -- ends -------------------------------------------------------------------------------------

    def end_source(self) -> None:
        """Nothing comes any more, durably: open groups are dropped. Returns at once."""
        with self._changed:
            if not (self._ending or self._closing or self._failure):
                self._ending = True
                self._queue.append(_End())
                self._changed.notify_all()

    def close(self, *, drain_s: float = 10.0) -> None:
        """Take nothing more, make what was taken durable (within `drain_s`), let the folder go."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(drain_s)
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()
        self._thread.join(5.0)
        if self._thread.is_alive():
            log.error("the journal's writer is stuck in a disk operation; its folder stays locked")
            return
        self._refuse_rest("the orchestrator stopped before this was durable; send it again")
        self._database.close()
        self._segments.close()
        self._lock.release()

    def _refuse_rest(self, why: str) -> None:
        with self._changed:
            items, plans = list(self._queue), list(self._plans)
            self._queue.clear()
            self._plans.clear()
        _refuse(items, plans, why)

    # -- the writer thread ------------------------------------------------------------------------

    def _serve(self) -> None:
        items: list[_Item] = []
        plans: list[_Plan] = []
        try:
            while True:
                with self._changed:
                    while not self._work_is_there():
                        if self._closing:
                            return
                        self._changed.wait(_TICK_SECONDS)
                        self._tick()
                    items, plans = self._take_batch()
                self._commit(items, plans)
                items, plans = [], []
        except BaseException as error:
            why = str(error) if isinstance(error, JournalError) else f"{error!r} in the journal"
            log.critical("the journal has failed: %s", why, exc_info=error)
            with self._changed:
                self._failure = self._failure or why
                self._changed.notify_all()
            _refuse(items, plans, f"the run cannot go on: {why}")
            self._refuse_rest(f"the run cannot go on: {why}")

    def _work_is_there(self) -> bool:
        hopeless = not self._closing and self._hopeless()
        return bool(self._queue or self._plans or self._retention or hopeless)

    def _take_batch(self) -> tuple[list[_Item], list[_Plan]]:
        plans = list(self._plans)
        self._plans.clear()
        items: list[_Item] = []
        size = 0
        while self._queue and len(items) < _BATCH_ITEMS and size < _BATCH_BYTES:
            item = self._queue.popleft()
            size += item.pending_bytes if isinstance(item, _Submit) else 0
            items.append(item)
        return items, plans

    def _commit(self, items: list[_Item], plans: list[_Plan]) -> None:
        """Make the batch durable, however long the disk is full; give receipts."""
        pause_s = 0.05
        while True:
            self._tick()
            try:
                self._retain()
                started = time.perf_counter()
                written = self._write(items, plans)
                break
            except NoSpace as error:
                self._undo()
                self._without_trajectories(plans)
                if not self._stall(str(error), pause_s):
                    _refuse(items, plans, f"the disk is full ({error}) and the process stops")
                    return
                pause_s = min(2.0, pause_s * 2)
                with self._changed:
                    plans.extend(self._plans)
                    self._plans.clear()
        self.counters.committed(time.perf_counter() - started)
        if self._stalled:
            log.warning("the journal can be written again")
            self._stalled = ""
        self._settle(items, plans, written)
        self._reserve.hold()

    def _without_trajectories(self, plans: list[_Plan]) -> None:
        """On a full disk: let the trainer go on and what a checkpoint covers go, from the reserve.

        Plans that could be written leave the list.
        """
        self._reserve.release()
        try:
            self._retain()
            if plans:
                self._settle([], plans, self._write([], plans))
                plans.clear()
        except NoSpace:
            self._undo()

    def _settle(self, items: list[_Item], plans: list[_Plan], written: _Written) -> None:
        """What was written is durable: show it, and tell who waits for it."""
        self._publish(items, plans, written)
        self._sweep()
        for submitted, receipt in written.answers:
            submitted.receipt = receipt
            submitted.future.set_result(receipt)
        for item in items:
            if isinstance(item, _Resent) and item.first.receipt is not None:
                item.future.set_result(replace(item.first.receipt, duplicate=True))
        for plan in plans:
            plan.future.set_result(None)

    def _stall(self, why: str, pause_s: float) -> bool:
        """Wait for room. False: the process stops."""
        self.counters.no_space_waits += 1
        with self._changed:
            if not self._stalled:
                log.error(
                    "the journal cannot be written: %s. Nothing is lost and nothing is acknowledged"
                    " until there is room in %s",
                    why,
                    self._config.folder,
                )
            self._stalled = why
            self._changed.notify_all()
            if self._abandoned:
                return False
            self._changed.wait(pause_s)
            return not self._abandoned

    def _write(self, items: list[_Item], plans: list[_Plan]) -> _Written:
        """Decide and write one batch. Raises `NoSpace` (call `_undo`), `JournalError`."""
        written = _Written()
        self._segments.begin()
        for group_id, reason in self._hopeless().items():
            event = Event(
                seq=self._next_seq + len(written.rows),
                kind=Kind.GROUP_DROPPED,
                group_id=group_id,
                reason=reason.value,
            )
            written.timed_out += reason is DropReason.INCOMPLETE_GROUP
            self._apply(event, written)
        for item in items:
            seq = self._next_seq + len(written.rows)
            match item:
                case _Submit():
                    self._apply_submitted(seq, item, written)
                case _Resent():
                    pass  # Answered with the first one, which is in this batch or durable.
                case _End():
                    self._apply(Event(seq=seq, kind=Kind.SOURCE_ENDED), written)
        if not (written.rows or plans):
            return written
        try:
            self._segments.flush()
        except OSError as error:
            if no_space(error):
                raise NoSpace(str(error)) from error
            raise JournalError(
                f"{self._config.folder} cannot be written ({error}): check the disk. What was"
                " acknowledged is safe; start again to go on"
            ) from error
        self._database.commit(written.rows, written.offsets, [plan.row for plan in plans])
        self._segments.commit()
        return written

    def _apply(self, event: Event, written: _Written) -> Verdict:
        verdict, closed = self._order.apply(event)
        written.rows.append((event, verdict))
        written.closed.extend((event.seq, group) for group in closed)
        return verdict

    def _apply_submitted(self, seq: int, item: _Submit, written: _Written) -> None:
        record = item.record
        event = Event(
            seq=seq,
            kind=Kind.REJECTED if record is None else Kind.TRAJECTORY,
            producer=item.producer,
            offset=item.offset,
            record=None if record is None else _placed(record, seq, item, self._segments.place()),
            defect=item.defect,
            reason=item.reason,
            message=item.message,
        )
        verdict = self._apply(event, written)
        if verdict.outcome in (Outcome.ACCEPTED, Outcome.COMPLETED):
            if item.encoded is not None and event.record is not None:
                self._segments.stage(item.encoded)
                written.kept.append(event.record)
        elif record is not None:
            # Its bytes are not needed: nobody will ask for them.
            row = replace(event, record=replace(record, seq=seq))
            written.rows[-1] = (row, verdict)
        written.offsets[item.producer] = item.offset + 1
        written.answers.append((item, _receipt(item, verdict)))

    def _undo(self) -> None:
        """Nothing of the batch happened: what is not durable is forgotten."""
        self._segments.rollback()
        self._order = self._replay().order

    def _publish(self, items: list[_Item], plans: list[_Plan], written: _Written) -> None:
        """The batch is durable: show it."""
        self._next_seq += len(written.rows)
        for record in written.kept:
            self._live[record.segment] = self._live.get(record.segment, 0) + 1
        kept = {record.seq for record in written.kept}
        for seq, group in written.closed:
            for record in group.released:
                if record.seq != seq or record.seq in kept:
                    self._live[record.segment] -= 1
        totals = self._make_totals()
        with self._changed:
            self._producers.update(written.offsets)
            for item in items:
                if isinstance(item, _Submit):
                    self._pending_bytes -= item.pending_bytes
                    del self._on_the_way[item.producer, item.offset]
            for seq, group in written.closed:
                self._closed_groups.append((seq, group.group_id))
                if group.formed is not None:
                    self._groups.append(group.formed)
            excess = len(self._closed_groups) - self._config.policy.remembered_groups
            if excess > 0:
                del self._closed_groups[:excess]
            for plan in plans:
                self._micro_batches[plan.row.step, plan.row.index] = plan.row.digest
            self._totals = totals
            self._ended = self._order.ended
            if self._order.failure and not self._failure:
                log.error("the run cannot go on: %s", self._order.failure)
                self._failure = self._order.failure
            self._note_open_groups(written)
            self._changed.notify_all()
        counters = self.counters
        counters.trajectories += sum(isinstance(item, _Submit) for item in items)
        counters.payload_bytes += sum(record.payload_bytes for record in written.kept)
        counters.groups_timed_out += written.timed_out
        if written.timed_out and counters.groups_timed_out == written.timed_out:
            log.warning(
                "%d groups were not complete within %g s and are dropped (later ones are counted)",
                written.timed_out,
                self._config.group_timeout_s,
            )

    def _make_totals(self) -> Totals:
        formation = self._order.formation
        return Totals(
            tokens_in=formation.tokens_in,
            tokens_open=formation.tokens_open,
            tokens_formed=formation.tokens_formed,
            drops=formation.drops,
            duplicates=formation.duplicates,
        )

    # -- time -------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Groups grow older only while their members could have come in."""
        now = self._clock()
        if not (self._blocked or self._stalled):
            self._open_seconds += min(max(0.0, now - self._ticked_at), _LONGEST_TICK_SECONDS)
        self._ticked_at = now

    def _note_open_groups(self, written: _Written) -> None:
        oldest, formation = self._looked_below, self._order.formation
        self._too_old = [group_id for group_id in self._too_old if formation.is_open(group_id)]
        self._too_old.extend(
            record.group_id
            for record in written.kept
            if record.policy_version < oldest and formation.is_open(record.group_id)
        )
        for event, _ in written.rows:
            record = event.record
            if record is not None and self._order.formation.is_open(record.group_id):
                self._first_seen.setdefault(record.group_id, self._open_seconds)
        for _, group in written.closed:
            self._first_seen.pop(group.group_id, None)

    def _hopeless(self) -> dict[str, DropReason]:
        """Open groups that are to be dropped: their time is up, or no step takes them any more."""
        limit = self._open_seconds - self._config.group_timeout_s
        hopeless: dict[str, DropReason] = {}
        for group_id, since in self._first_seen.items():  # Oldest first.
            if since > limit:
                break
            hopeless[group_id] = DropReason.INCOMPLETE_GROUP
        if self._looked_below != self._oldest_usable:
            self._looked_below = self._oldest_usable
            self._too_old = list(self._order.formation.open_below(self._oldest_usable))
        for group_id in self._too_old:
            hopeless.setdefault(group_id, DropReason.STALE)
        return hopeless

    # -- retention --------------------------------------------------------------------------------

    def _retain(self) -> None:
        """Delete what lies before the retention point. Raises `NoSpace`, `JournalError`."""
        with self._changed:
            point = self._retention
            if point is None:
                return
            gone = point.position - self._point.position
            groups = tuple(self._groups[gone:])
        snapshot = Snapshot(
            seq=self._next_seq - 1,
            ended=self._order.ended,
            formation=self._order.formation.state(),
            groups=groups,
            point=point,
        )
        self._database.keep_only(
            snapshot.to_json(),
            seq=snapshot.seq,
            needed=snapshot.records(),
            from_step=point.durable_step,
        )
        with self._changed:
            for group in self._groups[:gone]:
                for record in group.members:
                    self._live[record.segment] -= 1
            del self._groups[:gone]
            self._point = point
            self._micro_batches = {
                key: digest
                for key, digest in self._micro_batches.items()
                if key[0] >= point.durable_step
            }
        self._sweep()
        with self._changed:
            if self._retention is point:
                self._retention = None
            self._changed.notify_all()

    def _sweep(self) -> None:
        """Delete payload files that no row needs any more."""
        dead = [number for number in self._segments.sizes if not self._live.get(number)]
        for number in dead:
            try:
                self.counters.deleted_bytes += self._segments.delete(number)
            except OSError as error:
                log.warning("%s cannot be deleted: %s", self._segments.path(number), error)
            self._live.pop(number, None)
        if dead:
            with self._changed:
                self._changed.notify_all()


def _never() -> bool:
    return False


def _refuse(items: list[_Item], plans: list[_Plan], why: str) -> None:
    for item in items:
        if not isinstance(item, _End) and not item.future.done():
            item.future.set_exception(IngestClosed(why))
    for plan in plans:
        if not plan.future.done():
            plan.future.set_exception(JournalError(why))


def _record(trajectory: Trajectory, encoded: Encoded) -> Record:
    mask = trajectory.loss_mask
    completion = int(trajectory.completion_tokens.shape[0])
    prompt = int(trajectory.prompt_tokens.shape[0])
    if mask is None:
        first = prompt == 0 and completion > 0
    else:
        first = bool(mask.shape[0]) and bool(mask[0])
    return Record(
        seq=-1,
        group_id=trajectory.group_id,
        index=trajectory.index,
        reward=float(np.float64(trajectory.reward)),
        policy_version=min(trajectory.policy_version, _BIGGEST),
        prompt_tokens=prompt,
        completion_tokens=completion,
        trainable_tokens=trajectory.trainable_tokens,
        first_token_masked_in=first,
        digest=encoded.digest,
    )


def _placed(record: Record, seq: int, item: _Submit, place: Place) -> Record:
    if item.encoded is None:
        return replace(record, seq=seq)
    return replace(
        record,
        seq=seq,
        segment=place.segment,
        position=place.position,
        payload_bytes=item.encoded.payload_bytes,
    )


def _receipt(item: _Submit, verdict: Verdict) -> Receipt:
    outcome = verdict.outcome
    if outcome is Outcome.CONFLICT:
        reason = "conflict"
    elif item.reason:
        reason = item.reason
    else:
        reason = "" if verdict.reason is None else verdict.reason.value
    return Receipt(
        offset=item.offset,
        accepted=outcome in (Outcome.ACCEPTED, Outcome.COMPLETED, Outcome.DUPLICATE),
        duplicate=outcome is Outcome.DUPLICATE,
        reason=reason,
        message=verdict.message,
    )


def _held(order: Order, groups: Sequence[Formed[Record]]) -> list[Record]:
    """Records whose payloads may still be asked for."""
    held = [record for group in groups for record in group.members]
    for group in order.formation.state().open_groups:
        held.extend(group.members)
    return held


def _live(order: Order, groups: Sequence[Formed[Record]]) -> dict[int, int]:
    """Of each payload file, the records that need it."""
    live: dict[int, int] = {}
    for record in _held(order, groups):
        live[record.segment] = live.get(record.segment, 0) + 1
    return live
