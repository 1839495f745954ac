# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The extender at scale: how long a filter takes, how many pods a second are placed, and whether a GPU is given twice.

The real service, an API server with pods only and a Prometheus with drawn figures run in processes of their own; this
one plays kube-scheduler: one pod after another is filtered and prioritized over all nodes, bindings run beside that,
and a pod that fails comes again after a second. Meanwhile the service is killed with SIGKILL and started again, as a
kubelet would. Finished pods make room. Baselines of the same run: bindings alone, to a node at random, for the rate; a
request that the service answers with nothing, for the latency.

What it cannot show: kube-scheduler's own work, and a real API server's. `make kubernetes-fleet` has both.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from bench.fleet.client import Client
from bench.fleet.processes import Processes

GOALS: Final = {"filter_p99_ms": 20.0, "pods_per_second": 50.0, "double_bookings": 0}
_BINDERS: Final = 8
_BACKLOG: Final = 1000
_AGAIN_S: Final = 1.0
_BASELINE_PODS: Final = 500


@dataclass(slots=True)
class Run:
    """What happened."""

    filters_s: list[float] = field(default_factory=list)
    idle_s: list[float] = field(default_factory=list)
    bound: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Why pods were refused by all nodes, each reason once per pod and time"""
    failed_binds: int = 0
    lost_calls: int = 0
    kills: int = 0
    away_s: float = 0.0
    """From each start of the service to the first node that it offers"""
    seconds: float = 0.0


class Scheduler:
    """Plays kube-scheduler."""

    def __init__(self, processes: Processes, options: argparse.Namespace) -> None:
        self._processes, self._options = processes, options
        self._draw = Random(options.seed)
        self._nodes = [f"node-{at}" for at in range(options.nodes)]
        self._extender, self._api = Client(processes.service), Client(processes.api)
        self._queue: deque[dict[str, Any]] = deque()
        self._later: deque[tuple[float, dict[str, Any]]] = deque()
        self._live: deque[str] = deque()
        self._made = 0
        self._down_s: float | None = None
        self.run = Run()

    def go(self) -> None:
        """Until all pods are bound, or the time is over."""
        options, run = self._options, self.run
        self._processes.start()
        begun_s = self._down_s = time.monotonic()
        kills = [round((at + 1) * options.pods / (options.kills + 1)) for at in range(options.kills)]
        binding: dict[Future[bool], dict[str, Any]] = {}
        with ThreadPoolExecutor(_BINDERS) as pool:
            while run.bound < options.pods and time.monotonic() - begun_s < options.limit:
                self._top_up()
                self._harvest(binding)
                if kills and run.bound >= kills[0]:
                    kills.pop(0)
                    self._processes.kill()
                    self._processes.start()
                    self._down_s = self._down_s or time.monotonic()
                    run.kills += 1
                if not self._queue or len(binding) >= 4 * _BINDERS:
                    time.sleep(0.005)
                    continue
                pod = self._queue.popleft()
                node = self._place(pod)
                if node is None:
                    self._later.append((time.monotonic() + _AGAIN_S, pod))
                else:
                    binding[pool.submit(self._bind, pod, node)] = pod
            run.seconds = time.monotonic() - begun_s

    def _top_up(self) -> None:
        now_s = time.monotonic()
        while self._later and self._later[0][0] <= now_s:
            self._queue.append(self._later.popleft()[1])
        waiting = len(self._queue) + len(self._later)
        wanted = min(_BACKLOG - waiting, self._options.pods - self._made)
        if wanted >= _BACKLOG // 4 or (wanted > 0 and self._made + wanted == self._options.pods):
            self._queue += self._create(wanted)
        room = self._options.nodes * self._options.gpus // 2
        if len(self._live) > room:
            finished = [self._live.popleft() for _ in range(room // 4)]
            self._api.post("/bench/finish", finished)

    def _create(self, count: int) -> list[dict[str, Any]]:
        bodies = []
        for at in range(self._made, self._made + count):
            program = self._draw.randrange(40)
            annotations = {
                "gpuwarden.io/memory": f"{4 + program % 5 * 6}Gi",
                "gpuwarden.io/kind": f"program-{program}",
                "gpuwarden.io/kernel": f"{1 + program % 7}ms",
            }
            bodies.append({"name": f"pod-{at}", "annotations": annotations})
        self._made += count
        uids = self._api.post("/bench/pods", bodies)
        return [
            {
                "metadata": {**one, "namespace": "batch", "uid": uid},
                "spec": {"schedulerName": "gpuwarden"},
                "status": {"phase": "Pending"},
            }
            for one, uid in zip(bodies, uids, strict=True)
        ]

    def _harvest(self, binding: dict[Future[bool], dict[str, Any]]) -> None:
        for done in [one for one in binding if one.done()]:
            pod = binding.pop(done)
            if done.result():
                self.run.bound += 1
                self._live.append(f"batch/{pod['metadata']['name']}")
            else:
                self.run.failed_binds += 1
                self._later.append((time.monotonic() + _AGAIN_S, pod))

    def _place(self, pod: dict[str, Any]) -> str | None:
        begun_s = time.perf_counter()
        try:
            found = self._extender.post("/filter", {"Pod": pod, "NodeNames": self._nodes})
            self.run.filters_s.append(time.perf_counter() - begun_s)
            if not found["NodeNames"]:
                self.run.reasons.update(set(found["FailedNodes"].values()))
                return None
            if self._down_s is not None:
                self.run.away_s += time.monotonic() - self._down_s
                self._down_s = None
            scores = self._extender.post("/prioritize", {"Pod": pod, "NodeNames": found["NodeNames"]})
            if len(self.run.filters_s) % 10 == 0:
                begun_s = time.perf_counter()
                self._extender.get("/healthz")
                self.run.idle_s.append(time.perf_counter() - begun_s)
        except OSError:
            self.run.lost_calls += 1
            time.sleep(0.02)
            return None
        most = max(one["Score"] for one in scores)
        return self._draw.choice([str(one["Host"]) for one in scores if one["Score"] == most])

    def _bind(self, pod: dict[str, Any], node: str) -> bool:
        metadata = pod["metadata"]
        body = {"PodName": metadata["name"], "PodNamespace": "batch", "PodUID": metadata["uid"], "Node": node}
        try:
            return not Client.of_thread(self._processes.service).post("/bind", body)["Error"]
        except OSError:  # killed: whether it is bound is unknown, so the scheduler asks again
            return False

    def baseline(self) -> float:
        """Pods per second without the extender: a node at random, and the binding posted to the API server."""
        pods = self._create(_BASELINE_PODS)
        begun_s = time.monotonic()
        with ThreadPoolExecutor(_BINDERS) as pool:
            done = [pool.submit(self._bind_plainly, pod) for pod in pods]
            assert all(one.result() for one in done)
        return _BASELINE_PODS / (time.monotonic() - begun_s)

    def _bind_plainly(self, pod: dict[str, Any]) -> bool:
        metadata = pod["metadata"]
        body = {"metadata": {"uid": metadata["uid"]}, "target": {"name": self._draw.choice(self._nodes)}}
        Client.of_thread(self._processes.api).post(f"/api/v1/namespaces/batch/pods/{metadata['name']}/binding", body)
        return True

    def report(self) -> Any:
        """What the API server saw."""
        return self._api.post("/bench/report", None)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    processes = Processes(options.nodes, options.gpus)
    try:
        scheduler = Scheduler(processes, options)
        scheduler.go()
        rss_mib = processes.rss_mib()
        report = scheduler.report()
        baseline = scheduler.baseline()
        if scheduler.run.bound < options.pods:
            print(f"the service's log ends so:\n{processes.log_tail()}", file=sys.stderr)
    finally:
        processes.close()
    run = scheduler.run
    filters, idle = sorted(run.filters_s), sorted(run.idle_s)
    return {
        "nodes": options.nodes,
        "gpus": options.nodes * options.gpus,
        "pods": options.pods,
        "bound": run.bound,
        "kills": run.kills,
        "filter_p50_ms": _quantile_ms(filters, 0.5),
        "filter_p99_ms": _quantile_ms(filters, 0.99),
        "idle_p50_ms": _quantile_ms(idle, 0.5),
        "pods_per_second": run.bound / (run.seconds - run.away_s),
        "pods_per_second_with_kills": run.bound / run.seconds,
        "away_seconds": run.away_s,
        "pods_per_second_without": baseline,
        "double_bookings": len(report["doubles"]),
        "filters": len(filters),
        "refused": dict(run.reasons.most_common(10)),
        "failed_binds": run.failed_binds,
        "lost_calls": run.lost_calls,
        "seconds": run.seconds,
        "rss_mib": rss_mib,
        "seed": options.seed,
    }


def _quantile_ms(values: Sequence[float], part: float) -> float | None:
    return values[min(len(values) - 1, int(part * len(values)))] * 1e3 if values else None


def misses(found: dict[str, Any]) -> list[str]:
    """Goals that were not reached."""
    wrong = []
    if found["bound"] < found["pods"]:
        wrong.append(f"{found['bound']} of {found['pods']} pods were bound")
    if found["filter_p99_ms"] is None or found["filter_p99_ms"] > GOALS["filter_p99_ms"]:
        wrong.append(f"filter p99 {found['filter_p99_ms']} ms, goal {GOALS['filter_p99_ms']}")
    if found["pods_per_second"] < GOALS["pods_per_second"]:
        wrong.append(f"{found['pods_per_second']:.1f} pods a second, goal {GOALS['pods_per_second']}")
    if found["double_bookings"]:
        wrong.append(f"{found['double_bookings']} GPUs were given to two pods")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 when all goals are reached."""
    parser = argparse.ArgumentParser(prog="python -m bench fleet-extender", description=__doc__)
    parser.add_argument("--pods", type=int, default=10_000, help="to be placed (default %(default)s)")
    parser.add_argument("--kills", type=int, default=20, help="of the service (default %(default)s)")
    parser.add_argument("--nodes", type=int, default=1000, help="(default %(default)s)")
    parser.add_argument("--gpus", type=int, default=8, help="of each node (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default %(default)s)")
    parser.add_argument("--limit", type=float, default=540, help="seconds, after which it ends (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what it started is to end with it
    found = measure(options)
    print(
        f"{found['bound']:,} of {found['pods']:,} pods on {found['gpus']:,} GPUs of {found['nodes']:,} nodes in "
        f"{found['seconds']:.0f} s, with {found['kills']} kills of the service"
    )
    print(f"filter: p50 {found['filter_p50_ms']:.1f} ms, p99 {found['filter_p99_ms']:.1f} ms of {found['filters']:,}")
    print(f"  baseline: {found['idle_p50_ms'] or 0:.1f} ms for a request with an empty answer (p50)")
    print(
        f"rate: {found['pods_per_second']:.0f} pods a second; {found['pods_per_second_with_kills']:.0f} with the "
        f"{found['away_seconds']:.0f} s from {found['kills'] + 1} starts to the first node offered"
    )
    without = found["pods_per_second_without"]
    print(f"  baseline: {without:.0f} bindings a second to the same API server without the extender")
    print(f"GPUs given to two pods: {found['double_bookings']}; the service's memory: {found['rss_mib']:.0f} MiB")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    missed = misses(found)
    print("\n".join(f"not reached: {miss}" for miss in missed) or "all goals are reached")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
