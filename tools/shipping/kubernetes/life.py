# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The steps of `trial.sh life`: install, see pods by name, change the policy, kill the agent, update, delete.

What is held is a training job's pod beside a server that never rests, so each stop would last ten seconds: one that
ends sooner was ended by what is tried.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from enforce.ledger import ledger
from tools.harness.containers.busybox_image import write_image
from tools.shipping.kubernetes.cluster import ROOT, Cluster, cluster, until

CHART = ROOT / "packaging/kubernetes/chart"
BUILD = ROOT / "sim/build"
LEDGER = Path("/run/gpuwarden/ledger.jsonl")
IMAGE = "localhost/gpuwarden:trial"
POLICY = """\
version: 1
enforce: {enforce}
online:
  - name: serving
    match: {{namespace: serving}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: 400ms, window: 10s}}
offline:
  - name: batch
    match: {{namespace: batch}}
    limits: {{max_pause: 10s, floor: 0%}}
    ladder: [gate, pace]
"""
ALWAYS_BUSY = "online --rate 10 --kernels 40 --kernel-us 5000 --seconds 3600 --start-now"
TRAINING = "offline --kernels 20 --kernel-us 500 --seconds 3600"


@dataclass
class Trial:
    """The cluster with GPU Warden in it."""

    at: Cluster
    helm: str
    began: float = field(default_factory=time.monotonic)

    def say(self, what: str) -> None:
        """Prints a line for a step that is done."""
        print(f"{time.monotonic() - self.began:6.1f} s  {what}", flush=True)

    def apply(self, policy: str, **more: Any) -> None:
        """Applies the chart, as `helm template` renders it for this version. `more`: values, by their first name."""
        values = {"image": {"repository": "localhost/gpuwarden", "tag": "trial"}, "policy": policy, **more}
        rendered = render(self.helm, self.at.folder, values)
        self.at.kubectl("apply", "-f", "-", given=rendered)  # each object names its namespace

    def pod(self, name: str = "gpuwarden") -> dict[str, Any]:
        """The pod of the DaemonSet, or of another part, that is not being deleted, as soon as there is one."""

        def alive() -> list[dict[str, Any]]:
            return [pod for pod in self.pods(name) if "deletionTimestamp" not in pod["metadata"]]

        return dict(until(alive, f"a pod of {name}")[0])

    def pods(self, name: str = "gpuwarden") -> list[dict[str, Any]]:
        """All pods of the DaemonSet, or of another part."""
        return list(self.at.get("pods", "-n", "gpuwarden", "-l", f"app.kubernetes.io/name={name}")["items"])

    def ready(self, name: str = "gpuwarden") -> bool:
        """Whether both containers are ready."""
        found = self.pods(name)
        statuses = [one for pod in found for one in pod["status"].get("containerStatuses", [])]
        return len(found) == 1 and len(statuses) == 2 and all(one["ready"] for one in statuses)

    def log(self, container: str, *more: str) -> str:
        """Log of a container of the pod."""
        return self.at.kubectl("logs", "-n", "gpuwarden", self.pod()["metadata"]["name"], "-c", container, *more)

    def exec(self, *command: str) -> str:
        """Runs a command in the agent's container; returns its output."""
        return self.at.kubectl("exec", "-n", "gpuwarden", self.pod()["metadata"]["name"], "-c", "agent", "--", *command)

    def metrics(self) -> str:
        """A scrape, as Prometheus would; empty where it does not answer yet."""
        url = f"http://{self.pod()['status']['podIP']}:9837/metrics"
        with suppress(OSError, HTTPException), urllib.request.urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())
        return ""

    def main_process(self, namespace: str, name: str, container: str) -> int:
        """The pid of a container's first process."""
        pod = next(one for one in self.at.get("pods", "-n", namespace)["items"] if one["metadata"]["name"] == name)
        status = next(one for one in pod["status"]["containerStatuses"] if one["name"] == container)
        identifier = status["containerID"].rpartition("/")[2]
        listed = subprocess.run(
            ["ctr", "-n", "k8s.io", "task", "ls"], capture_output=True, text=True, check=True
        ).stdout
        return int(next(line.split()[1] for line in listed.splitlines() if line.startswith(identifier)))


def render(helm: str, folder: Path, values: dict[str, Any]) -> str:
    """The chart's objects for Kubernetes 1.20."""
    (folder / "values.json").write_text(json.dumps(values))
    command = [helm, "template", "gpuwarden", str(CHART), "--namespace", "gpuwarden"]
    done = subprocess.run(
        [*command, "--kube-version", "1.20.2", "--values", folder / "values.json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def state(tgid: int) -> str:
    """The process' state, one letter as in /proc/PID/stat."""
    return Path(f"/proc/{tgid}/stat").read_text().rpartition(")")[2].split()[0]


def workload(namespace: str, name: str, command: str) -> dict[str, Any]:
    """A pod that uses the GPU."""
    program, *arguments = command.split()
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": [f"/sim/{program}", *arguments],
        "volumeMounts": [{"name": "sim", "mountPath": "/sim"}],
    }
    volume = {"name": "sim", "hostPath": {"path": str(BUILD / "bin")}}
    spec = {
        "runtimeClassName": "nvidia",
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [volume],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace}, "spec": spec}


@contextmanager
def simulated_gpus(folder: Path, count: int = 1) -> Iterator[None]:
    """The server of simulated GPUs, as long as the block lasts."""
    folder.mkdir(parents=True)
    environment = {"GPUSIM_DIR": str(folder), "GPUSIM_GPUS": str(count)}
    server = subprocess.Popen([BUILD / "bin/gpusim", "serve"], env=environment, stdout=subprocess.PIPE)
    try:
        assert server.stdout
        assert server.stdout.readline() == b"ready\n"
        yield
    finally:
        server.terminate()
        server.wait(30)


def stopped_for(tgid: int, act: Callable[[], object], seconds: float = 60.0) -> float:
    """How long after `act` the process was last seen stopped, in seconds. Polls each half millisecond."""
    until(lambda: state(tgid) == "T", "the training to be stopped", step_seconds=0.0005)
    began = last = time.monotonic()
    act()
    while (now := time.monotonic()) - last < 1.0:
        if state(tgid) == "T":
            last = now
        assert now - began < seconds, f"still stopped after {seconds} s"
        time.sleep(0.0005)
    return last - began


def prepare(trial: Trial) -> None:
    """What a cluster with NVIDIA's runtime has, and the namespaces."""
    at = trial.at
    at.kubectl("label", "node", "node1", "nvidia.com/gpu.present=true")
    at.kubectl("apply", "-f", str(ROOT / "packaging/kubernetes/base/namespace.yaml"))
    runtime = {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "nvidia"},
        "handler": "nvidia",
    }
    at.kubectl("apply", "-f", "-", given=json.dumps(runtime))
    for namespace in ("serving", "batch"):
        at.kubectl("create", "namespace", namespace)
        until(lambda: at.kubectl("get", "serviceaccount", "default", "-n", namespace, check=False), "its account")  # noqa: B023


def install(trial: Trial) -> None:
    prepare(trial)
    trial.apply(POLICY.format(enforce="false"))
    until(trial.ready, "the DaemonSet to be ready")
    trial.say("installed: agent (alive, probes attached) and stand-by are ready, without privileged")


def see(trial: Trial) -> int:
    at = trial.at
    for pod in (workload("serving", "chat", ALWAYS_BUSY), workload("batch", "training", TRAINING)):
        at.kubectl("apply", "-f", "-", given=json.dumps(pod))
    until(lambda: 'pod="training"' in trial.metrics(), "the pod in the metrics")
    until(lambda: all(name in trial.exec("gputop", "--once") for name in ("chat", "training")), "the pods in gputop")
    shown = [line for line in trial.metrics().splitlines() if "container_sm_ratio{" in line and "training" in line]
    assert 'namespace="batch"' in shown[0], shown
    trial.say(f"pods by name: {shown[0]}")
    return trial.main_process("batch", "training", "main")


def change_policy(trial: Trial, training: int) -> None:
    before = trial.pod()["metadata"]["uid"]
    began = time.monotonic()
    trial.apply(POLICY.format(enforce="true"))
    until(lambda: "policy reloaded" in trial.log("agent"), "the policy to be reloaded")
    seconds = time.monotonic() - began
    trial.say(f"the ConfigMap's new policy is in force {seconds:.1f} s after kubectl apply, without a restart")
    assert trial.pod()["metadata"]["uid"] == before
    until(lambda: state(training) == "T", "the training to be stopped", step_seconds=0.001)
    trial.apply("version: 1\nenfroce: true\n")
    until(lambda: "gpuwarden_policy_reload_success 0.0" in trial.metrics(), "the invalid policy to be reported")
    until(lambda: state(training) == "T", "the training to be stopped still", step_seconds=0.001)
    trial.apply(POLICY.format(enforce="true"))
    until(lambda: "gpuwarden_policy_reload_success 1.0" in trial.metrics(), "the valid policy")
    trial.say("an invalid policy is refused and reported, the old one stays in force")


def kill_the_agent(trial: Trial, training: int) -> None:
    name = trial.pod()["metadata"]["name"]
    agent = trial.main_process("gpuwarden", name, "agent")
    seconds = stopped_for(training, lambda: os.kill(agent, signal.SIGKILL))
    trial.say(f"SIGKILL of the agent: the training runs again after {seconds * 1e3:.1f} ms")
    until(trial.ready, "the agent to be started again")
    until(lambda: state(training) == "T", "the training to be stopped again", step_seconds=0.001)
    trial.say("the kubelet started it again, and it enforces again")
    agent = trial.main_process("gpuwarden", name, "agent")
    for undoing in [int(path.name) for path in Path("/proc").iterdir() if undoes_for(path, agent)]:
        os.kill(undoing, signal.SIGSTOP)  # it shall not be the one
    seconds = stopped_for(training, lambda: os.kill(agent, signal.SIGKILL))
    log = trial.log("stand-by")
    assert "released" in log, log
    trial.say(
        f"the same with a guardian and a backstop that cannot act: stand-by released after {seconds * 1e3:.1f} ms"
    )
    until(trial.ready, "the agent to be started again")


def undoes_for(process: Path, agent: int) -> bool:
    """Whether it is the agent's guardian or backstop."""
    if not process.name.isdigit():
        return False
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
        parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return False
    return parent == agent and not {b"enforce.recovery.guardian", b"enforce.recovery.backstop"}.isdisjoint(words)


def update(trial: Trial, training: int) -> None:
    until(lambda: state(training) == "T", "the training to be stopped again", step_seconds=0.001)
    before = trial.pod()["metadata"]["name"]
    seconds = stopped_for(
        training, lambda: trial.at.kubectl("delete", "pod", "-n", "gpuwarden", before, "--wait=false")
    )
    trial.say(f"the pod is deleted: the training runs again {seconds:.2f} s later")
    until(lambda: trial.ready() and trial.pod()["metadata"]["name"] != before, "a new pod")
    before = trial.pod()["metadata"]["name"]
    trial.apply(POLICY.format(enforce="false"), podAnnotations={"trial": "updated"})
    until(lambda: trial.ready() and trial.pod()["metadata"]["name"] != before, "the update")
    assert ledger.read(LEDGER) == []
    assert state(training) != "T"
    trial.say("rolling update to a policy that only observes: nothing is stopped, and the ledger is empty")


def delete(trial: Trial, training: int) -> None:
    trial.apply(POLICY.format(enforce="true"))
    until(lambda: state(training) == "T", "the training to be stopped again", step_seconds=0.001)
    seconds = stopped_for(
        training, lambda: trial.at.kubectl("delete", "daemonset", "gpuwarden", "-n", "gpuwarden", "--wait=false")
    )
    until(lambda: not trial.at.get("pods", "-n", "gpuwarden")["items"], "the pods to be gone")
    assert ledger.read(LEDGER) == []
    trial.say(f"deleted: the training runs again {seconds:.2f} s later, and nothing is left to undo")


def main() -> None:
    folder, programs, helm, image = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    write_image(folder / "pause.tar", "localhost/pause:1")
    with simulated_gpus(folder / "gpu"), cluster(folder / "node", programs, BUILD, folder / "gpu") as at:
        trial = Trial(at, helm)
        trial.say(f"Kubernetes {json.loads(at.kubectl('get', '--raw', '/version'))['gitVersion']}: the node is ready")
        at.load_image(folder / "pause.tar", "localhost/pause:1")
        at.load_image(image, IMAGE)
        install(trial)
        training = see(trial)
        change_policy(trial, training)
        kill_the_agent(trial, training)
        update(trial, training)
        delete(trial, training)
    print("the node is gone; every step worked")


if __name__ == "__main__":
    main()
