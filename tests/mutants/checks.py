"""The checks that mutants are caught by. Each is a test of the suite, or a smaller walk of one.

A check raises (or returns) what it found; None means that it saw nothing wrong.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator import invariants
from orchestrator.calls import Done, Event, NoteKind, Send
from orchestrator.check_trace import main as check_trace
from orchestrator.invariants import FROM_SCRATCH, Expectation, Rule
from orchestrator.ports import Answer
from orchestrator.pytest_plugin import CallSequence
from prestage.protocol import Call, Phase, Reason, Refusal, Request, StepState
from prestage.trace import DeviceRecord, TraceRecord, TraceWriter
from tests.boundary import test_golden as golden
from tests.boundary.script import Script
from tests.protocol import test_table
from tests.scenarios.in_process import WorkerBackend, undisturbed
from tests.scenarios.play import Play
from tests.scenarios.script import read_scenario
from tests.scenarios.test_scenarios import FILES as SCENARIOS
from tests.scenarios.test_scenarios import differs
from tests.walk import test_walk
from tests.walk.cases import plan
from tests.walk.model import Faults, Model, WalkConfig
from tests.walk.search import search
from trainer_worker import sessions
from trainer_worker.sessions import CallKey, Execute, Join, Replay, SessionState

Check = Callable[[], str | None]


@dataclass(frozen=True)
class Stated:
    """A check and the test of the suite that it stands for."""

    run: Check
    test: str


def _walk(arm: str, steps: int, faults: int, micro_batches: int = 2, **duties: int | bool) -> Check:
    def run() -> str | None:
        config = WalkConfig(
            plan=plan(arm, steps, **duties),
            micro_batches=micro_batches,
            faults=Faults(total=faults),
        )
        found = search(Model(config)).found
        return None if found is None else str(found)

    return run


# ---------------------------------------------------------------------------------------------
# Frozen sequences.


def _frozen() -> str | None:
    for name, flags in golden.ARMS.items():
        for size in (1, 3):
            for suffix, duties in golden.DUTIES.items():
                script = Script(plan=golden.plan(**flags, **duties), micro_batches=size).run()
                wrong = _compare(f"{name}/m{size}{suffix}", script.lines)
                if wrong:
                    return wrong
        late = Script(plan=golden.plan(**flags), micro_batches=3, late=(1, 2)).run()
        wrong = _compare(f"late/{name}", late.lines)
        if wrong:
            return wrong
    for name, (flags, answer) in golden.OTHER.items():
        arguments = {} if answer is None else {"answer": answer}
        script = Script(plan=golden.plan(**flags), micro_batches=3, **arguments).run()  # type: ignore[arg-type]
        wrong = _compare(f"other/{name}", [*script.lines, *golden._noted(script)])
        if wrong:
            return wrong
    return None


def _compare(name: str, lines: list[str]) -> str | None:
    wanted = (golden.GOLDEN / f"{name}.txt").read_text().splitlines()
    if lines == wanted:
        return None
    at = next(
        (i for i, (a, b) in enumerate(zip(lines, wanted, strict=False)) if a != b),
        min(len(lines), len(wanted)),
    )
    got = lines[at] if at < len(lines) else "(ends)"
    want = wanted[at] if at < len(wanted) else "(ends)"
    return f"golden/{name}.txt line {at + 1}: {got!r}, not {want!r}"


def _scored() -> str | None:
    script = Script(plan=plan("staged", 10, val_start_step=7), micro_batches=2).run()
    staged = [line for line in script.lines if line.startswith("stage_fwd_bwd")]
    if len(staged) != 6:
        return f"{len(staged)} of 9 boundaries are staged, not 6: the last is {staged[-1]}"
    return None


# ---------------------------------------------------------------------------------------------
# The latch.

_IDLE_WAIT_S = 2.8


def _staged_steps(device_wait_s: float, idle_wait_s: float) -> tuple[list[int], list[str]]:
    """Boundaries that were staged in 8 steps when every stage saw this wait."""

    def answer(send: Send, count: int) -> Event | None:
        if send.call is Call.COMPILE:
            return Done(idle_wait_seconds=idle_wait_s)
        if send.call is Call.GET_METRICS:
            return Done(stage_seconds=0.7, device_wait_seconds=device_wait_s)
        return None

    script = Script(plan=plan("staged", 8, latch_after=3), micro_batches=2, answer=answer).run()
    staged = [
        int(line.split("step=")[1].split()[0]) - 1
        for line in script.lines
        if line.startswith("stage_fwd_bwd")
    ]
    return staged, [note.kind.value for note in script.notes]


def _latch() -> str | None:
    for idle_s in (0.0, _IDLE_WAIT_S):
        staged, notes = _staged_steps(device_wait_s=idle_s, idle_wait_s=idle_s)
        if staged != [0, 1, 2]:
            return f"latch: stages that hid nothing (idle wait {idle_s} s) went on: {staged}"
        if notes.count(NoteKind.LATCHED_NOTHING_HIDDEN.value) != 1:
            return f"latch: not said exactly once: {notes}"
        if notes.count(NoteKind.STAGE_OUTLASTED.value) < 1:
            return f"latch: nothing said of a stage that outlasted the compute: {notes}"
        staged, notes = _staged_steps(device_wait_s=idle_s + 0.3, idle_wait_s=idle_s)
        if staged != list(range(7)):
            return f"latch: stages that hid 0.3 s (idle wait {idle_s} s) stopped: {staged}"
    return None


# ---------------------------------------------------------------------------------------------
# The step table and the sessions, one rule each.


def _table() -> str | None:
    wanted = test_table.CONTRACT.strip("\n").splitlines()
    for call, line in zip(Call, wanted, strict=True):
        cells = [test_table.TABLE[call][phase] for phase in Phase]
        letters = [test_table.LETTER[cell] if isinstance(cell, Phase) else "-" for cell in cells]
        got = f"{call.value:<39}{' '.join(letters)}"
        if got != line:
            return f"the step table says {got!r}, the contract {line!r}"
    return None


def _reachable() -> str | None:
    kept = test_table.STATES
    try:
        test_table.STATES = test_table.reachable()
        test_table.test_every_reachable_state_obeys_the_invariants()
    finally:
        test_table.STATES = kept  # The next test reads the true table's states.
    return None


def _skipped_update() -> str | None:
    state = test_table.advance(
        StepState(), Request(call=Call.FWD_BWD_APPLY, batch=test_table.ref(0, 0)), applied=False
    )
    if (state.step, state.train_step) != (1, 0):
        return f"a skipped update moved the version: {state}"
    return None


def _identity() -> str | None:
    for named in ((0, 1), (1, 0)):
        request = Request(call=Call.FWD_BWD, batch=test_table.ref(*named))
        refusal = test_table.check(StepState(), request)
        if refusal is None or refusal.reason is not Reason.WRONG_MICRO_BATCH:
            return f"another micro-batch than the next one is let through: {named}"
    return None


def _abort() -> str | None:
    stage = Request(call=Call.STAGE_FWD_BWD, batch=test_table.ref(0, 0))
    state = test_table.advance(StepState(train_step=3), stage)
    after = test_table.advance(state, Request(call=Call.ABORT_STEP))
    if after != StepState(train_step=3):
        return f"abort_step left something: staged {after.staged}, {after}"
    return None


def _session() -> SessionState[str]:
    opened = sessions.open_run(SessionState(incarnation="w1"), "run", 1)
    assert not isinstance(opened, Refusal)
    return opened


def _key(seq: int, *, epoch: int = 1, incarnation: str = "w1", digest: str = "") -> CallKey:
    return CallKey(
        run_id="run", incarnation=incarnation, epoch=epoch, seq=seq, payload_digest=digest
    )


def _sessions() -> str | None:
    fwd = Request(call=Call.FWD_BWD, batch=test_table.ref(0, 0))
    other = Request(call=Call.FWD_BWD, batch=test_table.ref(0, 0, "other"))
    state = _session()

    def reason(answer: object) -> object:
        return answer.reason if isinstance(answer, Refusal) else type(answer)

    running = sessions.started(state, fwd)
    done = sessions.committed(running, "first", test_table.advance(state.step, fwd))
    wanted: list[tuple[str, object, object]] = [
        ("a new call is carried out", sessions.admit(state, _key(1), fwd), Execute),
        ("a gap is refused", sessions.admit(state, _key(2), fwd), Reason.SEQUENCE_GAP),
        ("the running call is joined", sessions.admit(running, _key(1), fwd), Join),
        ("a running key is not reused", sessions.admit(running, _key(1), other), Reason.KEY_REUSED),
        ("the first result again", sessions.admit(done, _key(1), fwd), Replay),
        ("a key is not reused", sessions.admit(done, _key(1), other), Reason.KEY_REUSED),
        ("an old epoch", sessions.admit(done, _key(2, epoch=0), other), Reason.STALE_EPOCH),
        (
            "another process",
            sessions.admit(done, _key(2, incarnation="w0"), other),
            Reason.STALE_INCARNATION,
        ),
        ("damaged", sessions.admit(state, _key(1, digest="00"), fwd), Reason.DIGEST_MISMATCH),
        (
            "no run",
            sessions.admit(SessionState(incarnation="w1"), _key(1), fwd),
            Reason.NO_RUN,
        ),
        (
            "another run while this one is under way",
            sessions.open_run(done, "another", 2),
            Reason.WRONG_RUN,
        ),
    ]
    for what, got, want in wanted:
        if reason(got) is not want:
            return f"sessions: {what}: {got}, not {want}"
    replay = sessions.admit(done, _key(1), fwd)
    if not isinstance(replay, Replay) or replay.result != "first":
        return f"sessions: another result than the first: {replay}"
    if sessions.withdrawn(running) != state:
        return "sessions: a refusal found late took the seq or changed the state"
    try:
        sessions.open_run(done, "run", 1)
    except ValueError:
        return None
    return "sessions: an epoch was given twice"


# ---------------------------------------------------------------------------------------------
# The checker of histories and the search, on histories and products that are known to be wrong.


def _record(call: str, seq: int, step: int = -1, index: int = -1, **more: object) -> TraceRecord:
    base = TraceRecord(
        side="worker",
        call=call,
        run_id="run",
        epoch=1,
        seq=seq,
        incarnation="w1",
        step=step,
        index=index,
        digest=f"d{step}.{index}" if index >= 0 else "",
    )
    return TraceRecord(**{**base.__dict__, **more})  # type: ignore[arg-type]


OPEN = _record("open_run", 0)
FWD, APPLY, DEFER = "fwd_bwd", "fwd_bwd apply_optimizer", "fwd_bwd apply_optimizer defer_update"
STAGE, APPLY_DEFERRED = "stage_fwd_bwd", "apply_deferred_update"
_STEP_0 = (_record(FWD, 1, 0, 0), _record(DEFER, 2, 0, 1))
GOOD = (
    OPEN,
    *_STEP_0,
    _record(STAGE, 3, 1, 0),
    _record(APPLY_DEFERRED, 4, train_step_after=1),
    _record("get_metrics", 0, 0),
    _record("save_checkpoint", 5),
    _record(FWD, 6, 1, 0, used_staged_input=True),
    _record(APPLY, 7, 1, 1, train_step_after=2),
)
WRONG: Mapping[Rule, tuple[TraceRecord, ...]] = {
    Rule.TRAINED_ONCE: (OPEN, _record(FWD, 1, 0, 0), _record(FWD, 2, 0, 0)),
    Rule.ONE_UPDATE: (OPEN, _record(APPLY, 1, 0, 0), _record("update", 2)),
    Rule.STEP_ORDER: (OPEN, *_STEP_0, _record(FWD, 3, 1, 0)),
    Rule.STAGED_USE: (*GOOD[:7], _record(FWD, 6, 1, 0)),
    Rule.VERSION: (OPEN, *_STEP_0, _record(APPLY_DEFERRED, 3, train_step_after=2)),
    Rule.SNAPSHOT: (OPEN, *_STEP_0, _record("save_checkpoint", 3)),
    Rule.METRICS: (OPEN, *_STEP_0, _record("get_metrics", 0, 0)),
    Rule.CARRIED_OUT_ONCE: (OPEN, _record(FWD, 1, 0, 0), _record(FWD, 1, 0, 1)),
    Rule.FENCE: (OPEN, _record("open_run", 0, epoch=2), _record(FWD, 1, 0, 0, epoch=1)),
    Rule.REFUSAL: (
        OPEN,
        _record(
            FWD, 1, 0, 0, outcome="WRONG_MICRO_BATCH", phase_before="CLOSED", phase_after="OPEN"
        ),
    ),
    Rule.SAME_CONTENT: (
        OPEN,
        _record(FWD, 1, 0, 0),
        _record("abort_step", 2),
        _record(FWD, 3, 0, 0, digest="repacked"),
    ),
    Rule.FAILED_STEP: (
        OPEN,
        _record(FWD, 1, 0, 0, outcome="ENGINE_FAILED"),
        _record(APPLY, 2, 0, 0),
    ),
    Rule.RESTORE: (OPEN, *GOOD[1:7], _record("restore_checkpoint", 6, train_step_after=7)),
}


def _histories() -> str | None:
    expect = Expectation(may_skip_updates=False)
    clean = invariants.check_history(GOOD, expect, start=FROM_SCRATCH)
    if clean:
        return f"checker: a right history is called wrong: {clean[0][1]}"
    for rule, records in WRONG.items():
        found = invariants.check_history(records, expect, start=FROM_SCRATCH)
        if rule not in {violation.rule for _, violation in found}:
            return f"checker: {rule.value} is broken and not found"
        if found[0][0] != len(records) - 1:
            return f"checker: {rule.value} is found at call {found[0][0]}, not the last"
    return _device_histories()


def _device_histories() -> str | None:
    def device(kind: str, step: int, index: int, started_s: float) -> DeviceRecord:
        return DeviceRecord(
            kind=kind, step=step, index=index, started_s=started_s, finished_s=started_s + 1
        )

    right = (device("fwd_bwd", 0, 0, 0), device("update", 0, -1, 1), device("fwd_bwd", 1, 0, 2))
    early_update = (device("fwd_bwd", 0, 0, 0), device("update", 0, -1, 0.5))
    early_compute = (*right[:2], device("fwd_bwd", 1, 0, 1.5))
    for records, wrong in ((right, False), (early_update, True), (early_compute, True)):
        ledger, found = invariants.DeviceLedger(), 0
        for record in records:
            ledger, violations = invariants.observe_device(ledger, record)
            found += len(violations)
        if bool(found) is not wrong:
            return f"checker: the device's order {'breaks' if wrong else 'holds'} and is misjudged"
    return None


def _searcher() -> str | None:
    test_walk.test_search_counts_and_passes_a_clean_product()
    test_walk.test_search_gives_the_shortest_way_to_what_is_broken()
    test_walk.test_search_finds_a_wrong_end()
    test_walk.test_search_finds_a_run_that_waits_for_ever()
    test_walk.test_search_finds_a_run_that_goes_round_for_ever()
    return None


def _scenarios() -> str | None:
    for path in SCENARIOS:
        scenario = read_scenario(path)
        log = Play(scenario, WorkerBackend(scenario, undisturbed(scenario))).run()
        wrong = differs(scenario, log)
        if wrong:
            return "; ".join([wrong, *(line for line in log if line.startswith("BROKEN"))])
    return None


def _trace_file(folder: Path, name: str, side: str, records: tuple[TraceRecord, ...]) -> str:
    writer = TraceWriter(folder / name, side=side)
    for record in records:
        writer.write(record)
    writer.close()
    return str(folder / name)


def _check_trace() -> str | None:
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(name)
        right = _trace_file(folder, "right", "worker", GOOD)
        wrong = _trace_file(folder, "wrong", "worker", WRONG[Rule.STEP_ORDER])
        lying = _trace_file(
            folder, "lying", "orchestrator", (_record("abort_step", 1, side="orchestrator"),)
        )
        if check_trace([right]) != 0:
            return "check-trace: a right trace does not pass"
        if check_trace([wrong]) != 1:
            return "check-trace: a wrong trace passes"
        if check_trace([right, lying]) != 1:
            return "check-trace: a caller that claims what the worker never did passes"
    return None


def _plugin() -> str | None:
    with tempfile.TemporaryDirectory() as name:
        frozen = Path(name) / "run.txt"
        for text, fails in (("fwd_bwd step=0 index=0\n", False), ("update\n", True)):
            frozen.write_text(text)
            sequence = CallSequence(folder=Path(name), reason=None)
            record = _record(FWD, 1, 0, 0, side="orchestrator")
            sequence.on_call(record, Answer(event=Done()))
            try:
                sequence.check("run")
            except pytest.fail.Exception:
                failed = True
            else:
                failed = False
            if failed is not fails:
                return f"plugin: {text!r} {'failed' if failed else 'passed'}"
    return None


_WALK = "tests/walk/test_walk.py::test_walk"
_GOLDEN = "tests/boundary/test_golden.py"
_HERE = "tests/mutants/test_checks.py::test_right_code_passes"
CHECKS: Mapping[str, Stated] = {
    "walk stock": Stated(_walk("stock", 2, 1, checkpoint_every=1), f"{_WALK}[stock]"),
    "walk stock 2": Stated(_walk("stock", 2, 2, checkpoint_every=1), f"{_WALK}[stock]"),
    "walk pipelined": Stated(_walk("pipelined", 2, 1), f"{_WALK}[pipelined]"),
    "walk staged": Stated(
        _walk("staged", 2, 1, checkpoint_every=1, weight_sync_every=1), f"{_WALK}[staged]"
    ),
    "walk staged 2": Stated(_walk("staged", 2, 2, checkpoint_every=1), f"{_WALK}[staged]"),
    "walk staged 3 steps": Stated(_walk("staged", 3, 1), f"{_WALK}[staged_3_steps]"),
    "walk staged after": Stated(_walk("staged_after", 2, 1), f"{_WALK}[staged_after]"),
    "walk zero-gap": Stated(
        _walk("zero_gap", 3, 1, checkpoint_every=2), f"{_WALK}[zero_gap_checkpoint]"
    ),
    "walk zero-gap single": Stated(
        _walk("zero_gap", 3, 1, micro_batches=1), f"{_WALK}[zero_gap_single]"
    ),
    "walk scored": Stated(
        _walk("staged", 3, 0, val_start_step=2), f"{_WALK}[scored_and_evaluated]"
    ),
    "frozen": Stated(_frozen, f"{_GOLDEN}::test_frozen"),
    "6 of 9": Stated(_scored, f"{_GOLDEN}::test_val_start_step_7_stages_6_of_9_boundaries"),
    "latch": Stated(_latch, f"{_HERE}[latch]"),
    "table": Stated(_table, "tests/protocol/test_table.py::test_the_table_is_the_contract"),
    "reachable": Stated(
        _reachable, "tests/protocol/test_table.py::test_every_reachable_state_obeys_the_invariants"
    ),
    "skipped update": Stated(_skipped_update, f"{_HERE}[skipped update]"),
    "identity": Stated(_identity, f"{_HERE}[identity]"),
    "table abort": Stated(_abort, f"{_HERE}[table abort]"),
    "sessions": Stated(_sessions, f"{_HERE}[sessions]"),
    "checker": Stated(_histories, f"{_HERE}[checker]"),
    "scenarios": Stated(
        _scenarios, "tests/scenarios/test_scenarios.py::test_real_worker_in_process"
    ),
    "check-trace": Stated(_check_trace, "tests/test_check_trace.py::test_names_file_line_and_rule"),
    "plugin": Stated(
        _plugin,
        "tests/test_pytest_plugin.py::test_fails_on_another_sequence_with_a_readable_diff",
    ),
    "search": Stated(_searcher, "tests/walk/test_walk.py::test_search_*"),
}


def outcome(name: str) -> str | None:
    """What a check finds now; None: nothing."""
    try:
        return CHECKS[name].run()
    except AssertionError as error:
        return str(error) or f"{name}: assertion failed"
    except (ValueError, RuntimeError, KeyError, IndexError, TypeError) as error:
        return f"{name}: {type(error).__name__}: {error}"
