"""`python -m tests.walk [--deep] [NAME...]`: walk and print the counts. Exit 1 on a finding."""

from __future__ import annotations

import sys

from tests.walk.cases import CI, DEEP
from tests.walk.model import Model
from tests.walk.search import search


def main(argv: list[str]) -> int:
    cases = {**CI, **DEEP} if "--deep" in argv else CI
    names = [name for name in argv if not name.startswith("--")] or list(cases)
    failed = False
    for name in names:
        result = search(Model({**CI, **DEEP}[name]), limit=60_000_000)
        print(
            f"{name}: {result.worlds} worlds, {result.steps} steps, {result.ends} ends,"
            f" {result.seconds:.1f} s: {'clean' if result.found is None else 'BROKEN'}",
            flush=True,
        )
        if result.found is not None:
            failed = True
            print(result.found, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
