# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whose memory counts against the room that all offline containers share: that of processes which NVML lists."""

from __future__ import annotations

import pytest

from agent.core.model import (
    ContainerKey,
    ContainerUsage,
    Device,
    DeviceReading,
    Process,
    ProcessId,
    ProcessUsage,
    Snapshot,
    Usage,
)
from enforce.memory.planner import MemoryPlanState, limits
from enforce.memory.view import OfflineStatus, group_quotas, view_of
from enforce.policy.model import Limits, Match, OfflineRule, OnlineRule, Policy, Role, Slo, Tuning
from tests.support.decisions import GPU, workload_of

GIB = 1 << 30
DEVICE = Device(0, GPU, "GPU", "0:1", 132, 4 * GIB)
HONEST, LIAR = ContainerKey("c:honest"), ContainerKey("c:liar")
OFFLINE = OfflineRule("training", Match(), "headroom", None, 1.0, Limits(None, 0.05, 1, None), ("deny", "evict"))
ONLINE = OnlineRule("chat", Match(), Slo("gpu_wait", 0.99, 5_000_000, 1_000_000_000, 20), 2 * GIB)
POLICY = Policy(True, (ONLINE,), (OFFLINE,), (), Tuning(1, 1, 1, 1, 1))
HERE = {key: workload_of(key, Role.OFFLINE, OFFLINE) for key in (HONEST, LIAR)}


def snapshot(*listed: ContainerKey) -> Snapshot:
    """Each that is listed has 1 GiB."""
    usage = Usage(GPU, None, None, GIB, None, None, None, memory_by_kind={"plain": GIB})
    members = [HERE[key].members[0].process for key in listed]
    return Snapshot(
        0,
        0,
        1,
        devices=(DeviceReading(DEVICE, memory_used_bytes=len(listed) * GIB),),
        containers=tuple(ContainerUsage(HERE[key].container, (usage,), ()) for key in listed),
        processes=tuple(ProcessUsage(Process(one.id, "x", "u", one.container), (usage,)) for one in members),
    )


def tgid_of(key: ContainerKey) -> ProcessId:
    return HERE[key].members[0].process.id


@pytest.mark.parametrize("listed", [(HONEST,), (HONEST, LIAR)])
def test_others_are_refused_only_for_what_listed_processes_have(listed: tuple[ContainerKey, ...]) -> None:
    view = view_of(POLICY, snapshot(*listed), HERE, OfflineStatus())
    quotas = group_quotas(view, HERE, limits(MemoryPlanState(), view), {GPU: 0})
    room = 2 * GIB - len(listed) * GIB
    assert {process for process, _ in quotas[None, 0].members} == {tgid_of(key) for key in listed}
    assert quotas[None, 0].limit_bytes == len(listed) * GIB + room
    assert quotas.keys() - {(None, 0)} == ({(LIAR, 0)} if LIAR not in listed else set())
    if LIAR not in listed:  # what it has of its own is bounded by what there is
        assert quotas[LIAR, 0].limit_bytes == room
        assert {process for process, _ in quotas[LIAR, 0].members} == {tgid_of(LIAR)}
