# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""All signals, on top of an observer, and how what they lose and fail at is reported.

A signal costs nothing until a container has an SLO by it: threads, sockets and BPF programs come with the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from agent.containers.index import Residents
from agent.core.errors import ProbeError
from agent.core.model import ContainerKey, ProcessId, Snapshot
from agent.node import preflight
from agent.node.procfs import Procfs
from agent.observer import Observer
from agent.probes import abi
from agent.probes.return_probes import no_returns
from enforce.model import Reading, Signal
from enforce.policy.model import Policy, Slo, Source
from enforce.signals.http import Http, losses, request_follower
from enforce.signals.http_probe import SHARED
from enforce.signals.latency_window import Buckets, Requests, Windows
from enforce.signals.prometheus import Prometheus
from enforce.signals.uprobe import Uprobe, UprobeProbes

ReadHistogram = Callable[[ProcessId], Buckets | None]


class GpuWait:
    """`gpu_wait`: first launch after a drained wait → return of the next wait. Needs nothing from the workload.

    Quantiles over the SLO's window from the kernel's cumulative histograms, read once per decision. Requests of all
    processes of a container count together. The time inside the workload before a request's first launch is not in it.
    """

    name = "gpu_wait"

    def __init__(self, histogram_of: ReadHistogram, requests: Requests, no_waits: str | None = None) -> None:
        """`no_waits`: why no wait is seen; None: they are."""
        self._histogram_of, self._no_waits = histogram_of, no_waits
        self._windows = Windows(requests)
        self._snapshot: Snapshot | None = None
        self._processes: dict[ContainerKey, tuple[ProcessId, ...]] = {}

    def read(self, snapshot: Snapshot, container: ContainerKey, slo: Slo, now_ns: int) -> Reading | None:
        """None while the window holds fewer than `min_samples` requests."""
        if snapshot is not self._snapshot:  # one lasts for many readings
            self._snapshot = snapshot
            self._processes = {row.container.key: row.processes for row in snapshot.containers}
        histograms = {process: self._histogram_of(process) for process in self._processes.get(container, ())}
        return self._windows.read(container, histograms, slo, now_ns)

    def trouble(self, container: ContainerKey) -> str | None:
        """Why there is no reading of any container; None: nothing but silence is known."""
        return self._no_waits

    def forget(self, containers: Iterable[ContainerKey]) -> None:
        """Drops what is kept about containers that are gone."""
        self._windows.forget(containers)


BUILTIN = (GpuWait, Http, Prometheus, Uprobe)
Failures = Mapping[tuple[Source, str], int]


@contextmanager
def signals(policy: Policy, observer: Observer, requests: Requests) -> Iterator[dict[str, Signal]]:
    """Each by its name, until the block is left. What they lose is reported with what the observer loses.

    `requests` is where they count requests.
    """
    proc, no_return = observer.proc, no_returns(observer.probes.returns_off)
    with ExitStack() as stack:
        shared = {name: observer.probes.bpf.map_fd(name) for name in SHARED}
        follower = stack.enter_context(closing(request_follower(proc, lambda: _beside("http.bpf.o"), shared)))
        prometheus = stack.enter_context(closing(Prometheus(requests)))
        uprobe = stack.enter_context(
            closing(Uprobe(lambda: _uprobes(proc, no_return), Residents(proc), proc, requests))
        )
        lost = observer.losses.register("signals", lambda: {**losses(follower), **uprobe.losses()})
        stack.enter_context(lost)
        failures = observer.signal_failures.register(
            "signal_failures", lambda: by_rule(policy, {**prometheus.failures(), **uprobe.failures()})
        )
        stack.enter_context(failures)
        gpu_wait = GpuWait(_histograms(observer), requests, no_return)
        http = Http(follower, requests, (rule.slo for rule in policy.online))
        yield {signal.name: signal for signal in (gpu_wait, http, prometheus, uprobe)}


def by_rule(policy: Policy, failures: Failures) -> dict[str, int]:
    """ "rule:signal:reason" → failures. Rules with the same source share theirs. Bounded by the policy."""
    return {
        f"{rule.name}:{rule.slo.signal}:{reason}": count
        for rule in policy.online
        for (source, reason), count in failures.items()
        if source == rule.slo.source
    }


def _uprobes(proc: Procfs, no_return: str | None) -> UprobeProbes:
    if no_return is not None:
        raise ProbeError(no_return)
    return UprobeProbes(_beside("uprobe.bpf.o"), proc)


def _beside(name: str) -> Path:
    return preflight.bpf_object().with_name(name)


def _histograms(observer: Observer) -> ReadHistogram:
    """A reader of one process's cumulative latency histogram."""
    latencies = observer.probes.map("latencies")

    def read(process: ProcessId) -> Buckets | None:
        found = latencies.get(abi.ProcessKey.of(process))
        return bytes(found.buckets) if found is not None else None

    return read
