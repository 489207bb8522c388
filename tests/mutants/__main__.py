"""`python -m tests.mutants`: mutant -> what catches it, and what it says. Exit 1 if one survives."""

from __future__ import annotations

import sys

from tests.mutants.checks import CHECKS, outcome
from tests.mutants.patching import NotApplicable, mutated
from tests.mutants.table import MUTANTS


def main() -> int:
    survivors = 0
    for mutant in MUTANTS:
        try:
            with mutated(mutant.edits):
                said = outcome(mutant.check)
        except NotApplicable as error:
            print(f"STALE     {mutant.name}: {error}")
            survivors += 1
            continue
        caught = said is not None and mutant.says in said
        survivors += not caught
        print(
            f"{'caught' if caught else 'SURVIVES':9} {mutant.name} -> {CHECKS[mutant.check].test}"
        )
        for line in (said or "").splitlines():
            print(f"          {line}")
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
