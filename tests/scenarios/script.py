"""Reads scenario files. Pure.

A file is: comment lines (`#`), one `plan` line, commands, a line of dashes, the expected log.

    plan staged steps=2 micro_batches=2 checkpoint_every=1
    drop-reply at fwd_bwd step=1 index=0

Commands. `CALL` is a call as the log writes it (`stage_fwd_bwd step=1 index=0`); each command acts
once, at the first such call after the command before it has acted (data commands: at any time).

    late rollouts STEP             nothing of STEP is packed before the orchestrator waits for it
    source ends before STEP        there are no rollouts for STEP or any later one
    packed STEP.INDEX at CALL      a late micro-batch becomes ready while CALL is under way
    drop-request at CALL           CALL never arrives
    drop-reply at CALL             CALL arrives, its answer does not
    delay CALL until CALL2         CALL is lost to its caller and arrives just before CALL2
    duplicate CALL until CALL2     CALL is answered, and arrives again just before CALL2
    crash worker at CALL           another worker process takes CALL
    crash worker after CALL        the worker carries CALL out, and is gone before it answers
    restart orchestrator at CALL   a new orchestrator, before CALL is sent
    restart orchestrator after CALL  CALL is carried out; its caller is gone
    engine raises at CALL          the engine fails in CALL
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator.plan import RunPlan
from tests.walk.cases import ARMS


class ScenarioError(ValueError):
    """A scenario file that cannot be read; names file and line."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One thing that happens. `until` only for late arrivals; `step`, `index` only for data."""

    kind: str
    call: str = ""
    until: str = ""
    step: int = -1
    index: int = -1


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One file."""

    path: Path
    plan: RunPlan
    micro_batches: int
    commands: tuple[Command, ...]
    head: str  # Everything above and with the dashes.
    expected: tuple[str, ...]

    @property
    def steps_trained(self) -> int:
        """Steps that a finished run has closed."""
        ends = [item.step for item in self.commands if item.kind == "source ends"]
        return min([self.plan.num_steps, *ends])


_AT = ("drop-request", "drop-reply", "crash worker", "restart orchestrator", "engine raises")
_UNTIL = ("delay", "duplicate")


def _command(line: str) -> Command | None:
    for kind in _AT:
        for when in ("at", "after"):
            start = f"{kind} {when} "
            if line.startswith(start):
                after = when == "after"
                if after and kind not in ("crash worker", "restart orchestrator"):
                    return None
                return Command(kind=f"{kind} after" if after else kind, call=line[len(start) :])
    for kind in _UNTIL:
        if line.startswith(f"{kind} ") and " until " in line:
            call, until = line[len(kind) + 1 :].split(" until ")
            return Command(kind=kind, call=call, until=until)
    if line.startswith("late rollouts "):
        return Command(kind="late rollouts", step=int(line.split()[2]))
    if line.startswith("source ends before "):
        return Command(kind="source ends", step=int(line.split()[3]))
    if line.startswith("packed ") and " at " in line:
        batch, call = line[len("packed ") :].split(" at ")
        step, index = batch.split(".")
        return Command(kind="packed", call=call, step=int(step), index=int(index))
    return None


def _plan(words: list[str]) -> tuple[RunPlan, int]:
    numbers = {key: int(value) for key, value in (word.split("=") for word in words[1:])}
    micro_batches = numbers.pop("micro_batches")
    steps = numbers.pop("steps")
    plan = RunPlan(num_steps=steps, **ARMS[words[0]], **numbers)  # type: ignore[arg-type]
    return plan, micro_batches


def read_scenario(path: Path) -> Scenario:
    """Raises `ScenarioError`."""
    text = path.read_text()
    head, separator, expected = text.partition("----\n")
    if not separator:
        raise ScenarioError(f"{path}: no line of four dashes between commands and log")
    plan: RunPlan | None = None
    micro_batches = 0
    commands: list[Command] = []
    for number, line in enumerate(head.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("plan "):
            plan, micro_batches = _plan(line.split()[1:])
            continue
        command = _command(line)
        if command is None:
            raise ScenarioError(f"{path}:{number}: unknown command {line!r}")
        commands.append(command)
    if plan is None:
        raise ScenarioError(f"{path}: no plan line")
    return Scenario(
        path=path,
        plan=plan,
        micro_batches=micro_batches,
        commands=tuple(commands),
        head=head + separator,
        expected=tuple(expected.splitlines()),
    )
