"""Plays a scenario: the pure core on one side, a backend on the other, and what happens between.

The backend is the worker's side: a value (`PureBackend`), or a process behind gRPC. The log has
every call with its seq and outcome, every happening (`!`) and every note.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.boundary import BoundaryState, advance, initial
from orchestrator.calls import (
    Action,
    Await,
    Done,
    Event,
    Fail,
    Finish,
    Local,
    LocalDone,
    LocalKind,
    Lost,
    Raised,
    Ready,
    Refused,
    Send,
    SourceEnded,
    Start,
)
from orchestrator.invariants import FROM_SCRATCH, Expectation, Ledger, new_process, observe
from prestage.protocol import Call
from tests.scenarios.script import Command, Scenario
from tests.walk import source
from tests.walk.worker import How, Message, Worker, crashed, deliver, fresh

Reply = Done | Raised | Refused
MOST_CALLS = 500
STANDING = ("late rollouts", "source ends")
DATA_COMMANDS = (*STANDING, "packed")


@dataclass(frozen=True, kw_only=True)
class Key:
    """Who calls: what a request carries beside its seq."""

    incarnation: str
    epoch: int


class Backend(Protocol):
    """The worker's side of a scenario."""

    def put(self, step: int, index: int, key: Key) -> str:
        """Bring a micro-batch's bytes to the worker. Returns its digest."""
        ...

    def call(self, send: Send, key: Key, *, raises: bool = False) -> Reply:
        """One call arrives and is carried out."""
        ...

    def crash(self) -> None:
        """The worker process is killed; another one takes its place."""
        ...

    def new_caller(self) -> None:
        """Another orchestrator process calls from now on."""
        ...

    def parameters_are_right(self, num_steps: int, micro_batches: int) -> bool:
        """Whether they are those of an undisturbed run."""
        ...

    def broken(self) -> list[str]:
        """Rules broken so far, as far as this side can tell."""
        ...


@dataclass
class PureBackend:
    """The real sessions and step table around a made-up engine, as values."""

    scenario: Scenario
    worker: Worker = field(default_factory=lambda: fresh(1))
    ledger: Ledger = FROM_SCRATCH
    found: list[str] = field(default_factory=list)

    def put(self, step: int, index: int, key: Key) -> str:
        return source.digest(step, index, key.epoch)

    def call(self, send: Send, key: Key, *, raises: bool = False) -> Reply:
        detail = "cursor" if send.call is Call.SAVE_CHECKPOINT else ""
        message = Message(
            call=send.call,
            step=send.step,
            index=send.index,
            digest=send.digest,
            detail=detail,
            seq=send.seq,
            epoch=key.epoch,
            incarnation=key.incarnation,
        )
        delivery = deliver(self.worker, message, How.RAISES if raises else How.WELL)
        self.worker = delivery.worker
        expect = Expectation(
            plan=self.scenario.plan,
            micro_batches=self.scenario.micro_batches,
            may_skip_updates=False,
        )
        for record in delivery.records:
            self.ledger, violations = observe(self.ledger, record, expect)
            self.found.extend(str(item) for item in violations)
        assert delivery.reply is not None
        return delivery.reply

    def crash(self) -> None:
        self.worker = crashed(self.worker, save_was_durable=True)
        self.ledger = new_process(self.ledger, self.worker.session.incarnation)

    def new_caller(self) -> None:
        return

    def parameters_are_right(self, num_steps: int, micro_batches: int) -> bool:
        return self.worker.engine.chain == source.expected_chain(num_steps, micro_batches)

    def broken(self) -> list[str]:
        return self.found


@dataclass
class Play:
    """One scenario on one backend."""

    scenario: Scenario
    backend: Backend
    lines: list[str] = field(default_factory=list)
    state: BoundaryState = field(init=False)

    def __post_init__(self) -> None:
        self._commands = list(self.scenario.commands)
        self._late_steps = {c.step for c in self._commands if c.kind == "late rollouts"}
        self._ends = {c.step for c in self._commands if c.kind == "source ends"}
        self._withheld: list[tuple[int, int]] = []
        self._under_way: list[tuple[str, Send, Key]] = []  # (until, call, key)

    def run(self) -> tuple[str, ...]:
        """The log."""
        action = self._begin()
        for _ in range(MOST_CALLS):
            match action:
                case Finish():
                    right = self.backend.parameters_are_right(
                        self.scenario.steps_trained, self.scenario.micro_batches
                    )
                    self.lines.append(f"finished, parameters {'right' if right else 'WRONG'}")
                    return self._log()
                case Fail(why=why):
                    restart = self._take("restart orchestrator", "failed")
                    if restart is None:
                        self.lines.append(f"failed: {why.split(':')[0]}")
                        return self._log()
                    action = self._restart()
                case Local():
                    action = self._local(action)
                case Await():
                    action = self._wait()
                case Send():
                    action = self._send(action)
        raise AssertionError(f"not finished after {MOST_CALLS} actions: {self.lines[-5:]}")

    def _log(self) -> tuple[str, ...]:
        unused = [command for command in self._commands if command.kind not in STANDING]
        self.lines.extend(f"UNUSED {command.kind} {command.call}" for command in unused)
        self.lines.extend(f"BROKEN {rule}" for rule in self.backend.broken())
        return tuple(self.lines)

    # -- the orchestrator's side ------------------------------------------------------------------------

    def _begin(self) -> Action:
        self.state = initial(self.scenario.plan)
        return self._advance(Start())

    def _advance(self, event: Event) -> Action:
        self.state, action = advance(self.state, event)
        self.lines.extend(f"  note {n.kind.value} step={n.step}" for n in self.state.notes)
        return action

    def _restart(self) -> Action:
        self.lines.append("! the orchestrator restarts")
        self._withheld.clear()
        self.backend.new_caller()
        return self._begin()

    def _local(self, local: Local) -> Action:
        action = self._advance(LocalDone())
        if local.kind is not LocalKind.PACK:
            return action
        batches = [(local.step, index) for index in range(self.scenario.micro_batches)]
        self._withheld = [item for item in self._withheld if item[0] < local.step]
        if local.step in self._ends:
            self.lines.append(f"! the source ends before step {local.step}")
            got = self._advance(SourceEnded(step=local.step))
            return action if isinstance(got, Await) else got
        if local.step in self._late_steps:
            self._late_steps.discard(local.step)
            self._withheld.extend(batches)
            return action
        for step, index in batches:
            action = self._packed(step, index, action)
        return action

    def _packed(self, step: int, index: int, action: Action) -> Action:
        """A micro-batch is ready beside what the core does; the core acts on it if it waits."""
        digest = self.backend.put(step, index, self._key())
        last = index == self.scenario.micro_batches - 1
        got = self._advance(Ready(step=step, index=index, digest=digest, last=last))
        return action if isinstance(got, Await) else got

    def _wait(self) -> Action:
        assert self._withheld, f"waits for ever: {self.lines[-3:]}"
        step, index = self._withheld.pop(0)
        self.lines.append(f"! packed {step}.{index}")
        return self._packed(step, index, Await(step=step, index=index))

    def _key(self) -> Key:
        return Key(incarnation=self.state.incarnation, epoch=self.state.epoch)

    # -- the channel --------------------------------------------------------------------------------------

    def _send(self, send: Send) -> Action:
        line = send.line.removesuffix(" resend")
        for item in [item for item in self._under_way if item[0] == line]:
            self._under_way.remove(item)
            self._arrives_late(item[1], item[2])
        if self._take("restart orchestrator", line) is not None:
            return self._restart()
        if self._take("crash worker", line) is not None:
            self._crash()
        self._pack_beside(line)
        if self._take("drop-request", line) is not None:
            return self._told(send, Lost(), "lost")
        delayed = self._take("delay", line)
        if delayed is not None:
            self._under_way.append((delayed.until, send, self._key()))
            return self._told(send, Lost(), "lost")
        doubled = self._take("duplicate", line)
        if doubled is not None:
            self._under_way.append((doubled.until, send, self._key()))
        raises = self._take("engine raises", line) is not None
        reply = self.backend.call(send, self._key(), raises=raises)
        if self._take("drop-reply", line) is not None:
            return self._told(send, Lost(), f"lost (the worker answered: {words(reply)})")
        if self._take("crash worker after", line) is not None:
            self._crash()
            return self._told(send, Lost(), f"lost (the worker had done it: {words(reply)})")
        if self._take("restart orchestrator after", line) is not None:
            self.lines.append(f"{self._line(send)} -> (the worker answered: {words(reply)})")
            return self._restart()
        return self._told(send, reply, words(reply))

    def _pack_beside(self, line: str) -> None:
        """Late micro-batches that become ready while this call is under way."""
        while (command := self._take("packed", line)) is not None:
            assert (command.step, command.index) in self._withheld, f"{command} is not late"
            self._withheld.remove((command.step, command.index))
            self.lines.append(f"! packed {command.step}.{command.index}")
            self._packed(command.step, command.index, Await(step=command.step, index=-1))

    def _told(self, send: Send, event: Event, outcome: str) -> Action:
        self.lines.append(f"{self._line(send)} -> {outcome}")
        return self._advance(event)

    def _line(self, send: Send) -> str:
        return send.line + (f" seq={send.seq}" if send.seq else "")

    def _crash(self) -> None:
        self.lines.append("! the worker crashes")
        self.backend.crash()

    def _arrives_late(self, send: Send, key: Key) -> None:
        reply = self.backend.call(send, key)
        self.lines.append(f"! late {self._line(send)} arrives -> {words(reply)}")

    def _take(self, kind: str, line: str) -> Command | None:
        """The next command, if it is this one. Commands act in the order of the file."""
        for command in self._commands:
            if command.kind == kind and command.call == line:
                self._commands.remove(command)
                return command
            if command.kind not in DATA_COMMANDS and kind not in DATA_COMMANDS:
                return None
        return None


def words(reply: Reply) -> str:
    """An answer as the log writes it."""
    if isinstance(reply, Refused):
        return f"refused {reply.reason.value}"
    if isinstance(reply, Raised):
        return "raised"
    if reply.view is None:
        return "done"
    state = reply.view.state
    return f"done ({state.phase.value} step={state.step} epoch={reply.view.epoch})"


MakeBackend = Callable[[Scenario], Backend]
