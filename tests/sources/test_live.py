"""Live rollouts as steps: which groups, in which step, with which bytes, and where all tokens are."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.advantages import AdvantageConfig, Estimator
from orchestrator.calls import Ready
from orchestrator.feeder import Feeder, SourceError
from orchestrator.groups import GroupPolicy, ZeroSpread
from orchestrator.journal.config import LiveConfig
from orchestrator.packing import PackingConfig
from orchestrator.sources.batches import BatchShape
from orchestrator.sources.parquet import RecordedRollouts
from orchestrator.sources.recorded_steps import RecordedSteps, RecordedStepsConfig
from orchestrator.trajectory import DropReason, TrajectoryLimits
from tests.journal.rig import Live, config, never, opened, rollout
from tests.packing.values import trajectory as tiny

RECORDED = Path(__file__).parents[1] / "data" / "rollouts.parquet"


def submit(live: Live, members, producer: str = "p") -> None:
    """Make these (group, index, version) durable, in this order."""
    live.send(producer, [rollout(name, index, version=version) for name, index, version in members])


def group(live: Live, name: str, version: int = 0, size: int = 2) -> None:
    submit(live, [(name, index, version) for index in range(size)])


def wait_until_waiting(live: Live) -> None:
    with live.log._changed:
        assert live.log._changed.wait_for(lambda: live.log._waiting == 1, 20)


# -- the same steps as from a file ------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 1, 1), (8, 2, 2)])
def test_the_same_groups_make_the_same_bytes_live_and_recorded(tmp_path, shape):
    """Two sources with one meaning: what is recorded can be replayed live, bit for bit."""
    groups_per_batch, minibatches, iterations = shape
    limits = TrajectoryLimits(
        tokens_per_row=1024, vocab_size=49152, required_fields=("sampling_logprobs",)
    )
    policy = GroupPolicy(group_size=8, zero_spread=ZeroSpread.DROP)
    packing = PackingConfig(rows=4, tokens_per_row=1024)
    rloo = AdvantageConfig(estimator=Estimator.RLOO)
    recorded = RecordedSteps(
        RecordedRollouts(RECORDED, limits),
        RecordedStepsConfig(
            run_id="r",
            limits=limits,
            policy=policy,
            packing=packing,
            advantages=rloo,
            groups_per_batch=groups_per_batch,
            num_minibatches=minibatches,
            num_iterations=iterations,
            epochs=1,
        ),
    )
    live_config = LiveConfig(
        folder=tmp_path / "j",
        run_id="r",
        limits=limits,
        policy=policy,
        packing=packing,
        advantages=rloo,
        batches=BatchShape(
            groups_per_batch=groups_per_batch,
            num_minibatches=minibatches,
            num_iterations=iterations,
        ),
    )
    with opened(live_config) as live:
        for whole in RecordedRollouts(RECORDED, limits).groups():
            # Members come in any order, from several producers.
            for member in reversed(whole.trajectories):
                live.send(f"p{member.index % 3}", [member])
        live.log.end_source()
        step = 0
        while (wanted := recorded.open_step(step)) is not None:
            feed = live.source.open_step(step)
            assert feed is not None
            assert feed.summary == wanted.summary
            assert [batch.digest for batch in feed.micro_batches] == [
                batch.digest for batch in wanted.micro_batches
            ]
            step += 1
        assert step >= 10 and live.source.open_step(step) is None
        live.source.ledger().check()


# -- groups -----------------------------------------------------------------------------------------


def test_c5_duplicates_and_strangers_neither_fill_nor_open_a_group(tmp_path):
    with opened(config(tmp_path / "j", policy={"group_size": 4})) as live:
        live.send("p", [rollout("g", index) for index in (0, 1, 1, 2)])
        assert live.log.group(0) is None, "three members of four"
        live.send("p", [rollout("g", 3), rollout("g", 1), rollout("h", 4)])
        formed = live.log.group(0)
        assert formed is not None and [record.index for record in formed.members] == [0, 1, 2, 3]
        assert live.log.totals().duplicates == 2 and live.log.totals().tokens_open == 0


def test_c5_staleness_is_judged_whole_and_by_the_step_that_uses_it(tmp_path):
    settings = config(
        tmp_path / "j",
        policy={"group_size": 4, "max_staleness": 1},
        batches={"groups_per_batch": 1},
    )
    with opened(settings) as live:
        for step in range(5):
            group(live, f"early{step}", version=step, size=4)
        submit(live, [("mixed", index, version) for index, version in enumerate([3, 3, 5, 5])])
        group(live, "fresh", version=4, size=4)
        live.digests(0)
        assert [live.groups_of(step) for step in range(5)] == [[f"early{k}"] for k in range(5)]
        # Versions 3, 3, 5, 5 at step 5 with at most 1 behind: the group goes, whole.
        feed = live.source.open_step(5)
        assert live.groups_of(5) == ["fresh"]
        assert feed is not None and feed.summary.dropped == {"stale": 4}
        live.source.ledger().check()
    with opened(settings) as live:
        assert live.groups_of(5) == ["fresh"], "the same again, without a word about it on disk"


def test_c5_open_groups_that_no_step_will_take_are_dropped_and_told(tmp_path):
    settings = config(tmp_path / "j", policy={"max_staleness": 1}, batches={"groups_per_batch": 1})
    with opened(settings) as live:
        submit(live, [("open0", 0, 0), ("open1", 0, 1)])
        for step in range(3):
            group(live, f"g{step}", version=step)
            assert live.groups_of(step) == [f"g{step}"]
        # Step 2 is filled: a member of version 0 is of no use to it, or to any later one.
        with live.log._changed:
            told = live.log.cancellable_groups
            assert live.log._changed.wait_for(lambda: "open0" in told(0)[1], 20)
        submit(live, [("late0", 0, 0)], producer="q")
        with live.log._changed:
            assert live.log._changed.wait_for(lambda: "late0" in told(0)[1], 20)
        submit(live, [("open1", 1, 1)])
        assert told(0)[1] == ("g0", "g1", "g2", "open0", "late0", "open1")
        stale = live.source.ledger().dropped[DropReason.STALE]
        assert (stale.groups, stale.trajectories) == (2, 2)
        assert not live.log.failure
        live.digests(0)
    with opened(settings) as live:
        assert live.source.ledger().dropped[DropReason.STALE] == stale
        assert live.source.open_step(3, wanted=lambda: False) is None
        live.source.ledger().check()


def test_c7_the_version_is_that_of_dispatch(tmp_path):
    settings = config(tmp_path / "j", policy={"max_staleness": 0}, batches={"groups_per_batch": 1})
    with opened(settings) as live:
        group(live, "a", version=0)
        span = [replace(rollout("b", i, version=0), newest_policy_version=1) for i in range(2)]
        live.send("p", span)
        group(live, "c", version=1)
        assert live.groups_of(0) == ["a"] and live.groups_of(1) == ["c"]


def test_c8_finished_groups_beyond_the_step_stay(tmp_path):
    settings = config(tmp_path / "j")
    with opened(settings) as live:
        for name in "abcde":
            group(live, name)
        assert live.groups_of(0) == ["a", "b"]
        live.source.step_durable(1)
    with opened(settings) as live:
        assert live.groups_of(1) == ["c", "d"]
        group(live, "f")
        assert live.groups_of(2) == ["e", "f"]


def test_c10_r12_a_run_in_which_every_group_dies_ends_with_the_reason(tmp_path):
    settings = config(tmp_path / "j", policy={"zero_spread": ZeroSpread.DROP})
    with opened(settings) as live:
        outcome: list = []

        def wait() -> None:
            try:
                outcome.append(live.source.open_step(0))
            except SourceError as error:
                outcome.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        wait_until_waiting(live)
        for number in range(10):
            live.send("p", [rollout(f"g{number}", i, reward=1.0) for i in range(2)])
        assert not outcome, "ten in a row are borne"
        live.send("p", [rollout("g10", i, reward=1.0) for i in range(2)])
        thread.join(20)
        assert "11 groups in a row were dropped, 10 are borne" in str(outcome[0])
        assert "zero_spread: 11" in str(outcome[0])
    with opened(settings) as live, pytest.raises(SourceError, match="11 groups in a row"):
        live.source.open_step(0)
    # Told to bear more, it goes on.
    more = replace(settings, policy=replace(settings.policy, max_dead_groups=50))
    with opened(more) as live:
        group(live, "a")
        group(live, "b")
        assert live.groups_of(0) == ["a", "b"]
        assert live.source.open_step(0).summary.dropped == {"zero_spread": 22}


def test_c10_stale_groups_in_a_row_end_the_run(tmp_path):
    settings = config(
        tmp_path / "j",
        policy={"max_staleness": 0, "max_dead_groups": 3},
        batches={"groups_per_batch": 1},
    )
    with opened(settings) as live:
        group(live, "a")
        live.digests(0)
        # What lay here too long is dropped, however much it is.
        for number in range(9):
            group(live, f"lay{number}")
        group(live, "b", version=1)
        assert live.groups_of(1) == ["b"]
        # Producers that never take up new weights end the run.
        outcome: list = []

        def wait() -> None:
            try:
                outcome.append(live.source.open_step(2))
            except SourceError as error:
                outcome.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        for number in range(4):
            with live.log._changed:
                assert live.log._changed.wait_for(
                    lambda n=number: live.source._position == 11 + n and live.log._waiting, 20
                )
            group(live, f"old{number}")
        thread.join(20)
        assert "step 2: 4 groups in a row" in str(outcome[0]) and "stale: 13" in str(outcome[0])


def test_c11_a_step_without_anything_to_train_is_one_empty_micro_batch(tmp_path):
    """Its denominator is 0: the update is skipped, and policy versions do not move with it."""
    settings = config(
        tmp_path / "j",
        policy={"max_staleness": 0},
        batches={"groups_per_batch": 1},
        limits=TrajectoryLimits(tokens_per_row=64, vocab_size=1000, required_fields=()),
    )
    with opened(settings) as live:
        live.send("p", [tiny("empty", i, completion=(), reward=float(i)) for i in range(2)])
        live.send("p", [tiny("masked", i, mask=(0, 0, 0), reward=float(i)) for i in range(2)])
        # Still version 0: both updates before were skipped.
        live.send("p", [tiny("next", i, reward=float(i)) for i in range(2)])
        live.send("p", [tiny("after", i, reward=float(i), version=1) for i in range(2)])
        summaries = []
        for step in range(4):
            feed = live.source.open_step(step)
            assert feed is not None
            batches = list(feed.micro_batches)
            assert len(batches) == 1 == feed.summary.micro_batches
            assert batches[0].trained_tokens == feed.summary.trained_tokens
            summaries.append(feed.summary)
        assert [summary.trained_tokens for summary in summaries] == [0, 0, 4, 4]
        assert summaries[0].real_tokens == 0 and not any(s.dropped for s in summaries)
        live.source.step_durable(3)
        with live.log._changed:
            assert live.log._changed.wait_for(lambda: live.log._retention is None, 20)
    with opened(settings) as live:
        live.send("p", [tiny("more", i, reward=float(i), version=2) for i in range(2)])
        assert live.groups_of(4) == ["more"], "what was skipped is remembered"


# -- restarts ---------------------------------------------------------------------------------------


def test_e1_what_was_handed_out_and_not_trained_is_handed_out_again(tmp_path):
    """Yielded 0 to 9, trained 0 to 5, in flight 6 to 9: it goes on at 6."""
    settings = config(tmp_path / "j", batches={"groups_per_batch": 1})
    with opened(settings) as live:
        for number in range(10):
            group(live, f"g{number}")
        digests = [live.digests(step) for step in range(10)]
        assert live.source.data_cursor(6) == '{"next_step":6}'
        live.source.step_durable(6)
    with opened(settings) as live:
        assert [live.digests(step) for step in range(6, 10)] == digests[6:]
        assert [live.groups_of(step) for step in range(6, 10)] == [[f"g{k}"] for k in range(6, 10)]


def test_e2_r7_groups_that_were_made_and_not_used_are_not_lost(tmp_path):
    """Ids 0 to 7, two a step, four made at a time: after one step, 2 and 3 are still there."""
    settings = config(tmp_path / "j")
    trained: list[str] = []
    for start in range(0, 8, 4):
        with opened(settings) as live:
            for number in range(start, start + 4):
                group(live, f"g{number}")
            step = len(trained) // 2
            trained += live.groups_of(step)
            live.digests(step)
            live.source.step_durable(step + 1)
    with opened(settings) as live:
        for step in (2, 3):
            trained += live.groups_of(step)
    assert trained == [f"g{number}" for number in range(8)]


def test_r8_a_checkpoint_between_any_two_submits_sees_one_order(tmp_path):
    """The cursor, the pending groups and the open ones are one transaction."""
    settings = config(tmp_path / "j", batches={"groups_per_batch": 1})
    names = [f"g{number}" for number in range(6)]
    with opened(settings) as live:
        sent = [(name, index, 0) for index in range(2) for name in names]
        seen = []
        for at, member in enumerate(sent):
            submit(live, [member])
            if at >= len(names):
                step = at - len(names)
                seen += live.groups_of(step)
                live.source.step_durable(step + 1)
                live.close()
                live = Live(settings)
        assert seen == names
        live.source.ledger().check()
        assert live.log.totals().tokens_in == sum(
            rollout(name, index).total_tokens for name, index, _ in sent
        )
        live.close()


def test_r10_groups_in_flight_are_there_after_a_restart(tmp_path):
    settings = config(tmp_path / "j")
    live = Live(settings)
    group(live, "a")
    submit(live, [("b", 0, 0), ("c", 0, 0)])
    live.close()
    with opened(settings) as live:
        submit(live, [("c", 1, 0), ("b", 1, 0)])
        assert live.groups_of(0) == ["a", "c"], "in the order in which they were complete"
        assert live.log.group(2).group_id == "b"


def test_a_restored_run_may_ask_ahead_of_what_the_journal_knows_to_be_durable(tmp_path):
    """The checkpoint is the truth: it may cover more than the journal was told."""
    settings = config(tmp_path / "j", batches={"groups_per_batch": 1}, segment_bytes=1)
    with opened(settings) as live:
        for number in range(6):
            group(live, f"g{number}")
        digests = [live.digests(step) for step in range(5)][-1]
    with opened(settings) as live:
        live.source.step_durable(4)
        assert live.log.point.durable_step == 0, "not known where batch 4 begins"
        assert live.digests(4) == digests
        with live.log._changed:
            assert live.log._changed.wait_for(lambda: live.log.point.durable_step == 4, 20)
        assert live.log.point.position == 4


def test_a_new_journal_beside_a_trained_checkpoint_begins_with_its_step(tmp_path, caplog):
    """The journal was lost; the checkpoint is not: steps are not filled from the start again."""
    settings = config(tmp_path / "j", policy={"max_staleness": 1})
    with opened(settings) as live:
        live.source.step_durable(7)
        group(live, "a", version=7)
        group(live, "b", version=7)
        digests = live.digests(7)
        assert live.groups_of(7) == ["a", "b"]
        assert "the trainer is at step 7 and nothing of" in caplog.text
    with opened(settings) as live:
        assert live.digests(7) == digests
        group(live, "c", version=7)
        group(live, "d", version=8)
        assert live.groups_of(8) == ["c", "d"]
        live.source.ledger().check()
        with pytest.raises(SourceError, match=r"step 5: .* let go"):
            live.source.open_step(5)
    caplog.clear()
    with opened(settings) as live:
        live.source.step_durable(8)
        assert live.groups_of(8) == ["c", "d"]
        assert live.log.point.batch in (7, 8) and not caplog.records


# -- waiting ----------------------------------------------------------------------------------------


def test_a_step_waits_for_its_groups_and_can_be_left(tmp_path):
    with opened(config(tmp_path / "j")) as live:
        leave = threading.Event()
        outcome: list = []
        thread = threading.Thread(
            target=lambda: outcome.append(
                live.source.open_step(0, wanted=lambda: not leave.is_set())
            ),
            daemon=True,
        )
        thread.start()
        wait_until_waiting(live)
        group(live, "a")
        assert thread.is_alive()
        leave.set()
        thread.join(20)
        assert outcome == [None]
        # What was taken for the step stays in it.
        group(live, "b")
        assert live.groups_of(0) == ["a", "b"]
        live.digests(0)


class Sends:
    """Brings micro-batches nowhere."""

    def put(self, batch) -> int:
        return batch.payload_bytes


def test_a_restarted_worker_gets_earlier_steps_while_a_later_one_waits(tmp_path):
    """What step 1 waits for may itself wait for step 0 to be trained again."""
    with opened(config(tmp_path / "j")) as live:
        group(live, "a")
        group(live, "b")
        feeder = Feeder(live.source, Sends())
        try:

            def ready(step: int) -> list[str]:
                digests = []
                while True:
                    event = feeder.next_event(20.0)
                    assert isinstance(event, Ready) and event.step == step
                    digests.append(event.digest)
                    if event.last:
                        return digests

            feeder.start_step(0)
            digests = ready(0)
            feeder.start_step(1)
            wait_until_waiting(live)
            feeder.forget_worker()
            feeder.start_step(0)
            assert ready(0) == digests
            feeder.start_step(1)
            wait_until_waiting(live)
        finally:
            feeder.close()
        assert live.log._waiting == 0, "closing the feeder leaves nobody waiting"


def test_a_closed_source_gives_up(tmp_path):
    live = Live(config(tmp_path / "j"))
    live.source.close()
    assert live.source.open_step(0) is None
    live.close()


# -- conservation -----------------------------------------------------------------------------------

SENT = st.tuples(
    st.integers(0, 9),  # group
    st.integers(0, 3),  # index, one of them beyond the attempts
    st.sampled_from([0, 12, 30, 65]),  # tokens; 65 do not fit the row
    st.sampled_from([0.0, 1.0, 1.0, float("nan")]),
    st.integers(0, 2),  # version
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sent=st.lists(SENT, max_size=60),
    staleness=st.none() | st.integers(0, 2),
    zero_spread=st.sampled_from(ZeroSpread),
)
def test_every_token_is_trained_once_or_counted(tmp_path_factory, sent, staleness, zero_spread):
    """Per run and per step, over restarts with retention in between."""
    base = config(
        tmp_path_factory.mktemp("live") / "j",
        policy={
            "extra": 1,
            "max_staleness": staleness,
            "zero_spread": zero_spread,
            "max_dead_groups": 1000,
        },
    )
    live = Live(base)
    came, told, packed, trained, step = 0, {}, 0, set(), 0
    for at, (name, index, tokens, reward, version) in enumerate(sent):
        trajectory = rollout(f"g{name}", index, tokens=tokens, reward=reward, version=version)
        (receipt,) = live.send("p", [trajectory])
        if not receipt.duplicate and receipt.reason != "conflict":
            came += trajectory.total_tokens
        while (feed := live.source.open_step(step, wanted=lambda: False)) is not None:
            for batch in feed.micro_batches:
                packed += batch.real_tokens
            assert not trained & set(live.groups_of(step))
            trained |= set(live.groups_of(step))
            for reason, count in feed.summary.dropped.items():
                told[reason] = told.get(reason, 0) + count
            step += 1
        ledger = live.source.ledger()
        ledger.check()
        filling = sum(taken.total_tokens for taken in live.source._taken)
        assert ledger.tokens_in == came and ledger.tokens_assigned == packed + filling
        if at % 7 == 6:
            live.source.step_durable(step)
            live.close()
            live = Live(base)
            assert live.source.open_step(step, wanted=lambda: False) is None
            again = live.source.ledger()
            assert (again.tokens_in, again.tokens_assigned) == (came, packed + filling)
            assert again.duplicates == ledger.duplicates
            # Open groups that are too old for the next step may be dropped at any moment.
            assert {k: v for k, v in again.dropped.items() if k is not DropReason.STALE} == {
                k: v for k, v in ledger.dropped.items() if k is not DropReason.STALE
            }
    # What the steps told is what was dropped until the last one was whole.
    for reason, dropped in live.source.ledger().dropped.items():
        assert told.pop(reason.value, 0) <= dropped.trajectories
    assert not told
    live.close()


def test_the_books_are_even_at_any_moment(tmp_path):
    """They are read while groups complete and are dropped."""
    with opened(config(tmp_path / "j", policy={"group_size": 1, "max_staleness": 1})) as live:
        log, sent = live.log, 600
        futures = []

        def send() -> None:
            for at in range(sent):
                futures.append(log.append("p", at, tiny_one(at), cancelled=never))

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        checks = 0
        while thread.is_alive() or not futures[-1].done():
            live.source.ledger().check()
            checks += 1
        thread.join(20)
        assert all(future.result(timeout=20).accepted for future in futures) and checks > 10


def tiny_one(at: int):
    return tiny(f"g{at}", 0, logprobs=(-1.0, -2.0), reward=float(at))


def test_routing_and_old_logprobs_reach_the_micro_batch(tmp_path):
    settings = config(
        tmp_path / "j",
        limits=TrajectoryLimits(
            tokens_per_row=64,
            vocab_size=1000,
            required_fields=("routed_experts", "ref_logprobs", "sampling_logprobs"),
            num_experts=300,
            moe_layers=2,
            top_k=3,
        ),
        batches={"groups_per_batch": 1},
    )
    with opened(settings) as live:
        rng = np.random.default_rng(0)
        sent = [
            replace(
                plain := rollout("g", index),
                ref_logprobs=plain.sampling_logprobs * 2,
                routed_experts=rng.integers(-1, 300, (plain.total_tokens, 2, 3), dtype=np.int16),
            )
            for index in range(2)
        ]
        live.send("p", sent)
        feed = live.source.open_step(0)
        assert feed is not None
        (batch,) = list(feed.micro_batches)
        assert set(batch.arrays) == set(settings.fields.names)
        found = batch.arrays["routed_experts"][batch.arrays["segment_ids"] > 0]
        wanted = np.concatenate([t.routed_experts for t in sent])
        assert sorted(map(bytes, found)) == sorted(map(bytes, wanted))
        plain = live.log.append("p", 2, rollout("h", 0), cancelled=never).result(timeout=20)
        assert plain.reason == "missing_field"
