# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""All signals, put together on top of an observer, and what becomes known of their failures.

A signal costs nothing until a container has a promise by it: threads, sockets and BPF programs come with the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from agent import layout, preflight
from agent.containers.residents import Residents
from agent.http.watching import HttpWatching
from agent.model import ProcessId
from agent.observer import Observer
from enforce.decide import Decided, Verdict
from enforce.model import Signal
from enforce.policy.model import Policy, Source
from enforce.signals.calls import Calls
from enforce.signals.gpu_wait import GpuWait, ReadHistogram
from enforce.signals.http import Http
from enforce.signals.prometheus import Prometheus
from enforce.signals.requests import Requests
from enforce.signals.uprobe import Uprobe
from enforce.signals.window import Buckets

Failures = Mapping[tuple[Source, str], int]


@contextmanager
def signals(policy: Policy, observer: Observer, requests: Requests) -> Iterator[dict[str, Signal]]:
    """Each by its name, for as long as the block lasts. What they miss is told with what the observer loses.

    `requests` is where they count them.
    """
    proc, before = observer.proc, observer.losses
    with ExitStack() as stack:
        watching = stack.enter_context(closing(HttpWatching(proc, lambda: _beside("http.bpf.o"))))
        prometheus = stack.enter_context(closing(Prometheus(requests)))
        uprobe = stack.enter_context(
            closing(Uprobe(lambda: Calls(_beside("uprobe.bpf.o"), proc), Residents(proc), proc, requests))
        )
        observer.losses = lambda: {**before(), **watching.losses(), **uprobe.losses()}
        observer.pipeline.signal_failures = lambda: by_rule(policy, {**prometheus.failures(), **uprobe.failures()})
        try:
            gpu_wait = GpuWait(_histograms(observer), requests)
            http = Http(watching, requests, (rule.slo for rule in policy.online))
            yield {signal.name: signal for signal in (gpu_wait, http, prometheus, uprobe)}
        finally:
            observer.losses, observer.pipeline.signal_failures = before, dict


def by_rule(policy: Policy, failures: Failures) -> dict[str, int]:
    """Under "rule:signal:reason", how often. Rules that say the same share their failures. Bounded by the policy."""
    return {
        f"{rule.name}:{rule.slo.signal}:{reason}": count
        for rule in policy.online
        for (source, reason), count in failures.items()
        if source == rule.slo.source
    }


def with_troubles(decided: Decided, known: Mapping[str, Signal]) -> Decided:
    """The same decisions; one that was taken without a reading says why there is none, where the signal knows."""
    return replace(decided, verdicts=tuple(_with_trouble(verdict, known) for verdict in decided.verdicts))


def _with_trouble(verdict: Verdict, known: Mapping[str, Signal]) -> Verdict:
    ruler = verdict.ruler
    trouble = known[ruler.slo.signal].trouble(ruler.container) if ruler.reading is None else None
    if trouble is None:
        return verdict
    reason = f"{verdict.share.reason} (signal {ruler.slo.signal}: {trouble})"
    return replace(verdict, share=replace(verdict.share, reason=reason))


def _beside(name: str) -> Path:
    return preflight.bpf_object().with_name(name)


def _histograms(observer: Observer) -> ReadHistogram:
    """A reader of one process's cumulative latency histogram."""
    latencies = observer.probes.map("latencies")

    def read(process: ProcessId) -> Buckets | None:
        found = latencies.get(layout.ProcessKey.of(process))
        return bytes(found.buckets) if found is not None else None

    return read
