# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The promises: kept or not, how fast their error budgets burn, and what keeping them costs the offline side.

Burn rates are recorded by rules/recording.yaml; everything else is asked of the agents' own series.
"""

from __future__ import annotations

from dashboards.container import NAMES, OPENS
from dashboards.pages import Choice, Page, Row
from dashboards.panels import (
    BAD,
    BELOW,
    COUNT,
    GOOD,
    PER_SECOND,
    RATIO,
    SECONDS,
    WARN,
    Column,
    Query,
    graph,
    named,
    number,
    rows,
)

NODES = 'instance=~"$instance"'
HERE = 'instance=~"$instance", namespace=~"$namespace", container=~"$container"'
WHO = "{{who}} on {{instance}}"
SPANS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
BURNS = ((1.0, WARN), (6.0, BAD))
LATENCY = f"gpuwarden_container_slo_latency_seconds{{{HERE}}}"
TARGET = f"gpuwarden_container_slo_target_seconds{{{HERE}}}"
SECOND_LATENCY = f"gpuwarden_container_slo_also_latency_seconds{{{HERE}}}"  # of SLOs with two quantiles
SECOND_TARGET = f"gpuwarden_container_slo_also_target_seconds{{{HERE}}}"
SECOND = f'label_replace({SECOND_LATENCY} / {SECOND_TARGET}, "second", "yes", "", "")'
QUANTILE = f"gpuwarden_container_slo_quantile_ratio{{{HERE}}}"
REQUESTS = f"gpuwarden_container_slo_requests_total{{{HERE}}}"
SLOW = f"gpuwarden_container_slo_slow_requests_total{{{HERE}}}"
LEFT = f"1 - increase({SLOW}[$__range]) / (increase({REQUESTS}[$__range]) > 0) / (1 - {QUANTILE})"


def burn(span: str) -> str:
    """How many times faster than the promise allows its budget was used up, over the last `span`."""
    return f"container:gpuwarden_slo_burn:rate{span}{{{HERE}}}"


SLO = Page(
    uid="gpuwarden-slo",
    title="SLO",
    says="The promises of online containers: latency, error budgets and how fast they burn.",
    choices=(
        Choice("instance", "Node", "gpuwarden_build_info"),
        Choice("namespace", "Namespace", 'gpuwarden_container_slo_target_seconds{instance=~"$instance"}'),
        Choice(
            "container",
            "Container",
            'gpuwarden_container_slo_target_seconds{instance=~"$instance", namespace=~"$namespace"}',
        ),
    ),
    rows=(
        Row(
            "Now",
            (
                number("Promises", "Online containers with an SLO.", COUNT, f"count({TARGET})"),
                number(
                    "Missed now",
                    "Their latency over the SLO's window is above its target.",
                    COUNT,
                    f"count({LATENCY} > {TARGET} or {SECOND_LATENCY} > {SECOND_TARGET}) or vector(0)",
                    steps=((1, BAD),),
                ),
                number(
                    "Without a latency",
                    "Too few requests in the window, or a signal that cannot be read (see below).",
                    COUNT,
                    f"count({TARGET} unless {LATENCY}) or vector(0)",
                    steps=((1, WARN),),
                ),
                number(
                    "Worst latency, of its target",
                    "Above 100 % the promise is missed.",
                    RATIO,
                    f"max({LATENCY} / {TARGET} or {SECOND})",
                    steps=((0.9, WARN), (1, BAD)),
                ),
                number(
                    "Fastest burn, last hour",
                    "1 uses up the error budget exactly in its period, 14.4 a month's in two days.",
                    COUNT,
                    f"max({burn('1h')})",
                    steps=BURNS,
                ),
                number(
                    "Least budget left",
                    "Of the errors that the promise allows in the time that is shown; below 0 it is broken.",
                    RATIO,
                    f"min({LEFT})",
                    steps=((BELOW, BAD), (0, WARN), (0.25, GOOD)),
                ),
            ),
        ),
        Row(
            "Promises",
            (
                rows(
                    "Promises",
                    "One line each; the name opens the container.",
                    (*NAMES, "id"),
                    Column("Quantile", QUANTILE, RATIO),
                    Column("Target", TARGET, SECONDS),
                    Column("Latency", LATENCY, SECONDS),
                    Column("Of target", f"{LATENCY} / {TARGET}", RATIO, ((0.9, WARN), (1, BAD))),
                    Column("Requests / s", f"rate({REQUESTS}[5m])", PER_SECOND),
                    Column("Burn, 1 h", burn("1h"), COUNT, BURNS),
                    Column("Burn, 3 d", burn("3d"), COUNT, BURNS),
                    Column("Budget left", LEFT, RATIO, ((BELOW, BAD), (0, WARN), (0.25, GOOD))),
                    link=OPENS,
                ),
            ),
        ),
        Row(
            "Latency",
            (
                graph(
                    "Latency, of its target",
                    "At each SLO's own quantiles, over its window. Above 100 % the promise is missed.",
                    RATIO,
                    Query(named(f"{LATENCY} / {TARGET}"), WHO),
                    Query(named(f"{SECOND_LATENCY} / {SECOND_TARGET}"), f"{WHO}: second quantile"),
                    top=1,
                    steps=((1, BAD),),
                ),
                graph(
                    "Latency",
                    "At each SLO's own quantile, over its window; and its target.",
                    SECONDS,
                    Query(named(LATENCY), WHO),
                    Query(named(TARGET), f"{WHO}: target"),
                ),
                graph(
                    "Requests",
                    "Whose latency the SLO's signal read.",
                    PER_SECOND,
                    Query(named(f"rate({REQUESTS}[$__rate_interval])"), WHO),
                ),
                graph(
                    "Requests over the target",
                    "As a share of all; the promise allows 1 − quantile.",
                    RATIO,
                    Query(named(f"rate({SLOW}[$__rate_interval]) / (rate({REQUESTS}[$__rate_interval]) > 0)"), WHO),
                ),
            ),
        ),
        Row(
            "Error budgets",
            (
                graph(
                    "Burn, fast",
                    "Over 5 minutes and 1 hour. Above 14.4 in both an alert pages: 2 % of a month's budget in 1 h.",
                    COUNT,
                    Query(named(burn("5m")), f"{WHO}: 5 min"),
                    Query(named(burn("1h")), f"{WHO}: 1 h"),
                    top=2,
                    steps=((14.4, BAD),),
                    width=8,
                ),
                graph(
                    "Burn, hours",
                    "Over 30 minutes and 6 hours. Above 6 in both an alert pages: 5 % of a month's budget in 6 h.",
                    COUNT,
                    Query(named(burn("30m")), f"{WHO}: 30 min"),
                    Query(named(burn("6h")), f"{WHO}: 6 h"),
                    top=2,
                    steps=((6, BAD),),
                    width=8,
                ),
                graph(
                    "Burn, slow",
                    "Over 2 hours, a day and 3 days. A ticket above 3 for a day, or above 1 for three.",
                    COUNT,
                    Query(named(burn("2h")), f"{WHO}: 2 h"),
                    Query(named(burn("1d")), f"{WHO}: 1 d"),
                    Query(named(burn("3d")), f"{WHO}: 3 d"),
                    top=2,
                    steps=((1, WARN), (3, BAD)),
                    width=8,
                ),
            ),
        ),
        Row(
            "What it takes",
            (
                graph(
                    "Offline share",
                    "What the offline containers of these nodes may use of their devices.",
                    RATIO,
                    Query(named(f"gpuwarden_container_share_ratio{{{NODES}}}"), WHO),
                    top=1,
                    width=8,
                ),
                graph(
                    "Offline containers stopped",
                    "Share of the time.",
                    RATIO,
                    Query(named(f"rate(gpuwarden_container_paused_seconds_total{{{NODES}}}[$__rate_interval])"), WHO),
                    top=1,
                    width=8,
                ),
                graph(
                    "Signals that could not be read",
                    "Since the policy was read, by rule. Until it can be read, offline work is held, then let go.",
                    COUNT,
                    Query(
                        f"gpuwarden_signal_failures_total{{{NODES}}}", "{{rule}} on {{instance}}: {{signal}} {{reason}}"
                    ),
                    width=8,
                ),
            ),
        ),
    ),
)
