# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The simulated NVML answers the real pynvml as the real library does, quirks included."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from subprocess import Popen
from typing import Any

import pynvml
import pytest

from tests.support.nvml.reading import answered
from tools.harness.node import BUILD, Node, simulated_node
from tools.harness.wait import until

GIB = 1 << 30
OFFLINE = ["--seconds", "0", "--kernels", "20", "--kernel-us", "500", "--blocks", "66"]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with simulated_node(tmp_path / "gpu", {"gpus": "2", "sms": "132", "memory": "80GiB"}) as node:
        yield node


@pytest.fixture
def nvml(node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    # Once a library of this soname is loaded, pynvml's own loading finds it.
    ctypes.CDLL(str(BUILD / "lib" / "libnvidia-ml.so.1"))
    monkeypatch.setenv("GPUSIM_DIR", str(node.folder))
    pynvml.nvmlInit()
    yield pynvml
    pynvml.nvmlShutdown()


@pytest.fixture
def handle(nvml: Any) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(0)


def start(node: Node, *arguments: str) -> Popen[str]:
    process = node.start("offline", [*OFFLINE, *arguments])
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def gpm(nvml: Any, before: Any, after: Any, *metrics: int) -> list[float]:
    request = nvml.c_nvmlGpmMetricsGet_t()
    request.version = nvml.NVML_GPM_METRICS_GET_VERSION
    request.sample1, request.sample2 = before, after
    request.numMetrics = len(metrics)
    for index, metric in enumerate(metrics):
        request.metrics[index].metricId = metric
    nvml.nvmlGpmMetricsGet(request)
    assert all(request.metrics[index].nvmlReturn == 0 for index in range(len(metrics)))
    return [request.metrics[index].value for index in range(len(metrics))]


def test_without_the_server_the_driver_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctypes.CDLL(str(BUILD / "lib" / "libnvidia-ml.so.1"))
    monkeypatch.setenv("GPUSIM_DIR", str(tmp_path))
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        pynvml.nvmlInit()


def test_before_init_everything_is_uninitialised(nvml: Any) -> None:
    nvml.nvmlShutdown()
    with pytest.raises(nvml.NVMLError_Uninitialized):
        nvml.nvmlDeviceGetCount()
    nvml.nvmlInit()


def test_a_driver_that_is_loaded_again_is_taken_up_after_a_new_init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctypes.CDLL(str(BUILD / "lib" / "libnvidia-ml.so.1"))
    monkeypatch.setenv("GPUSIM_DIR", str(tmp_path / "gpu"))
    with simulated_node(tmp_path / "gpu"):
        pynvml.nvmlInit()
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        pynvml.nvmlDeviceGetCount()
    with simulated_node(tmp_path / "gpu", {"gpus": "3"}):
        with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
            pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetCount() == 3
        pynvml.nvmlShutdown()


def test_devices_are_found_by_index_uuid_and_bus_id(nvml: Any, handle: Any) -> None:
    assert nvml.nvmlDeviceGetCount() == 2
    uuid = nvml.nvmlDeviceGetUUID(handle)
    bus_id = nvml.nvmlDeviceGetPciInfo(handle).busId
    assert nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByUUID(uuid)) == 0
    assert nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByPciBusId(bus_id)) == 0
    assert nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(1)) != uuid
    with pytest.raises(nvml.NVMLError_InvalidArgument):
        nvml.nvmlDeviceGetHandleByIndex(2)
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetHandleByUUID("GPU-unknown")


def test_sms_follow_from_cores_and_compute_capability(nvml: Any, handle: Any) -> None:
    assert tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)) == (9, 0)
    assert nvml.nvmlDeviceGetNumGpuCores(handle) == 132 * 128
    with pytest.raises(nvml.NVMLError_NotSupported):
        nvml.nvmlDeviceGetAttributes(handle)


def test_memory_of_a_process_is_in_its_entry_and_in_the_device(node: Node, nvml: Any, handle: Any) -> None:
    before = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    process = start(node, "--memory", "3GiB")
    after = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    (entry,) = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    assert entry.pid == process.pid
    assert entry.usedGpuMemory >= 3 * GIB
    assert after.used - before.used == entry.usedGpuMemory
    assert after.total == after.used + after.free + after.reserved == 80 * GIB
    old = nvml.nvmlDeviceGetMemoryInfo(handle)
    assert (old.used, old.free) == (after.used + after.reserved, after.free)
    assert nvml.nvmlDeviceGetGraphicsRunningProcesses(handle) == []
    assert nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle) == []
    process.kill()
    assert answered(lambda: not nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    assert nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used == before.used


def test_mps_clients_are_in_two_lists_and_their_server_in_the_first(node: Node, nvml: Any, handle: Any) -> None:
    with node.mps_daemon():
        process = start(node)
        (entry,) = nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)
        assert entry.pid == process.pid
        server = int(node.mps_control("get_server_list").stdout)
        assert {one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)} == {process.pid, server}


def test_an_idle_device_has_no_process_utilization(nvml: Any, handle: Any) -> None:
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetProcessUtilization(handle, 0)
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetProcessesUtilizationInfo(handle, 0)


@pytest.mark.parametrize("call", ["nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo"])
def test_process_utilization_comes_every_200_ms_in_wall_time(node: Node, nvml: Any, handle: Any, call: str) -> None:
    process = start(node)
    (first, *_) = answered(lambda: getattr(nvml, call)(handle, 0))
    assert first.pid == process.pid
    assert 0 < first.smUtil <= 100
    assert abs(first.timeStamp / 1e6 - time.time()) < 60
    stamps = [first.timeStamp]

    def come_so_often() -> bool:
        stamps.append(answered(lambda: getattr(nvml, call)(handle, stamps[-1]))[0].timeStamp)
        return any(later - earlier < 300_000 for earlier, later in pairwise(stamps)) and len(stamps) > 10

    until(come_so_often, "samples without a stall between them")
    assert stamps[-1] - stamps[0] > (len(stamps) - 2) * 200_000  # only the first may be late, by less than that


def test_dropped_samples_are_missing_and_the_next_one_is_there(node: Node, nvml: Any, handle: Any) -> None:
    start(node)
    answered(lambda: nvml.nvmlDeviceGetProcessUtilization(handle, 0))
    node.fault("drop-samples", "1000000")
    (last,) = nvml.nvmlDeviceGetProcessUtilization(handle, 0)
    time.sleep(0.5)  # the time in which two samples would be taken
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetProcessUtilization(handle, last.timeStamp)
    node.fault("drop-samples", "0")
    (after,) = answered(lambda: nvml.nvmlDeviceGetProcessUtilization(handle, last.timeStamp))
    assert after.timeStamp - last.timeStamp > 300_000


def test_gpm_tells_how_many_sms_were_busy_not_how_long(node: Node, nvml: Any, handle: Any) -> None:
    start(node, "--host-us", "0")
    assert nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice
    samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
    nvml.nvmlGpmSampleGet(handle, samples[0])
    time.sleep(0.3)  # what GPM measures in this time is what is tested
    nvml.nvmlGpmSampleGet(handle, samples[1])
    busy, sms = gpm(nvml, *samples, nvml.NVML_GPM_METRIC_GRAPHICS_UTIL, nvml.NVML_GPM_METRIC_SM_UTIL)
    assert 0 < busy <= 100
    assert sms == pytest.approx(busy / 2, rel=0.05)  # 66 blocks fill half of 132 SMs, all the time that they run
    with pytest.raises(nvml.NVMLError_InvalidArgument):
        gpm(nvml, samples[1], samples[0], nvml.NVML_GPM_METRIC_SM_UTIL)
    for sample in samples:
        nvml.nvmlGpmSampleFree(sample)


def test_the_link_is_the_slowest_of_16_lanes_that_carries_what_copies_get(nvml: Any, handle: Any) -> None:
    assert nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle) == 5  # 55 GB/s
    assert nvml.nvmlDeviceGetCurrPcieLinkWidth(handle) == nvml.nvmlDeviceGetMaxPcieLinkWidth(handle) == 16


def test_pcie_counters_add_up_what_was_copied(node: Node, nvml: Any, handle: Any) -> None:
    def received() -> int:
        transmitted, received = nvml.nvmlDeviceGetFieldValues(handle, [197, 198])
        assert transmitted.nvmlReturn == received.nvmlReturn == 0
        return int(received.value.ullVal)

    done = node.run("offline", ["--steps", "3", "--kernels", "1", "--kernel-us", "10", "--copy-bytes", "1MiB"])
    assert done.returncode == 0, done.stderr
    assert received() == 3 << 20
    (unknown,) = nvml.nvmlDeviceGetFieldValues(handle, [1])
    assert unknown.nvmlReturn == nvml.NVML_ERROR_NOT_SUPPORTED


def test_pcie_throughput_blocks_for_its_window(nvml: Any, handle: Any) -> None:
    begun = time.monotonic()
    assert nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES) == 0
    assert time.monotonic() - begun >= 0.02


def test_power_and_clocks_rise_with_work(node: Node, nvml: Any, handle: Any) -> None:
    idle_mw, idle_mhz = nvml.nvmlDeviceGetPowerUsage(handle), nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
    start(node)
    assert answered(lambda: nvml.nvmlDeviceGetPowerUsage(handle) > idle_mw)
    assert nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) > idle_mhz
    assert nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) <= nvml.nvmlDeviceGetMaxClockInfo(
        handle, nvml.NVML_CLOCK_SM
    )
    assert nvml.nvmlDeviceGetPowerUsage(handle) <= nvml.nvmlDeviceGetEnforcedPowerLimit(handle)
    assert nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU) > 0


def test_a_lost_gpu_hides_only_itself_until_it_is_back(node: Node, nvml: Any, handle: Any) -> None:
    other = nvml.nvmlDeviceGetHandleByIndex(1)
    node.fault("lose", "0")
    for call in (nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetUUID):
        with pytest.raises(nvml.NVMLError_GpuIsLost):
            call(handle)
    with pytest.raises(nvml.NVMLError_GpuIsLost):
        nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceGetCount() == 2
    assert nvml.nvmlDeviceGetMemoryInfo(other).total == 80 * GIB
    node.fault("restore", "0")
    assert nvml.nvmlDeviceGetMemoryInfo(handle).total == 80 * GIB


def test_a_function_can_be_switched_off(node: Node, nvml: Any, handle: Any) -> None:
    node.fault("unsupported", "nvmlDeviceGetPowerUsage")
    with pytest.raises(nvml.NVMLError_NotSupported):
        nvml.nvmlDeviceGetPowerUsage(handle)
    assert nvml.nvmlDeviceGetEnforcedPowerLimit(handle) > 0
    node.fault("supported", "nvmlDeviceGetPowerUsage")
    assert nvml.nvmlDeviceGetPowerUsage(handle) > 0


def test_an_xid_reaches_the_clients_that_registered_for_its_device(node: Node, nvml: Any, handle: Any) -> None:
    node.fault("xid", "0", "13")  # before any client listens
    events = nvml.nvmlEventSetCreate()
    assert nvml.nvmlDeviceGetSupportedEventTypes(handle) & nvml.nvmlEventTypeXidCriticalError
    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
    with pytest.raises(nvml.NVMLError_Timeout):
        nvml.nvmlEventSetWait(events, 0)
    node.fault("xid", "1", "31")  # another device's
    node.fault("xid", "0", "79")
    data = nvml.nvmlEventSetWait(events, 1000)
    assert (data.eventType, data.eventData) == (nvml.nvmlEventTypeXidCriticalError, 79)
    assert nvml.nvmlDeviceGetUUID(data.device) == nvml.nvmlDeviceGetUUID(handle)
    with pytest.raises(nvml.NVMLError_Timeout):
        nvml.nvmlEventSetWait(events, 0)
    nvml.nvmlEventSetFree(events)


def test_a_forked_child_does_not_share_its_parents_conversation(nvml: Any, handle: Any) -> None:
    child = os.fork()
    if child == 0:
        answers = [nvml.nvmlDeviceGetMemoryInfo(handle).total for _ in range(50)]
        os._exit(0 if answers == [80 * GIB] * 50 else 1)
    assert [nvml.nvmlDeviceGetMemoryInfo(handle).total for _ in range(50)] == [80 * GIB] * 50
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_samples_credit_one_of_those_that_take_turns_with_all_that_the_device_did(
    node: Node, nvml: Any, handle: Any
) -> None:
    pids = {start(node).pid, start(node).pid}
    since_us, credited, sums = 0, set[int](), list[int]()
    while len(sums) < 8:
        found = answered(partial(nvml.nvmlDeviceGetProcessUtilization, handle, since_us))
        since_us = found[-1].timeStamp
        credited |= {one.pid for one in found}
        sums.append(sum(one.smUtil for one in found))
        assert {one.pid for one in found} <= pids
    assert credited == pids
    assert statistics.median(sums) == pytest.approx(100, abs=10)  # both are busy all the time
