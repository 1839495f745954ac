# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The fleet's service at scale beside a real API server and a real kube-scheduler: nodes are objects without a kubelet.

The scheduler has the chart's configuration. Pods that do not ask for the extender's resource come first: the same
scheduler, without the extender, for the baseline. Then pods that do, while the service is killed and started again. A
watch of its own judges: two living pods on one GPU are a double booking. The figures of GPUs are drawn
(bench/fleet/prometheus.py), as 1,000 agents do not fit on one machine.
"""

from __future__ import annotations

import argparse
import json
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPSConnection
from math import inf
from pathlib import Path
from random import Random
from typing import Any, Final

import yaml

from fleet.extender.reservations import Holder, holder
from fleet.sources.kubernetes import Access, KubernetesApi
from fleet.sources.watch import follow
from tools.shipping.kubernetes.cluster import API_ADDRESS, ROOT, Cluster, control_plane, until
from tools.shipping.kubernetes.life import Trial, render

GOALS: Final = {"filter_p99_ms": 20.0, "pods_per_second": 50.0, "double_bookings": 0}
_GPUS: Final = 8
"""Of each node"""
_SERVICE, _PROMETHEUS = "127.0.0.1:9838", 9090
_ACCOUNT: Final = Path("/run/secrets/kubernetes.io/serviceaccount")
"""Of a pod, which the service seems to be in: /run is of this trial alone"""
_BACKLOG: Final = 600
_BASELINE_S: Final = 40.0
_WRITERS: Final = 4
_LOOK_S: Final = 0.1


class Writer:
    """Calls to the API server, over one connection per thread."""

    def __init__(self, token: str) -> None:
        self._headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        self._context = ssl._create_unverified_context()  # noqa: SLF001  as kubectl does here
        self._thread = threading.local()

    def __call__(self, method: str, path: str, body: Any = None) -> int:
        """The status: 404 and 409 are left to the caller."""
        connection: HTTPSConnection | None = getattr(self._thread, "connection", None)
        if connection is None:
            connection = HTTPSConnection(API_ADDRESS, 443, context=self._context, timeout=60)
            self._thread.connection = connection
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        connection.request(method, path, json.dumps(body), {**self._headers, "Content-Type": kind})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status >= 300 and answer.status not in (404, 409):
            raise RuntimeError(f"{method} {path}: {answer.status} {text[:300]!r}")
        return answer.status


class Judge:
    """What the API server says of the pods, in its order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pods: dict[str, Holder] = {}
        self.doubles: list[tuple[str, str, str]] = []
        """GPU, and two living pods that are bound and have it"""
        self.bound: deque[tuple[float, str]] = deque()
        """When, and which pod: the oldest first"""
        self.count = 0
        """Pods that were bound"""

    def listed(self, pods: Iterable[Any], _asked_s: float) -> None:
        for pod in pods:
            self.changed("ADDED", pod)

    def changed(self, kind: str, pod: Any) -> None:
        seen = holder(pod)
        if seen is None:
            return
        with self._lock:
            if kind == "DELETED":
                self._pods.pop(seen.uid, None)
                return
            before = self._pods.get(seen.uid)
            self._pods[seen.uid] = seen
            if seen.node and not (before and before.node):
                self.count += 1
                self.bound.append((time.monotonic(), seen.key))
                others = (one for one in self._pods.values() if one.node and one.gpu == seen.gpu is not None)
                self.doubles += [(str(seen.gpu), seen.key, one.key) for one in others if one.uid != seen.uid]

    def trouble(self, source: str, reason: str | None) -> None:
        if reason is not None:
            print(f"            the judge's watch: {source}: {reason}", flush=True)

    def waiting(self) -> int:
        with self._lock:
            return sum(not one.node for one in self._pods.values())


@dataclass(slots=True)
class Pods:
    """Makes pods and deletes the oldest that are bound. `extended`: they ask for the extender's resource."""

    write: Writer
    judge: Judge
    pool: ThreadPoolExecutor
    room: int
    extended: bool = False
    made: int = 0
    draw: Random = field(default_factory=lambda: Random(1))

    def top_up(self) -> None:
        """As many wait as there may, and no more live than there is room for."""
        wanted = _BACKLOG - self.judge.waiting()
        if wanted > _BACKLOG // 10:
            list(self.pool.map(self._make, [self._body() for _ in range(wanted)]))
        over = len(self.judge.bound) - self.room
        if over > 0:
            self.delete(over)

    def delete(self, count: int) -> None:
        """The oldest."""
        list(self.pool.map(self._delete, [self.judge.bound.popleft()[1] for _ in range(count)]))

    def delete_all(self) -> None:
        """Bound or not."""
        self.write("DELETE", "/api/v1/namespaces/batch/pods", {"gracePeriodSeconds": 0})
        self.judge.bound.clear()
        until(lambda: not self.judge.waiting(), "all pods to be gone")

    def _body(self) -> dict[str, Any]:
        self.made += 1
        program = self.draw.randrange(40)
        annotations = {
            "gpuwarden.io/memory": f"{4 + program % 5 * 6}Gi",
            "gpuwarden.io/kind": f"program-{program}",
            "gpuwarden.io/kernel": f"{1 + program % 7}ms",
        }
        main: dict[str, Any] = {"name": "main", "image": "localhost/pause:1"}
        if self.extended:
            main["resources"] = {"limits": {"gpuwarden.io/offline": "1"}}
        return {
            "metadata": {"name": f"pod-{self.made}", "namespace": "batch", "annotations": annotations},
            "spec": {"schedulerName": "gpuwarden", "containers": [main]},
        }

    def _make(self, body: dict[str, Any]) -> None:
        self.write("POST", "/api/v1/namespaces/batch/pods", body)

    def _delete(self, key: str) -> None:
        self.write("DELETE", f"/api/v1/namespaces/batch/pods/{key.partition('/')[2]}", {"gracePeriodSeconds": 0})


class Service:
    """The fleet's service as a process, which can be killed."""

    def __init__(self, at: Cluster) -> None:
        self._at = at
        self._buckets: dict[float, float] = defaultdict(float)
        where = ["--prometheus", f"http://127.0.0.1:{_PROMETHEUS}", "--listen", _SERVICE]
        environment = ["env", f"KUBERNETES_SERVICE_HOST={API_ADDRESS}"]
        self._command = [*environment, sys.executable, "-m", "fleet.command", "serve", *where]
        self._process: subprocess.Popen[bytes] | None = None
        _ACCOUNT.mkdir(parents=True)
        (_ACCOUNT / "token").write_text(at.token)
        (_ACCOUNT / "ca.crt").write_bytes((at.folder / "certificates/apiserver.crt").read_bytes())

    def start(self) -> None:
        """As a kubelet would, after it has ended."""
        self._process = self._at.start("service", *self._command)

    def kill(self) -> None:
        """With SIGKILL; its figures are read before."""
        assert self._process is not None
        self.read()
        self._process.kill()
        self._process.wait()

    def places(self) -> bool:
        """Whether it would place a pod now."""
        try:
            with urllib.request.urlopen(f"http://{_SERVICE}/healthz", timeout=10) as answer:
                return json.load(answer)["refusal"] is None
        except OSError:
            return False

    def read(self) -> None:
        """Its histogram of filters is added to that of those before it."""
        with urllib.request.urlopen(f"http://{_SERVICE}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        for line in text.splitlines():
            if line.startswith("gpuwarden_fleet_extender_duration_seconds_bucket{") and 'verb="filter"' in line:
                self._buckets[float(line.split('le="')[1].split('"')[0])] += float(line.rpartition(" ")[2])

    def quantile_ms(self, part: float) -> float | None:
        """Of all filters."""
        found = quantile(self._buckets, part)
        return None if found is None else 1e3 * found

    @property
    def filters(self) -> int:
        return int(max(self._buckets.values(), default=0))

    def rss_mib(self) -> float:
        """Largest of the present process."""
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def quantile(buckets: Mapping[float, float], part: float) -> float | None:
    """Within its bucket as Prometheus interpolates. `buckets`: upper bound → how many are at most that."""
    bounds = sorted(buckets)
    wanted = part * buckets[bounds[-1]] if bounds else 0.0
    low, below = 0.0, 0.0
    for bound in bounds:
        upto = buckets[bound]
        if upto >= wanted > 0:
            return low if bound == inf else low + (bound - low) * (wanted - below) / (upto - below)
        low, below = bound, upto
    return None


def make_nodes(write: Writer, pool: ThreadPoolExecutor, count: int) -> None:
    """Ready ones, as a kubelet reports itself."""
    capacity = {"cpu": "64", "memory": "512Gi", "pods": "110"}

    def make(at: int) -> None:
        conditions = [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]
        body = {
            "metadata": {"name": f"node-{at}", "labels": {"kubernetes.io/hostname": f"node-{at}"}},
            "status": {"capacity": capacity, "allocatable": capacity, "conditions": conditions},
        }
        write("POST", "/api/v1/nodes", body)
        write("PATCH", f"/api/v1/nodes/node-{at}", {"spec": {"taints": None}})  # not-ready: no controller takes it off

    list(pool.map(make, range(count)))


def configuration(at: Cluster, helm: str) -> Path:
    """The chart's, with what a process outside of a pod needs, and without the client's limit of 50 writes a second."""
    values = {"fleet": {"enabled": True, "prometheus": "http://127.0.0.1"}}
    objects = yaml.safe_load_all(render(helm, at.folder, values))
    (found,) = [one for one in objects if one and "scheduler.yaml" in one.get("data", {})]
    document = yaml.safe_load(found["data"]["scheduler.yaml"])
    document["clientConnection"] = {"kubeconfig": f"{at.folder}/kubeconfig", "qps": 1000, "burst": 2000}
    path = at.folder / "scheduler.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def place_for(pods: Pods, seconds: float) -> float:
    """Pods per second, for so long."""
    begun_s, before = time.monotonic(), pods.judge.count
    while time.monotonic() - begun_s < seconds:
        pods.top_up()
        time.sleep(_LOOK_S)
    return (pods.judge.count - before) / (time.monotonic() - begun_s)


def place_with_kills(pods: Pods, service: Service, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of the main run."""
    begun_s, before, away_s, killed_s = time.monotonic(), pods.judge.count, 0.0, None
    kills = deque((at + 1) * options.seconds / (options.kills + 1) for at in range(options.kills))
    after = 0
    while (now_s := time.monotonic()) - begun_s < options.seconds:
        pods.top_up()
        if killed_s is not None and service.places():
            after = after or pods.judge.count
            if pods.judge.count > after:
                away_s, killed_s, after = away_s + time.monotonic() - killed_s, None, 0
        elif killed_s is None and kills and now_s - begun_s > kills[0]:
            kills.popleft()
            killed_s = time.monotonic()
            service.kill()
            service.start()
        time.sleep(_LOOK_S)
    seconds, placed = time.monotonic() - begun_s, pods.judge.count - before
    service.read()
    return {
        "seconds": seconds,
        "bound": placed,
        "kills": options.kills - len(kills),
        "away_seconds": away_s,
        "pods_per_second": placed / (seconds - away_s),
        "pods_per_second_with_kills": placed / seconds,
    }


def scale(options: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    folder = options.folder / "scale"
    controllers = ("serviceaccount", "serviceaccount-token", "namespace")
    with control_plane(folder, options.programs, *controllers) as at, ThreadPoolExecutor(_WRITERS) as pool:
        trial = Trial(at, options.helm)
        write, judge, stop = Writer(at.token), Judge(), threading.Event()
        figures = ("bench.fleet.prometheus", _PROMETHEUS, options.nodes, _GPUS)
        at.start("prometheus", "env", f"PYTHONPATH={ROOT}", sys.executable, "-m", *figures)
        at.kubectl("create", "namespace", "batch")
        make_nodes(write, pool, options.nodes)
        trial.say(f"the API server has {options.nodes:,} nodes")
        service = Service(at)
        service.start()
        (folder / "token").write_text(at.token)
        api = KubernetesApi(
            Access(f"https://{API_ADDRESS}:443", folder / "token", folder / "certificates/apiserver.crt")
        )
        threading.Thread(target=follow, args=(api, judge, stop), daemon=True).start()
        at.start("kube-scheduler", options.programs / "kube-scheduler", f"--config={configuration(at, options.helm)}")
        try:
            found = measure(trial, service, Pods(write, judge, pool, options.nodes * _GPUS // 2), options)
        finally:
            stop.set()
        return {"scale": found}


def measure(trial: Trial, service: Service, pods: Pods, options: argparse.Namespace) -> dict[str, Any]:
    """With and without the extender."""
    until(service.places, "the service's first plan")
    until(lambda: "default" in trial.at.kubectl("get", "serviceaccount", "-n", "batch", check=False), "an account")
    baseline = place_for(pods, _BASELINE_S)
    trial.say(f"without the extender: {baseline:.0f} pods a second")
    pods.delete_all()
    pods.extended = True
    found = place_with_kills(pods, service, options)
    found |= {
        "nodes": options.nodes,
        "gpus": options.nodes * _GPUS,
        "pods_per_second_without": baseline,
        "filters": service.filters,
        "filter_p50_ms": service.quantile_ms(0.5),
        "filter_p99_ms": service.quantile_ms(0.99),
        "double_bookings": len(pods.judge.doubles),
        "rss_mib": service.rss_mib(),
    }
    found["misses"] = misses(found)
    trial.say(
        f"{found['bound']:,} pods placed on {found['gpus']:,} GPUs in {found['seconds']:.0f} s, with {found['kills']} "
        f"kills of the service: {found['pods_per_second']:.0f} pods a second, "
        f"{found['pods_per_second_with_kills']:.0f} with the {found['away_seconds']:.0f} s without a service"
    )
    trial.say(
        f"filter: p50 {found['filter_p50_ms'] or 0:.1f} ms, p99 {found['filter_p99_ms'] or 0:.1f} ms of "
        f"{found['filters']:,}; GPUs given to two pods: {found['double_bookings']}"
    )
    return found


def misses(found: Mapping[str, Any]) -> list[str]:
    """Goals that were not reached."""
    wrong = []
    if found["filter_p99_ms"] is None or found["filter_p99_ms"] > GOALS["filter_p99_ms"]:
        wrong.append(f"filter p99 {found['filter_p99_ms']} ms, goal {GOALS['filter_p99_ms']}")
    if found["pods_per_second"] < GOALS["pods_per_second"]:
        wrong.append(f"{found['pods_per_second']:.1f} pods a second, goal {GOALS['pods_per_second']}")
    if found["double_bookings"]:
        wrong.append(f"{found['double_bookings']} GPUs were given to two pods")
    return wrong
