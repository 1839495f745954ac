# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The kinds of panels there are, each with its unit, its legend and a sentence that says what is seen.

A panel asks Prometheus alone; what is unknown is a gap, never 0. Legends name a container by `who`, see `named`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.models import common as commons
from grafana_foundation_sdk.models import dashboard, units
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

Panel = timeseries.Panel | stat.Panel | statetimeline.Panel | table.Panel

SOURCE = commons.DataSourceRef(type_val="prometheus", uid="${datasource}")
WHOLE_WIDTH = 24
RATIO, BYTES, BYTES_PER_SECOND = units.PercentUnit, units.BytesIEC, units.BytesPerSecondIEC
SECONDS, COUNT, PER_SECOND = units.Seconds, units.Short, units.CountsPerSecond
WATTS, CELSIUS, HERTZ, SINCE = units.Watt, units.Celsius, units.Hertz, units.DateTimeFromNow

GOOD, WARN, BAD = "green", "orange", "red"
BELOW = -math.inf

Steps = tuple[tuple[float, str], ...]
"""From which value on which colour; below the first one it is GOOD, unless that one is from `BELOW` on."""


@dataclass(frozen=True, slots=True)
class Query:
    """An expression, and what its series are called."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column: its heading, what it shows for each row's labels, and how."""

    heading: str
    expr: str
    unit: str = COUNT
    steps: Steps = ()


def named(expr: str) -> str:
    """The same series with a label `who`: namespace/pod/container/id, without what is empty at the ends."""
    joined = f'label_join({expr}, "who", "/", "namespace", "pod", "container", "id")'
    return f'label_replace({joined}, "who", "$1", "who", "/*(.*?)/*")'


def placed(expr: str) -> str:
    """The same series with a label `part` where the device is a MIG instance, for they share their GPU's number."""
    return f'label_replace({expr}, "part", " MIG …$1", "UUID", "MIG-.*(.{{8}})")'


def graph(
    title: str,
    says: str,
    unit: str,
    *queries: Query,
    stacked: bool = False,
    top: float | None = None,
    lowest: float | None = 0,
    steps: Steps = (),
    width: int = 12,
) -> timeseries.Panel:
    """Lines over time. `stacked` ones add up to something; `steps` are drawn as dashed lines.

    `lowest`: of the axis; None: as the values are.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(says)
        .datasource(SOURCE)
        .unit(unit)
        .span(width)
        .height(8)
        .fill_opacity(30 if stacked else 8)
        .show_points(commons.VisibilityMode.NEVER)
        .legend(_legend())
        .tooltip(common.VizTooltipOptions().mode(commons.TooltipDisplayMode.MULTI).sort(commons.SortOrder.DESCENDING))
    )
    if lowest is not None:
        panel.min(lowest)
    if stacked:
        panel.stacking(common.StackingConfig().mode(commons.StackingMode.NORMAL))
    if top is not None:
        panel.axis_soft_max(top)
    if steps:
        panel.thresholds(_thresholds(steps))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(commons.GraphThresholdsStyleMode.DASHED))
    for number, query in enumerate(queries):
        panel.with_target(_query(query, number).range())
    return panel


def number(title: str, says: str, unit: str, expr: str, *, steps: Steps = (), width: int = 4) -> stat.Panel:
    """One figure, as it is now, over the line of how it came to be."""
    return (
        stat.Panel()
        .title(title)
        .description(says)
        .datasource(SOURCE)
        .unit(unit)
        .span(width)
        .height(4)
        .thresholds(_thresholds(steps))
        .color_mode(commons.BigValueColorMode.VALUE)
        .graph_mode(commons.BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_query(Query(expr), 0).range())
    )


def states(title: str, says: str, query: Query, words: Mapping[float, tuple[str, str]], width: int = 12) -> Panel:
    """Which state when. `words`: value → (what it is called, its colour)."""
    mapping = dashboard.ValueMap(
        options={
            f"{value:g}": dashboard.ValueMappingResult(text=text, color=colour, index=index)
            for index, (value, (text, colour)) in enumerate(words.items())
        }
    )
    return (
        statetimeline.Panel()
        .title(title)
        .description(says)
        .datasource(SOURCE)
        .span(width)
        .height(8)
        .mappings([mapping])
        .legend(common.VizLegendOptions().show_legend(False))
        .merge_values(True)
        .show_value(commons.VisibilityMode.AUTO)
        .with_target(_query(query, 0).range())
    )


def rows(title: str, says: str, labels: Sequence[str], *columns: Column, link: tuple[str, str] | None = None) -> Panel:
    """A table: a row for each set of `labels`, a column for each expression (there must be two at least).

    `link`: a label, and the address of the dashboard that its value opens.
    """
    values = [f"Value #{_letter(number)}" for number in range(len(columns))]
    order = [*labels, *values]
    panel = (
        table.Panel()
        .title(title)
        .description(says)
        .datasource(SOURCE)
        .span(WHOLE_WIDTH)
        .height(9)
        .filterable(True)
        .with_transformation(dashboard.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(
            dashboard.DataTransformerConfig(
                id_val="organize",
                options={
                    "excludeByName": {"Time": True},
                    "indexByName": {name: index for index, name in enumerate(order)},
                    "renameByName": {value: column.heading for value, column in zip(values, columns, strict=True)},
                },
            )
        )
    )
    for number, column in enumerate(columns):
        shown = Query(f"sum by ({', '.join(labels)}) ({column.expr})")
        panel.with_target(_query(shown, number).instant().format(PromQueryFormat.TABLE))
        panel.override_by_name(column.heading, _column(column))
    if link is not None:
        label, url = link
        opens = {"title": "Open", "url": url}
        panel.override_by_name(label, [dashboard.DynamicConfigValue(id_val="links", value=[opens])])
    return panel


def _column(column: Column) -> list[dashboard.DynamicConfigValue]:
    unit = dashboard.DynamicConfigValue(id_val="unit", value=column.unit)
    if not column.steps:
        return [unit]
    return [
        unit,
        dashboard.DynamicConfigValue(id_val="thresholds", value=_thresholds(column.steps).build().to_json()),
        dashboard.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"}),
    ]


def _query(query: Query, number: int) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(_letter(number))


def _letter(number: int) -> str:
    return chr(ord("A") + number)


def _legend() -> common.VizLegendOptions:
    return (
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(commons.LegendDisplayMode.TABLE)
        .placement(commons.LegendPlacement.BOTTOM)
        .calcs(["lastNotNull", "max"])
    )


def _thresholds(steps: Steps) -> dashboards.ThresholdsConfig:
    if not steps or steps[0][0] != BELOW:
        steps = ((BELOW, GOOD), *steps)
    every = [dashboard.Threshold(None if value == BELOW else value, colour) for value, colour in steps]
    return dashboards.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(every)
