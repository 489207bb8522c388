"""Makes a mistake in the running code, and takes it back.

A mutant is a piece of source text and what stands in its place. Only the functions and constants
that it changes are made anew; they run in their own module, and every module that had imported the
right one by name gets the wrong one, so nothing needs to be reloaded.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

OURS = ("prestage", "orchestrator", "trainer_worker", "tests")


@dataclass(frozen=True)
class Edit:
    """`old` (which occurs exactly once in the module's source) becomes `new`."""

    module: ModuleType
    old: str
    new: str


class NotApplicable(Exception):
    """The text to replace is not there exactly once: the mutant needs a new one."""


@contextlib.contextmanager
def mutated(edits: tuple[Edit, ...]) -> Iterator[None]:
    """The edits are in force inside the block."""
    undo: list[tuple[object, str, object]] = []
    try:
        for edit in edits:
            _apply(edit, undo)
        yield
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)


def _apply(edit: Edit, undo: list[tuple[object, str, object]]) -> None:
    source = inspect.getsource(edit.module)
    count = source.count(edit.old)
    if count != 1:
        raise NotApplicable(f"{edit.module.__name__}: {count} times, not once: {edit.old!r}")
    before, after = ast.parse(source), ast.parse(source.replace(edit.old, edit.new))
    changed = 0
    for right, wrong in zip(before.body, after.body, strict=True):
        if ast.dump(right) == ast.dump(wrong):
            continue
        changed += 1
        if isinstance(right, ast.ClassDef) and isinstance(wrong, ast.ClassDef):
            _replace_methods(edit.module, right, wrong, undo)
        else:
            for name, value in _made(edit.module, wrong).items():
                _replace_everywhere(edit.module, name, value, undo)
    if changed == 0:
        raise NotApplicable(f"{edit.module.__name__}: the edit changes nothing: {edit.old!r}")


def _made(module: ModuleType, node: ast.stmt) -> dict[str, object]:
    """What a statement defines when it runs in its module."""
    made: dict[str, object] = {}
    flags = __future__.annotations.compiler_flag
    code = compile(
        ast.Module(body=[node], type_ignores=[]),
        f"<mutant of {module.__name__}>",
        "exec",
        flags=flags,
        dont_inherit=True,
    )
    exec(code, module.__dict__, made)
    return made


def _replace_methods(
    module: ModuleType,
    right: ast.ClassDef,
    wrong: ast.ClassDef,
    undo: list[tuple[object, str, object]],
) -> None:
    owner = module.__dict__[right.name]
    for old, new in zip(right.body, wrong.body, strict=True):
        if ast.dump(old) == ast.dump(new):
            continue
        for name, value in _made(module, new).items():
            undo.append((owner, name, owner.__dict__[name]))
            setattr(owner, name, value)


def _replace_everywhere(
    module: ModuleType, name: str, value: object, undo: list[tuple[object, str, object]]
) -> None:
    original = module.__dict__[name]
    for other in list(sys.modules.values()):
        if other is None or other.__name__.split(".")[0] not in OURS:
            continue
        for alias, held in list(vars(other).items()):
            if held is original:
                undo.append((other, alias, held))
                setattr(other, alias, value)
