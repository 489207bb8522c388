"""Runs this folder on 8 virtual CPU devices without deciding the device count of other tests.

A process that was started with 8 or more forced host devices runs the tests itself; any other
hands the whole selection to one child process and replays its reports.
"""

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
REPORTS = "LOGPROB_HEAD_TEST_REPORTS"
FOLDER = Path(__file__).parent
_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_child_reports = pytest.StashKey[dict[str, list[dict[str, object]]]]()


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


def _is_ours(item: pytest.Item) -> bool:
    return FOLDER in item.path.parents


def _run_child(session: pytest.Session) -> dict[str, list[dict[str, object]]]:
    """One child process over every selected test of this folder; its reports by node id."""
    nodes = [item.nodeid for item in session.items if _is_ours(item)]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a parent waits for the whole child, which has its own timeouts."""
    if not _asks_for_devices():
        for item in filter(_is_ours, items):
            item.add_marker(pytest.mark.timeout(1200))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if not _is_ours(item) or _has_devices():
        return None
    stash = item.session.stash
    if _child_reports not in stash:
        stash[_child_reports] = _run_child(item.session)
    hooks = item.ihook
    hooks.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for data in stash[_child_reports][item.nodeid]:
        report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
        hooks.pytest_runtest_logreport(report=report)
    hooks.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    path = os.environ.get(REPORTS)
    if path and _is_ours(item):
        data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
        with Path(path).open("a") as file:
            file.write(json.dumps(data, default=str) + "\n")
    return report
