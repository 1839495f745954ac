# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What can be done for memory's sake is asked seldom, told without acting too, and judged by what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agent.members import Member
from agent.model import (
    Container,
    ContainerKey,
    ContainerUsage,
    Device,
    DeviceReading,
    DeviceUuid,
    Process,
    ProcessId,
    Snapshot,
    Usage,
)
from enforce.entries import Entry
from enforce.memory.keeper import Keeper, Kept
from enforce.model import Subject
from enforce.policy.model import (
    Classification,
    Limits,
    Match,
    OfflineRule,
    OnlineRule,
    Policy,
    Role,
    Slo,
    Tuning,
)
from enforce.roster import Seat

GIB, SECOND_NS = 1 << 30, 1_000_000_000
GPU = DeviceUuid("GPU-0")
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

    def intents(self, _subject: Subject) -> Sequence[Entry]:
        return ()

    def apply(self, _subject: Subject) -> None:
        raise AssertionError


@dataclass
class Doing:
    """What the keeper reads of `enforce.rungs.Rungs`."""

    forces: frozenset[str] = frozenset()
    failed: dict[str, str] = field(default_factory=dict)

    def in_force(self, _key: ContainerKey) -> frozenset[str]:
        return self.forces

    def troubles(self, _key: ContainerKey) -> Mapping[str, str]:
        return self.failed


def seat(key: ContainerKey, role: Role, rule: OfflineRule | OnlineRule) -> Seat:
    container = Container(key, key[2:], "runc")
    member = Member(Process(ProcessId(len(key), 1), "x", "u", key), container, (GPU,))
    return Seat(container, Classification(role, rule), (member,), frozenset({GPU}))


HERE = {CHAT: seat(CHAT, Role.ONLINE, ONLINE), TRAINING: seat(TRAINING, Role.OFFLINE, OFFLINE)}


class Node:
    """A device that is full of training while an online container was promised a quarter of it."""

    def __init__(self, doing: Doing | None) -> None:
        self.swap, self.evict = Step("swap"), Step("evict")
        policy = Policy(doing is not None, (ONLINE,), (OFFLINE,), (), Tuning(SECOND_NS // 10, 1, 1, 1, 1))
        table = {"swap": self.swap, "evict": self.evict}
        self.keeper = Keeper(policy, {}, table, None, doing, clock=lambda: 0)  # type: ignore[arg-type]
        self.told: list[tuple[str, str]] = []

    def until(self, begin: int, end: int, used: int = 79 * GIB) -> Kept:
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
            kept = self.keeper.step(snapshot, HERE, {GPU: 0}, tenth * SECOND_NS // 10)
            self.told += [(one.act, one.reason) for one in kept.told]
        return kept


def wished(kept: Kept) -> list[str]:
    return [rung for wishes in kept.wishes.values() for rung in wishes]


def test_without_acting_it_is_said_what_would_be_done() -> None:
    node = Node(None)
    assert wished(node.until(0, 30)) == ["swap"]
    assert [act for act, _ in node.told] == ["swap"]
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
    assert [act for act, _ in node.told] == ["swap"]


def test_a_swap_that_fails_is_followed_by_an_eviction() -> None:
    doing = Doing()
    node = Node(doing)
    assert wished(node.until(0, 4)) == ["swap"]
    doing.failed = {"swap": "it is an MPS client"}
    assert wished(node.until(4, 5)) == ["evict"]
    assert [act for act, _ in node.told] == ["swap", "evict"]
    assert node.told[1][1].endswith("it could not be swapped out")


def test_a_failed_swap_that_nobody_needs_any_more_is_not_told_as_if_it_came_back() -> None:
    doing = Doing()
    node = Node(doing)
    node.until(0, 4)
    doing.failed = {"swap": "it is an MPS client"}
    assert wished(node.until(4, 5, used=10 * GIB)) == []
    assert node.told[-1] == ("restore", "it could not be swapped out")
