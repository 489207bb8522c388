"""A process that dies between any two durable operations loses nothing and doubles nothing."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.feeder import SourceError
from orchestrator.journal.errors import JournalError
from orchestrator.journal.order import Kind
from tests.journal.rig import (
    Faults,
    IngestClosed,
    Live,
    Model,
    config,
    journaled,
    never,
    rollout,
)

DIED = (IngestClosed, JournalError, SourceError)


class Story:
    """Plays actions against journals, one after another, each going on where the last one died."""

    def __init__(self, folder: Path, **change: object) -> None:
        self.settings = config(folder, **change)
        self.sent: dict[str, list] = {}
        self.acked: set[tuple[str, int]] = set()
        self.order: dict[int, tuple[Kind, str, int]] = {}
        self.steps: dict[int, list[str]] = {}
        self.durable = 0
        self.deaths = 0
        self.faults = Faults(folder=folder)
        self.live = self._open()

    def _open(self) -> Live:
        self.order.update(journaled(self.settings.folder))
        live = Live(self.settings, probe=self.faults)
        commit = live.log._database.commit

        def recorded(events, offsets, micro_batches):
            # Before: what is written and dies before it is told is in the copy.
            commit(events, offsets, micro_batches)
            for event, _ in events:
                self.order[event.seq] = (event.kind, event.producer, event.offset)

        live.log._database.commit = recorded
        return live

    def arm(self, operations_from_now: int, lose_unsynced: bool = False) -> None:
        """The process dies so many durable operations from now."""
        if self.faults.copy is None:
            self.faults.die_at = len(self.faults.operations) + operations_from_now
            self.faults.lose_unsynced = lose_unsynced

    def play(self, action) -> None:
        """Do it; when the process dies over it, open what it left and do it again."""
        while True:
            try:
                action()
                return
            except DIED:
                assert self.faults.copy is not None, "it failed without a fault"
                self.reopen()

    def reopen(self) -> None:
        """Go on with what the disk holds."""
        self.live.close()
        if self.faults.copy is not None:
            self.deaths += 1
            self.settings = replace(self.settings, folder=self.faults.copy)
            self.faults = Faults(folder=self.settings.folder)
        self.live = self._open()

    # -- actions ----------------------------------------------------------------------------------

    def send(self, producer: str, count: int) -> None:
        """The producer's next trajectories, all in flight at once, until all are acknowledged."""
        sent = self.sent[producer]
        target = min(len(sent), self.live.log.open_producer(producer) + count)

        def burst() -> None:
            log = self.live.log
            start = log.open_producer(producer)
            futures = [
                (at, log.append(producer, at, sent[at], cancelled=never))
                for at in range(start, target)
            ]
            for at, future in futures:
                receipt = future.result(timeout=20)
                assert receipt.offset == at and (receipt.accepted or receipt.reason)
                self.acked.add((producer, at))
            self.acked.update((producer, at) for at in range(start))

        self.play(burst)

    def resend(self, producer: str) -> None:
        """Everything again, under its old offset: nothing changes."""

        def again() -> None:
            log = self.live.log
            for at in range(log.open_producer(producer)):
                receipt = log.append(producer, at, self.sent[producer][at], cancelled=never).result(
                    timeout=20
                )
                assert receipt.duplicate

        self.play(again)

    def step(self, step: int) -> None:
        """A step's digests are the same whenever they are asked for."""

        def ask() -> None:
            digests = self.live.digests(step)
            assert self.steps.setdefault(step, digests) == digests

        self.play(ask)

    def make_durable(self, step: int) -> None:
        """The trainer's checkpoint covers the steps below `step`."""
        self.durable = max(self.durable, step)

        def tell() -> None:
            log = self.live.log
            self.live.digests(step - 1) if step - 1 >= log.point.durable_step else None
            self.live.source.step_durable(step)
            with log._changed:
                assert log._changed.wait_for(lambda: log._retention is None or log.failure, 20)
            if log.failure:
                raise JournalError(log.failure)

        self.play(tell)

    def whole_steps(self) -> int:
        return len(self.live.log._groups) + self.live.log.point.position


def check(story: Story) -> Model:
    """What came of it is what the model makes of the durable order."""
    totals = story.live.log.totals()
    story.live.close()
    story.order.update(journaled(story.settings.folder))
    assert sorted(story.order) == list(range(len(story.order))), "the order has no gap"
    places = [(producer, offset) for _, producer, offset in story.order.values()]
    assert len(set(places)) == len(places), "nothing is there twice"
    assert story.acked <= set(places), "everything acknowledged is there"
    model = Model(story.settings)
    for _, (kind, producer, offset) in sorted(story.order.items()):
        assert kind is Kind.TRAJECTORY
        model.submit(story.sent[producer][offset])
    for step, digests in story.steps.items():
        assert digests == model.steps[step], f"step {step}"
    assert len(set(model.trained)) == len(model.trained)
    ledger = model.ledger()
    assert (totals.tokens_in, totals.tokens_open) == (ledger.tokens_in, ledger.tokens_open)
    assert (totals.drops, totals.duplicates) == (ledger.dropped, ledger.duplicates)
    return model


def script(story: Story, arm_at: int = -1, lose_unsynced: bool = False) -> None:
    """Two producers share five groups; steps are opened, asked again, and made durable."""
    names = [f"g{number}" for number in range(5)]
    story.sent = {
        "a": [rollout(name, 0) for name in names],
        "b": [rollout(name, 1) for name in names],
        "late": [rollout(names[0], 0), rollout(names[3], 1), rollout(names[1], 2)],
    }
    if arm_at >= 0:
        story.arm(arm_at, lose_unsynced)
    for _ in range(2):
        story.send("a", 1)
        story.send("b", 1)
    story.step(0)
    story.send("late", 1)
    story.send("a", 2)
    story.send("b", 1)
    story.make_durable(1)
    story.send("b", 2)
    story.resend("a")
    story.step(1)
    story.send("a", 1)
    story.make_durable(2)
    story.send("late", 2)


@pytest.fixture
def folder():
    """On memory where there is some: a sync costs nothing there, and means the same to us."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


def test_r8_r10_it_dies_at_every_durable_operation(folder):
    undisturbed = Story(folder / "undisturbed")
    script(undisturbed)
    operations = undisturbed.faults.operations
    steps = check(undisturbed).steps
    assert len(steps) == 2 and undisturbed.steps == dict(enumerate(steps))
    assert {"payload.create", "payload.sync", "folder.sync", "rows.commit", "rows.committed"} <= {
        *operations
    }
    for number in range(len(operations)):
        for lose_unsynced in (False, True):
            story = Story(folder / f"{number}{lose_unsynced}")
            script(story, number, lose_unsynced)
            assert story.deaths == 1, f"operation {number} ({operations[number]}) never came"
            assert check(story).steps == steps
            shutil.rmtree(story.settings.folder)


ACTIONS = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 2), st.integers(1, 6)),
    st.tuples(st.just("step"), st.just(0), st.just(0)),
    st.tuples(st.just("again"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("durable"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("die"), st.integers(0, 8), st.integers(0, 1)),
    st.tuples(st.just("restart"), st.just(0), st.just(0)),
    st.tuples(st.just("resend"), st.integers(0, 2), st.just(0)),
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    actions=st.lists(ACTIONS, max_size=25),
    spread=st.lists(st.integers(0, 2), min_size=24, max_size=24),
    extra=st.integers(0, 1),
)
def test_any_interleaving_with_deaths_gives_the_steps_of_its_durable_order(
    folder, actions, spread, extra
):
    with tempfile.TemporaryDirectory(dir=folder) as name:
        story = Story(
            Path(name) / "j",
            policy={"extra": extra, "max_staleness": 3, "max_dead_groups": 1000},
            segment_bytes=1500,
        )
        # Members of twelve groups go to whichever producer; some are too long, some come twice.
        members = [(f"g{number // 2}", number % 2) for number in range(24)]
        story.sent = {"p0": [], "p1": [], "p2": []}
        for number, (group, index) in enumerate(members):
            trajectory = rollout(group, index, tokens=70 if number in (5, 11) else 0, version=9)
            story.sent[f"p{spread[number]}"].append(trajectory)
            if number % 5 == 0:
                story.sent[f"p{(spread[number] + 1) % 3}"].append(trajectory)
        for action, first, second in actions:
            opened = max(story.steps, default=-1) + 1
            match action:
                case "send":
                    story.send(f"p{first}", second)
                case "step" if story.whole_steps() >= 2 * (opened + 1):
                    story.step(opened)
                case "again" if opened and story.durable <= opened - 1 - first:
                    story.step(opened - 1 - first)
                case "durable" if opened - first > story.durable:
                    story.make_durable(opened - first)
                case "die":
                    story.arm(first, bool(second))
                case "restart":
                    story.reopen()
                case "resend":
                    story.resend(f"p{first}")
                case _:
                    pass
        story.faults.die_at = -1
        if story.faults.copy is not None:
            story.reopen()
        for producer, sent in story.sent.items():
            story.send(producer, len(sent))
        for step in range(story.durable, story.whole_steps() // 2):
            story.step(step)
        model = check(story)
        assert len(story.acked) == sum(map(len, story.sent.values()))
        assert max(story.steps, default=-1) + 1 == len(model.steps)
