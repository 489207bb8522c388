"""Everything that `render --dry_run` prints for the shipped recipes, frozen.

Read the difference before rewriting: `pytest tests/deploy/test_golden.py --rewrite-golden=REASON`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.recipes.main import main
from tests.deploy.recipes import IMAGES, RECIPES, ROOT, SHIPPED

GOLDEN = Path(__file__).parent / "golden"
CASES = [
    *((name, "jobset") for name in SHIPPED),
    ("cpu", "compose"),
    ("cpu", "systemd"),
]
SET = [f"--set={name}={image}" for name, image in IMAGES.items()]


@pytest.mark.parametrize(("recipe", "form"), CASES)
def test_dry_run(
    recipe: str, form: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    path = GOLDEN / f"{recipe}.{form}.txt"
    argv = [f"--recipe={RECIPES / recipe}.yaml", f"--form={form}", "--dry_run", *SET]
    assert main(argv) == 0
    text = capsys.readouterr().out
    if request.config.getoption("--rewrite-golden"):
        path.write_text(text)
    assert path.exists(), f"{path} is missing: --rewrite-golden=REASON makes it"
    assert text == path.read_text()


def test_every_shipped_recipe_is_tested() -> None:
    assert {path.stem for path in RECIPES.glob("*")} == set(SHIPPED)
    assert {path.stem for path in GOLDEN.glob("*")} == {f"{name}.{form}" for name, form in CASES}


def test_a_dry_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([f"--recipe={RECIPES / 'cpu'}.yaml", "--dry_run", *SET]) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["jobset", "compose", "systemd"])
def test_what_is_written_is_what_the_dry_run_showed(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [f"--recipe={RECIPES / 'cpu'}.yaml", f"--form={form}", *SET]
    assert main([*argv, "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert main([*argv, f"--out={tmp_path / 'new'}"]) == 0
    written = list((tmp_path / "new").iterdir())
    assert written
    assert all(f"# ---- {path.name}\n{path.read_text()}" in shown for path in written)


def test_a_refused_recipe_writes_nothing_and_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [f"--recipe={RECIPES / 'cpu'}.yaml", *SET, f"--out={tmp_path / 'new'}"]
    assert main([*argv, "--set=STAGE_NEXT_MICROBATCH=maybe"]) == 2
    assert "STAGE_NEXT_MICROBATCH" in capsys.readouterr().err
    assert main([*argv, "--set", "rows"]) == 2
    assert "write --set KEY=VALUE" in capsys.readouterr().err
    assert main([*argv, "--set=rows=8", "--set=rows=8"]) == 2
    assert "given twice" in capsys.readouterr().err
    assert main(["--recipe=/nowhere.yaml"]) == 2
    assert "/nowhere.yaml cannot be read" in capsys.readouterr().err
    assert main([]) == 2
    assert list(tmp_path.iterdir()) == []


def test_more_than_one_host_has_no_plain_form(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [f"--recipe={RECIPES / 'gbs1024-submission'}.yaml", "--dry_run", *SET]
    for form in ("compose", "systemd"):
        assert main([*argv, f"--form={form}"]) == 2
        assert "is for one host" in capsys.readouterr().err


def test_an_exported_switch_is_named_and_not_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [f"--recipe={RECIPES / 'cpu'}.yaml", "--dry_run", *SET]
    assert main(argv) == 0
    before = capsys.readouterr()
    monkeypatch.setenv("RAGGED_BUFFER_FACTOR", "2.75")
    assert main(argv) == 0
    after = capsys.readouterr()
    assert after.out == before.out
    assert "RAGGED_BUFFER_FACTOR in the environment is not read" in after.err


def test_the_page_of_keys_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--keys"]) == 0
    page = ROOT / "docs" / "recipe-keys.md"
    assert page.read_text() == capsys.readouterr().out, (
        "docs/recipe-keys.md is stale: orchestrator render --keys > docs/recipe-keys.md"
    )
