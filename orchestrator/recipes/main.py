"""`orchestrator render`: a recipe to flags, environment and manifests.

Writes only under --out, and only after everything has been rendered.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.recipes.keys import KEYS
from orchestrator.recipes.load import read_recipe
from orchestrator.recipes.render import Form, dry_run_text, files, keys_page, settings_text
from orchestrator.recipes.resolve import resolve
from orchestrator.recipes.values import RecipeError


def _caller(words: Sequence[str]) -> Mapping[str, str]:
    """Raises `RecipeError`."""
    given: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise RecipeError(f"--set {word!r}: write --set KEY=VALUE")
        if name in given:
            raise RecipeError(f"--set {name} is given twice: keep one")
        given[name] = text
    return given


def _unread(environment: Mapping[str, str]) -> list[str]:
    """Exported variables that a person may think are read."""
    return [name for name in KEYS if name.isupper() and name in environment]


def _write(out: Path, rendered: Mapping[str, str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, text in rendered.items():
        (out / name).write_text(text)
        print(out / name)  # noqa: T201


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="orchestrator render",
        description="Renders a recipe: flags, environment, Kubernetes JobSet, compose or systemd.",
    )
    parser.add_argument("--recipe", type=Path, help="the recipe, a YAML file")
    parser.add_argument(
        "--form", choices=[form.value for form in Form], default="jobset", help="what to render"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="overrides the recipe"
    )
    parser.add_argument("--dry_run", action="store_true", help="print everything, write nothing")
    parser.add_argument("--out", type=Path, default=Path("rendered"), help="folder to write to")
    parser.add_argument("--keys", action="store_true", help="print the page of all keys")
    arguments = parser.parse_args(argv)
    if arguments.keys:
        print(keys_page(), end="")  # noqa: T201
        return 0
    if arguments.recipe is None:
        print("orchestrator render: --recipe is not set: give a recipe file", file=sys.stderr)  # noqa: T201
        return 2
    form = Form(arguments.form)
    try:
        settings = resolve(read_recipe(arguments.recipe), _caller(arguments.set))
        for name in _unread(os.environ):
            print(  # noqa: T201
                f"note: {name} in the environment is not read: use --set {name}=...",
                file=sys.stderr,
            )
        if arguments.dry_run:
            print(dry_run_text(settings, form), end="")  # noqa: T201
            return 0
        rendered = files(settings, form)
    except RecipeError as error:
        print(f"orchestrator render: {error}", file=sys.stderr)  # noqa: T201
        return 2
    print(settings_text(settings), end="")  # noqa: T201
    try:
        _write(arguments.out, rendered)
    except OSError as error:
        print(f"orchestrator render: --out {arguments.out}: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0
