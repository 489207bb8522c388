"""One run from config to result: builds the parts, drives the runner, reports."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import grpc
from tqdm import tqdm

from orchestrator.boundary import BoundaryState
from orchestrator.bringup import check_duties, check_shape, reach, resolve_staging
from orchestrator.calls import Note
from orchestrator.clock import RealClock
from orchestrator.feeder import Feeder, FeederCounters, StepSource
from orchestrator.flags import ConfigError, OrchestratorConfig
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.operation.operation import Operation
from orchestrator.plan import RunPlan
from orchestrator.ports import Answer, Clock, Observer
from orchestrator.put_client import PlanePut, open_plane, receive_buffers
from orchestrator.reader import PatientReader, WorkerReplaced, ask
from orchestrator.report import lines_of, table
from orchestrator.routing import RoutingUnusable, check_drop_audit, resolve_routing
from orchestrator.runner import Patience, RunFailed, Runner
from orchestrator.score_client import ScoreClient
from orchestrator.scoring_parts import (
    check_scoring,
    evaluation,
    evaluation_set,
    packs_into,
    scoring_hook,
    trained_shape,
)
from orchestrator.steps import StepBook, StepRecord
from orchestrator.trainer_client import RunShape, TrainerClient
from prestage.trace import TraceRecord, TraceWriter
from prestage.wire.layout import Layout
from prestage.wire.planes import SendBuffer
from prestage.wire.security import Role

log = logging.getLogger("prestage.orchestrator")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """What one run ended with."""

    records: tuple[StepRecord, ...]
    parameter_digest: str
    backend_compiles_in_steps: int
    notes: tuple[str, ...]


def _new_trace(folder: Path) -> Path:
    """A file of this process's own: what the ones before it wrote is evidence, and stays."""
    path = folder / "orchestrator.ndjson"
    number = 1
    while path.exists():
        number += 1
        path = folder / f"orchestrator-{number}.ndjson"
    return path


class _Tracer:
    """Writes every call; remembers the notes."""

    def __init__(self, folder: Path | None) -> None:
        self._writer = None
        self.notes: list[str] = []
        if folder is not None:
            self._writer = TraceWriter(
                _new_trace(folder),
                side="orchestrator",
                clock_origin_s=time.time() - time.monotonic(),
            )

    def on_call(self, record: TraceRecord, answer: Answer) -> None:
        del answer
        if self._writer is not None:
            self._writer.write(record)

    def on_note(self, note: Note) -> None:
        self.notes.append(f"{note.kind.value} at step {note.step}: {note.text}")

    def on_state(self, state: BoundaryState) -> None:
        del state

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Progress:
    """The progress bar and the step lines."""

    def __init__(self, num_steps: int, *, show: bool, name: str) -> None:
        self._bar = tqdm(total=num_steps, desc=name, unit="step", file=sys.stderr, disable=not show)

    def __call__(self, book: StepBook, step: int) -> None:
        record = book.get(step)
        for line in lines_of(record):
            log.info("%s", line)
        loss = record.metrics.get("loss")
        if loss is not None:
            self._bar.set_postfix_str(f"loss {loss:.4g}", refresh=False)
        self._bar.update(step + 1 - self._bar.n)  # An earlier process may have closed some.

    def close(self) -> None:
        self._bar.close()


Reserve = Callable[[Layout], SendBuffer]
SourceFactory = Callable[[OrchestratorConfig, int, Reserve], tuple[StepSource, RunShape]]
"""Makes a run's source: its config, the vocabulary's size, and where micro-batches are written."""


class Intake(Observer, Protocol):
    """What keeps a source fed: hears of the run, and is stopped with it."""

    def stop(self, *, finished: bool) -> None:
        """Take nothing more, and let a waiting source go. Idempotent."""
        ...


def run(
    config: OrchestratorConfig,
    make_source: SourceFactory,
    operation: Operation | None = None,
    intake: Intake | None = None,
) -> RunResult:
    """Train one run. `operation`: what watches and ends it; None: nothing does. `intake`: what
    feeds the source; None: it needs nobody.

    Raises `ConfigError`, `WorkerUnreachable`, `RunFailed`, `SourceError`, `RunStopped`,
    `AddressError`, `SecurityError`.
    """
    operation = operation or Operation()
    for note in config.notes:
        log.warning("%s", note)
    channel = operation.security.open_channel("--trainer", config.trainer, Role.DRIVE)
    operation.ending.on_cut(channel.close)
    operation.board.begin(config.run_id, config.trainer)
    try:
        return _run(config, make_source, channel, operation, intake)
    finally:
        if intake is not None:
            intake.stop(finished=False)
        channel.close()


def _run(
    config: OrchestratorConfig,
    make_source: SourceFactory,
    channel: grpc.Channel,
    operation: Operation,
    intake: Intake | None,
) -> RunResult:
    probe = TrainerClient(
        channel, run_id=config.run_id, shape=RunShape(rows=1, tokens_per_row=2, fields=())
    )
    operation.board.opening("reaching the worker")
    able = reach(probe, config.trainer, config.trainer_wait_s, sleep=operation.control.sleep)
    plan = dataclasses.replace(
        config.plan,
        stage=resolve_staging(config.staging, able, before_update=config.plan.stage_before_update),
        dispatch_before_metrics=False,
    )
    plan = dataclasses.replace(
        plan, dispatch_before_metrics=config.plan.dispatch_before_metrics and plan.stage
    )
    plane = ask(
        lambda: open_plane(
            channel, probe.capabilities, shared_memory_bytes=config.shared_memory_bytes
        ),
        operation.clock,
    )
    log.info("payloads travel by %s", plane.name)
    operation.board.opening("opening the rollouts")
    check_duties(plan, able)
    check_scoring(config, able)
    try:
        check_drop_audit(config.require_drop_audit, able)
        config = dataclasses.replace(config, routing=resolve_routing(config.router_replay, able))
    except RoutingUnusable as error:
        raise ConfigError(str(error)) from error
    vocab_size = config.vocab_size or able.vocab_size
    evaluated = evaluation_set(config, vocab_size)
    source, shape = make_source(config, vocab_size, packs_into(config, plane.reserve))
    shape = trained_shape(config, shape)
    if config.routing is not None:
        shape = dataclasses.replace(shape, routing_shape=config.routing.shape)
    check_shape(able, shape)
    shape = dataclasses.replace(shape, receive_buffers=receive_buffers(plane))
    sender = PlanePut(plane, lambda: (client.epoch, client.incarnation))
    scorer = ScoreClient(channel, sender, config.run_id, lambda: client.epoch)
    client = TrainerClient(
        channel, run_id=config.run_id, shape=shape, evaluator=evaluation(evaluated, scorer)
    )
    # A worker that is started again loads its engine, as at the first start.
    unreachable_s = max(Patience().unreachable_s, config.trainer_wait_s)
    feeder = Feeder(
        source,
        sender,
        score=scoring_hook(config, source, scorer, plane.reserve),
        unreachable_s=unreachable_s,
    )
    tracer = _Tracer(config.trace_dir)
    progress = _Progress(plan.num_steps, show=config.progress, name=config.run_id)
    metrics = operation.metrics
    metrics.watch_feeder(feeder.counters)
    operation.board.running(plan, feeder.counters)

    def on_bookkeeping(book: StepBook, step: int) -> None:
        progress(book, step)
        metrics.on_step(book, step)
        operation.board.closed(book.get(step), book.get(step - 1))
        if plan.checkpoint_every:
            _note_durable(client, metrics, source if intake is not None else None)

    reader = PatientReader(client, operation.clock)
    compiles = _CompileCount(reader)
    try:
        runner = Runner(
            run_id=config.run_id,
            plan=plan,
            trainer=client,
            feeder=operation.feeder(feeder),
            clock=operation.clock,
            observers=(
                tracer,
                compiles,
                metrics,
                operation.board,
                *(() if intake is None else (intake,)),
            ),
            patience=Patience(data_s=config.data_wait_s, unreachable_s=unreachable_s),
            on_bookkeeping=on_bookkeeping,
            before_send=operation.before_send,
        )
        book, digest = _train(runner, reader, plan, operation, feeder.counters)
        result = RunResult(
            records=book.records(),
            parameter_digest=digest,
            backend_compiles_in_steps=compiles.in_steps(),
            notes=tuple(tracer.notes),
        )
        if intake is not None:
            intake.stop(finished=True)
    finally:
        if intake is not None:
            intake.stop(finished=False)  # A feeder that waits for groups is let go.
        feeder.close()
        plane.close()
        progress.close()
        tracer.close()
    if config.result_file is not None:
        write_result(config.result_file, result)
    return result


def _train(
    runner: Runner,
    reader: PatientReader,
    plan: RunPlan,
    operation: Operation,
    counters: FeederCounters,
) -> tuple[StepBook, str]:
    """To the end, and to what the worker that got there says of it: its book and its digest."""
    while True:
        book = runner.run()
        operation.board.finishing()
        try:
            _read_again(reader, book)
            if plan.checkpoint_every:
                last = last_checkpoint(runner.state.step, plan)
                await_durable(reader.durability, last, clock=operation.clock)
            return book, reader.parameter_digest()
        except WorkerReplaced as replaced:
            log.warning("%s", replaced)
            operation.board.running(plan, counters)


def _note_durable(
    client: TrainerClient, metrics: OrchestratorMetrics, source: StepSource | None
) -> None:
    """Tell who wants to know what a durable checkpoint covers. A worker that is away is asked next
    time.
    """
    with contextlib.suppress(grpc.RpcError):
        durable, _ = client.durability()
        if durable > 0:
            metrics.durable(durable)
            if source is not None:
                source.step_durable(durable)


def last_checkpoint(steps_closed: int, plan: RunPlan) -> int:
    """Step of the last checkpoint that a run of so many steps asked for; 0 = none."""
    return steps_closed // plan.checkpoint_every * plan.checkpoint_every


def await_durable(
    durability: Callable[[], tuple[int, str]],
    step: int,
    *,
    patience_s: float = 1800.0,
    clock: Clock | None = None,
) -> None:
    """Wait until the checkpoint of `step` is durable: a run that ended well can be resumed.

    Raises `RunFailed` when it could not be written, or not in time.
    """
    clock = clock or RealClock()
    started_s = clock.now()
    while step:
        durable, failure = durability()
        if failure:
            raise RunFailed(f"the run trained to its end, but {failure}")
        if durable >= step:
            return
        if clock.now() - started_s > patience_s:
            raise RunFailed(
                f"the run trained to its end, but its last checkpoint (step {step}) was not durable"
                f" within {patience_s:g} s; durable is {durable}"
            )
        clock.sleep(0.05)


class _CompileCount:
    """Backend compiles between the end of Compile and the end of the run: must be 0."""

    def __init__(self, reader: PatientReader) -> None:
        self._reader = reader
        self._after_compile = -1

    def on_call(self, record: TraceRecord, answer: Answer) -> None:
        del answer
        if record.call == "compile" and record.outcome == "ok":
            self._after_compile = self._reader.backend_compiles()

    def on_note(self, note: Note) -> None:
        del note

    def on_state(self, state: BoundaryState) -> None:
        del state

    def in_steps(self) -> int:
        if self._after_compile < 0:
            return 0  # An earlier process compiled.
        return self._reader.backend_compiles() - self._after_compile


def _read_again(reader: PatientReader, book: StepBook) -> None:
    """Boundary idle is known only once the next step has started: read the kept steps again."""
    records = book.records()
    for record in records[-128:]:
        for facts in reader.read_metrics(record.step, 1):
            book.measured(facts)


def write_result(path: Path, result: RunResult) -> None:
    """The run's result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    steps = []
    for record in result.records:
        summary = record.summary
        if summary is not None:
            summary = dataclasses.replace(summary, dropped=dict(summary.dropped))
        plain = dataclasses.replace(record, metrics=dict(record.metrics), summary=summary)
        entry = dataclasses.asdict(plain)
        entry["seconds"] = record.seconds
        steps.append(entry)
    text = {
        "parameter_digest": result.parameter_digest,
        "backend_compiles_in_steps": result.backend_compiles_in_steps,
        "notes": list(result.notes),
        "steps": steps,
    }
    path.write_text(json.dumps(text, indent=1, sort_keys=True) + "\n")


def summary_text(result: RunResult) -> str:
    """What is printed at the end of a run."""
    lines = [line for record in result.records for line in lines_of(record)]
    if not any(record.micro_steps for record in result.records):
        lines.append(
            "nothing was trained: this run is at its last step already; raise --num_steps to go on,"
            " or give another --run_id to a fresh worker"
        )
    lines += ["", table(result.records), "", f"parameter digest: {result.parameter_digest}"]
    lines.append(f"backend compiles inside steps: {result.backend_compiles_in_steps}")
    lines += [f"note: {note}" for note in result.notes]
    return "\n".join(lines)
