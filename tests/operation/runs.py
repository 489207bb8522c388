"""Runs of the real runner with an operation beside it."""

from __future__ import annotations

from orchestrator.bench.synthetic import SyntheticShape, SyntheticSource
from orchestrator.feeder import Feeder
from orchestrator.operation.operation import Operation
from orchestrator.plan import RunPlan
from orchestrator.put_client import PlanePut
from orchestrator.runner import Patience, Runner
from orchestrator.steps import StepBook
from orchestrator.trainer_client import RunShape, TrainerClient
from prestage.wire.channel import open_channel
from prestage.wire.stream_plane import StreamSender
from tests.support.rig import FIELDS

SHAPE = SyntheticShape(micro_batches=2)
PLAN = RunPlan(num_steps=6, pipeline=True, stage=True, latch_after=1000)


def run_operated(
    address: str, operation: Operation, plan: RunPlan = PLAN, shape: SyntheticShape = SHAPE
) -> str:
    """As `app.run` wires it; the parameters' digest. Raises `RunStopped`."""
    with open_channel(address) as channel:
        client = TrainerClient(
            channel,
            run_id="run",
            shape=RunShape(rows=shape.rows, tokens_per_row=shape.tokens_per_row, fields=FIELDS),
        )
        sender = PlanePut(StreamSender(channel), lambda: (client.epoch, client.incarnation))
        feeder = Feeder(SyntheticSource(shape, "run"), sender)
        operation.board.begin("run", address)
        operation.board.running(plan, feeder.counters)
        operation.metrics.watch_feeder(feeder.counters)

        def on_bookkeeping(book: StepBook, step: int) -> None:
            operation.metrics.on_step(book, step)
            operation.board.closed(book.get(step))

        try:
            Runner(
                run_id="run",
                plan=plan,
                trainer=client,
                feeder=operation.feeder(feeder),
                clock=operation.clock,
                observers=(operation.metrics, operation.board),
                patience=Patience(data_s=20.0, unreachable_s=10.0, backoff_s=0.01),
                on_bookkeeping=on_bookkeeping,
                before_send=operation.before_send,
            ).run()
            operation.board.finishing()
            return client.parameter_digest()
        finally:
            feeder.close()
