"""One way to end, for SIGTERM, Ctrl-C and the admin's Stop: within the grace, everything resumable.

The running call is finished if it ends in time. If not, its connection is cut: the worker carries it
out all the same, and the next process that opens the run learns what became of it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from orchestrator.operation.control import RunControl

log = logging.getLogger("prestage.orchestrator")

_CUT_AT: Final = 0.75
"""Share of the grace after which the running call is no longer waited for."""


class Ending:
    """Ends the process once."""

    def __init__(
        self,
        control: RunControl,
        *,
        grace_s: float,
        exit_code: int,
        hopeless: Callable[[], bool] = lambda: False,
        exit_now: Callable[[int], None] = os._exit,
    ) -> None:
        """`hopeless`: whether the running call (a compile) is not worth any wait."""
        self._control = control
        self._grace_s = grace_s
        self._exit_code = exit_code
        self._hopeless = hopeless
        self._exit_now = exit_now
        self._lock = threading.Lock()
        self._begun = False
        self._ended = threading.Event()
        self._cut: Callable[[], object] | None = None

    @property
    def exit_code(self) -> int:
        """Of a process that was asked to end."""
        return self._exit_code

    def on_cut(self, cut: Callable[[], object]) -> None:
        """What makes a running call return: closing its channel."""
        self._cut = cut

    def begin(self, reason: str) -> None:
        """From any thread; returns at once."""
        with self._lock:
            if self._begun:
                return
            self._begun = True
        log.info("%s: stopping within %g s; the run can be resumed", reason, self._grace_s)
        self._control.stop(reason)
        threading.Thread(target=self._watch, name="ending", daemon=True).start()

    def ended(self) -> None:
        """The run's thread is out of the run: nothing needs to be forced."""
        self._ended.set()

    def _watch(self) -> None:
        began_s = time.monotonic()
        while time.monotonic() - began_s < self._grace_s * _CUT_AT and not self._hopeless():
            if self._ended.wait(timeout=0.05):
                return
        if self._cut is not None:
            log.warning(
                "the running call is not waited for any longer: the worker finishes it, and the"
                " next process that opens the run settles it"
            )
            self._cut()
        if self._ended.wait(timeout=max(0.0, began_s + self._grace_s - time.monotonic())):
            return
        log.warning("the grace is over: exiting at once; the run can be resumed")
        logging.shutdown()
        self._exit_now(self._exit_code)
