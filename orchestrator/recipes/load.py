"""Reads a recipe file: a flat YAML mapping whose scalars stay text.

`values.parse_value` is the only place that gives text a type, so that `on`, 1e-3 or 12:30 mean the
same in a recipe and in --set. Refuses tags, anchors with merges, lists and a key that stands twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from orchestrator.recipes.values import RecipeError

MAX_RECIPE_BYTES: Final = 1 << 20
_SCALARS: Final = frozenset({"bool", "float", "int", "null", "str", "timestamp"})


def read_recipe(path: Path) -> Mapping[str, str]:
    """Key to text. A nested mapping of scalars becomes `A=1 B=2`. Raises `RecipeError`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecipeError(f"--recipe {path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_RECIPE_BYTES:
        raise RecipeError(f"--recipe {path} has {len(data)} bytes: at most {MAX_RECIPE_BYTES}")
    try:
        return parse_recipe(data.decode(), str(path))
    except UnicodeDecodeError as error:
        raise RecipeError(f"--recipe {path} is not UTF-8 text: {error}") from error


def parse_recipe(text: str, where: str) -> Mapping[str, str]:
    """Raises `RecipeError`."""
    try:
        import yaml
    except ImportError as error:
        raise RecipeError("recipes need PyYAML: pip install 'prestage[deploy]'") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"{where} is no YAML: {error}") from error
    if not isinstance(root, yaml.MappingNode):
        raise RecipeError(f"{where} is no mapping of keys to values")
    return {
        name: _scalars(where, name, node) if isinstance(node, yaml.MappingNode) else scalar
        for name, node, scalar in _entries(where, root)
    }


def _entries(where: str, mapping: object) -> list[tuple[str, object, str]]:
    """Name, value node and, for a scalar, its text. Works on nodes: nothing is constructed."""
    import yaml

    assert isinstance(mapping, yaml.MappingNode)
    seen: dict[str, tuple[str, object, str]] = {}
    for key, value in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            raise RecipeError(f"{where}: line {key.start_mark.line + 1}: a key is a plain name")
        name = str(key.value)
        line = key.start_mark.line + 1
        if name in seen:
            raise RecipeError(f"{where}: line {line}: {name} stands twice: keep one")
        if isinstance(value, yaml.ScalarNode):
            if value.tag.removeprefix("tag:yaml.org,2002:") not in _SCALARS:
                raise RecipeError(
                    f"{where}: line {line}: {name} has the tag {value.tag}: remove it"
                )
            text = str(value.value)
        elif isinstance(value, yaml.MappingNode):
            text = ""
        else:
            raise RecipeError(f"{where}: line {line}: {name} is a list: write one value")
        seen[name] = (name, value, text)
    return list(seen.values())


def _scalars(where: str, name: str, node: object) -> str:
    import yaml

    words = []
    for inner, value, text in _entries(f"{where}: {name}", node):
        if not isinstance(value, yaml.ScalarNode):
            raise RecipeError(f"{where}: {name}.{inner} is no single value")
        if any(letter.isspace() for letter in text):
            raise RecipeError(f"{where}: {name}.{inner} is {text!r}: it holds no white space")
        words.append(f"{inner}={text}")
    return " ".join(words)
