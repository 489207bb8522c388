"""`orchestrator submit`: replays a recorded file as live producers, to try the service.

Each producer sends its share of the trajectories in file order, on a connection of its own, and
waits where a sampler would. Started again after an interruption it goes on where it was: the shares
depend on the file and the number of producers only.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

from tqdm import tqdm

from orchestrator.client.errors import ProducerError, RunEnded
from orchestrator.client.producer import RolloutProducer
from orchestrator.client.rollout import RolloutValueError
from orchestrator.ingest.ports import Receipt
from orchestrator.sources.parquet import RecordedRollouts
from orchestrator.trajectory import SourceError, Trajectory, TrajectoryLimits
from prestage.wire.channel import AddressError
from prestage.wire.security import Security, SecurityConfig, SecurityError

# The orchestrator judges the trajectories; here they only have to be readable.
_LIMITS = TrajectoryLimits(tokens_per_row=2**31 - 1, vocab_size=2**31 - 1)


@dataclass(kw_only=True)
class Tally:
    """What became of everything that was sent. Shared by the producers' threads."""

    accepted: int = 0
    duplicates: int = 0
    not_accepted: collections.Counter[str] = field(default_factory=collections.Counter)
    skipped: int = 0  # Durable already when the producer connected.
    reconnections: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, receipt: Receipt) -> None:
        with self.lock:
            if receipt.duplicate:
                self.duplicates += 1
            elif receipt.accepted:
                self.accepted += 1
            else:
                self.not_accepted[receipt.reason] += 1

    def text(self) -> str:
        parts = [f"{self.accepted} accepted", f"{self.duplicates} duplicates"]
        parts += [f"{count} {reason}" for reason, count in sorted(self.not_accepted.items())]
        if self.skipped:
            parts.append(f"{self.skipped} sent before")
        if self.reconnections:
            parts.append(f"{self.reconnections} reconnections")
        return ", ".join(parts)


class _Share:
    """One producer's trajectories, sent from a thread of its own."""

    def __init__(
        self,
        producer: RolloutProducer,
        trajectories: Iterator[Trajectory],
        tally: Tally,
        bar: tqdm[None],
        *,
        follow_policy: bool,
        per_second: float,
    ) -> None:
        self._pause_s = 1 / per_second if per_second else 0.0
        self._producer = producer
        self._trajectories = trajectories
        self._tally = tally
        self._bar = bar
        self._follow = follow_policy
        self._version = 0
        self.error: Exception | None = None
        self.run_ended = False

    def run(self) -> None:
        try:
            self._run()
        except RunEnded:
            self.run_ended = True
        except (ProducerError, RolloutValueError, SourceError) as error:
            self.error = error

    def _run(self) -> None:
        if self._follow:
            threading.Thread(target=self._listen, name="policy", daemon=True).start()
        sent_before = self._producer.next_offset()
        with self._tally.lock:
            self._tally.skipped += sum(1 for _ in itertools.islice(self._trajectories, sent_before))
        for trajectory in self._trajectories:
            if self._follow:
                trajectory = replace(trajectory, policy_version=self._version)
            self._producer.submit(trajectory).add_done_callback(self._done)
            if self._pause_s:
                time.sleep(self._pause_s)
        self._producer.flush()

    def _listen(self) -> None:
        try:
            for update in self._producer.watch():
                self._version = update.policy_version
        except ProducerError as error:
            self.error = error

    def _done(self, receipt: Future[Receipt]) -> None:
        if receipt.exception() is None:
            self._tally.add(receipt.result())
            self._bar.update(1)


def _share(
    recorded: RecordedRollouts, number: int, producers: int, passes: int
) -> Iterator[Trajectory]:
    """Every `producers`-th trajectory: the members of a group come from different producers."""
    every = (
        trajectory for group in recorded.groups(epochs=passes) for trajectory in group.trajectories
    )
    return itertools.islice(every, number, None, producers)


def replay(
    path: Path,
    address: str,
    *,
    run_id: str,
    producers: int = 1,
    passes: int = 1,
    name: str = "replay",
    follow_policy: bool = False,
    per_second: float = 0.0,
    show: bool = True,
    unreachable_s: float = 600.0,
    security: Security | None = None,
) -> tuple[Tally, bool]:
    """Send a recorded file. What became of it, and whether the run ended before it was all sent.

    `per_second`: rollouts of each producer; 0 = as fast as they are taken.

    Raises `SourceError`, `AddressError`, `SecurityError`, `ProducerError`, `RolloutValueError`.
    """
    tally = Tally()
    shares = []
    opened: list[RolloutProducer] = []
    recorded = RecordedRollouts(path, _LIMITS)
    total = recorded.trajectory_count * passes
    with tqdm(total=total, desc=f"to {address}", unit="rollout", disable=not show) as bar:
        try:
            for number in range(producers):
                producer = RolloutProducer(
                    address,
                    producer=f"{name}-{number}-of-{producers}",
                    run_id=run_id,
                    unreachable_s=unreachable_s,
                    security=security,
                )
                opened.append(producer)
                trajectories = _share(recorded, number, producers, passes)
                shares.append(
                    _Share(
                        producer,
                        trajectories,
                        tally,
                        bar,
                        follow_policy=follow_policy,
                        per_second=per_second,
                    )
                )
            threads = [threading.Thread(target=share.run, daemon=True) for share in shares]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for producer in opened:
                tally.reconnections += producer.reconnections
                _leave(producer)
    for share in shares:
        if share.error is not None:
            raise share.error
    return tally, any(share.run_ended for share in shares)


def _leave(producer: RolloutProducer) -> None:
    """Close; what it could not send is told by its share."""
    try:
        producer.close(timeout_s=0.0)
    except (ProducerError, TimeoutError):
        return


def main(argv: Sequence[str]) -> int:
    """0: all was sent, or the run took what it needed. 1: the service refused. 2: bad input."""
    parser = argparse.ArgumentParser(
        prog="orchestrator submit",
        description="Replay a recorded Parquet file to a live orchestrator, as producers would.",
    )
    parser.add_argument("--rollouts", required=True, type=Path, help="a recorded Parquet file")
    parser.add_argument("--to", required=True, help="the orchestrator's --listen address")
    parser.add_argument("--run_id", default="run", help="the orchestrator's --run_id")
    parser.add_argument("--producers", type=int, default=1, help="connections (default 1)")
    parser.add_argument("--passes", type=int, default=1, help="times through the file (default 1)")
    parser.add_argument("--name", default="replay", help="producers are NAME-0-of-N and so on")
    parser.add_argument(
        "--follow_policy",
        action="store_true",
        help="give each rollout the newest policy version, as a sampler would; without it, the"
        " recorded one",
    )
    parser.add_argument(
        "--per_second",
        type=float,
        default=0.0,
        help="rollouts a second of each producer; 0 (default) = as fast as they are taken",
    )
    parser.add_argument("--wait_s", type=float, default=600.0, help="for the service (default 600)")
    parser.add_argument("--tls_dir", type=Path, help="certificates: tls.crt, tls.key, ca.crt")
    parser.add_argument("--tls_server_name", default="", help="the name in the certificate")
    parser.add_argument("--token_dir", type=Path, help="tokens; the file `submit` is used")
    parser.add_argument("--insecure", action="store_true", help="plain text beyond this host")
    given = parser.parse_args(list(argv))
    for name in ("producers", "passes"):
        if vars(given)[name] < 1:
            parser.error(f"--{name} is {vars(given)[name]}; use 1 or more")
    if not 0 <= given.per_second < float("inf"):
        parser.error(f"--per_second is {given.per_second}; use 0 or more")
    started_s = time.monotonic()
    try:
        tally, ended = replay(
            given.rollouts,
            given.to,
            run_id=given.run_id,
            producers=given.producers,
            passes=given.passes,
            name=given.name,
            follow_policy=given.follow_policy,
            per_second=given.per_second,
            unreachable_s=given.wait_s,
            security=Security(
                SecurityConfig(
                    tls_dir=given.tls_dir,
                    token_dir=given.token_dir,
                    server_name=given.tls_server_name,
                    insecure=given.insecure,
                )
            ),
        )
    except (SourceError, AddressError, SecurityError, RolloutValueError) as error:
        sys.stderr.write(f"orchestrator submit: {error}\n")
        return 2
    except ProducerError as error:
        sys.stderr.write(f"orchestrator submit: {error}\n")
        return 1
    seconds = time.monotonic() - started_s
    sys.stdout.write(f"{tally.text()} in {seconds:.1f} s\n")
    if ended:
        sys.stdout.write("the run has ended: it takes nothing more\n")
    return 0
