"""Live rollouts as the steps of a run: groups in durable order, advantages, plans, micro-batches.

A `StepSource` over the journal. What a step holds is a function of the durable order alone: asked
again, in this process or the next, it gives the same bytes, and each micro-batch is held to its
journaled digest before it is handed out. Plans are made from the journal's small records; arrays
are read for one micro-batch at a time.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from orchestrator.advantages import advantages
from orchestrator.feeder import SourceError as FeedError
from orchestrator.feeder import StepFeed, always
from orchestrator.groups import (
    Assignment,
    AssignmentState,
    Drops,
    Formed,
    Ledger,
    check_alive,
    merge_drops,
)
from orchestrator.journal.config import LiveConfig
from orchestrator.journal.errors import JournalError
from orchestrator.journal.log import DurableLog
from orchestrator.journal.payload import Record
from orchestrator.journal.snapshot import RetentionPoint
from orchestrator.packing import (
    MicroBatchPlan,
    StepConservation,
    StepPlan,
    Written,
    check_plan,
    first_micro_batch,
    plan_step,
)
from orchestrator.ports import StepSummary
from orchestrator.sources.packed import Packer, Reserve
from orchestrator.trajectory import (
    ConservationError,
    DropReason,
    Group,
    RolloutError,
    Trajectory,
)
from prestage.microbatch import MicroBatch

log = logging.getLogger("prestage.journal")


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """One whole rollout batch."""

    start: RetentionPoint  # How things stood before it.
    groups: tuple[Formed[Record], ...]
    position: int  # Complete groups before the first one after it.
    assignment: AssignmentState  # After it.
    drops: Drops  # All that was dropped until it was whole.
    skipped_steps: int  # Steps up to its end that had nothing to train.


@dataclass(frozen=True, kw_only=True)
class _Given:
    """Micro-batch 0 of a step that was not whole yet."""

    step: int
    plan: MicroBatchPlan
    written: Written


class LiveSource:
    """The steps of a run whose rollouts come in while it trains.

    Consumes the journal's complete groups; `open_step` waits for them. For one caller at a time,
    except `close`, `step_durable` and `data_cursor`, which any thread may call.
    """

    def __init__(
        self, log: DurableLog, config: LiveConfig, *, reserve: Reserve | None = None
    ) -> None:
        self._log = log
        self._config = config
        self._packer = Packer(config.run_id, config.fields, reserve)
        self._closed = False
        self._lock = threading.Lock()  # Batches and where the next one begins.
        self._durable_step = self._retained_step = log.point.durable_step
        self._batches: dict[int, _Batch] = {}
        self._next = log.point
        begun = log.first_planned_step
        if self._next == RetentionPoint() and begun is not None:
            self._next = RetentionPoint(batch=config.batches.batch_of(begun))
        # Nothing was ever handed out: the first step that is asked for is where this begins.
        self._fresh = self._next == RetentionPoint() and begun is None
        self._taken: list[Formed[Record]] = []  # Of the batch that is filling.
        self._assignment = Assignment(config.policy, self._next.assignment)
        self._position = self._next.position
        self._given: _Given | None = None
        self._stale_arrivals = 0  # In a row, while a step waited for groups.

    def write_into(self, reserve: Reserve) -> None:
        """Write micro-batches into this memory from now on."""
        self._packer = Packer(self._config.run_id, self._config.fields, reserve)

    def open_step(self, step: int, *, wanted: Callable[[], bool] = always) -> StepFeed | None:
        """Wait until the step's groups are in. None: the source ended before, or it is not `wanted`.

        Raises: FeedError (a step that was let go, too many dead groups, a journal that failed).
        """
        try:
            batch = self._batch(self._config.batches.batch_of(step), step, wanted)
            if batch is None:
                return None
            self.ledger().check()
            groups = batch.groups[self._config.batches.part(step)]
            shadows = tuple(_shadow(group) for group in groups)
            plan = plan_step(shadows, self._config.packing)
            check_plan(shadows, plan)
            summary = self._summary(step, groups, plan, batch)
        except (RolloutError, JournalError) as error:
            raise FeedError(f"step {step}: {error}") from error
        return StepFeed(
            summary=summary, micro_batches=self._micro_batches(step, groups, plan, summary)
        )

    def first_micro_batch(
        self, step: int, *, wanted: Callable[[], bool] = always
    ) -> MicroBatch | None:
        """Wait until the step's first groups fix its micro-batch 0, and give that.

        None: the step is whole before that, or the source ended, or it is not `wanted`; ask
        `open_step`. After one was given, the `open_step` that follows begins with index 1.

        Raises: FeedError as `open_step`.
        """
        self._given = None
        if not self._config.packing.early_first_micro_batch:
            return None
        try:
            groups = self._first_groups(step, wanted)
            if groups is None:
                return None
            taken, plan = groups
            batch, counts = self._packer.pack(step, 0, plan, self._members(taken, plan))
            self._commit_plan(batch, plan)
        except (RolloutError, JournalError) as error:
            raise FeedError(f"step {step}: {error}") from error
        self._given = _Given(step=step, plan=plan, written=counts)
        return batch

    def data_cursor(self, next_step: int) -> str:
        """Where a restored run goes on: at the first step that is not trained."""
        return json.dumps({"next_step": next_step}, separators=(",", ":"))

    def step_durable(self, step: int) -> None:
        """Steps before `step` are in a durable checkpoint: their rollouts may be deleted."""
        with self._lock:
            self._durable_step = max(self._durable_step, step)
            self._retain()

    def _retain(self) -> None:
        """Let go of what lies before the durable step, as far as its batch is known. Locked."""
        if self._durable_step == self._retained_step:
            return
        number = self._config.batches.batch_of(self._durable_step)
        if number in self._batches:
            start = self._batches[number].start
        elif number == self._next.batch:
            start = self._next
        else:
            return  # A restored run that has not got there yet.
        self._log.retain_from(replace(start, durable_step=self._durable_step))
        self._retained_step = self._durable_step
        for old in [known for known in self._batches if known < number]:
            del self._batches[old]

    def ledger(self) -> Ledger:
        """Where every token that came in is now, over the whole run."""
        state = self._assignment.state
        totals, tokens_ready = self._log.standing(self._position)
        return Ledger(
            tokens_in=totals.tokens_in,
            tokens_open=totals.tokens_open,
            tokens_ready=tokens_ready,
            tokens_assigned=state.tokens_assigned,
            dropped=merge_drops(totals.drops, self._assignment.drops),
            duplicates=totals.duplicates,
        )

    def waiting_groups(self) -> int:
        """Complete groups that no step has taken yet."""
        return len(self._log.waiting_groups(self._position))

    def oldest_policy_version(self, step: int) -> int | None:
        """The oldest weights that sampled what `step` trains; None: it was let go."""
        with self._lock:
            batch = self._batches.get(self._config.batches.batch_of(step))
        if batch is None:
            return None
        groups = batch.groups[self._config.batches.part(step)]
        return min(group.oldest_policy_version for group in groups)

    def close(self) -> None:
        """A waiting `open_step` gives up soon, and later ones at once."""
        self._closed = True

    # -- groups to batches ------------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        """The first step that is asked for may follow steps that other rollouts trained."""
        fresh, self._fresh = self._fresh, False
        if not fresh or step == 0:
            return
        log.warning(
            "the trainer is at step %d and nothing of %s was ever trained: the step is made of the"
            " rollouts that come in now. If this run had rollouts before, they are elsewhere: is"
            " this the right folder?",
            step,
            self._config.folder,
        )
        with self._lock:
            self._next = RetentionPoint(batch=self._config.batches.batch_of(step))

    def _batch(self, number: int, step: int, wanted: Callable[[], bool]) -> _Batch | None:
        self._begin(step)
        self._check_kept(step)
        while True:
            with self._lock:
                if number in self._batches:
                    return self._batches[number]
                if number < self._next.batch:
                    raise JournalError(f"rollout batch {number} was let go")
            if not self._fill(wanted):
                return None

    def _check_kept(self, step: int) -> None:
        if step < self._durable_step:
            raise JournalError(
                "its rollouts were let go, because a checkpoint that covers the steps below"
                f" {self._durable_step} was durable; restore that one, or a newer one"
            )

    def _first_groups(
        self, step: int, wanted: Callable[[], bool]
    ) -> tuple[tuple[Formed[Record], ...], MicroBatchPlan] | None:
        """The groups that fix the step's micro-batch 0 before the step is whole, and its plan."""
        shape, packing = self._config.batches, self._config.packing
        number, part = shape.batch_of(step), shape.part(step)
        self._begin(step)
        self._check_kept(step)
        while number > self._next.batch:
            if not self._fill(wanted):
                return None
        if number < self._next.batch:
            return None  # Whole already.
        room = packing.rows * packing.tokens_per_row
        looked_at = 8  # Eighths of a micro-batch: the planner looks once at each beyond it.
        while len(self._taken) < part.stop:
            groups = tuple(self._taken[part])
            eighths = 8 * _packed_tokens(groups, packing.align_tokens) // room
            if eighths > looked_at:
                looked_at = eighths
                shadows = tuple(_shadow(group) for group in groups)
                plan = first_micro_batch(shadows, shape.groups_per_step, packing)
                if plan is not None:
                    return groups, plan
            if not self._take_group(wanted):
                return None
        return None

    def _take_group(self, wanted: Callable[[], bool]) -> bool:
        """Look at the next complete group, once it is in. False: it never comes, or is not wanted."""
        waited_for = self._log.group(self._position) is None
        group = self._log.await_group(self._position, lambda: wanted() and not self._closed)
        if group is None:
            return False
        self._position += 1
        # Judged by the updates applied before the first step that trains it.
        step = self._config.batches.step_of_place(self._next.batch, len(self._taken))
        if self._assignment.offer(group, step - self._next.skipped_steps):
            self._taken.append(group)
            self._stale_arrivals = 0
        elif waited_for:
            # Producers that never take up new weights fill no step, ever. What lay here too long
            # says nothing about them.
            self._stale_arrivals += 1
            drops = merge_drops(group.drops_before, self._assignment.drops)
            check_alive(self._stale_arrivals, self._config.policy, drops)
        if self._config.policy.max_staleness is not None:
            # Later places are filled by later steps: what is too old for this one is for all.
            self._log.drop_older_than(
                step - self._next.skipped_steps - self._config.policy.max_staleness
            )
        return True

    def _fill(self, wanted: Callable[[], bool]) -> bool:
        """Have the next batch whole. What is taken stays taken when the wait is left (False)."""
        while len(self._taken) < self._config.batches.groups_per_batch:
            if not self._take_group(wanted):
                return False
        groups, self._taken = tuple(self._taken), []
        batch = _Batch(
            start=self._next,
            groups=groups,
            position=self._position,
            assignment=self._assignment.state,
            drops=merge_drops(groups[-1].drops_before, self._assignment.drops),
            skipped_steps=self._next.skipped_steps + self._skipped(groups),
        )
        with self._lock:
            self._batches[batch.start.batch] = batch
            self._next = RetentionPoint(
                batch=batch.start.batch + 1,
                position=batch.position,
                assignment=batch.assignment,
                drops=batch.drops,
                skipped_steps=batch.skipped_steps,
            )
            self._retain()
        return True

    def _skipped(self, groups: Sequence[Formed[Record]]) -> int:
        """Steps of a batch whose denominator is 0: their update is skipped, by rule."""
        shape = self._config.batches
        parts = [groups[shape.part(step)] for step in range(shape.num_minibatches)]
        return sum(not _trained_tokens(part) for part in parts) * shape.num_iterations

    # -- batches to micro-batches -----------------------------------------------------------------

    def _summary(
        self, step: int, groups: Sequence[Formed[Record]], plan: StepPlan, batch: _Batch
    ) -> StepSummary:
        rewards = [record.reward for group in groups for record in group.members]
        dropped = {}
        if self._config.batches.opens_batch(step):
            before = batch.start.drops
            for reason, count in batch.drops.items():
                told = before[reason].trajectories if reason in before else 0
                if count.trajectories > told:
                    dropped[reason.value] = count.trajectories - told
        return StepSummary(
            step=step,
            micro_batches=len(plan.micro_batches),
            groups=len(groups),
            trajectories=len(rewards),
            real_tokens=plan.real_tokens,
            trained_tokens=_trained_tokens(groups),
            rows=plan.used_rows,
            reward_mean=math.fsum(rewards) / len(rewards),
            dropped=MappingProxyType(dropped),
        )

    def _micro_batches(
        self, step: int, groups: Sequence[Formed[Record]], plan: StepPlan, summary: StepSummary
    ) -> Iterator[MicroBatch]:
        given, written = self._given, list[Written]()
        self._given = None
        if given is not None and given.step == step:
            if given.plan != plan.micro_batches[0]:
                raise FeedError(
                    f"step {step}: its micro-batch 0 was sent before the step was whole, and is"
                    " another one now: a fault in this program"
                )
            written.append(given.written)
        last = len(plan.micro_batches) - 1
        for index in range(len(written), last + 1):
            batch_plan = plan.micro_batches[index]
            try:
                members = self._members(groups, batch_plan)
                batch, counts = self._packer.pack(step, index, batch_plan, members)
                written.append(counts)
                if index == last:
                    # Before the last micro-batch leaves: the update goes with it.
                    _check_balance(groups, written, summary)
                self._commit_plan(batch, batch_plan)
            except (RolloutError, JournalError) as error:
                raise FeedError(f"step {step}: {error}") from error
            yield batch

    def _commit_plan(self, batch: MicroBatch, plan: MicroBatchPlan) -> None:
        """Before it is handed out: its digest and groups are durable, or the same as before."""
        names = tuple(dict.fromkeys(segment.group_id for segment in plan.segments))
        self._log.commit_micro_batch(batch.id.step, batch.id.index, batch.digest, names)

    def _members(
        self, groups: Sequence[Formed[Record]], plan: MicroBatchPlan
    ) -> dict[tuple[str, int], Trajectory]:
        """The micro-batch's trajectories, read from the journal, with their advantages."""
        wanted = {segment.key for segment in plan.segments}
        members: dict[tuple[str, int], Trajectory] = {}
        for group in groups:
            if not any(record.key in wanted for record in group.members):
                continue
            values = advantages(
                [record.reward for record in group.members], self._config.advantages
            )
            for record, value in zip(group.members, values, strict=True):
                if record.key in wanted:
                    members[record.key] = replace(self._log.load(record), advantage=float(value))
        return members


def _trained_tokens(groups: Sequence[Formed[Record]]) -> int:
    return sum(record.trained_tokens for group in groups for record in group.members)


def _packed_tokens(groups: Sequence[Formed[Record]], align: int) -> int:
    """Tokens that the groups take in rows, alignment included."""
    return sum(
        -(-record.total_tokens // align) * align
        for group in groups
        for record in group.members
        if record.completion_tokens
    )


def _shadow(group: Formed[Record]) -> Group:
    """The group with lengths but without contents: all that a plan is made from."""
    zero = np.zeros((), np.int32)
    return Group(
        group_id=group.group_id,
        trajectories=tuple(
            Trajectory(
                group_id=record.group_id,
                index=record.index,
                prompt_tokens=np.broadcast_to(zero, (record.prompt_tokens,)),
                completion_tokens=np.broadcast_to(zero, (record.completion_tokens,)),
                reward=record.reward,
                policy_version=record.policy_version,
            )
            for record in group.members
        ),
    )


def _check_balance(
    groups: Sequence[Formed[Record]], written: Sequence[Written], summary: StepSummary
) -> None:
    """Every token of the step was written once or is counted. Raises `ConservationError`."""
    records = [record for group in groups for record in group.members]
    empty = [record for record in records if not record.completion_tokens]
    balance = StepConservation(
        tokens_in=sum(record.total_tokens for record in records),
        tokens_packed=sum(counts.tokens for counts in written),
        trainable_in=sum(record.trainable_tokens for record in records),
        trained=sum(counts.trained_tokens for counts in written),
        dropped_tokens={DropReason.EMPTY_COMPLETION: sum(r.total_tokens for r in empty)},
        dropped_trainable={
            DropReason.EMPTY_COMPLETION: sum(r.trainable_tokens for r in empty),
            DropReason.FIRST_TOKEN_HAS_NO_PREDICTOR: sum(w.unpredictable_tokens for w in written),
        },
    )
    balance.check()
    if balance.trained != summary.trained_tokens:
        raise ConservationError(
            f"{summary.trained_tokens} tokens were to be trained, {balance.trained} are"
        )
