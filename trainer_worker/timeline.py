"""The device's timeline, from what was dispatched and when it finished. Pure arithmetic.

Boundary idle of step k: seconds without work on the device between the end of its last micro-batch
and the start of the next step's first, the update's own time not counted. Keeps the newest steps
only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from prestage.trace import DeviceRecord
from trainer_worker.engine import DeviceSpan

STEPS_KEPT: Final = 160


@dataclass(frozen=True, kw_only=True)
class BoundaryFacts:
    """What is known of the boundary after one step. Seconds; -1 = not known (yet)."""

    last_finished_s: float = -1.0  # When the step's last micro-batch was computed.
    update_started_s: float = -1.0
    update_finished_s: float = -1.0
    next_started_s: float = -1.0  # When the next step's first micro-batch began.
    stage_seconds: float = -1.0
    stage_ended_s: float = -1.0
    # When the host heard: on a remote runtime later than when the device was done.
    last_index: int = -1  # The newest micro-batch dispatched.
    last_heard_s: float = -1.0  # That it is computed.
    update_dispatched: bool = False
    update_heard_s: float = -1.0
    known_s: float = -1.0  # When the host held the step's metrics, which the update computes.
    staged_behind_update: bool = False  # The update was dispatched before the stage.

    @property
    def idle_seconds(self) -> float:
        if min(self.last_finished_s, self.update_finished_s, self.next_started_s) < 0:
            return -1.0
        before = max(0.0, self.update_started_s - self.last_finished_s)
        after = max(0.0, self.next_started_s - self.update_finished_s)
        return before + after

    @property
    def device_wait_seconds(self) -> float:
        """From the stage call's end until the host heard that what the stage hid behind is computed.

        That is the last micro-batch, or the update where the stage followed it. Heard, as the idle
        device's own wait is: only so can the two be compared.
        """
        heard_s = self.update_heard_s if self.staged_behind_update else self.last_heard_s
        heard = [when for when in (heard_s, self.known_s) if when >= 0]
        if self.stage_ended_s < 0 or not heard:
            return -1.0
        return max(0.0, min(heard) - self.stage_ended_s)


class DeviceTimeline:
    """Collects finished work in dispatch order. Not thread-safe: one watcher feeds it."""

    def __init__(self) -> None:
        self._steps: dict[int, BoundaryFacts] = {}
        self._free_s = -1.0

    def facts(self, step: int) -> BoundaryFacts:
        return self._steps.get(step, BoundaryFacts())

    def _set(self, step: int, facts: BoundaryFacts) -> None:
        self._steps[step] = facts
        while len(self._steps) > STEPS_KEPT:
            del self._steps[min(self._steps)]

    def forget(self, *, from_step: int) -> None:
        """The work of `from_step` and later was given up; the boundary before it goes on."""
        for step in [step for step in self._steps if step >= from_step]:
            del self._steps[step]
        before = self._steps.get(from_step - 1)
        if before is not None:
            self._set(from_step - 1, replace(before, next_started_s=-1.0))

    def dispatched(self, step: int, index: int) -> None:
        """A micro-batch was given to the device."""
        self._set(step, replace(self.facts(step), last_index=index, last_heard_s=-1.0))

    def update_dispatched(self, step: int) -> None:
        self._set(step, replace(self.facts(step), update_dispatched=True))

    def staged(self, boundary_step: int, seconds: float, ended_s: float) -> None:
        facts = self.facts(boundary_step)
        facts = replace(facts, stage_seconds=seconds, stage_ended_s=ended_s)
        self._set(boundary_step, replace(facts, staged_behind_update=facts.update_dispatched))

    def known(self, step: int, now_s: float) -> None:
        """The host holds the step's metrics: all of it is computed. The first time counts."""
        facts = self._steps.get(step)
        if facts is not None and facts.known_s < 0:
            self._set(step, replace(facts, known_s=now_s))

    def _span(self, span: DeviceSpan, seen_s: float, earliest_s: float) -> tuple[float, float]:
        finished_s = seen_s if span.finished_s is None else span.finished_s
        started_s = span.started_s
        if started_s is None:
            started_s = min(finished_s, max(self._free_s, earliest_s))
        self._free_s = finished_s
        return started_s, finished_s

    def computed(
        self,
        step: int,
        index: int,
        span: DeviceSpan,
        *,
        seen_s: float,
        earliest_s: float,
        counts: bool = True,
    ) -> DeviceRecord:
        """A micro-batch is done. `earliest_s`: when it was dispatched and its input was there.

        `counts`: False for work that was given up: the device was busy, but no boundary is made of it.
        """
        started_s, finished_s = self._span(span, seen_s, earliest_s)
        if counts:
            if index == 0 and step > 0:
                self._set(step - 1, replace(self.facts(step - 1), next_started_s=started_s))
            facts = replace(self.facts(step), last_finished_s=finished_s)
            if index == facts.last_index:
                facts = replace(facts, last_heard_s=seen_s)
            self._set(step, facts)
        return DeviceRecord(
            kind="fwd_bwd", step=step, index=index, started_s=started_s, finished_s=finished_s
        )

    def updated(
        self,
        step: int,
        span: DeviceSpan,
        *,
        seen_s: float,
        earliest_s: float,
        counts: bool = True,
    ) -> DeviceRecord:
        started_s, finished_s = self._span(span, seen_s, earliest_s)
        if counts:
            facts = self.facts(step)
            facts = replace(facts, update_started_s=started_s, update_finished_s=finished_s)
            self._set(step, replace(facts, update_heard_s=seen_s))
        return DeviceRecord(
            kind="update", step=step, index=-1, started_s=started_s, finished_s=finished_s
        )
