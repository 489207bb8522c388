"""The named checks hold for the real heads (test_mutants shows that each can fail)."""

import pytest

import trainer_worker.logprob_head as package
from tests.logprob_head import checks
from tests.logprob_head.checks import COUNTED, NUMERIC, NUMERIC_CHECKS, PROGRAM_CHECKS


@pytest.mark.parametrize("mode", ["off", "local", "vocab"])
@pytest.mark.parametrize("check", NUMERIC_CHECKS, ids=lambda check: check.__name__)
def test_numeric_check_holds(check: checks.Check, mode: str) -> None:
    check(package, NUMERIC.replace(mode=mode))


@pytest.mark.parametrize("mode", ["off", "local", "vocab"])
def test_non_finite_surfaces_without_a_norm_to_spread_it(mode: str) -> None:
    """The soft-cap alone would make an infinite hidden state a healthy log-prob."""
    checks.check_non_finite_surfaces(package, NUMERIC.replace(mode=mode, norm=False))


@pytest.mark.parametrize("mode", ["local", "vocab"])
@pytest.mark.parametrize("check", PROGRAM_CHECKS, ids=lambda check: check.__name__)
def test_program_check_holds(check: checks.Check, mode: str) -> None:
    check(package, COUNTED.replace(mode=mode))
