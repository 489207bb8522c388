"""What is read of a worker that is away for a moment: asked again, for a while, then an error."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc
import pytest

from orchestrator.reader import ask
from orchestrator.runner import RunFailed


@dataclass
class Clock:
    time_s: float = 0.0
    pauses: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds
        self.pauses.append(seconds)


def test_a_read_is_asked_again_until_the_worker_answers() -> None:
    answers: list[Exception | int] = [
        grpc.RpcError("connection refused"),
        grpc.RpcError("connection refused"),
        7,
    ]

    def read() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    clock = Clock()
    assert ask(read, clock) == 7
    assert len(clock.pauses) == 2 and clock.pauses[0] < clock.pauses[1]


def test_a_worker_that_stays_away_ends_the_run_with_the_reason() -> None:
    def read() -> int:
        raise grpc.RpcError("connection refused")

    clock = Clock()
    with pytest.raises(RunFailed, match=r"connection refused.*can be resumed"):
        ask(read, clock, patience_s=10)
    assert 10 < clock.time_s < 15
