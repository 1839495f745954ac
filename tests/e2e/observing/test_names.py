# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A pod of a real containerd on the GPU: shown, exported and ruled by its names from Kubernetes, or by its own word."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.node import TRAINING, Agent, Node
from tests.support.kubelet import Kubelet, running_kubelet
from tools.harness.node import BUILD
from tools.harness.wait import until

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
        kubelet.pod("train-0", namespace, {"team": "vision"}, {"gpuwarden.io/class": "offline"}) as pod,
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
        declared_by_the_pod(agent, row.container.key, namespace)
        made_from_what_runs(node, agent, namespace)


def declared_by_the_pod(agent: Agent, key: str, namespace: str) -> None:
    """Its annotations count where the policy lets them; elsewhere the agent reports why not."""
    agent.reload("version: 1\nenforce: false\n")
    until(lambda: stance(agent, key) == ("unmatched", None), "the rule to be gone")
    until(lambda: "annotations of the policy does not name its namespace" in agent.log.read_text(), "why not")
    agent.reload(f"version: 1\nenforce: false\nannotations: {{offline: {namespace}}}\n")
    until(lambda: stance(agent, key) == ("offline", "annotations"), "the pod's own word")


def made_from_what_runs(node: Node, agent: Agent, namespace: str) -> None:
    """Two commands: a first policy, and the word that it is right and names what runs."""
    file, socket = str(node.folder / "first.yaml"), ("--socket", str(agent.socket))
    made = node.run("policy", "init", *socket, file)
    assert made.returncode == 0, made.stderr
    assert f'match: {{namespace: {namespace}, pod: "train-*"}}' in Path(file).read_text()
    checked = node.run("check", "--live", "--json", *socket, file)
    assert checked.returncode == 0, checked.stdout
    texts = [finding["text"] for finding in json.loads(checked.stdout)["findings"]]
    assert not any(text.startswith("train") for text in texts), texts


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
