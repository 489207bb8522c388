"""The product that is walked: orchestrator core x channel x worker x data x faults.

One `World` is one state; `steps(world)` gives every next one with its label and what it broke.
Values are interned and the two sides' pure functions are memoised, so that a search of many worlds
costs few calls of the real code.

What is collapsed: the orchestrator's local work (it touches nothing that the worker sees), and a
call that arrives, is carried out and is answered without a fault is one step. A crash in between is
the same as a lost reply before the crash.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

from orchestrator import boundary
from orchestrator.boundary import BoundaryState
from orchestrator.calls import (
    Action,
    Await,
    Event,
    Fail,
    Finish,
    Local,
    LocalDone,
    LocalKind,
    Lost,
    NoteKind,
    Ready,
    Refused,
    Send,
    Start,
)
from orchestrator.invariants import (
    FROM_SCRATCH,
    Expectation,
    Ledger,
    finished,
    new_process,
    observe,
)
from orchestrator.plan import RunPlan
from prestage.protocol import SEQUENCED_CALLS, BatchRef, Call, Phase
from tests.walk import plan_rules, source
from tests.walk.worker import Delivery, How, Message, Worker, crashed, deliver, fresh

T = TypeVar("T", bound=Hashable)
Label = tuple[object, ...]
"""Parts of a line of a trace; put into words only when a trace is printed."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How many of each fault may still happen; all but late data also cost one of `total`."""

    total: int = 2
    channel: int = 9  # Lost, delayed and doubled messages.
    worker_crashes: int = 2
    orchestrator_restarts: int = 2
    engine: int = 1  # Raises in a call, or fails later on the device.
    late_data: int = 1  # A step that is not packed at once.


NO_FAULTS = Faults(
    total=0, channel=0, worker_crashes=0, orchestrator_restarts=0, engine=0, late_data=0
)


@dataclass(frozen=True, kw_only=True)
class WalkConfig:
    """What is walked."""

    plan: RunPlan
    micro_batches: int = 2
    faults: Faults = Faults()


class World(NamedTuple):
    """One state of the product. Numbers name interned values."""

    core: int  # (BoundaryState, Action)
    worker: int
    ledger: int
    unpacked: tuple[tuple[int, int], ...]  # Micro-batches that will be ready later, in order.
    late: tuple[int, ...]  # Messages still on their way.
    faults: int
    failed_before: bool  # The engine failed since the orchestrator last started.


class Step(NamedTuple):
    label: Label
    fault: bool  # A fault, or the channel's own doing: not part of the fault-free run.
    world: World | None  # None when something broke on the way.
    broken: tuple[str, ...]


class Interned(Generic[T]):
    """Values to small numbers and back."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[T, int] = {}

    def number(self, value: T) -> int:
        found = self._numbers.get(value)
        if found is None:
            found = len(self.values)
            self._numbers[value] = found
            self.values.append(value)
        return found

    def __len__(self) -> int:
        return len(self.values)


class Delivered(NamedTuple):
    """A memoised delivery."""

    number: int
    worker: int
    event: int  # The reply as an event; -1 = none.
    delivery: Delivery
    broken: tuple[str, ...]


class Advanced(NamedTuple):
    """The core after an event and its local work: one of several, by what was packed in time."""

    core: int
    packed: tuple[int, ...]  # Steps whose packing was started.
    unpacked: tuple[tuple[int, int], ...]  # Of those: not ready yet.
    forgot: bool  # The worker restarted: nothing that was put is there.
    broken: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Doing:
    """Local work so far."""

    packed: tuple[int, ...] = ()
    unpacked: tuple[tuple[int, int], ...] = ()
    forgot: bool = False


@dataclass
class Model:
    """The product of one plan."""

    config: WalkConfig
    cores: Interned[tuple[BoundaryState, Action]] = field(default_factory=Interned)
    workers: Interned[Worker] = field(default_factory=Interned)
    ledgers: Interned[Ledger] = field(default_factory=Interned)
    messages: Interned[Message] = field(default_factory=Interned)
    events: Interned[Event] = field(default_factory=Interned)
    budgets: Interned[Faults] = field(default_factory=Interned)
    _advanced: dict[tuple[int, int], tuple[Advanced, ...]] = field(default_factory=dict)
    _delivered: dict[tuple[int, int, How], Delivered] = field(default_factory=dict)
    _observed: dict[tuple[int, int], tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    _sent: dict[int, int] = field(default_factory=dict)
    _spent: dict[tuple[int, str], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._expect = Expectation(
            plan=self.config.plan,
            micro_batches=self.config.micro_batches,
            may_skip_updates=False,
        )
        self._lost = self.events.number(Lost())
        state, action = boundary.advance(boundary.initial(self.config.plan), Start())
        self._first_core = self.cores.number((replace(state, notes=()), action))

    def first(self) -> World:
        return World(
            core=self._first_core,
            worker=self.workers.number(fresh(1)),
            ledger=self.ledgers.number(replace(FROM_SCRATCH, incarnation="w1")),
            unpacked=(),
            late=(),
            faults=self.budgets.number(self.config.faults),
            failed_before=False,
        )

    # -- every next world ---------------------------------------------------------------------------

    def steps(self, world: World) -> Iterator[Step]:
        """Every step from here; at most one is without a fault."""
        action = self.cores.values[world.core][1]
        if isinstance(action, Send):
            yield from self._sends(world, action)
        if world.unpacked and isinstance(action, Send | Await):
            yield from self._packed(world, fault=isinstance(action, Send))
        if world.late:
            yield from self._late(world)
        if isinstance(action, Finish):
            return
        yield from self._crashes(world)
        yield from self._restarts(world, action)

    def end(self, world: World) -> tuple[str, ...] | None:
        """None: not an end. Otherwise what is wrong with this end (nothing, for a good one)."""
        state, action = self.cores.values[world.core]
        worker, ledger = self.workers.values[world.worker], self.ledgers.values[world.ledger]
        if isinstance(action, Fail):
            fenced = worker.session.epoch != state.epoch and state.epoch > 0
            suspect = state.mirror.parameters_suspect or worker.session.step.parameters_suspect
            if world.failed_before or suspect or fenced:
                return ()
            return (f"the run ended with an error that nothing explains: {action.why}",)
        if not isinstance(action, Finish):
            return None
        broken = [str(item) for item in finished(ledger, num_steps=self.config.plan.num_steps)]
        expected = source.expected_chain(self.config.plan.num_steps, self.config.micro_batches)
        if worker.engine.chain != expected:
            broken.append(
                f"parameters: the run finished with {worker.engine.chain}, not {expected}"
            )
        broken.extend(plan_rules.at_finish(state))
        broken.extend(self._saved(worker))
        return tuple(broken)

    def _saved(self, worker: Worker) -> tuple[str, ...]:
        """The newest checkpoint that is due was taken."""
        plan = self.config.plan
        if not plan.checkpoint_every:
            return ()
        due = plan.num_steps // plan.checkpoint_every * plan.checkpoint_every
        saved = [item.step for item in worker.durable]
        if worker.saving is not None:
            saved.append(worker.saving.step)
        if due and due not in saved:
            return (f"duties: the checkpoint of {due} step(s) is due, but {saved} were taken",)
        return ()

    # -- one kind of step each ------------------------------------------------------------------------

    def _sends(self, world: World, send: Send) -> Iterator[Step]:
        number = self._message(world.core, send)
        message = self.messages.values[number]
        yield from self._answered(world, number, How.WELL, (message,), fault=False)
        channel = self._spend(world, "channel")
        if channel is not None:
            yield from self._told(channel, self._lost, (message, ": the request is lost"), True)
            if send.call is not Call.GET_STATE:
                yield from self._answered(channel, number, How.WELL, (message,), reply_lost=True)
                delayed = channel._replace(late=tuple(sorted((*channel.late, number))))
                yield from self._told(
                    delayed, self._lost, (message, ": the request is delayed"), True
                )
                yield from self._answered(delayed, number, How.WELL, (message, " (sent twice)"))
            if send.call in SEQUENCED_CALLS:
                yield from self._answered(channel, number, How.SLOWLY, (message, " takes long"))
        engine = self._spend(world, "engine")
        if engine is not None and send.call in SEQUENCED_CALLS:
            engine = engine._replace(failed_before=True)
            raises = (message, ": the engine raises")
            yield from self._answered(engine, number, How.RAISES, raises)
            yield from self._answered(engine, number, How.RAISES, raises, reply_lost=True)

    def _answered(
        self,
        world: World,
        message: int,
        how: How,
        label: Label,
        *,
        reply_lost: bool = False,
        fault: bool = True,
    ) -> Iterator[Step]:
        after, delivered, broken = self._deliver(world, message, how)
        if broken:
            yield Step(label, fault, None, broken)
        elif reply_lost or delivered.event < 0:
            yield from self._told(after, self._lost, (*label, ": the reply is lost"), fault)
        else:
            label = (*label, " -> ", _words(delivered))
            yield from self._told(after, delivered.event, label, fault)

    def _packed(self, world: World, *, fault: bool) -> Iterator[Step]:
        """The oldest unpacked micro-batch becomes ready."""
        step, index = world.unpacked[0]
        epoch = self.cores.values[world.core][0].epoch
        event = source.ready(step, index, self.config.micro_batches, epoch=epoch)
        left = world._replace(unpacked=world.unpacked[1:])
        label = (f"micro-batch ({step}, {index}) is packed",)
        yield from self._told(left, self.events.number(event), label, fault)

    def _late(self, world: World) -> Iterator[Step]:
        for position, number in enumerate(world.late):
            if position and world.late[position - 1] == number:
                continue
            left = world._replace(late=world.late[:position] + world.late[position + 1 :])
            after, delivered, broken = self._deliver(left, number, How.WELL)
            label = ("late ", self.messages.values[number], " arrives -> ", _words(delivered))
            yield Step(label, True, None if broken else after, broken)

    def _crashes(self, world: World) -> Iterator[Step]:
        worker = self.workers.values[world.worker]
        engine = self._spend(world, "engine")
        if engine is not None and worker.engine.open and not worker.device_failed:
            poisoned = replace(worker, device_failed="a micro-batch failed on the device")
            after = engine._replace(worker=self.workers.number(poisoned), failed_before=True)
            yield Step(("the device fails",), True, after, ())
        spent = self._spend(world, "worker_crashes")
        if spent is None:
            return
        for durable in (True, False) if worker.saving is not None else (False,):
            died = crashed(worker, save_was_durable=durable)
            ledger = new_process(self.ledgers.values[world.ledger], died.session.incarnation)
            label = "the worker crashes" + (" after its save became durable" if durable else "")
            yield Step(
                (label,),
                True,
                spent._replace(
                    worker=self.workers.number(died), ledger=self.ledgers.number(ledger)
                ),
                (),
            )

    def _restarts(self, world: World, action: Action) -> Iterator[Step]:
        spent = self._spend(world, "orchestrator_restarts")
        if spent is None:
            return
        label = "the orchestrator restarts"
        yield Step((label,), True, self._restarted(spent), ())
        if not isinstance(action, Send) or action.call is Call.GET_STATE:
            return
        number = self._message(world.core, action)
        message = self.messages.values[number]
        late = spent._replace(late=tuple(sorted((*spent.late, number))))
        yield Step((label, ", ", message, " is on its way"), True, self._restarted(late), ())
        after, delivered, broken = self._deliver(spent, number, How.WELL)
        words = (message, " -> ", _words(delivered), "; ", label)
        yield Step(words, True, None if broken else self._restarted(after), broken)

    def _restarted(self, world: World) -> World:
        return world._replace(core=self._first_core, unpacked=(), failed_before=False)

    # -- the two sides ------------------------------------------------------------------------------

    def _deliver(
        self, world: World, message: int, how: How
    ) -> tuple[World, Delivered, tuple[str, ...]]:
        key = (world.worker, message, how)
        found = self._delivered.get(key)
        if found is None:
            before = self.workers.values[world.worker]
            delivery = deliver(before, self.messages.values[message], how)
            found = Delivered(
                number=len(self._delivered),
                worker=self.workers.number(delivery.worker),
                event=-1 if delivery.reply is None else self.events.number(delivery.reply),
                delivery=delivery,
                broken=delivery.broken or _unchanged(before, delivery) or _agrees(delivery.worker),
            )
            self._delivered[key] = found
        ledger, broken = self._observe(world.ledger, found)
        after = world._replace(worker=found.worker, ledger=ledger)
        return after, found, broken or found.broken

    def _observe(self, ledger: int, delivered: Delivered) -> tuple[int, tuple[str, ...]]:
        if not delivered.delivery.records:
            return ledger, ()
        key = ledger, delivered.number
        found = self._observed.get(key)
        if found is None:
            value = self.ledgers.values[ledger]
            broken: list[str] = []
            for record in delivered.delivery.records:
                value, violations = observe(value, record, self._expect)
                broken.extend(str(item) for item in violations)
            found = self.ledgers.number(value), tuple(broken)
            self._observed[key] = found
        return found

    def _told(self, world: World, event: int, label: Label, fault: bool) -> Iterator[Step]:
        """The core hears of an event, does its local work, and says what it does next."""
        for after in self._advance(world.core, event):
            next_world: World | None = world
            if after.unpacked:
                next_world = self._spend(world, "late_data")
                if next_world is None:
                    continue
            assert next_world is not None
            unpacked = () if after.forgot else world.unpacked
            if after.packed:
                first = min(after.packed)
                unpacked = tuple(item for item in unpacked if item[0] < first)
                broken = after.broken or self._gone(world.worker, first)
            else:
                broken = after.broken
            words = (*label, "; packing comes late") if after.unpacked else label
            if broken:
                yield Step(words, fault or bool(after.unpacked), None, broken)
                continue
            next_world = next_world._replace(core=after.core, unpacked=(*unpacked, *after.unpacked))
            yield Step(words, fault or bool(after.unpacked), next_world, ())

    def _gone(self, worker: int, step: int) -> tuple[str, ...]:
        """The journal keeps rollouts until a durable checkpoint covers their step."""
        durable = max((item.step for item in self.workers.values[worker].durable), default=0)
        if step < durable:
            return (
                f"resume: packs step {step} again, but a durable checkpoint of {durable} step(s)"
                " covers it and its rollouts are gone",
            )
        return ()

    def _advance(self, core: int, event: int) -> tuple[Advanced, ...]:
        key = core, event
        found = self._advanced.get(key)
        if found is None:
            before, doing = self.cores.values[core]
            happened = self.events.values[event]
            try:
                state, action = boundary.advance(before, happened)
                if isinstance(happened, Ready) and isinstance(doing, Send):
                    # The call that is under way is still what comes next.
                    number = self.cores.number((replace(state, notes=()), doing))
                    found = (Advanced(number, (), (), False, ()),)
                else:
                    found = tuple(self._settle(before, state, action, _Doing()))
            except ValueError as error:
                found = (Advanced(core, (), (), False, (f"the core raised: {error}",)),)
            self._advanced[key] = found
        return found

    def _settle(
        self, before: BoundaryState, state: BoundaryState, action: Action, doing: _Doing
    ) -> Iterator[Advanced]:
        """Judge what the core decided, then do its local work until it sends, waits or ends."""
        broken = plan_rules.at_action(before, state, action)
        if any(note.kind is NoteKind.WORKER_RESTARTED for note in state.notes):
            doing = replace(doing, forgot=True)
        yield from self._do(state, action, doing, broken)

    def _do(
        self, state: BoundaryState, action: Action, doing: _Doing, broken: tuple[str, ...]
    ) -> Iterator[Advanced]:
        if broken or not isinstance(action, Local):
            core = self.cores.number((replace(state, notes=()), action))
            yield Advanced(core, doing.packed, doing.unpacked, doing.forgot, broken)
            return
        after, following = boundary.advance(state, LocalDone())
        if action.kind is not LocalKind.PACK:
            yield from self._settle(state, after, following, doing)
            return
        size, step = self.config.micro_batches, action.step
        for in_time in range(size, -1, -1):
            rest = tuple((step, index) for index in range(in_time, size))
            more = replace(doing, packed=(*doing.packed, step), unpacked=(*doing.unpacked, *rest))
            yield from self._readied(state, after, following, step, in_time, more)

    def _readied(
        self,
        before: BoundaryState,
        state: BoundaryState,
        action: Action,
        step: int,
        in_time: int,
        doing: _Doing,
    ) -> Iterator[Advanced]:
        """`in_time` micro-batches are ready beside whatever the core decided on."""
        broken = plan_rules.at_action(before, state, action)
        decided = action
        for index in range(in_time):
            before = state
            event = source.ready(step, index, self.config.micro_batches, epoch=state.epoch)
            state, got = boundary.advance(state, event)
            if not isinstance(got, Await):
                action = got
        if action is decided:
            yield from self._do(state, action, doing, broken)
        else:
            yield from self._settle(before, state, action, doing)

    # -- small parts ----------------------------------------------------------------------------------

    def _message(self, core: int, send: Send) -> int:
        found = self._sent.get(core)
        if found is None:
            state = self.cores.values[core][0]
            detail = f"cursor={state.mirror.step}" if send.call is Call.SAVE_CHECKPOINT else ""
            opens = send.call in (Call.OPEN_RUN, Call.GET_STATE)
            found = self.messages.number(
                Message(
                    call=send.call,
                    step=send.step,
                    index=send.index,
                    digest=send.digest,
                    detail=detail,
                    seq=send.seq,
                    epoch=0 if opens else state.epoch,
                    incarnation=state.incarnation if send.seq else "",
                )
            )
            self._sent[core] = found
        return found

    def _spend(self, world: World, kind: str) -> World | None:
        """The world with one fault of this kind less; None when none is left."""
        key = world.faults, kind
        found = self._spent.get(key)
        if found is None:
            budget = self.budgets.values[world.faults]
            left = {
                "channel": budget.channel,
                "worker_crashes": budget.worker_crashes,
                "orchestrator_restarts": budget.orchestrator_restarts,
                "engine": budget.engine,
                "late_data": budget.late_data,
            }
            total = budget.total if kind == "late_data" else budget.total - 1
            found = -1
            if left[kind] >= 1 and total >= 0:
                left[kind] -= 1
                found = self.budgets.number(Faults(total=total, **left))
            self._spent[key] = found
        return None if found < 0 else world._replace(faults=found)


def _agrees(worker: Worker) -> tuple[str, ...]:
    """What the worker says of itself is what its engine holds."""
    said, engine = worker.session.step, worker.engine
    if said.train_step != engine.train_step:
        return (
            f"version-moves-only-on-an-update: {engine.train_step} update(s) made, the worker says"
            f" {said.train_step}",
        )
    if worker.session.running is not None or said.phase is Phase.FAILED:
        return ()
    trained = tuple((ref.step, ref.index, ref.digest) for ref in said.trained)
    staged = None if said.staged is None else _batch(said.staged)
    if (trained, staged, said.micro_step) != (engine.open, engine.prepared, len(engine.open)):
        return (
            f"state-says-what-the-engine-holds: {said.micro_step} {trained} staged {staged}, but the"
            f" engine has {engine.open} and {engine.prepared}",
        )
    return ()


def _batch(ref: BatchRef) -> tuple[int, int, str]:
    return ref.step, ref.index, ref.digest


def _unchanged(before: Worker, delivery: Delivery) -> tuple[str, ...]:
    """A refusal changes nothing (a failure that it found on the way was there before)."""
    found_failure = before.device_failed and not delivery.worker.device_failed
    ended = before.session.running is not None
    explained = found_failure or ended or delivery.worker == before
    if isinstance(delivery.reply, Refused) and not explained:
        return (f"a-refusal-changes-nothing: {delivery.reply.reason.value} changed the worker",)
    return ()


def _words(delivered: Delivered) -> str:
    reply = delivered.delivery.reply
    if reply is None:
        return "running"
    if isinstance(reply, Refused):
        return f"refused {reply.reason.value}"
    return type(reply).__name__.lower()
