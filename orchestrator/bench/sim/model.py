"""The simulated device, link and rollouts: pure arithmetic on a virtual clock of nanoseconds.

Times are whole nanoseconds, so that sums are exact and a gap of nothing is 0. Nothing here waits,
reads a clock or draws from hidden state: every draw is a function of (seed, kind, step, index).
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import NormalDist
from typing import Final

from prestage.trace import DeviceRecord

NS: Final = 1_000_000_000


class SimError(ValueError):
    """Settings that cannot be simulated; names the setting, the value and the fix."""


def to_ns(seconds: float) -> int:
    return round(seconds * NS)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is simulated. Seconds unless said otherwise; every default costs nothing."""

    micro_batches: int = 9
    fwd_bwd_s: float = 1.0
    update_s: float = 0.0
    copy_s: float = 0.0  # Input copy, host to device, on a lane of its own.
    put_s: float = 0.0  # One micro-batch's bytes from the orchestrator to a worker host.
    pack_s: float = 0.0  # Packing one micro-batch.
    rpc_s: float = 0.0  # Each trainer call, before it takes effect.
    stage_s: float = 0.0  # The stage call's own host time, beyond `rpc_s`.
    metrics_s: float = 0.0  # Metrics fetch, after the update is done.
    bookkeeping_s: float = 0.0  # Closing a step on the orchestrator: logging, publishing.
    checkpoint_s: float = 0.0
    weight_sync_s: float = 0.0
    eval_s: float = 0.0
    score_s: float = 0.0  # Trainer-computed log-probs of a whole step.
    max_inflight: int = 2  # Micro-batches dispatched at a time.
    wait_after_dispatch: bool = False  # fwd_bwd answers when a slot is free again.
    update_waits: bool = False  # The update waits for the last micro-batch (dropless retry).
    rollout_s: float = 0.0  # One step's groups, generated one step after another.
    rollouts_ahead: int = 1  # Generation of step k starts once step k - 1 - this is closed.
    # Step to seconds: its groups arrive no earlier than that long after the step before closed.
    late: Mapping[int, float] = field(default_factory=dict)
    hosts: int = 1  # Each copy and put ends with its slowest host.
    link_jitter: float = 0.0  # Log-normal sigma of each host's transfer time, median 1.
    slow_links: int = 0  # This many of the hosts ...
    slow_link_factor: float = 1.0  # ... take this much longer, always.
    rollout_jitter: float = 0.0  # Log-normal sigma of each step's rollout time.
    seed: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name == "late":
                continue
            value = float(self.__dict__[item.name])
            if not 0 <= value < 1e9:
                raise SimError(f"{item.name} is {value}; use a number from 0 to 1e9")
        for name, value, least in (
            ("micro_batches", self.micro_batches, 1),
            ("max_inflight", self.max_inflight, 1),
            ("hosts", self.hosts, 1),
        ):
            if value < least:
                raise SimError(f"{name} is {value}; use at least {least}")
        if self.slow_links > self.hosts:
            raise SimError(f"slow_links is {self.slow_links}, but hosts is {self.hosts}")
        if self.slow_link_factor < 1 and self.slow_links:
            raise SimError(f"slow_link_factor is {self.slow_link_factor}; a slow link needs >= 1")
        if self.wait_after_dispatch and self.max_inflight < 2:
            raise SimError(
                "wait_after_dispatch with max_inflight 1 would wait for each micro-batch itself:"
                " use max_inflight 2"
            )
        for step, seconds in self.late.items():
            if step < 0 or not 0 <= seconds < 1e9:
                raise SimError(f"late step {step} by {seconds} s; use steps and seconds >= 0")


class Draw(enum.IntEnum):
    """What a draw is for: the same (seed, draw, step, index) is the same number in every arm."""

    COPY = 1
    COPY_SLOW = 2
    PUT = 3
    PUT_SLOW = 4
    ROLLOUT = 5


_MASK: Final = (1 << 64) - 1
_NORMAL: Final = NormalDist()


def uniform(seed: int, draw: Draw, step: int, index: int) -> float:
    """A number in (0, 1) from its coordinates alone (splitmix64 of each, chained)."""
    value = seed & _MASK
    for word in (int(draw), step + 1, index + 1):
        value = (value + 0x9E3779B97F4A7C15 * (word + 1)) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return ((value >> 12) + 0.5) / (1 << 52)


def slowest(sigma: float, hosts: int, drawn: float) -> float:
    """The slowest of `hosts` log-normal times (median 1) for one uniform draw.

    The maximum of N has the distribution function F^N, so one draw stands for all N exactly.
    """
    if sigma == 0:
        return 1.0
    below = min(math.exp(math.log(drawn) / hosts), 1 - 1e-16)
    return math.exp(sigma * _NORMAL.inv_cdf(below))


class Links:
    """How long each transfer takes: its slowest host decides."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def factor(self, draw: Draw, draw_slow: Draw, step: int, index: int) -> float:
        shape = self._shape
        normal_hosts = shape.hosts - shape.slow_links
        if shape.link_jitter == 0:
            return shape.slow_link_factor if shape.slow_links else 1.0
        worst = 0.0
        if normal_hosts:
            drawn = uniform(shape.seed, draw, step, index)
            worst = slowest(shape.link_jitter, normal_hosts, drawn)
        if shape.slow_links:
            drawn = uniform(shape.seed, draw_slow, step, index)
            slow = slowest(shape.link_jitter, shape.slow_links, drawn)
            worst = max(worst, shape.slow_link_factor * slow)
        return worst

    def copy_ns(self, step: int, index: int) -> int:
        if not self._shape.copy_s:
            return 0
        return to_ns(self._shape.copy_s * self.factor(Draw.COPY, Draw.COPY_SLOW, step, index))

    def put_ns(self, step: int, index: int) -> int:
        if not self._shape.put_s:
            return 0
        return to_ns(self._shape.put_s * self.factor(Draw.PUT, Draw.PUT_SLOW, step, index))


@dataclass(kw_only=True)
class StepTimes:
    """What the device did about one step. Nanoseconds; -1 = not yet."""

    first_started: int = -1  # Start of its first micro-batch.
    last_finished: int = -1
    update_finished: int = -1
    idle_before: int = 0  # Idle between the step before's last micro-batch and this one's first.
    idle_inside: int = 0  # Idle between its own micro-batches.
    staged_input: bool = False
    stage_ended: int = -1  # When the stage call after this step was done.


class Device:
    """One compute lane and one copy lane, as the trainer's engine drives them."""

    def __init__(self, shape: Shape, links: Links, first_kept: int, last_kept: int) -> None:
        """Spans of steps `first_kept` to `last_kept` are kept for pictures."""
        self._shape = shape
        self._links = links
        self._kept = range(first_kept, last_kept + 1)
        self._fwd_bwd = to_ns(shape.fwd_bwd_s)
        self._update = to_ns(shape.update_s)
        self._compute_free = 0
        self._copy_free = 0
        self._inflight: deque[int] = deque()
        self._staged: tuple[int, int, int] | None = None  # (step, index, copy's end)
        self._between_steps = True
        self._started = False
        self.steps: list[StepTimes] = []
        self.spans: list[DeviceRecord] = []

    def _step(self, step: int) -> StepTimes:
        while len(self.steps) <= step:
            self.steps.append(StepTimes())
        return self.steps[step]

    def _keep(self, kind: str, step: int, index: int, started: int, finished: int) -> None:
        if step in self._kept:
            self.spans.append(
                DeviceRecord(
                    kind=kind,
                    step=step,
                    index=index,
                    started_s=started / NS,
                    finished_s=finished / NS,
                )
            )

    def _occupy(self, kind: str, step: int, index: int, earliest: int, length: int) -> int:
        """Run something on the compute lane; returns when it ends. Counts the gap before it."""
        started = max(earliest, self._compute_free)
        if self._started:
            gap = started - self._compute_free
            if self._between_steps:
                # Before the next step's first micro-batch: its boundary, whoever runs now.
                self._step(step if kind == "fwd_bwd" else step + 1).idle_before += gap
            else:
                self._step(step).idle_inside += gap
        self._started = True
        self._compute_free = started + length
        self._keep(kind, step, index, started, self._compute_free)
        return self._compute_free

    def _copy(self, step: int, index: int, now: int) -> int:
        started = max(now, self._copy_free)
        length = self._links.copy_ns(step, index)
        self._copy_free = started + length
        if length:
            self._keep("copy", step, index, started, self._copy_free)
        return self._copy_free

    def fwd_bwd(self, step: int, index: int, last: bool, now: int) -> int:
        """Dispatch one micro-batch at `now`; returns when the call answers."""
        times = self._step(step)
        if self._staged is not None and self._staged[:2] == (step, index):
            input_ready = self._staged[2]
            times.staged_input = True
            self._staged = None
        else:
            input_ready = self._copy(step, index, now)
        while len(self._inflight) >= self._shape.max_inflight:
            now = max(now, self._inflight.popleft())
        ends = self._occupy("fwd_bwd", step, index, max(now, input_ready), self._fwd_bwd)
        if index == 0:
            times.first_started = ends - self._fwd_bwd
        self._between_steps = last
        self._inflight.append(ends)
        if self._shape.wait_after_dispatch:
            while len(self._inflight) >= self._shape.max_inflight:
                now = max(now, self._inflight.popleft())
        times.last_finished = ends
        return now

    def queued_until(self, now: int) -> int:
        """When the last micro-batch that was dispatched stops waiting behind another."""
        return max(now, self._inflight[-2]) if len(self._inflight) > 1 else now

    def stage(self, step: int, index: int, now: int) -> int:
        self._staged = (step, index, self._copy(step, index, now))
        now += to_ns(self._shape.stage_s)
        self._step(step - 1).stage_ended = now
        return now

    def update(self, step: int, now: int) -> int:
        if self._shape.update_waits:
            now = max(now, self._compute_free)
        self._step(step).update_finished = self._occupy("update", step, -1, now, self._update)
        return now

    def wait_idle(self, now: int) -> int:
        return max(now, self._compute_free)

    def work(self, kind: str, step: int, now: int, seconds: float) -> int:
        """Evaluation or scoring: on the compute lane, and the call waits for it."""
        return self._occupy(kind, step, -1, now, to_ns(seconds))


class Rollouts:
    """When each step's groups are in. Generation runs ahead by a fixed number of steps."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._arrived: list[int] = []

    def arrival(self, step: int, closed: Sequence[int]) -> int | None:
        """When `step`'s groups are in, given when steps closed; None: not decided yet."""
        shape = self._shape
        while len(self._arrived) <= step:
            making = len(self._arrived)
            needs = making - 1 - shape.rollouts_ahead if shape.rollout_s else -1
            late = shape.late.get(making)
            if max(needs, -1 if late is None else making - 1) >= len(closed):
                return None
            starts = self._arrived[-1] if self._arrived and shape.rollout_s else 0
            if needs >= 0:
                starts = max(starts, closed[needs])
            factor = 1.0
            if shape.rollout_jitter:
                drawn = uniform(shape.seed, Draw.ROLLOUT, making, 0)
                factor = math.exp(shape.rollout_jitter * _NORMAL.inv_cdf(drawn))
            arrives = starts + to_ns(shape.rollout_s * factor)
            if late is not None:
                before = closed[making - 1] if making else 0
                arrives = max(arrives, before + to_ns(late))
            self._arrived.append(arrives)
        return self._arrived[step]
