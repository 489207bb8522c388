"""Where faults go: every call of an undisturbed run times every fault, or a covering part by seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.chaos.faults import ACK, JOURNAL, SUBMIT, Action, Fault

LATER_SECONDS = (0.002, 0.012, 0.03)
BEYOND_DEADLINE_SECONDS = 0.7
STOPPED_SECONDS = 0.7
CALLER_STOPPED_SECONDS = 0.2
JOURNAL_FULL_SECONDS = 0.3


def _seconds(action: Action, number: int) -> float:
    if action is Action.KILL_LATER:
        return LATER_SECONDS[number % len(LATER_SECONDS)]
    if action is Action.STOP:
        return STOPPED_SECONDS
    if action is Action.JOURNAL_FULL:
        return JOURNAL_FULL_SECONDS
    if action is Action.CALLER_STOP:
        return CALLER_STOPPED_SECONDS
    return BEYOND_DEADLINE_SECONDS if action.needs_deadline else 0.0


def _stride(action: Action, method: str) -> int:
    """Of a stream's messages, which are all alike: deaths at every one, the rest at every eighth."""
    deaths = action in (Action.CALLER_KILL_BEFORE, Action.CALLER_KILL_AFTER)
    return 1 if deaths or not method.startswith((SUBMIT, ACK, JOURNAL)) else 8


def every_fault(calls: Mapping[str, Counter[str]]) -> list[Fault]:
    """One fault of every kind at every call index. `calls`: method to its count, by side."""
    faults = []
    for action in Action:
        number = 0
        for method, count in sorted(calls[action.side].items()):
            if not action.happens_at(method):
                continue
            stride = _stride(action, method)
            for occurrence in range(number % stride, count, stride):
                seconds = _seconds(action, number)
                number += 1
                faults.append(
                    Fault(action=action, method=method, occurrence=occurrence, seconds=seconds)
                )
    return faults


def certain(outcomes: Sequence[Mapping[str, Counter[str]]]) -> dict[str, Counter[str]]:
    """The calls that every one of several undisturbed runs made."""
    sides = outcomes[0].keys()
    found = {}
    for side in sides:
        counts = outcomes[0][side]
        for other in outcomes[1:]:
            counts = counts & other[side]
        found[side] = counts
    return found


def covering(faults: Sequence[Fault], seed: int, count: int) -> list[Fault]:
    """A part of `faults` with every kind of fault and every method in it, the rest by chance."""
    rng = random.Random(seed)
    shuffled = rng.sample(list(faults), len(faults))
    chosen: list[Fault] = []
    wanted: set[object] = {fault.action for fault in faults} | {fault.method for fault in faults}
    for fault in shuffled:
        covers = {fault.action, fault.method} & wanted
        if covers and len(chosen) < count:
            chosen.append(fault)
            wanted -= covers
    for fault in shuffled:
        if len(chosen) >= count:
            break
        if fault not in chosen:
            chosen.append(fault)
    return chosen


def pairs(faults: Sequence[Fault], seed: int, count: int) -> list[tuple[Fault, Fault]]:
    """Two faults in one run: the second one's calls are counted once the first has happened."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        first, second = rng.choice(faults), rng.choice(faults)
        second = Fault(
            action=second.action,
            method=second.method,
            occurrence=min(second.occurrence, rng.randrange(4)),
            seconds=second.seconds,
        )
        found.append((first, second))
    return found
