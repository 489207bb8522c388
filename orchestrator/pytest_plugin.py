"""pytest plugin: record a run's trainer calls and compare them with a frozen sequence.

    def test_my_boundary(prestage_sequence):
        Runner(..., observers=(prestage_sequence,)).run()
        prestage_sequence.check("my_boundary")

The frozen file lies beside the test, in `golden/my_boundary.txt` (ini `prestage_sequence_dir`): one
call a line, no times, no digests. `check` also holds the calls against every rule of
`orchestrator.invariants`. `--prestage-rewrite=REASON` writes the file anew; the reason goes into it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from orchestrator.boundary import BoundaryState
from orchestrator.calls import Note
from orchestrator.invariants import check_history
from orchestrator.ports import Answer
from prestage.trace import TraceRecord, call_lines, read_trace

_OPTION: Final = "--prestage-rewrite"
_FOLDER: Final = "prestage_sequence_dir"
_WHY: Final = "# rewritten because: "


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("prestage", "frozen call sequences")
    group.addoption(
        _OPTION,
        default=None,
        metavar="REASON",
        help="write the frozen call sequences anew; say why in a few words",
    )
    parser.addini(
        _FOLDER, "folder of the frozen sequences, beside each test file", default="golden"
    )


def pytest_configure(config: pytest.Config) -> None:
    reason: str | None = config.getoption(_OPTION)
    if reason is not None and len(reason.split()) < 2:
        raise pytest.UsageError(
            f"{_OPTION}={reason!r}: say in a few words why the sequence changes, for example"
            f" {_OPTION}='stage before the update'"
        )


class CallSequence:
    """Records calls as an `Observer` of the runner (or from a trace) and compares them."""

    def __init__(self, *, folder: Path, reason: str | None) -> None:
        self._folder = folder
        self._reason = reason
        self._records: list[TraceRecord] = []
        self.checked = False

    # -- Observer -----------------------------------------------------------------------------------

    def on_call(self, record: TraceRecord, answer: Answer) -> None:
        del answer
        self._records.append(record)

    def on_note(self, note: Note) -> None:
        del note

    def on_state(self, state: BoundaryState) -> None:
        del state

    # -- for tests ----------------------------------------------------------------------------------

    @property
    def records(self) -> tuple[TraceRecord, ...]:
        return tuple(self._records)

    def read(self, path: Path) -> None:
        """Take the calls of an NDJSON trace. Raises `TraceError`."""
        self._records.extend(read_trace(path).calls)

    def check(self, name: str) -> None:
        """Fail unless the recorded calls are the frozen ones and keep every rule."""
        self.checked = True
        lines = list(call_lines(self._records))
        if not lines:
            pytest.fail(
                f"sequence {name!r}: nothing was recorded; give prestage_sequence to the runner's"
                " observers, or read a trace",
                pytrace=False,
            )
        broken = check_history(self._records)
        if broken:
            text = "\n".join(f"  call {at + 1} ({lines[at]}): {what}" for at, what in broken)
            pytest.fail(f"sequence {name!r} breaks {len(broken)} rule(s):\n{text}", pytrace=False)
        path = self._folder / f"{name}.txt"
        if self._reason is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join([f"{_WHY}{self._reason}", *lines]) + "\n", encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(
                f"sequence {name!r}: {path} is missing; {_OPTION}=REASON writes it", pytrace=False
            )
        frozen = _frozen_lines(path)
        if lines != frozen:
            pytest.fail(_difference(path, frozen, lines), pytrace=False)


def _frozen_lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def _difference(path: Path, frozen: Sequence[str], lines: Sequence[str]) -> str:
    """The first call that differs, in words, and the whole difference with three lines around."""
    at = 0
    while at < min(len(frozen), len(lines)) and frozen[at] == lines[at]:
        at += 1
    want = frozen[at] if at < len(frozen) else "the end"
    got = lines[at] if at < len(lines) else "the end"
    diff = difflib.unified_diff(frozen, lines, "frozen", "this run", lineterm="", n=3)
    return "\n".join(
        [
            f"the call sequence differs from {path}",
            f"call {at + 1}: expected {want!r}, got {got!r}",
            *diff,
            f"If this is meant: {_OPTION}='why', then read the diff of the file before committing.",
        ]
    )


@pytest.fixture
def prestage_sequence(request: pytest.FixtureRequest) -> Iterator[CallSequence]:
    """A recorder of trainer calls; see `CallSequence`. A recorder never checked fails its test."""
    folder = request.path.parent / str(request.config.getini(_FOLDER))
    sequence = CallSequence(folder=folder, reason=request.config.getoption(_OPTION))
    yield sequence
    if sequence.records and not sequence.checked:
        pytest.fail("prestage_sequence recorded calls that no check() looked at", pytrace=False)
