"""Runs a folder of tests on 8 virtual CPU devices without deciding the device count of others.

A process that was started with 8 or more forced host devices runs the tests itself; any other
hands the whole selection to one child process and replays its reports. A folder's conftest makes
one `EightDevices` and takes its hooks as its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

DEVICES = 8
REPORTS = "EIGHT_DEVICES_TEST_REPORTS"
_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def _asks_for_devices() -> bool:
    counts = _FLAG.findall(os.environ.get("XLA_FLAGS", ""))
    return bool(counts) and int(counts[-1]) >= DEVICES


@cache
def _has_devices() -> bool:
    """Whether jax in this process has the devices: the flag may have come after it started."""
    if not _asks_for_devices():
        return False
    import jax

    return len(jax.devices("cpu")) >= DEVICES


class EightDevices:
    """The hooks of one folder's conftest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reports: dict[str, list[dict[str, object]]] | None = None

    def _is_ours(self, item: pytest.Item) -> bool:
        return self._folder in item.path.parents

    def _run_child(self, session: pytest.Session) -> dict[str, list[dict[str, object]]]:
        """One child process over every selected test of this folder; its reports by node id."""
        nodes = [item.nodeid for item in session.items if self._is_ours(item)]
        flags = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "reports.jsonl"
            env = {**os.environ, "XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"}
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *nodes],
                cwd=session.config.rootpath,
                env={**env, REPORTS: str(path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            lines = path.read_text().splitlines() if path.exists() else []
        reports: dict[str, list[dict[str, object]]] = {}
        for line in lines:
            report = json.loads(line)
            reports.setdefault(report["nodeid"], []).append(report)
        missing = [node for node in nodes if node not in reports]
        if missing:
            raise RuntimeError(f"the child process reported nothing for {missing}:\n{done.stdout}")
        return reports

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """The first test of a parent waits for the whole child, which has its own timeouts."""
        if not _asks_for_devices():
            for item in filter(self._is_ours, items):
                item.add_marker(pytest.mark.timeout(1200))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if not self._is_ours(item) or _has_devices():
            return None
        if self._reports is None:
            self._reports = self._run_child(item.session)
        hooks = item.ihook
        hooks.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for data in self._reports[item.nodeid]:
            report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
            hooks.pytest_runtest_logreport(report=report)
        hooks.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        report = yield
        path = os.environ.get(REPORTS)
        if path and self._is_ours(item):
            data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
            with Path(path).open("a") as file:
                file.write(json.dumps(data, default=str) + "\n")
        return report
