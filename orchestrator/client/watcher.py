"""What samplers listen to: the policy version, and groups whose requests may be cancelled."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import grpc

from orchestrator.client.errors import ProducerRefused, ProducerUnreachable
from prestage.rollout.refusals import RETRIED, RolloutReason, RolloutRefusal, classify_rollout
from prestage.rollout.v1 import rollout_pb2 as pb
from prestage.rollout.v1.rollout_pb2_grpc import RolloutIngestStub

_PAUSE_S: Final = 0.25


class Cancellable(Protocol):
    """A call that another thread may end."""

    def cancel(self) -> bool | None: ...


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate:
    """What changed. Between two of them more may have happened: this is the newest."""

    policy_version: int  # Updates applied to the weights that are offered for sampling.
    cancel_groups: tuple[str, ...]  # Complete, dropped or too old: stop sampling for them.
    finished: bool  # The run has ended; the last update.


class PolicyWatcher:
    """An iterator of `PolicyUpdate`s; connects again by itself, and misses no finished group.

    For one reading thread; `close` may come from any.
    """

    def __init__(
        self,
        stub: RolloutIngestStub,
        *,
        run_id: str,
        metadata: Sequence[tuple[str, str]] = (),
        unreachable_s: float = 600.0,
    ) -> None:
        self._stub = stub
        self._run_id = run_id
        self._metadata = tuple(metadata)
        self._unreachable_s = unreachable_s
        self._closed = threading.Event()
        self._call: Cancellable | None = None
        self._updates = self._run()

    def __iter__(self) -> Iterator[PolicyUpdate]:
        return self

    def __next__(self) -> PolicyUpdate:
        """The next update; waits for it. Raises `ProducerRefused`, `ProducerUnreachable`."""
        return next(self._updates)

    def close(self) -> None:
        """End the iteration."""
        self._closed.set()
        if self._call is not None:
            self._call.cancel()

    def _run(self) -> Iterator[PolicyUpdate]:
        after, heard_s = 0, time.monotonic()
        while not self._closed.is_set():
            call = self._stub.WatchPolicy(
                pb.WatchPolicyRequest(run_id=self._run_id, after=after), metadata=self._metadata
            )
            self._call = call
            if self._closed.is_set():  # Between the two lines above.
                call.cancel()
            try:
                for answer in call:
                    after, heard_s = answer.cursor, time.monotonic()
                    yield PolicyUpdate(
                        policy_version=answer.policy_version,
                        cancel_groups=tuple(answer.cancel_groups),
                        finished=answer.finished,
                    )
                    heard_s = time.monotonic()
                    if answer.finished:
                        return
            except grpc.RpcError as error:
                self._judge(error, heard_s)
            self._closed.wait(_PAUSE_S)

    def _judge(self, error: grpc.RpcError, heard_s: float) -> None:
        if self._closed.is_set():
            return
        found = classify_rollout(error)
        if isinstance(found, RolloutRefusal) and found.reason not in (
            *RETRIED,
            RolloutReason.RUN_ENDED,
        ):
            raise ProducerRefused(f"watching run {self._run_id!r}: {found.message}")
        if time.monotonic() - heard_s > self._unreachable_s:
            raise ProducerUnreachable(
                f"watching run {self._run_id!r}: no connection for {self._unreachable_s:g} s"
                f" ({found})"
            )
