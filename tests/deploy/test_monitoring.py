"""Every metric that an alert or a panel names is one that a program exports, with that type."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from prometheus_client.core import Metric

from orchestrator.metrics import OrchestratorMetrics
from tests.deploy.recipes import ROOT
from trainer_worker.front import FrontDoor
from trainer_worker.metrics import WorkerMetrics

PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARD = ROOT / "deploy" / "grafana" / "prestage.json"
LISTED: Mapping[str, dict[str, object]] = {
    str(item["name"]): item for item in json.loads((ROOT / "deploy" / "metrics.json").read_text())
}
OF_HISTOGRAM = ("_bucket", "_sum", "_count")


def families(side: str) -> Iterator[Metric]:
    if side == "orchestrator":
        return iter(OrchestratorMetrics().registry.collect())
    return iter(WorkerMetrics(FrontDoor("").state).registry.collect())


def exported(side: str) -> dict[str, str]:
    """Name to type, as a scrape shows them."""
    return {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in families(side)
    }


def rules() -> list[dict[str, object]]:
    document = yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """(where, expression) of every alert and panel."""
    for rule in rules():
        yield f"alert {rule['alert']}", str(rule["expr"])
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            yield f"panel {panel['title']}", target["expr"]


def named(expression: str) -> set[str]:
    """Metric names in a query: not the label names inside braces or after `by`."""
    bare = re.sub(r"\{[^}]*\}", "", expression)
    return set(re.findall(r"\bprestage_[a-z0-9_]+", bare))


def family_of(name: str) -> str:
    for suffix in OF_HISTOGRAM:
        base = name.removesuffix(suffix)
        if base != name and LISTED.get(base, {}).get("type") == "histogram":
            return base
    return name


QUERIES = list(queries())
USED = sorted({family_of(name) for _, expression in QUERIES for name in named(expression)})


@pytest.mark.parametrize(("where", "expression"), QUERIES)
def test_every_query_names_listed_metrics(where: str, expression: str) -> None:
    names = named(expression)
    assert names or "up{" in expression, where
    for name in names:
        assert family_of(name) in LISTED, f"{where} names {name}, which deploy/metrics.json lacks"


@pytest.mark.parametrize(("where", "expression"), QUERIES)
def test_every_query_treats_a_metric_as_its_type(where: str, expression: str) -> None:
    """A rate of a gauge, or a bare counter's histogram, says nothing."""
    for function in ("rate", "increase"):
        for inside in re.findall(rf"\b{function}\((prestage_[a-z0-9_]+)", expression):
            kind = LISTED[family_of(inside)]["type"]
            assert kind in ("counter", "histogram"), f"{where}: {function}() of a {kind}"
    for name in named(expression):
        histogram = LISTED[family_of(name)]["type"] == "histogram"
        assert histogram == (family_of(name) != name), where


@pytest.mark.parametrize("name", sorted(LISTED))
def test_a_listed_metric_is_exported_with_its_type(name: str) -> None:
    item = LISTED[name]
    found = exported(str(item["side"])).get(name)
    if found is None and item.get("planned"):
        pytest.skip(f"{item['side']} does not export {name} yet")
    assert found == item["type"]


@pytest.mark.parametrize("side", ["orchestrator", "trainer_worker"])
def test_every_exported_metric_is_listed(side: str) -> None:
    replaced = {item["replaces"] for item in LISTED.values() if "replaces" in item}
    missing = set(exported(side)) - set(LISTED) - replaced
    assert not missing, f"add to deploy/metrics.json: {sorted(missing)}"


@pytest.mark.parametrize("name", sorted(LISTED))
def test_names_carry_their_unit(name: str) -> None:
    item = LISTED[name]
    assert re.fullmatch(r"prestage_[a-z0-9_]+", name)
    assert str(item["help"]).endswith(".")
    assert name.endswith("_total") == (item["type"] == "counter")
    base = name.removesuffix("_total")
    if item["unit"] in ("seconds", "bytes"):
        assert base.endswith(f"_{item['unit']}"), name


def test_names_of_the_two_sides_differ() -> None:
    worker = {name for name, item in LISTED.items() if item["side"] == "trainer_worker"}
    assert all(name.startswith("prestage_worker_") for name in worker)


def test_every_alert_says_what_to_do() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        annotations = rule["annotations"]
        assert set(annotations) == {"summary", "action"}, rule["alert"]


def test_every_alert_has_a_test() -> None:
    document = yaml.safe_load((PROMETHEUS / "alerts.test.yaml").read_text())
    assert [item["name"] for item in document["tests"]] == [rule["alert"] for rule in rules()]


@pytest.fixture(name="promtool")
def _promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    return found


def test_alert_rules_pass_promtool(promtool: str) -> None:
    for command, name in (("check", "alerts.yaml"), ("test", "alerts.test.yaml")):
        done = subprocess.run(
            [promtool, command, "rules", str(PROMETHEUS / name)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_alert_tests_can_fail(promtool: str, tmp_path: Path) -> None:
    text = (PROMETHEUS / "alerts.yaml").read_text()
    broken = text.replace("prestage_staging_latched == 1", "prestage_staging_latched == 2", 1)
    assert broken != text
    (tmp_path / "alerts.yaml").write_text(broken)
    shutil.copy(PROMETHEUS / "alerts.test.yaml", tmp_path)
    done = subprocess.run(
        [promtool, "test", "rules", str(tmp_path / "alerts.test.yaml")],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "PrestageStagingLatched" in done.stdout + done.stderr


def test_panel_queries_parse(promtool: str, tmp_path: Path) -> None:
    """As recording rules: promtool checks their syntax."""
    expressions = [
        expression.replace("$__rate_interval", "5m").replace("$run", ".*")
        for where, expression in QUERIES
        if where.startswith("panel")
    ]
    recording = [
        {"record": f"panel:{number}", "expr": text} for number, text in enumerate(expressions)
    ]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recording}]}))
    done = subprocess.run([promtool, "check", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_has_no_overlapping_panels() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids))
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        mine = {
            (at["x"] + column, at["y"] + line)
            for column in range(at["w"])
            for line in range(at["h"])
        }
        assert not mine & cells, panel["title"]
        assert max(column for column, _ in mine) < 24
        cells |= mine
