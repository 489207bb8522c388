"""Every flag that rendering uses is one that the two programs accept."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.recipes.flagnames import ORCHESTRATOR, WORKER
from orchestrator.recipes.launch import Program, launch
from orchestrator.recipes.manifests import site_of
from tests.deploy.recipes import SHIPPED, demo, shipped

PROGRAMS = {"orchestrator": "orchestrator.main", "trainer_worker": "trainer_worker.main"}

# Flags that recipes need and a program does not have yet. Take a flag out once it is there.
PENDING: dict[str, set[str]] = {
    "orchestrator": set(),
    "trainer_worker": set(),
}
TABLES = {"orchestrator": ORCHESTRATOR, "trainer_worker": WORKER}
ALL = [(program, flag) for program, table in TABLES.items() for flag in table.values()]


@functools.cache
def accepted(program: str) -> frozenset[str]:
    done = subprocess.run(
        [sys.executable, "-m", PROGRAMS[program], "--helpfull"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    names = frozenset(re.findall(r"^\s+--(?:\[no\])?([a-z_0-9]+):", done.stdout, re.MULTILINE))
    assert names, done.stderr
    return names


@pytest.mark.parametrize(("program", "flag"), ALL)
def test_the_program_accepts_the_flag(program: str, flag: str) -> None:
    if flag in accepted(program):
        return
    if flag in PENDING[program]:
        pytest.skip(f"{program} has no --{flag} yet")
    pytest.fail(f"{program} does not accept --{flag}: correct orchestrator/recipes/flagnames.py")


@pytest.mark.parametrize("recipe", SHIPPED)
def test_no_flag_is_spelt_outside_the_table(recipe: str) -> None:
    settings = shipped(recipe)
    both = launch(settings, site_of(settings))
    for program in (both.orchestrator, both.worker):
        name, *words = program.argv
        known = set(TABLES[name].values())
        used = [word.removeprefix("--").partition("=")[0] for word in words]
        assert {flag if flag in known else flag.removeprefix("no") for flag in used} <= known
        assert len(used) == len(set(used)), "a flag is rendered twice"


def _parsed(program: Program) -> subprocess.CompletedProcess[str]:
    """The program's own parser over the command line, without running anything."""
    name, *words = program.argv
    missing = PENDING[name] - accepted(name)
    unknown = {f"--{prefix}{flag}" for flag in missing for prefix in ("", "no")}
    known = [word for word in words if word.partition("=")[0] not in unknown]
    command = [sys.executable, "-m", PROGRAMS[name], *known, "--only_check_args"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("recipe", SHIPPED)
def test_the_programs_parse_what_is_rendered(recipe: str) -> None:
    """Values, too: a switch that is spelt wrongly or a number out of range would be refused."""
    settings = shipped(recipe)
    both = launch(settings, site_of(settings))
    for program in (both.orchestrator, both.worker):
        done = _parsed(program)
        assert done.returncode == 0, done.stderr


def test_the_programs_refuse_a_value_that_is_wrong() -> None:
    """So that the test above can fail."""
    settings = demo()
    both = launch(settings, site_of(settings))
    broken = Program(
        argv=(*both.worker.argv, "--logps_sharded_head=locall"),
        environment=both.worker.environment,
    )
    done = _parsed(broken)
    assert done.returncode != 0
    assert "logps_sharded_head" in done.stdout + done.stderr


_TAKES = """
import sys
from absl import flags
from orchestrator import flags as ours
from orchestrator.operation import flags as operation
flags.FLAGS(sys.argv)
ours.config_from_flags({})
operation.operation_from_flags(trace_dir=None, result_file=None)
"""


@pytest.mark.parametrize("recipe", SHIPPED)
def test_the_orchestrator_takes_the_rendered_flags_together(recipe: str, tmp_path: Path) -> None:
    """Flags that exist may still contradict each other."""
    settings = shipped(recipe)
    program = launch(settings, site_of(settings)).orchestrator
    folder = tmp_path / "prestage"
    folder.mkdir()
    words = [
        word.replace("/var/lib/prestage", str(folder)).replace("/run/prestage", str(folder))
        for word in program.argv
    ]
    (folder / "rollouts.parquet").touch()
    done = subprocess.run(
        [sys.executable, "-c", _TAKES, *words[1:]], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
