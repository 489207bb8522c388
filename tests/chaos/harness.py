"""One run of two real processes: started, restarted when they die, judged when the run ended.

The supervisor starts whatever died again with the same flags, as a JobSet would.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.check_trace import check_traces
from prestage.trace import Trace, TraceRecord, read_trace
from tests.chaos.faults import Fault, calls_of, fired, write_faults
from tests.chaos.journal import Replay, Trained, missing_from_journal, replayed
from tests.chaos.zygote import Zygote

ROLLOUTS = Path(__file__).parent.parent / "data" / "rollouts.parquet"
STEPS, MICRO_BATCHES = 4, 3
RUN_SECONDS = 90.0
MAX_STARTS = 8
GROUP_SIZE = 8
SHORT_TOKENS = 32
PRODUCER_SECONDS = 1.0
FENCED = "fenced off"
"""An open_run that comes twice is two callers for the worker; the first ends, and is started again."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What both processes are told beside where they live."""

    name: str
    worker_flags: tuple[str, ...] = ()
    orchestrator_flags: tuple[str, ...] = ()
    producers: int = 0  # Of a live run; 0: a recorded one.
    per_second: float = 400.0  # Rollouts of all producers.
    run_seconds: float = RUN_SECONDS  # After this it counts as hung.
    replayed: bool = False  # Judged by a replay of its own journal, which is kept whole.


TIMED = (
    "--engine=timed",
    "--timed_fwd_bwd_s=0.015",
    "--timed_update_s=0.002",
    "--timed_copy_s=0.002",
    "--timed_checkpoint_s=0.004",
)
SHAPE = (
    f"--num_steps={STEPS}",
    "--group_size=8",
    "--groups_per_batch=3",
    "--rows=4",
    "--tokens_per_row=1024",
    "--pipeline_step_boundary",
    "--stage_next_microbatch=on",
    "--latch_after=1000",
)
SMALL_POOL = "--shared_memory_bytes=8388608"  # Touching the default gigabyte takes most of a start.
RECORDED = (f"--rollouts={ROLLOUTS}", *SHAPE)
SETTINGS = {
    # Staged before the update, payloads in shared memory, every step kept.
    "staged": Setting(
        name="staged",
        worker_flags=TIMED,
        orchestrator_flags=(*RECORDED, SMALL_POOL, "--checkpoint_every=1"),
    ),
    # Payloads by stream, every second step kept, weights synced: a restart trains again.
    "stream": Setting(
        name="stream",
        worker_flags=TIMED,
        orchestrator_flags=(
            *RECORDED,
            "--checkpoint_every=2",
            "--weight_sync_every=1",
            "--shared_memory_bytes=0",
        ),
    ),
    # Rollouts come in while it trains, from one producer: their order is always the same.
    "live": Setting(
        name="live",
        worker_flags=TIMED,
        orchestrator_flags=(*SHAPE, SMALL_POOL, "--checkpoint_every=1"),
        producers=1,
    ),
    # Three producers, and nothing is saved: a restarted worker gets all steps from the journal.
    "live, three producers": Setting(
        name="live, three producers",
        worker_flags=TIMED,
        orchestrator_flags=(*SHAPE, SMALL_POOL),
        producers=3,
        replayed=True,
    ),
}
JAX = Setting(
    name="jax",
    worker_flags=("--engine=jax", "--preset=tiny", "--learning_rate=0.01"),
    orchestrator_flags=(
        *(*SHAPE, SMALL_POOL, "--checkpoint_every=1"),
        *("--rollouts={folder}/short.parquet", "--rows=2", f"--tokens_per_row={4 * SHORT_TOKENS}"),
    ),
    run_seconds=240.0,
)
"""A real model: real checkpoints of parameters and optimizer state."""
LIVE_GROUPS = 14
"""Sent by producers; the last two are not trained and stay in the journal."""


class Running(Protocol):
    """One process that was started."""

    pid: int

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        ...


Starter = Callable[[str, list[str], Path], Running]
"""Starts `tests.chaos.PROGRAM` with arguments and a log file."""


def spawned(
    program: str, arguments: list[str], log: Path, settings: Mapping[str, str] | None = None
) -> Running:
    """A process of its own from the start, as a user starts it. `settings`: its environment."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **(settings or {})}
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", f"tests.chaos.{program}", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )


@dataclass
class Forked:
    """A process that a zygote forked."""

    zygote: Zygote
    pid: int
    code: int | None = None

    def __post_init__(self) -> None:
        self._handle = os.pidfd_open(self.pid)
        self._ended = select.poll()
        self._ended.register(self._handle, select.POLLIN)

    def poll(self) -> int | None:
        """Asks the zygote only once there is something to be told: it reaps on being asked."""
        if self.code is None and self._ended.poll(0):
            self.code = self.zygote.poll(self.pid)
            if self.code is not None:
                os.close(self._handle)
        return self.code


@contextlib.contextmanager
def forked() -> Iterator[Starter]:
    """Processes whose imports were done once: a tenth of the time."""
    zygotes = {program: Zygote(program) for program in ("worker", "orchestrator", "producer")}
    try:
        yield lambda program, arguments, log: Forked(
            zygotes[program], zygotes[program].start(arguments, log)
        )
    finally:
        for zygote in zygotes.values():
            zygote.close()


@contextlib.contextmanager
def real_trainer(others: Starter) -> Iterator[Starter]:
    """For the jax engine: a worker of its own each time, with compiled programs kept on disk."""
    with tempfile.TemporaryDirectory(prefix="pc-jax-") as cache:
        settings = {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

        def start(program: str, arguments: list[str], log: Path) -> Running:
            if program == "worker":
                return spawned(program, arguments, log, settings)
            return others(program, arguments, log)

        yield start


@dataclass
class Process:
    """One of the two, over all its lives."""

    name: str
    arguments: list[str]
    log: Path
    starter: Starter
    starts: int = 0
    running: Running | None = None
    codes: list[int] = field(default_factory=list)

    def start(self) -> None:
        self.starts += 1
        self.running = self.starter(self.name, self.arguments, self.log)

    def poll(self) -> int | None:
        """The exit status, once; None: it runs, or it was seen already."""
        if self.running is None or (code := self.running.poll()) is None:
            return None
        self.running = None
        self.codes.append(code)
        return code

    def signal(self, sign: signal.Signals) -> None:
        """Only to a process that was not seen to end: its pid is still its own."""
        if self.running is not None and self.running.poll() is None:
            os.kill(self.running.pid, sign)

    def end(self, sign: signal.Signals, timeout_s: float = 20.0) -> int | None:
        """None: there was nothing to end. Raises `TimeoutError`."""
        if self.running is None:
            return None
        self.signal(signal.SIGCONT)
        self.signal(sign)
        deadline_s = time.monotonic() + timeout_s
        while (code := self.running.poll()) is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the {self.name} did not end on {sign.name}")
            time.sleep(0.004)
        self.running = None
        return code


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one run ended."""

    faults: tuple[Fault, ...]
    fired: int
    replay: Replay | None  # Of the run's own journal; None: compare with an undisturbed run.
    parameter_digest: str
    trained: tuple[Trained, ...]
    problems: tuple[str, ...]
    worker_starts: int
    orchestrator_starts: int
    seconds: float
    calls: dict[str, Counter[str]]

    def judged(self, reference: Outcome) -> Outcome:
        """With what differs from an undisturbed run among the problems."""
        reference = self.reference(reference)
        problems = list(self.problems)
        lost, doubled = self.lost(reference), self.doubled()
        if lost:
            problems.append(f"lost {lost}")
        if doubled:
            problems.append(f"trained twice {doubled}")
        if self.trained != reference.trained and not (lost or doubled):
            problems.append("trained in another order, or with other content")
        if self.parameter_digest != reference.parameter_digest:
            problems.append(
                f"parameters {self.parameter_digest[:16]}, undisturbed"
                f" {reference.parameter_digest[:16]}"
            )
        return Outcome(**{**self.__dict__, "problems": tuple(problems)})

    def reference(self, undisturbed: Outcome) -> Outcome | Replay:
        """What this run must have come to."""
        return undisturbed if self.replay is None else self.replay

    def lost(self, reference: Outcome | Replay) -> list[Trained]:
        return sorted((Counter(reference.trained) - Counter(self.trained)).elements())

    def doubled(self) -> list[tuple[int, int]]:
        counts = Counter((step, index) for step, index, _ in self.trained)
        return sorted(key for key, count in counts.items() if count > 1)


def write_short(path: Path) -> None:
    """The first recorded rollouts, cut: prompt and completion together `SHORT_TOKENS` at most."""
    half = SHORT_TOKENS // 2
    table = pq.read_table(ROLLOUTS).slice(0, LIVE_GROUPS * GROUP_SIZE)
    for name in ("prompt_tokens", "completion_tokens", "logprobs"):
        at = table.schema.get_field_index(name)
        cut = [values[:half] for values in table.column(name).to_pylist()]
        column = pa.chunked_array([cut], type=table.schema.field(at).type)
        table = table.set_column(at, table.schema.field(at), column)
    pq.write_table(table, path)


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """Short, for its sockets."""
    with tempfile.TemporaryDirectory(prefix="pc-") as folder:
        yield Path(folder)


class ChaosRun:
    """One run in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        setting: Setting,
        faults: Sequence[Fault] = (),
        starter: Starter = spawned,
    ) -> None:
        self.folder = folder
        self.faults = tuple(faults)
        write_faults(folder, self.faults)
        (folder / "traces").mkdir(exist_ok=True)
        self.worker = Process(
            name="worker",
            starter=starter,
            arguments=[
                str(folder),
                f"--listen=unix://{folder}/w.sock",
                f"--state_dir={folder}/state",
                f"--checkpoint_dir={folder}/checkpoints",
                f"--trace_dir={folder}/traces",
                *setting.worker_flags,
            ],
            log=folder / "worker.log",
        )
        self.orchestrator = Process(
            name="orchestrator",
            starter=starter,
            arguments=[
                str(folder),
                f"--trainer=unix://{folder}/w.sock",
                "--run_id=run",
                f"--trace_dir={folder}/own-trace",
                f"--result_file={folder}/result.json",
                "--progress=false",
                *(flag.format(folder=folder) for flag in setting.orchestrator_flags),
            ],
            log=folder / "orchestrator.log",
        )
        if setting is JAX:
            write_short(folder / "short.parquet")
        self.producer: Process | None = None
        if setting.producers:
            (folder / "journal").mkdir(exist_ok=True)
            pq.write_table(
                pq.read_table(ROLLOUTS).slice(0, LIVE_GROUPS * GROUP_SIZE), folder / "live.parquet"
            )
            self.orchestrator.arguments += [
                f"--listen=unix://{folder}/i.sock",
                f"--journal_dir={folder}/journal",
            ]
            self.producer = Process(
                name="producer",
                starter=starter,
                arguments=[
                    *(str(folder), f"{folder}/live.parquet", f"unix://{folder}/i.sock"),
                    *(str(setting.producers), str(setting.per_second)),
                ],
                log=folder / "producer.log",
            )
        self.setting = setting
        self.problems: list[str] = []
        self._resume_at: tuple[float, int] | None = None

    def run(self) -> Outcome:
        """To the end of the run, whatever happens on the way."""
        started_s = time.monotonic()
        deadline_s = started_s + self.setting.run_seconds
        try:
            self.worker.start()
            self._await_socket(deadline_s)
            self.orchestrator.start()
            if self.producer is not None:
                self.producer.start()
            while not self._step():
                if time.monotonic() > deadline_s:
                    self.problems.append(
                        f"the run did not end within {self.setting.run_seconds:g} s"
                    )
                    break
                time.sleep(0.004)
            self._end()
        finally:
            for process in (self.producer, self.orchestrator, self.worker):
                if process is not None:
                    process.end(signal.SIGKILL)
        return self._outcome(time.monotonic() - started_s)

    def _await_socket(self, deadline_s: float) -> None:
        while not (self.folder / "w.sock").exists() and time.monotonic() < deadline_s:
            if self.worker.running is None or self.worker.running.poll() is not None:
                return
            time.sleep(0.004)

    def _step(self) -> bool:
        """Look after both processes. True: the run is over."""
        self._continue_stopped()
        code = self.orchestrator.poll()
        if code is not None:
            self._keep_trace()
            if code == 0:
                return True
            if self._start_again(self.orchestrator, code):
                return True
        if self.producer is not None:
            code = self.producer.poll()
            if code not in (None, 0) and self._start_again(self.producer, code):
                return True
        code = self.worker.poll()
        return code is not None and self._start_again(self.worker, code)

    def _start_again(self, process: Process, code: int) -> bool:
        """True: it was started often enough."""
        if process.starts >= MAX_STARTS:
            self.problems.append(f"{process.name} ended {process.starts} times, last with {code}")
            return True
        process.start()
        return False

    def _continue_stopped(self) -> None:
        note = self.folder / "stopped"
        if self._resume_at is None and note.exists():
            pid, seconds = note.read_text().split()
            note.unlink()
            self._resume_at = time.monotonic() + float(seconds), int(pid)
        if self._resume_at is not None and time.monotonic() >= self._resume_at[0]:
            for process in (self.worker, self.orchestrator):
                if process.running is not None and process.running.pid == self._resume_at[1]:
                    process.signal(signal.SIGCONT)
            self._resume_at = None

    def _keep_trace(self) -> None:
        """A new process begins its trace anew: put the last one's aside."""
        trace = self.folder / "own-trace" / "orchestrator.ndjson"
        if trace.exists():
            kept = self.folder / "traces" / f"orchestrator-{len(self.orchestrator.codes)}.ndjson"
            trace.rename(kept)

    def _end(self) -> None:
        if self.producer is not None:
            self._end_producer(self.producer)
        fenced = FENCED in self.orchestrator.log.read_text(errors="replace")
        for code in self.orchestrator.codes:
            if code not in (0, -signal.SIGKILL) and not (code == 1 and fenced):
                self.problems.append(f"the orchestrator exited with {code}")
        for code in self.worker.codes:
            if code != -signal.SIGKILL:
                self.problems.append(f"the worker exited with {code}")
        try:
            code = self.worker.end(signal.SIGTERM)
        except TimeoutError as error:
            self.problems.append(str(error))
            return
        # One that was killed a moment before the end is told to end while it still loads; one that
        # is killed a little later may be so while it ends.
        disturbed = self.faults and code in (-signal.SIGTERM, -signal.SIGKILL)
        if code not in (0, None) and not disturbed:
            self.problems.append(f"the worker exited with {code} on SIGTERM")

    def _end_producer(self, producer: Process) -> None:
        """The run told it of its end, or it is between two connections and will not hear it."""
        deadline_s = time.monotonic() + PRODUCER_SECONDS
        while producer.running is not None and time.monotonic() < deadline_s:
            producer.poll()
            time.sleep(0.004)
        producer.end(signal.SIGKILL)
        for code in producer.codes:
            if code not in (0, -signal.SIGKILL):
                self.problems.append(f"the producer exited with {code}")

    def _outcome(self, seconds: float) -> Outcome:
        result = self.folder / "result.json"
        digest = ""
        if result.exists():
            digest = str(json.loads(result.read_text())["parameter_digest"])
        else:
            self.problems.append("no result was written")
        traces = []
        for path in sorted((self.folder / "traces").glob("*.ndjson")):
            _cut_torn_line(path)
            if path.stat().st_size:
                traces.append((path, read_trace(path)))
        _, findings = check_traces(traces)
        self.problems.extend(f"{item.path.name}:{item.line}: {item.violation}" for item in findings)
        workers = [trace for _, trace in traces if trace.side == "worker"]
        replay = None
        if self.setting.producers:
            self.problems.extend(missing_from_journal(self.folder))
            if self.setting.replayed:
                replay = replayed(self.folder)
        return Outcome(
            replay=replay,
            faults=self.faults,
            fired=sum(fired(self.folder, number) for number in range(len(self.faults))),
            parameter_digest=digest,
            trained=trained_by(workers),
            problems=tuple(self.problems),
            worker_starts=self.worker.starts,
            orchestrator_starts=self.orchestrator.starts,
            seconds=seconds,
            calls={side: calls_of(self.folder, side) for side in ("worker", "orchestrator")},
        )


def _cut_torn_line(path: Path) -> None:
    """A process that was killed in a write leaves half a line."""
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])


def trained_by(workers: Sequence[Trace]) -> tuple[Trained, ...]:
    """What the final parameters hold, in order, as the workers' traces tell it.

    A restore goes back to what the restored checkpoint held; a new process starts with nothing.
    """
    ordered = sorted(workers, key=lambda trace: trace.clock_origin_s + _first_s(trace))
    kept: dict[int, tuple[Trained, ...]] = {0: ()}  # Policy version to what made it.
    closed: tuple[Trained, ...] = ()
    for trace in ordered:
        closed, open_step = (), []
        for record in trace.calls:
            if record.outcome != "ok" or not record.seq:
                continue
            if record.call.startswith("fwd_bwd"):
                open_step.append((record.step, record.index, record.digest))
            if _updates(record):
                closed, open_step = (*closed, *open_step), []
                kept[record.train_step_after] = closed
            elif record.call == "restore_checkpoint":
                closed, open_step = kept[record.train_step_after], []
            elif record.call == "abort_step":
                open_step = []
    return closed


def _updates(record: TraceRecord) -> bool:
    return record.call in ("fwd_bwd apply_optimizer", "apply_deferred_update", "update")


def _first_s(trace: Trace) -> float:
    return min((record.started_s for record in trace.records), default=0.0)


def keep(folder: Path, target: Path) -> None:
    """Copy a run's files for a person to read."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.sock*"), dirs_exist_ok=True)


def run_once(
    setting: Setting,
    faults: Sequence[Fault] = (),
    *,
    kept: Path | None = None,
    reference: Outcome | None = None,
    starter: Starter = spawned,
) -> Outcome:
    """One run in a throw-away folder, judged against an undisturbed one if there is one.

    `kept`: where its files go if it had problems.
    """
    with run_folder() as folder:
        outcome = ChaosRun(folder, setting, faults, starter).run()
        if reference is not None:
            outcome = outcome.judged(reference)
        if outcome.problems and kept is not None:
            keep(folder, kept)
        return outcome
