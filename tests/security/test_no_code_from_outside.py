"""Nothing that ships turns bytes into code or objects: no pickle, no eval, no yaml.load, no shell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = [
    path
    for folder in ("protos/prestage", "orchestrator", "trainer_worker")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
MODULES = frozenset(
    {
        "_pickle",
        "cPickle",
        "cloudpickle",
        "dill",
        "joblib",
        "jsonpickle",
        "marshal",
        "multiprocessing.connection",
        "multiprocessing.managers",
        "pickle",
        "pickle5",
        "shelve",
    }
)
BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})
YAML = frozenset({"load", "load_all", "full_load", "full_load_all", "unsafe_load", "Loader"})
YAML |= {"unsafe_load_all", "UnsafeLoader", "FullLoader", "CLoader"}


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


def _keyword(call: ast.Call, name: str) -> object:
    for item in call.keywords:
        if item.arg == name:
            return item.value.value if isinstance(item.value, ast.Constant) else "something"
    return None


def found(tree: ast.AST) -> Iterator[str]:
    """What must not be there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            yield from names & MODULES
            if node.module == "yaml":
                yield from (alias.name for alias in node.names if alias.name in YAML)
        elif isinstance(node, ast.Attribute) and _dotted(node.value) == "yaml":
            if node.attr in YAML:
                yield f"yaml.{node.attr}"
        elif isinstance(node, ast.Call):
            name = _dotted(node.func)
            if name in BUILTINS or name in ("os.system", "os.popen"):
                yield name
            elif name in ("np.load", "numpy.load") and _keyword(node, "allow_pickle") is not False:
                yield f"{name} without allow_pickle=False"
            elif name.endswith((".load_module", "torch.load")):
                yield name
            if _keyword(node, "shell") not in (None, False):
                yield f"{name} with a shell"
            if _keyword(node, "allow_pickle") not in (None, False):
                yield f"{name} with allow_pickle"


def test_r44_nothing_that_ships_turns_bytes_into_code() -> None:
    assert len(SHIPPED) > 100
    for path in SHIPPED:
        tree = ast.parse(path.read_text(), str(path))
        assert not list(found(tree)), path.relative_to(ROOT)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import pickle as p, json",
        "from pickle import loads",
        "from multiprocessing import managers",
        "import cloudpickle",
        "import yaml\nyaml.load(x)",
        "import yaml\ny = yaml.UnsafeLoader",
        "from yaml import unsafe_load",
        "eval(x)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "np.savez(path, allow_pickle=True)",
        "subprocess.run(x, shell=True)",
        "subprocess.run(x, shell=y)",
        "os.system(x)",
    ],
)
def test_it_would_be_found(code: str) -> None:
    assert list(found(ast.parse(code)))


def test_what_is_harmless_is_not() -> None:
    code = "re.compile(x)\nyaml.safe_load(x)\nnp.load(p, allow_pickle=False)\njax.eval_shape(f)"
    assert not list(found(ast.parse(code)))
