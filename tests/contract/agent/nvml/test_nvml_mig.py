# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""MIG through the real binding: instances as devices, on the simulated GPU."""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.collectors.devices import Devices
from agent.collectors.samples import ProcessMemory, ProcessUtilization
from agent.core.model import Device, DeviceReading
from agent.nvml.client import Nvml
from tests.support.clocks import AheadClock
from tests.support.nvml.reading import read_until, readings
from tools.harness.node import BUILD, Node, simulated_node

GIB = 1 << 30
DEADLINE_SECONDS = 30
LAYOUT = "3g.40gb,2g.20gb,1g.10gb"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    ctypes.CDLL(str(BUILD / "lib/libnvidia-ml.so.1"), mode=ctypes.RTLD_GLOBAL)
    with simulated_node(tmp_path / "gpu", {"gpus": "2", "mig": f"0:{LAYOUT}"}) as node:
        monkeypatch.setenv("GPUSIM_DIR", str(node.folder))
        yield node


@pytest.fixture
def clock() -> AheadClock:
    return AheadClock()


@pytest.fixture
def nvml(node: Node, clock: AheadClock) -> Iterator[Nvml]:
    with Nvml(monotonic_ns=clock) as nvml:
        yield nvml


def start(node: Node, device: Device, *words: str) -> subprocess.Popen[str]:
    arguments = ["--seconds", "0", "--kernels", "20", "--kernel-us", "500", "--blocks", "16", *words]
    process = node.start("offline", arguments, {"CUDA_VISIBLE_DEVICES": device.uuid})
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def profiles(found: list[DeviceReading]) -> list[str | None]:
    return [reading.device.mig_profile for reading in found]


def test_instances_are_devices_behind_their_gpu(nvml: Nvml) -> None:
    gpu, three, two, one, other = nvml.devices()
    assert [device.index for device in (gpu, three, two, one, other)] == [0, 0, 0, 0, 1]
    assert (gpu.parent, gpu.mig_profile, gpu.minor, gpu.sm_count) == (None, None, 0, 132)
    assert (other.parent, other.minor) == (None, 1)
    assert {device.parent for device in (three, two, one)} == {gpu.uuid}
    assert [device.mig_profile for device in (three, two, one)] == ["3g.40gb", "2g.20gb", "1g.10gb"]
    assert [device.sm_count for device in (three, two, one)] == [60, 32, 16]
    assert [device.memory_total_bytes for device in (three, two, one)] == [40 * GIB, 20 * GIB, 10 * GIB]
    assert three.uuid.startswith("MIG-")
    assert three.name == f"{gpu.name} MIG 3g.40gb"
    assert (three.pci_bus_id, three.minor) == (gpu.pci_bus_id, gpu.minor)


def test_an_instances_work_is_seen_on_that_instance_only(node: Node, nvml: Nvml) -> None:
    _, three, two, _, _ = nvml.devices()
    process = start(node, two, "--memory", "3GiB", "--host-us", "0")
    _, idle, busy, _, other = read_until(nvml, lambda r: (r[2].sm_activity_ratio or 0) > 0.1)
    assert busy.sm_activity_source == "gpm"
    assert busy.sm_activity_ratio is not None
    assert busy.sm_activity_ratio <= 0.505, "16 blocks have half of its 32 SMs at most"
    assert (idle.sm_activity_ratio, other.sm_activity_ratio) == (0.0, 0.0)
    assert busy.memory_used_bytes is not None
    assert busy.memory_used_bytes >= 3 * GIB
    assert idle.memory_used_bytes == 0
    ((tgid, used),) = nvml.processes(two)
    assert (tgid, used) == (process.pid, busy.memory_used_bytes)
    assert nvml.processes(three) == []
    assert nvml.process_utilization(two) == {}


def test_a_gpu_in_mig_mode_keeps_power_and_pcie_and_leaves_sms_and_memory_to_its_instances(
    node: Node, nvml: Nvml
) -> None:
    gpu, three, *_ = nvml.devices()
    start(node, three, "--copy-bytes", "1MiB")
    whole, part, *_ = read_until(nvml, lambda r: (r[0].pcie_rx_bytes_per_second or 0) > 0)
    for known in (whole.sm_clock_hertz, whole.power_watts, whole.power_limit_watts, whole.temperature_celsius):
        assert known
    assert (whole.sm_activity_ratio, whole.sm_activity_source) == (None, None)
    assert (whole.memory_used_bytes, whole.memory_reserved_bytes) == (None, None)
    assert (part.power_watts, part.temperature_celsius, part.pcie_rx_bytes_per_second) == (None, None, None)
    assert nvml.processes(gpu) == []
    assert nvml.process_utilization(gpu) == {}


def test_xids_of_a_gpu_and_of_its_instances_are_counted_on_the_gpu(node: Node, nvml: Nvml) -> None:
    readings(nvml)
    node.fault("xid", "0", "79")
    node.fault("xid", "2", "94")  # its first instance
    gpu, three, *_ = read_until(nvml, lambda r: sum(r[0].xid_counts.values()) > 1)
    assert gpu.xid_counts == {79: 1, 94: 1}
    assert three.xid_counts == {}


def test_a_lost_gpu_takes_its_instances_with_it_and_brings_them_back(node: Node, nvml: Nvml) -> None:
    read_until(nvml, lambda r: r[1].sm_activity_ratio is not None)
    before = nvml.devices()
    node.fault("lose", "0")
    assert [reading.lost for reading in readings(nvml)] == [True, True, True, True, False]
    assert nvml.devices() == before
    assert nvml.processes(before[1]) == []
    node.fault("restore", "0")
    found = read_until(nvml, lambda r: not any(reading.lost for reading in r) and r[1].sm_activity_ratio is not None)
    assert tuple(reading.device for reading in found) == before


def test_another_layout_is_noticed_and_nothing_raises(node: Node, nvml: Nvml, clock: AheadClock) -> None:
    read_until(nvml, lambda r: r[1].sm_activity_ratio is not None)
    old = nvml.devices()
    node.fault("mig", "0", "4g.40gb,1g.10gb")
    assert nvml.read(old[1]).lost, "an instance that is gone gives no reading"
    found = read_until(nvml, lambda r: profiles(r) == [None, "4g.40gb", "1g.10gb", None])
    assert [reading.device.sm_count for reading in found] == [132, 64, 16, 132]
    assert nvml.read(old[2]) == DeviceReading(old[2], lost=True)
    assert nvml.processes(old[2]) == []
    read_until(nvml, lambda r: all(reading.sm_activity_ratio is not None for reading in r[1:]))
    clock.ahead_ns += 60 * 10**9
    assert profiles(readings(nvml)) == [None, "4g.40gb", "1g.10gb", None]


def test_an_instance_that_is_added_is_noticed_in_a_few_seconds(node: Node, nvml: Nvml, clock: AheadClock) -> None:
    node.fault("mig", "0", "3g.40gb")
    read_until(nvml, lambda r: profiles(r) == [None, "3g.40gb", None])
    node.fault("mig", "0", "3g.40gb,3g.40gb")
    clock.ahead_ns += 4 * 10**9
    assert profiles(readings(nvml)) == [None, "3g.40gb", "3g.40gb", None]


def test_a_gpu_that_leaves_mig_mode_is_read_as_a_whole_again(node: Node, nvml: Nvml) -> None:
    readings(nvml)
    node.fault("mig", "0", "off")
    gpu, _ = read_until(nvml, lambda r: len(r) == 2 and r[0].sm_activity_ratio is not None)
    assert (gpu.sm_activity_source, gpu.memory_used_bytes) == ("gpm", 0)
    process = node.start("offline", ["--seconds", "0", "--kernel-us", "2000"], {"CUDA_VISIBLE_DEVICES": "0"})
    read_until(nvml, lambda r: [tgid for tgid, _ in nvml.processes(r[0].device)] == [process.pid])
    read_until(nvml, lambda r: process.pid in nvml.process_utilization(r[0].device))


def test_a_gpu_that_enters_mig_mode_with_nothing_made_has_no_activity(node: Node, nvml: Nvml) -> None:
    read_until(nvml, lambda r: r[-1].sm_activity_ratio is not None)
    node.fault("mig", "1", "")
    *_, other = readings(nvml)
    assert (other.device.index, other.device.parent) == (1, None)
    assert (other.lost, other.sm_activity_ratio, other.memory_used_bytes) == (False, None, None)
    assert other.power_watts


def test_without_gpm_an_instances_activity_is_unknown(node: Node) -> None:
    node.fault("unsupported", "nvmlGpmQueryDeviceSupport")
    with Nvml() as nvml:
        readings(nvml)
        _, three, *_ = readings(nvml)
    assert (three.sm_activity_ratio, three.sm_activity_source) == (None, None)
    assert three.memory_used_bytes == 0


def test_a_reloaded_driver_finds_the_instances_again(node: Node, nvml: Nvml, clock: AheadClock) -> None:
    read_until(nvml, lambda r: r[1].sm_activity_ratio is not None)
    before = nvml.devices()
    node.fault("driver-unload")
    assert all(reading.lost for reading in readings(nvml))
    assert nvml.problem
    clock.ahead_ns += 10 * 10**9
    assert all(reading.lost for reading in readings(nvml))
    assert "modprobe" in (nvml.problem or "")
    node.fault("driver-load")
    clock.ahead_ns += 10 * 10**9
    found = read_until(nvml, lambda r: all(reading.sm_activity_ratio is not None for reading in r[1:]))
    assert tuple(reading.device for reading in found) == before
    assert not nvml.problem


def test_the_collector_tells_of_a_process_on_its_instance_and_not_on_the_gpu(node: Node, nvml: Nvml) -> None:
    gpu, _, two, _, _ = nvml.devices()
    process = start(node, two)
    samples = list(Devices(nvml).collect(time.monotonic_ns()))
    memory = [sample for sample in samples if isinstance(sample, ProcessMemory)]
    assert [(sample.tgid, sample.device) for sample in memory] == [(process.pid, two.uuid)]
    assert [sample.device for sample in samples if isinstance(sample, DeviceReading)] == list(nvml.devices())
    assert gpu.uuid not in {sample.device for sample in samples if isinstance(sample, ProcessUtilization)}
