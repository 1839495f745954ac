# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One node for all tests from outside, and one agent for those that need not end it: that may take ten seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.e2e.node import ALWAYS_BUSY, TRAINING, Agent, Node, running_node
from tests.e2e.workloads import Busy
from tools.harness.wait import until

_LAST = ("test_every_symbol_in_the_metrics.py", "test_the_demo.py", "test_newcomer.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest last, and before them the one whose figures are of all programs on the machine.

    When agents begin, the other worker may still run programs of the tests at the edge; by then it is done with those.
    """
    items.sort(key=lambda item: _LAST.index(item.path.name) + 1 if item.path.name in _LAST else 0)


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """The simulated GPU, alone."""
    with running_node(tmp_path_factory.mktemp("node") / "n") as node:
        yield node


@pytest.fixture(scope="session")
def warden(node: Node) -> Iterator[Agent]:
    """An agent that is never ended; each test gives it the policy that it needs."""
    with node.agent(node.policy(enforce=False), run_dir="shared") as agent:
        yield agent


@pytest.fixture(scope="module")
def busy(node: Node) -> Iterator[Busy]:
    """Work in all of them, without end."""
    with ExitStack() as stack:
        chat = stack.enter_context(node.container("chat", "online", ALWAYS_BUSY))
        training = tuple(stack.enter_context(node.container(f"training-{n}", "offline", TRAINING)) for n in range(3))
        stranger = stack.enter_context(node.container("stranger", "offline", TRAINING))
        yield Busy(chat, training, stranger)


@pytest.fixture
def enforcing(node: Node, warden: Agent, busy: Busy) -> Iterator[Agent]:
    """The shared agent, enforcing: the training containers are being paused."""
    warden.reload(node.policy(enforce=True, max_pause="100ms"))
    until(lambda: warden.pauses(node.name("training-0")) > 0, "the first pause")
    yield warden
    warden.reload(node.policy(enforce=False))
