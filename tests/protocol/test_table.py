"""The step table: complete, and as the contract says. Written out here a second time, by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prestage.protocol import (
    CLOSING_CALLS,
    FWD_BWD_CALLS,
    TABLE,
    BatchRef,
    Call,
    Phase,
    Reason,
    Request,
    StepState,
    advance,
    allowed_calls,
    check,
    expected_batch,
    fail,
    restored,
)

# call: CLOSED, ACCUMULATING, UPDATE_DEFERRED, FAILED. Letters: the phase after; "-": refused.
CONTRACT = """
put_micro_batch                        C A D -
fwd_bwd                                A A - -
fwd_bwd apply_optimizer                C C - -
fwd_bwd apply_optimizer defer_update   D D - -
stage_fwd_bwd                          C - D -
apply_deferred_update                  - - C -
update                                 - C - -
get_metrics                            C A - -
save_checkpoint                        C - - -
prepare_weight_sync                    C - - -
compute_logprobs                       C A - -
evaluate                               C A - -
restore_checkpoint                     C C C C
abort_step                             C C C C
open_run                               C A D F
get_state                              C A D F
get_capabilities                       C A D F
health                                 C A D F
compile                                C - - -
export_weights                         C A D -
release_weight_sync                    C A D -
"""
LETTER = {
    Phase.CLOSED: "C",
    Phase.ACCUMULATING: "A",
    Phase.UPDATE_DEFERRED: "D",
    Phase.FAILED: "F",
}


def test_the_table_is_the_contract() -> None:
    lines = []
    for call in Call:
        cells = [TABLE[call][phase] for phase in Phase]
        letters = [LETTER[cell] if isinstance(cell, Phase) else "-" for cell in cells]
        lines.append(f"{call.value:<39}{' '.join(letters)}")
    assert "\n".join(lines) == CONTRACT.strip("\n")


def ref(step: int, index: int, digest: str = "d") -> BatchRef:
    return BatchRef(step=step, index=index, digest=digest)


def request_for(state: StepState, call: Call) -> Request:
    expected = expected_batch(state, call)
    if expected is None:
        return Request(call=call)
    staged = state.staged if call in FWD_BWD_CALLS else None
    return Request(call=call, batch=staged or ref(*expected))


def reachable(depth: int = 12) -> set[StepState]:
    """Every state within `depth` legal calls (and engine failures) of the start."""
    seen = {StepState()}
    frontier = set(seen)
    for _ in range(depth):
        found: set[StepState] = set()
        for state, call in itertools.product(frontier, Call):
            request = request_for(state, call)
            found.add(fail(state, request, "boom"))
            if call is Call.RESTORE_CHECKPOINT or check(state, request) is not None:
                continue
            for applied in (True, False) if call in CLOSING_CALLS else (True,):
                found.add(advance(state, request, applied=applied))
        frontier = {s for s in found - seen if s.step <= 2 and s.micro_step <= 2}
        seen |= frontier
    return seen


STATES = reachable()


def test_every_reachable_state_obeys_the_invariants() -> None:
    assert len(STATES) >= 80
    for state in STATES:
        assert state.train_step <= state.step
        assert state.micro_step == len(state.trained)
        assert [(r.step, r.index) for r in state.trained] == [
            (state.step, index) for index in range(state.micro_step)
        ]
        if state.phase is Phase.CLOSED:
            assert state.micro_step == 0
        if state.phase in (Phase.ACCUMULATING, Phase.UPDATE_DEFERRED):
            assert state.micro_step > 0
        if state.staged is not None:
            ahead = 1 if state.phase is Phase.UPDATE_DEFERRED else 0
            assert state.phase in (Phase.CLOSED, Phase.UPDATE_DEFERRED)
            assert (state.staged.step, state.staged.index) == (state.step + ahead, 0)


def test_refusals_name_reason_and_allowed_calls_and_advance_refuses_the_same() -> None:
    for state, call in itertools.product(STATES, Call):
        request = request_for(state, call)
        refusal = check(state, request)
        if refusal is None:
            continue
        assert refusal.message
        assert call not in refusal.allowed or isinstance(TABLE[call][state.phase], Phase)
        assert set(refusal.allowed) == set(allowed_calls(state.phase))
        with pytest.raises(ValueError, match="advance"):
            advance(state, request)


def test_train_step_moves_only_in_a_closing_call_that_applied() -> None:
    for state, call in itertools.product(STATES, Call):
        request = request_for(state, call)
        if call is Call.RESTORE_CHECKPOINT or check(state, request) is not None:
            continue
        for applied in (True, False):
            after = advance(state, request, applied=applied)
            closes = call in CLOSING_CALLS
            assert after.step - state.step == (1 if closes else 0)
            assert after.train_step - state.train_step == (1 if closes and applied else 0)


@given(st.integers(0, 3), st.integers(0, 3), st.sampled_from(sorted(FWD_BWD_CALLS, key=str)))
def test_only_the_next_micro_batch_is_taken(step: int, index: int, call: Call) -> None:
    state = StepState(phase=Phase.ACCUMULATING, step=1, micro_step=1, trained=(ref(1, 0),))
    refusal = check(state, Request(call=call, batch=ref(step, index)))
    if (step, index) == (1, 1):
        assert refusal is None
    else:
        assert refusal is not None
        assert refusal.reason is Reason.WRONG_MICRO_BATCH


def test_the_staged_input_is_used_or_dropped_by_abort_only() -> None:
    staged = advance(StepState(), Request(call=Call.STAGE_FWD_BWD, batch=ref(0, 0, "staged")))
    other = Request(call=Call.FWD_BWD, batch=ref(0, 0, "other"))
    refusal = check(staged, other)
    assert refusal is not None
    assert refusal.reason is Reason.STAGED_MISMATCH
    again = check(staged, Request(call=Call.STAGE_FWD_BWD, batch=ref(0, 0, "staged")))
    assert again is not None
    assert again.reason is Reason.ALREADY_STAGED
    used = advance(staged, Request(call=Call.FWD_BWD, batch=ref(0, 0, "staged")))
    assert used.staged is None
    dropped = advance(staged, Request(call=Call.ABORT_STEP))
    assert dropped.staged is None
    assert check(dropped, other) is None
    for call in (Call.SAVE_CHECKPOINT, Call.GET_METRICS, Call.EVALUATE):
        assert advance(staged, Request(call=call)).staged == staged.staged


def test_a_failure_inside_an_update_makes_the_parameters_suspect() -> None:
    deferred = StepState(phase=Phase.UPDATE_DEFERRED, micro_step=1, trained=(ref(0, 0),))
    suspect = fail(deferred, Request(call=Call.APPLY_DEFERRED_UPDATE), "boom")
    refusal = check(suspect, Request(call=Call.ABORT_STEP))
    assert refusal is not None
    assert refusal.reason is Reason.PARAMETERS_SUSPECT
    assert check(suspect, Request(call=Call.RESTORE_CHECKPOINT)) is None
    assert restored(suspect, step=4, train_step=3) == StepState(step=4, train_step=3)
    merely_failed = fail(deferred, Request(call=Call.STAGE_FWD_BWD, batch=ref(1, 0)), "boom")
    aborted = advance(merely_failed, Request(call=Call.ABORT_STEP))
    assert (aborted.phase, aborted.step, aborted.micro_step) == (Phase.CLOSED, 0, 0)


def test_the_fingerprint_tells_payloads_apart() -> None:
    requests = [
        Request(call=Call.FWD_BWD, batch=ref(0, 0)),
        Request(call=Call.FWD_BWD, batch=ref(0, 0, "other")),
        Request(call=Call.FWD_BWD, batch=ref(0, 1)),
        Request(call=Call.FWD_BWD_APPLY, batch=ref(0, 0)),
        Request(call=Call.FWD_BWD_DEFER, batch=ref(0, 0)),
        Request(call=Call.SAVE_CHECKPOINT, detail="a"),
        Request(call=Call.SAVE_CHECKPOINT, detail="b"),
    ]
    assert len({request.payload_digest for request in requests}) == len(requests)
