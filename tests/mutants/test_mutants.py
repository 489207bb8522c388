"""Every named mutant is caught by its stated check, which says what is broken."""

from __future__ import annotations

import pytest

from tests.mutants.checks import CHECKS, outcome
from tests.mutants.patching import mutated
from tests.mutants.table import MUTANTS, Mutant


def test_at_least_forty_with_names_of_their_own() -> None:
    assert len(MUTANTS) >= 40
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_caught(mutant: Mutant) -> None:
    with mutated(mutant.edits):
        said = outcome(mutant.check)
    assert said is not None, f"{mutant.name} ({mutant.breaks}) passes {CHECKS[mutant.check].test}"
    assert mutant.says in said


@pytest.mark.parametrize("mutant", MUTANTS[:3], ids=lambda mutant: mutant.name)
def test_a_mutant_leaves_nothing_behind(mutant: Mutant) -> None:
    with mutated(mutant.edits):
        pass
    assert outcome(mutant.check) is None
