# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden fleet plan` on a real Prometheus that scrapes a real agent: the label names of both have to agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.node import TRAINING, Agent, Node
from tests.e2e.prometheus import CONFIG, Prometheus
from tools.harness.wait import until

SERVING = ("--rate", "20", "--kernels", "4", "--kernel-us", "1000", "--seconds", "3600", "--start-now")


@dataclass(frozen=True, slots=True)
class Fleet:
    """One node that enforces, its Prometheus, and a waiting pod."""

    node: Node
    agent: Agent
    scraper: Prometheus
    pods: Path

    def plan(self, *options: str) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.scraper.port}"
        command = ("fleet", "plan", "--prometheus", url, "--pods", str(self.pods), "--window", "5m", "--json", *options)
        done = self.node.run(*command)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def fleet(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    annotations = {"gpuwarden.io/memory": "1Gi", "gpuwarden.io/kernel": "2ms", "gpuwarden.io/kind": "etl"}
    pod = {
        "metadata": {"name": "etl-1", "namespace": "batch", "annotations": annotations},
        "spec": {"schedulerName": "gpuwarden"},
        "status": {"phase": "Pending"},
    }
    (folder / "pods.json").write_text(json.dumps({"items": [pod]}))
    policy = node.policy(enforce=True).replace("target: 400ms", "target: 60s")
    with ExitStack() as stack:
        stack.enter_context(node.container("chat", "online", SERVING))
        agent = stack.enter_context(node.agent(policy, run_dir="fleet"))
        scraper = Prometheus(folder, CONFIG.format(port=agent.port).replace("200ms", "1s"))  # a scrape may be slow
        stack.callback(scraper.close)
        scraper.until('gpuwarden_device_health{state="healthy"} == 1')
        scraper.until("rate(gpuwarden_device_online_gaps_total[5m]) > 0")
        yield Fleet(node, agent, scraper, folder / "pods.json")


def with_a_pair(fleet: Fleet) -> dict[str, Any] | None:
    """A scrape that failed leaves no figures until the next one."""
    plan = fleet.plan()
    return plan if plan["pairs"] else None


def test_a_gpu_with_an_online_service_that_leaves_time_is_given_to_the_waiting_pod(fleet: Fleet) -> None:
    plan = until(lambda: with_a_pair(fleet), "a pair")
    assert [(one["job"], one["online"]) for one in plan["pairs"]] == [("batch/etl-1", "chat")]
    assert plan["pairs"][0]["gpu"] in {str(one.device.uuid) for one in fleet.agent.snapshot().devices}
    assert 0 < plan["pairs"][0]["expected_throughput"] < 1
    assert plan["waiting"] == []


def test_a_pod_that_needs_more_memory_than_there_is_waits(fleet: Fleet) -> None:
    def refused() -> dict[str, Any] | None:
        plan = fleet.plan("--reserve", "10TiB")
        return plan if plan["slots"] else None

    plan = until(refused, "a GPU that has room")
    assert (plan["pairs"], plan["waiting"]) == ([], ["batch/etl-1"])


def test_a_gpu_that_has_an_offline_job_is_given_to_no_second_one(fleet: Fleet) -> None:
    with fleet.node.container("training", "offline", TRAINING):
        until(lambda: fleet.plan()["no_slots"] == {"has an offline job": 1}, "the offline job to be seen")
        assert fleet.plan()["pairs"] == []
    until(lambda: with_a_pair(fleet), "the GPU to be free again")
