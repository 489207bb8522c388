"""`python -m tests.chaos.producer FOLDER FILE ADDRESS PRODUCERS PER_SECOND`: sends a file, once.

Writes each receipt into FOLDER/acks.txt as it comes; started again, it goes on where the journal is.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

from orchestrator.client import Receipt, RolloutProducer, RunEnded
from orchestrator.sources.parquet import RecordedRollouts
from orchestrator.trajectory import Trajectory, TrajectoryLimits

LIMITS = TrajectoryLimits(tokens_per_row=1 << 20, vocab_size=1 << 30)


class Acks:
    """What was acknowledged, on disk before anything else happens."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._lock = threading.Lock()

    def note(self, producer: str, trajectory: Trajectory, receipt: Future[Receipt]) -> None:
        if receipt.exception() is None:
            result = receipt.result()
            with self._lock:
                self._file.write(
                    f"{producer} {result.offset} {trajectory.group_id}/{trajectory.index}"
                    f" {result.reason or 'taken'}\n"
                )


def _send(name: str, address: str, share: list[Trajectory], pause_s: float, acks: Acks) -> None:
    try:
        with RolloutProducer(address, producer=name, run_id="run", unreachable_s=60) as producer:
            for trajectory in share[producer.next_offset() :]:
                receipt = producer.submit(trajectory)
                receipt.add_done_callback(
                    lambda done, sent=trajectory: acks.note(name, sent, done)  # type: ignore[misc]
                )
                time.sleep(pause_s)
            producer.flush()
    except RunEnded:
        pass  # It had what it needed.


def main() -> None:
    folder, file, address = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    producers, per_second = int(sys.argv[4]), float(sys.argv[5])
    (folder / "producer.pid").write_text(str(os.getpid()))
    recorded = RecordedRollouts(file, LIMITS)
    everything = [item for group in recorded.groups() for item in group.trajectories]
    acks = Acks(folder / "acks.txt")
    threads = []
    for number in range(producers):
        share = list(itertools.islice(everything, number, None, producers))
        pause_s = producers / per_second
        threads.append(
            threading.Thread(target=_send, args=(f"p{number}", address, share, pause_s, acks))
        )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
