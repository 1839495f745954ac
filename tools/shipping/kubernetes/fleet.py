# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The steps of `trial.sh fleet`: the chart with the fleet on a real cluster, then the same scheduler at scale.

One node with two GPUs, a real Prometheus that scrapes the agent, a second kube-scheduler and the service in the chart's
own pod. An online service runs alone first, for the baseline. Three offline pods want two GPUs: two are placed, one
waits and is woken when one of them ends. A fourth can never be placed. The service is killed meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tools.harness.containers.busybox_image import write_image
from tools.shipping.kubernetes.cluster import NODE_ADDRESS, ROOT, Cluster, cluster, until
from tools.shipping.kubernetes.fleet_scale import scale
from tools.shipping.kubernetes.life import BUILD, IMAGE, Trial, prepare, simulated_gpus, workload

GPU: Final = "gpuwarden.io/gpu"
FLEET_IMAGE: Final = "localhost/gpuwarden-fleet:trial"
SCHEDULER_IMAGE: Final = "localhost/kube-scheduler:trial"
PROMETHEUS: Final = f"http://{NODE_ADDRESS}:9090"
POLICY: Final = """\
version: 1
enforce: true
online:
  - name: chat
    match: {namespace: serving}
    slo: {signal: gpu_wait, quantile: 0.99, target: 150ms, window: 10s}
offline:
  - name: batch
    match: {namespace: batch}
    ladder: [gate, pace]
"""
SERVING: Final = "online --rate 20 --kernels 10 --kernel-us 1000 --seconds 3600 --start-now --log /log/chat"
TRAINING: Final = "offline --kernels 20 --kernel-us 2000 --seconds 0 --memory 4GiB"
NOT_HERE: Final = ("refused_pods", "prediction_error", "slots", "gain")
"""Of the dashboard: nothing of that kind need be there at the end"""
WORST_RATIO: Final = 1.1
"""Of the online service's p99 beside offline work to alone"""


@dataclass
class Fleet:
    """The cluster with the fleet in it, and what was measured."""

    trial: Trial
    phase_s: float
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def at(self) -> Cluster:
        return self.trial.at

    def start(self, pods: Iterable[dict[str, Any]]) -> None:
        for pod in pods:
            self.at.kubectl("apply", "-f", "-", given=json.dumps(pod))

    def pod(self, name: str) -> dict[str, Any]:
        return self.at.get("pod", "-n", "batch", name)

    def gpu(self, name: str) -> str | None:
        """Of a pod that is bound."""
        pod = self.pod(name)
        return str(pod["metadata"]["annotations"].get(GPU)) if pod["spec"].get("nodeName") else None

    def events(self, name: str, reason: str) -> list[str]:
        """What the pod's events say."""
        selector = f"involvedObject.name={name},reason={reason}"
        return [one["message"] for one in self.at.get("events", "-n", "batch", "--field-selector", selector)["items"]]

    def explained(self, name: str) -> str:
        """By the command, in the service's container."""
        pod = self.trial.pod("gpuwarden-fleet")["metadata"]["name"]
        command = ("gpuwarden", "fleet", "explain", f"batch/{name}")
        return self.at.kubectl("exec", "-n", "gpuwarden", pod, "-c", "service", "--", *command).strip()

    def latencies_s(self) -> list[float]:
        """Of all requests so far."""
        lines = (self.at.folder / "log/chat").read_text().splitlines()
        return [float(line.split()[1]) for line in lines if line.count(" ") == 2]

    def p99_s(self) -> tuple[float, int]:
        """Of the requests from now on, for one phase; and how many there were."""
        before = len(self.latencies_s())
        time.sleep(self.phase_s)  # what is measured is a time
        found = sorted(self.latencies_s()[before:])
        return found[int(0.99 * len(found))], len(found)


def rows(expression: str) -> list[dict[str, Any]]:
    """Prometheus' answer."""
    address = f"{PROMETHEUS}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return list(json.load(answer)["data"]["result"])
    except OSError:  # not ready yet
        return []


def asked(expression: str) -> float | None:
    """Of the first row, if there is one."""
    found = rows(expression)
    return float(found[0]["value"][1]) if found else None


def job(name: str, memory: str = "8Gi") -> dict[str, Any]:
    """An offline pod as docs/fleet.md has it."""
    pod = workload("batch", name, TRAINING)
    annotations = {"gpuwarden.io/memory": memory, "gpuwarden.io/kernel": "2ms", "gpuwarden.io/kind": "etl"}
    pod["metadata"]["annotations"] = annotations
    pod["spec"]["schedulerName"] = "gpuwarden"
    main = pod["spec"]["containers"][0]
    main["resources"] = {"limits": {"gpuwarden.io/offline": "1"}}
    place = {"fieldRef": {"fieldPath": f"metadata.annotations['{GPU}']"}}
    main["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": place}]
    return pod


def service(folder: Path, gpu: str) -> dict[str, Any]:
    """The online service, whose log is read here."""
    pod = workload("serving", "chat", SERVING)
    main = pod["spec"]["containers"][0]
    main["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": gpu}]
    main["volumeMounts"].append({"name": "log", "mountPath": "/log"})
    pod["spec"]["volumes"].append({"name": "log", "hostPath": {"path": str(folder)}})
    return pod


def scrape(trial: Trial) -> None:
    """Debian's Prometheus, which cannot find pods by itself, with the labels that the chart's PodMonitors give."""
    ports = {"gpuwarden": 9837, "gpuwarden-fleet": 9839}
    targets = [f"{trial.pod(name)['status']['podIP']}:{port}" for name, port in ports.items()]
    pods = {
        "job_name": "pods",
        "honor_labels": True,
        "static_configs": [{"targets": targets, "labels": {"instance": "node1"}}],
    }
    config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [pods]}
    folder = trial.at.folder
    (folder / "prometheus.yml").write_text(json.dumps(config))
    trial.at.start(
        "prometheus",
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/prometheus",
        f"--web.listen-address={NODE_ADDRESS}:9090",
    )


def install(fleet: Fleet) -> None:
    """Agent, Prometheus, the second scheduler and the service."""
    prepare(fleet.trial)
    fleet.trial.apply(
        POLICY,
        fleet={
            "enabled": True,
            "image": {"repository": "localhost/gpuwarden-fleet", "tag": "trial"},
            "scheduler": {"repository": "localhost/kube-scheduler", "tag": "trial"},
            "prometheus": PROMETHEUS,
            "interval": "10s",
            "extraArgs": ["--window=30s", "--learn-over=40s"],
        },
    )
    until(fleet.trial.ready, "the agent to be ready")
    until(lambda: fleet.trial.ready("gpuwarden-fleet"), "the service and its scheduler to be ready")
    scrape(fleet.trial)
    fleet.trial.say("installed: agent, Prometheus, a second kube-scheduler with the chart's configuration, the service")


def alone(fleet: Fleet) -> None:
    """The online service on the first GPU."""
    until(lambda: asked("count(gpuwarden_device_info)") == 2, "two GPUs in Prometheus")
    (fleet.at.folder / "log").mkdir(mode=0o777)
    fleet.start([service(fleet.at.folder / "log", first_gpu())])
    until(lambda: asked('gpuwarden_container_slo_latency_seconds{pod="chat"}') is not None, "the service's latency")
    p99_s, count = fleet.p99_s()
    fleet.found["alone_p99_ms"] = p99_s * 1e3
    fleet.trial.say(f"the online service alone: p99 {p99_s * 1e3:.1f} ms of {count} requests")


def first_gpu() -> str:
    """UUID of the GPU 0."""
    return next(str(row["metric"]["UUID"]) for row in rows("gpuwarden_device_info") if row["metric"]["gpu"] == "0")


def place(fleet: Fleet) -> tuple[list[str], str]:
    """Three pods for two GPUs, and one that fits none. The two that are placed, and the one that waits."""
    names = ["etl-1", "etl-2", "etl-3"]
    began_s = time.monotonic()
    fleet.start([*map(job, names), job("giant", "500Gi")])

    def placed() -> list[str]:
        found = [name for name in names if fleet.gpu(name)]
        return found if len(found) == 2 else []

    two = until(placed, "two pods to be placed")
    seconds = time.monotonic() - began_s
    gpus = {fleet.gpu(name) for name in two}
    assert len(gpus) == 2, gpus
    for name in two:
        until(lambda: fleet.pod(name)["status"]["phase"] == "Running", f"{name} to run")  # noqa: B023
    fleet.trial.say(f"two of three offline pods are placed, {seconds:.1f} s after they were made, each on its own GPU:")
    for name in two:
        show(until(lambda: fleet.events(name, "GPUAssigned"), "its event")[0], fleet.explained(name))  # noqa: B023
    (third,) = set(names) - set(two)
    fleet.found["placed_after_s"] = seconds
    return two, third


def refused(fleet: Fleet, third: str) -> None:
    """Why a pod waits is in its events."""
    for name, reason in ((third, "node"), ("giant", "no healthy GPU with 500 GiB")):
        told = until(lambda: [one for one in fleet.events(name, "FailedScheduling") if reason in one], f"{name}'s")  # noqa: B023
        fleet.trial.say(f"{name} waits, and its event says why:")
        show(told[-1], fleet.explained(name))


def show(*texts: str) -> None:
    """Below a step's line."""
    for line in "\n".join(texts).splitlines():
        print(f"            {line}", flush=True)


def hold(fleet: Fleet, two: list[str]) -> None:
    """The offline pod beside the online service is slowed, and the promise is kept."""
    beside = next(name for name in two if fleet.gpu(name) == first_gpu())
    other = next(name for name in two if name != beside)
    until(lambda: rate(beside) and rate(other), "launches in Prometheus")
    slow = 'gpuwarden_container_slo_slow_requests_total{pod="chat"}'
    before = asked(slow) or 0.0
    p99_s, count = fleet.p99_s()
    missed = (asked(slow) or 0.0) - before
    paused = asked(f'rate(gpuwarden_container_paused_seconds_total{{pod="{beside}"}}[{fleet.phase_s:.0f}s])')
    assert paused, "the offline pod was never stopped"
    measured = (rate(beside) or 0.0) / (rate(other) or 1.0)
    expected = float(fleet.pod(beside)["metadata"]["annotations"]["gpuwarden.io/expected-throughput"])
    ratio = p99_s * 1e3 / fleet.found["alone_p99_ms"]
    fleet.found |= {
        "beside_p99_ms": p99_s * 1e3,
        "beside_to_alone": ratio,
        "slow_requests_ratio": missed / count,
        "paused_ratio": paused,
        "expected_throughput": expected,
        "measured_throughput": measured,
    }
    fleet.trial.say(
        f"held: the online service's p99 is {p99_s * 1e3:.1f} ms of {count} requests, {ratio:.2f} of alone, "
        f"{missed / count:.1%} over the target; {beside} was stopped for {paused:.0%} of the time"
    )
    fleet.trial.say(f"its throughput to {other}'s, alone on a GPU: {measured:.2f}; expected was {expected:.2f}")


def learn(fleet: Fleet) -> None:
    """The service measures the pair, of a pod beside the service and one alone."""
    until(lambda: asked("gpuwarden_fleet_measured_pairs"), "the pair to be measured")
    errors = until(lambda: asked("gpuwarden_fleet_prediction_error_ratio_count"), "its error")
    fleet.trial.say(f"the service has measured the pair by the agent's counters, {errors:.0f} times")


def rate(pod: str) -> float | None:
    """Launches per second, over the last half minute."""
    return asked(f'sum(rate(gpuwarden_container_launches_total{{pod="{pod}"}}[30s]))')


def kill(fleet: Fleet, two: list[str], third: str) -> None:
    """The service, while a GPU becomes free."""
    before = {name: fleet.gpu(name) for name in two}
    process = fleet.trial.main_process("gpuwarden", fleet.trial.pod("gpuwarden-fleet")["metadata"]["name"], "service")
    gone, stays = two
    began_s = time.monotonic()
    os.kill(process, signal.SIGKILL)
    fleet.at.kubectl("delete", "pod", "-n", "batch", gone, "--wait=false")
    fleet.trial.say(f"SIGKILL of the service, and {gone} is deleted")
    until(lambda: fleet.gpu(third), f"{third} to be placed")
    seconds = time.monotonic() - began_s
    assert fleet.gpu(third) == before[gone], "the GPU that became free"
    assert fleet.gpu(stays) == before[stays], "no GPU is given twice"
    fleet.found["placed_after_kill_s"] = seconds
    fleet.trial.say(f"the next service knows what {stays} has; {third} gets the GPU of {gone}, {seconds:.1f} s later")


def wake(fleet: Fleet, third: str, stays: str) -> None:
    """A pod that waits is placed soon after a GPU is free, though nothing that the scheduler sees has changed."""
    until(lambda: fleet.pod(third)["status"]["phase"] == "Running", f"{third} to run")
    fleet.start([job("etl-4")])
    until(lambda: fleet.events("etl-4", "FailedScheduling"), "etl-4 to be refused")
    fleet.at.kubectl("delete", "pod", "-n", "batch", stays, "--grace-period=1")
    until(lambda: not fleet.at.get("pods", "-n", "batch", "--field-selector", f"metadata.name={stays}")["items"], "it")
    began_s = time.monotonic()
    until(lambda: fleet.gpu("etl-4"), "etl-4 to be placed")
    fleet.found["woken_after_s"] = time.monotonic() - began_s
    fleet.trial.say(f"etl-4, which waited, is placed {fleet.found['woken_after_s']:.1f} s after {stays} was gone")
    assert fleet.gpu("giant") is None


def see(fleet: Fleet) -> None:
    """The dashboard on a Prometheus that scrapes the service as the chart's PodMonitor would have it."""
    expressions = [
        target["expr"].replace("$__rate_interval", "1m")
        for panel in json.loads((ROOT / "dashboards/grafana/gpuwarden-placement.json").read_text())["panels"]
        for target in panel.get("targets", ())
    ]
    empty = [one for one in expressions if not rows(one) and not any(name in one for name in NOT_HERE)]
    assert not empty, empty
    fleet.trial.say(f"dashboard Placement: each of {len(expressions)} expressions has a figure, where it can have one")


def steps(fleet: Fleet) -> None:
    """All of them."""
    install(fleet)
    alone(fleet)
    two, third = place(fleet)
    refused(fleet, third)
    hold(fleet, two)
    learn(fleet)
    kill(fleet, two, third)
    wake(fleet, third, two[1])
    see(fleet)


def state(fleet: Fleet) -> str:
    """What there is, after a failure."""
    logs = [
        fleet.at.kubectl("logs", "-n", "gpuwarden", "-l", f"app.kubernetes.io/name={name}", "-c", part, check=False)
        for name, part in (("gpuwarden-fleet", "service"), ("gpuwarden-fleet", "scheduler"), ("gpuwarden", "agent"))
    ]
    events = fleet.at.kubectl("get", "events", "-A", "--sort-by=.lastTimestamp", check=False).splitlines()[-30:]
    return "\n".join((fleet.at.kubectl("get", "pods", "-A", "-o", "wide", check=False), *events, *logs))


def small(options: argparse.Namespace) -> dict[str, Any]:
    """Everything on one real node."""
    folder, programs = options.folder, options.programs
    write_image(folder / "pause.tar", "localhost/pause:1")
    write_image(folder / "scheduler.tar", SCHEDULER_IMAGE, programs=[programs / "kube-scheduler"])
    with simulated_gpus(folder / "gpu", 2), cluster(folder / "node", programs, BUILD, folder / "gpu") as at:
        fleet = Fleet(Trial(at, options.helm), options.phase)
        fleet.trial.say("Kubernetes 1.20: the node is ready")
        for image, name in (
            (folder / "pause.tar", "localhost/pause:1"),
            (folder / "scheduler.tar", SCHEDULER_IMAGE),
            (options.image, IMAGE),
            (options.fleet_image, FLEET_IMAGE),
        ):
            at.load_image(image, name)
        try:
            steps(fleet)
        except BaseException:
            show(state(fleet))  # everything is gone soon
            raise
        return fleet.found


def misses(found: dict[str, Any]) -> list[str]:
    """Goals that were not reached."""
    wrong = []
    if "beside_to_alone" in found and found["beside_to_alone"] > WORST_RATIO:
        wrong.append(f"online p99 {found['beside_to_alone']:.2f} of alone, goal {WORST_RATIO}")
    return wrong + list(found.get("scale", {}).get("misses", ()))


def main() -> int:
    """Exit code: 0 when all goals are reached."""
    parser = argparse.ArgumentParser(prog="make kubernetes-fleet ARGS=…", description=__doc__)
    for name in ("folder", "programs"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("helm", help=argparse.SUPPRESS)
    for name in ("image", "fleet_image"):
        parser.add_argument(name, type=Path, help="an OCI layout or an archive of one")
    parser.add_argument("--phase", type=float, default=60.0, help="seconds of each latency (default %(default)s)")
    parser.add_argument("--nodes", type=int, default=1000, help="of the run at scale (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=300.0, help="of the run at scale (default %(default)s)")
    parser.add_argument("--kills", type=int, default=10, help="of the service at scale (default %(default)s)")
    parser.add_argument("--only", choices=("small", "scale"), help="one part")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    parts: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"small": small, "scale": scale}
    found: dict[str, Any] = {}
    for name, part in parts.items():
        if options.only in (None, name):
            found |= part(options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    missed = misses(found)
    print("\n".join(f"not reached: {miss}" for miss in missed) or "every step worked, and all goals are reached")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
