"""Every deliberately broken head fails the check named for it, and the real one passes it."""

from pathlib import Path

import pytest

import trainer_worker.logprob_head as package
from tests.logprob_head.mutants import MUTANTS, Mutant, broken_package, caught_by


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_head_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    mutant.check(package, mutant.case)
    assert caught_by(mutant, tmp_path) is not None, f"{mutant.check.__name__} let it pass"
    print(f"{mutant.name} -> {mutant.check.__name__}")


def test_an_edit_that_no_longer_applies_is_an_error(tmp_path: Path) -> None:
    stale = MUTANTS[0]
    lost = type(stale)(**{**vars(stale), "old": "no such text", "name": "stale"})
    with (
        pytest.raises(ValueError, match="bring the edit up to date"),
        broken_package(lost, tmp_path),
    ):
        pass
