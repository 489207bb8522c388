"""Faults at calls of two real processes: a part of what `make chaos` tries, chosen by a seed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.chaos.__main__ import undisturbed
from tests.chaos.faults import ACK, SUBMIT, Action, Fault
from tests.chaos.harness import (
    JAX,
    SETTINGS,
    ChaosRun,
    Outcome,
    Process,
    Starter,
    forked,
    real_trainer,
    run_folder,
    run_once,
    spawned,
)
from tests.chaos.points import covering, every_fault, pairs

SEED = 7
Reference = Callable[[str], tuple[Outcome, list[Fault]]]


@pytest.fixture(name="starter", scope="module")
def _starter() -> Iterator[Starter]:
    with forked() as starter:
        yield starter


@pytest.fixture(name="reference", scope="module")
def _reference(starter: Starter) -> Reference:
    """An undisturbed run of a setting, and every fault that its calls allow."""

    @cache
    def made(name: str) -> tuple[Outcome, list[Fault]]:
        outcome, calls = undisturbed(SETTINGS[name], starter)
        return outcome, every_fault(calls)

    return made


def play(name: str, plans: list[tuple[Fault, ...]], reference: Outcome, starter: Starter) -> None:
    """Two runs at a time. Every one must end as the undisturbed one."""

    def one(plan: tuple[Fault, ...]) -> Outcome:
        return run_once(SETTINGS[name], plan, reference=reference, starter=starter)

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(one, plans))
    failed = [
        f"{', then '.join(map(str, outcome.faults))}: {'; '.join(outcome.problems)}"
        for outcome in outcomes
        if outcome.problems
    ]
    assert not failed, "\n".join(failed)
    reached = sum(outcome.fired > 0 for outcome in outcomes)
    assert reached >= 0.8 * len(outcomes), f"only {reached} of {len(outcomes)} faults happened"


FIRST = [
    ("staged", Action.KILL_AFTER, "FwdBwd", 4),
    ("staged", Action.CALLER_KILL_DURING, "ApplyDeferredUpdate", 1),
    ("live", Action.KILL_BOTH_AFTER, "SaveCheckpoint", 1),
]


@pytest.mark.parametrize(("name", "action", "method", "occurrence"), FIRST)
def test_r1_r4_a_death_in_mid_run_changes_nothing(
    name: str, action: Action, method: str, occurrence: int, reference: Reference
) -> None:
    """Both programs as a user starts them."""
    fault = Fault(action=action, method=method, occurrence=occurrence)
    outcome = run_once(SETTINGS[name], [fault], reference=reference(name)[0], starter=spawned)
    assert outcome.fired == 1
    assert not outcome.problems
    assert outcome.worker_starts + outcome.orchestrator_starts > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [("staged", 40), ("stream", 25), ("live", 30), ("live, three producers", 12)]
)
def test_d2_r2_r7_r8_a_fault_anywhere_changes_nothing(
    name: str, count: int, reference: Reference, starter: Starter
) -> None:
    undisturbed_run, faults = reference(name)
    plans = [(fault,) for fault in covering(faults, SEED, count)]
    play(name, plans, undisturbed_run, starter)


@pytest.mark.slow
def test_r20_a_fault_during_recovery_changes_nothing(
    reference: Reference, starter: Starter
) -> None:
    undisturbed_run, faults = reference("staged")
    plans: list[tuple[Fault, ...]] = list(pairs(faults, SEED, 16))
    play("staged", plans, undisturbed_run, starter)


LAST_READS = [
    Fault(action=action, method=method, occurrence=occurrence)
    for action in (Action.DROP_REPLY, Action.KILL_BEFORE, Action.KILL_AFTER)
    for method, occurrence in (("GetCapabilities", 1), ("GetMetrics", 7), ("GetState", 4))
]


@pytest.mark.slow
def test_a_worker_that_is_away_before_the_first_or_after_the_last_step_ends_no_run(
    reference: Reference, starter: Starter
) -> None:
    play("staged", [(fault,) for fault in LAST_READS], reference("staged")[0], starter)


@pytest.mark.slow
def test_r39_a_real_model_ends_with_the_undisturbed_parameters(starter: Starter) -> None:
    with real_trainer(starter) as jax_starter:
        reference, _ = undisturbed(JAX, jax_starter, runs=1)
        for action, method, occurrence in (
            (Action.KILL_LATER, "SaveCheckpoint", 1),
            (Action.KILL_BOTH_AFTER, "StageFwdBwd", 1),
            (Action.CALLER_KILL_DURING, "FwdBwd", 7),
        ):
            fault = Fault(action=action, method=method, occurrence=occurrence, seconds=0.002)
            outcome = run_once(JAX, [fault], reference=reference, starter=jax_starter)
            assert outcome.fired == 1
            assert not outcome.problems


def second_orchestrator(run: ChaosRun) -> Process:
    """Another one with the same flags, for the same run."""
    folder = run.folder / "second"
    folder.mkdir()
    (folder / "faults.json").write_text("[]")
    arguments = [
        argument.replace(f"{run.folder}/own-trace", f"{folder}/own-trace").replace(
            f"{run.folder}/result.json", f"{folder}/result.json"
        )
        for argument in run.orchestrator.arguments[1:]
    ]
    return Process(
        name="orchestrator",
        arguments=[str(folder), *arguments],
        log=folder / "log",
        starter=run.orchestrator.starter,
    )


def await_call(folder: Path, method: str, count: int) -> None:
    deadline_s = time.monotonic() + 60
    log = folder / "calls-worker.txt"
    while not log.exists() or log.read_text().count(f"\t{method}\n") < count:
        assert time.monotonic() < deadline_s, f"{method} was not called {count} times"
        time.sleep(0.002)


class Twice(ChaosRun):
    """A second orchestrator is started in the middle of the run."""

    second: Process | None = None

    def _step(self) -> bool:
        if self.second is None:
            await_call(self.folder, "FwdBwd", 2)
            self.second = second_orchestrator(self)
            self.second.start()
        return super()._step()


def test_e8_two_orchestrators_on_one_journal_the_second_is_refused(
    reference: Reference, starter: Starter
) -> None:
    wanted, _ = reference("live")
    with run_folder() as folder:
        run = Twice(folder, SETTINGS["live"], starter=starter)
        outcome = run.run().judged(wanted)
        assert run.second is not None
        code = run.second.end(signal.SIGCONT)
        log = run.second.log.read_text()
    assert code == 2
    assert "already listens" in log or "is in use by process" in log, log
    assert not outcome.problems
    assert outcome.orchestrator_starts == 1


def test_r20_two_orchestrators_on_one_worker_the_second_fences_the_first(
    reference: Reference, starter: Starter
) -> None:
    """The first is fenced off wherever it is; only one of them drives the worker at a time."""
    wanted, _ = reference("staged")
    slow = replace(
        SETTINGS["staged"],
        worker_flags=(*SETTINGS["staged"].worker_flags, "--timed_fwd_bwd_s=0.25"),
    )
    with run_folder() as folder:
        run = Twice(folder, slow, starter=starter)
        outcome = run.run().judged(wanted)
        first = run.orchestrator.log.read_text()
        assert run.second is not None
        second = run.second.log.read_text()
        run.second.end(signal.SIGKILL)
    assert not outcome.problems
    assert "fenced off" in first or "fenced off" in second


@pytest.mark.slow
@pytest.mark.parametrize("method", [SUBMIT, ACK])
def test_d4_a_producer_and_its_orchestrator_die_in_turn(
    method: str, reference: Reference, starter: Starter
) -> None:
    faults = (
        Fault(action=Action.PRODUCER_KILL, method=method, occurrence=20),
        Fault(action=Action.CALLER_KILL_AFTER, method=method, occurrence=10),
        Fault(action=Action.PRODUCER_KILL, method=method, occurrence=10),
    )
    outcome = run_once(SETTINGS["live"], faults, reference=reference("live")[0], starter=starter)
    assert not outcome.problems
    assert outcome.fired == 3
