"""Reads what the worker knows, across lost connections and restarts of the worker.

Only reads: asking again is harmless. What changes the worker is the runner's, and is never repeated
here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

import grpc

from orchestrator.ports import Clock, StepFacts
from orchestrator.runner import RunFailed
from orchestrator.trainer_client import TrainerClient
from prestage.protocol import Reason
from prestage.wire.errors import Refusal, classify

log = logging.getLogger("prestage.orchestrator")

T = TypeVar("T")
PATIENCE_S: Final = 120.0
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 2.0
_LATER: Final = (Reason.STARTING, Reason.DRAINING)


class WorkerReplaced(Exception):
    """Another worker process answers than the one that trained: it holds what it restores."""


def ask(read: Callable[[], T], clock: Clock, *, patience_s: float = PATIENCE_S) -> T:
    """`read()`, again and again while the worker is away.

    Raises `RunFailed` when it stays away, and the worker's own refusal as it is.
    """
    started_s = clock.now()
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return read()
        except grpc.RpcError as error:
            outcome = classify(error)
            if isinstance(outcome, Refusal) and outcome.reason not in _LATER:
                raise
            waited_s = clock.now() - started_s
            if waited_s > patience_s:
                raise RunFailed(
                    f"the worker did not answer for {waited_s:.0f} s ({outcome.message}): check"
                    " that it runs and that --trainer names its address; this run can be resumed"
                ) from error
            if pause_s == FIRST_PAUSE_S:
                log.info("asking the worker again: %s", outcome)
        clock.sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, pause_s * 2)


class PatientReader:
    """What a run reads of the worker that trains it."""

    def __init__(self, client: TrainerClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock

    def _same_worker(self, incarnation: str) -> None:
        if incarnation != self._client.incarnation:
            raise WorkerReplaced(
                f"the worker restarted (it was incarnation {self._client.incarnation}) after the"
                " last step: the run is taken up from what it restores"
            )

    def backend_compiles(self) -> int:
        """Programs compiled so far, by whichever worker process there is."""
        return ask(self._client.backend_compiles, self._clock)

    def durability(self) -> tuple[int, str]:
        """As the client's. Raises `WorkerReplaced`."""
        state = ask(self._client.worker_state, self._clock)
        self._same_worker(state.incarnation)
        return state.durable_step, state.background_failure

    def parameter_digest(self) -> str:
        """As the client's. Raises `WorkerReplaced`."""
        state = ask(lambda: self._client.worker_state(with_parameter_digest=True), self._clock)
        self._same_worker(state.incarnation)
        return state.parameter_digest

    def read_metrics(self, from_step: int, count: int) -> tuple[StepFacts, ...]:
        """As the client's; nothing from a worker that keeps none of them."""
        return ask(lambda: self._client.read_metrics(from_step, count), self._clock)
