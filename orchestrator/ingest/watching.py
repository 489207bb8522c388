"""WatchPolicy: each watcher is told the newest state, and every finished group once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

import grpc

from orchestrator.ingest.board import PolicyBoard
from orchestrator.ingest.counters import IngestCounters
from orchestrator.ingest.limits import IngestLimits
from orchestrator.ingest.ports import RolloutLog
from prestage.rollout.refusals import RolloutReason, RolloutRefusal, abort_rollout
from prestage.rollout.v1 import rollout_pb2 as pb

_GROUPS_PER_ANSWER: Final = 4096


class Watchers:
    """All WatchPolicy streams."""

    def __init__(
        self,
        rollout_log: RolloutLog,
        *,
        run_id: str,
        board: PolicyBoard,
        limits: IngestLimits,
        counters: IngestCounters,
    ) -> None:
        self._log = rollout_log
        self._run_id = run_id
        self._board = board
        self._limits = limits
        self._counters = counters
        self._lock = threading.Lock()
        self._open = 0
        self._closing: RolloutRefusal | None = None

    def serve(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """The gRPC handler."""
        refusal, after = self._admit(data)
        if refusal is not None:
            self._counters.refused(refusal.reason)
            abort_rollout(context, refusal)
        self._counters.watchers(1)
        gone = threading.Event()

        def leave() -> None:
            gone.set()
            self._board.nudge()

        try:
            if context.add_callback(leave):
                yield from self._answers(after, gone)
        finally:
            self._counters.watchers(-1)
            with self._lock:
                self._open -= 1
        if self._closing is not None and not gone.is_set() and not self._board.state.finished:
            self._counters.refused(self._closing.reason)
            abort_rollout(context, self._closing)

    def close(self, refusal: RolloutRefusal) -> None:
        """End every watcher: with `finished` when the run has ended, else with `refusal`."""
        with self._lock:
            self._closing = refusal
        self._board.nudge()

    def _admit(self, data: bytes) -> tuple[RolloutRefusal | None, int]:
        try:
            request = pb.WatchPolicyRequest.FromString(data)
        except ValueError as error:
            what = f"not a WatchPolicyRequest: {error}"
            return RolloutRefusal(reason=RolloutReason.INVALID_REQUEST, message=what), 0
        if request.run_id != self._run_id:
            what = f"run_id is {request.run_id[:64]!r}; this orchestrator serves {self._run_id!r}"
            return RolloutRefusal(reason=RolloutReason.WRONG_RUN, message=what), 0
        with self._lock:
            if self._closing is not None and not self._board.state.finished:
                return self._closing, 0
            if self._open >= self._limits.max_watchers:
                what = f"{self._open} watchers are connected, which is the limit; share one"
                return RolloutRefusal(reason=RolloutReason.TOO_MANY_WATCHERS, message=what), 0
            self._open += 1
        return None, request.after

    def _answers(self, after: int, gone: threading.Event) -> Iterator[bytes]:
        def over() -> bool:
            return gone.is_set() or self._closing is not None

        told = -1
        while not gone.is_set():
            # The state is read when there is room to send it: a slow watcher skips what was between.
            state = self._board.wait(told, self._limits.watch_poll_s, over)
            cursor, groups = self._log.cancellable_groups(after)
            if state.change != told or groups or cursor != after:
                for start in range(0, max(1, len(groups)), _GROUPS_PER_ANSWER):
                    some = groups[start : start + _GROUPS_PER_ANSWER]
                    last = start + len(some) == len(groups)
                    yield pb.WatchPolicyResponse(
                        policy_version=state.policy_version,
                        cancel_groups=some,
                        finished=state.finished and last,
                        # Between two parts nothing is lost: a group told twice is told twice.
                        cursor=cursor if last else after,
                    ).SerializeToString()
            told, after = state.change, cursor
            # A run that has ended since `state` was read is told in one more answer.
            if state.finished or (self._closing is not None and not self._board.state.finished):
                return
