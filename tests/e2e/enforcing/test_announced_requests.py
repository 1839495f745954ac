# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A service whose HTTP requests are seen before they launch: its device's gate need not wait whether one follows."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from agent.probes.abi import SLOTS, TRUSTED, U32, Gate
from tests.e2e.kernel_maps import map_of
from tests.e2e.node import TRAINING, Agent, Node, endpoint_port
from tools.harness.node import simulated_node
from tools.harness.wait import until

POLICY = """\
version: 1
enforce: true
online:
  - name: chat
    match: {{container: "chat-{token}"}}
    slo: {{signal: http, port: {port}, quantile: 0.9, target: 1s, window: 2s, min_samples: 5}}
  - name: other
    match: {{container: "other-{token}"}}
    slo: {{signal: gpu_wait, quantile: 0.9, target: 1s, window: 2s}}
offline:
  - name: training
    match: {{container: "training-{token}"}}
    ladder: [gate, pace]
"""
UNSEEN = ("--rate", "60", "--kernels", "2", "--kernel-us", "300", "--seconds", "3600", "--start-now")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("announced") / "n"
    with simulated_node(folder / "gpu"):
        yield Node(folder)


@contextmanager
def client(port: int) -> Iterator[None]:
    """Requests on one connection, which stays."""
    ending = threading.Event()

    def ask() -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
            while not ending.wait(0.01):
                connection.request("GET", "/infer")
                connection.getresponse().read()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def gates(agent: Agent) -> list[Gate]:
    with map_of(agent.process.pid, "gates") as found:
        return [gate for slot in range(SLOTS) if (gate := found.get(U32(slot))) is not None]


def is_trusted(agent: Agent) -> bool:
    return any(gate.trust >= TRUSTED for gate in gates(agent))


def test_its_gate_trusts_what_it_is_told_until_another_service_launches_unseen(node: Node) -> None:
    port = endpoint_port()
    serving = ("--rate", "0", "--port", str(port), "--kernels", "4", "--kernel-us", "500", "--seconds", "3600")
    with (
        node.container("chat", "online", (*serving, "--start-now")),
        node.container("training", "offline", TRAINING),
        node.agent(POLICY.format(token=node.token, port=port)) as agent,
    ):
        with client(port):
            until(lambda: is_trusted(agent), "the gate to trust the signal")
            until(lambda: agent.pauses(node.name("training")) > 0, "offline work to give way")
            with node.container("other", "online", UNSEEN):
                until(lambda: not is_trusted(agent), "the gate to trust it no more")
            until(lambda: is_trusted(agent), "the gate to trust it again")
        until(lambda: all(gate.served == 0 for gate in gates(agent)), "no request to be in service")
