# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Pages of metrics, each asked once a second on a thread of its own, for as long as somebody wants it.

Whoever decides never waits for a workload: it takes the latest page there is. All that use one address share one
question. There are as many threads as addresses in the policy.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agent.clock import NS_PER_SECOND, monotonic_ns
from enforce.policy.model import PrometheusSource
from enforce.signals.exposition import Cumulative, Labels, histograms
from enforce.signals.fetch import Failure, FetchError, fetch

_log = logging.getLogger(__name__)
EACH_NS = NS_PER_SECOND
TIMEOUT_NS = 8 * EACH_NS // 10
_IDLE_NS = 10 * NS_PER_SECOND  # that nobody asked for a page: it is left alone

Fetch = Callable[[str, int], str]


@dataclass(frozen=True, slots=True)
class Scrape:
    """One histogram as it was on a page. `failure`: why there is none; then there are no series."""

    at_ns: int
    series: Mapping[Labels, Cumulative]
    failure: str | None = None


class Scraper:
    """One address. `latest` is for the deciding thread; all else happens on the scraper's own."""

    def __init__(self, url: str, fetch_page: Fetch = fetch, each_ns: int = EACH_NS) -> None:
        self.failures: Counter[tuple[PrometheusSource, Failure]] = Counter()
        self._url, self._fetch, self._each_ns = url, fetch_page, each_ns
        self._asked_ns: dict[PrometheusSource, int] = {}
        self._latest: dict[PrometheusSource, Scrape] = {}
        self._told: dict[PrometheusSource, Failure | None] = {}
        self._ending = threading.Event()
        self._begun = False
        self._thread = threading.Thread(target=self._run, name="scraper", daemon=True)

    def latest(self, source: PrometheusSource, now_ns: int) -> Scrape | None:
        """None before the first answer."""
        self._asked_ns[source] = now_ns
        if not self._begun:
            self._begun = True
            self._thread.start()
        return self._latest.get(source)

    def stop(self) -> None:
        """No further question is asked."""
        self._ending.set()

    def close(self) -> None:
        """Ends the thread: within the time limit of one page, or, where a host's name is looked up, by itself later."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join((TIMEOUT_NS + self._each_ns) / NS_PER_SECOND)

    def _run(self) -> None:
        due = monotonic_ns()
        while not self._ending.wait(max(0, due - monotonic_ns()) / NS_PER_SECOND):
            due = max(due + self._each_ns, monotonic_ns())
            now = monotonic_ns()
            wanted = [source for source, asked in list(self._asked_ns.items()) if now - asked < _IDLE_NS]
            if wanted:
                self._scrape_guarded(wanted)

    def _scrape_guarded(self, sources: list[PrometheusSource]) -> None:
        try:
            self.scrape(sources)
        except Exception as error:  # noqa: BLE001  # what a workload sends must not end the scraping
            for source in sources:
                self._failed(source, FetchError(Failure.MALFORMED, f"{self._url}: {error!r:.200}"))

    def scrape(self, sources: list[PrometheusSource]) -> None:
        """Asks once, and keeps what each is about."""
        try:
            text = self._fetch(self._url, monotonic_ns() + TIMEOUT_NS)
        except FetchError as error:
            for source in sources:
                self._failed(source, error)
            return
        at_ns = monotonic_ns()
        for source in sources:
            try:
                self._keep(source, Scrape(at_ns, histograms(text, source)))
            except FetchError as error:
                self._failed(source, error)

    def _keep(self, source: PrometheusSource, scrape: Scrape) -> None:
        if not scrape.series:
            what = f"{self._url} has no histogram {source.metric} with such labels; check slo.metric and slo.labels"
            self._failed(source, FetchError(Failure.ABSENT, what))
            return
        self._latest[source] = scrape
        if self._told.get(source) is not None:
            _log.info("%s: %s can be read again", self._url, source.metric)
        self._told[source] = None

    def _failed(self, source: PrometheusSource, error: FetchError) -> None:
        self._latest[source] = Scrape(monotonic_ns(), {}, str(error))
        self.failures[source, error.failure] += 1
        if self._told.get(source) is not error.failure:  # once, not each second
            _log.warning("%s", error)
        self._told[source] = error.failure
