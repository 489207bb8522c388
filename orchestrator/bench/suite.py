"""`orchestrator bench all`: the quick benches, one after the other, and one line on each.

Runs each with small sizes: minutes on 2 cores. A missed promise is reported and does not stop it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_TIMEOUT_S = 180.0


def parts(out: Path) -> dict[str, list[str]]:
    """Each bench's command line."""
    return {
        "planes": ["--mib=256", "--reps=3", f"--json={out}/planes.json"],
        "packing": ["--trajectories=256", f"--json={out}/packing.json"],
        "latency": [f"--out={out}/latency"],
        "trainer": [f"--out={out}/trainer"],
        "rig": [f"--out={out}/rig"],
        "payload": ["--steps=3", f"--out={out}/payload"],
        "boundary": ["--boundaries=4", f"--out={out}/boundary"],
    }


def main(argv: Sequence[str]) -> int:
    """0: all ran and met their promises. 1: one missed, failed or ran out of time."""
    parser = argparse.ArgumentParser(prog="orchestrator bench all", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    out: Path = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    failed = False
    for name, flags in parts(out).items():
        print(f"== {name} ==", flush=True)
        started_s = time.monotonic()
        command = [sys.executable, "-m", "orchestrator.main", "bench", name, *flags]
        try:
            code = subprocess.run(command, check=False, timeout=_TIMEOUT_S).returncode
            outcome = "ok" if code == 0 else f"MISS or failure (exit {code})"
        except subprocess.TimeoutExpired:
            code, outcome = 1, f"FAIL: not done in {_TIMEOUT_S:g} s"
        failed = failed or code != 0
        lines.append(f"{name:<10}{time.monotonic() - started_s:>7.0f} s  {outcome}")
    print("== summary ==")
    print("\n".join(lines))
    return 1 if failed else 0
