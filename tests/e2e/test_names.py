# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A pod of a real containerd on the GPU: shown, exported and ruled by the names that Kubernetes gave it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sim.demo.stage import BUILD
from tests.contract.kubelet import Kubelet, running_kubelet
from tests.e2e.node import TRAINING, Agent, Node, until

POLICY = """\
version: 1
enforce: true
offline:
  - name: research
    match: {{namespace: "research-{token}", pod: "train-*", image: "localhost/test:*", labels: {{team: vision}}}}
    law: headroom
"""


@pytest.fixture(scope="module")
def kubelet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubelet]:
    with running_kubelet(tmp_path_factory.mktemp("containerd")) as kubelet:
        yield kubelet


def test_a_pod_is_shown_exported_and_ruled_by_its_names(node: Node, kubelet: Kubelet) -> None:
    namespace = f"research-{node.token}"
    command = [str(BUILD / "bin" / "offline"), *TRAINING]
    host = dict.fromkeys(("/lib", "/lib64", "/usr", str(BUILD)), True) | {str(node.folder): False}
    with (
        kubelet.pod("train-0", namespace, {"team": "vision"}) as pod,
        node.agent(POLICY.format(token=node.token), "--names", f"cri={kubelet.socket}", run_dir="names") as agent,
    ):
        full_id = kubelet.run(pod, "trainer", command, node.stage.environment, host)
        until(lambda: named(agent, full_id) == ("trainer", "train-0", namespace), "the pod's names")
        row = next(row for row in agent.snapshot().containers if row.container.id == full_id)
        assert row.container.image == "localhost/test:1"
        assert row.container.labels["team"] == "vision"
        assert row.container.key == f"containerd:{full_id}"
        until(lambda: stance(agent, row.container.key) == ("offline", "research"), "the rule that names it")
        until(lambda: ("trainer", "train-0", namespace) in exported(agent), "its series")


def exported(agent: Agent) -> set[tuple[str, ...]]:
    """Container, pod and namespace of every series of launches."""
    families = text_string_to_metric_families(agent.metrics())
    samples = (sample for family in families for sample in family.samples if "launches" in sample.name)
    return {tuple(sample.labels.get(label, "") for label in ("container", "pod", "namespace")) for sample in samples}


def named(agent: Agent, full_id: str) -> tuple[str, str | None, str | None] | None:
    """What it is called by now."""
    found = [row.container for row in agent.snapshot().containers if row.container.id == full_id]
    return (found[0].name, found[0].pod, found[0].namespace) if found else None


def stance(agent: Agent, key: str) -> tuple[str, str | None] | None:
    """What enforcement takes it for."""
    found = {str(it): stance for it, stance in agent.snapshot().enforcement.items()}.get(key)
    return (found.role, found.rule) if found else None
