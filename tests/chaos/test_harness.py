"""The harness itself: what is lost, doubled, changed or never happened is told."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from prestage.trace import Trace, TraceRecord
from tests.chaos.faults import Action, Fault
from tests.chaos.harness import Outcome, trained_by
from tests.chaos.points import certain, covering, every_fault

WHOLE = tuple((step, index, f"d{step}{index}") for step in range(2) for index in range(2))
UNDISTURBED = Outcome(
    faults=(),
    fired=0,
    replay=None,
    parameter_digest="p",
    trained=WHOLE,
    problems=(),
    worker_starts=1,
    orchestrator_starts=1,
    seconds=1.0,
    calls={},
)


def call(name: str, step: int, index: int = -1, version: int = 0, seq: int = 1) -> TraceRecord:
    return TraceRecord(
        side="worker",
        call=name,
        seq=seq,
        step=step,
        index=index,
        digest=f"d{step}{index}" if index >= 0 else "",
        train_step_after=version,
    )


def trace(origin_s: float, *records: TraceRecord) -> Trace:
    return Trace(side="worker", clock_origin_s=origin_s, records=records)


def step_calls(step: int) -> list[TraceRecord]:
    return [
        call("fwd_bwd", step, 0, version=step),
        call("fwd_bwd apply_optimizer defer_update", step, 1, version=step),
        call("apply_deferred_update", step, version=step + 1),
    ]


def test_an_equal_run_has_no_problem() -> None:
    assert not UNDISTURBED.judged(UNDISTURBED).problems


def test_what_is_lost_doubled_or_changed_is_a_problem() -> None:
    for change, word in (
        ({"trained": WHOLE[:-1]}, "lost"),
        ({"trained": (*WHOLE, WHOLE[0])}, "twice"),
        ({"trained": WHOLE[::-1]}, "order"),
        ({"trained": (*WHOLE[:-1], (1, 1, "other"))}, "lost"),
        ({"parameter_digest": "q"}, "parameters"),
    ):
        problems = replace(UNDISTURBED, **change).judged(UNDISTURBED).problems
        assert any(word in problem for problem in problems), change


def test_a_new_worker_counts_from_what_it_restored() -> None:
    first = trace(0, *step_calls(0), *step_calls(1)[:2])
    restored = trace(10, call("restore_checkpoint", 0, version=1), *step_calls(1))
    assert trained_by([restored, first]) == WHOLE
    from_scratch = trace(10, *step_calls(0), *step_calls(1))
    assert trained_by([first, from_scratch]) == WHOLE
    skipped = trace(10, *step_calls(1))
    assert trained_by([first, skipped]) == WHOLE[2:]


def test_a_step_that_is_applied_twice_shows() -> None:
    twice = trace(0, *step_calls(0), *step_calls(0), *step_calls(1))
    assert len(trained_by([twice])) == 6
    assert replace(UNDISTURBED, trained=trained_by([twice])).doubled() == [(0, 0), (0, 1)]


def test_an_aborted_step_and_a_refusal_count_for_nothing() -> None:
    refused = replace(call("fwd_bwd", 0, 0), outcome="STALE_EPOCH")
    aborted = trace(
        0, call("fwd_bwd", 0, 0), call("abort_step", 0), refused, *step_calls(0), *step_calls(1)
    )
    assert trained_by([aborted]) == WHOLE


CALLS = {
    "worker": Counter({"FwdBwd": 12, "GetState": 3}),
    "orchestrator": Counter({"FwdBwd": 12, "(a rollout arrives)": 40, "journal: rows.commit": 9}),
}


def test_every_call_gets_every_fault_that_makes_sense_there() -> None:
    faults = every_fault(CALLS)
    assert len(faults) == len(set(faults))
    for action in Action:
        at = Counter(fault.method for fault in faults if fault.action is action)
        if action.side == "worker":
            assert at == CALLS["worker"]
        elif not action.at_intake:
            assert at["FwdBwd"] == 12
    killed = Counter(fault.method for fault in faults if fault.action is Action.CALLER_KILL_BEFORE)
    assert killed == CALLS["orchestrator"]


def test_a_chosen_part_covers_every_kind_of_fault_and_every_method() -> None:
    faults = every_fault(CALLS)
    chosen = covering(faults, seed=3, count=40)
    assert len(chosen) == len(set(chosen)) == 40
    assert chosen == covering(faults, seed=3, count=40) != covering(faults, seed=4, count=40)
    assert {fault.action for fault in chosen} == {fault.action for fault in faults}
    assert {fault.method for fault in chosen} == {fault.method for fault in faults}


def test_calls_that_some_runs_make_less_often_are_left_out() -> None:
    other = {**CALLS, "worker": Counter({"FwdBwd": 12, "GetState": 1})}
    assert certain([CALLS, other])["worker"] == Counter({"FwdBwd": 12, "GetState": 1})


def test_a_fault_says_what_and_where() -> None:
    fault = Fault(action=Action.DROP_REPLY, method="FwdBwd", occurrence=3)
    assert str(fault) == "reply dropped at FwdBwd 3"
