"""An in-memory `RolloutLog`: the real one's promises, and handles to hold it up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from orchestrator.groups import GroupAssembler, GroupPolicy, Outcome
from orchestrator.ingest.ports import IngestClosed, OffsetGap, Receipt
from orchestrator.trajectory import Trajectory, TrajectoryLimits

LIMITS = TrajectoryLimits(
    tokens_per_row=4096, vocab_size=100_000, required_fields=("sampling_logprobs",)
)


class FakeLog:
    """Everything is "durable" at once, unless `hold` says that commits wait."""

    def __init__(self, *, group_size: int = 2, extra: int = 0, budget: int = 1 << 40) -> None:
        self._cond = threading.Condition()
        self.assembler = GroupAssembler(GroupPolicy(group_size=group_size, extra=extra), LIMITS)
        self.order: list[tuple[str, int]] = []  # (producer, offset), durable order.
        self.taken: list[Trajectory] = []
        self.rejected: list[tuple[str, int, str]] = []
        self.blocked = 0  # Appends that wait for room now.
        self.most_queued = 0
        self._next: dict[str, int] = {}
        self._budget = budget
        self._held = False
        self._waiting: list[tuple[Future[Receipt], Receipt]] = []
        self._closed = False
        self._finished: list[str] = []

    # -- handles ----------------------------------------------------------------------------------

    def hold(self) -> None:
        """From now on nothing becomes durable until `release`."""
        with self._cond:
            self._held = True

    def release(self, count: int | None = None) -> None:
        """Let the oldest `count` commit; None: all, and hold no more."""
        with self._cond:
            if count is None:
                self._held = False
            now, self._waiting = self._waiting[:count], self._waiting[len(self._waiting[:count]) :]
        for future, receipt in now:
            future.set_result(receipt)

    def fail(self, error: Exception) -> None:
        with self._cond:
            waiting, self._waiting = self._waiting, []
        for future, _ in waiting:
            future.set_exception(error)

    def raise_budget(self, budget: int) -> None:
        with self._cond:
            self._budget = budget
            self._cond.notify_all()

    def close(self) -> None:
        with self._cond:
            self._closed = True
            self._cond.notify_all()
        self.fail(IngestClosed("closed"))

    def finish_group(self, group_id: str) -> None:
        with self._cond:
            self._finished.append(group_id)

    @property
    def queued(self) -> int:
        with self._cond:
            return len(self._waiting)

    def wait_for(self, true: Callable[[FakeLog], bool], timeout_s: float = 10.0) -> None:
        """For tests: until something has happened in the log."""
        with self._cond:
            assert self._cond.wait_for(lambda: true(self), timeout_s), "it did not happen in time"

    # -- RolloutLog ---------------------------------------------------------------------------

    def open_producer(self, producer: str) -> int:
        with self._cond:
            if self._closed:
                raise IngestClosed("closed")
            return self._next.get(producer, 0)

    def producers(self) -> frozenset[str]:
        with self._cond:
            return frozenset(self._next)

    def append(
        self,
        producer: str,
        offset: int,
        trajectory: Trajectory,
        *,
        cancelled: Callable[[], bool],
    ) -> Future[Receipt]:
        with self._cond:
            future: Future[Receipt] = Future()
            self.blocked += 1
            self._cond.notify_all()
            while len(self.taken) >= self._budget and not self._closed:
                if cancelled():
                    self.blocked -= 1
                    future.cancel()
                    return future
                self._cond.wait(0.05)
            self.blocked -= 1
            if not self._place(producer, offset):
                return self._done(future, Receipt(offset=offset, accepted=True, duplicate=True))
            self.taken.append(trajectory)
            self.order.append((producer, offset))
            verdict = self.assembler.submit(trajectory)
            if verdict.outcome is Outcome.COMPLETED or verdict.group_dropped:
                self._finished.append(trajectory.group_id)
            accepted = verdict.outcome in (
                Outcome.ACCEPTED,
                Outcome.COMPLETED,
                Outcome.DUPLICATE,
            )
            reason = "" if verdict.reason is None else verdict.reason.value
            return self._done(
                future,
                Receipt(
                    offset=offset,
                    accepted=accepted,
                    duplicate=verdict.outcome is Outcome.DUPLICATE,
                    reason="conflict" if verdict.outcome is Outcome.CONFLICT else reason,
                    message=verdict.message,
                ),
            )

    def reject(self, producer: str, offset: int, reason: str, message: str) -> Future[Receipt]:
        with self._cond:
            future: Future[Receipt] = Future()
            if not self._place(producer, offset):
                return self._done(future, Receipt(offset=offset, accepted=False, duplicate=True))
            self.rejected.append((producer, offset, reason))
            return self._done(
                future, Receipt(offset=offset, accepted=False, reason=reason, message=message)
            )

    def cancellable_groups(self, after: int) -> tuple[int, tuple[str, ...]]:
        with self._cond:
            return len(self._finished), tuple(self._finished[after:])

    def _place(self, producer: str, offset: int) -> bool:
        if self._closed:
            raise IngestClosed("closed")
        wanted = self._next.get(producer, 0)
        if offset > wanted:
            raise OffsetGap(f"offset {offset} of producer {producer!r}; the next one is {wanted}")
        if offset == wanted:
            self._next[producer] = wanted + 1
        return offset == wanted

    def _done(self, future: Future[Receipt], receipt: Receipt) -> Future[Receipt]:
        self._cond.notify_all()
        if self._held:
            self._waiting.append((future, receipt))
            self.most_queued = max(self.most_queued, len(self._waiting))
        else:
            future.set_result(receipt)
        return future
