# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""MIG instances as devices, against a binding whose answers the tests decide."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.model import DeviceReading
from agent.nvml.client import Nvml
from tests.support.clocks import SetClock
from tests.support.nvml.fake import MIB, SECOND, FakeGpu, FakeInstance, FakeNvml, session, tick

WALK = "nvmlDeviceGetMigDeviceHandleByIndex"


def split(*instances: FakeInstance | None, uuid: str = "GPU-a") -> FakeGpu:
    return FakeGpu(uuid, mig=True, instances=list(instances))


def uuids(nvml: Nvml) -> list[str]:
    return [device.uuid for device in nvml.devices()]


def test_instances_come_behind_their_gpu_gaps_and_all() -> None:
    first = split(None, FakeInstance("MIG-z"), None, FakeInstance("MIG-a", number=2))
    nvml, _, _ = session(first, FakeGpu("GPU-b"))
    assert uuids(nvml) == ["GPU-a", "MIG-z", "MIG-a", "GPU-b"]
    _, device, other, _ = nvml.devices()
    assert (device.mig_index, other.mig_index) == (1, 3)
    assert (device.parent, device.index, device.minor, device.mig_profile) == ("GPU-a", 0, 0, "3g.71gb")
    assert (device.sm_count, device.memory_total_bytes) == (48, 1000 * MIB)


def test_an_instance_is_read_through_its_own_handle_and_number() -> None:
    busy = FakeInstance("MIG-1", sm_percent=80.0, used=7 * MIB, number=5, compute=[(1, 7 * MIB)])
    nvml, api, clock = session(split(FakeInstance("MIG-0", sm_percent=10.0), busy))
    tick(nvml, clock)
    gpu, first, second = tick(nvml, clock)
    assert [first.sm_activity_ratio, second.sm_activity_ratio] == pytest.approx([0.1, 0.8])
    assert (second.memory_used_bytes, second.power_watts) == (7 * MIB, None)
    assert (gpu.sm_activity_ratio, gpu.memory_used_bytes) == (None, None)
    assert gpu.power_watts is not None
    assert nvml.processes(second.device) == [(1, 7 * MIB)]
    assert nvml.process_utilization(second.device, [1]) == {}
    assert api.calls["nvmlDeviceGetProcessesUtilizationInfo"] == 0


def test_a_part_of_an_instance_has_memory_but_no_activity_of_its_own() -> None:
    part = FakeInstance("MIG-1", slices=(3, 1), name="Fake H200 MIG 1c.3g.71gb")
    nvml, api, clock = session(split(part))
    tick(nvml, clock)
    _, reading = tick(nvml, clock)
    assert (reading.device.mig_profile, reading.device.sm_count) == ("1c.3g.71gb", 16)
    assert (reading.sm_activity_ratio, reading.memory_used_bytes) == (None, 10 * MIB)
    assert api.calls["nvmlGpmMigSampleGet"] == 0


@pytest.mark.parametrize(("slices", "profile"), [((3, 3), "3g.54gb"), ((2, 1), "1c.2g.36gb")])
def test_a_name_without_the_profile_leaves_it_to_the_slices(slices: tuple[int, int], profile: str) -> None:
    nvml, _, _ = session(split(FakeInstance("MIG-1", slices=slices, name="Fake H200")))
    assert nvml.devices()[1].mig_profile == profile


def test_an_instance_whose_attributes_are_refused_is_a_device_all_the_same() -> None:
    nvml, api, clock = session(split(FakeInstance("MIG-1", name="Fake H200")))
    api.refuse["nvmlDeviceGetAttributes"] = pynvml.NVML_ERROR_UNKNOWN
    tick(nvml, clock)
    _, reading = tick(nvml, clock)
    assert (reading.device.sm_count, reading.device.mig_profile) == (None, None)
    assert (reading.lost, reading.sm_activity_ratio, reading.memory_used_bytes) == (False, None, 10 * MIB)


def test_a_handle_that_was_given_to_another_instance_is_not_believed() -> None:
    gpu = split(FakeInstance("MIG-old"))
    nvml, _, clock = session(gpu)
    tick(nvml, clock)
    (_, old) = nvml.devices()
    gpu.instances = [FakeInstance("MIG-new", used=99 * MIB)]
    assert nvml.read(old) == DeviceReading(old, lost=True)
    assert nvml.processes(old) == []
    assert uuids(nvml) == ["GPU-a", "MIG-new"]
    assert nvml.read(nvml.devices()[1]).memory_used_bytes == 99 * MIB


def test_the_layout_is_not_walked_on_each_tick() -> None:
    nvml, api, clock = session(split(FakeInstance("MIG-1")))
    for _ in range(10):
        tick(nvml, clock, 0.25)
    assert api.calls[WALK] == 7
    tick(nvml, clock)
    assert api.calls[WALK] == 14


def test_lists_and_memory_are_read_once_a_tick_for_each_device() -> None:
    nvml, api, clock = session(split(FakeInstance("MIG-1"), FakeInstance("MIG-2", number=2)), FakeGpu("GPU-b"))
    tick(nvml, clock)
    api.calls.clear()
    for reading in tick(nvml, clock):
        nvml.process_utilization(reading.device, [tgid for tgid, _ in nvml.processes(reading.device)])
    assert api.calls["nvmlDeviceGetMemoryInfo"] == 3
    assert {api.calls[f"nvmlDeviceGet{kind}RunningProcesses_v3"] for kind in ("Compute", "Graphics", "MPSCompute")} == {
        3
    }


def test_a_gpu_that_knows_no_mig_is_asked_once() -> None:
    nvml, api, clock = session(FakeGpu("GPU-a"))
    for _ in range(5):
        tick(nvml, clock)
    assert api.calls["nvmlDeviceGetMigMode"] == 1
    assert api.calls[WALK] == 0


def test_what_mig_mode_did_not_support_is_asked_again_after_it() -> None:
    gpu = split(FakeInstance("MIG-1"))
    gpu.gpm = False
    nvml, api, clock = session(gpu)
    tick(nvml, clock)
    gpu.mig = False
    (reading,) = tick(nvml, clock)
    assert (reading.sm_activity_ratio, reading.sm_activity_source) == (0.4, "utilization")
    gpu.mig = True
    api.refuse["nvmlDeviceGetProcessesUtilizationInfo"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert [r.sm_activity_ratio for r in tick(nvml, clock)] == [None, None]
    del api.refuse["nvmlDeviceGetProcessesUtilizationInfo"]
    gpu.mig = False
    (reading,) = tick(nvml, clock)
    gpu.compute, gpu.process_samples = [(1, 0)], [(1, clock.now_us, 30)]
    assert nvml.process_utilization(reading.device) == {1: 0.3}


def test_an_instance_that_is_gone_gives_its_samples_back() -> None:
    gpu = split(FakeInstance("MIG-1"), FakeInstance("MIG-2", number=2))
    nvml, api, clock = session(gpu)
    tick(nvml, clock)
    assert len(api.samples) == 4
    gpu.instances.pop()
    tick(nvml, clock, 5)
    assert len(api.samples) == 2
    nvml.close()
    assert len(api.samples) == 0


def test_an_instance_that_is_gone_is_no_reason_to_restart() -> None:
    gpu = split(FakeInstance("MIG-1"))
    nvml, api, clock = session(gpu)
    tick(nvml, clock)
    gpu.instances.clear()
    tick(nvml, clock, 100)
    tick(nvml, clock, 100)
    assert api.calls["nvmlInit"] == 1


def test_a_lost_gpu_takes_its_instances_with_it_and_brings_them_back() -> None:
    gpu = split(FakeInstance("MIG-1"))
    nvml, _, clock = session(gpu, FakeGpu("GPU-b"))
    tick(nvml, clock)
    gpu.lost = True
    assert [reading.lost for reading in tick(nvml, clock)] == [True, True, False]
    assert [reading.lost for reading in tick(nvml, clock)] == [True, True, False]
    gpu.lost = False
    tick(nvml, clock)
    assert [reading.lost for reading in tick(nvml, clock)] == [False, False, False]


def test_a_gpu_that_was_reconfigured_while_it_was_lost_comes_back_with_its_new_layout() -> None:
    gpu = split(FakeInstance("MIG-1"))
    nvml, _, clock = session(gpu)
    tick(nvml, clock)
    gpu.lost = True
    tick(nvml, clock)
    gpu.lost, gpu.instances = False, [FakeInstance("MIG-2")]
    tick(nvml, clock)
    tick(nvml, clock)
    assert uuids(nvml) == ["GPU-a", "MIG-2"]
    assert not any(reading.lost for reading in tick(nvml, clock))


@pytest.mark.parametrize("call", ["nvmlDeviceGetMigMode", WALK])
def test_a_walk_that_fails_is_no_reason_to_think_that_instances_are_gone(call: str) -> None:
    gpu = split(FakeInstance("MIG-1"))
    nvml, api, clock = session(gpu)
    tick(nvml, clock)
    api.refuse[call] = pynvml.NVML_ERROR_UNKNOWN
    _, reading = tick(nvml, clock, 5)
    assert (reading.device.uuid, reading.lost, reading.sm_activity_ratio) == ("MIG-1", False, 0.5)
    assert nvml.errors[f"{call}:unknown"]
    api.refuse.clear()
    gpu.instances.append(FakeInstance("MIG-2", number=2))
    assert uuids(nvml) == ["GPU-a", "MIG-1", "MIG-2"], "it is walked again at once, or when it is due"


CODES = (
    pynvml.NVML_ERROR_UNKNOWN,
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_GPU_IS_LOST,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_MEMORY,
)
REFUSED = st.sampled_from(
    (
        WALK,
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetMaxMigDeviceCount",
        "nvmlDeviceGetAttributes",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetName",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetGpuInstanceId",
        "nvmlGpmMigSampleGet",
        "nvmlGpmSampleAlloc",
        "nvmlDeviceGetComputeRunningProcesses_v3",
    )
)
# That a GPU knows no MIG is believed for as long as the driver stays loaded.
REFUSALS = st.tuples(REFUSED, st.sampled_from(CODES)).filter(
    lambda refusal: refusal != ("nvmlDeviceGetMigMode", pynvml.NVML_ERROR_NOT_SUPPORTED)
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("layout"), st.lists(st.integers(0, 4), max_size=4, unique=True)),
        st.tuples(st.just("mode"), st.booleans()),
        st.tuples(st.just("lost"), st.booleans()),
        st.tuples(st.just("loaded"), st.booleans()),
        st.tuples(st.just("refuse"), REFUSALS),
        st.tuples(st.just("allow"), st.none()),
        st.tuples(st.just("wait"), st.sampled_from((0.1, 1, 4, 70))),
    ),
    max_size=25,
)


def happen(api: FakeNvml, gpu: FakeGpu, clock: SetClock, kind: str, value: Any) -> None:
    if kind == "layout":
        gpu.instances = [FakeInstance(f"MIG-{number}", number=number) for number in value]
    elif kind == "mode":
        gpu.mig = value
    elif kind == "lost":
        gpu.lost = value
    elif kind == "loaded":
        api.loaded, api.initialised = value, api.initialised and value
        api.samples = api.samples if value else []
    elif kind == "refuse":
        api.refuse[value[0]] = value[1]
    elif kind == "allow":
        api.refuse.clear()
    else:
        clock.now_ns += int(value * SECOND)


@given(EVENTS)
def test_whatever_happens_nothing_raises_and_in_the_end_everything_is_seen(
    events: list[tuple[str, Any]],
) -> None:
    gpu = split(FakeInstance("MIG-0", number=0))
    nvml, api, clock = session(gpu, FakeGpu("GPU-b"))
    for kind, value in events:
        happen(api, gpu, clock, kind, value)
        for reading in tick(nvml, clock, 0.5):
            nvml.processes(reading.device)
            assert not (reading.lost and reading.memory_used_bytes is not None)
        assert len(api.samples) <= 2 * (2 + len(gpu.instances)) + 2 * 4
    for kind, value in (("lost", False), ("loaded", True), ("allow", None)):
        happen(api, gpu, clock, kind, value)
    for _ in range(4):
        tick(nvml, clock, 70)
    present = [instance.uuid for instance in gpu.instances if instance] if gpu.mig else []
    assert uuids(nvml) == ["GPU-a", *present, "GPU-b"]
    assert not any(reading.lost for reading in tick(nvml, clock))
