# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`prometheus`: the latency that a service counts itself, from the growth of a histogram on its page of metrics.

As exact as the histogram's buckets, and a second late. All series that match the rule's labels are added up; each may
be reset, appear later, or be missing for a while, and none of that adds or loses a request.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from agent.core.clock import NS_PER_SECOND
from agent.core.model import ContainerKey, Snapshot
from enforce.model import Reading
from enforce.policy.model import PrometheusSource, Slo, Source
from enforce.signals.latency_window import Requests, Sliding, reading_of
from enforce.signals.scraper import Cumulative, Labels, Scrape, Scraper, grown, quantile, slower

_log = logging.getLogger(__name__)
RECENT_NS = 2 * NS_PER_SECOND  # one page at least, though each comes a little late
_RECENT_SLICES = 20


@dataclass(slots=True)
class LatencyHistory:
    """The latencies of one container's pages within its SLO's window."""

    slo: Slo
    unit_ns: int
    trouble: str | None = None
    new: Counter[float] | None = None  # what the page added, where it could be read and was a new one
    _seen: dict[Labels, Cumulative] = field(default_factory=dict)
    _bounds: tuple[float, ...] = ()
    _last_ns: int | None = None  # of the last page that could be read
    _taken: Scrape | None = None
    _window: Sliding[float] = field(init=False)
    _recent: Sliding[float] = field(init=False)

    def __post_init__(self) -> None:
        self._window, self._recent = Sliding(self.slo.window_ns), Sliding(RECENT_NS, _RECENT_SLICES)

    def read(self, scrape: Scrape | None, now_ns: int) -> Reading | None:
        """The reading, with what the latest page adds if it is a new one."""
        self.new = None
        if scrape is not None and scrape is not self._taken:
            self._taken = scrape
            self.trouble = scrape.failure
            if scrape.failure is None:
                self._take(scrape)
        self._window.expire(now_ns)
        self._recent.expire(now_ns)
        return reading_of(self._window, self._recent, self.slo, now_ns, self._quantile_ns)

    def slow(self) -> float:
        """The new requests of the page that took longer than the target."""
        return slower(self.new or {}, self._bounds, self.slo.target_ns / self.unit_ns)

    def _take(self, scrape: Scrape) -> None:
        """Adds the growth since the page before; none where that is older than the window, or there was none."""
        began, self._last_ns = self._last_ns, scrape.at_ns
        self.new = Counter()
        if began is None:
            self._warn_of_coarse_buckets(scrape)
        if began is not None and scrape.at_ns - began <= self.slo.window_ns:
            for labels, cumulative in scrape.series.items():
                new = grown(cumulative, self._seen.get(labels))
                self._window.add(scrape.at_ns, new)
                self._recent.add(scrape.at_ns, new)
                self.new.update(new)
        missing = [(labels, seen) for labels, seen in self._seen.items() if labels not in scrape.series]
        self._seen = {
            **dict(missing[-len(scrape.series) :]),
            **scrape.series,
        }  # missing ones may come back: a bounded number is kept
        self._bounds = tuple({le for cumulative in scrape.series.values() for le in cumulative})

    def _quantile_ns(self, counts: Mapping[float, int], wanted: float) -> float | None:
        found = quantile(counts, self._bounds, wanted)
        return None if found is None else found * self.unit_ns

    def _warn_of_coarse_buckets(self, scrape: Scrape) -> None:
        ends = [le for cumulative in scrape.series.values() for le in cumulative if math.isfinite(le)]
        if not ends or max(ends) * self.unit_ns <= self.slo.target_ns:
            _log.warning("the histogram's last finite bucket ends below slo.target: misses of it cannot be seen")


class Prometheus:
    """Shares one scraper among all containers with the same address."""

    name = "prometheus"

    def __init__(self, requests: Requests, scraper: Callable[[str], Scraper] = Scraper) -> None:
        self._requests, self._scraper = requests, scraper
        self._scrapers: dict[str, Scraper] = {}
        self._histories: dict[ContainerKey, LatencyHistory] = {}

    def read(self, snapshot: Snapshot, container: ContainerKey, slo: Slo, now_ns: int) -> Reading | None:
        """None while the window holds fewer than `min_samples` requests."""
        source = slo.source
        if not isinstance(source, PrometheusSource):
            return None
        history = self._histories.get(container)
        if history is None or (history.slo.source, history.slo.window_ns) != (source, slo.window_ns):
            history = self._histories[container] = LatencyHistory(slo, source.unit_ns)
        history.slo = slo
        if source.url not in self._scrapers:
            self._scrapers[source.url] = self._scraper(source.url)
        reading = history.read(self._scrapers[source.url].latest(source, now_ns), now_ns)
        if history.new is not None:
            self._requests.add(container, sum(history.new.values()), history.slow())
        return reading

    def trouble(self, container: ContainerKey) -> str | None:
        """Why there is no reading, where it is more than silence."""
        history = self._histories.get(container)
        return history.trouble if history is not None else None

    def forget(self, containers: Iterable[ContainerKey]) -> None:
        """Drops what is kept about containers that are gone."""
        for container in containers:
            self._histories.pop(container, None)

    def failures(self) -> dict[tuple[Source, str], int]:
        """Pages that could not be read since the start, by source and reason."""
        found: Counter[tuple[Source, str]] = Counter()
        for scraper in self._scrapers.values():
            for (source, failure), count in list(scraper.failures.items()):
                found[source, failure.value] += count
        return dict(found)

    def close(self) -> None:
        """Stops all scrapers."""
        for scraper in self._scrapers.values():
            scraper.stop()  # all first: so they end together
        for scraper in self._scrapers.values():
            scraper.close()
