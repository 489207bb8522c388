"""A run that ended well can be resumed: its last checkpoint is durable."""

from __future__ import annotations

import pytest

from orchestrator.app import await_durable, last_checkpoint
from orchestrator.plan import RunPlan
from orchestrator.runner import RunFailed


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_it_waits_for_the_last_checkpoint() -> None:
    answers = iter([(-1, ""), (2, ""), (4, ""), (9, "never asked")])
    await_durable(lambda: next(answers), 4, clock=Clock())
    assert next(answers)[0] == 9


def test_a_failed_background_save_fails_the_run() -> None:
    with pytest.raises(RunFailed, match="No space"):
        await_durable(lambda: (2, "No space left on device"), 4, clock=Clock())


def test_it_does_not_wait_for_ever() -> None:
    clock = Clock()
    with pytest.raises(RunFailed, match=r"step 4.*durable is 2"):
        await_durable(lambda: (2, ""), 4, patience_s=10, clock=clock)
    assert 10 <= clock.now_s < 11


@pytest.mark.parametrize(("closed", "every", "last"), [(5, 2, 4), (4, 2, 4), (1, 2, 0)])
def test_the_last_checkpoint_of_a_run(closed: int, every: int, last: int) -> None:
    assert last_checkpoint(closed, RunPlan(num_steps=9, checkpoint_every=every)) == last
