# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What can be checked of packaging/kubernetes without helm and kubectl: `make kubernetes-check` has both."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from agent.containers.runtimes import BUILTIN, KUBELET
from agent.exporters.api.client import PATH
from agent.exporters.usage.store import DEFAULT_FILE
from agent.node.preflight import ANY_KERNEL
from enforce.policy.load import load, parse
from enforce.recovery.backstop import ENDING_SECONDS
from gpuwarden.main import parsers
from gpuwarden.options import DEFAULT_POLICY, DEFAULT_RUN_DIR

ROOT = Path(__file__).parents[4]

PLACE = ROOT / "packaging/kubernetes"

CHART = PLACE / "chart"

MIB = {"Mi": 1, "Gi": 1024}


def objects(path: Path) -> dict[str, dict[str, Any]]:
    """Kind → object, as committed."""
    return {one["kind"]: one for one in yaml.safe_load_all(path.read_text())}


BASE = objects(PLACE / "base/gpuwarden.yaml")

POD = BASE["DaemonSet"]["spec"]["template"]["spec"]

AGENT, STAND_BY = POD["containers"]

BOTH = pytest.mark.parametrize("container", [AGENT, STAND_BY], ids=["agent", "stand-by"])

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())

SCHEMA = Draft7Validator(json.loads((CHART / "values.schema.json").read_text()))

PROPERTIES = json.loads((CHART / "values.schema.json").read_text())["properties"]


def mounted(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Path inside → its volume and mount."""
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    return {mount["mountPath"]: {**mount, **volumes[mount["name"]]} for mount in container["volumeMounts"]}


def mebibytes(quantity: str) -> int:
    return int(quantity[:-2]) * MIB[quantity[-2:]]


@cache
def version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


@pytest.mark.parametrize("path", ["base/gpuwarden.yaml", "monitoring/podmonitor.yaml"])
def test_what_is_committed_is_rendered_from_the_chart_as_it_is(path: str) -> None:
    """`make kubernetes` renders it again."""
    sources = subprocess.run([PLACE / "sources.sh"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert f"Sources: {sources}" in (PLACE / path).read_text()


def test_an_editors_leavings_are_no_source_of_what_is_rendered(tmp_path: Path) -> None:
    place = tmp_path / "kubernetes"
    (place / "chart/files").mkdir(parents=True)
    shutil.copy(PLACE / "sources.sh", place)
    (place / "chart/values.yaml").write_text("a: 1\n")

    def of_these() -> str:
        return subprocess.run([place / "sources.sh"], capture_output=True, text=True, check=True, timeout=60).stdout

    unpacked = of_these()
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", "-C", place, *command], check=True, timeout=60)
    assert of_these() == unpacked
    (place / "chart/values.yaml~").write_text("a: 0\n")
    assert of_these() == unpacked
    (place / "chart/values.yaml").write_text("a: 2\n")
    assert of_these() != unpacked


def test_the_version_is_the_projects() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version(), version())
    example = yaml.safe_load((PLACE / "examples/enforce/kustomization.yaml").read_text())
    assert [image["newTag"] for image in example["images"]] == [version()]


@BOTH
def test_both_containers_run_this_versions_image(container: dict[str, Any]) -> None:
    assert container["image"] == f"localhost/gpuwarden:{version()}"


@BOTH
def test_a_container_has_the_capabilities_that_are_needed_and_nothing_else(container: dict[str, Any]) -> None:
    security = container["securityContext"]
    assert not security["privileged"]
    assert not security["allowPrivilegeEscalation"]
    assert security["readOnlyRootFilesystem"]
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert security["capabilities"]["drop"] == ["ALL"]
    assert {f"CAP_{name}" for name in security["capabilities"]["add"]} == set(ANY_KERNEL)


def test_the_pod_shares_the_nodes_processes_and_no_more() -> None:
    assert POD["hostPID"]
    assert not {"hostNetwork", "hostIPC", "hostUsers", "shareProcessNamespace"} & set(POD)


def test_the_agent_has_no_account_with_the_api_server() -> None:
    assert POD["automountServiceAccountToken"] is False
    assert BASE["ServiceAccount"]["automountServiceAccountToken"] is False
    assert not [kind for kind in BASE if "Role" in kind]


@BOTH
def test_its_command_line_is_understood(container: dict[str, Any]) -> None:
    gpuwarden, _ = parsers()
    gpuwarden.parse_args(container["args"])


def test_the_agent_serves_where_probes_and_the_monitor_look() -> None:
    listen = parsers()[0].parse_args(AGENT["args"]).listen
    (port,) = AGENT["ports"]
    assert listen == f"0.0.0.0:{port['containerPort']}"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert AGENT[probe]["httpGet"]["port"] == port["name"]
    monitor = objects(PLACE / "monitoring/podmonitor.yaml")["PodMonitor"]["spec"]
    (scraped,) = monitor["podMetricsEndpoints"]
    assert (scraped["port"], scraped["honorLabels"]) == (port["name"], True)
    labels = BASE["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        monitor["selector"],
        BASE["DaemonSet"]["spec"]["selector"],
        BASE["NetworkPolicy"]["spec"]["podSelector"],
    ):
        assert selector["matchLabels"].items() <= labels.items()


def test_what_the_agent_reads_and_writes_on_the_node_is_mounted_where_it_looks() -> None:
    mounts = mounted(AGENT)
    for own in (DEFAULT_RUN_DIR, DEFAULT_FILE.parent):
        assert mounts[str(own)]["hostPath"] == {"path": str(own), "type": "DirectoryOrCreate"}
        assert not mounts[str(own)].get("readOnly")
    assert PATH.parent == DEFAULT_RUN_DIR
    assert mounts["/sys/fs/cgroup"]["hostPath"]["path"] == "/sys/fs/cgroup"
    for path in [socket.path for socket in BUILTIN if socket.kind == KUBELET or "/run/containerd/" in socket.path]:
        assert mounts[str(Path(path).parent)]["readOnly"]


def test_the_policy_is_mounted_as_a_directory_so_that_changes_arrive() -> None:
    mount = mounted(AGENT)[str(DEFAULT_POLICY.parent)]
    assert "subPath" not in mount
    assert mount["configMap"]["name"] == BASE["ConfigMap"]["metadata"]["name"]
    assert mount["configMap"]["defaultMode"] & 0o022 == 0, "one that others can write is refused"
    assert DEFAULT_POLICY.name in BASE["ConfigMap"]["data"]


def test_the_stand_by_reaches_all_that_the_agent_may_have_to_undo() -> None:
    mounts = mounted(STAND_BY)
    assert mounts[str(DEFAULT_RUN_DIR)] == mounted(AGENT)[str(DEFAULT_RUN_DIR)]
    assert mounts["/sys/fs/cgroup"] == mounted(AGENT)["/sys/fs/cgroup"]
    assert STAND_BY["securityContext"] == AGENT["securityContext"]
    assert POD["terminationGracePeriodSeconds"] > ENDING_SECONDS


def test_by_default_nothing_is_slowed_and_the_example_slows() -> None:
    assert not parse(BASE["ConfigMap"]["data"]["policy.yaml"], "base").enforce
    assert load(PLACE / "examples/enforce/policy.yaml").enforce


def test_the_memory_that_is_asked_for_is_more_than_was_measured() -> None:
    (measured,) = re.findall(r"agent \d+–(\d+) MiB", (ROOT / "docs/measured.md").read_text())
    kernel_mebibytes = 32  # the most that the tables take, and they are the container's
    asked = mebibytes(AGENT["resources"]["requests"]["memory"])
    assert asked > int(measured) + kernel_mebibytes
    assert mebibytes(AGENT["resources"]["limits"]["memory"]) >= asked * 2
    assert "cpu" not in AGENT["resources"]["limits"], "a guardian that waits for its turn makes pauses longer"


def test_only_prometheus_in_the_namespaces_that_are_named_is_let_in() -> None:
    """A label alone is no hindrance: any tenant can give it to a pod."""
    (rule,) = BASE["NetworkPolicy"]["spec"]["ingress"]
    (peer,) = rule["from"]
    (chosen,) = peer["namespaceSelector"]["matchExpressions"]
    assert chosen == {
        "key": "kubernetes.io/metadata.name",
        "operator": "In",
        "values": VALUES["networkPolicy"]["namespaces"],
    }
    assert peer["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "prometheus"}


def test_the_example_is_for_any_cluster() -> None:
    """An object of a kind that the cluster does not have fails all of `kubectl apply`."""
    example = yaml.safe_load((PLACE / "examples/enforce/kustomization.yaml").read_text())
    assert (example["resources"], example.get("components")) == (["../../base"], None)


def test_each_runtime_has_its_socket_and_its_kubelet() -> None:
    helpers = (CHART / "templates/_helpers.tpl").read_text()
    (routes,) = re.findall(r'define "gpuwarden.runtime" -}}\n(.*?)\n{{- end', helpers, re.DOTALL)
    assert set(yaml.safe_load(routes)) == set(PROPERTIES["runtime"]["enum"])
    (others,) = re.findall(r"\$others := dict (.*?) }}", helpers)
    words = [word.strip('"') for word in others.split()]
    directories = dict(zip(words[::2], words[1::2], strict=True))
    assert directories == {"k0s": "/var/lib/k0s/kubelet", "microk8s": "/var/snap/microk8s/common/var/lib/kubelet"}
    assert not VALUES["kubeletDirectory"], "it would count instead"
    assert 'include "gpuwarden.kubelet"' in (CHART / "templates/daemonset.yaml").read_text()


def test_agents_are_replaced_a_few_at_a_time_and_one_after_the_other_on_a_node() -> None:
    strategy = BASE["DaemonSet"]["spec"]["updateStrategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}}  # no maxSurge


def test_every_value_is_in_the_schema_and_the_defaults_are_right() -> None:
    assert not list(SCHEMA.iter_errors(VALUES))
    assert set(PROPERTIES) - {"global"} == set(VALUES)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda values: values.update(polcy="x"), ""),
        (lambda values: values["image"].update(digest="latest"), "image/digest"),
        (lambda values: values.update(runtime="rkt"), "runtime"),
        (lambda values: values["listen"].update(port="9837"), "listen/port"),
        (lambda values: values.update(maxUnavailable=0), "maxUnavailable"),
        (lambda values: values.update(policy={"version": 1}), "policy"),
        (lambda values: values.update(kubeletDirectory="var/lib/kubelet"), "kubeletDirectory"),
        (lambda values: values["networkPolicy"].update(namespaces="monitoring"), "networkPolicy/namespaces"),
        (lambda values: values.update(terminationGracePeriodSeconds=5), "terminationGracePeriodSeconds"),
    ],
)
def test_a_wrong_value_is_refused_and_named(change: Callable[[dict[str, Any]], None], where: str) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    change(values)
    assert ["/".join(map(str, error.absolute_path)) for error in SCHEMA.iter_errors(values)] == [where]
