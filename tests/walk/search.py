"""Breadth-first search of the product: every world, the shortest trace to what is broken, no
world without a way to an end. Knows nothing of the protocol."""

from __future__ import annotations

import itertools
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

W = TypeVar("W", bound=Hashable)


class SearchStep(Protocol[W]):
    @property
    def label(self) -> tuple[object, ...]: ...
    @property
    def fault(self) -> bool: ...
    @property
    def world(self) -> W | None: ...
    @property
    def broken(self) -> tuple[str, ...]: ...


class Product(Protocol[W]):
    def first(self) -> W: ...
    def steps(self, world: W) -> Iterator[SearchStep[W]]: ...
    def end(self, world: W) -> tuple[str, ...] | None: ...


class Found(NamedTuple):
    """Something broken, with the shortest way to it."""

    broken: tuple[str, ...]
    trace: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"broken: {'; '.join(self.broken)}", "shortest trace:"]
        lines += [f"  {number}. {line}" for number, line in enumerate(self.trace, start=1)]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Searched:
    """What a search saw."""

    worlds: int
    steps: int
    ends: int
    seconds: float
    found: Found | None


@dataclass
class _Search(Generic[W]):
    product: Product[W]
    limit: int

    def run(self) -> Searched:
        started_s = time.monotonic()
        first = self.product.first()
        self.worlds: list[W] = [first]
        self.parents: list[int] = [-1]
        number = {first: 0}
        follow: list[int] = []  # The fault-free next world; -1 = none.
        ended: list[bool] = []
        steps = 0
        position = 0
        found: Found | None = None
        while position < len(self.worlds) and found is None:
            world = self.worlds[position]
            end = self.product.end(world)
            if end:
                found = Found(end, self._trace(position))
                break
            ended.append(end is not None)
            follow.append(-1)
            for step in self.product.steps(world):
                steps += 1
                if step.broken:
                    found = Found(step.broken, (*self._trace(position), _words(step.label)))
                    break
                assert step.world is not None
                target = number.get(step.world)
                if target is None:
                    target = len(self.worlds)
                    if target >= self.limit:
                        raise RuntimeError(f"more than {self.limit} worlds: raise the limit")
                    number[step.world] = target
                    self.worlds.append(step.world)
                    self.parents.append(position)
                if not step.fault:
                    follow[position] = target
            position += 1
        if found is None:
            found = self._stuck(follow, ended)
        return Searched(
            worlds=len(self.worlds),
            steps=steps,
            ends=sum(ended),
            seconds=time.monotonic() - started_s,
            found=found,
        )

    def _stuck(self, follow: Sequence[int], ended: Sequence[bool]) -> Found | None:
        """From every world, the run without further faults ends."""
        on_path, ends = 1, 2
        seen = bytearray(len(follow))
        for start in range(len(follow)):
            path: list[int] = []
            at = start
            while True:
                if at >= 0 and (ended[at] or seen[at] == ends):
                    break
                if at < 0 or seen[at] == on_path:
                    what = "waits for ever" if at < 0 else "goes round for ever"
                    return Found((f"no-deadlock: the run {what}",), self._trace(start))
                seen[at] = on_path
                path.append(at)
                at = follow[at]
            for item in path:
                seen[item] = ends
        return None

    def _trace(self, position: int) -> tuple[str, ...]:
        """Labels from the first world to this one; steps are made again to find them."""
        way: list[int] = []
        while position >= 0:
            way.append(position)
            position = self.parents[position]
        way.reverse()
        lines: list[str] = []
        for before, after in itertools.pairwise(way):
            target = self.worlds[after]
            for step in self.product.steps(self.worlds[before]):
                if step.world == target and not step.broken:
                    lines.append(_words(step.label))
                    break
        return tuple(lines)


def _words(label: tuple[object, ...]) -> str:
    return "".join(str(part) for part in label)


def search(product: Product[W], *, limit: int = 5_000_000) -> Searched:
    """Walk the whole product, breadth first. Stops at the first thing broken."""
    return _Search(product, limit).run()
