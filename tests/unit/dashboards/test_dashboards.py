# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What can be checked of dashboards and rules without a Prometheus: tests/e2e asks one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from agent.exporters.prometheus.catalog import CATALOG
from dashboards.container import CONTAINER
from dashboards.generated import FOLDER, PAGES, RULES, files
from fleet.exporter import Metrics

GROUPS = [group for name in RULES for group in yaml.safe_load((FOLDER / f"rules/{name}.yaml").read_text())["groups"]]
EVERY_RULE = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in EVERY_RULE if "alert" in rule}
RECORDS = {rule["record"]: rule for rule in EVERY_RULE if "record" in rule}
CASES = [
    check
    for path in sorted((FOLDER / "rules/tests").glob("*.yaml"))
    for test in yaml.safe_load(path.read_text())["tests"]
    for check in test["promql_expr_test"]
]
ENDINGS = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
FLEETS = {f"{family.name}{ending}" for family in Metrics().families() for ending in ENDINGS[family.type]}
OURS = re.compile(r"(?<![\w:])(?:container:)?gpuwarden_\w+(?::\w+)?")

pages = pytest.mark.parametrize("uid", [page.uid for page in PAGES])


def page(uid: str) -> dict[str, Any]:
    """As it is committed."""
    found: dict[str, Any] = json.loads((FOLDER / f"grafana/{uid}.json").read_text())
    return found


def panels(uid: str) -> list[dict[str, Any]]:
    """Those that show something: no headings."""
    return [panel for panel in page(uid)["panels"] if panel["type"] != "row"]


def expressions(uid: str) -> Iterator[str]:
    for panel in panels(uid):
        yield from (target["expr"] for target in panel["targets"])
    yield from (variable["definition"] for variable in page(uid)["templating"]["list"] if "definition" in variable)


def test_the_committed_files_are_the_generated_ones() -> None:
    """`make dashboards` rewrites them."""
    committed = [*FOLDER.glob("grafana/*"), *FOLDER.glob("kubernetes/rules.yaml")]
    assert {str(path.relative_to(FOLDER)): path.read_text() for path in committed} == files()


@pages
def test_a_committed_dashboard_is_what_the_types_say_it_may_be(uid: str) -> None:
    register_default_plugins()
    read = Dashboard.from_json(page(uid))
    assert json.loads(JSONEncoder().encode(read)) == page(uid)


@pages
def test_no_expression_asks_for_a_series_without_an_exporter(uid: str) -> None:
    known = {metric.name for metric in CATALOG} | RECORDS.keys() | FLEETS
    assert {name for expr in expressions(uid) for name in OURS.findall(expr)} <= known


def test_no_rule_asks_for_a_series_without_an_exporter() -> None:
    known = {metric.name for metric in CATALOG} | RECORDS.keys() | FLEETS
    assert {name for rule in EVERY_RULE for name in OURS.findall(rule["expr"])} <= known


@pages
def test_every_panel_states_what_it_shows_in_which_unit(uid: str) -> None:
    for panel in panels(uid):
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        settings = panel["fieldConfig"]
        units = {settings["defaults"].get("unit"), *(_units(override) for override in settings["overrides"])} - {None}
        assert units or settings["defaults"]["mappings"], panel["title"]


def _units(override: dict[str, Any]) -> str | None:
    return next((one["value"] for one in override["properties"] if one["id"] == "unit"), None)


@pages
def test_every_line_of_a_graph_has_a_name_of_its_own(uid: str) -> None:
    for panel in panels(uid):
        if panel["type"] == "timeseries":
            legends = [target["legendFormat"] for target in panel["targets"]]
            assert all(legends), panel["title"]
            assert len(set(legends)) == len(legends), panel["title"]


@pages
def test_panels_fill_their_rows_and_do_not_overlap(uid: str) -> None:
    places = [panel["gridPos"] for panel in page(uid)["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below
    for y in {place["y"] for place in places}:
        assert sum(place["w"] for place in places if place["y"] == y) == 24
    numbers = [panel["id"] for panel in panels(uid)]
    assert len(set(numbers)) == len(numbers)


@pages
def test_links_lead_to_dashboards_that_have_what_they_choose(uid: str) -> None:
    choices = {one.uid: {choice.label for choice in one.choices} for one in PAGES}
    for found in re.findall(r"/d/([\w-]+)\?([^\"]*)", json.dumps(page(uid))):
        assert set(re.findall(r"var-(\w+)=", found[1])) <= choices[found[0]]


@pages
def test_a_row_of_containers_is_one_container_and_opens_that_one(uid: str) -> None:
    for table in (panel for panel in panels(uid) if panel["type"] == "table"):
        by = {label for target in table["targets"] for label in re.findall(r"^sum by \(([^)]*)\)", target["expr"])}
        (columns,) = (set(labels.split(", ")) for labels in by)
        for link in re.findall(r"/d/gpuwarden-container\?[^\"]*", json.dumps(table)):
            chosen = dict(re.findall(r"var-(\w+)=\${__data\.fields\.(\w+):percentencode}", link))
            assert set(chosen) == {choice.label for choice in CONTAINER.choices}
            assert all(label == column for label, column in chosen.items())
            assert columns == {*chosen.values(), "id"}


@pages
def test_every_choice_is_used_and_nothing_else_is(uid: str) -> None:
    own = {variable["name"] for variable in page(uid)["templating"]["list"]} - {"datasource"}
    used = {name for expr in expressions(uid) for name in re.findall(r"\$([a-z]\w*)", expr)}
    assert used == own


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_a_severity_a_summary_and_a_description(name: str) -> None:
    rule = ALERTS[name]
    assert name.startswith("GPUWarden")
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"].endswith(".")


def test_every_alert_is_in_the_documentation_with_its_severity() -> None:
    page = (FOLDER.parent / "docs/dashboards.md").read_text()
    listed = dict(re.findall(r"^\| (GPUWarden\w+) \| (\w+) \|", page, re.MULTILINE))
    assert listed == {name: rule["labels"]["severity"] for name, rule in ALERTS.items()}


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(name: str) -> None:
    cases = [case["exp_samples"] for case in CASES if f'ALERTS{{alertname="{name}"' in case["expr"]]
    series = len({json.dumps(samples) for samples in cases})
    assert any(cases), "it never fires"
    assert series > 1, "it always fires"


@pytest.mark.parametrize("name", RECORDS)
def test_every_recording_rule_has_a_case_with_a_figure_and_one_without(name: str) -> None:
    shown = [case["exp_samples"] for case in CASES if re.match(rf"{name}($|{{)", case["expr"])]
    assert any(shown)
    assert all("idle" not in sample["labels"] for samples in shown for sample in samples)
    assert any("container=" not in case["expr"] or "idle" in case["expr"] for case in CASES if name in case["expr"])
