"""The exhaustive walk: every order of faults within a bound, over the real core and sessions.

1. Nothing of `orchestrator.invariants` and of the step plan breaks in any world.
2. From every world, the run without further faults ends; a finished run has the right parameters.
3. The search itself finds what is broken, by the shortest way (a small product with known faults).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from tests.walk.cases import ARMS, CI, DEEP, plan
from tests.walk.model import NO_FAULTS, Model, WalkConfig
from tests.walk.search import Searched, search

# Fewer worlds than this would mean that the walk has lost its way.
FEWEST_WORLDS = {"scored_and_evaluated": 2_000, "trainer_logprobs": 1_500}


def walked(name: str, config: WalkConfig, capsys: pytest.CaptureFixture[str]) -> Searched:
    result = search(Model(config))
    with capsys.disabled():
        print(
            f"\n[walk] {name}: {result.worlds} worlds, {result.steps} steps, {result.ends} ends,"
            f" {result.seconds:.1f} s",
            end="",
        )
    return result


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n.endswith("_faults") else n for n in CI],
)
def test_walk(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = walked(name, CI[name], capsys)
    assert result.found is None, str(result.found)
    assert result.worlds > FEWEST_WORLDS.get(name, 20_000)
    assert result.ends > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["staged_3_faults", "zero_gap_3_faults"])
def test_walk_deeper(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = walked(name, DEEP[name], capsys)
    assert result.found is None, str(result.found)


@pytest.mark.parametrize("arm", ARMS)
def test_without_faults_the_run_is_one_line_to_its_end(arm: str) -> None:
    config = WalkConfig(plan=plan(arm, 3, checkpoint_every=1), faults=NO_FAULTS)
    result = search(Model(config))
    assert (result.found, result.ends) == (None, 1)
    assert result.steps == result.worlds - 1


# ---------------------------------------------------------------------------------------------
# The search, on products whose faults are known.


class ToyStep(NamedTuple):
    label: tuple[object, ...]
    fault: bool
    world: int | None
    broken: tuple[str, ...] = ()


@dataclass
class Toy:
    """A graph of numbers: world -> [(label, target, fault)]."""

    edges: dict[int, list[tuple[str, int, bool]]]
    ends: dict[int, tuple[str, ...]] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)

    def first(self) -> int:
        return 0

    def end(self, world: int) -> tuple[str, ...] | None:
        return self.ends.get(world)

    def steps(self, world: int) -> Iterator[ToyStep]:
        for label, target, fault in self.edges.get(world, []):
            if label in self.broken:
                yield ToyStep((label,), fault, None, (self.broken[label],))
            else:
                yield ToyStep((label,), fault, target)


def test_search_counts_and_passes_a_clean_product() -> None:
    toy = Toy({0: [("a", 1, False), ("b", 2, True)], 1: [("c", 3, False)], 2: [("d", 3, False)]})
    toy.ends = {3: ()}
    result = search(toy)
    assert (result.worlds, result.steps, result.ends, result.found) == (4, 4, 1, None)


def test_search_gives_the_shortest_way_to_what_is_broken() -> None:
    long = {0: [("a", 1, False), ("b", 4, True)], 1: [("c", 2, False)], 2: [("bad", 3, False)]}
    toy = Toy({**long, 4: [("bad", 3, False)]}, broken={"bad": "rule"}, ends={3: ()})
    found = search(toy).found
    assert found is not None
    assert found.broken == ("rule",)
    assert found.trace == ("b", "bad")


def test_search_finds_a_wrong_end() -> None:
    found = search(Toy({0: [("a", 1, False)]}, ends={1: ("wrong parameters",)})).found
    assert found is not None
    assert found.broken == ("wrong parameters",)


def test_search_finds_a_run_that_waits_for_ever() -> None:
    toy = Toy({0: [("a", 1, False), ("lose", 2, True)], 2: [("arrives", 1, True)]}, ends={1: ()})
    found = search(toy).found
    assert found is not None
    assert "waits for ever" in found.broken[0]
    assert found.trace == ("lose",)


def test_search_finds_a_run_that_goes_round_for_ever() -> None:
    toy = Toy({0: [("a", 1, False)], 1: [("b", 0, False), ("luck", 2, True)]}, ends={2: ()})
    found = search(toy).found
    assert found is not None
    assert "goes round for ever" in found.broken[0]


def test_search_says_so_when_the_product_is_larger_than_its_limit() -> None:
    toy = Toy({0: [("a", 1, False)], 1: [("b", 2, False)], 2: [("c", 3, False)]}, ends={3: ()})
    with pytest.raises(RuntimeError, match="more than 2 worlds"):
        search(toy, limit=2)
