"""The one invariant checker: folds a history of trainer calls and names every broken rule.

Used by the exhaustive walk, by `check-trace` and by the A/B tool. It restates the rules by itself
and reads neither the step table nor the core, so that a mistake there shows here. No I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from orchestrator.plan import RunPlan
from prestage.trace import DeviceRecord, TraceRecord

CONTENT_KEPT_STEPS: Final = 256
"""Micro-batch digests are compared over this many of the newest steps."""


class Rule(enum.Enum):
    """What a history must keep. The value is the name that reports print."""

    TRAINED_ONCE = "trained-once"
    ONE_UPDATE = "one-update-per-step"
    STEP_ORDER = "nothing-of-the-next-step-before-the-update"
    STAGED_USE = "staged-input-used-where-planned"
    VERSION = "version-moves-only-on-an-update"
    SNAPSHOT = "checkpoint-and-weights-hold-closed-steps-only"
    METRICS = "metrics-of-closed-steps-only"
    CARRIED_OUT_ONCE = "each-call-carried-out-once"
    FENCE = "an-older-epoch-is-refused"
    REFUSAL = "a-refusal-changes-nothing"
    SAME_CONTENT = "a-micro-batch-keeps-its-content"
    FAILED_STEP = "a-failed-step-is-not-applied"
    RESTORE = "a-restore-goes-to-a-saved-step"
    DEVICE_ORDER = "the-device-computes-in-step-order"


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One broken rule, in words."""

    rule: Rule
    message: str

    def __str__(self) -> str:
        return f"{self.rule.value}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What is known of the run beside its calls. Everything is optional."""

    plan: RunPlan | None = None  # With it, staging is checked against eligibility and order.
    micro_batches: int = 0  # Per step; 0 = not known.
    may_skip_updates: bool = True  # An update with denominator 0 leaves the version.


UNKNOWN: Final = Expectation()
Batch = tuple[int, int, str]
"""(step, index, digest)"""

_FWD_BWD: Final = "fwd_bwd"
_APPLY: Final = "fwd_bwd apply_optimizer"
_DEFER: Final = "fwd_bwd apply_optimizer defer_update"
_STAGE: Final = "stage_fwd_bwd"
_APPLY_DEFERRED: Final = "apply_deferred_update"
_UPDATE: Final = "update"
_TRAINING: Final = frozenset({_FWD_BWD, _APPLY, _DEFER})
_UPDATING: Final = frozenset({_APPLY, _APPLY_DEFERRED, _UPDATE})
_SNAPSHOTS: Final = frozenset({"save_checkpoint", "prepare_weight_sync"})
_SCORING: Final = frozenset({"evaluate", "compute_logprobs"})
_RECOVERY: Final = frozenset({"abort_step", "restore_checkpoint"})
_DONE: Final = "ok"
_LOST: Final = "lost"
_REPLAYED: Final = "replayed"
_RAISED: Final = frozenset({"raised", "ENGINE_FAILED"})


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What the history so far amounts to. A value; `observe` makes new ones."""

    known: bool = False  # The position is known (a trace may begin in the middle of a run).
    complete: bool = False  # Nothing of the run happened before this history.
    incarnation: str = ""
    epoch: int = 0
    last_seq: int = 0  # Last seq carried out in this epoch.
    step: int = 0  # Steps closed.
    version: int = -1  # Updates applied; -1 = not known.
    open: tuple[Batch, ...] = ()  # Trained in the open step, in order.
    deferred: bool = False
    staged: Batch | None = None
    failed: bool = False
    suspect: bool = False  # An update or a restore failed.
    saved: tuple[tuple[int, int], ...] = ()  # (step, version) of every checkpoint taken.
    content: tuple[Batch, ...] = ()  # Every micro-batch trained so far, by id.
    sizes: tuple[tuple[int, int], ...] = ()  # (step, micro-batches) of closed steps.
    unsettled: tuple[TraceRecord, ...] = ()  # Lost calls that claim the next seq.


FROM_SCRATCH: Final = Ledger(known=True, complete=True, version=0)
"""A run that is seen whole, from its first call on."""
NEW_PROCESS: Final = Ledger(known=True, version=0)
"""A worker process that is seen from its start; what is on its disk is not known."""

Observed = tuple[Ledger, tuple[Violation, ...]]


def _broken(rule: Rule, message: str) -> Violation:
    return Violation(rule=rule, message=message)


def new_process(ledger: Ledger, incarnation: str) -> Ledger:
    """The worker process was replaced: everything but checkpoints and fencing is gone."""
    return replace(
        ledger,
        incarnation=incarnation,
        last_seq=0,
        step=0,
        version=0,
        open=(),
        deferred=False,
        staged=None,
        failed=False,
        suspect=False,
        unsettled=(),
    )


def observe(ledger: Ledger, record: TraceRecord, expect: Expectation = UNKNOWN) -> Observed:
    """Take in one call. Returns the ledger after it and what it broke."""
    if record.call == "open_run":
        return _opened(ledger, record)
    if record.seq == 0:
        return ledger, _unsequenced(ledger, record)
    if record.outcome == _LOST:
        return replace(ledger, unsettled=(*ledger.unsettled, record)), _claims(ledger, record)
    if record.outcome == _REPLAYED:
        return ledger, _replayed(ledger, record)
    if record.outcome == _DONE or record.outcome in _RAISED:
        return _carried_out(ledger, record, expect)
    return _refused(ledger, record, expect)


def check_history(
    records: Iterable[TraceRecord], expect: Expectation = UNKNOWN, *, start: Ledger | None = None
) -> tuple[tuple[int, Violation], ...]:
    """Fold a whole history. Returns (position of the record, broken rule) pairs."""
    ledger = start or Ledger()
    found: list[tuple[int, Violation]] = []
    for position, record in enumerate(records):
        ledger, violations = observe(ledger, record, expect)
        found.extend((position, violation) for violation in violations)
    return tuple(found)


# ---------------------------------------------------------------------------------------------
# Who calls, and which call it is.


def _opened(ledger: Ledger, record: TraceRecord) -> Observed:
    if record.outcome != _DONE:
        return ledger, ()
    if record.side != "worker":  # The caller's record still carries its old epoch.
        return replace(ledger, unsettled=()), ()
    found: tuple[Violation, ...] = ()
    if record.epoch <= ledger.epoch:
        found = (_broken(Rule.FENCE, f"open_run gave epoch {record.epoch} after {ledger.epoch}"),)
    return replace(ledger, epoch=record.epoch, last_seq=0, unsettled=()), found


def _replayed(ledger: Ledger, record: TraceRecord) -> tuple[Violation, ...]:
    if record.epoch == ledger.epoch and record.seq > ledger.last_seq:
        return (
            _broken(
                Rule.CARRIED_OUT_ONCE,
                f"{_name(record)} was answered from memory, but seq {record.seq} was never"
                f" carried out (last {ledger.last_seq})",
            ),
        )
    return ()


def _claims(ledger: Ledger, record: TraceRecord) -> tuple[Violation, ...]:
    """A caller may put another call in a lost call's place only if the lost one was a stage."""
    for lost in ledger.unsettled:
        if lost.epoch != record.epoch or lost.incarnation != record.incarnation:
            continue
        same = (lost.call, lost.step, lost.index, lost.digest) == (
            record.call,
            record.step,
            record.index,
            record.digest,
        )
        if lost.seq == record.seq and not same and lost.call != _STAGE:
            return (
                _broken(
                    Rule.CARRIED_OUT_ONCE,
                    f"{_name(record)} took seq {record.seq} of {_name(lost)}, whose outcome is"
                    " unknown: only a stage may be given up",
                ),
            )
        if record.seq > lost.seq and lost.call != _STAGE:
            return (
                _broken(
                    Rule.CARRIED_OUT_ONCE,
                    f"{_name(record)} has a new seq {record.seq} although the outcome of"
                    f" {_name(lost)} (seq {lost.seq}) is unknown",
                ),
            )
    return ()


def _key(ledger: Ledger, record: TraceRecord) -> Observed:
    """Judge the key of a call that was carried out, and move to its process and epoch."""
    found: list[Violation] = []
    if record.incarnation and record.incarnation != ledger.incarnation:
        if ledger.incarnation:
            ledger = replace(new_process(ledger, record.incarnation), known=False, version=-1)
        ledger = replace(ledger, incarnation=record.incarnation)
    if record.epoch < ledger.epoch:
        found.append(
            _broken(
                Rule.FENCE,
                f"{_name(record)} of epoch {record.epoch} was carried out after epoch"
                f" {ledger.epoch} had been opened",
            )
        )
        return ledger, tuple(found)
    if record.epoch > ledger.epoch:
        ledger = replace(ledger, epoch=record.epoch, last_seq=0)
    if record.seq <= ledger.last_seq:
        found.append(
            _broken(
                Rule.CARRIED_OUT_ONCE,
                f"{_name(record)} carried out seq {record.seq} again (last was {ledger.last_seq})",
            )
        )
    elif record.seq > ledger.last_seq + 1:
        found.append(
            _broken(
                Rule.CARRIED_OUT_ONCE,
                f"{_name(record)} carried out seq {record.seq}, but {ledger.last_seq + 1} never was",
            )
        )
    return replace(ledger, last_seq=record.seq), tuple(found)


def _name(record: TraceRecord) -> str:
    batch = f" ({record.step}, {record.index})" if record.index >= 0 else ""
    return f"{record.call}{batch}"


def _settle(ledger: Ledger, record: TraceRecord, expect: Expectation) -> Observed:
    """What became of lost calls, now that a later one came through (the caller's side)."""
    if not ledger.unsettled:
        return ledger, ()
    found = list(_claims(ledger, record))
    lost, ledger = ledger.unsettled, replace(ledger, unsettled=())
    if any(item.epoch != record.epoch or item.incarnation != record.incarnation for item in lost):
        return ledger, ()
    for item in lost:
        if item.seq == record.seq - 1 and item.call == _STAGE:
            # Its seq was used after all: the late stage arrived.
            ledger, more = _carried_out(ledger, replace(item, outcome=_DONE), expect)
            found.extend(more)
            break
    return ledger, tuple(found)


# ---------------------------------------------------------------------------------------------
# What the calls did.


def _carried_out(ledger: Ledger, record: TraceRecord, expect: Expectation) -> Observed:
    ledger, found = _settle(ledger, record, expect)
    before = replace(ledger, known=True)
    ledger, more = _key(ledger, record)
    found += more
    if record.outcome in _RAISED:
        suspect = record.call in _UPDATING or record.call == "restore_checkpoint"
        return replace(ledger, failed=True, staged=None, suspect=ledger.suspect or suspect), found
    if record.phase_before == "FAILED" and record.call not in _RECOVERY:
        ledger = replace(ledger, failed=True)
    if record.call in _TRAINING:
        ledger, more = _trained(_place(ledger, record), record, expect)
    elif record.call == _STAGE:
        ledger, more = _staged(_place(ledger, record), record, expect)
    elif record.call in (_APPLY_DEFERRED, _UPDATE):
        ledger, more = _updated(ledger, record, expect)
    elif record.call in _SNAPSHOTS:
        ledger, more = _snapshot(ledger, record)
    elif record.call == "abort_step":
        ledger, more = _aborted(ledger)
    elif record.call == "restore_checkpoint":
        ledger, more = _restored(ledger, record)
    else:
        more = ()
    return ledger, found + more + _version(before, ledger, record)


def _place(ledger: Ledger, record: TraceRecord) -> Ledger:
    """Take the position from the first call that tells it, in a trace that begins mid-run."""
    if ledger.known:
        return ledger
    step = record.step
    if record.call == _STAGE:
        deferred = record.phase_before == "UPDATE_DEFERRED"
        return replace(
            ledger,
            known=True,
            step=step - 1 if deferred else step,
            deferred=deferred,
            open=((step - 1, 0, ""),) if deferred else (),
        )
    before = tuple((step, index, "") for index in range(record.index))
    staged = ledger.staged
    if record.used_staged_input and staged is None:
        staged = (record.step, record.index, record.digest)
    return replace(ledger, known=True, step=step, open=before, staged=staged)


def _trained(ledger: Ledger, record: TraceRecord, expect: Expectation) -> Observed:
    batch: Batch = (record.step, record.index, record.digest)
    found: list[Violation] = []
    if ledger.failed:
        found.append(
            _broken(Rule.FAILED_STEP, f"{_name(record)} was trained although its step had failed")
        )
    if ledger.deferred:
        found.append(
            _broken(
                Rule.STEP_ORDER,
                f"{_name(record)} was trained while the update of step {ledger.step} was deferred",
            )
        )
    expected = (ledger.step, len(ledger.open))
    if not ledger.deferred and (record.step, record.index) != expected:
        rule = Rule.STEP_ORDER if record.step > ledger.step else Rule.TRAINED_ONCE
        found.append(_broken(rule, f"{_name(record)} was trained where {expected} was next"))
    found.extend(_staged_use(ledger, record, batch))
    found.extend(_same_content(ledger, batch))
    ledger = replace(ledger, open=(*ledger.open, batch), staged=None, content=_learn(ledger, batch))
    if record.call == _DEFER:
        found.extend(_whole(ledger, expect))
        return replace(ledger, deferred=True), tuple(found)
    if record.call == _APPLY:
        found.extend(_whole(ledger, expect))
        return _close(ledger, record, expect, found)
    return ledger, tuple(found)


def _staged_use(ledger: Ledger, record: TraceRecord, batch: Batch) -> list[Violation]:
    if ledger.staged is not None and batch != ledger.staged:
        return [
            _broken(
                Rule.STAGED_USE,
                f"{_name(record)} digest {record.digest} was trained although {ledger.staged} was"
                " staged",
            )
        ]
    if ledger.staged is not None and not record.used_staged_input:
        return [_broken(Rule.STAGED_USE, f"{_name(record)} was staged, but not used as staged")]
    if ledger.staged is None and record.used_staged_input:
        return [
            _broken(Rule.STAGED_USE, f"{_name(record)} used a staged input that was not staged")
        ]
    return []


def _same_content(ledger: Ledger, batch: Batch) -> list[Violation]:
    for step, index, digest in ledger.content:
        if (step, index) == batch[:2] and digest and batch[2] and digest != batch[2]:
            return [
                _broken(
                    Rule.SAME_CONTENT,
                    f"micro-batch ({step}, {index}) was trained with digest {digest} before and"
                    f" comes with {batch[2]} now",
                )
            ]
    return []


def _learn(ledger: Ledger, batch: Batch) -> tuple[Batch, ...]:
    if batch in ledger.content:
        return ledger.content
    oldest = batch[0] - CONTENT_KEPT_STEPS
    kept = ledger.content
    if kept and kept[0][0] < oldest:
        kept = tuple(item for item in kept if item[0] >= oldest)
    return (*kept, batch)


def _whole(ledger: Ledger, expect: Expectation) -> list[Violation]:
    """A step is closed with all its micro-batches."""
    size = len(ledger.open)
    wanted = expect.micro_batches or dict(ledger.sizes).get(ledger.step, size)
    if size != wanted:
        return [
            _broken(
                Rule.TRAINED_ONCE,
                f"step {ledger.step} was closed with {size} of {wanted} micro-batch(es)",
            )
        ]
    return []


def _close(
    ledger: Ledger, record: TraceRecord, expect: Expectation, found: list[Violation]
) -> Observed:
    skipped = expect.may_skip_updates and record.train_step_after == ledger.version
    version = ledger.version
    if ledger.version >= 0:
        version += 0 if skipped else 1
    else:
        version = record.train_step_after
    sizes = ledger.sizes
    if ledger.known and ledger.open and ledger.open[0][2]:
        sizes = (
            *(item for item in sizes if item[0] != ledger.step),
            (ledger.step, len(ledger.open)),
        )
        sizes = sizes[-CONTENT_KEPT_STEPS:]
    closed = replace(
        ledger, step=ledger.step + 1, version=version, open=(), deferred=False, sizes=sizes
    )
    return closed, tuple(found)


def _updated(ledger: Ledger, record: TraceRecord, expect: Expectation) -> Observed:
    if not ledger.known:
        return replace(ledger, version=record.train_step_after), ()
    found: list[Violation] = []
    if ledger.failed:
        found.append(
            _broken(Rule.FAILED_STEP, f"{record.call} of step {ledger.step}, which had failed")
        )
    if record.call == _APPLY_DEFERRED and not ledger.deferred:
        found.append(
            _broken(Rule.ONE_UPDATE, f"{record.call}: no update of step {ledger.step} is deferred")
        )
    if record.call == _UPDATE and not ledger.open:
        found.append(
            _broken(Rule.ONE_UPDATE, f"update of step {ledger.step} with nothing accumulated")
        )
    if record.call == _APPLY_DEFERRED and record.step >= 0 and record.step != ledger.step:
        found.append(
            _broken(Rule.ONE_UPDATE, f"{record.call} {record.step} while {ledger.step} is open")
        )
    if record.call == _UPDATE:
        found.extend(_whole(ledger, expect))
    return _close(ledger, record, expect, found)


def _staged(ledger: Ledger, record: TraceRecord, expect: Expectation) -> Observed:
    batch: Batch = (record.step, record.index, record.digest)
    found: list[Violation] = []
    if ledger.failed:
        found.append(_broken(Rule.FAILED_STEP, f"{_name(record)} while step {ledger.step} failed"))
    if ledger.staged is not None:
        found.append(_broken(Rule.STAGED_USE, f"{_name(record)} was staged over {ledger.staged}"))
    wanted = (ledger.step + 1, 0) if ledger.deferred else (ledger.step, 0)
    if batch[:2] != wanted:
        found.append(_broken(Rule.STAGED_USE, f"{_name(record)} was staged where {wanted} is next"))
    if ledger.open and not ledger.deferred:
        found.append(
            _broken(Rule.STAGED_USE, f"{_name(record)} was staged while step {ledger.step} is open")
        )
    plan = expect.plan
    if plan is not None:
        why_not = plan.staging_refused(batch[0] - 1, latched=False)
        if why_not is not None:
            found.append(
                _broken(Rule.STAGED_USE, f"{_name(record)} was staged although {why_not.value}")
            )
        if plan.stage_before_update is not ledger.deferred:
            found.append(
                _broken(
                    Rule.STAGED_USE,
                    f"{_name(record)} was staged"
                    f" {'before' if ledger.deferred else 'after'} the update; the plan says otherwise",
                )
            )
    found.extend(_same_content(ledger, batch))
    return replace(ledger, staged=batch), tuple(found)


def _snapshot(ledger: Ledger, record: TraceRecord) -> Observed:
    found: list[Violation] = []
    if ledger.known and (ledger.open or ledger.deferred or ledger.failed):
        found.append(
            _broken(
                Rule.SNAPSHOT,
                f"{record.call} while step {ledger.step} is open with {len(ledger.open)}"
                " micro-batch(es)",
            )
        )
    if record.call == "save_checkpoint" and ledger.known:
        if record.side == "orchestrator" and record.step >= 0 and record.step != ledger.step - 1:
            found.append(
                _broken(
                    Rule.SNAPSHOT,
                    f"save_checkpoint of step {record.step}, but step {ledger.step - 1} closed last",
                )
            )
        entry = (ledger.step, ledger.version)
        if entry not in ledger.saved:
            ledger = replace(ledger, saved=(*ledger.saved, entry))
    return ledger, tuple(found)


def _aborted(ledger: Ledger) -> Observed:
    found: tuple[Violation, ...] = ()
    if ledger.suspect:
        found = (_broken(Rule.FAILED_STEP, "abort_step although the parameters are suspect"),)
    cleared = replace(
        ledger,
        open=(),
        deferred=False,
        staged=None,
        failed=False,
        suspect=False,
        known=ledger.known,
    )
    return cleared, found


def _restored(ledger: Ledger, record: TraceRecord) -> Observed:
    clean = replace(
        ledger, open=(), deferred=False, staged=None, failed=False, suspect=False, known=False
    )
    version = record.train_step_after
    if version < 0:
        return clean, ()
    targets = [step for step, saved_version in ledger.saved if saved_version == version]
    if not targets:
        found: tuple[Violation, ...] = ()
        if ledger.complete:
            found = (
                _broken(
                    Rule.RESTORE,
                    f"restored version {version}; saved (step, version): {list(ledger.saved)}",
                ),
            )
        return replace(clean, version=version), found
    return replace(clean, known=True, step=targets[-1], version=version), ()


def _version(before: Ledger, after: Ledger, record: TraceRecord) -> tuple[Violation, ...]:
    """`train_step_after`, where the record tells it, is the version that the history gives."""
    if record.train_step_after < 0 or after.version < 0 or not after.known:
        return ()
    if record.call in ("release_weight_sync", "prepare_weight_sync"):
        return ()
    if record.train_step_after != after.version:
        return (
            _broken(
                Rule.VERSION,
                f"version is {record.train_step_after} after {_name(record)}; the updates that were"
                f" carried out make it {after.version} (it was {before.version})",
            ),
        )
    return ()


# ---------------------------------------------------------------------------------------------
# Calls that change nothing.


def _refused(ledger: Ledger, record: TraceRecord, expect: Expectation) -> Observed:
    found: tuple[Violation, ...] = ()
    late_failure = record.phase_after == "FAILED"
    if record.side == "worker" and record.phase_after != record.phase_before and not late_failure:
        found = (
            _broken(
                Rule.REFUSAL,
                f"{_name(record)} was refused ({record.outcome}), yet the phase went from"
                f" {record.phase_before} to {record.phase_after}",
            ),
        )
    if (
        record.side == "worker"
        and ledger.known
        and ledger.version >= 0
        and record.train_step_after >= 0
        and record.train_step_after != ledger.version
    ):
        found += (
            _broken(
                Rule.REFUSAL,
                f"{_name(record)} was refused ({record.outcome}), yet the version is"
                f" {record.train_step_after} and not {ledger.version}",
            ),
        )
    if late_failure or record.outcome == "STEP_FAILED":
        ledger = replace(ledger, failed=True, staged=None)
    if record.outcome == "KEY_REUSED":
        # The lost call with that seq was carried out after all.
        other = [item for item in ledger.unsettled if item.call != record.call]
        ledger = replace(ledger, unsettled=())
        if other:
            ledger, more = _carried_out(ledger, replace(other[0], outcome=_DONE), expect)
            found += more
    return ledger, found


def _unsequenced(ledger: Ledger, record: TraceRecord) -> tuple[Violation, ...]:
    if record.outcome != _DONE or not ledger.known:
        return ()
    found: list[Violation] = []
    if record.call == "get_metrics":
        if ledger.deferred:
            found.append(
                _broken(
                    Rule.METRICS,
                    f"get_metrics of step {record.step} while the update of step {ledger.step} is"
                    " deferred",
                )
            )
        if record.step >= ledger.step:
            found.append(
                _broken(
                    Rule.METRICS,
                    f"get_metrics of step {record.step}, which is not closed"
                    f" ({ledger.step} step(s) are)",
                )
            )
    if record.call in _SCORING and ledger.deferred:
        found.append(
            _broken(Rule.STEP_ORDER, f"{record.call} while an update is deferred: which weights?")
        )
    return tuple(found)


# ---------------------------------------------------------------------------------------------
# The end of a run, and the device.


def finished(ledger: Ledger, *, num_steps: int) -> tuple[Violation, ...]:
    """What a run that says it is finished must have left."""
    found: list[Violation] = []
    if ledger.step != num_steps:
        found.append(
            _broken(Rule.ONE_UPDATE, f"finished with {ledger.step} of {num_steps} steps closed")
        )
    if ledger.open or ledger.deferred:
        found.append(_broken(Rule.ONE_UPDATE, f"finished with step {ledger.step} open"))
    if ledger.staged is not None:
        found.append(_broken(Rule.STAGED_USE, f"finished with {ledger.staged} staged and unused"))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class DeviceLedger:
    """What the device did so far. Times in seconds on the device's clock."""

    updated_s: Mapping[int, float] = field(default_factory=dict)  # Step to its update's end.
    computed_s: Mapping[int, float] = field(default_factory=dict)  # Step to its last compute's end.


_TIME_SLACK_S: Final = 1e-3
"""Device times may be the host's observations."""


def observe_device(
    ledger: DeviceLedger, record: DeviceRecord
) -> tuple[DeviceLedger, tuple[Violation, ...]]:
    """Take in one stretch of device work: updates follow their step, computes follow updates."""
    found: list[Violation] = []
    step = record.step
    if record.finished_s < record.started_s:
        found.append(
            _broken(
                Rule.DEVICE_ORDER,
                f"{record.kind} of step {step} ends at {record.finished_s} before its start"
                f" {record.started_s}",
            )
        )
    if record.kind == "update":
        computed_s = ledger.computed_s.get(step)
        if computed_s is not None and record.started_s < computed_s - _TIME_SLACK_S:
            found.append(
                _broken(
                    Rule.DEVICE_ORDER,
                    f"update {step} started at {record.started_s} before its last micro-batch ended"
                    f" at {computed_s}",
                )
            )
        return replace(
            ledger, updated_s={**_newest(ledger.updated_s), step: record.finished_s}
        ), tuple(found)
    if record.kind == "fwd_bwd":
        updated_s = ledger.updated_s.get(step - 1)
        if updated_s is not None and record.started_s < updated_s - _TIME_SLACK_S:
            found.append(
                _broken(
                    Rule.DEVICE_ORDER,
                    f"fwd_bwd ({step}, {record.index}) started at {record.started_s} before update"
                    f" {step - 1} ended at {updated_s}",
                )
            )
        return replace(
            ledger, computed_s={**_newest(ledger.computed_s), step: record.finished_s}
        ), tuple(found)
    return ledger, tuple(found)


def _newest(times: Mapping[int, float]) -> dict[int, float]:
    return {step: times[step] for step in sorted(times)[-4:]}
