"""The durable log: receipts, offsets, fences, damage, full disks, the byte budget and time."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from orchestrator.feeder import SourceError
from orchestrator.groups import ZeroSpread
from orchestrator.ingest.ports import IngestClosed, OffsetGap
from orchestrator.journal.config import LiveConfig
from orchestrator.journal.errors import JournalBusy, JournalDamaged, JournalError, JournalMismatch
from orchestrator.journal.open import open_live
from orchestrator.trajectory import DropReason
from tests.journal.rig import Faults, Live, Model, config, never, opened, rollout

ROOT = Path(__file__).parents[2]


def wait_for(live: Live, condition) -> None:
    """Until the log changes to this."""
    deadline = monotonic() + 20
    with live.log._changed:
        while not condition():
            assert monotonic() < deadline, "it never came to this"
            live.log._changed.wait(0.01)


def blocked(live: Live) -> bool:
    """A caller waits for the budget, and nothing that is on its way will make room."""
    log = live.log
    return log._blocked == 1 and not log._pending_bytes and not log._within_budget(640)


def in_background(action) -> tuple[threading.Thread, list]:
    """Run it on a thread; what it returned or raised comes last in the list."""
    results: list = []

    def run() -> None:
        try:
            results.append(action())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


# -- receipts and offsets ---------------------------------------------------------------------------


def test_each_receipt_says_what_became_of_its_trajectory(tmp_path):
    with opened(config(tmp_path / "j", policy={"extra": 1})) as live:
        too_long = rollout("bad", 0, tokens=65)
        other = replace(rollout("g", 0), reward=7.0)
        receipts = live.send(
            "p",
            [
                rollout("g", 0),
                rollout("g", 0),
                other,
                rollout("g", 1),
                rollout("g", 2),
                too_long,
                replace(rollout("nan", 0), reward=float("nan")),
            ],
        )
        assert [(r.accepted, r.duplicate, r.reason) for r in receipts] == [
            (True, False, ""),
            (True, True, ""),
            (False, False, "conflict"),
            (True, False, ""),
            (False, False, "over_generation"),
            (False, False, "longer_than_row"),
            (False, False, "nonfinite_reward"),
        ]
        assert "'bad' index 0: 65 tokens" in receipts[5].message
        assert [r.offset for r in receipts] == list(range(7))
        drops = live.log.totals().drops
        assert drops[DropReason.LONGER_THAN_ROW].tokens == 65
        assert live.log.totals().duplicates == 1


def test_a_rejection_takes_an_offset_and_is_counted(tmp_path):
    settings = config(tmp_path / "j")
    with opened(settings) as live:
        receipt = live.log.reject("p", 0, "malformed", "no tokens").result(timeout=20)
        assert (receipt.accepted, receipt.reason, receipt.message) == (
            False,
            "malformed",
            "no tokens",
        )
        named = live.log.reject("p", 1, "token_out_of_vocabulary", "id 9").result(timeout=20)
        assert named.reason == "token_out_of_vocabulary"
        assert live.log.open_producer("p") == 2
        drops = live.log.totals().drops
    with opened(settings) as live:
        assert live.log.open_producer("p") == 2
        assert live.log.totals().drops == drops
        assert drops[DropReason.MALFORMED].trajectories == 1
        assert drops[DropReason.TOKEN_OUT_OF_VOCABULARY].trajectories == 1


def test_offsets_have_no_gap_and_old_ones_are_duplicates(tmp_path):
    with opened(config(tmp_path / "j")) as live:
        log = live.log
        with pytest.raises(OffsetGap, match="producer 'p' sent offset 3, and 0 is next"):
            log.append("p", 3, rollout("g", 0), cancelled=never)
        live.send("p", [rollout("g", 0)])
        again = log.append("p", 0, rollout("g", 0), cancelled=never).result(timeout=20)
        assert again.duplicate and not again.verdict_known
        assert log.totals().duplicates == 0, "by its offset: it is not even looked at"
        with pytest.raises(OffsetGap):
            log.reject("p", 5, "malformed", "")


def test_what_is_resent_while_it_is_on_its_way_gets_the_first_verdict(tmp_path):
    hold = threading.Event()

    def probe(operation: str) -> None:
        if operation == "payload.sync":
            assert hold.wait(20)

    with opened(config(tmp_path / "j"), probe=probe) as live:
        first = live.log.append("p", 0, rollout("g", 0, tokens=20), cancelled=never)
        second = live.log.append("p", 1, rollout("g", 1, tokens=65), cancelled=never)
        assert live.log.open_producer("p") == 0, "nothing is durable yet"
        again = [live.log.append("p", at, rollout("g", at), cancelled=never) for at in range(2)]
        assert not first.cancel(), "what is on its way will be durable"
        hold.set()
        assert first.result(timeout=20).accepted
        assert [f.result(timeout=20).accepted for f in again] == [True, False]
        assert [f.result(timeout=20).duplicate for f in again] == [True, True]
        assert second.result(timeout=20).reason == "longer_than_row"


def test_groups_that_take_no_more_are_told_by_cursor(tmp_path):
    settings = config(tmp_path / "j")
    with opened(settings) as live:
        assert live.log.cancellable_groups(0) == (0, ())
        live.group("a")
        cursor, groups = live.log.cancellable_groups(0)
        assert groups == ("a",) and live.log.cancellable_groups(cursor) == (cursor, ())
        live.send("p", [rollout("b", 0, tokens=65), rollout("c", 0)])
    with opened(settings) as live:
        later, groups = live.log.cancellable_groups(cursor)
        assert groups == ("b",), "the cursor outlives the process"
        assert live.log.cancellable_groups(0) == (later, ("a", "b"))


# -- fences -----------------------------------------------------------------------------------------


def test_r20_a_second_orchestrator_is_refused_at_once(tmp_path):
    settings = config(tmp_path / "j")
    with opened(settings), pytest.raises(JournalBusy, match=rf"process {os.getpid()}: one orch"):
        open_live(settings)
    open_live(settings).close()


CHILD = """
import sys
from pathlib import Path
from tests.journal.rig import Live, config, never, rollout

live = Live(config(Path(sys.argv[1]), segment_bytes=2000))
start = live.log.open_producer("p")
print(start, flush=True)
step = live.log.point.durable_step
for at in range(start, 10_000):
    live.log.append("p", at, rollout(f"g{at // 2}", at % 2), cancelled=never).result()
    print("acked", at, flush=True)
    while live.log.group(2 * step + 1) is not None:
        print("step", step, *live.digests(step), flush=True)
        live.source.step_durable(step - 1)
        step += 1
"""


def test_r10_killed_with_9_in_the_middle_of_it(tmp_path):
    """Real processes: each is killed while it writes and trains, and the next one goes on."""
    settings = config(tmp_path / "j", segment_bytes=2000)
    acked, steps = -1, {}

    def read(line: str) -> None:
        nonlocal acked
        words = line.split()
        if len(words) == 2 and words[0] == "acked" and line.endswith("\n"):
            acked = max(acked, int(words[1]))
        elif words and words[0] == "step" and line.endswith("\n"):
            assert steps.setdefault(int(words[1]), words[2:]) == words[2:]

    for lines in (20, 31, 47):
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CHILD), str(settings.folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout is not None
            start = int(child.stdout.readline())
            assert start in (acked + 1, acked + 2), "one may be durable and not told"
            with pytest.raises(JournalBusy, match=f"process {child.pid}"):
                open_live(settings)
            for _ in range(lines):
                read(child.stdout.readline())
            child.send_signal(signal.SIGKILL)
            for line in child.stdout:
                read(line)
        finally:
            child.kill()
            child.wait()
    with opened(settings) as live:
        durable = live.log.open_producer("p")
        assert durable in (acked + 1, acked + 2)
        model = Model(settings)
        for at in range(durable):
            model.submit(rollout(f"g{at // 2}", at % 2))
        assert live.log.totals().tokens_in == model.ledger().tokens_in
        assert live.log.totals().duplicates == 0
        first = live.log.point.durable_step
        assert len(steps) >= 10 and 0 < first <= max(steps)
        for step in range(first, len(model.steps)):
            steps[step] = live.digests(step)
        assert steps == dict(enumerate(model.steps))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"run_id": "other"}, "run_id run, and this run says other"),
        ({"policy": {"group_size": 3}}, "group_size 2, and this run says 3"),
        ({"policy": {"max_staleness": 1}}, "max_staleness none, and this run says 1"),
        ({"policy": {"zero_spread": ZeroSpread.DROP}}, "zero_spread keep, and this run says drop"),
        ({"batches": {"num_iterations": 2}}, "num_iterations 1, and this run says 2"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path, change, text):
    open_live(config(tmp_path / "j")).close()
    with pytest.raises(JournalMismatch, match=text):
        open_live(config(tmp_path / "j", **change))
    # What may change between two openings is no obstacle.
    open_live(config(tmp_path / "j", group_timeout_s=5.0, budget_bytes=1 << 20)).close()


# -- damage -----------------------------------------------------------------------------------------


def damaged(folder: Path) -> LiveConfig:
    settings = config(folder)
    with opened(settings) as live:
        for name in "abcd":
            live.group(name)
        live.digests(0)
    return settings


def test_a_torn_payload_file_is_named(tmp_path):
    settings = damaged(tmp_path / "j")
    (payload,) = settings.folder.glob("*.payload")
    with payload.open("r+b") as file:
        file.truncate(payload.stat().st_size - 1)
    with pytest.raises(JournalDamaged, match=r"00000000.payload ends at byte .*group 'd' index 1"):
        open_live(settings)
    payload.unlink()
    with pytest.raises(JournalDamaged, match=r"00000000\.payload is missing"):
        open_live(settings)


def test_a_changed_byte_ends_the_run_before_the_send(tmp_path):
    settings = damaged(tmp_path / "j")
    (payload,) = settings.folder.glob("*.payload")
    content = bytearray(payload.read_bytes())
    content[-1] ^= 1
    payload.write_bytes(content)
    with opened(settings) as live:
        live.digests(0)
        with pytest.raises(SourceError, match=r"step 1: .*group 'd' index 1 .* not what was ack"):
            live.digests(1)


def test_a_torn_tail_that_no_row_names_is_no_damage(tmp_path):
    settings = damaged(tmp_path / "j")
    (payload,) = settings.folder.glob("*.payload")
    with payload.open("ab") as file:
        file.write(b"half of a trajectory that was never acknowledged")
    (settings.folder / "00000007.payload").write_bytes(b"a file that no row names")
    with opened(settings) as live:
        live.digests(0)
        live.digests(1)
        live.group("e")
    assert sorted(path.name for path in settings.folder.glob("*.payload")) == [
        "00000000.payload",
        "00000008.payload",
    ]


def test_a_database_that_is_gone_or_garbage_is_named(tmp_path):
    settings = damaged(tmp_path / "j")
    database = settings.folder / "journal.sqlite"
    content = database.read_bytes()
    database.unlink()
    for _ in range(2):
        with pytest.raises(JournalDamaged, match=r"missing or empty, but payload files are"):
            open_live(settings)
    assert len(list(settings.folder.glob("*.payload"))) == 1, "nothing is deleted"
    database.write_bytes(b"no database at all" * 400)
    with pytest.raises(JournalDamaged, match=r"journal.sqlite cannot be read \(file is not a d"):
        open_live(settings)
    database.write_bytes(content)
    open_live(settings).close()


def test_a_missing_event_and_changed_rules_are_named(tmp_path):
    settings = damaged(tmp_path / "j")
    connection = sqlite3.connect(settings.folder / "journal.sqlite")
    connection.execute("UPDATE events SET outcome = 'dropped' WHERE seq = 2")
    connection.commit()
    with pytest.raises(JournalBusy, match="open in another program"):
        open_live(settings)
    connection.close()
    with pytest.raises(JournalDamaged, match="event 2 was dropped , and is accepted  now"):
        open_live(settings)
    connection = sqlite3.connect(settings.folder / "journal.sqlite")
    connection.execute("DELETE FROM events WHERE seq = 1")
    connection.commit()
    connection.close()
    with pytest.raises(JournalDamaged, match=r"event 1 is missing \(the next one is 2\)"):
        open_live(settings)


def test_other_bytes_than_were_journaled_are_never_sent(tmp_path):
    settings = damaged(tmp_path / "j")
    connection = sqlite3.connect(settings.folder / "journal.sqlite")
    connection.execute("UPDATE micro_batches SET digest = 'abc' WHERE step = 0 AND number = 1")
    connection.commit()
    connection.close()
    with opened(settings) as live:
        feed = live.source.open_step(0)
        assert feed is not None
        assert next(feed.micro_batches).digest
        with pytest.raises(SourceError, match="step 0: micro-batch 0/1 was journaled with digest"):
            next(feed.micro_batches)


def test_each_plan_is_durable_before_its_micro_batch_is_handed_out(tmp_path):
    settings = config(tmp_path / "j")
    commits: list[str] = []

    def probe(operation: str) -> None:
        if operation == "rows.committed":
            commits.append(operation)

    with opened(settings, probe=probe) as live:
        live.group("a")
        live.group("b")
        feed = live.source.open_step(0)
        assert feed is not None
        for number, _ in enumerate(feed.micro_batches):
            if not number:
                before = len(commits)
            assert len(commits) == before + number
        assert number
    connection = sqlite3.connect(settings.folder / "journal.sqlite")
    rows = connection.execute("SELECT step, number, groups FROM micro_batches").fetchall()
    connection.close()
    assert [row[:2] for row in rows] == [(0, index) for index in range(number + 1)]
    assert {name for row in rows for name in ("a", "b") if name in row[2]} == {"a", "b"}


# -- a disk that is full, or fails ------------------------------------------------------------------


@pytest.mark.parametrize(
    "where", ["payload.create", "payload.write", "payload.sync", "folder.sync", "rows.commit"]
)
def test_a_full_disk_acknowledges_nothing_loses_nothing_and_goes_on(tmp_path, where):
    settings = config(tmp_path / "j")
    full = threading.Event()
    full.set()
    faults = Faults(
        folder=settings.folder, full=lambda number, operation: operation == where and full.is_set()
    )
    with opened(settings, probe=faults) as live:
        futures = [
            live.log.append("p", at, rollout(f"g{at // 2}", at % 2), cancelled=never)
            for at in range(8)
        ]
        wait_for(live, lambda: live.log.counters.no_space_waits >= 3)
        assert "No space left" in live.log.stalled
        assert not any(future.done() for future in futures)
        assert live.log.totals().tokens_in == 0
        full.clear()
        assert all(future.result(timeout=20).accepted for future in futures)
        assert not live.log.stalled
        assert live.groups_of(0) == ["g0", "g1"] and live.groups_of(1) == ["g2", "g3"]
        digests = [live.digests(step) for step in range(2)]
    with opened(settings) as live:
        assert [live.digests(step) for step in range(2)] == digests


def test_a_full_disk_does_not_keep_the_trainer_from_making_room(tmp_path):
    """Only what is kept in reserve is free: plans and retention go on with that, and it heals."""
    settings = config(tmp_path / "j", segment_bytes=1)
    reserve = settings.folder / "reserve"
    full = threading.Event()

    def is_full(number: int, operation: str) -> bool:
        if not full.is_set() or operation in ("payload.unlink", "rows.committed"):
            return False
        # A file of rollouts finds no room until one is deleted; rows find the reserve's.
        files = len(list(settings.folder.glob("*.payload")))
        return reserve.exists() or (operation.startswith("payload") and files >= 4)

    faults = Faults(folder=settings.folder, full=is_full)
    with opened(settings, probe=faults) as live:
        for name in "ab":
            live.group(name, one_by_one=True)
        assert reserve.stat().st_size == 4 << 20
        full.set()
        future = live.log.append("p", 4, rollout("c", 0), cancelled=never)
        wait_for(live, lambda: live.log.counters.no_space_waits >= 2)
        live.digests(0)
        assert not future.done() and live.log.stalled
        live.source.step_durable(1)
        assert future.result(timeout=20).accepted
        full.clear()
        live.send("p", [rollout("c", 1)])
        assert reserve.exists() and not live.log.stalled


def test_a_database_that_reached_its_size_waits_for_room(tmp_path):
    """SQLite's own full disk, not a pretended one."""
    settings = config(tmp_path / "j")
    with opened(settings) as live:
        live.group("a")
        connection = live.log._database._connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={pages + 1}")
        futures = [
            live.log.append("q", at, rollout(f"g{at}" * 200, 0), cancelled=never)
            for at in range(40)
        ]
        wait_for(live, lambda: live.log.counters.no_space_waits >= 2)
        assert "full" in live.log.stalled
        connection.execute("PRAGMA max_page_count=1000000")
        assert all(future.result(timeout=20).accepted for future in futures)
        tokens = live.log.totals().tokens_in
    with opened(settings) as live:
        assert live.log.totals().tokens_in == tokens and live.log.open_producer("q") == 40


def test_a_full_disk_at_the_end_gives_up_with_the_reason(tmp_path):
    settings = config(tmp_path / "j")
    faults = Faults(
        folder=settings.folder, full=lambda number, operation: operation != "rows.begin"
    )
    live = Live(settings, probe=faults)
    future = live.log.append("p", 0, rollout("g", 0), cancelled=never)
    wait_for(live, lambda: live.log.counters.no_space_waits >= 1)
    live.source.close()
    live.log.close(drain_s=0.1)
    with pytest.raises(IngestClosed, match="disk is full"):
        future.result(timeout=20)
    with opened(settings) as live:
        assert live.log.open_producer("p") == 0


@pytest.mark.parametrize("where", ["payload.sync", "rows.commit"])
def test_r12_a_disk_that_fails_ends_the_run_with_the_reason(tmp_path, where):
    settings = config(tmp_path / "j")
    fails = threading.Event()

    def probe(operation: str) -> None:
        if operation == where and fails.is_set():
            raise OSError(errno.EIO, "Input/output error")

    with opened(settings, probe=probe) as live:
        live.group("a")
        thread, results = in_background(lambda: live.source.open_step(0))
        wait_for(live, lambda: live.log._waiting == 1)
        fails.set()
        future = live.log.append("p", 2, rollout("b", 0), cancelled=never)
        with pytest.raises(IngestClosed, match="Input/output error"):
            future.result(timeout=20)
        thread.join(20)
        assert isinstance(results[0], SourceError) and "Input/output" in str(results[0])
        with pytest.raises(IngestClosed, match="Input/output error"):
            live.log.open_producer("p")
        with pytest.raises(SourceError, match="Input/output error"):
            live.source.open_step(0)
    with opened(settings) as live:
        assert live.log.open_producer("p") == 2
        assert live.group("b").accepted and live.groups_of(0) == ["a", "b"]


# -- room -------------------------------------------------------------------------------------------


def big(name: str, index: int):
    return rollout(name, index, tokens=60)


def test_above_the_budget_producers_wait_and_a_durable_checkpoint_lets_them_on(tmp_path):
    with opened(config(tmp_path / "j", budget_bytes=6000, segment_bytes=1)) as live:
        sent = [big(f"g{at // 2}", at % 2) for at in range(12)]
        # One after another, so that each lies in a file of its own.
        thread, results = in_background(lambda: [live.send("p", [t])[0] for t in sent])
        wait_for(live, lambda: blocked(live))
        held = live.log.held_bytes
        assert 4000 < held <= 6000 and live.log.counters.over_budget_trajectories == 0
        durable = live.log.open_producer("p")
        live.digests(0)
        assert live.log.open_producer("p") == durable, "training alone frees nothing"
        live.source.step_durable(1)
        thread.join(20)
        assert len(results[0]) == 12 and all(receipt.accepted for receipt in results[0])
        assert live.log.counters.over_budget_trajectories == 0
        assert live.log.counters.deleted_bytes > 0
        live.digests(1)


def test_a_full_budget_never_keeps_the_trainer_waiting(tmp_path):
    """Without a durable checkpoint nothing is freed: steps are filled beyond the budget."""
    with opened(config(tmp_path / "j", budget_bytes=3000, segment_bytes=1)) as live:
        sent = [big(f"g{at // 2}", at % 2) for at in range(16)]
        thread, results = in_background(lambda: live.send("p", sent))
        for step in range(4):
            live.digests(step)
        thread.join(20)
        assert all(receipt.accepted for receipt in results[0])
        counters = live.log.counters
        assert counters.over_budget_trajectories and counters.over_budget_bytes
        # Bounded: nothing was admitted that no step waited for.
        assert live.log.totals().tokens_in == 16 * 60


def test_a_caller_that_goes_away_while_it_waits_leaves_nothing_behind(tmp_path):
    with opened(config(tmp_path / "j", budget_bytes=2000)) as live:
        gone = threading.Event()
        sent = [big(f"g{at // 2}", at % 2) for at in range(6)]

        def send():
            return [
                live.log.append("p", at, trajectory, cancelled=gone.is_set)
                for at, trajectory in enumerate(sent)
            ]

        thread, results = in_background(send)
        wait_for(live, lambda: blocked(live))
        queued = live.log._queued["p"]
        gone.set()
        thread.join(20)
        assert isinstance(results[0], OffsetGap), "it went on after it was told to go"
        assert live.log._queued["p"] == queued
        again = live.log.append("q", 0, big("x", 0), cancelled=lambda: True)
        assert again.cancelled() and live.log.open_producer("q") == 0


def test_closing_wakes_whoever_waits(tmp_path):
    live = Live(config(tmp_path / "j", budget_bytes=2000, policy={"group_size": 8}))
    sender, sent = in_background(lambda: live.send("p", [big("g", at) for at in range(8)]))
    wait_for(live, lambda: blocked(live))
    live.log.close()
    sender.join(20)
    assert isinstance(sent[0], IngestClosed)
    live.log.close()  # Again: nothing happens.
    live = Live(config(tmp_path / "k"))
    reader, read = in_background(lambda: live.source.open_step(3))
    wait_for(live, lambda: live.log._waiting == 1)
    live.close()
    reader.join(20)
    assert read[0] is None or isinstance(read[0], SourceError)


def test_what_is_durable_and_trained_is_deleted_and_still_recognised(tmp_path):
    settings = config(tmp_path / "j", segment_bytes=1)
    with opened(settings) as live:
        for name in "abcdef":
            live.group(name, one_by_one=True)
        live.send("p", [rollout("bad", 0, tokens=65)])
        for step in range(3):
            live.digests(step)
        files = len(list(settings.folder.glob("*.payload")))
        live.source.step_durable(2)
        wait_for(live, lambda: live.log._retention is None)
        left = len(list(settings.folder.glob("*.payload")))
        assert (files, left) == (12, 4)
        digests = live.digests(2)
        drops = live.log.totals().drops
        with pytest.raises(SourceError, match=r"step 1: its rollouts were let go.*below 2"):
            live.source.open_step(1)
    connection = sqlite3.connect(settings.folder / "journal.sqlite")
    assert connection.execute("SELECT count(*) FROM events").fetchone() == (4,)
    connection.close()
    with opened(settings) as live:
        assert live.digests(2) == digests
        assert live.log.totals().drops == drops and live.log.open_producer("p") == 13
        receipts = live.send("other", [rollout("a", 0), rollout("e", 1), rollout("bad", 0)])
        assert [receipt.duplicate for receipt in receipts] == [True] * 3
        live.source.ledger().check()
        with pytest.raises(SourceError, match=r"step 0: its rollouts were let go"):
            live.source.open_step(0)


def test_a_budget_of_garbage_is_freed(tmp_path):
    """Groups dropped for equal rewards leave no file behind."""
    settings = config(
        tmp_path / "j",
        policy={"zero_spread": ZeroSpread.DROP, "max_dead_groups": 100},
        budget_bytes=5000,
        segment_bytes=1,
    )
    with opened(settings) as live:
        for number in range(20):
            live.send("p", [rollout(f"g{number}", i, tokens=60, reward=1.0) for i in range(2)])
        assert live.log.held_bytes == 0 and not list(settings.folder.glob("*.payload"))
        assert live.log.counters.over_budget_trajectories == 0


# -- time -------------------------------------------------------------------------------------------


class Time:
    """Monotonic seconds that move when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def pass_time(live: Live, time: Time, seconds: float) -> None:
    """Let the log see so much time go by, a second at a time."""
    for _ in range(int(seconds)):
        with live.log._changed:
            time.now += 1.0
            live.log._tick()
            live.log._changed.notify_all()


def test_c5_r12_a_group_that_never_completes_times_out_with_its_reason(tmp_path):
    settings, time = config(tmp_path / "j", group_timeout_s=30.0), Time()
    with opened(settings, clock=time) as live:
        live.send("p", [rollout("stuck", 0, tokens=20)])
        pass_time(live, time, 20)
        live.send("p", [rollout("young", 0)])
        pass_time(live, time, 9)
        assert live.log.counters.groups_timed_out == 0
        pass_time(live, time, 2)
        wait_for(live, lambda: live.log.counters.groups_timed_out == 1)
        late = live.send("p", [rollout("stuck", 1)])[0]
        assert (late.accepted, late.reason) == (False, "group_already_dropped")
        assert live.group("young", producer="q").accepted
        drops = live.log.totals().drops
        assert drops[DropReason.INCOMPLETE_GROUP].tokens == 20
    # It is an event: a clock that says something else does not change it.
    with opened(settings, clock=Time()) as live:
        assert live.log.totals().drops == drops
        assert live.log.cancellable_groups(0)[1] == ("stuck", "young")


def test_a_clock_that_jumps_or_a_stopped_process_times_nothing_out(tmp_path):
    settings, time = config(tmp_path / "j", group_timeout_s=30.0), Time()
    with opened(settings, clock=time) as live:
        live.send("p", [rollout("g", 0)])
        for jump in (1e9, -1e9, 5e8):
            with live.log._changed:
                time.now += jump
                live.log._tick()
                live.log._changed.notify_all()
        assert live.send("p", [rollout("g", 1)])[0].accepted
        assert live.log.counters.groups_timed_out == 0


def test_a_full_budget_times_no_group_out(tmp_path):
    """Its members are what waits at the door."""
    settings, time = config(tmp_path / "j", group_timeout_s=5.0, budget_bytes=2400), Time()
    with opened(settings, clock=time) as live:
        sent = [big("g0", 0), big("g0", 1), big("g1", 0), big("g1", 1)]
        thread, results = in_background(lambda: live.send("p", sent))
        wait_for(live, lambda: blocked(live))
        wait_for(live, lambda: live.log._producers.get("p") == 3)
        for _ in range(50):
            with live.log._changed:
                time.now += 1.0
                assert live.log._changed.wait_for(lambda: live.log._blocked, 20)
                live.log._tick()
        live.digests(0)
        thread.join(20)
        assert all(receipt.accepted for receipt in results[0])
        assert live.log.counters.groups_timed_out == 0


# -- the end ----------------------------------------------------------------------------------------


def test_the_source_ends_durably(tmp_path):
    settings = config(tmp_path / "j")
    with opened(settings) as live:
        for name in "abc":
            live.group(name)
        live.send("p", [rollout("open", 0, tokens=20)])
        live.log.end_source()
        with pytest.raises(IngestClosed, match="source has ended"):
            live.log.append("p", 7, rollout("d", 0), cancelled=never)
        digests = live.digests(0)
        assert live.source.open_step(1) is None
        assert live.log.totals().drops[DropReason.INCOMPLETE_GROUP].tokens == 20
    with opened(settings) as live:
        assert live.digests(0) == digests and live.source.open_step(1) is None
        with pytest.raises(IngestClosed, match="source has ended"):
            live.log.open_producer("p")
        live.source.step_durable(1)
        wait_for(live, lambda: live.log._retention is None)
    with opened(settings) as live:
        assert live.source.open_step(1) is None
        live.source.ledger().check()


def test_a_version_that_no_column_holds_is_refused(tmp_path):
    with opened(config(tmp_path / "j")) as live:
        (receipt,) = live.send("p", [rollout("g", 0, version=2**64 - 1)])
        assert (receipt.accepted, receipt.reason) == (False, "malformed")
        assert "18446744073709551615" in receipt.message


def test_settings_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(ValueError, match="group_timeout_s is 0"):
        config(tmp_path, group_timeout_s=0)
    with pytest.raises(ValueError, match="budget_bytes is 0"):
        config(tmp_path, budget_bytes=0)
    with pytest.raises(ValueError, match="required_fields is not set"):
        config(tmp_path, limits=replace(config(tmp_path).limits, required_fields=None))
    with pytest.raises(JournalError, match="cannot be made"):
        (tmp_path / "file").write_text("")
        open_live(config(tmp_path / "file" / "j"))


def test_memory_holds_records_not_arrays(tmp_path):
    """What waits is on disk: a thousand times the tokens, the same memory."""
    settings = config(
        tmp_path / "j",
        limits=replace(config(tmp_path).limits, tokens_per_row=100_000),
    )
    with opened(settings) as live:
        live.send("p", [rollout(f"g{at}", 0, tokens=50_000) for at in range(4)])
        held = live.log._order.formation.state().open_groups
        assert len(held) == 4
        for group in held:
            for record in group.members:
                assert not any(
                    isinstance(getattr(record, name), np.ndarray | memoryview)
                    for name in record.__slots__
                )
        assert live.log._pending_bytes == 0 and not live.log._on_the_way


def test_nobody_else_can_read_it(tmp_path):
    (tmp_path / "j").mkdir(mode=0o755)
    with opened(config(tmp_path / "j")) as live:
        live.group("a")
        for path in (tmp_path / "j").iterdir():
            assert path.stat().st_mode & 0o077 == 0, path.name
