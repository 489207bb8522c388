"""Every check that catches mutants passes on the right code."""

from __future__ import annotations

import pytest

from tests.mutants.checks import CHECKS, outcome
from tests.mutants.table import MUTANTS


@pytest.mark.parametrize("name", CHECKS)
def test_right_code_passes(name: str) -> None:
    assert outcome(name) is None


def test_every_check_catches_something() -> None:
    assert {mutant.check for mutant in MUTANTS} == set(CHECKS)
