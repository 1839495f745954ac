# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The kubelet's pod-resources API over a real gRPC socket, its messages written by this file byte by byte."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from agent.containers.grpc_channel import message
from agent.containers.identity import identify
from agent.containers.kubelet import Holder, by_device
from agent.containers.naming import Naming
from agent.containers.runtimes import KUBELET, Socket
from agent.core.clock import NS_PER_SECOND
from tests.support.clocks import AheadClock
from tests.support.pretenders import serving
from tools.harness.wait import until

LONG_NS = 3600 * NS_PER_SECOND
GPU = "GPU-0a1b2c3d-0000-4000-8000-000000000001"
MIG = "MIG-0a1b2c3d-0000-4000-8000-000000000002"


def field(number: int, content: bytes | str) -> bytes:
    """A length-delimited field of protobuf's wire format."""
    content = content.encode() if isinstance(content, str) else content
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + varint(value >> 7)


def devices(resource: str, *ids: str) -> bytes:
    """ContainerDevices, with the topology that a real kubelet adds."""
    topology = field(3, field(1, b"\x08\x00"))
    return field(1, resource) + b"".join(field(2, each) for each in ids) + topology


def pod(name: str, namespace: str, container: str, *held: bytes) -> bytes:
    cpus = field(3, b"\x00\x01\x02")
    inside = field(1, container) + b"".join(field(2, each) for each in held) + cpus
    return field(1, field(1, name) + field(2, namespace) + field(3, inside))


SAID = (
    pod("chat-0", "serving", "server", devices("nvidia.com/gpu", GPU))
    + pod("notebook", "research", "lab", devices("nvidia.com/mig-1g.10gb", MIG), devices("vendor.com/nic", "nic0"))
    + pod("idle", "research", "lab", devices("nvidia.com/gpu.shared", f"{GPU}::0", f"{GPU}::3"))
    + pod("plain", "default", "web")
)


@pytest.mark.parametrize("version", ["v1", "v1alpha1"])
def test_the_holder_of_a_device_is_known_though_it_runs_nothing(tmp_path: Path, version: str) -> None:
    with (
        serving(tmp_path / "s", {f"/{version}.PodResourcesLister/List": lambda _: SAID}),
        Naming([Socket(KUBELET, str(tmp_path / "s"))], LONG_NS) as naming,
    ):
        until(lambda: naming.holders() is not None, "the kubelet's answer")
        assert naming.holders() == {
            GPU: (
                Holder("research", "idle", "lab", "nvidia.com/gpu.shared", replicas=2),
                Holder("serving", "chat-0", "server", "nvidia.com/gpu"),
            ),
            MIG: (Holder("research", "notebook", "lab", "nvidia.com/mig-1g.10gb"),),
        }
        assert naming.counts() == {(KUBELET, "found"): 1}


def test_without_a_kubelet_nothing_is_known(tmp_path: Path) -> None:
    with Naming([Socket(KUBELET, str(tmp_path / "s"))]) as naming:
        assert naming.holders() is None


def test_a_kubelet_with_no_pods_reports_that_nothing_is_held(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "s", {"/v1.PodResourcesLister/List": lambda _: b""}),
        Naming([Socket(KUBELET, str(tmp_path / "s"))], LONG_NS) as naming,
    ):
        until(lambda: naming.holders() is not None, "the kubelet's answer")
        assert naming.holders() == {}


def test_a_kubelet_that_went_away_is_believed_for_two_minutes(tmp_path: Path) -> None:
    clock = AheadClock()
    with ExitStack() as kubelet, Naming([Socket(KUBELET, str(tmp_path / "s"))], LONG_NS, clock) as naming:
        kubelet.enter_context(serving(tmp_path / "s", {"/v1.PodResourcesLister/List": lambda _: SAID}))
        clock.ahead_ns += 60 * NS_PER_SECOND
        naming.named(identify("/docker/" + "a" * 64))  # something to do: it looks at the clock
        until(lambda: naming.holders() is not None, "the kubelet's answer")
        kubelet.close()
        clock.ahead_ns += 50 * NS_PER_SECOND  # it may have answered before the first jump already: 110 s ago
        assert naming.holders() is not None
        clock.ahead_ns += 71 * NS_PER_SECOND
        assert naming.holders() is None


@pytest.mark.parametrize("answer", [b"\xff\xff\xff", field(1, b"\xff" * 10), field(1, field(1, b"\xff\xfe"))])
def test_garbage_is_an_error(tmp_path: Path, answer: bytes) -> None:
    with (
        serving(tmp_path / "s", {"/v1.PodResourcesLister/List": lambda _: answer}),
        Naming([Socket(KUBELET, str(tmp_path / "s"))], LONG_NS) as naming,
    ):
        until(lambda: naming.counts() == {(KUBELET, "error"): 1}, "a counted error")
        assert naming.holders() is None


def test_of_a_flood_of_replicas_as_many_are_counted_as_a_node_may_have() -> None:
    ids = [f"{GPU}::{replica}" for replica in range(100_000)]
    answer = message("ListPodResourcesResponse").FromString(pod("p", "n", "c", devices("nvidia.com/gpu.shared", *ids)))
    ((holder,),) = by_device(answer).values()
    assert holder.replicas == 16_384
