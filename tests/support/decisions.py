# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Workloads as the controllers get them, and decisions about one offline container that is held for an online one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agent.containers.gpu_processes import GpuProcess
from agent.core.model import Container, ContainerKey, DeviceUuid, Process, ProcessId
from enforce.audit.decision_log import DecisionRecord
from enforce.audit.model import ContainerInfo
from enforce.policy.model import Classification, Role, Rule
from enforce.workloads import Workload

GPU = DeviceUuid("GPU-0")
NS = 1_000_000_000
OFFSET = 1_800_000_000 * NS
TRAIN = ContainerInfo("docker:aaaa1111", "train", "train-0", "batch", "aaaa1111", "offline", "training")
CHAT = ContainerInfo("docker:cccc2222", "server", "chat-0", "serving", "cccc2222", "online", "chat")
BASE = DecisionRecord(
    wall_ns=OFFSET,
    container=TRAIN.key,
    device="GPU-1",
    rule="training",
    law="headroom",
    latency_ns=40_000_000.0,
    samples=120,
    quantile=0.99,
    target_ns=50_000_000,
    slack_ratio=0.2,
    share_before=1.0,
    share_after=1.0,
    max_queued_ns=2_000_000,
    reason="slack 20%: waiting to grow",
    acted=True,
    name=TRAIN.name,
    pod=TRAIN.pod,
    namespace=TRAIN.namespace,
    ruler=CHAT.key,
    ruler_name=CHAT.name,
    rungs=("gate", "pace"),
)


def workload_of(key: ContainerKey, role: Role, rule: Rule | None) -> Workload:
    """A container with one process on GPU; the container's name is its key without the first two characters."""
    container = Container(key, key[2:], "runc")
    member = GpuProcess(Process(ProcessId(len(key), 1), "x", "u", key), container, (GPU,))
    return Workload(container, Classification(role, rule), (member,), frozenset({GPU}))


def at(seconds: float, **changed: Any) -> DecisionRecord:
    """BASE so many seconds later, with these fields changed."""
    return replace(BASE, wall_ns=OFFSET + int(seconds * NS), **changed)
