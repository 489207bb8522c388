"""The bench runs as a command and reports every head on every mesh it was given."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_worker.logprob_head.bench import Shape, compare


def test_sizes_that_could_not_be_told_apart_are_refused() -> None:
    shape = Shape(rows=4, tokens=64, vocab=256)
    with pytest.raises(ValueError, match="give another --vocab"):
        compare({"fsdp": 2, "context": 2}, shape, repeats=1)


def test_the_bench_reports_all_heads(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    shape = ["--rows=4", "--tokens=64", "--features=32", "--vocab=96", "--chunk_tokens=16"]
    command = [sys.executable, "-m", "trainer_worker.logprob_head.bench", *shape]
    done = subprocess.run(
        [*command, "--mesh=context=2,fsdp=2", "--repeats=1", f"--json={path}"],
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(path.read_text())
    assert done.returncode == (1 if report["missed"] else 0), done.stderr
    rows = report["meshes"]["context=2,fsdp=2"]
    assert [row["mode"] for row in rows] == ["off", "local", "vocab"]
    assert [row["table_gathers"] for row in rows] == [5, 1, 1]
    assert [row["flops_ratio"] for row in rows] == [1.0, 0.5, 0.5]
    assert "| local |" in done.stdout
