"""A whole rig in one process: a served worker on a unix socket, and runs against it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc

from orchestrator.bench.synthetic import SyntheticShape, SyntheticSource
from orchestrator.clock import RealClock as OrchestratorClock
from orchestrator.feeder import Feeder, PutPort, StepSource
from orchestrator.plan import RunPlan
from orchestrator.ports import Answer, Observer, TrainerPort
from orchestrator.put_client import PlanePut
from orchestrator.runner import Patience, Runner
from orchestrator.steps import StepBook
from orchestrator.trainer_client import RunShape, TrainerClient
from prestage.trace import TraceRecord
from prestage.wire.channel import open_channel
from prestage.wire.stream_plane import StreamSender
from trainer_worker.clock import RealClock
from trainer_worker.engine import EngineParts
from trainer_worker.engines.timed import TimedConfig, create_timed
from trainer_worker.server import ServerConfig, WorkerServer

FIELDS = (
    "advantages",
    "loss_mask",
    "positions",
    "sampling_logprobs",
    "segment_ids",
    "tokens",
)
FAST = TimedConfig(fwd_bwd_seconds=0.004, update_seconds=0.001, copy_seconds=0.002)


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """A short folder: a unix socket's path is limited."""
    with tempfile.TemporaryDirectory(prefix="ps-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def served(
    parts: EngineParts | None = None, *, folder: Path | None = None, **config: object
) -> Iterator[WorkerServer]:
    """A serving worker on a unix socket of its own."""
    with contextlib.ExitStack() as stack:
        where = folder or stack.enter_context(socket_folder())
        server = WorkerServer(
            ServerConfig(listen=f"unix://{where}/w.sock", **config),  # type: ignore[arg-type]
            parts or create_timed(FAST, RealClock()),
        )
        server.start()
        stack.callback(server.stop)
        yield server


def address_of(server: WorkerServer) -> str:
    return server._config.listen


@dataclass(kw_only=True)
class Recorder:
    """An observer that keeps everything."""

    records: list[TraceRecord]
    answers: list[Answer]

    def on_call(self, record: TraceRecord, answer: Answer) -> None:
        self.records.append(record)
        self.answers.append(answer)

    def on_note(self, note: object) -> None:
        del note

    def on_state(self, state: object) -> None:
        del state


@dataclass(kw_only=True)
class RunResult:
    book: StepBook
    recorder: Recorder
    digest: str
    client: TrainerClient


def run_against(
    address: str,
    plan: RunPlan,
    *,
    run_id: str = "run",
    shape: SyntheticShape | None = None,
    source: StepSource | None = None,
    wrap_trainer: object = None,
    wrap_sender: object = None,
    patience: Patience | None = None,
    observers: tuple[Observer, ...] = (),
) -> RunResult:
    """One run of the real runner, feeder and client against a served worker."""
    shape = shape or SyntheticShape()
    channel: grpc.Channel = open_channel(address)
    client = TrainerClient(
        channel,
        run_id=run_id,
        shape=RunShape(rows=shape.rows, tokens_per_row=shape.tokens_per_row, fields=FIELDS),
    )
    sender: PutPort = PlanePut(StreamSender(channel), lambda: (client.epoch, client.incarnation))
    if wrap_sender is not None:
        sender = wrap_sender(sender)  # type: ignore[operator]
    trainer: TrainerPort = client
    if wrap_trainer is not None:
        trainer = wrap_trainer(client)  # type: ignore[operator]
    feeder = Feeder(source or SyntheticSource(shape, run_id), sender)
    recorder = Recorder(records=[], answers=[])
    try:
        runner = Runner(
            run_id=run_id,
            plan=plan,
            trainer=trainer,
            feeder=feeder,
            clock=OrchestratorClock(),
            observers=(recorder, *observers),
            patience=patience or Patience(data_s=20.0, unreachable_s=10.0, backoff_s=0.01),
        )
        book = runner.run()
        return RunResult(
            book=book, recorder=recorder, digest=client.parameter_digest(), client=client
        )
    finally:
        feeder.close()
        channel.close()
