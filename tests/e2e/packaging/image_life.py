# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The whole life of the container image: built twice, run by a real containerd as the DaemonSet runs it, removed.

`python -m tests.e2e.packaging.image_life [--image LAYOUT]` prints a line for each step and exits with 1 at the first
that fails; everything it made is removed then too, for all of it is in a mount namespace of its own. The containers get
what NVIDIA's runtime gives them, of the simulated GPU: libraries, each mounted over a file, and the GPU itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cri_api.v1 import api_pb2 as cri
from prometheus_client.parser import text_string_to_metric_families

from agent.core.errors import GoneError
from enforce.actuators.freezer.cgroup import Cgroup, FreezerCgroup
from enforce.ledger import ledger
from sim.demo.stage import Stage, simulated_gpu
from tests.e2e.node import command_line, endpoint_port, state
from tests.support.kubelet import Kubelet, Pod, running_kubelet
from tools.harness.node import BUILD
from tools.harness.wait import until
from tools.shipping.image.layout import configuration, write_layout

ROOT = Path(__file__).resolve().parents[3]
LAYOUT = ROOT / "build/image"
IMAGE = "localhost/gpuwarden"
WORKLOADS = "localhost/gpuwarden-workloads:1"
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
CHAT, TRAINING = ("serving", "chat-0"), (("batch", "train-0"), ("batch", "train-1"))
SERVING = ("--rate", "50", "--kernels", "4", "--kernel-us", "500", "--seconds", "3600", "--start-now")
WORKING = ("--kernels", "20", "--kernel-us", "500", "--seconds", "3600")
GRACE_SECONDS = 90  # as in the DaemonSet
POLICY = """\
version: 1
enforce: {enforce}
online:
  - name: chat
    match: {{namespace: serving, pod: "chat-*"}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: 1ms, window: 10s}}  # cannot be met
offline:
  - name: training
    match: {{namespace: batch}}
    law: headroom
    limits: {{max_pause: 1s, floor: 5%}}
    ladder: [gate, pace, freeze]
"""
# A device that works is not fit: offline work has to stop at once, by the last rung.
UNFIT = """\
health:
  - overlimit: {sm_activity: 1%, utilization: 1%}
    patience: 0ms
"""
# What runtimes give every container where cgroups are v2: a view of cgroups that begins at its own. Here may be v1.
RUNC = """\
#!{python}
import json, os, sys
if "create" in sys.argv:
    path = os.path.join(sys.argv[sys.argv.index("--bundle") + 1], "config.json")
    with open(path) as file:
        config = json.load(file)
    if not any(one["type"] == "cgroup" for one in config["linux"]["namespaces"]):
        config["linux"]["namespaces"].append({{"type": "cgroup"}})
    with open(path, "w") as file:
        json.dump(config, file)
os.execvp("runc", ["runc", *sys.argv[1:]])
"""


@dataclass
class Life:
    """One run. `folder`: for all that it makes."""

    folder: Path
    layout: Path
    port: int = field(default_factory=endpoint_port)
    config: Any = None  # the configuration in the image

    @property
    def stage(self) -> Stage:
        """The simulated GPU."""
        return Stage(self.folder)

    @property
    def policy(self) -> Path:
        """What a ConfigMap is on the node: a folder of links, all changed at once by another link."""
        return self.folder / "configmap"

    def build_again(self) -> str:
        """From the same packages."""
        again = self.folder / "again"
        build(again, {"PINNED": str(packages(self.layout))})
        first, second = digest(self.layout), digest(again)
        assert first == second, f"two builds are {first} and {second}"
        return f"the same digest, {first}"

    def load(self, kubelet: Kubelet) -> str:
        """Both images, into containerd."""
        manifest = blob(self.layout, digest(self.layout))
        self.config = blob(self.layout, manifest["config"]["digest"])["config"]
        for name, layout in (("agent", self.layout), ("workloads", self._workloads(manifest))):
            archive = self.folder / f"{name}.tar"
            with tarfile.open(archive, "w") as tar:
                tar.add(layout, ".")
            kubelet.ctr("k8s.io", "image", "import", archive)
        found = [line.split()[0] for line in kubelet.ctr("k8s.io", "image", "list").splitlines()]
        return ", ".join(name for name in found if name.startswith("localhost/"))

    def _workloads(self, manifest: Mapping[str, Any]) -> Path:
        """The workloads with a libcuda of their own, on the agent's lower layer."""
        base, sim = self.folder / "base", self.folder / "workloads"
        base.mkdir()
        lowest = self.layout / "blobs" / manifest["layers"][0]["digest"].replace(":", "/")
        with tarfile.open(lowest) as tar:
            tar.extractall(base, filter="fully_trusted")
        for source, target in (
            *((BUILD / "bin" / name, f"usr/bin/{name}") for name in ("online", "offline")),
            (BUILD / "lib/libcuda.so.1", f"{LIBRARIES[1:]}/libcuda.so.1"),
        ):
            path = sim / target
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(source.read_bytes())
            path.chmod(0o755)
        layout = self.folder / "workloads.layout"
        write_layout(configuration("FROM scratch\nUSER 0:0", {}), [base, sim], 1, WORKLOADS, layout)
        return layout

    def gpu(self) -> list[Any]:
        """What stands for /dev/nvidia*."""
        folder = str(self.folder / "gpu")
        return [cri.Mount(host_path=folder, container_path="/gpu")]

    def workload(self, kubelet: Kubelet, pod: Pod, name: str, args: Sequence[str], more: Sequence[Any] = ()) -> str:
        """One of them, in a container of that name."""
        return kubelet.start(
            pod,
            cri.ContainerConfig(
                metadata=cri.ContainerMetadata(name=name),
                image=cri.ImageSpec(image=WORKLOADS),
                command=args,
                envs=[cri.KeyValue(key="GPUSIM_DIR", value="/gpu")],
                mounts=[*self.gpu(), *more],
                labels={"io.kubernetes.container.name": name},
                log_path=f"{name}.log",
                linux=cri.LinuxContainerConfig(),
            ),
        )

    def agent(self, kubelet: Kubelet, pod: Pod) -> str:
        """As the DaemonSet has it. Its capabilities are in a label of the image."""
        run, data, pod_resources = (self.folder / name for name in ("run", "data", "pod-resources"))
        for path in (run, data, pod_resources):
            path.mkdir()
        beside = cri.PROPAGATION_HOST_TO_CONTAINER
        mounts = [
            cri.Mount(host_path=str(self.policy), container_path="/etc/gpuwarden", readonly=True),
            cri.Mount(host_path=str(run), container_path="/run/gpuwarden"),
            cri.Mount(host_path=str(data), container_path="/var/lib/gpuwarden"),
            cri.Mount(host_path="/sys/fs/cgroup", container_path="/sys/fs/cgroup"),
            cri.Mount(
                host_path=str(kubelet.socket.parent),
                container_path="/run/containerd",
                readonly=True,
                propagation=beside,
            ),
            cri.Mount(host_path=str(pod_resources), container_path="/var/lib/kubelet/pod-resources", readonly=True),
            *(of_the_driver(name) for name in ("libcuda.so.1", "libnvidia-ml.so.1")),
            *self.gpu(),
        ]
        capabilities = self.config["Labels"]["io.gpuwarden.capabilities"].split(",")
        security = cri.LinuxContainerSecurityContext(
            capabilities=cri.Capability(drop_capabilities=["ALL"], add_capabilities=capabilities),
            namespace_options=cri.NamespaceOption(network=cri.NODE, pid=cri.NODE),
            no_new_privs=True,
            readonly_rootfs=True,
            run_as_user=cri.Int64Value(value=0),
            seccomp=cri.SecurityProfile(profile_type=cri.SecurityProfile.RuntimeDefault),
        )
        return kubelet.start(
            pod,
            cri.ContainerConfig(
                metadata=cri.ContainerMetadata(name="agent"),
                image=cri.ImageSpec(image=f"{IMAGE}:{self.config['Labels']['org.opencontainers.image.version']}"),
                args=["run", f"--listen=127.0.0.1:{self.port}", "--log-format=json"],
                envs=[cri.KeyValue(key="GPUSIM_DIR", value="/gpu")],
                mounts=mounts,
                labels={"io.kubernetes.container.name": "agent"},
                log_path="agent.log",
                linux=cri.LinuxContainerConfig(security_context=security),
            ),
        )

    def write_policy(self, enforce: bool = False, more: str = "") -> None:
        """As the kubelet changes a ConfigMap."""
        self.policy.mkdir(exist_ok=True)
        version = Path(tempfile.mkdtemp(prefix="..", dir=self.policy))
        version.chmod(0o755)
        (version / "policy.yaml").write_text(POLICY.format(enforce=str(enforce).lower()) + more)
        os.symlink(version.name, self.policy / "..data_tmp")
        os.rename(self.policy / "..data_tmp", self.policy / "..data")
        if not (self.policy / "policy.yaml").is_symlink():
            os.symlink("..data/policy.yaml", self.policy / "policy.yaml")

    def get(self, path: str) -> str:
        """A page of the agent's."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def figures(self, metric: str, *labels: str) -> dict[tuple[str, ...], float]:
        """These labels → the value; summed over what else tells series apart."""
        found: dict[tuple[str, ...], float] = {}
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                if sample.name == metric:
                    key = tuple(sample.labels.get(label, "") for label in labels or ("namespace", "pod"))
                    found[key] = found.get(key, 0.0) + sample.value
        return found

    def truth(self, tgid: int) -> int:
        """Launches that really happened."""
        return sum(row["launches"] for row in self.stage.truth() if row["pid"] == tgid)

    def log(self) -> str:
        """The end of what the agent wrote."""
        path = self.folder / "logs/agent.log"
        return path.read_text(errors="replace")[-6000:] if path.exists() else ""


def of_the_driver(name: str) -> Any:
    """A library as NVIDIA's runtime mounts it."""
    return cri.Mount(host_path=str(BUILD / "lib" / name), container_path=f"{LIBRARIES}/{name}", readonly=True)


def build(dest: Path, more: Mapping[str, str]) -> None:
    """`make image`, to another place."""
    done = subprocess.run(
        [ROOT / "packaging/container/build.sh", dest], env={**os.environ, **more}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def packages(layout: Path) -> Path:
    """What build.sh writes beside it."""
    return layout.with_name(f"{layout.name}.packages.txt")


def digest(layout: Path) -> str:
    """Of the image's manifest."""
    return str(json.loads((layout / "index.json").read_text())["manifests"][0]["digest"])


def blob(layout: Path, name: str) -> dict[str, Any]:
    """The JSON of that digest."""
    found: dict[str, Any] = json.loads((layout / "blobs" / name.replace(":", "/")).read_bytes())
    return found


def mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"


def step(name: str, act: Callable[[], str | None]) -> None:
    """Runs it, and prints its outcome and how long it took."""
    began = time.monotonic()
    try:
        result = act()
    except BaseException:
        print(f"FAIL  {time.monotonic() - began:6.1f} s  {name}", flush=True)
        raise
    print(f"ok    {time.monotonic() - began:6.1f} s  {name}{': ' + result if result else ''}", flush=True)


@contextmanager
def started(name: str, manager: Any) -> Iterator[Any]:
    """A step that lasts."""
    with ExitStack() as stack:
        held: list[Any] = []
        step(name, lambda: held.append(stack.enter_context(manager)))
        yield held[0]


def live(life: Life) -> None:
    """From the built image to nothing."""
    logs = life.folder / "logs"
    runc = life.folder / "runc"
    runc.write_text(RUNC.format(python=sys.executable))
    runc.chmod(0o755)
    life.write_policy()
    with ExitStack() as stack:
        (life.folder / "containerd").mkdir()
        kubelet = stack.enter_context(
            started("containerd", running_kubelet(life.folder / "containerd", "overlayfs", runc))
        )
        step("the image is taken", lambda: life.load(kubelet))
        stack.enter_context(started("simulated GPU", simulated_gpu(life.stage)))
        pods = {(ns, name): stack.enter_context(kubelet.pod(name, ns, {}, logs=logs)) for ns, name in (CHAT, *TRAINING)}
        driver = [of_the_driver("libcuda.so.1")]
        ids = {CHAT: life.workload(kubelet, pods[CHAT], "chat", ["/usr/bin/online", *SERVING], driver)}
        for key in TRAINING:
            ids[key] = life.workload(kubelet, pods[key], "trainer", ["/usr/bin/offline", *WORKING])
        tgids = {key: kubelet.tgid(container) for key, container in ids.items()}
        step("workloads launch", lambda: launching(life, tgids))
        pod = stack.enter_context(kubelet.pod("gpuwarden-0", "gpuwarden", {}, host_pid=True, logs=logs))
        agent = life.agent(kubelet, pod)
        step("the agent is ready", lambda: ready(life, kubelet, agent))
        step("gputop --once in it", lambda: shown(kubelet, agent))
        step("launches are counted once", lambda: counted(life, tgids))
        step("a policy slows the offline ones", lambda: slowed(life, tgids))
        step("and freezes them", lambda: frozen(life, kubelet, agent))
        step("a container ends beside it", lambda: ended(kubelet, ids.pop(TRAINING[1])))
        del tgids[TRAINING[1]]
        step("stopped, everything is released", lambda: released(life, kubelet, agent, tgids))
    step("nothing is left", lambda: nothing_left(life))


def launching(life: Life, tgids: Mapping[Any, int]) -> str:
    until(lambda: all(life.truth(tgid) > 0 for tgid in tgids.values()), "launches of all workloads")
    return f"{len(tgids)} containers, each with launches"


def ready(life: Life, kubelet: Kubelet, agent: str) -> str:
    def answers() -> bool:
        assert kubelet.status(agent).state == cri.CONTAINER_RUNNING, f"the agent ended:\n{life.log()}"
        try:
            return bool(life.get("/readyz"))
        except OSError:
            return False

    until(answers, "/readyz")
    keys = (CHAT, *TRAINING)
    until(lambda: all(life.figures("gpuwarden_container_launches_total").get(key, 0) > 0 for key in keys), "all names")
    return f"/metrics has {', '.join('/'.join(key) for key in keys)}"


def shown(kubelet: Kubelet, agent: str) -> str:
    listing = json.loads(kubelet.execute(agent, "/usr/bin/gputop", "--once", "--json"))
    rows = {(row["container"]["namespace"], row["container"]["pod"]): row for row in listing["containers"]}
    for key in (CHAT, *TRAINING):
        assert sum(usage["totals"]["launches"] for usage in rows[key]["usage"]) > 0, f"{key} shows no launches"
    table = kubelet.execute(agent, "/usr/bin/gputop", "--once")
    assert "chat" in table, table
    assert "trainer" in table, table
    return "chat and trainer with launches"


def counted(life: Life, tgids: Mapping[Any, int]) -> str:
    """Both training containers map one file of one layer, through two mounts."""
    launches = "gpuwarden_container_launches_total"
    before, at = {key: life.truth(tgid) for key, tgid in tgids.items()}, life.figures(launches)
    began, ratios = time.monotonic(), dict.fromkeys(tgids, 0.0)

    def as_many() -> bool:
        """What is seen is as old as the last tick. Only time makes that small where the machine stands still."""
        seen = life.figures(launches)
        for key, tgid in tgids.items():
            ratios[key] = (seen[key] - at[key]) / max(1, life.truth(tgid) - before[key])
        return time.monotonic() - began > 6 and all(0.8 < ratio < 1.2 for ratio in ratios.values())

    until(as_many, lambda: f"as many launches to be seen as happen: {ratios} of them are", step_seconds=0.5)
    twice = life.figures("gpuwarden_events_lost_total", "reason").get(("duplicate",), 0)
    shares = ", ".join(f"{pod} {ratio:.2f} of the truth" for (_, pod), ratio in ratios.items())
    return f"{shares}; {twice:.0f} were seen twice, as layers look the same from inside"


def rate(life: Life, tgid: int, seconds: float = 2.0) -> float:
    """Launches per second."""
    before, began = life.truth(tgid), time.monotonic()
    until(lambda: time.monotonic() - began > seconds, "a while")
    return (life.truth(tgid) - before) / (time.monotonic() - began)


def slowed(life: Life, tgids: Mapping[Any, int]) -> str:
    key = TRAINING[0]
    before = rate(life, tgids[key])
    life.write_policy(enforce=True)
    rates = [before]

    def is_slow() -> float:
        """The pauses: a machine that stands still makes it slow as well."""
        rates.append(rate(life, tgids[key]))
        return rates[-1] < before / 2 and life.figures("gpuwarden_container_pauses_total").get(key, 0.0)

    pauses = until(is_slow, "half as many launches, by pauses of ours")
    return f"{before:.0f} launches a second before, {rates[-1]:.0f} after, {pauses:.0f} pauses"


def frozen(life: Life, kubelet: Kubelet, agent: str) -> str:
    """Looked at from the node, in the freezer that the agent used from inside its container."""
    life.write_policy(enforce=True, more=UNFIT)
    places: set[str] = set()

    def freezes() -> bool:
        entries = ledger.read(life.folder / "run/ledger.jsonl")
        places.update(str(entry.place) for entry in entries if entry.act == "freeze")
        for place in places:
            with suppress(GoneError), Cgroup(FreezerCgroup.parse(place)) as cgroup:
                if cgroup.is_frozen():
                    return True
        return False

    try:
        until(freezes, "a cgroup to be frozen", seconds=40, step_seconds=0.005)
    except TimeoutError as error:
        stances = json.loads(kubelet.execute(agent, "/usr/bin/gputop", "--once", "--json"))["enforcement"]
        raise AssertionError(f"{error}: {[(it['rungs'], it['troubles']) for it in stances.values()]}") from error
    return f"{len(places)} cgroups, such as {min(places).rpartition(':')[2]}"


def ended(kubelet: Kubelet, container: str) -> str:
    kubelet.stop(container)
    kubelet.runtime.RemoveContainer(cri.RemoveContainerRequest(container_id=container), timeout=60)
    return "and its layers can be unmounted"


def released(life: Life, kubelet: Kubelet, agent: str, tgids: Mapping[Any, int]) -> str:
    code = kubelet.stop(agent, GRACE_SECONDS)
    assert code == 0, f"exit code {code}:\n{life.log()}"
    assert ledger.read(life.folder / "run/ledger.jsonl") == [], "the ledger has something to undo"
    assert not [key for key, tgid in tgids.items() if state(tgid) in "Tt"], "a process is stopped"
    before = {key: life.truth(tgid) for key, tgid in tgids.items()}
    until(lambda: all(life.truth(tgid) > before[key] for key, tgid in tgids.items()), "launches of all")
    return "exit code 0, all of them launch"


def nothing_left(life: Life) -> str:
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {life.folder}/" in line]
    tgids = [
        int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and int(path.name) != os.getpid()
    ]
    processes = [line for tgid in tgids if f"{life.folder}/" in (line := command_line(tgid))]
    assert [*mounts, *processes] == []
    return "no mount and no process; the pods' cgroups went with them"


def of_its_own(folder: Path) -> None:
    """Containers' mounts propagate where it is asked for, as on a node, and nowhere else."""
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "--make-shared", folder], check=True)


def main() -> int:
    """0; 1 where a step failed."""
    parser = argparse.ArgumentParser(prog="image_life", description="The whole life of the container image.")
    parser.add_argument("--image", type=Path, metavar="LAYOUT", help="do not build it, take this one")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("image_life: run as root: containerd, mounts and probes need that")
    if not options.inside:
        command = [sys.executable, "-P", "-m", "tests.e2e.packaging.image_life", "--inside", *sys.argv[1:]]
        unshared = ["unshare", "--mount", "--propagation", "private", *command]
        return subprocess.run(unshared, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode
    with tempfile.TemporaryDirectory(prefix="gw-image-") as name:
        folder = Path(name)
        of_its_own(folder)
        life = Life(folder, options.image or LAYOUT)
        try:
            if options.image is None:
                step("built", lambda: build(LAYOUT, {}))
                step("built again", life.build_again)
            live(life)
        except Exception:  # noqa: BLE001  # on every error, what was made has to go
            traceback.print_exc()
            print(life.log(), file=sys.stderr)
            return 1
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
