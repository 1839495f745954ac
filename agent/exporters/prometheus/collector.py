# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""/metrics for Prometheus: the last snapshot, turned into metrics at each scrape.

Invariant: a series exists exactly while the snapshot has its value, so that nothing outlives its container and nothing
leaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from agent.core.model import Snapshot
from agent.exporters.prometheus.catalog import CATALOG, Metric
from agent.exporters.prometheus.families import Labels, Row, rows

ADDRESS: Final = "127.0.0.1"
PORT: Final = 9837

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

Family = GaugeMetricFamily | CounterMetricFamily
GetSnapshot = Callable[[], Snapshot | None]
Served = Callable[[Snapshot], None]
Also = Callable[[], Iterable[Row]]


def ignore(_: Snapshot) -> None:
    """The default of `served`: does nothing."""


def nothing() -> tuple[Row, ...]:
    """The default of `also`: no rows."""
    return ()


class SnapshotCollector(Collector):
    """Metrics of the newest snapshot; only the build's and `also` before the first one.

    `served` is called with each snapshot that was scraped. `also`: rows about the clients, which no snapshot has.
    """

    def __init__(self, get_snapshot: GetSnapshot, served: Served, also: Also) -> None:
        self._get_snapshot, self._served, self._also = get_snapshot, served, also

    def describe(self) -> Iterator[Family]:
        """Names without values, so that registering takes no snapshot."""
        return (_family(metric) for metric in CATALOG)

    def collect(self) -> Iterator[Family]:
        """One family per metric that has a value now, in the catalogue's order."""
        families = {metric.name: _family(metric) for metric in CATALOG}
        families["gpuwarden_build_info"].add_metric([_version()], 1)
        for name, labels, value in self._also():
            families[name].add_metric(labels, float(value))
        snapshot = self._get_snapshot()
        if snapshot is not None:
            for (name, labels), value in _added_up(snapshot).items():
                families[name].add_metric(labels, value)
            self._served(snapshot)
        return (family for family in families.values() if family.samples)


def registry(
    get_snapshot: GetSnapshot, served: Served = ignore, also: Also = nothing
) -> prometheus_client.CollectorRegistry:
    """A registry with nothing in it but the snapshot, and `also`."""
    made = prometheus_client.CollectorRegistry()
    made.register(SnapshotCollector(get_snapshot, served, also))
    return made


def render(snapshot: Snapshot | None, also: Also = nothing) -> str:
    """The text that a scrape gets."""
    return prometheus_client.generate_latest(registry(lambda: snapshot, also=also)).decode()


def application(get_snapshot: GetSnapshot, served: Served = ignore, also: Also = nothing) -> WSGIApplication:
    """The page that answers a scrape."""
    return prometheus_client.make_wsgi_app(registry(get_snapshot, served, also))


def _added_up(snapshot: Snapshot) -> dict[tuple[str, Labels], float]:
    """Each series once: one that is there twice (a library seen through two containers) would void the whole scrape."""
    series: dict[tuple[str, Labels], float] = {}
    for name, labels, value in rows(snapshot):
        series[name, labels] = series.get((name, labels), 0) + float(value)
    return series


def _family(metric: Metric) -> Family:
    if metric.kind == "counter":
        return CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
    return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)


def _version() -> str:
    try:
        return version("gpuwarden")
    except PackageNotFoundError:
        return "unknown"
