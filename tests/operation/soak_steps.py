"""Trains many steps on fakes in a process of its own, and prints its resident memory on the way.

`python -m tests.operation.soak_steps STEPS`: one line `step bytes` at half and at the end.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from orchestrator.calls import Done, Event, Ready, Send, WorkerView
from orchestrator.operation.operation import Operation
from orchestrator.plan import RunPlan
from orchestrator.ports import Answer, StepFacts, StepSummary
from orchestrator.runner import Runner
from orchestrator.steps import StepBook
from prestage.protocol import FWD_BWD_CALLS, Call, StepState


def resident_bytes(pid: str = "self") -> int:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmRSS")


class Trainer:
    """Carries everything out at once."""

    def call(self, send: Send, *, data_cursor: str) -> Answer:
        del data_cursor
        if send.call is Call.OPEN_RUN:
            view = WorkerView(
                state=StepState(), incarnation="i", epoch=1, last_seq=0, compiled=True
            )
            return Answer(event=Done(view=view))
        if send.call is Call.GET_METRICS:
            values = {"loss": 1.0 / (send.step + 1), "grad_norm": 0.5, "entropy": 2.0}
            facts = StepFacts(
                step=send.step,
                train_step=send.step + 1,
                applied=True,
                values=values,
                boundary_idle_seconds=0.001,
                device_wait_seconds=0.5,
                stage_seconds=0.01,
            )
            return Answer(event=Done(stage_seconds=0.01, device_wait_seconds=0.5), metrics=(facts,))
        used = send.call in FWD_BWD_CALLS and send.index == 0
        return Answer(event=Done(), used_staged_input=used, train_step=send.step)

    def read_metrics(self, from_step: int, count: int) -> tuple[StepFacts, ...]:
        del from_step, count
        return ()

    def in_flight(self) -> int:
        return 0


class Feeder:
    """Two micro-batches a step, ready at once."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def start_step(self, step: int) -> None:
        self._events += [
            Ready(step=step, index=index, digest=f"{step}-{index}", last=index == 1)
            for index in range(2)
        ]

    def next_event(self, timeout_s: float) -> Event | None:
        del timeout_s
        return self._events.pop(0) if self._events else None

    def score_step(self, step: int) -> None: ...
    def step_closed(self, step: int) -> None: ...
    def forget_worker(self) -> None: ...

    def summary(self, step: int) -> StepSummary | None:
        return StepSummary(
            step=step,
            micro_batches=2,
            groups=4,
            trajectories=32,
            real_tokens=4096,
            trained_tokens=2048,
            rows=8,
            reward_mean=0.5,
            dropped={"too_long": step // 7},
        )

    def data_cursor(self, next_step: int) -> str:
        return str(next_step)


def main(steps: int) -> None:
    operation = Operation()

    def on_bookkeeping(book: StepBook, step: int) -> None:
        operation.metrics.on_step(book, step)
        operation.board.closed(book.get(step))
        if step + 1 in (steps // 2, steps):
            gc.collect()
            print(step + 1, resident_bytes(), flush=True)

    plan = RunPlan(num_steps=steps, pipeline=True, stage=True, checkpoint_every=10)
    Runner(
        run_id="soak",
        plan=plan,
        trainer=Trainer(),
        feeder=operation.feeder(Feeder()),
        clock=operation.clock,
        observers=(operation.metrics, operation.board),
        on_bookkeeping=on_bookkeeping,
        before_send=operation.before_send,
    ).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
