"""Failures inside a run, over the real runner and a served worker.

1. The engine raises (in fwd_bwd, in a stage, in an update, or later on the device): the run ends and
   names the micro-batch; nothing of the failed step is applied, saved or shown as a metric.
2. The next start aborts or restores, trains the step again, and ends with the undisturbed parameters.
3. A stage that fails on its way falls back to an unstaged send, latched, counted and said once.
4. A retry inside the update gives what the unstaged order gives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.bench.synthetic import SyntheticShape, SyntheticSource
from orchestrator.boundary import BoundaryState, advance, initial
from orchestrator.calls import (
    Await,
    Done,
    Fail,
    Local,
    LocalDone,
    LocalKind,
    Lost,
    Note,
    NoteKind,
    PutRefused,
    Ready,
    Send,
    Start,
    WorkerView,
)
from orchestrator.feeder import StepFeed, always
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.plan import Ineligible, RunPlan
from orchestrator.ports import Answer, StepFacts
from orchestrator.runner import RunFailed
from orchestrator.trainer_client import TrainerClient
from prestage.protocol import Call, Phase, StepState
from prestage.trace import TraceRecord
from prestage.trainer.v1 import trainer_pb2 as pb
from tests.integration.test_faults import site
from tests.support.rig import RunResult, address_of, run_against, served
from trainer_worker.clock import RealClock, VirtualClock
from trainer_worker.engine import DeviceFailure, EngineError, EngineParts, PreparedInput
from trainer_worker.engines.timed import TimedConfig, TimedEngine, create_timed
from trainer_worker.server import WorkerServer

STEPS, MICRO_BATCHES = 4, 3
LAST = MICRO_BATCHES - 1
SHAPE = SyntheticShape(micro_batches=MICRO_BATCHES)
FAST = TimedConfig(fwd_bwd_seconds=0.004, update_seconds=0.001, copy_seconds=0.001)
SLOW = TimedConfig(fwd_bwd_seconds=0.03, update_seconds=0.001, copy_seconds=0.001)  # To be in time.
ARMS: dict[str, dict[str, bool]] = {
    "stock": {},
    "pipelined": {"pipeline": True},
    "staged": {"pipeline": True, "stage": True},
    "staged_after": {"pipeline": True, "stage": True, "stage_before_update": False},
    "zero_gap": {"pipeline": True, "stage": True, "dispatch_before_metrics": True},
}
STAGED = [arm for arm, flags in ARMS.items() if "stage" in flags]


def plan(arm: str, **more: int) -> RunPlan:
    return RunPlan(num_steps=STEPS, latch_after=1000, **{**ARMS[arm], **more})  # type: ignore[arg-type]


def run(server: WorkerServer, arm: str, **more: int) -> RunResult:
    return run_against(address_of(server), plan(arm, **more), shape=SHAPE)


def undisturbed(steps: int = STEPS) -> str:
    """The parameters after so many steps, trained in the stock order."""
    with served(create_timed(FAST, RealClock())) as server:
        return run_against(address_of(server), RunPlan(num_steps=steps), shape=SHAPE).digest


class FailsOnce(TimedEngine):
    """Fails where it is told, the first time only: `"fwd_bwd 1 0"`, `"late 1 0"`, `"update 1"`."""

    def __init__(self, what: str, folder: Path | None = None) -> None:
        super().__init__(FAST, RealClock(), folder)
        self._left = what

    def _raise_if_planned(self, what: str) -> None:
        if what == self._left:
            self._left = ""
            raise EngineError(f"planned failure of {what}")

    def fwd_bwd(self, prepared: PreparedInput):  # type: ignore[no-untyped-def]
        work = super().fwd_bwd(prepared)
        if self._left == f"late {prepared.batch_id.step} {prepared.batch_id.index}":
            self._left = ""
            work.failure = DeviceFailure(prepared.batch_id, "planned failure on the device")
        return work

    def parts(self) -> EngineParts:
        folder = self._folder
        return EngineParts(training=self, checkpoint=None if folder is None else self)


def saved(folder: Path) -> dict[int, str]:
    """Each durable checkpoint's step and parameters."""
    found = {}
    for path in folder.glob("step-*.json"):
        step = int(path.stem.removeprefix("step-"))
        engine = TimedEngine(FAST, VirtualClock(), folder)
        assert engine.restore(step) is not None
        found[step] = engine.parameter_digest()
    return found


# -- the engine raises ----------------------------------------------------------------------------

FAILURES = {
    "fwd_bwd 1 1": r"fwd_bwd step=1 index=1\b",
    f"fwd_bwd 1 {LAST}": rf"fwd_bwd apply_optimizer( defer_update)? step=1 index={LAST}\b",
    "stage 2 0": r"(fwd_bwd|stage_fwd_bwd) step=2 index=0\b",
    "update 1": r"step=1\b.*planned failure of update 1",
    "late 1 0": r"micro-batch \(1, 0\)",
    f"late 1 {LAST}": rf"micro-batch \(1, {LAST}\)",
}


@pytest.mark.parametrize("what", FAILURES)
@pytest.mark.parametrize("arm", ARMS)
def test_a_failure_ends_the_run_and_the_next_start_makes_good(
    arm: str, what: str, tmp_path: Path
) -> None:
    engine = FailsOnce(what, tmp_path)
    with served(engine.parts()) as server:
        with pytest.raises(RunFailed, match=FAILURES[what]):
            run(server, arm, checkpoint_every=1)
        assert server.service.state().phase == pb.PHASE_FAILED
        before = saved(tmp_path)
        for steps, digest in before.items():
            assert digest == undisturbed(steps), f"checkpoint {steps} holds other work"
        failed_step = 2 if what == "stage 2 0" else 1
        assert max(before, default=0) <= failed_step, "a step that failed was saved"
        done = run(server, arm, checkpoint_every=1)
        assert done.digest == undisturbed()
        assert server.service.state().train_step == STEPS


@pytest.mark.parametrize("what", FAILURES)
def test_without_a_checkpoint_an_aborted_step_is_trained_again(what: str) -> None:
    """AbortStep is enough unless the update had begun: then the parameters are suspect."""
    engine = FailsOnce(what)
    with served(engine.parts()) as server:
        with pytest.raises(RunFailed, match=FAILURES[what]):
            run(server, "staged")
        if server.service.state().parameters_suspect:
            with pytest.raises(RunFailed, match="no checkpoint"):
                run(server, "staged")
        else:
            assert run(server, "staged").digest == undisturbed()


# -- bytes that the worker refuses while the run waits for them -----------------------------------


def test_a_worker_that_restarts_while_the_run_waits_for_data_is_noticed() -> None:
    """No call is due then: the refused put is all that tells."""
    with site() as here:

        class RestartsWorker(SyntheticSource):
            left = 1

            def open_step(
                self, step: int, *, wanted: Callable[[], bool] = always
            ) -> StepFeed | None:
                if step == 2 and self.left:
                    self.left = 0
                    here.restart()
                return super().open_step(step, wanted=wanted)

        done = run_against(
            address_of(here.server),
            plan("stock", checkpoint_every=1),
            shape=SHAPE,
            source=RestartsWorker(SHAPE, "run"),
        )
    assert done.digest == undisturbed()
    calls = [record.call for record in done.recorder.records]
    assert "get_state" in calls
    assert calls.count("open_run") == 2


def waiting() -> BoundaryState:
    """The core, waiting for step 0's second micro-batch."""
    state, action = advance(initial(plan("stock")), Start())
    view = WorkerView(
        state=StepState(), incarnation="i", epoch=1, last_seq=0, compiled=True, idle_wait_seconds=0
    )
    while not isinstance(action, Await):
        if isinstance(action, Local):
            state, action = advance(state, LocalDone())
            if isinstance(action, Await):
                ready = Ready(step=0, index=0, digest="d0", last=False)
                state, action = advance(state, ready)
        else:
            state, action = advance(state, Done(view=view))
    assert (action.step, action.index) == (0, 1)
    return state


def test_a_put_that_was_refused_for_the_workers_state_makes_the_core_ask() -> None:
    state, action = advance(waiting(), PutRefused(why="planned"))
    assert action == Send(call=Call.GET_STATE)
    trained = state.mirror
    view = WorkerView(state=trained, incarnation="i", epoch=1, last_seq=1, compiled=True)
    # The worker is well: what is missing is packed and put again, once, and said.
    after, action = advance(state, Done(view=view))
    assert action == Local(kind=LocalKind.PACK, step=0)
    assert [note.kind for note in after.notes] == [NoteKind.RESENT]
    after, action = advance(after, LocalDone())
    assert isinstance(action, Await)
    # Its step failed: the run ends with the worker's own words.
    failed = replace(trained, phase=Phase.FAILED, failure="micro-batch (0, 0) failed on the device")
    after, action = advance(state, Done(view=replace(view, state=failed)))
    assert isinstance(action, Fail)
    assert "micro-batch (0, 0) failed on the device" in action.why
    # It is another process, or another caller's.
    after, action = advance(state, Done(view=replace(view, incarnation="other")))
    assert action == Send(call=Call.OPEN_RUN)
    after, action = advance(state, Done(view=replace(view, epoch=2)))
    assert isinstance(action, Fail)


def test_a_refused_put_heard_during_a_call_is_asked_about_once_nothing_else_is_due() -> None:
    state, _ = advance(waiting(), Ready(step=0, index=1, digest="d1", last=False))
    assert isinstance(state.outstanding, Send)
    state, action = advance(state, PutRefused(why="planned"))
    assert isinstance(action, Await)
    state, action = advance(state, Done())
    assert action == Send(call=Call.GET_STATE)


# -- a stage that fails on its way ----------------------------------------------------------------


class LosesAStage:
    """A `TrainerPort` that loses the first stage: its request, or its answer."""

    def __init__(self, inner: TrainerClient, *, arrives: bool) -> None:
        self._inner = inner
        self._arrives = arrives
        self._lost = False

    def call(self, send: Send, *, data_cursor: str) -> Answer:
        if send.call is not Call.STAGE_FWD_BWD or self._lost:
            return self._inner.call(send, data_cursor=data_cursor)
        self._lost = True
        if self._arrives:
            self._inner.call(send, data_cursor=data_cursor)
        return Answer(event=Lost(why="planned"))

    def read_metrics(self, from_step: int, count: int) -> tuple[StepFacts, ...]:
        return self._inner.read_metrics(from_step, count)

    def in_flight(self) -> int:
        return self._inner.in_flight()


class Notes:
    """Keeps notes and whether staging is latched."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.latched = False

    def on_call(self, record: TraceRecord, answer: Answer) -> None:
        del record, answer

    def on_note(self, note: Note) -> None:
        self.notes.append(note)

    def on_state(self, state: BoundaryState) -> None:
        self.latched = state.latched


@pytest.mark.parametrize("arrives", [False, True])
@pytest.mark.parametrize("arm", STAGED)
def test_a_stage_lost_on_its_way_falls_back_latched_and_said_once(
    arm: str, arrives: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    heard, metrics = Notes(), OrchestratorMetrics()
    with served(create_timed(SLOW, RealClock())) as server:
        done = run_against(
            address_of(server),
            plan(arm),
            shape=SHAPE,
            wrap_trainer=lambda client: LosesAStage(client, arrives=arrives),
            observers=(heard, metrics),
        )
    assert done.digest == undisturbed()
    stages = [record for record in done.recorder.records if record.call == "stage_fwd_bwd"]
    lost = [record.step for record in stages if record.outcome == "lost"]
    assert len(lost) == 1
    assert {record.step for record in stages} == set(lost), "no other stage follows"
    used = [record.step for record in done.book.records() if record.staged_input_used]
    assert used == (lost if arrives else []), "only a stage that arrived is used"
    assert heard.latched
    kinds = [note.kind for note in heard.notes]
    assert kinds.count(NoteKind.STAGE_LOST) == 1
    said = [record for record in caplog.records if "failed on its way" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.WARNING]
    value: Callable[..., float | None] = metrics.registry.get_sample_value
    assert value("prestage_fallbacks_total", {"kind": "stage_lost"}) == 1
    assert value("prestage_staging_latched") == 1


# -- what a step shows is its own -----------------------------------------------------------------


def test_metrics_of_a_step_hold_nothing_of_the_next_one() -> None:
    """Also in the zero-gap order, where step k + 1's first micro-batch was dispatched before."""
    shown = {}
    for arm in ARMS:
        with served(create_timed(FAST, RealClock())) as server:
            shown[arm] = [
                (record.step, record.train_step, dict(record.metrics))
                for record in run(server, arm).book.records()
            ]
    assert shown["stock"][0][2]["micro_batches"] == MICRO_BATCHES
    assert all(values == shown["stock"] for values in shown.values()), shown


def test_a_checkpoint_of_a_step_holds_nothing_of_the_next_one(tmp_path: Path) -> None:
    wanted = {steps: undisturbed(steps) for steps in range(1, STEPS + 1)}
    for arm in ARMS:
        folder = tmp_path / arm
        with served(create_timed(FAST, RealClock(), folder)) as server:
            run(server, arm, checkpoint_every=1)
        assert saved(folder) == wanted, arm


# -- retry inside the update ----------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, LAST])
def test_a_retry_inside_the_update_gives_the_unstaged_parameters_and_is_counted(
    index: int,
) -> None:
    replays = frozenset({(1, index), (2, index)})
    config = TimedConfig(
        fwd_bwd_seconds=0.03,
        update_seconds=0.001,
        copy_seconds=0.001,
        replays=replays,
        replay_seconds=0.004,
    )
    for arm in ARMS:
        with served(create_timed(config, RealClock())) as server:
            done = run(server, arm)
        assert done.digest == undisturbed(), arm
        counted = [record.dropless_replays for record in done.book.records()]
        assert counted == [0, 1, 1, 0], arm
        if arm in STAGED:
            assert any(record.staged_input_used for record in done.book.records()), arm


# -- the page ---------------------------------------------------------------------------------------


def test_every_note_and_every_reason_not_to_stage_is_explained() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "step-boundary.md").read_text()
    missing = [kind.value for kind in NoteKind if f"`{kind.value}`" not in page]
    said_elsewhere = (Ineligible.SWITCH_OFF, Ineligible.LATCHED)  # No line a boundary.
    missing += [
        why.value for why in Ineligible if why not in said_elsewhere and why.value not in page
    ]
    assert not missing, f"docs/step-boundary.md does not explain {missing}"
