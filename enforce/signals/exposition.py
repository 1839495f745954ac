# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A classic histogram on a page of metrics, and what was counted between two looks at it. Pure.

Only the histogram's own lines are parsed: pages have thousands of others. Whatever a page says, the result is counts
from 0 to 2^53 in buckets that end within some thirty years.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from prometheus_client.parser import text_string_to_metric_families

from enforce.policy.model import PrometheusSource
from enforce.signals.fetch import Failure, FetchError

Labels = tuple[tuple[str, str], ...]
Cumulative = dict[float, float]
"""`le` → requests that took no longer, in the page's own unit"""

_MOST_LINES = 10_000
_LONGEST_LINE = 16 << 10
_MOST_REQUESTS = 2**53  # above it a float does not count on; sums of these stay far from what a float can hold
_LONGEST_NS = 1e18


def histograms(text: str, source: PrometheusSource) -> dict[Labels, Cumulative]:
    """The series that `source` is about, by their labels without `le`. FetchError where that cannot be told."""
    name = f"{source.metric}_bucket"
    lines = [line for line in text.split("\n") if line.startswith((f"{name}{{", f"{name} "))]
    if len(lines) > _MOST_LINES or any(len(line) > _LONGEST_LINE for line in lines):
        raise FetchError(Failure.TOO_LARGE, f"{source.url}: {name} has more than {_MOST_LINES} lines; add slo.labels")
    found: dict[Labels, Cumulative] = {}
    for labels, value in _samples(lines, source):
        le = _number(labels.pop("le", ""))
        if le is not None and _plausible(le, value, source) and _fits(source, labels):
            found.setdefault(tuple(sorted(labels.items())), {})[le] = value
    return {series: cumulative for series, cumulative in found.items() if math.inf in cumulative}  # else it was cut


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
    """Requests by the bucket that they fell in. What was set back, or has other buckets now, counts from 0."""
    old: Mapping[float, float] = before or {}
    if old.keys() != after.keys() or any(after[le] < old[le] for le in after):
        old = {}
    found, below = {}, 0.0
    for le in sorted(after):
        up_to = after[le] - old.get(le, 0.0)
        count = round(up_to - below)  # fewer than in the bucket below it: not a histogram's doing
        if count > 0:
            found[le] = count
        below = max(below, up_to)
    return found


def quantile(counts: Mapping[float, int], bounds: Iterable[float], wanted: float) -> float | None:
    """As PromQL's histogram_quantile: linear inside a bucket; above the last finite one, its end. None: no requests.

    `bounds`: the ends of all buckets, those without requests too.
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
    """Requests that took longer, as `quantile` sees them: it divides a bucket evenly, and the last has no end."""
    slow, start = 0.0, 0.0
    for end in sorted({*bounds, *counts}):
        count = counts.get(end, 0)
        if start >= target:
            slow += count
        elif target < end < math.inf:
            slow += count * (end - target) / (end - start)
        start = max(0.0, end)
    return slow
