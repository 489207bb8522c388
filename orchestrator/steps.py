"""What a run learns about its steps: times, metrics, staging. Values and their assembly; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from orchestrator.calls import Send
from orchestrator.ports import Answer, StepFacts, StepSummary
from prestage.protocol import FWD_BWD_CALLS, Call


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step as the orchestrator saw it. Seconds; -1 = not known."""

    step: int
    started_s: float = -1.0
    finished_s: float = -1.0
    dispatch_seconds: tuple[float, ...] = ()  # Of each fwd_bwd call, as the caller waited.
    staged_input_used: bool = False  # This step's first micro-batch was staged before.
    stage_seconds: float = -1.0  # Of the stage at this step's end.
    device_wait_seconds: float = -1.0
    boundary_idle_seconds: float = -1.0
    train_step: int = -1
    applied: bool = True
    dropless_replays: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    summary: StepSummary | None = None

    @property
    def seconds(self) -> float:
        """The step's wall time: from its clock's start until it owed nothing."""
        if self.started_s < 0 or self.finished_s < 0:
            return -1.0
        return self.finished_s - self.started_s

    @property
    def micro_steps(self) -> int:
        return len(self.dispatch_seconds)

    def ruler_line(self) -> str:
        """The step ruler: one line a step, readable by `orchestrator bench read`."""
        per_micro = self.seconds / self.micro_steps if self.micro_steps else 0.0
        dispatch = ", ".join(f"{round(value, 3):g}" for value in self.dispatch_seconds)
        return (
            f"completed step: {self.step}, seconds: {self.seconds:.3f}, micro_steps:"
            f" {self.micro_steps}, seconds/micro_step: {per_micro:.3f}, fwd_bwd dispatch s:"
            f" [{dispatch}]"
        )


class StepBook:
    """Collects `StepRecord`s while a run goes on; keeps the newest `keep` of them."""

    def __init__(self, keep: int = 4096) -> None:
        self._records: dict[int, StepRecord] = {}
        self._keep = keep

    def records(self) -> tuple[StepRecord, ...]:
        return tuple(self._records[step] for step in sorted(self._records))

    def get(self, step: int) -> StepRecord:
        return self._records.get(step, StepRecord(step=step))

    def _put(self, record: StepRecord) -> None:
        self._records[record.step] = record
        while len(self._records) > self._keep:
            del self._records[min(self._records)]

    def clock_started(self, step: int, now_s: float) -> None:
        """Step `step` begins, which ends the one before unless that had ended already."""
        before = self._records.get(step - 1)
        if before is not None and before.finished_s < 0:
            self._put(replace(before, finished_s=now_s))
        # A step that is trained again (after a restart) starts over.
        self._put(StepRecord(step=step, started_s=now_s))

    def finished(self, step: int, now_s: float) -> None:
        record = self.get(step)
        if record.finished_s < 0:
            self._put(replace(record, finished_s=now_s))

    def called(self, send: Send, answer: Answer, seconds: float) -> None:
        if send.call in FWD_BWD_CALLS:
            record = self.get(send.step)
            self._put(
                replace(
                    record,
                    # A micro-batch that is trained or sent again takes its own place again.
                    dispatch_seconds=(*record.dispatch_seconds[: send.index], seconds),
                    staged_input_used=record.staged_input_used or answer.used_staged_input,
                )
            )
        elif send.call is Call.STAGE_FWD_BWD and answer.stage_seconds >= 0:
            record = self.get(send.step - 1)
            self._put(replace(record, stage_seconds=answer.stage_seconds))
        if answer.dropless_replays:
            # Of the update that the call made; a call that was sent again answers the same.
            record = self.get(send.step)
            self._put(replace(record, dropless_replays=answer.dropless_replays))
        for facts in answer.metrics:
            self.measured(facts)

    def measured(self, facts: StepFacts) -> None:
        """Take in what the worker knows of a closed step; unknown values change nothing."""
        if facts.step not in self._records and facts.train_step < 0 and not facts.values:
            return  # Of a step that an earlier process trained.
        record = self.get(facts.step)
        self._put(
            replace(
                record,
                train_step=facts.train_step if facts.train_step >= 0 else record.train_step,
                applied=facts.applied if facts.train_step >= 0 else record.applied,
                metrics={**record.metrics, **facts.values},
                boundary_idle_seconds=_known(
                    facts.boundary_idle_seconds, record.boundary_idle_seconds
                ),
                device_wait_seconds=_known(facts.device_wait_seconds, record.device_wait_seconds),
                stage_seconds=_known(facts.stage_seconds, record.stage_seconds),
            )
        )

    def summarised(self, summary: StepSummary) -> None:
        self._put(replace(self.get(summary.step), summary=summary))


def _known(new: float, old: float) -> float:
    return new if new >= 0 else old
