"""SIGTERM and SIGINT, heard on a thread of their own: also while the main thread is busy in C code.

A handler that runs inside the main thread could meet a lock which that thread holds; the thread that
reads the wake-up pipe cannot. One owner of the signals per process.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Final

HEARD: Final = (signal.SIGTERM, signal.SIGINT)
SECOND_INTERRUPT_EXIT_CODE: Final = 130


def hear_signals(on_signal: Callable[[str], None]) -> None:
    """From now on `on_signal(name)` is called once, on its own thread; a second Ctrl-C ends at once.

    On the main thread only.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in HEARD:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def serve() -> None:
        heard = False
        while byte := os.read(reader, 1):
            number = byte[0]
            if number not in HEARD:
                continue
            if not heard:
                heard = True
                threading.Thread(
                    target=on_signal, args=(signal.Signals(number).name,), daemon=True
                ).start()
            elif number == signal.SIGINT:
                os._exit(SECOND_INTERRUPT_EXIT_CODE)

    threading.Thread(target=serve, name="signals", daemon=True).start()
