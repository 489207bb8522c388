"""One simulated run: the core's actions on the simulated device, in the runner's order of events.

Follows `orchestrator.runner`: what became ready during a call counts as ready before its answer.
Only settings without faults are simulated, so a call that cannot happen here is an error.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from orchestrator.bench.sim.core import Core, DirectCore, RememberingCore
from orchestrator.bench.sim.model import NS, Device, Links, Rollouts, Shape, SimError, to_ns
from orchestrator.calls import (
    Await,
    Done,
    Event,
    Fail,
    Finish,
    Local,
    LocalDone,
    LocalKind,
    NoteKind,
    Ready,
    Send,
    Start,
    WorkerView,
)
from orchestrator.plan import RunPlan
from prestage.protocol import CLOSING_CALLS, FWD_BWD_CALLS, Call, StepState
from prestage.trace import DeviceRecord, TraceRecord

# The flag settings, in the order that tables show them. Names are used in files and flags.
SETTINGS: Final[Mapping[str, Mapping[str, bool]]] = {
    "stock": {},
    "pipelined": {"pipeline": True},
    "staged_after": {"pipeline": True, "stage": True, "stage_before_update": False},
    "staged_before": {"pipeline": True, "stage": True},
    "zero_gap": {"pipeline": True, "stage": True, "dispatch_before_metrics": True},
}
FLAGS: Final[Mapping[str, str]] = {
    "stock": "(none)",
    "pipelined": "--pipeline_step_boundary",
    "staged_after": "+ --stage_next_microbatch --nostage_before_update",
    "staged_before": "+ --stage_next_microbatch",
    "zero_gap": "+ --stage_next_microbatch --dispatch_before_metrics",
}


def plan_for(setting: str, base: RunPlan) -> RunPlan:
    """`base` with the switches of one setting. Raises `SimError` for an unknown name."""
    if setting not in SETTINGS:
        raise SimError(f"unknown setting {setting!r}; known: {', '.join(SETTINGS)}")
    switches = SETTINGS[setting]
    return replace(
        base,
        pipeline=switches.get("pipeline", False),
        stage=switches.get("stage", False),
        stage_before_update=switches.get("stage_before_update", True),
        dispatch_before_metrics=switches.get("dispatch_before_metrics", False),
    )


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One simulated step. Seconds on the virtual clock."""

    step: int
    seconds: float  # From the end of the update before to the end of its own.
    idle_before_s: float  # At the boundary before it.
    idle_inside_s: float  # Between its own micro-batches.
    staged_input: bool


@dataclass(frozen=True, kw_only=True)
class SimResult:
    """One simulated run."""

    steps: tuple[StepResult, ...]
    notes: Mapping[NoteKind, int]
    calls: int  # Trainer calls made.
    total_s: float
    spans: tuple[DeviceRecord, ...]  # Device work around the boundary that was asked for.
    host: tuple[TraceRecord, ...]  # The calls around it.
    core_asked: int  # How often the core itself was asked (the rest was remembered).

    def scored(self, first_step: int = 1) -> tuple[StepResult, ...]:
        """Steps from `first_step` on; step 0 has no boundary before it."""
        return tuple(step for step in self.steps if step.step >= first_step)

    @property
    def step_seconds(self) -> float:
        """Mean of the scored steps."""
        return statistics.fmean(step.seconds for step in self.scored())

    @property
    def boundary_idle_s(self) -> float:
        """Mean over the scored boundaries."""
        return statistics.fmean(step.idle_before_s for step in self.scored())

    @property
    def inside_idle_s(self) -> float:
        return statistics.fmean(step.idle_inside_s for step in self.scored())

    @property
    def staged_boundaries(self) -> int:
        return sum(step.staged_input for step in self.steps)


class _Feeder:
    """Packs and puts one micro-batch after another; their bytes become ready at known times."""

    def __init__(self, shape: Shape, links: Links, *, scored_first: bool) -> None:
        self._shape = shape
        self._links = links
        self._rollouts = Rollouts(shape)
        self._scored_first = scored_first
        self._free = 0
        self._pack = to_ns(shape.pack_s)
        self._waiting: deque[tuple[int, int]] = deque()  # (step, asked at), not yet packed.
        self._queue: deque[tuple[int, Ready]] = deque()

    def start_step(self, step: int, now: int, closed: list[int]) -> None:
        self._waiting.append((step, now))
        if not self._scored_first:
            self.pack(closed)

    def pack(self, closed: list[int]) -> None:
        """Pack every step whose groups' arrival is decided by now."""
        while self._waiting:
            step, asked = self._waiting[0]
            arrives = self._rollouts.arrival(step, closed)
            if arrives is None:
                return
            self._waiting.popleft()
            now = max(asked, arrives, self._free)
            last = self._shape.micro_batches - 1
            for index in range(self._shape.micro_batches):
                now += self._pack + self._links.put_ns(step, index)
                ready = Ready(step=step, index=index, digest=f"#{index}", last=index == last)
                self._queue.append((now, ready))
            self._free = now

    def closed(self, closed: list[int]) -> None:
        if not self._scored_first:
            self.pack(closed)

    def score(self, step: int, now: int, closed: list[int]) -> int:
        """When the step's groups are in, so that it can be scored."""
        arrives = self._rollouts.arrival(step, closed)
        if arrives is None:
            raise SimError(f"step {step} is scored before its groups can be made")
        return max(now, arrives)

    def scored(self, now: int, closed: list[int]) -> None:
        self._free = max(self._free, now)
        self.pack(closed)

    def due(self, now: int) -> Ready | None:
        if self._queue and self._queue[0][0] <= now:
            return self._queue.popleft()[1]
        return None

    def awaited(self, step: int, now: int, until: int) -> int:
        """When the runner goes on: `step`'s first micro-batch is there, or the queue has run dry."""
        for due, ready in self._queue:
            if (ready.step, ready.index) == (step, 0):
                return max(now, min(due, until))
        return max(now, until) if self._waiting else now

    def next(self) -> tuple[int, Ready]:
        if not self._queue:
            raise SimError(
                "nothing more becomes ready: rollouts that wait for a step which waits for them;"
                " raise rollouts_ahead"
            )
        return self._queue.popleft()


class _Run:
    def __init__(self, shape: Shape, plan: RunPlan, core: Core, picture: int) -> None:
        links = Links(shape)
        self._shape = shape
        self._plan = plan
        self._core = core
        self._picture = range(picture, picture + 2)
        self._feeder = _Feeder(shape, links, scored_first=plan.trainer_logprobs)
        self._device = Device(shape, links, picture, picture + 1)
        self._now = 0
        self._closed: list[int] = []
        self._rpc = to_ns(shape.rpc_s)
        self._host: list[TraceRecord] = []
        self._notes: Counter[NoteKind] = Counter()
        self._calls = 0

    def run(self) -> SimResult:
        action = self._core.advance(Start())
        while not isinstance(action, Finish | Fail):
            if isinstance(action, Await):
                ready_at, event = self._feeder.next()
                self._now = max(self._now, ready_at)
                action = self._core.advance(event)
                self._note()
                continue
            started = self._now
            answer = self._send(action) if isinstance(action, Send) else self._local(action)
            self._keep(action, started)
            while (ready := self._feeder.due(self._now)) is not None:
                self._core.advance(ready)
                self._note()
            action = self._core.advance(answer)
            self._note()
        if isinstance(action, Fail):
            raise SimError(f"the simulated run failed: {action.why}")
        return self._result()

    def _note(self) -> None:
        if self._core.noted:
            self._notes.update(self._core.noted)

    def _keep(self, action: Send | Local, started: int) -> None:
        if action.step not in self._picture:
            return
        if isinstance(action, Local) and action.kind in (LocalKind.PACK, LocalKind.CLOCK):
            return
        name = action.call.value if isinstance(action, Send) else action.kind.value
        self._host.append(
            TraceRecord(
                side="orchestrator",
                call=name,
                step=action.step,
                index=action.index if isinstance(action, Send) else -1,
                started_s=started / NS,
                seconds=(self._now - started) / NS,
            )
        )

    def _local(self, local: Local) -> Event:
        match local.kind:
            case LocalKind.PACK:
                self._feeder.start_step(local.step, self._now, self._closed)
            case LocalKind.BOOKKEEPING:
                self._now += to_ns(self._shape.bookkeeping_s)
            case LocalKind.SCORE:
                begin = self._feeder.score(local.step, self._now, self._closed)
                self._now = self._device.work("score", local.step - 1, begin, self._shape.score_s)
                self._feeder.scored(self._now, self._closed)
            case LocalKind.CLOCK:
                pass
        return LocalDone()

    def _send(self, send: Send) -> Event:
        shape, device = self._shape, self._device
        self._calls += 1
        now = self._now + self._rpc
        event = Done()
        if send.call in FWD_BWD_CALLS:
            last = send.call is not Call.FWD_BWD
            now = device.fwd_bwd(send.step, send.index, last, now)
            if send.call is Call.FWD_BWD_APPLY:
                now = device.update(send.step, now)
            elif send.call is Call.FWD_BWD_DEFER:
                now = self._feeder.awaited(send.step + 1, now, device.queued_until(now))
        else:
            match send.call:
                case Call.STAGE_FWD_BWD:
                    now = device.stage(send.step, send.index, now)
                case Call.APPLY_DEFERRED_UPDATE:
                    now = device.update(send.step, now)
                case Call.GET_METRICS:
                    now = max(now, device.steps[send.step].update_finished)
                    now += to_ns(shape.metrics_s)
                    event = self._metrics(send.step)
                case Call.SAVE_CHECKPOINT:
                    now = device.wait_idle(now) + to_ns(shape.checkpoint_s)
                case Call.PREPARE_WEIGHT_SYNC:
                    now = device.wait_idle(now) + to_ns(shape.weight_sync_s)
                case Call.EVALUATE:
                    now = device.work("eval", send.step, now, shape.eval_s)
                case Call.OPEN_RUN:
                    event = Done(
                        view=WorkerView(
                            state=StepState(), incarnation="sim", epoch=1, last_seq=0, compiled=True
                        )
                    )
                case Call.RELEASE_WEIGHT_SYNC:
                    pass
                case _:
                    raise SimError(f"{send.line} cannot happen in a run without faults")
        self._now = now
        if send.call in CLOSING_CALLS:
            self._closed.append(device.steps[send.step].update_finished)
            self._feeder.closed(self._closed)
        return event

    def _metrics(self, step: int) -> Done:
        times = self._device.steps[step]
        if times.stage_ended < 0:
            return Done()
        wait = max(0, times.last_finished - times.stage_ended)
        return Done(stage_seconds=self._shape.stage_s, device_wait_seconds=wait / NS)

    def _result(self) -> SimResult:
        steps = []
        before = 0
        for number, times in enumerate(self._device.steps[: self._plan.num_steps]):
            steps.append(
                StepResult(
                    step=number,
                    seconds=(times.update_finished - before) / NS,
                    idle_before_s=times.idle_before / NS,
                    idle_inside_s=times.idle_inside / NS,
                    staged_input=times.staged_input,
                )
            )
            before = times.update_finished
        asked = self._core.asked if isinstance(self._core, RememberingCore) else self._calls
        return SimResult(
            steps=tuple(steps),
            notes=dict(self._notes),
            calls=self._calls,
            total_s=self._now / NS,
            spans=tuple(self._device.spans),
            host=tuple(self._host),
            core_asked=asked,
        )


def simulate(
    shape: Shape, plan: RunPlan, *, picture: int | None = None, remember: bool = True
) -> SimResult:
    """Simulate one run. Raises `SimError`.

    `picture`: the step whose end's boundary is kept for pictures (the middle one by default).
    `remember`: ask the core once for each decision and repeat it; the result is the same.
    """
    if plan.num_steps < 2:
        raise SimError(f"num_steps is {plan.num_steps}; a boundary needs at least 2 steps")
    core: Core = RememberingCore(plan) if remember else DirectCore(plan)
    kept = plan.num_steps // 2 - 1 if picture is None else picture
    return _Run(shape, plan, core, kept).run()
