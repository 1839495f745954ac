# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`make kubernetes-check`: what helm, kubectl and the schemas of Kubernetes say of packaging/kubernetes, a line a step.

Everything that is rendered is also asked what only we can tell: whether the agent understands its command line and its
policy, and whether the socket that names containers is mounted where the agent looks for it.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import yaml
from cloudcoil.models.prometheus_operator import v1 as operator
from pydantic import BaseModel

from agent.containers.runtimes import BUILTIN, KUBELET
from enforce.policy.load import parse
from gpuwarden.main import parsers

ROOT = Path(__file__).resolve().parents[3]
PLACE = ROOT / "packaging/kubernetes"
CHART = PLACE / "chart"
SCHEMAS: Final = ("1.30", "1.34", "1.37")  # the base's oldest, and those that are in use
Object = dict[str, Any]
MONITORED: Final = ("podMonitor.enabled=true", "prometheusRule.enabled=true", "dashboards.enabled=true")
VALUES: Final[dict[str, Sequence[str]]] = {  # what --set takes
    "defaults": (),
    "monitoring": (*MONITORED, "podMonitor.labels.release=stack", "podMonitor.endpoint.interval=15s"),
    "TLS": ("webConfig.secret=gpuwarden-web", "webConfig.https=true", "podMonitor.enabled=true"),
    "client certificates": ("webConfig.secret=w", "webConfig.https=true", "webConfig.clientCertificates=true"),
    "another registry": (
        "image.repository=r.example/g",
        f"image.digest=sha256:{'a' * 64}",
        "imagePullSecrets[0].name=r",
    ),
    "an MPS daemon's pipe": (
        "extraVolumes[0].name=mps",
        "extraVolumes[0].hostPath.path=/run/nvidia-mps",
        "extraVolumeMounts[0].name=mps",
        "extraVolumeMounts[0].mountPath=/run/nvidia-mps",
    ),
    "no runtime class": ("runtimeClassName=", "priorityClassName=", "tolerations=null", "affinity=null"),
    "the fleet": (
        "fleet.enabled=true",
        "fleet.prometheus=http://prometheus.monitoring:9090",
        "podMonitor.enabled=true",
    ),
    "no network policy": ("networkPolicy.enabled=false",),
    "no namespace may read": ("networkPolicy.namespaces=null",),
    "others may read": ("networkPolicy.namespaces={a,b}", "networkPolicy.from[0].ipBlock.cidr=10.0.0.0/8"),
    "SELinux, interval": (
        "seLinuxOptions.type=spc_t",
        "extraArgs[0]=--interval=2",
        "listen.address=::",
        "listen.port=80",
    ),
    **{f"runtime {name}": (f"runtime={name}",) for name in ("crio", "k3s", "k0s", "microk8s", "docker")},
}
WRONG: Final[dict[str, str]] = {  # value → what helm has to say of it
    "polcy=x": "polcy",
    "runtime=rkt": "runtime",
    "image.digest=latest": "digest",
    "listen.port=0": "port",
    "policy=[": "policy is no YAML",
    "terminationGracePeriodSeconds=5": "terminationGracePeriodSeconds",
}
OLD: Final = "1.28"  # AppArmor by annotation


def main() -> None:
    helm, kubectl = tool("helm"), tool("kubectl")
    with tempfile.TemporaryDirectory() as folder:
        run(str(PLACE / "render.sh"), folder)
        for name in ("base/gpuwarden.yaml", "monitoring/podmonitor.yaml"):
            refuse((PLACE / name).read_text() != Path(folder, name).read_text(), f"{name} is stale: make kubernetes")
    say("base and monitoring are what the chart gives")
    notice_mistakes(
        read((PLACE / "base/gpuwarden.yaml").read_text() + (PLACE / "monitoring/podmonitor.yaml").read_text())
    )
    for name in ("base", "examples/enforce"):
        objects = read(run(kubectl, "kustomize", str(PLACE / name)))
        judge(objects, SCHEMAS)
        say(f"kubectl kustomize {name}: {len(objects)} objects, right for {', '.join(SCHEMAS)}")
    objects = read(whole_example(kubectl))
    judge(objects, SCHEMAS)
    refuse("observability" not in json.dumps(objects), "the example's patch changes nothing")
    say(f"the same with all that is commented out: {len(objects)} objects, right for {', '.join(SCHEMAS)}")
    for name, values in VALUES.items():
        settings = [word for value in values for word in ("--set", value)]
        run(helm, "lint", "--strict", "--quiet", str(CHART), *settings)
        for version in (OLD, *SCHEMAS):
            common = ("--namespace", "gpuwarden", "--kube-version", f"{version}.0")
            judge(read(run(helm, "template", "trial", str(CHART), *common, *settings)), [version])
        say(f"helm lint and template with {name}: right for {', '.join((OLD, *SCHEMAS))}")
    for value, word in WRONG.items():
        done = subprocess.run([helm, "template", "trial", CHART, "--set", value], capture_output=True, text=True)
        refuse(done.returncode == 0 or word not in done.stderr, f"helm takes --set {value}: {done.stderr}")
    say(f"helm refuses {len(WRONG)} wrong values, by their names")


def notice_mistakes(objects: Iterable[Object]) -> None:
    """The judges themselves: each kind of object with a field that does not exist has to be refused."""
    for one in objects:
        spoilt = copy.deepcopy(one)
        spoilt.get("spec", spoilt)["noSuchField"] = 1
        try:
            judge([spoilt], SCHEMAS[:1])
        except SystemExit:
            continue
        sys.exit(f"a {one['kind']} with a field that does not exist was not refused")
    say("a field that does not exist is noticed in each kind of object")


def whole_example(kubectl: str) -> str:
    """What kubectl makes of a copy in which the suggestions are taken: those lines are YAML."""
    example = PLACE / "examples/enforce"
    with tempfile.TemporaryDirectory(prefix=".whole.", dir=example.parent) as folder:
        shutil.copy(example / "policy.yaml", folder)
        text = re.sub(r"^# (?=components:|patches:|  )", "", (example / "kustomization.yaml").read_text(), flags=re.M)
        Path(folder, "kustomization.yaml").write_text(text)
        return run(kubectl, "kustomize", folder)


def tool(name: str) -> str:
    return run(str(PLACE / "tools.sh"), name).strip()


def run(*command: str) -> str:
    """The command's output. A failure ends the check with its stderr."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    refuse(done.returncode != 0, f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout


def refuse(wrong: bool, why: str) -> None:
    if wrong:
        sys.exit(why)


def say(what: str) -> None:
    print(f"ok: {what}", flush=True)


def read(text: str) -> list[Object]:
    return [one for one in yaml.safe_load_all(text) if one]


def judge(objects: Iterable[Object], versions: Sequence[str]) -> None:
    """All of them, each by its own schema; and what they say of us."""
    for one in objects:
        what = f"{one['kind']} {one['metadata']['name']}"
        if one["apiVersion"].startswith("monitoring.coreos.com/"):
            judge_operators(one, what)
        else:
            for version in versions:
                judge_kubernetes(one, version, what)
        for complaint in ours(one):
            refuse(True, f"{what}: {complaint}")


def judge_kubernetes(one: Object, version: str, what: str) -> None:
    try:
        kubernetes_validate.validate(one, version, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        sys.exit(f"{what} is wrong for Kubernetes {version}: {error}")


def judge_operators(one: Object, what: str) -> None:
    """The models ignore what they do not know, so whatever is lost on the way was no field of theirs."""
    model: type[BaseModel] = getattr(operator, one["kind"])
    kept = model.model_validate(one).model_dump(by_alias=True, exclude_unset=True, mode="json")
    missing = sorted(lost(one, kept, ""))
    refuse(bool(missing), f"{what}: the Prometheus operator knows no {', '.join(missing)}")


def lost(wanted: object, kept: object, path: str) -> Iterator[str]:
    """Paths at which `kept` lacks something of `wanted`."""
    if isinstance(wanted, dict) and isinstance(kept, dict):
        for key, value in wanted.items():
            if key not in kept:
                yield f"{path}.{key}"
            else:
                yield from lost(value, kept[key], f"{path}.{key}")
    elif isinstance(wanted, list) and isinstance(kept, list):
        if len(wanted) != len(kept):
            yield path
        for number, (a, b) in enumerate(zip(wanted, kept, strict=False)):
            yield from lost(a, b, f"{path}[{number}]")


def _read_value(name: str, text: str) -> object:
    return yaml.safe_load(text) if name.endswith(".yaml") else json.loads(text)


def ours(one: Object) -> Iterator[str]:
    """Checks that no schema can express."""
    if one["kind"] == "ConfigMap":
        for name, text in one["data"].items():
            _ = parse(text, name) if name == "policy.yaml" else _read_value(name, text)
    if one["kind"] != "DaemonSet":
        return
    pod = one["spec"]["template"]["spec"]
    gpuwarden, _ = parsers()
    for container in pod["containers"]:
        gpuwarden.parse_args(container["args"])
    agent = pod["containers"][0]
    places = [mount["mountPath"] for mount in agent["volumeMounts"]]
    kinds = {socket.kind for socket in BUILTIN if any(is_in(socket.path, place) for place in places)}
    if KUBELET not in kinds or kinds <= {KUBELET}:
        yield f"the agent sees sockets of {', '.join(sorted(kinds)) or 'no kind'} only"
    named = [volume["name"] for volume in pod["volumes"]]
    if {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]} != set(named):
        yield "volumes and mounts are not the same"


def is_in(path: str, place: str) -> bool:
    return path == place or Path(place) in Path(path).parents


if __name__ == "__main__":
    main()
