# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""MIG, MPS crediting, graphics and driver trouble in the simulated NVML, as the real pynvml sees them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import pynvml
import pytest

from agent.nvml.client import Nvml
from tests.support.nvml.reading import answered
from tools.harness.node import BUILD, Node, simulated_node

GIB = 1 << 30
OFFLINE = ["--seconds", "0", "--kernels", "20", "--kernel-us", "500", "--blocks", "16"]


@contextmanager
def nvml_on(folder: Path, patch: pytest.MonkeyPatch, config: dict[str, str]) -> Iterator[Node]:
    # Once a library of this soname is loaded, pynvml's own loading finds it.
    ctypes.CDLL(str(BUILD / "lib" / "libnvidia-ml.so.1"))
    with simulated_node(folder, config) as node:
        patch.setenv("GPUSIM_DIR", str(node.folder))
        pynvml.nvmlInit()
        try:
            yield node
        finally:
            pynvml.nvmlShutdown()


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    with nvml_on(tmp_path / "gpu", monkeypatch, {}) as node:
        yield node


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    with nvml_on(tmp_path / "gpu", monkeypatch, {"gpus": "2", "mig": "0:3g.40gb,2g.20gb,1g.10gb"}) as node:
        yield node


@pytest.fixture
def gpu(node: Node) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(0)


def instances(gpu: Any) -> list[Any]:
    found = []
    for position in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, position))
        except pynvml.NVMLError_NotFound:
            continue
    return found


def start(node: Node, *arguments: str, **extra: str) -> Popen[str]:
    process = node.start("offline", [*OFFLINE, *arguments], extra)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def sm_percent(*samples: Any) -> float:
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    request.sample1, request.sample2 = samples
    request.numMetrics = 1
    request.metrics[0].metricId = pynvml.NVML_GPM_METRIC_SM_UTIL
    pynvml.nvmlGpmMetricsGet(request)
    assert request.metrics[0].nvmlReturn == 0
    return float(request.metrics[0].value)


def pids(processes: list[Any]) -> list[int]:
    return [process.pid for process in processes]


def test_instances_hang_below_their_gpu(gpu: Any) -> None:
    other = pynvml.nvmlDeviceGetHandleByIndex(1)
    assert pynvml.nvmlDeviceGetCount() == 2
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
    assert pynvml.nvmlDeviceGetMigMode(other) == [0, 0]
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(other) == 0
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetMigDeviceHandleByIndex(other, 0)
    three, two, one = instances(gpu)
    assert [pynvml.nvmlDeviceGetGpuInstanceId(handle) for handle in (three, two, one)] == [1, 3, 7]
    assert [pynvml.nvmlDeviceGetComputeInstanceId(handle) for handle in (three, two, one)] == [0, 0, 0]
    assert pynvml.nvmlDeviceIsMigDeviceHandle(three).value == 1
    assert pynvml.nvmlDeviceIsMigDeviceHandle(gpu).value == 0
    parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(two)
    assert pynvml.nvmlDeviceGetUUID(parent) == pynvml.nvmlDeviceGetUUID(gpu)
    uuid = pynvml.nvmlDeviceGetUUID(two)
    assert uuid.startswith("MIG-")
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(uuid)) == uuid
    assert pynvml.nvmlDeviceGetIndex(two) == 1


def test_an_instance_has_its_own_sms_and_memory(gpu: Any) -> None:
    three, two, one = instances(gpu)
    attributes = [pynvml.nvmlDeviceGetAttributes(handle) for handle in (three, two, one)]
    assert [entry.multiprocessorCount for entry in attributes] == [60, 32, 16]
    assert [entry.gpuInstanceSliceCount for entry in attributes] == [3, 2, 1]
    assert [entry.memorySizeMB for entry in attributes] == [40960, 20480, 10240]
    assert pynvml.nvmlDeviceGetMemoryInfo(two).total == 20 * GIB
    assert pynvml.nvmlDeviceGetName(one).endswith(" MIG 1g.10gb")
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetAttributes(gpu)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("nvmlDeviceGetPowerUsage", ()),
        ("nvmlDeviceGetTemperature", (0,)),
        ("nvmlDeviceGetClockInfo", (1,)),
        ("nvmlDeviceGetPcieThroughput", (0,)),
        ("nvmlDeviceGetFieldValues", ([197],)),
        ("nvmlDeviceGetUtilizationRates", ()),
        ("nvmlDeviceGetProcessUtilization", (0,)),
        ("nvmlDeviceGetProcessesUtilizationInfo", (0,)),
        ("nvmlDeviceGetMinorNumber", ()),
        ("nvmlDeviceGetMigMode", ()),
    ],
)
def test_what_is_only_known_of_the_whole_gpu_is_not_supported_on_an_instance(
    gpu: Any, call: str, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(pynvml.NVMLError_NotSupported):
        getattr(pynvml, call)(instances(gpu)[0], *arguments)


@pytest.mark.parametrize("call", ["nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo"])
def test_utilization_is_not_supported_on_a_gpu_in_mig_mode(gpu: Any, call: str) -> None:
    with pytest.raises(pynvml.NVMLError_NotSupported):
        getattr(pynvml, call)(gpu, 0)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetUtilizationRates(gpu)
    assert pynvml.nvmlDeviceGetMinorNumber(gpu) == 0
    assert pynvml.nvmlDeviceGetPowerUsage(gpu) > 0


def test_a_process_is_listed_on_its_instance_and_on_the_gpu_with_the_instances_ids(node: Node, gpu: Any) -> None:
    three, two, _ = instances(gpu)
    process = start(node, "--memory", "2GiB", CUDA_VISIBLE_DEVICES=pynvml.nvmlDeviceGetUUID(two))
    (entry,) = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(two)
    assert (entry.pid, entry.gpuInstanceId, entry.computeInstanceId) == (process.pid, 3, 0)
    assert entry.usedGpuMemory >= 2 * GIB
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(three) == []
    (entry,) = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu)
    assert (entry.pid, entry.gpuInstanceId) == (process.pid, 3)
    assert pynvml.nvmlDeviceGetMemoryInfo(two, version=pynvml.nvmlMemory_v2).used == entry.usedGpuMemory
    assert pynvml.nvmlDeviceGetMemoryInfo(three, version=pynvml.nvmlMemory_v2).used == 0
    assert pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2).used == entry.usedGpuMemory


def test_gpm_measures_one_instance_against_its_own_sms(node: Node, gpu: Any) -> None:
    three, two, _ = instances(gpu)
    start(node, "--host-us", "0", CUDA_VISIBLE_DEVICES=pynvml.nvmlDeviceGetUUID(two))
    samples = [[pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()] for _ in range(3)]
    for moment in range(2):
        pynvml.nvmlGpmMigSampleGet(gpu, 3, samples[0][moment])
        pynvml.nvmlGpmMigSampleGet(gpu, 1, samples[1][moment])
        pynvml.nvmlGpmSampleGet(gpu, samples[2][moment])
        time.sleep(0.3)  # what GPM measures in this time is what is tested
    assert 5 < sm_percent(*samples[0]) <= 50.5  # 16 of its 32 SMs at most
    assert sm_percent(*samples[1]) == 0
    assert 0 < sm_percent(*samples[2]) <= 12.5  # 16 of all 132
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlGpmMigSampleGet(gpu, 12, samples[0][0])
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlGpmMigSampleGet(pynvml.nvmlDeviceGetHandleByIndex(1), 1, samples[0][0])
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlGpmSampleGet(three, samples[0][0])
    for pair in samples:
        for sample in pair:
            pynvml.nvmlGpmSampleFree(sample)


def test_an_xid_of_an_instance_comes_from_its_gpu(node: Node, gpu: Any) -> None:
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(gpu, pynvml.nvmlEventTypeXidCriticalError, events)
    node.fault("xid", "3", "94")  # the second instance
    data = pynvml.nvmlEventSetWait(events, 1000)
    assert (data.eventData, data.gpuInstanceId, data.computeInstanceId) == (94, 3, 0)
    assert pynvml.nvmlDeviceGetUUID(data.device) == pynvml.nvmlDeviceGetUUID(gpu)
    pynvml.nvmlEventSetFree(events)


def test_a_layout_can_change_while_nothing_runs(node: Node, gpu: Any) -> None:
    three, *_ = instances(gpu)
    process = start(node, CUDA_VISIBLE_DEVICES=pynvml.nvmlDeviceGetUUID(three))
    assert "busy" in node.run("gpusim", ["fault", "mig", "0", "7g.80gb"]).stderr
    process.kill()
    answered(lambda: not pynvml.nvmlDeviceGetComputeRunningProcesses(gpu))
    answered(lambda: node.run("gpusim", ["fault", "mig", "0", "7g.80gb"]).returncode == 0)
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetUUID(three)
    (whole,) = instances(gpu)
    assert pynvml.nvmlDeviceGetAttributes(whole).multiprocessorCount == 132
    node.fault("mig", "0", "off")
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [0, 0]
    assert instances(gpu) == []


def test_a_lost_gpu_loses_its_instances(node: Node, gpu: Any) -> None:
    three, *_ = instances(gpu)
    node.fault("lose", "0")
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlDeviceGetMemoryInfo(three)
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
    node.fault("restore", "0")
    assert pynvml.nvmlDeviceGetMemoryInfo(three).total == 40 * GIB


def test_the_server_is_credited_with_the_work_of_mps_clients(plain: Node) -> None:
    handle, node = pynvml.nvmlDeviceGetHandleByIndex(0), plain
    with node.mps_daemon():
        clients = [start(node), start(node)]
        samples = answered(lambda: pynvml.nvmlDeviceGetProcessesUtilizationInfo(handle, 0))
        (server,) = {sample.pid for sample in samples}
        assert server not in [client.pid for client in clients]
        assert all(0 < sample.smUtil <= 100 for sample in samples)
        assert node.mps_control("get_server_list").stdout == f"{server}\n"
        listed = sorted(pids(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)))
        assert listed == sorted([server, *(client.pid for client in clients)])
        assert sorted(pids(pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle))) == sorted(c.pid for c in clients)
        alone = time.time_ns() // 1000
        for client in clients:
            client.kill()
        node.mps = False
        apart = start(node)  # beside MPS, not below it
        later = answered(
            lambda: [
                sample for sample in pynvml.nvmlDeviceGetProcessesUtilizationInfo(handle, alone) if sample.pid != server
            ]
        )
        assert {sample.pid for sample in later} == {apart.pid}
        node.mps = True


def test_clients_can_be_credited_with_their_own_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with nvml_on(tmp_path / "gpu", monkeypatch, {"mps_credits": "client"}) as node, node.mps_daemon():
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        client = start(node)
        samples = answered(lambda: pynvml.nvmlDeviceGetProcessesUtilizationInfo(handle, 0))
        assert {sample.pid for sample in samples} == {client.pid}


def test_programs_that_draw_are_in_the_graphics_list(plain: Node) -> None:
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    draws = start(plain, GPUSIM_GRAPHICS="1")
    does_both = start(plain, GPUSIM_GRAPHICS="both")
    computes = start(plain)
    assert sorted(pids(pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3(handle))) == sorted([draws.pid, does_both.pid])
    assert sorted(pids(pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))) == sorted([computes.pid, does_both.pid])
    with Nvml() as nvml:
        (device,) = nvml.devices()
        listed = nvml.processes(device)
        used = nvml.read(device).memory_used_bytes
    assert sorted(tgid for tgid, _ in listed) == sorted([draws.pid, computes.pid, does_both.pid])
    assert sum(own or 0 for _, own in listed) == used


def test_the_old_utilization_call_can_be_as_silent_as_on_blackwell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nvml_on(tmp_path / "gpu", monkeypatch, {"old_process_utilization": "off"}) as node:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        process = start(node)
        samples = answered(lambda: pynvml.nvmlDeviceGetProcessesUtilizationInfo(handle, 0))
        assert {sample.pid for sample in samples} == {process.pid}
        with pytest.raises(pynvml.NVMLError_NotFound):
            pynvml.nvmlDeviceGetProcessUtilization(handle, 0)
        with Nvml() as nvml:
            (device,) = nvml.devices()
            assert answered(lambda: nvml.process_utilization(device).keys()) == {process.pid}


def test_an_unloaded_driver_fails_all_clients_until_it_is_loaded_and_reopened(plain: Node) -> None:
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    client = start(plain)
    plain.fault("driver-unload")
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        pynvml.nvmlDeviceGetMemoryInfo(handle)
    assert client.wait(30) != 0, "a program that was using the GPU gets errors, and does not hang"
    refused = plain.run("offline", ["--steps", "1"])
    assert (refused.returncode != 0, "NO_DEVICE" in refused.stderr) == (True, True)
    pynvml.nvmlShutdown()
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        pynvml.nvmlInit()
    plain.fault("driver-load")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used == 0
    assert plain.run("offline", ["--steps", "1"]).returncode == 0


def test_a_session_from_before_the_reload_stays_useless(plain: Node) -> None:
    plain.fault("driver-unload")
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        pynvml.nvmlDeviceGetCount()
    plain.fault("driver-load")
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        pynvml.nvmlDeviceGetCount()
