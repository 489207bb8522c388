"""Heartbeat and watchdog of a program: what it is at, how long that may take, and the end of a stuck run.

One thread samples the program, writes the sample where the probe process reads it, and ends the process
when the sample says that it is stuck. A second line of defence needs no Python at all: faulthandler's
timer ends a process whose interpreter does not run any more. Knows nothing of training.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from prestage.operation.probe_process import (
    HEARTBEAT_BYTES,
    SLOT_BYTES,
    SLOTS,
    Beat,
    pack,
    stuck,
)

log = logging.getLogger("prestage.operation")

PERIOD_S: Final = 0.5
SILENCE_S: Final = 300.0
"""How long Python may not run at all (one call that holds the GIL) while nothing compiles."""
STUCK_EXIT_CODE: Final = 70
"""Exit status of a process that its watchdog ended (EX_SOFTWARE)."""
_REARM_S: Final = 5.0
_SILENCE_MARGIN_S: Final = 30.0  # The probe says so first; then the process ends.


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a program is at. Monotonic seconds."""

    state: str
    progress_s: float
    allowance_s: float = math.inf  # Without progress in this state.
    silence_s: float = SILENCE_S  # Of Python itself.
    started: bool = True
    ready: bool = True
    reason: str = ""  # Why not ready.


def end_process(reason: str) -> None:
    """Say why, dump every thread's stack, and end at once: nothing that is stuck can be waited for."""
    log.critical("ending this process: %s; the stacks of all threads follow", reason)
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stderr.flush()
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    os._exit(STUCK_EXIT_CODE)


class Heartbeat:
    """Samples a program. `beat` may be called from any thread."""

    def __init__(
        self,
        read: Callable[[], Progress],
        *,
        end: Callable[[str], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read`: what the program is at, cheap and from any thread. `end`: the watchdog; None: none."""
        self._read = read
        self._end = end
        self._now = now
        # In memory: no folder needs to be writable.
        self._fd = os.memfd_create("prestage-heartbeat", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, HEARTBEAT_BYTES)
        self._shared = mmap.mmap(self._fd, HEARTBEAT_BYTES)
        self._lock = threading.Lock()
        self._counter = 0
        self._armed_s = -math.inf
        self._armed_for_s = 0.0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.beat()

    @property
    def fd(self) -> int:
        """The file that the probe process maps."""
        return self._fd

    def progress(self) -> Progress:
        """What the program is at now. Safe from any thread."""
        return self._read()

    @property
    def age_s(self) -> float:
        """Seconds since the program last made progress. Safe from any thread."""
        return max(0.0, self._now() - self._read().progress_s)

    @property
    def allowance_s(self) -> float:
        """Seconds that the present state may take; inf = for ever. Safe from any thread."""
        return self._read().allowance_s

    def beat(self) -> str:
        """Sample and write once. Returns why the program counts as stuck, empty when it does not."""
        progress = self._read()
        with self._lock:
            self._counter += 1
            sample = Beat(
                counter=self._counter,
                beat_s=self._now(),
                progress_s=progress.progress_s,
                allowance_s=progress.allowance_s,
                silence_s=progress.silence_s,
                started=progress.started,
                ready=progress.ready,
                state=progress.state,
                reason=progress.reason,
            )
            start = (self._counter % SLOTS) * SLOT_BYTES
            self._shared[start : start + SLOT_BYTES] = pack(sample)
            if self._thread is not None and self._end is not None:
                self._arm(progress.silence_s)
        return stuck(sample, self._now())

    def _arm(self, silence_s: float) -> None:
        """Holding the lock. The timer that ends a process whose Python does not come back."""
        now_s = self._now()
        if silence_s == self._armed_for_s and now_s - self._armed_s < _REARM_S:
            return
        self._armed_s, self._armed_for_s = now_s, silence_s
        faulthandler.dump_traceback_later(
            silence_s + _SILENCE_MARGIN_S, exit=True, file=sys.__stderr__ or 2
        )

    def look(self) -> None:
        """One round: sample, write, and end the process when it is stuck."""
        why = self.beat()
        if why and self._end is not None:
            self._end(why)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._serve, name="heartbeat", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            try:
                self.look()
            except Exception:  # The watchdog must outlive a bug in what it samples.
                log.exception("the heartbeat could not be sampled")
                self._stopped.wait(10.0)

    def stop(self) -> None:
        """The program ends in order: nobody is to end it now."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            with self._lock:
                if self._end is not None:
                    faulthandler.cancel_dump_traceback_later()
