"""Generates the protobuf stubs. `python -m tests.generate_stubs [FOLDER]`; default: in place."""

from __future__ import annotations

import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

PROTOS = Path(__file__).parent.parent / "protos"


def generate(target: Path) -> list[Path]:
    """Write all stubs below `target`; returns their paths relative to it."""
    sources = sorted(PROTOS.rglob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    arguments = [
        "protoc",
        f"-I{PROTOS}",
        f"-I{well_known}",
        f"--python_out={target}",
        f"--pyi_out={target}",
        f"--grpc_python_out={target}",
        f"--plugin=protoc-gen-mypy_grpc={Path(sys.executable).parent / 'protoc-gen-mypy_grpc'}",
        f"--mypy_grpc_out=quiet:{target}",
        *(str(source) for source in sources),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    return [path.relative_to(target) for path in sorted(target.rglob("*_pb2*.py*"))]


if __name__ == "__main__":
    for written in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTOS):
        print(written)
