"""A step's first micro-batch is given before its last groups are in, and is the same as afterwards."""

from __future__ import annotations

import threading
from dataclasses import replace
from time import monotonic

import pytest

from orchestrator.calls import Ready, SourceEnded
from orchestrator.feeder import Feeder
from orchestrator.packing import PackingConfig
from orchestrator.plan import RunPlan
from tests.journal.rig import Live, config, never, opened, rollout
from tests.support.rig import address_of, run_against, served

GROUPS = 16  # Of four members, up to 32 tokens each: about eight micro-batches of 2 x 64.


def early(folder, **change):
    return config(
        folder,
        policy={"group_size": 4},
        batches={"groups_per_batch": GROUPS},
        packing=PackingConfig(rows=2, tokens_per_row=64),
        **change,
    )


def members(number: int):
    return [rollout(f"g{number:02}", i, tokens=(8, 16, 24, 16)[i]) for i in range(4)]


def test_it_comes_as_soon_as_it_is_fixed_and_is_part_of_the_whole(tmp_path):
    settings = early(tmp_path / "j")
    with opened(settings) as live:
        outcome: list = []
        thread = threading.Thread(
            target=lambda: outcome.append(live.source.first_micro_batch(0)), daemon=True
        )
        thread.start()
        for number in range(GROUPS):
            live.send("p", members(number))
            thread.join(0.2)
            if outcome:
                break
        needed = number + 1
        assert needed < GROUPS // 2, "it waits for a few groups only"
        (first,) = outcome
        assert first.id.index == 0 and first.digest
        for later in range(needed, GROUPS):
            live.send("p", members(later))
        feed = live.source.open_step(0)
        assert feed is not None
        rest = list(feed.micro_batches)
        assert [batch.id.index for batch in rest] == list(range(1, feed.summary.micro_batches))
        trained = first.trained_tokens + sum(batch.trained_tokens for batch in rest)
        assert trained == feed.summary.trained_tokens
        digests = [first.digest, *(batch.digest for batch in rest)]
        # Asked again when all is in: nothing is early any more, and nothing is different.
        assert live.source.first_micro_batch(0) is None
        assert live.digests(0) == digests
    with opened(replace(settings, folder=tmp_path / "whole")) as live:
        for number in range(GROUPS):
            live.send("p", members(number))
        assert live.digests(0) == digests, "as if all had been there from the start"


@pytest.mark.parametrize("restart", [False, True])
def test_what_was_given_early_is_the_same_after_a_restart(tmp_path, restart):
    settings = early(tmp_path / "j")
    live = Live(settings)
    for number in range(4):
        live.send("p", members(number))
    first = live.source.first_micro_batch(0)
    assert first is not None
    if restart:
        live.close()
        live = Live(settings)
    # Left while the rest is waited for: a restarted worker asks from the start.
    assert live.source.open_step(0, wanted=never) is None
    again = live.source.first_micro_batch(0)
    assert again is not None and again.digest == first.digest
    for number in range(4, GROUPS):
        live.send("p", members(number))
    feed = live.source.open_step(0)
    assert feed is not None
    rest = [batch.digest for batch in feed.micro_batches]
    assert live.digests(0) == [first.digest, *rest]
    live.close()


def test_the_feeder_puts_it_and_goes_on_with_the_rest(tmp_path):
    class Sends:
        def put(self, batch) -> int:
            return batch.payload_bytes

    with opened(early(tmp_path / "j")) as live:
        feeder = Feeder(live.source, Sends())
        try:
            feeder.start_step(0)
            for number in range(4):
                live.send("p", members(number))
            first = feeder.next_event(20.0)
            assert isinstance(first, Ready) and (first.index, first.last) == (0, False)
            for number in range(4, GROUPS):
                live.send("p", members(number))
            events = [first]
            while not events[-1].last:
                events.append(feeder.next_event(20.0))
            assert [event.index for event in events] == list(range(len(events)))
            assert feeder.summary(0).micro_batches == len(events)
            # The next one begins, and the source ends under it.
            feeder.start_step(1)
            for number in range(GROUPS, GROUPS + 4):
                live.send("p", members(number))
            assert feeder.next_event(20.0) == Ready(
                step=1, index=0, digest=feeder_digest(live), last=False
            )
            live.log.end_source()
            assert feeder.next_event(20.0) == SourceEnded(step=1)
        finally:
            feeder.close()


def feeder_digest(live: Live) -> str:
    return live.log._micro_batches[1, 0]


@pytest.mark.parametrize("staged", [False, True])
def test_a_source_that_ends_under_a_step_that_began_early_ends_the_run_before_it(tmp_path, staged):
    """What was trained of the step is dropped, so the run ends with whole steps only."""
    plan = RunPlan(num_steps=9, pipeline=staged, stage=staged, latch_after=1000)

    def digest(name: str, groups: int) -> str:
        settings = early(tmp_path / name)
        with opened(settings) as live, served() as server:
            for number in range(groups):
                live.send("p", members(number))

            def end() -> None:
                deadline = monotonic() + 30
                while groups > 2 * GROUPS and monotonic() < deadline:
                    state = server.service.state()
                    if (state.step, state.micro_step) == (2, 1):
                        break
                    threading.Event().wait(0.01)
                live.log.end_source()

            ender = threading.Thread(target=end, daemon=True)
            ender.start()
            result = run_against(address_of(server), plan, source=live.source)
            ender.join(20)
            assert server.service.state().step == 2
            calls.append([record.call for record in result.recorder.records])
            return result.digest

    calls: list[list[str]] = []
    assert digest("begun", 2 * GROUPS + 4) == digest("whole", 2 * GROUPS)
    assert "abort_step" not in calls[1]
    assert calls[0].count("abort_step") == 1
    assert calls[0].count("fwd_bwd") == calls[1].count("fwd_bwd") + 1
