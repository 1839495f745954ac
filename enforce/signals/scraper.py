# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Scrapes one address once a second on a thread of its own, while its page is read; parses classic histograms.

The decision loop never waits for a workload: it takes the latest page that there is. All rules with one address share
one scrape, so there are as many threads as addresses in the policy.

Parsing is pure. Only the histogram's own lines are parsed, as pages have thousands of others. Whatever a page has, the
result is counts from 0 to 2^53 in buckets that end within some thirty years.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from prometheus_client.parser import text_string_to_metric_families

from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.worker import Worker
from agent.node.http_client import Failure, FetchError, fetch
from enforce.policy.model import PrometheusSource

Labels = tuple[tuple[str, str], ...]
Cumulative = dict[float, float]

"""`le`, in the page's own unit → requests that took no longer"""

_MOST_LINES = 10_000
_LONGEST_LINE = 16 << 10
_BATCH_LINES = 50  # between two looks at the time
CPU_BUDGET_SECONDS = 0.1  # to parse one histogram: a tenth of what a look a second has
_MOST_REQUESTS = 2**53  # above it a float does not count on; sums of these stay far from what a float can hold
_LONGEST_NS = 1e18


def histograms(
    text: str, source: PrometheusSource, cpu_seconds: Callable[[], float] = time.thread_time
) -> dict[Labels, Cumulative]:
    """The series that `source` selects, by their labels without `le`.

    FetchError where they cannot be parsed, or not within CPU_BUDGET_SECONDS: a tenant's page is not to cost more.
    """
    name = f"{source.metric}_bucket"
    lines = [line for line in text.split("\n") if line.startswith((f"{name}{{", f"{name} "))]
    for needle in _needles(source):
        lines = [line for line in lines if needle in line]
    if len(lines) > _MOST_LINES or any(len(line) > _LONGEST_LINE for line in lines):
        raise FetchError(Failure.TOO_LARGE, f"{source.url}: {name} has more than {_MOST_LINES} lines; add slo.labels")
    found: dict[Labels, Cumulative] = {}
    for labels, value in _within_budget(lines, source, cpu_seconds):
        le = _number(labels.pop("le", ""))
        if le is not None and _plausible(le, value, source) and _fits(source, labels):
            found.setdefault(tuple(sorted(labels.items())), {})[le] = value
    return {series: cumulative for series, cumulative in found.items() if math.inf in cumulative}  # else it was cut off


def _needles(source: PrometheusSource) -> list[str]:
    """What every line of the series has: to look for it costs a hundredth of parsing the line."""
    plain = [patterns[0] for _, patterns in source.labels if len(patterns) == 1]
    return [f'"{value}"' for value in plain if value and not set(value) & set('*?[]\\"\n')]


def _within_budget(
    lines: list[str], source: PrometheusSource, cpu_seconds: Callable[[], float]
) -> Iterator[tuple[dict[str, str], float]]:
    began = cpu_seconds()
    for at in range(0, len(lines), _BATCH_LINES):
        if cpu_seconds() - began > CPU_BUDGET_SECONDS:
            budget = f"takes more than {CPU_BUDGET_SECONDS * 1e3:.0f} ms of CPU to parse"
            what = f"{source.url}: {source.metric} {budget} ({len(lines)} lines); add slo.labels without wildcards"
            raise FetchError(Failure.TOO_LARGE, what)
        yield from _samples(lines[at : at + _BATCH_LINES], source)


def _samples(lines: list[str], source: PrometheusSource) -> Iterable[tuple[dict[str, str], float]]:
    try:
        families = list(text_string_to_metric_families("\n".join([*lines, ""])))
    except Exception as error:  # the parser indexes and asserts its way through what it is given
        what = f"{source.url}: {source.metric} cannot be read ({error!r:.80}); check that it is a classic histogram"
        raise FetchError(Failure.MALFORMED, what) from error
    return ((dict(sample.labels), float(sample.value)) for family in families for sample in family.samples)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return None if math.isnan(number) or number == -math.inf else number


def _plausible(le: float, value: float, source: PrometheusSource) -> bool:
    return 0 <= value <= _MOST_REQUESTS and (le == math.inf or abs(le) * source.unit_ns <= _LONGEST_NS)


def _fits(source: PrometheusSource, labels: Mapping[str, str]) -> bool:
    return all(
        any(fnmatchcase(labels.get(name, ""), pattern) for pattern in patterns) for name, patterns in source.labels
    )


def grown(after: Cumulative, before: Cumulative | None) -> dict[float, int]:
    """New requests by bucket. A counter that was reset, or has other buckets now, counts from 0."""
    old: Mapping[float, float] = before or {}
    if old.keys() != after.keys() or any(after[le] < old[le] for le in after):
        old = {}
    found, below = {}, 0.0
    for le in sorted(after):
        up_to = after[le] - old.get(le, 0.0)
        count = round(up_to - below)  # may be negative: a page that is no proper histogram
        if count > 0:
            found[le] = count
        below = max(below, up_to)
    return found


def quantile(counts: Mapping[float, int], bounds: Iterable[float], wanted: float) -> float | None:
    """As PromQL's histogram_quantile: linear inside a bucket; above the last finite one, its end. None: no requests.

    `bounds`: the upper bounds of all buckets, those without requests too.
    """
    ends = sorted({*bounds, *counts})
    finite = [end for end in ends if math.isfinite(end)]
    rank, seen, start = wanted * sum(counts.values()), 0, 0.0
    for end in ends if counts and finite else ():
        count = counts.get(end, 0)
        seen += count
        if count and seen >= rank:
            if not math.isfinite(end):
                return finite[-1]
            return end if end <= 0 else start + (end - start) * (rank - (seen - count)) / count
        start = max(0.0, end)
    return None


def slower(counts: Mapping[float, int], bounds: Iterable[float], target: float) -> float:
    """Requests that took longer than `target`, interpolated as `quantile` does; of +Inf's bucket all or none."""
    slow, start = 0.0, 0.0
    for end in sorted({*bounds, *counts}):
        count = counts.get(end, 0)
        if start >= target:
            slow += count
        elif target < end < math.inf:
            slow += count * (end - target) / (end - start)
        start = max(0.0, end)
    return slow


_log = logging.getLogger(__name__)
EACH_NS = NS_PER_SECOND
TIMEOUT_NS = 8 * EACH_NS // 10
_IDLE_NS = 10 * NS_PER_SECOND  # a page that was not read for so long is not scraped
Fetch = Callable[[str, int], str]


@dataclass(frozen=True, slots=True)
class Scrape:
    """One histogram of one page. `failure`: why there is none; then there are no series."""

    at_ns: int
    series: Mapping[Labels, Cumulative]
    failure: str | None = None


class Scraper:
    """One address. `latest` is for the deciding thread; all else happens on the scraper's own."""

    def __init__(self, url: str, fetch_page: Fetch = fetch, each_ns: int = EACH_NS) -> None:
        self.failures: Counter[tuple[PrometheusSource, Failure]] = Counter()
        self._url, self._fetch, self._each_ns = url, fetch_page, each_ns
        self._read_ns: dict[PrometheusSource, int] = {}
        self._latest: dict[PrometheusSource, Scrape] = {}
        self._logged: dict[PrometheusSource, Failure | None] = {}
        self._due_ns = 0  # when the next scrape should begin
        self._started = False
        self._worker = Worker("scraper", self._step, failed="a scrape")

    def latest(self, source: PrometheusSource, now_ns: int) -> Scrape | None:
        """None before the first answer."""
        self._read_ns[source] = now_ns
        if not self._started:
            self._due_ns = monotonic_ns()
            self._worker.start()
            self._started = True  # not if no thread can be made now
        return self._latest.get(source)

    def stop(self) -> None:
        """No further scrape begins."""
        self._worker.stop()

    def close(self) -> None:
        """Ends the thread: within the time limit of one page, or, where a host's name is looked up, by itself later."""
        self._worker.close((TIMEOUT_NS + self._each_ns) / NS_PER_SECOND)

    def _step(self) -> float:
        now = monotonic_ns()
        self._due_ns = max(self._due_ns + self._each_ns, now)
        wanted = [source for source, read_ns in list(self._read_ns.items()) if now - read_ns < _IDLE_NS]
        if wanted:
            self._scrape_guarded(wanted)
        return max(0, self._due_ns - monotonic_ns()) / NS_PER_SECOND

    def _scrape_guarded(self, sources: list[PrometheusSource]) -> None:
        try:
            self.scrape(sources)
        except Exception as error:  # noqa: BLE001  # what a workload sends is a failure of its page, not of the thread
            for source in sources:
                self._failed(source, FetchError(Failure.MALFORMED, f"{self._url}: {error!r:.200}"))

    def scrape(self, sources: list[PrometheusSource]) -> None:
        """Fetches the page once, and keeps each source's histogram."""
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
        if self._logged.get(source) is not None:
            _log.info("%s: %s can be read again", self._url, source.metric)
        self._logged[source] = None

    def _failed(self, source: PrometheusSource, error: FetchError) -> None:
        self._latest[source] = Scrape(monotonic_ns(), {}, str(error))
        self.failures[source, error.failure] += 1
        if self._logged.get(source) is not error.failure:  # once, not each second
            _log.warning("%s", error)
        self._logged[source] = error.failure
