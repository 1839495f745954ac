# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Names from a real containerd: of pods over its CRI plugin, of other containers over its own API."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import closing

import pytest

from agent.containers import ContainerIndex
from agent.containers.cri import Containerd, Cri
from agent.containers.identity import POD_UID, identify
from agent.containers.naming import Naming
from agent.containers.runtimes import Socket
from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import SourceError
from agent.core.model import Container
from agent.node.procfs import Procfs
from tests.support.kubelet import IMAGE, Kubelet, Pod, running_kubelet
from tools.harness.wait import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="containerd with real cgroups needs root")


@pytest.fixture(scope="module")
def kubelet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubelet]:
    with running_kubelet(tmp_path_factory.mktemp("containerd")) as kubelet:
        yield kubelet


@pytest.fixture(scope="module")
def pod(kubelet: Kubelet) -> Iterator[Pod]:
    annotations = {"gpuwarden.io/class": "online", "gpuwarden.io/slo-p99": "50ms", "checksum/config": "1"}
    with kubelet.pod("chat-0", "serving", {"app": "chat"}, annotations) as pod:
        yield pod


def soon() -> int:
    return monotonic_ns() + 5 * NS_PER_SECOND


def by_cgroup(kubelet: Kubelet, container_id: str) -> Container:
    return ContainerIndex().container_of(Procfs().process_id(kubelet.tgid(container_id)))


def test_a_pods_container_gets_the_names_that_kubernetes_gave_it(kubelet: Kubelet, pod: Pod) -> None:
    full_id = kubelet.run(pod, "server")
    before = by_cgroup(kubelet, full_id)
    assert (before.runtime, before.name, before.pod) == ("containerd", full_id[:12], None)
    with Naming([Socket("cri", str(kubelet.socket))], 10 * NS_PER_SECOND) as naming:
        assert naming.named(before) is before
        until(lambda: naming.named(before) is not before, "a name")
        it = naming.named(before)
        assert (it.name, it.pod, it.namespace, it.image) == ("server", "chat-0", "serving", IMAGE)
        assert (it.labels["app"], it.labels[POD_UID]) == ("chat", before.labels[POD_UID])
        assert it.labels["io.kubernetes.container.name"] == "server"
        assert it.annotations == {"gpuwarden.io/class": "online", "gpuwarden.io/slo-p99": "50ms"}
        assert (it.key, it.id, it.cgroup) == (before.key, full_id, f"{pod.cgroup}/{full_id}")
        assert naming.counts() == {("cri", "found"): 1}


def test_a_container_that_ended_still_has_its_names(kubelet: Kubelet, pod: Pod) -> None:
    full_id = kubelet.run(pod, "batch")
    it = by_cgroup(kubelet, full_id)
    kubelet.stop(full_id)
    with closing(Cri(str(kubelet.socket))) as cri:
        names = cri.look_up(it, soon())
    assert names
    assert (names.name, names.pod) == ("batch", "chat-0")


def test_an_unknown_id_has_no_names(kubelet: Kubelet) -> None:
    stranger = identify(f"/docker/{secrets.token_hex(32)}")
    for source in Cri, Containerd:
        with closing(source(str(kubelet.socket))) as asked:
            assert asked.look_up(stranger, soon()) is None


def test_part_of_an_id_names_no_container(kubelet: Kubelet, pod: Pod) -> None:
    it = by_cgroup(kubelet, kubelet.run(pod, "other"))
    with closing(Cri(str(kubelet.socket))) as cri, pytest.raises(SourceError, match="the answer is about another"):
        cri.look_up(Container(it.key, "part", "containerd", it.id[:40]), soon())


def test_a_container_that_containerd_runs_without_kubernetes_gets_its_names(kubelet: Kubelet) -> None:
    full_id = secrets.token_hex(32)
    cgroup = f"/system.slice/nerdctl-{full_id}.scope"
    labels = ["--label", "nerdctl/name=trainer", "--label", "team=vision", "--label", "io.kubernetes.pod.name=chat-0"]
    kubelet.ctr("default", "run", "-d", "--snapshotter", "native", "--cgroup", cgroup, *labels, IMAGE, full_id)
    try:
        it = identify(cgroup)
        sockets = [Socket(kind, str(kubelet.socket)) for kind in ("cri", "containerd")]
        with Naming(sockets, 10 * NS_PER_SECOND) as naming:
            until(lambda: naming.named(it) is not it, "a name")
            named = naming.named(it)
        assert (named.name, named.image, named.labels["team"]) == ("trainer", IMAGE, "vision")
        assert (named.pod, named.namespace, named.labels.get("io.kubernetes.pod.name")) == (None, None, None)
    finally:
        kubelet.ctr("default", "task", "kill", "-s", "KILL", full_id)
        until(lambda: "STOPPED" in kubelet.ctr("default", "task", "list"), "the task to be stopped")
        kubelet.ctr("default", "container", "delete", full_id)
