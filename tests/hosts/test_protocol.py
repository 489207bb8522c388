"""The command protocol between the hosts of one trainer: every fault ends the group, by name, in time.

In one process, with timed engines: what is tested is who does what, and what happens when a message
is lost, doubled, reordered or changed, and when a host dies, sticks or comes to another result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.bench.conformance.driver import Driver
from orchestrator.plan import RunPlan
from orchestrator.ports import Answer
from orchestrator.runner import RunFailed
from prestage.hosts.v1 import hosts_pb2 as pb
from prestage.microbatch import MicroBatchId
from prestage.protocol import Call
from prestage.trace import TraceRecord
from prestage.trainer.v1 import trainer_pb2
from tests.hosts.rig import BUDGETS, FAST, SHAPE, SPEC, Rig, Wire, batch, place, train
from tests.support.rig import Recorder, address_of, run_against, served
from trainer_worker.clock import RealClock
from trainer_worker.engine import DeviceSpan, EngineError, EngineParts, InvalidBatch, RunPosition
from trainer_worker.engines.processes import Processes
from trainer_worker.engines.timed import TimedConfig, create_timed
from trainer_worker.engines.timed_hosts import create_timed_host
from trainer_worker.hosts.chain import Chain
from trainer_worker.hosts.errors import HostLost, JoinRefused
from trainer_worker.hosts.group import HostGroup

SOON_S = 1.5
"""Well below every budget of the rig: what must be noticed at once."""


def alone(steps: int) -> str:
    """The digest that one process comes to."""
    engine = create_timed(FAST, RealClock()).training
    for step in range(steps):
        for index in range(2):
            engine.fwd_bwd(engine.prepare_fwd_bwd_input(batch(step, index)))
        engine.update()
    return engine.parameter_digest()


def lost_within(rig: Rig, seconds: float, text: str) -> None:
    assert rig.lost.wait(seconds), "nobody noticed"
    assert text in rig.group.lost.result(), rig.group.lost.result()


# -- without faults -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 6])
def test_every_host_trains_its_rows_and_all_come_to_what_one_process_does(count: int) -> None:
    with Rig(count=count) as rig:
        rig.parts.training.compile(SPEC)
        train(rig.parts, 3)
        assert rig.parts.training.parameter_digest() == alone(3)
        assert rig.parts.training.capabilities.process_count == count
        rig.parts.training.close()
        assert not rig.lost.is_set()


def test_d8_a_host_receives_its_part_and_no_more() -> None:
    content = 6 * batch(0, 0).payload_bytes
    with Rig(count=3) as rig:
        rig.parts.training.compile(SPEC)
        train(rig.parts, 3)
        for host in rig.hosts.values():
            # A third of the rows; a manifest with block digests beside them.
            assert content * 0.3 < host.keeper.received_bytes < content * 0.34 + 6 * 3000
            assert host.keeper.received_parts == 6
        facts = rig.group.facts()
        assert facts.shard_bytes == {w: h.keeper.received_bytes for w, h in rig.hosts.items()}


def test_a_part_that_is_there_is_not_sent_again() -> None:
    with Rig() as rig:
        rig.parts.training.compile(SPEC)
        engine = rig.parts.training
        engine.prepare_fwd_bwd_input(batch(0, 0))
        before = rig.hosts[1].keeper.received_bytes
        engine.abort_step()
        engine.fwd_bwd(engine.prepare_fwd_bwd_input(batch(0, 0))).wait()
        assert rig.hosts[1].keeper.received_bytes == before > 0


def test_an_upload_is_answered_when_every_host_holds_its_part() -> None:
    """So a stage copies to the device, and waits for no network."""
    holds: list[int] = []

    def watched(report: pb.Report) -> Sequence[pb.Report]:
        if report.HasField("held"):
            holds.append(report.held.received_bytes)
        return [report]

    with Rig(wires={1: Wire(to_leader=watched)}) as rig, served(rig.parts) as server:
        rig.parts.training.compile(SPEC)
        driver = Driver(address=address_of(server), shape=SHAPE)
        driver.open()
        driver.put(batch(0, 0))
        assert len(holds) == 1 and holds[0] > 0
        rig.parts.training.prepare_fwd_bwd_input(batch(0, 0))
        assert holds[1:] == [0], "it was confirmed, not sent again"
        driver.close()


def test_a_micro_batch_of_another_shape_is_refused_and_the_group_goes_on() -> None:
    other = replace(SHAPE, rows=2)
    with Rig() as rig, served(rig.parts) as server:
        rig.parts.training.compile(SPEC)
        driver = Driver(address=address_of(server), shape=other)
        driver.open()
        driver.put(driver.batch(0, 0))
        assert rig.hosts[1].keeper.received_bytes == 0
        assert rig.parts.scoring is not None
        wrong = driver.batch(0, 0)
        for call in (
            rig.parts.training.prepare_fwd_bwd_input,
            rig.parts.scoring.compute_logprobs,
            rig.parts.scoring.evaluate,
        ):
            with pytest.raises(InvalidBatch, match=r"is \[2, 64\]"):
                call(wrong)
        driver.close()
        train(rig.parts, 1)
        assert not rig.lost.is_set()


def test_a_part_on_its_way_while_its_step_is_restored_is_fetched_again(tmp_path: Path) -> None:
    """What is cleared on the follower in the middle of a fetch is not lost, and nobody hangs."""
    position = RunPosition(run_id="run", step=0, train_step=0, epoch=1, last_seq=9, data_cursor="")
    here: list[Rig] = []
    cleared: list[bool] = []

    def slow(message: bytes) -> bytes:
        if here and len(message) > 2000 and not cleared:
            cleared.append(True)
            assert here[0].parts.checkpoint is not None
            assert here[0].parts.checkpoint.restore(0) == position
        return message

    with Rig(wires={1: Wire(shard=slow)}, checkpoint_dir=tmp_path) as rig:
        assert rig.parts.checkpoint is not None
        rig.parts.training.compile(SPEC)
        rig.parts.checkpoint.begin_save(position).wait()
        here.append(rig)
        train(rig.parts, 1)
        assert cleared
        assert not rig.lost.is_set()


def test_what_raises_everywhere_is_the_callers_and_the_group_goes_on() -> None:
    config = replace(FAST, fail_call=frozenset({"fwd_bwd 0 1"}))
    with Rig(make=lambda where: create_timed_host(config, RealClock(), where)) as rig:
        engine = rig.parts.training
        engine.compile(SPEC)
        engine.fwd_bwd(engine.prepare_fwd_bwd_input(batch(0, 0)))
        with pytest.raises(EngineError, match="planned failure"):
            engine.fwd_bwd(engine.prepare_fwd_bwd_input(batch(0, 1)))
        engine.abort_step()
        assert not rig.lost.is_set()
        assert engine.parameter_digest() == alone(0)


def test_a_checkpoint_is_written_once_and_restored_everywhere(tmp_path: Path) -> None:
    position = RunPosition(
        run_id="run", step=2, train_step=2, epoch=1, last_seq=9, data_cursor="{}"
    )
    with Rig(count=3, checkpoint_dir=tmp_path) as rig:
        assert rig.parts.checkpoint is not None
        rig.parts.training.compile(SPEC)
        assert rig.parts.checkpoint.restore(None) is None
        train(rig.parts, 2)
        rig.parts.checkpoint.begin_save(position).wait()
        assert [path.name for path in tmp_path.iterdir()] == ["step-2.json"]
        train(rig.parts, 1, first=2)
        kept_on = rig.parts.training.parameter_digest()
        assert rig.parts.checkpoint.restore(None) == position
        train(rig.parts, 1, first=2)
        assert rig.parts.training.parameter_digest() == kept_on
        assert rig.parts.checkpoint.restore(7) is None
        assert not rig.lost.is_set()


def test_scores_and_weights_come_from_all() -> None:
    with Rig() as rig:
        assert rig.parts.scoring is not None and rig.parts.weights is not None
        rig.parts.training.compile(SPEC)
        assert rig.parts.scoring.compute_logprobs(batch(0, 0)).logprobs.shape == (6, 64)
        assert rig.parts.scoring.evaluate(batch(0, 0)) == {"rows": 6.0}
        assert rig.parts.weights.prepare_weight_sync(1 << 20) == 64
        assert rig.parts.weights.export_manifest(0)[0].name == "chain"
        rig.parts.weights.release_weight_sync(0)
        assert not rig.lost.is_set()


# -- messages -------------------------------------------------------------------------------------


def _numbered(
    number: int, change: Callable[[pb.Command], Sequence[pb.Command]]
) -> Callable[[pb.Command], Sequence[pb.Command]]:
    return lambda command: change(command) if command.number == number else [command]


class _Swap:
    """Holds one command back until the next has gone."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._held: list[pb.Command] = []

    def __call__(self, command: pb.Command) -> Sequence[pb.Command]:
        if command.number == self._number:
            self._held.append(command)
            return []
        if command.number == self._number + 1:
            return [command, *self._held]
        return [command]


def _renumbered(command: pb.Command) -> Sequence[pb.Command]:
    changed = pb.Command()
    changed.CopyFrom(command)
    changed.prepare.denominator += 1
    return [changed]


FAULTS: dict[str, tuple[Callable[[pb.Command], Sequence[pb.Command]], str]] = {
    "lost": (_numbered(3, lambda command: []), "lost, doubled or reordered"),
    "doubled": (_numbered(3, lambda command: [command, command]), "lost, doubled or reordered"),
    "reordered": (_Swap(3), "lost, doubled or reordered"),
    "changed": (_numbered(2, _renumbered), "diverged at command 2 (prepare)"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("who", [1, 2])
def test_a_command_that_does_not_arrive_as_sent_ends_the_group(fault: str, who: int) -> None:
    wire, text = FAULTS[fault]
    if isinstance(wire, _Swap):
        wire = _Swap(3)
    with Rig(count=3, wires={who: Wire(to_follower=wire)}) as rig:
        rig.parts.training.compile(SPEC)
        with pytest.raises(HostLost, match=f"host {who}"):
            train(rig.parts, 3)
            rig.parts.training.parameter_digest()
        lost_within(rig, SOON_S, text)


REPORTS: dict[str, tuple[Callable[[pb.Report], Sequence[pb.Report]], str]] = {
    "lost": (
        lambda report: [] if report.done.number == 3 else [report],
        "lost, doubled or reordered",
    ),
    "doubled": (
        lambda report: [report, report] if report.done.number == 3 else [report],
        "lost, doubled or reordered",
    ),
    "changed": (
        lambda report: (
            [pb.Report(done=pb.Done(number=3, chain=b"x" * 16, outcome=report.done.outcome))]
            if report.done.number == 3
            else [report]
        ),
        "diverged at command 3 (fwd_bwd)",
    ),
    "another sum": (
        lambda report: (
            [pb.Report(settled=pb.Settled(number=report.settled.number, digest=b"other"))]
            if report.settled.number == 6
            else [report]
        ),
        "the metrics of the update in command 6 are not the same",
    ),
    "nonsense": (
        lambda report: [pb.Report()] if report.done.number == 3 else [report],
        "means nothing",
    ),
}


@pytest.mark.parametrize("fault", REPORTS)
def test_a_report_that_is_not_what_it_should_be_ends_the_group(fault: str) -> None:
    wire, text = REPORTS[fault]
    with Rig(wires={1: Wire(to_leader=wire)}) as rig:
        rig.parts.training.compile(SPEC)
        with pytest.raises(HostLost, match=r"host 1|hosts"):
            for first in range(20):
                train(rig.parts, 1, first=first)
                rig.parts.training.parameter_digest()
        lost_within(rig, SOON_S, text)


def test_a_damaged_part_is_fetched_again_and_one_that_stays_damaged_ends_the_group() -> None:
    damage = {"left": 1}

    def damaged(message: bytes) -> bytes:
        if damage["left"] and len(message) > 2000:
            damage["left"] -= 1
            return message[:-1] + bytes([message[-1] ^ 1])
        return message

    with Rig(wires={1: Wire(shard=damaged)}) as rig:
        rig.parts.training.compile(SPEC)
        train(rig.parts, 1)
        assert rig.hosts[1].keeper.damaged == 1
        assert not rig.lost.is_set()
        damage["left"] = 1000
        with pytest.raises(HostLost, match="host 1 could not take its part of micro-batch run/1/0"):
            train(rig.parts, 1, first=1)


# -- hosts ----------------------------------------------------------------------------------------


class _Stuck:
    """A collective: nobody gets out of it while a host is missing."""

    def __init__(self, inner: object) -> None:
        self.inner = inner
        self.release = threading.Event()

    def wait(self) -> DeviceSpan:
        self.release.wait(30)
        return DeviceSpan()

    def peek(self) -> DeviceSpan:
        return DeviceSpan()


def _stuck_engine(where: Processes) -> EngineParts:
    """Its first micro-batch never ends, and its second dispatch waits for that."""
    parts = create_timed_host(FAST, RealClock(), where)
    engine = parts.training
    inner, stuck = engine.fwd_bwd, _Stuck(engine)

    def fwd_bwd(prepared: object) -> _Stuck:
        inner(prepared)  # type: ignore[arg-type]
        if engine.wedged:  # type: ignore[attr-defined]
            stuck.wait()
        engine.wedged = True  # type: ignore[attr-defined]
        return stuck

    engine.wedged = False  # type: ignore[attr-defined]
    engine.fwd_bwd = fwd_bwd  # type: ignore[method-assign, assignment]
    return parts


def test_a_host_that_dies_frees_everybody_who_waits_in_a_collective() -> None:
    with Rig(make=_stuck_engine) as rig:
        engine = rig.parts.training
        engine.compile(SPEC)
        first = engine.fwd_bwd(engine.prepare_fwd_bwd_input(batch(0, 0)))
        heard: list[BaseException] = []

        def wait(call: Callable[[], object]) -> threading.Thread:
            def run() -> None:
                try:
                    call()
                except HostLost as error:
                    heard.append(error)

            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            return thread

        prepared = engine.prepare_fwd_bwd_input(batch(0, 1))
        threads = [wait(first.wait), wait(lambda: engine.fwd_bwd(prepared))]
        time.sleep(0.1)
        assert all(thread.is_alive() for thread in threads), "they wait for the device"
        rig.kill(1)
        for thread in threads:
            thread.join(timeout=SOON_S)
        assert [str(error) for error in heard] == ["host 1 is gone: killed"] * 2
        for call in (engine.update, engine.abort_step, engine.parameter_digest):
            with pytest.raises(HostLost, match="host 1 is gone"):
                call()
        engine.close()


def test_r15_a_host_that_is_alive_but_stuck_is_found_by_its_progress() -> None:
    """Its reports go on; what it was told stays undone."""

    def beats_only(report: pb.Report) -> Sequence[pb.Report]:
        return [report] if report.HasField("beat") or report.HasField("held") else []

    budgets = replace(BUDGETS, stall_s=0.5)
    wire = Wire()
    with Rig(wires={1: wire}, budgets=budgets) as rig:
        rig.parts.training.compile(SPEC)
        wire.to_leader = beats_only
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(0.05):
                rig.group.report(1, pb.Report(beat=pb.Beat()))

        threading.Thread(target=beat, daemon=True).start()
        try:
            with pytest.raises(HostLost, match="alive, but stuck"):
                rig.parts.training.parameter_digest()
        finally:
            stop.set()


def test_a_host_that_says_nothing_is_lost_and_has_longer_while_it_compiles() -> None:
    now = [0.0]
    lost: list[str] = []
    group = HostGroup(
        num_processes=2,
        incarnation="i",
        settings={},
        budgets=replace(BUDGETS, silence_s=10.0, compile_s=100.0, stall_s=1000.0),
        now=lambda: now[0],
        on_lost=lost.append,
    )
    sent: list[pb.Command] = []
    group.join(pb.Hello(process_id=1, num_processes=2), sent.append)
    group.look()
    now[0] = 50.0  # Loads its engine.
    group.look()
    group.report(1, pb.Report(ready=pb.Ready()))
    now[0] = 59.0
    group.look()
    assert not lost
    now[0] = 61.0
    group.look()
    assert lost == ["host 1 said nothing for 11 s"]
    with pytest.raises(HostLost):
        group.command(pb.Command(update=pb.Update()))


def test_a_host_that_comes_to_another_result_ends_the_group() -> None:
    """Host 1 applies no update where the leader applies one."""

    def make(where: Processes) -> EngineParts:
        config = FAST
        if where.process_id == 1:
            config = replace(FAST, replays=frozenset({(1, 0)}))
        return create_timed_host(config, RealClock(), where)

    with Rig(make=make) as rig:
        rig.parts.training.compile(SPEC)
        with pytest.raises(HostLost, match=r"diverged at command \d+ \(update\)"):
            train(rig.parts, 2)
            rig.parts.training.parameter_digest()
        assert "retries 1" in rig.group.lost.result()


def test_what_raises_on_one_host_alone_ends_the_group() -> None:
    def make(where: Processes) -> EngineParts:
        failing = frozenset({"fwd_bwd 0 1"}) if where.process_id == 1 else frozenset()
        return create_timed_host(replace(FAST, fail_call=failing), RealClock(), where)

    with Rig(make=make) as rig:
        rig.parts.training.compile(SPEC)
        with pytest.raises(HostLost, match="planned failure of fwd_bwd 0 1"):
            train(rig.parts, 2)
            rig.parts.training.parameter_digest()


def test_what_fails_on_one_hosts_device_alone_ends_the_group() -> None:
    def make(where: Processes) -> EngineParts:
        failing = frozenset({(0, 1)}) if where.process_id == 1 else frozenset()
        return create_timed_host(replace(FAST, fail_device=failing), RealClock(), where)

    with Rig(make=make) as rig:
        rig.parts.training.compile(SPEC)
        with pytest.raises(HostLost, match="failed on one host and not on another"):
            train(rig.parts, 2)
            rig.parts.training.parameter_digest()


def test_a_checkpoint_that_one_host_does_not_see_ends_the_group(tmp_path: Path) -> None:
    def make(where: Processes) -> EngineParts:
        folder = tmp_path / str(where.process_id)
        folder.mkdir()
        return create_timed_host(FAST, RealClock(), where, folder)

    position = RunPosition(run_id="run", step=1, train_step=1, epoch=1, last_seq=9, data_cursor="")
    with Rig(make=make) as rig:
        assert rig.parts.checkpoint is not None
        rig.parts.training.compile(SPEC)
        train(rig.parts, 1)
        rig.parts.checkpoint.begin_save(position).wait()
        with pytest.raises(HostLost, match="came to 'no checkpoint'"):
            rig.parts.checkpoint.restore(None)


class _KillAt(Recorder):
    """Kills a host once a step has closed."""

    def __init__(self, rig: Rig, step: int) -> None:
        super().__init__(records=[], answers=[])
        self._rig, self._step = rig, step

    def on_call(self, record: TraceRecord, answer: Answer) -> None:
        super().on_call(record, answer)
        if record.call == Call.GET_METRICS.value and record.step == self._step:
            self._rig.kill(1)


def test_the_caller_of_a_lost_group_hears_why_in_the_call_and_in_get_state() -> None:
    with Rig() as rig, served(rig.parts) as server:
        plan = RunPlan(num_steps=50, pipeline=True, stage=True, latch_after=1000)
        with pytest.raises(RunFailed, match="host 1 is gone: killed"):
            run_against(address_of(server), plan, shape=SHAPE, observers=(_KillAt(rig, 2),))
        state = server.service.state()
        assert state.phase == trainer_pb2.PHASE_FAILED
        assert "host 1 is gone: killed" in state.failure


def test_a_host_that_is_lost_between_two_calls_shows_in_get_state() -> None:
    with Rig() as rig, served(rig.parts) as server:
        assert server.service.state().failure == ""
        rig.kill(1)
        assert server.service.state().failure == "host 1 is gone: killed"
        assert server.service.state().phase == trainer_pb2.PHASE_FAILED


# -- joining --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hello", "text"),
    [
        (pb.Hello(process_id=1, num_processes=4), "--num_processes=4"),
        (pb.Hello(process_id=0, num_processes=3), "followers of this group are 1 to 2"),
        (pb.Hello(process_id=3, num_processes=3), "followers of this group are 1 to 2"),
        (pb.Hello(process_id=1, num_processes=3), "--learning_rate=None"),
        (
            pb.Hello(process_id=1, num_processes=3, settings={"learning_rate": "2"}),
            "--learning_rate=2, the leader with --learning_rate=1",
        ),
    ],
)
def test_a_process_that_is_not_of_this_group_is_refused_by_name(hello: pb.Hello, text: str) -> None:
    group = HostGroup(num_processes=3, incarnation="i", settings={"learning_rate": "1"})
    with pytest.raises(JoinRefused, match=text):
        group.join(hello, lambda command: None)
    assert not group.lost.done()


def test_a_process_that_ended_does_not_come_back() -> None:
    group = HostGroup(num_processes=3, incarnation="i", settings={})
    hello = pb.Hello(process_id=1, num_processes=3)
    group.join(hello, lambda command: None)
    with pytest.raises(JoinRefused, match="joined already"):
        group.join(hello, lambda command: None)
    group.closed(1, "killed")
    with pytest.raises(HostLost):
        group.join(pb.Hello(process_id=2, num_processes=3), lambda command: None)


def test_processes_that_do_not_meet_end_with_an_error_that_names_the_missing() -> None:
    group = HostGroup(
        num_processes=3, incarnation="i", settings={}, budgets=replace(BUDGETS, join_s=0.2)
    )
    group.join(pb.Hello(process_id=1, num_processes=3), lambda command: None)
    with pytest.raises(HostLost, match=r"processes \[2\] of 3 did not join within 0.2 s"):
        group.await_joined()


def test_r18_a_host_that_dies_while_it_loads_ends_the_wait_at_once() -> None:
    group = HostGroup(num_processes=2, incarnation="i", settings={}, budgets=BUDGETS)
    group.join(pb.Hello(process_id=1, num_processes=2), lambda command: None)
    group.await_joined()
    threading.Timer(0.1, group.closed, args=(1, "exit status 1")).start()
    started_s = time.monotonic()
    with pytest.raises(HostLost, match="exit status 1"):
        group.await_ready({})
    assert time.monotonic() - started_s < SOON_S


def test_hosts_with_other_devices_are_found_before_anything_compiles() -> None:
    group = HostGroup(num_processes=2, incarnation="i", settings={}, budgets=BUDGETS)
    group.join(pb.Hello(process_id=1, num_processes=2), lambda command: None)
    group.report(1, pb.Report(ready=pb.Ready(engine={"devices": "4"})))
    with pytest.raises(HostLost, match="devices"):
        group.await_ready({"devices": "8"})


# -- the chain ------------------------------------------------------------------------------------

COMMANDS = st.lists(
    st.tuples(
        st.builds(
            lambda number, prepared: pb.Command(
                number=number, fwd_bwd=pb.FwdBwd(prepared=prepared)
            ),
            st.integers(1, 5),
            st.integers(1, 3),
        ),
        st.sampled_from(["applied", "skipped", ""]),
    ),
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(COMMANDS, COMMANDS)
def test_two_chains_end_alike_only_after_the_same_history(
    one: list[tuple[pb.Command, str]], other: list[tuple[pb.Command, str]]
) -> None:
    def last(history: list[tuple[pb.Command, str]]) -> bytes:
        chain, link = Chain("i"), b""
        for command, outcome in history:
            link = chain.add(command, outcome)
        return link

    same = [(c.SerializeToString(), o) for c, o in one] == [
        (c.SerializeToString(), o) for c, o in other
    ]
    assert (last(one) == last(other)) == same


def test_the_rigs_parts_are_what_the_engines_say() -> None:
    parts = create_timed_host(TimedConfig(), RealClock(), place(1, 3))
    assert parts.shards is not None
    shards = parts.shards.input_shards(SPEC)
    assert [(s.row_start, s.row_count) for s in shards] == [(0, 2), (2, 2), (4, 2)]
    assert np.all([s.token_count == 64 for s in shards])
    assert batch(0, 0).id == MicroBatchId(run_id="run", step=0, index=0)
