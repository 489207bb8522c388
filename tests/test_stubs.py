"""The checked-in stubs are what the protos generate, and say which runtimes they accept."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.generate_stubs import PROTOS, generate


def test_checked_in_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    written = generate(tmp_path)
    assert written, "no stub was generated"
    for path in written:
        assert (PROTOS / path).read_bytes() == (tmp_path / path).read_bytes(), (
            f"protos/{path} is stale: run `make protos`"
        )


def test_the_dependency_range_is_what_the_stubs_accept() -> None:
    project = tomllib.loads((PROTOS.parent / "pyproject.toml").read_text())["project"]
    gencode = "6.31.1"
    stubs = sorted(PROTOS.rglob("*_pb2.py"))
    assert stubs
    for stub in stubs:
        assert f"# Protobuf Python Version: {gencode}" in stub.read_text(), stub
    assert f"protobuf>={gencode},<8" in project["dependencies"]
    assert "grpcio>=1.75.1,<2" in project["dependencies"]
