"""The one thread that touches the engine. RPC threads hand it jobs and wait.

Consumes: jobs, first in first out; those of OpenRun before all others, so that calls of older epochs
that still wait are fenced off when they are reached, and in their own order, so that the newest caller
ends up with the newest epoch. A caller that stops waiting does not stop its job.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Draining(Exception):
    """The worker shuts down: no new job is taken."""


class DeviceThread:
    """Runs jobs in order."""

    def __init__(
        self, name: str = "device", *, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """`on_change`: called on the thread when a job begins and when it has ended."""
        self._on_change = on_change
        self._jobs: deque[Callable[[], None]] = deque()
        self._urgent: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._draining = False
        self._busy_with = ""
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def busy_with(self) -> str:
        """What runs now; empty = nothing. Safe from any thread."""
        return self._busy_with

    @property
    def waiting(self) -> int:
        with self._changed:
            return len(self._urgent) + len(self._jobs)

    def submit(self, name: str, work: Callable[[], T], *, urgent: bool = False) -> Future[T]:
        """Queue a job, `urgent` ones before all others. Raises `Draining`."""
        future: Future[T] = Future()

        def job() -> None:
            self._busy_with = name
            self._on_change()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            finally:
                self._busy_with = ""
                self._on_change()

        with self._changed:
            if self._draining:
                raise Draining
            (self._urgent if urgent else self._jobs).append(job)
            self._changed.notify_all()
        return future

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._urgent and not self._jobs and not self._draining:
                    self._changed.wait()
                jobs = self._urgent or self._jobs
                if not jobs:
                    return
                job = jobs.popleft()
            job()
            del job  # It holds its arguments: not until the next one comes.

    def drain(self, timeout_s: float) -> bool:
        """Take no new job, finish those queued, join. False when the timeout came first."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()
        self._thread.join(timeout=timeout_s)
        return not self._thread.is_alive()
