# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whether the pages of metrics that a policy names can tell what it promises. Asks each page once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from agent.clock import NS_PER_SECOND, monotonic_ns
from enforce.policy.advice import Advice
from enforce.policy.model import OnlineRule, Policy, PrometheusSource
from enforce.policy.units import format_duration
from enforce.signals.exposition import histograms
from enforce.signals.fetch import FetchError, fetch

_LIMIT_NS = 2 * NS_PER_SECOND
_NEAR = 0.01  # of a bucket's end, so much is on it


def _now(url: str) -> str:
    return fetch(url, monotonic_ns() + _LIMIT_NS)


def unresolved(policy: Policy, page: Callable[[str], str] = _now) -> Iterator[Advice]:
    """Of each rule by signal prometheus: that its page cannot be read, or that its buckets are too coarse."""
    for index, rule in enumerate(policy.online):
        source = rule.slo.source
        if isinstance(source, PrometheusSource):
            try:
                series = histograms(page(source.url), source)
            except FetchError as error:
                yield Advice(("online", index, "slo", "url"), f"{rule.name}: {error}")
                continue
            ends = {round(le * source.unit_ns) for one in series.values() for le in one if math.isfinite(le)}
            yield from _resolution(("online", index, "slo"), rule, source, ends)


def _resolution(
    path: tuple[str | int, ...], rule: OnlineRule, source: PrometheusSource, ends: Iterable[int]
) -> Iterator[Advice]:
    target, known = rule.slo.target_ns, sorted(ends)
    if not known:
        text = f"{rule.name}: the page has no histogram {source.metric} with such labels; compare with the page"
        yield Advice((*path, "metric"), text)
        return
    if any(abs(end - target) <= _NEAR * end for end in known):
        return
    told = f"{rule.name}: the histogram cannot tell whether {format_duration(target)} is kept:"
    if target > known[-1]:
        text = f"{told} its last finite bucket ends at {format_duration(known[-1])}; write that or less"
    else:
        below, above = next((a, b) for a, b in pairwise((0, *known)) if b > target)
        ends_at = f"{format_duration(below)} or {format_duration(above)}" if below else format_duration(above)
        text = f"{told} its next buckets end at {ends_at}; write that"
    yield Advice((*path, "target"), text)
