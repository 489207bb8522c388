"""The page of cases says where each case's tests are; here it is held to the tests."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
_ROW = re.compile(r"^\| ([A-FR0-9,; -]+) \| `tests/([a-z0-9_/]+)` \|$", re.MULTILINE)
_TEST = re.compile(r"def test_((?:[a-z]\d+_)+)")


def _cases(text: str) -> set[str]:
    """`A1-A4, A6; C1` as case names."""
    found: set[str] = set()
    for word in re.split(r"[,;] ", text):
        first, _, last = word.partition("-")
        letter, last = first[0], last or first
        found |= {f"{letter}{number}" for number in range(int(first[1:]), int(last[1:]) + 1)}
    return found


def _tested(folder: Path) -> set[str]:
    names = [name for path in folder.glob("*.py") for name in _TEST.findall(path.read_text())]
    return {case.upper() for name in names for case in name.strip("_").split("_")}


def test_every_row_names_a_folder_that_tests_its_cases() -> None:
    rows = _ROW.findall((TESTS / "cases.md").read_text())
    assert len(rows) >= 10
    for cases, folder in rows:
        missing = _cases(cases) - _tested(TESTS / folder)
        assert not missing, f"tests/{folder} has no test named after {sorted(missing)}"


def test_ranges_are_read() -> None:
    assert _cases("A1-A3, A6; R30, R31") == {"A1", "A2", "A3", "A6", "R30", "R31"}
