"""The rules, each one named. A rule gets a fresh run on the worker and raises `Broken`.

The rules read the step table; they know nothing of how a worker is built. FAILED cannot be reached
without a fault inside the worker, so its column is left to the worker's own tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import grpc
import numpy as np

from orchestrator.bench.conformance.driver import Driver, Refused
from prestage.microbatch import MicroBatch
from prestage.protocol import SEQUENCED_CALLS, TABLE, Call, Phase, Reason
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.wire.digest import batch_digest
from prestage.wire.errors import CODE_OF_REASON, classify


class Broken(Exception):
    """A rule does not hold; says what was expected and what was seen."""


class NotApplicable(Exception):
    """The worker says that it cannot do what the rule is about."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The worker under test, positioned at a closed step with nothing staged."""

    driver: Driver
    able: pb.GetCapabilitiesResponse

    @property
    def step(self) -> int:
        return self.driver.state().step


def expect(holds: bool, text: str) -> None:
    if not holds:
        raise Broken(text)


def refused(reason: Reason, make: Callable[[], object], what: str) -> Refused:
    """`make` must be refused for `reason`, with its status code."""
    try:
        make()
    except Refused as error:
        expect(
            error.reason is reason,
            f"{what}: refused for {error.reason.value}, expected {reason.value} ({error})",
        )
        code = CODE_OF_REASON[reason]
        expect(
            error.refusal.code is code,
            f"{what}: status {error.refusal.code.name}, expected {code.name}",
        )
        return error
    except grpc.RpcError as error:
        raise Broken(
            f"{what}: answered [{classify(error)}] without google.rpc.ErrorInfo of domain prestage"
        ) from error
    raise Broken(f"{what}: was carried out, expected a refusal for {reason.value}")


def still(driver: Driver) -> tuple[object, ...]:
    """The state without what may move by itself."""
    state = driver.state()
    staged = (state.staged.step, state.staged.index, state.staged.digest)
    return (
        state.phase,
        state.step,
        state.micro_step,
        state.train_step,
        staged,
        tuple((ref.step, ref.index, ref.digest) for ref in state.trained),
        state.epoch,
        state.last_seq,
        state.incarnation,
    )


def put(subject: Subject, step: int, count: int = 3) -> None:
    for index in range(count):
        subject.driver.put(subject.driver.batch(step, index))


def settle(subject: Subject) -> None:
    """Back to a closed step with nothing staged."""
    subject.driver.open()
    subject.driver.call(Call.ABORT_STEP)


def enter(subject: Subject, phase: Phase) -> int:
    """Bring the worker into a phase; returns the open or next step."""
    driver, step = subject.driver, subject.step
    put(subject, step)
    driver.put(driver.batch(step + 1, 0))
    if phase is not Phase.CLOSED:
        driver.call(Call.FWD_BWD, step, 0)
    if phase is Phase.UPDATE_DEFERRED:
        driver.call(Call.FWD_BWD_DEFER, step, 1)
    seen = driver.phase
    expect(seen is phase, f"entering {phase.value}: the worker is in {seen.value}")
    return step


def make(subject: Subject, phase: Phase, call: Call, step: int) -> object:
    """One call with the arguments that the protocol expects in this phase."""
    driver = subject.driver
    index = {Phase.CLOSED: 0, Phase.ACCUMULATING: 1, Phase.UPDATE_DEFERRED: 2}[phase]
    if call is Call.STAGE_FWD_BWD:
        ahead = 1 if phase is Phase.UPDATE_DEFERRED else 0
        return driver.call(call, step + ahead, 0)
    if call in SEQUENCED_CALLS:
        return driver.call(call, step, index)
    if call is Call.PUT_MICRO_BATCH:
        return driver.put(driver.batch(step + 1, 1))
    if call is Call.OPEN_RUN:
        return driver.open()
    if call is Call.GET_METRICS:
        return driver.read(call, step - 1)
    return driver.read(call, step, 2)


_NEEDS: Final[Mapping[Call, str]] = {
    Call.STAGE_FWD_BWD: "can_stage",
    Call.FWD_BWD_DEFER: "can_defer_update",
    Call.SAVE_CHECKPOINT: "can_checkpoint",
    Call.RESTORE_CHECKPOINT: "can_checkpoint",
    Call.PREPARE_WEIGHT_SYNC: "can_export_weights",
    Call.RELEASE_WEIGHT_SYNC: "can_export_weights",
    Call.COMPUTE_LOGPROBS: "can_score",
    Call.EVALUATE: "can_score",
}


def can(able: pb.GetCapabilitiesResponse, call: Call) -> bool:
    """Whether the worker says that it can make this call."""
    answers = {
        "can_stage": able.can_stage,
        "can_defer_update": able.can_defer_update,
        "can_checkpoint": able.can_checkpoint,
        "can_export_weights": able.can_export_weights,
        "can_score": able.can_score,
    }
    need = _NEEDS.get(call)
    return need is None or answers[need]


def need(subject: Subject, *calls: Call) -> None:
    for call in calls:
        if not can(subject.able, call):
            raise NotApplicable(f"the worker cannot {call.value}")


# -- the rules --------------------------------------------------------------------------------


def every_call_in_every_phase_answers_as_the_table_says(subject: Subject) -> None:
    """Refused calls are refused for the table's reason and change nothing; others are carried out."""
    skip = {Call.HEALTH, Call.COMPILE, Call.RESTORE_CHECKPOINT, Call.EXPORT_WEIGHTS}
    for phase in (Phase.CLOSED, Phase.ACCUMULATING, Phase.UPDATE_DEFERRED):
        for call in Call:
            cell = TABLE[call][phase]
            if call in skip or not can(subject.able, call):
                continue
            if phase is Phase.UPDATE_DEFERRED and not subject.able.can_defer_update:
                continue
            step = enter(subject, phase)
            what = f"{call.value} in {phase.value}"
            if isinstance(cell, Reason):
                before = still(subject.driver)
                error = refused(cell, partial(make, subject, phase, call, step), what)
                expect(still(subject.driver) == before, f"{what}: the refusal changed the state")
                for name in ("phase", "step", "micro_step", "train_step", "allowed"):
                    expect(name in error.refusal.metadata, f"{what}: ErrorInfo lacks {name!r}")
            else:
                try:
                    make(subject, phase, call, step)
                except Refused as error:
                    raise Broken(
                        f"{what}: refused ({error}), expected it to be carried out"
                    ) from error
                expect(
                    subject.driver.phase is cell,
                    f"{what}: led to {subject.driver.phase.value}, expected {cell.value}",
                )
            settle(subject)


def the_same_key_returns_the_first_result_and_applies_once(subject: Subject) -> None:
    """A lost reply may be asked for again; nothing is doubled."""
    driver, step = subject.driver, subject.step
    put(subject, step)
    driver.call(Call.FWD_BWD, step, 0)
    first = driver.call(Call.FWD_BWD_APPLY, step, 1)
    version, digest = driver.state().train_step, driver.digest()
    again = driver.call(Call.FWD_BWD_APPLY, step, 1, seq=driver.seq)
    expect(again == first, "the same key did not return the first result")
    expect(
        driver.state().train_step == version and driver.digest() == digest,
        "the same key moved the version or the parameters: it was carried out twice",
    )


def a_key_with_another_payload_is_refused(subject: Subject) -> None:
    """A seq belongs to one payload for good."""
    driver, step = subject.driver, subject.step
    put(subject, step)
    driver.call(Call.FWD_BWD, step, 0)
    before = still(driver)
    refused(
        Reason.KEY_REUSED,
        lambda: driver.call(Call.ABORT_STEP, seq=driver.seq),
        "another payload under a used seq",
    )
    expect(still(driver) == before, "the refusal of a reused key changed the state")


def a_gap_in_the_sequence_is_refused(subject: Subject) -> None:
    """A call whose predecessor never arrived is not carried out."""
    driver, step = subject.driver, subject.step
    put(subject, step)
    refused(
        Reason.SEQUENCE_GAP,
        lambda: driver.call(Call.FWD_BWD, step, 0, seq=driver.seq + 2),
        "a seq beyond the next one",
    )


def a_refusal_consumes_no_seq(subject: Subject) -> None:
    """After a refusal the same seq is the next one still."""
    driver, step = subject.driver, subject.step
    put(subject, step)
    refused(Reason.NOTHING_ACCUMULATED, lambda: driver.call(Call.UPDATE), "an empty update")
    try:
        driver.call(Call.FWD_BWD, step, 0)
    except Refused as error:
        raise Broken(f"the seq of a refused call cannot be used: {error}") from error


def open_run_fences_off_older_epochs(subject: Subject) -> None:
    """A new caller gets a larger epoch; the old one is refused from then on."""
    driver, step = subject.driver, subject.step
    put(subject, step)
    old = Driver(
        address=driver.address,
        run_id=driver.run_id,
        shape=driver.shape,
        connect=driver.connect,
    )
    try:
        old.epoch, old.incarnation, old.seq = driver.epoch, driver.incarnation, driver.seq
        before = driver.epoch
        driver.open()
        expect(driver.epoch > before, f"open_run gave epoch {driver.epoch} after {before}")
        refused(
            Reason.STALE_EPOCH,
            lambda: old.call(Call.FWD_BWD, step, 0),
            "a call of the older epoch",
        )
        refused(
            Reason.STALE_EPOCH,
            lambda: old.put(old.batch(step + 1, 2)),
            "a put of the older epoch",
        )
    finally:
        old.close()


def another_incarnation_is_refused(subject: Subject) -> None:
    """A call meant for the worker's former process is not carried out by this one."""
    driver, step = subject.driver, subject.step
    put(subject, step)
    true_one = driver.incarnation
    driver.incarnation = "0" * 16
    try:
        refused(
            Reason.STALE_INCARNATION,
            lambda: driver.call(Call.FWD_BWD, step, 0),
            "a call for another incarnation",
        )
    finally:
        driver.incarnation = true_one


def only_the_next_micro_batch_is_trained(subject: Subject) -> None:
    """A FwdBwd names (step, micro_step)."""
    driver, step = subject.driver, subject.step
    put(subject, step)
    for wrong in ((step, 1), (step + 1, 0)):
        refused(
            Reason.WRONG_MICRO_BATCH,
            partial(driver.call, Call.FWD_BWD, *wrong),
            f"micro-batch {wrong} when ({step}, 0) is next",
        )


def a_micro_batch_must_be_there_and_whole(subject: Subject) -> None:
    """Missing bytes, bytes of another digest and bad values are refused before the engine."""
    driver, step = subject.driver, subject.step
    refused(
        Reason.MICRO_BATCH_MISSING,
        lambda: driver.call(Call.FWD_BWD, step, 0, digest="ab" * 16),
        "a micro-batch that was not put",
    )
    batch = driver.batch(step, 0)
    damaged = changed(batch, "advantages", np.float32(7.25), digest="cd" * 16)

    def put_and_train() -> None:
        driver.put(damaged)  # A worker may find the damage here or at its use.
        driver.call(Call.FWD_BWD, step, 0, digest=damaged.digest)

    refused(Reason.DIGEST_MISMATCH, put_and_train, "bytes that do not give their digest")
    for field, value in (
        ("advantages", np.float32("nan")),
        ("sampling_logprobs", np.float32("inf")),
        ("tokens", np.int32(-1)),
    ):
        bad = changed(batch, field, value)

        def put_bad(made: MicroBatch = bad) -> None:
            driver.put(made)
            driver.call(Call.FWD_BWD, step, 0, digest=made.digest)

        refused(Reason.INVALID_BATCH, put_bad, f"{field} = {value}")
    expect(driver.phase is Phase.CLOSED, "a refused micro-batch changed the phase")
    driver.put(batch)
    driver.call(Call.FWD_BWD, step, 0)


def changed(batch: MicroBatch, field: str, value: np.generic, *, digest: str = "") -> MicroBatch:
    """The micro-batch with one real value changed; with its right digest unless one is given."""
    array = batch.arrays[field].copy()
    array[0, 3] = value
    made = MicroBatch(
        id=batch.id,
        rows=batch.rows,
        tokens_per_row=batch.tokens_per_row,
        row_lengths=batch.row_lengths,
        arrays={**batch.arrays, field: array},
    )
    return MicroBatch(
        id=made.id,
        rows=made.rows,
        tokens_per_row=made.tokens_per_row,
        row_lengths=made.row_lengths,
        arrays=made.arrays,
        digest=digest or batch_digest(made),
    )


def the_staged_input_is_used_or_dropped_by_abort_only(subject: Subject) -> None:
    """With something staged, the next FwdBwd is that micro-batch."""
    need(subject, Call.STAGE_FWD_BWD)
    driver, step = subject.driver, subject.step
    put(subject, step)
    other = changed(driver.batch(step, 0), "advantages", np.float32(0.5))
    driver.put(other)
    driver.call(Call.STAGE_FWD_BWD, step, 0)
    refused(
        Reason.STAGED_MISMATCH,
        lambda: driver.call(Call.FWD_BWD, step, 0, digest=other.digest),
        "another micro-batch than the staged one",
    )
    refused(
        Reason.ALREADY_STAGED, lambda: driver.call(Call.STAGE_FWD_BWD, step, 0), "a second stage"
    )
    response = driver.call(Call.FWD_BWD, step, 0)
    used = isinstance(response, pb.FwdBwdResponse) and response.used_staged_input
    expect(used, "the staged input was not used")
    driver.call(Call.ABORT_STEP)
    driver.call(Call.STAGE_FWD_BWD, step, 0)
    driver.call(Call.ABORT_STEP)
    expect(not driver.state().HasField("staged"), "abort_step left the staged input")
    driver.call(Call.FWD_BWD, step, 0, digest=other.digest)


def nothing_but_the_update_moves_the_version(subject: Subject) -> None:
    """train_step moves by one in the closing call, and in no other."""
    driver, step = subject.driver, subject.step
    put(subject, step)
    driver.put(driver.batch(step + 1, 0))
    version = driver.state().train_step
    parameters = driver.digest()

    def unmoved(after: str) -> None:
        expect(driver.state().train_step == version, f"{after} moved train_step")
        expect(driver.digest() == parameters, f"{after} moved the parameters")

    driver.call(Call.FWD_BWD, step, 0)
    unmoved("fwd_bwd")
    if subject.able.can_defer_update:
        driver.call(Call.FWD_BWD_DEFER, step, 1)
        unmoved("fwd_bwd with defer_update")
        if subject.able.can_stage:
            driver.call(Call.STAGE_FWD_BWD, step + 1, 0)
            unmoved("stage_fwd_bwd")
        driver.call(Call.APPLY_DEFERRED_UPDATE)
    else:
        driver.call(Call.FWD_BWD_APPLY, step, 1)
    expect(driver.state().train_step == version + 1, "the update did not move train_step by one")
    expect(driver.digest() != parameters, "the update did not move the parameters")


def abort_drops_the_step_and_nothing_else(subject: Subject) -> None:
    """After an abort the same step gives what it would have given."""
    driver, step = subject.driver, subject.step
    put(subject, step)
    version, parameters = driver.state().train_step, driver.digest()
    driver.call(Call.FWD_BWD, step, 0)
    before = driver.state().last_seq
    driver.call(Call.ABORT_STEP)
    state = driver.state()
    expect(state.last_seq == before + 1, "abort_step consumed no seq")
    expect(
        (state.train_step, state.step, state.micro_step) == (version, step, 0),
        "abort_step moved more than the open step's micro-batches",
    )
    expect(driver.digest() == parameters, "abort_step moved the parameters")


def metrics_are_read_by_cursor_and_stay(subject: Subject) -> None:
    """Reading clears nothing; only closed steps are read."""
    driver, step = subject.driver, subject.step
    put(subject, step)
    driver.call(Call.FWD_BWD_APPLY, step, 0)
    first = driver.read(Call.GET_METRICS, step)
    again = driver.read(Call.GET_METRICS, step)
    expect(isinstance(first, pb.GetMetricsResponse), "get_metrics gave no response")
    assert isinstance(first, pb.GetMetricsResponse)
    assert isinstance(again, pb.GetMetricsResponse)
    expect(
        first.steps[0].values == again.steps[0].values and len(again.steps) == 1,
        "reading metrics again gave something else",
    )
    refused(
        Reason.METRICS_NOT_KEPT,
        lambda: driver.read(Call.GET_METRICS, step + 1),
        "metrics of a step that is not closed",
    )


def scoring_leaves_accumulation_untouched(subject: Subject) -> None:
    """Log-probs and evaluation between two micro-batches change nothing."""
    need(subject, Call.EVALUATE, Call.COMPUTE_LOGPROBS)
    driver, step = subject.driver, subject.step
    put(subject, step)
    driver.call(Call.FWD_BWD, step, 0)
    before = still(driver)
    driver.read(Call.EVALUATE, step, 2)
    driver.read(Call.COMPUTE_LOGPROBS, step, 2)
    expect(still(driver) == before, "scoring changed the state")
    driver.call(Call.FWD_BWD_APPLY, step, 1)


def staged_and_stock_orders_give_the_same_parameters(subject: Subject) -> None:
    """From one checkpoint, the same step in both orders: equal to the bit."""
    need(subject, Call.SAVE_CHECKPOINT, Call.STAGE_FWD_BWD, Call.FWD_BWD_DEFER)
    driver, step = subject.driver, subject.step
    driver.call(Call.SAVE_CHECKPOINT)

    def train(staged: bool) -> str:
        put(subject, step)
        put(subject, step + 1)
        driver.call(Call.FWD_BWD, step, 0)
        if staged:
            driver.call(Call.FWD_BWD_DEFER, step, 1)
            driver.call(Call.STAGE_FWD_BWD, step + 1, 0)
            driver.call(Call.APPLY_DEFERRED_UPDATE)
        else:
            driver.call(Call.FWD_BWD_APPLY, step, 1)
        driver.call(Call.FWD_BWD, step + 1, 0)
        driver.call(Call.FWD_BWD_APPLY, step + 1, 1)
        return driver.digest()

    stock = train(False)
    driver.call(Call.RESTORE_CHECKPOINT)
    expect(driver.state().step == step, "restore_checkpoint did not return to the saved step")
    staged = train(True)
    expect(stock == staged, f"parameters differ: stock {stock[:16]}, staged {staged[:16]}")


RULES: Final[tuple[Callable[[Subject], None], ...]] = (
    every_call_in_every_phase_answers_as_the_table_says,
    the_same_key_returns_the_first_result_and_applies_once,
    a_key_with_another_payload_is_refused,
    a_gap_in_the_sequence_is_refused,
    a_refusal_consumes_no_seq,
    open_run_fences_off_older_epochs,
    another_incarnation_is_refused,
    only_the_next_micro_batch_is_trained,
    a_micro_batch_must_be_there_and_whole,
    the_staged_input_is_used_or_dropped_by_abort_only,
    nothing_but_the_update_moves_the_version,
    abort_drops_the_step_and_nothing_else,
    metrics_are_read_by_cursor_and_stay,
    scoring_leaves_accumulation_untouched,
    staged_and_stock_orders_give_the_same_parameters,
)
