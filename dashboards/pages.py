# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A dashboard: what it is called, what can be chosen on it, and its panels row by row.

`uid` is its address and never changes: other dashboards, alerts and bookmarks point to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import dashboard as models

from dashboards.panels import SOURCE, Panel

TAG = "gpuwarden"


@dataclass(frozen=True, slots=True)
class Choice:
    """A label whose values can be chosen; `of` is the series that has them."""

    label: str
    says: str
    of: str
    several: bool = True  # one or all of them too


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading, from left to right."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Page:
    """What Grafana shows at /d/UID."""

    uid: str
    title: str
    says: str
    choices: Sequence[Choice]
    rows: Sequence[Row]

    def build(self) -> models.Dashboard:
        """As Grafana reads it. Panels are numbered, for links to one of them."""
        page = (
            builders.Dashboard(f"GPU Warden / {self.title}")
            .uid(self.uid)
            .description(self.says)
            .tags([TAG])
            .time("now-1h", "now")
            .refresh("30s")
            .timezone("browser")
            .tooltip(models.DashboardCursorSync.CROSSHAIR)
            .link(_others())
            .with_variable(builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        )
        for choice in self.choices:
            page.with_variable(_variable(choice))
        number = 0
        for row in self.rows:
            page.with_row(builders.Row(row.title))
            for panel in row.panels:
                number += 1
                page.with_panel(panel.id(number))
        return page.build()


def _others() -> builders.DashboardLink:
    """The other dashboards, for the same time and choices."""
    return (
        builders.DashboardLink("GPU Warden")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )


def _variable(choice: Choice) -> builders.QueryVariable:
    query = f"label_values({choice.of}, {choice.label})"
    variable = (
        builders.QueryVariable(choice.label)
        .label(choice.says)
        .query({"query": query, "refId": choice.label})
        .definition(query)
        .datasource(SOURCE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )
    if choice.several:
        everything = models.VariableOption(selected=True, text=["All"], value=["$__all"])
        variable.multi(True).include_all(True).all_value(".*").current(everything)
    return variable
