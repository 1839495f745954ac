# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Reading NVML, against a binding whose answers the tests decide."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest

from agent.core.errors import SetupError
from agent.core.model import DeviceReading
from agent.nvml.client import Nvml
from agent.nvml.gpm import MIB
from agent.nvml.pcie import counter_delta
from tests.support.nvml.fake import FakeGpu, FakeNvml, session, tick
from tools.harness.wait import until


def test_a_device_is_described_once_with_its_sm_count() -> None:
    nvml, api, _ = session(FakeGpu("GPU-a"), FakeGpu("GPU-b"))
    first, second = nvml.devices()
    assert (first.index, first.uuid, first.name, first.sm_count) == (0, "GPU-a", "Fake H200", 132)
    assert second.pci_bus_id == "00000000:01:00.0"
    nvml.devices()
    assert api.calls["nvmlDeviceGetName"] == 2


@pytest.mark.parametrize(
    ("link", "bytes_per_second"),
    [((5, 16), 63_014_400_000), ((3, 8), 7_876_800_000), ((99, 16), None), (None, None)],
)
def test_what_the_link_can_carry_follows_its_generation_and_width(
    link: tuple[int, int] | None, bytes_per_second: int | None
) -> None:
    nvml, _, _ = session(FakeGpu("GPU-a", link=link))
    (found,) = nvml.devices()
    assert found.pcie_bytes_per_second == bytes_per_second


def test_a_reading_is_in_base_units() -> None:
    nvml, _, clock = session(FakeGpu("GPU-a"))
    tick(nvml, clock)
    (reading,) = tick(nvml, clock)
    assert (reading.sm_activity_ratio, reading.sm_activity_source) == (0.5, "gpm")
    assert reading.dram_activity_ratio == 0.25
    assert reading.sm_clock_hertz == 1.98e9
    assert reading.power_watts == pytest.approx(512.3)
    assert reading.power_limit_watts == pytest.approx(700)
    assert reading.temperature_celsius == 61
    assert (reading.memory_used_bytes, reading.memory_reserved_bytes) == (10 * MIB, MIB)


def test_gpm_needs_two_samples_and_does_not_mix_with_utilization_meanwhile() -> None:
    nvml, _, clock = session(FakeGpu("GPU-a"))
    (reading,) = tick(nvml, clock)
    assert reading.sm_activity_ratio is None
    assert reading.sm_activity_source is None


def test_gpm_samples_are_never_compared_within_100_ms() -> None:
    gpu = FakeGpu("GPU-a")
    nvml, api, clock = session(gpu)
    tick(nvml, clock)
    tick(nvml, clock)
    gpu.sm_percent = 90.0
    (reading,) = tick(nvml, clock, 0.05)
    assert reading.sm_activity_ratio == 0.5
    assert api.calls["nvmlGpmMetricsGet"] == 1
    (reading,) = tick(nvml, clock, 0.05)
    assert reading.sm_activity_ratio == 0.9


@pytest.mark.parametrize("percent", [250.0, float("nan"), -1.0])
def test_an_impossible_activity_is_unknown_and_counted(percent: float) -> None:
    nvml, _, clock = session(FakeGpu("GPU-a", sm_percent=percent))
    tick(nvml, clock)
    (reading,) = tick(nvml, clock)
    assert reading.sm_activity_ratio is None
    assert any(name.startswith("nvmlGpmMetricsGet:") for name in nvml.errors)


def test_without_gpm_the_activity_is_the_mean_of_the_ticks_utilization_samples() -> None:
    gpu = FakeGpu("GPU-a", gpm=False)
    nvml, api, clock = session(gpu)
    (reading,) = tick(nvml, clock)
    assert (reading.sm_activity_ratio, reading.sm_activity_source) == (0.4, "utilization")
    gpu.samples = [(clock.now_us - 1, 99), (clock.now_us + 10, 20), (clock.now_us + 20, 40)]
    (reading,) = tick(nvml, clock)
    assert reading.sm_activity_ratio == pytest.approx(0.3)
    assert api.calls["nvmlGpmSampleGet"] == 0


def test_a_call_that_is_not_supported_is_asked_once_and_counted_once() -> None:
    nvml, api, clock = session(FakeGpu("GPU-a"))
    api.refuse["nvmlDeviceGetPowerUsage"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    for _ in range(5):
        (reading,) = tick(nvml, clock)
        assert reading.power_watts is None
        assert reading.temperature_celsius == 61
    assert api.calls["nvmlDeviceGetPowerUsage"] == 1
    assert nvml.errors["nvmlDeviceGetPowerUsage:not_supported"] == 1


def test_a_call_that_fails_is_counted_each_time_and_asked_again() -> None:
    nvml, api, clock = session(FakeGpu("GPU-a"))
    api.refuse["nvmlDeviceGetPowerUsage"] = pynvml.NVML_ERROR_UNKNOWN
    tick(nvml, clock)
    tick(nvml, clock)
    assert nvml.errors["nvmlDeviceGetPowerUsage:unknown"] == 2
    del api.refuse["nvmlDeviceGetPowerUsage"]
    assert tick(nvml, clock)[0].power_watts is not None


def test_a_lost_gpu_hides_only_itself_and_comes_back() -> None:
    lost, well = FakeGpu("GPU-a"), FakeGpu("GPU-b")
    nvml, api, clock = session(lost, well)
    tick(nvml, clock)
    lost.lost = True
    first, second = tick(nvml, clock)
    assert first == DeviceReading(first.device, lost=True)
    assert second.sm_activity_ratio == 0.5
    assert nvml.processes(first.device) == []
    lost.lost = False
    first, second = tick(nvml, clock)
    assert not first.lost
    assert first.memory_used_bytes == 10 * MIB
    assert api.calls["nvmlInit"] == 1, "one lost GPU must not disturb the others at once"


def test_a_gpu_that_stays_lost_is_looked_for_with_a_fresh_start_after_a_while() -> None:
    lost, well = FakeGpu("GPU-a"), FakeGpu("GPU-b")
    nvml, api, clock = session(lost, well)
    tick(nvml, clock)
    lost.lost = True
    tick(nvml, clock)
    tick(nvml, clock, 61)
    assert api.calls["nvmlInit"] == 2
    assert [reading.lost for reading in tick(nvml, clock)] == [True, False]


def test_a_gpu_that_was_lost_from_the_start_does_not_hide_the_others() -> None:
    lost, well = FakeGpu("GPU-a", lost=True), FakeGpu("GPU-b")
    nvml, _, clock = session(lost, well)
    assert [device.uuid for device in nvml.devices()] == ["GPU-b"]
    lost.lost = False
    tick(nvml, clock)
    assert [device.uuid for device in nvml.devices()] == ["GPU-a", "GPU-b"]


def test_the_agent_comes_back_when_the_driver_is_reloaded() -> None:
    nvml, api, clock = session(FakeGpu("GPU-a"), FakeGpu("GPU-b"))
    tick(nvml, clock)
    api.loaded = False
    assert [reading.lost for reading in tick(nvml, clock)] == [True, True]
    tick(nvml, clock, 10)
    assert "modprobe" in (nvml.problem or "")
    api.loaded, api.initialised = True, False
    readings = tick(nvml, clock, 10)
    assert [reading.lost for reading in readings] == [False, False]
    assert not nvml.problem
    assert tick(nvml, clock)[0].sm_activity_ratio == 0.5


def test_a_driver_that_forgot_us_is_started_again() -> None:
    nvml, api, clock = session(FakeGpu("GPU-a"))
    tick(nvml, clock)
    api.initialised = False
    tick(nvml, clock, 6)
    assert not tick(nvml, clock, 6)[0].lost


def test_what_was_unsupported_is_asked_again_after_a_reload() -> None:
    nvml, api, clock = session(FakeGpu("GPU-a"))
    api.refuse["nvmlDeviceGetPowerUsage"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    tick(nvml, clock)
    del api.refuse["nvmlDeviceGetPowerUsage"]
    assert tick(nvml, clock)[0].power_watts is None
    api.initialised = False
    tick(nvml, clock, 6)
    assert tick(nvml, clock, 6)[0].power_watts is not None


def test_pcie_rates_come_from_the_cumulative_counters() -> None:
    gpu = FakeGpu("GPU-a", fields=(1_000, 5_000))
    nvml, api, clock = session(gpu)
    (reading,) = tick(nvml, clock)
    assert reading.pcie_tx_bytes_per_second is None
    gpu.fields = (3_000, 5_000)
    (reading,) = tick(nvml, clock, 2)
    assert reading.pcie_tx_bytes_per_second == 1_000
    assert reading.pcie_rx_bytes_per_second == 0
    assert api.calls["nvmlDeviceGetPcieThroughput"] == 0


def test_a_counter_of_32_bits_gives_way_to_gpm_which_cannot_wrap() -> None:
    gpu = FakeGpu("GPU-a", field_type=pynvml.NVML_VALUE_TYPE_UNSIGNED_INT)
    nvml, _, clock = session(gpu)
    tick(nvml, clock)
    (reading,) = tick(nvml, clock)
    assert reading.pcie_tx_bytes_per_second == 3 * MIB
    assert reading.pcie_rx_bytes_per_second == 5 * MIB


@pytest.mark.parametrize(
    ("previous", "current", "bits", "delta"),
    [
        (10, 15, 64, 5),
        ((1 << 32) - 10, 5, 32, 15),
        ((1 << 32) - 10, 5, 64, 15),
        ((1 << 64) - 10, 5, 64, 15),
        (1_000, 5, 32, None),
        (1 << 40, 5, 64, None),
    ],
)
def test_a_counter_that_went_backwards_has_wrapped_or_was_reset(
    previous: int, current: int, bits: int, delta: int | None
) -> None:
    assert counter_delta(previous, current, bits) == delta


def test_throughput_is_measured_off_the_tick_where_there_is_nothing_cheaper() -> None:
    gpu = FakeGpu("GPU-a", gpm=False, fields=None)
    nvml, api, clock = session(gpu)
    (reading,) = tick(nvml, clock)
    assert reading.pcie_tx_bytes_per_second is None
    until(lambda: tick(nvml, clock)[0].pcie_tx_bytes_per_second == 100_000, "a throughput")
    assert tick(nvml, clock)[0].pcie_rx_bytes_per_second == 200_000
    assert api.calls["nvmlDeviceGetFieldValues"] == 1
    nvml.close()


def test_processes_of_all_three_lists_are_merged_and_none_is_there_twice() -> None:
    gpu = FakeGpu("GPU-a", compute=[(1, 100), (2, None)], graphics=[(1, 100), (3, 7)], mps=[(2, 50), (4, None)])
    nvml, _, _ = session(gpu)
    assert nvml.processes(nvml.devices()[0]) == [(1, 100), (2, 50), (3, 7), (4, None)]


def test_utilization_samples_that_cannot_be_true_are_left_out() -> None:
    gpu = FakeGpu("GPU-a", compute=[(1, 0), (2, 0)])
    nvml, _, clock = session(gpu)
    now = clock.now_us
    gpu.process_samples = [(1, now, 30), (1, now - 10, 50), (2, now, 101), (3, now, 10), (2, now - 2_000_000, 9)]
    assert nvml.process_utilization(nvml.devices()[0]) == {1: pytest.approx(0.4)}
    assert nvml.errors["nvmlDeviceGetProcessesUtilizationInfo:implausible_sample"] == 2


def test_the_last_sample_seen_is_kept_per_device() -> None:
    first, second = FakeGpu("GPU-a", compute=[(1, 0)]), FakeGpu("GPU-b", compute=[(1, 0)])
    nvml, api, clock = session(first, second)
    one, two = nvml.devices()
    first.process_samples = [(1, clock.now_us + 500, 30)]
    second.process_samples = [(1, clock.now_us - 500, 60)]
    assert nvml.process_utilization(one) == {1: 0.3}
    assert nvml.process_utilization(two) == {1: 0.6}
    api.asked_since.clear()
    assert nvml.process_utilization(one) == {}
    assert nvml.process_utilization(two) == {}
    assert api.asked_since == [clock.now_us + 500, clock.now_us - 500]


def test_a_timestamp_from_the_future_does_not_silence_the_device() -> None:
    gpu = FakeGpu("GPU-a", compute=[(1, 0)])
    nvml, _, clock = session(gpu)
    gpu.process_samples = [(1, clock.now_us * 2, 30)]
    assert nvml.process_utilization(nvml.devices()[0]) == {}
    gpu.process_samples = [(1, clock.now_us, 30)]
    assert nvml.process_utilization(nvml.devices()[0]) == {1: 0.3}


def test_the_old_utilization_call_serves_drivers_that_lack_the_new_one() -> None:
    gpu = FakeGpu("GPU-a", compute=[(1, 0)])
    nvml, api, clock = session(gpu)
    api.refuse["nvmlDeviceGetProcessesUtilizationInfo"] = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    gpu.process_samples = [(1, clock.now_us, 30)]
    assert nvml.process_utilization(nvml.devices()[0]) == {1: 0.3}
    assert api.calls["nvmlDeviceGetProcessUtilization"] == 1


def test_xids_are_counted_per_device_and_outlive_a_reload() -> None:
    first, second = FakeGpu("GPU-a"), FakeGpu("GPU-b")
    nvml, api, clock = session(first, second)
    tick(nvml, clock)
    api.xids = [(first, 31), (first, 31), (second, 79)]
    tick(nvml, clock)
    seen = clock.now_ns
    api.initialised = False
    tick(nvml, clock, 6)
    api.xids = [(first, 43)]
    tick(nvml, clock, 6)
    one, two = tick(nvml, clock)
    assert (one.xid_counts, two.xid_counts) == ({31: 2, 43: 1}, {79: 1})
    assert one.xid_last_seen_wall_ns[31] == seen


def test_a_storm_of_xids_does_not_hold_up_the_tick() -> None:
    gpu = FakeGpu("GPU-a")
    nvml, api, clock = session(gpu)
    nvml.devices()
    api.xids = [(gpu, 31)] * 1_000
    tick(nvml, clock)
    assert 0 < len(api.xids) < 1_000


def test_closing_gives_every_sample_back() -> None:
    nvml, api, clock = session(FakeGpu("GPU-a"), FakeGpu("GPU-b"))
    tick(nvml, clock)
    assert len(api.samples) == 4
    nvml.close()
    assert len(api.samples) == 0
    assert not api.initialised


@pytest.mark.parametrize(
    ("code", "cure"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "install the NVIDIA driver"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "modprobe nvidia"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "reboot"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "run as root"),
        (pynvml.NVML_ERROR_UNKNOWN, "nvidia-smi"),
    ],
)
def test_a_start_that_fails_is_reported_in_one_line_with_the_remedy(code: int, cure: str) -> None:
    api = FakeNvml()
    api.refuse["nvmlInit"] = code
    with pytest.raises(SetupError, match=cure) as caught:
        Nvml(api).open()
    assert "\n" not in str(caught.value)


def test_memory_without_the_new_call_is_read_by_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeNvml(FakeGpu("GPU-a"))
    both = api._nvmlDeviceGetMemoryInfo

    def old_only(handle: int, version: int | None = None) -> Any:
        if version is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return both(handle)

    monkeypatch.setattr(api, "_nvmlDeviceGetMemoryInfo", old_only)
    with Nvml(api) as nvml:
        reading = nvml.read(nvml.devices()[0])
    assert (reading.memory_used_bytes, reading.memory_reserved_bytes) == (10 * MIB, None)
