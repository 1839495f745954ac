# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What can be done to make room is asked seldom, reported without acting too, and judged by its outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agent.core.model import ContainerKey, ContainerUsage, Device, DeviceReading, Snapshot, Usage
from enforce.ledger.entries import LedgerEntry
from enforce.memory.controller import MemoryController, MemoryOutcome
from enforce.model import Subject
from enforce.policy.model import Limits, Match, OfflineRule, OnlineRule, Policy, Role, Slo, Tuning
from tests.support.decisions import GPU, workload_of

GIB, SECOND_NS = 1 << 30, 1_000_000_000
DEVICE = Device(0, GPU, "H200", "0:1", 132, 80 * GIB)
CHAT, TRAINING = ContainerKey("c:chat"), ContainerKey("c:training")
OFFLINE = OfflineRule("training", Match(), "headroom", None, 1.0, Limits(None, 0.05, 1, None), ("swap", "evict"))
ONLINE = OnlineRule("chat", Match(), Slo("gpu_wait", 0.99, 5_000_000, SECOND_NS, 20), 20 * GIB)


@dataclass
class Step:
    """A rung that counts how often it is asked."""

    name: str
    why_not: str | None = None
    asked: int = 0

    def obstacle(self, _subject: Subject) -> str | None:
        self.asked += 1
        return self.why_not

    def intents(self, _subject: Subject) -> Sequence[LedgerEntry]:
        return ()

    def apply(self, _subject: Subject) -> None:
        raise AssertionError


@dataclass
class Doing:
    """What the controller reads of `enforce.actuators.executor.Rungs`."""

    forces: frozenset[str] = frozenset()
    failed: dict[str, str] = field(default_factory=dict)

    def in_force(self, _key: ContainerKey) -> frozenset[str]:
        return self.forces

    def troubles(self, _key: ContainerKey) -> Mapping[str, str]:
        return self.failed


HERE = {CHAT: workload_of(CHAT, Role.ONLINE, ONLINE), TRAINING: workload_of(TRAINING, Role.OFFLINE, OFFLINE)}


class Node:
    """A device that is full of training while an online container has a reserve of a quarter of it."""

    def __init__(self, doing: Doing | None) -> None:
        self.swap, self.evict = Step("swap"), Step("evict")
        policy = Policy(doing is not None, (ONLINE,), (OFFLINE,), (), Tuning(SECOND_NS // 10, 1, 1, 1, 1))
        table = {"swap": self.swap, "evict": self.evict}
        self.controller = MemoryController(policy, {}, table, None, doing, clock=lambda: 0)  # type: ignore[arg-type]
        self.decisions: list[tuple[str, str]] = []

    def until(self, begin: int, end: int, used: int = 79 * GIB) -> MemoryOutcome:
        """Ten decisions a second, a snapshot each second."""
        usage = Usage(GPU, None, None, 78 * GIB if used > 70 * GIB else 0, None, None, None)
        for tenth in range(begin * 10, end * 10):
            snapshot = Snapshot(
                tenth // 10 * SECOND_NS,
                0,
                SECOND_NS,
                devices=(DeviceReading(DEVICE, memory_used_bytes=used),),
                containers=(ContainerUsage(HERE[TRAINING].container, (usage,), ()),),
            )
            outcome = self.controller.step(snapshot, HERE, {GPU: 0}, tenth * SECOND_NS // 10)
            self.decisions += [(one.act, one.reason) for one in outcome.decisions]
        return outcome


def wished(outcome: MemoryOutcome) -> list[str]:
    return [rung for wishes in outcome.wishes.values() for rung in wishes]


def test_without_acting_it_reports_what_would_be_done() -> None:
    node = Node(None)
    assert wished(node.until(0, 30)) == ["swap"]
    assert [act for act, _ in node.decisions] == ["swap"]
    node = Node(None)
    node.swap.why_not = "no libcuda.so.1 on this node"
    assert wished(node.until(0, 30)) == ["evict"]


def test_what_stands_in_the_way_is_asked_once_per_snapshot() -> None:
    node = Node(Doing())
    node.until(0, 5)
    assert (node.swap.asked, node.evict.asked) == (5, 5)  # not 50


def test_what_is_in_force_or_under_way_is_not_given_up_for_an_obstacle_that_it_made_itself() -> None:
    doing = Doing()
    node = Node(doing)
    assert wished(node.until(0, 4)) == ["swap"]
    node.swap.why_not = "host memory has 1.0 GiB left for the 78.0 GiB that it holds on the device"
    assert wished(node.until(4, 6)) == ["swap"]
    doing.forces, doing.failed = frozenset({"swap"}), {"swap": "not undone yet: its memory does not fit"}
    assert wished(node.until(6, 9, used=65 * GIB)) == ["swap"]
    assert [act for act, _ in node.decisions] == ["swap"]


def test_a_swap_that_fails_is_followed_by_an_eviction() -> None:
    doing = Doing()
    node = Node(doing)
    assert wished(node.until(0, 4)) == ["swap"]
    doing.failed = {"swap": "it is an MPS client"}
    assert wished(node.until(4, 5)) == ["evict"]
    assert [act for act, _ in node.decisions] == ["swap", "evict"]
    assert node.decisions[1][1].endswith("it could not be swapped out")


def test_a_failed_swap_that_is_no_longer_needed_is_not_reported_as_restored() -> None:
    doing = Doing()
    node = Node(doing)
    node.until(0, 4)
    doing.failed = {"swap": "it is an MPS client"}
    assert wished(node.until(4, 5, used=10 * GIB)) == []
    assert node.decisions[-1] == ("restore", "it could not be swapped out")
