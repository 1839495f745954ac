# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A real Kubernetes on this machine: etcd, API server and controllers, and of one node scheduler, kubelet, containerd.

To be used inside mount and network namespaces of its own (trial.sh makes them): /run, /var/lib/kubelet and
/var/lib/gpuwarden are its own there, and so are addresses. Processes and cgroups are the machine's. Leaving the `with`
block ends everything that was started and removes the cgroups. There is no kube-proxy: the one
service that pods use, that of the API server, has its address on the loopback of the node.
"""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tools.harness import cgroups, wait

ROOT = Path(__file__).resolve().parents[3]
NODE_ADDRESS = "10.99.0.1"
PODS = "10.98.0.0/24"
API_ADDRESS = "10.96.0.1"  # of the API server's service, port 443
_CONTAINERD = """
version = 2
root = "{folder}/containerd"
state = "/run/containerd/state"
oom_score = 0
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs"]
[grpc]
  address = "/run/containerd/containerd.sock"
[ttrpc]
  address = "/run/containerd/containerd.sock.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = "localhost/pause:1"
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
        BinaryName = "{folder}/nvidia-runtime"
"""
_CNI = {
    "cniVersion": "0.4.0",
    "name": "pods",
    "plugins": [
        {"type": "ptp", "ipam": {"type": "host-local", "subnet": PODS, "routes": [{"dst": "0.0.0.0/0"}]}},
    ],
}
_KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "address": NODE_ADDRESS,
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "cgroupDriver": "cgroupfs",
    "failSwapOn": False,
    "oomScoreAdj": 0,
    "evictionHard": {"nodefs.available": "1%", "imagefs.available": "1%", "memory.available": "100Mi"},
    "healthzBindAddress": "127.0.0.1",
    "protectKernelDefaults": False,
    "enforceNodeAllocatable": ["pods"],
    "syncFrequency": "2s",  # how soon a changed ConfigMap is noticed; a minute by default
    "registryPullQPS": 0,
}
_PATIENCE_SECONDS = 120.0
_SYSCTLS = {"vm/overcommit_memory": "1", "kernel/panic": "10", "kernel/panic_on_oops": "1"}  # kubelet insists


T = TypeVar("T")


def until(condition: Callable[[], T | None], what: str, step_seconds: float = 0.1) -> T:
    """tools.harness.wait.until, with the patience that a cluster needs."""
    return wait.until(condition, what, _PATIENCE_SECONDS, step_seconds)


@dataclass(frozen=True)
class Cluster:
    """`folder`: all of its files. `programs`: where Kubernetes lies. `token`: of an administrator."""

    folder: Path
    programs: Path
    token: str
    start: Starter

    def kubectl(self, *arguments: str, given: str | None = None, check: bool = True) -> str:
        """Runs kubectl; returns its output."""
        command = [str(self.programs / "kubectl"), f"--kubeconfig={self.folder}/kubeconfig", *arguments]
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=180)
        if check and done.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, *arguments: str) -> dict[str, Any]:
        """`kubectl get`: an object, or a list of them."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return found

    def load_image(self, archive: Path, name: str) -> None:
        """As a pull would. `archive`: an archive, or an OCI layout's folder."""
        ctr = ["ctr", "-n", "k8s.io", "image"]
        if archive.is_dir():
            packed = self.folder / "image.tar"
            subprocess.run(["tar", "-C", archive, "-cf", packed, "."], check=True)
            archive = packed
        done = subprocess.run([*ctr, "import", archive], check=True, capture_output=True, text=True)
        found = done.stdout.split()[1]
        if found != name:
            subprocess.run([*ctr, "tag", found, name], check=True, capture_output=True)


@contextmanager
def control_plane(folder: Path, programs: Path, *controllers: str) -> Iterator[Cluster]:
    """etcd, API server and controllers, ready to be used. `controllers`: as kube-controller-manager takes them."""
    with ExitStack() as stack:
        token = secrets.token_hex(16)
        _lay_out(folder, token)
        _network(stack)
        made = Cluster(folder, programs, token, Starter(folder, stack))
        _etcd(made.start, folder)
        _api_server(made.start, folder, programs)
        until(lambda: made.kubectl("get", "--raw", "/readyz", check=False) == "ok", "the API server")
        accounts = [f"--service-account-private-key-file={folder}/account.key", "--use-service-account-credentials"]
        trust = f"--root-ca-file={folder}/certificates/apiserver.crt"  # holds the authority that signed it, too
        what = f"--controllers={','.join(controllers or ('*',))}"
        made.start(
            "kube-controller-manager", programs / "kube-controller-manager", *client(folder), *accounts, trust, what
        )
        yield made


def client(folder: Path) -> list[str]:
    """Options of a controller or a scheduler that is alone."""
    return [f"--kubeconfig={folder}/kubeconfig", "--bind-address=127.0.0.1", "--leader-elect=false"]


@contextmanager
def cluster(folder: Path, programs: Path, build: Path, gpu: Path) -> Iterator[Cluster]:
    """Ready to be used. `build`: of the simulated GPU, whose server's folder is `gpu`."""
    with control_plane(folder, programs) as made:
        start = made.start
        _give_gpus(folder, build, gpu)
        start("containerd", "containerd", "--config", folder / "containerd.toml")
        start.stack.callback(_end_containers)
        start("kube-scheduler", programs / "kube-scheduler", *client(folder))
        root = f"/gpuwarden-{secrets.token_hex(4)}"  # whatever else lies in its kubepods the kubelet would end
        start.stack.callback(_remove_cgroups, root, _make_cgroups(root))
        start(
            "kubelet",
            programs / "kubelet",
            f"--config={folder}/kubelet.json",
            f"--kubeconfig={folder}/kubeconfig",
            "--container-runtime=remote",
            "--container-runtime-endpoint=unix:///run/containerd/containerd.sock",
            "--hostname-override=node1",
            f"--node-ip={NODE_ADDRESS}",
            f"--cgroup-root={root}",
            "--pod-infra-container-image=localhost/pause:1",
            "--network-plugin=cni",
        )
        until(lambda: "True" in _ready(made), "the node to be ready")
        yield made
        for namespace in ("batch", "serving", "gpuwarden"):
            made.kubectl("delete", "namespace", namespace, "--ignore-not-found", "--timeout=150s")
        until(lambda: not made.get("pods", "-A")["items"], "all pods to be gone")


def _ready(made: Cluster) -> str:
    path = '{.status.conditions[?(@.type=="Ready")].status}'
    return made.kubectl("get", "node", "node1", "-o", f"jsonpath={path}", check=False)


class Starter:
    """Starts daemons; they end with the stack."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self.stack = folder, stack

    def __call__(self, name: str, *command: object) -> subprocess.Popen[bytes]:
        """A daemon whose log is NAME.log, after what is there from an earlier one of the name."""
        with open(self._folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log, cwd=self._folder)
        self.stack.callback(_end, process)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _lay_out(folder: Path, token: str) -> None:
    (folder / "cni").mkdir(parents=True)
    (folder / "cni/10-pods.conflist").write_text(json.dumps(_CNI))
    (folder / "containerd.toml").write_text(_CONTAINERD.format(folder=folder))
    (folder / "kubelet.json").write_text(json.dumps(_KUBELET))
    (folder / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
    (folder / "kubeconfig").write_text(json.dumps(_kubeconfig(token)))
    subprocess.run(["openssl", "genrsa", "-out", folder / "account.key", "2048"], check=True, capture_output=True)
    for path, value in _SYSCTLS.items():
        file = folder / path.replace("/", "-")
        file.write_text(value + "\n")
        subprocess.run(["mount", "--bind", file, f"/proc/sys/{path}"], check=True)


def _give_gpus(folder: Path, build: Path, gpu: Path) -> None:
    (folder / "nvidia-runtime").write_bytes((ROOT / "packaging/kubernetes/trial/nvidia-runtime").read_bytes())
    (folder / "nvidia-runtime").chmod(0o755)
    (folder / "gpu.json").write_text(json.dumps({"build": str(build), "folder": str(gpu)}))


def _kubeconfig(token: str) -> dict[str, object]:
    server = {"server": f"https://{API_ADDRESS}:443", "insecure-skip-tls-verify": True}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "trial", "cluster": server}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "trial", "context": {"cluster": "trial", "user": "admin"}}],
        "current-context": "trial",
    }


def _network(stack: ExitStack) -> None:
    for words in (
        "link set lo up",
        f"addr add {API_ADDRESS}/32 dev lo",
        "link add v0 type veth peer name v1",
        f"addr add {NODE_ADDRESS}/24 dev v0",
        "link set v0 up",
        "link set v1 up",
        "route add default dev v0",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    for words in ("link del v0", f"addr del {API_ADDRESS}/32 dev lo"):
        stack.callback(subprocess.run, ["ip", *words.split()], check=True)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def _etcd(start: Starter, folder: Path) -> None:
    here, peers = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    where = [f"--listen-client-urls={here}", f"--advertise-client-urls={here}", f"--listen-peer-urls={peers}"]
    start("etcd", "etcd", f"--data-dir={folder}/etcd", *where)


def _api_server(start: Starter, folder: Path, programs: Path) -> None:
    key = f"{folder}/account.key"
    start(
        "kube-apiserver",
        programs / "kube-apiserver",
        "--etcd-servers=http://127.0.0.1:2379",
        f"--advertise-address={NODE_ADDRESS}",
        "--secure-port=443",  # the service's own: there is nothing that would translate it
        f"--cert-dir={folder}/certificates",
        "--service-account-issuer=https://trial",
        f"--service-account-signing-key-file={key}",
        f"--service-account-key-file={key}",
        f"--token-auth-file={folder}/tokens.csv",
        "--authorization-mode=Node,RBAC",
        "--service-cluster-ip-range=10.96.0.0/24",
        "--allow-privileged=false",  # nothing of ours is
        "--kubelet-preferred-address-types=InternalIP",
    )


def _end_containers() -> None:
    """Those that are left after a failure: they would outlive containerd."""
    ctr = ["ctr", "-n", "k8s.io", "task"]
    for name in subprocess.run([*ctr, "ls", "-q"], capture_output=True, text=True).stdout.split():
        subprocess.run([*ctr, "rm", "--force", name], capture_output=True, timeout=60)


def _make_cgroups(root: str) -> list[Path]:
    made = cgroups.missing(root)
    for folder in made:
        folder.mkdir()
    return made


def _remove_cgroups(root: str, made: list[Path]) -> None:
    cgroups.empty(root)
    cgroups.remove(root, made)
