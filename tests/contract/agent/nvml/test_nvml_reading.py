# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The real binding on a real libnvidia-ml.so.1 file, with the simulated GPU behind it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.core.model import DeviceReading
from agent.nvml.client import Nvml
from tests.support.clocks import AheadClock
from tests.support.nvml.reading import read_until, readings
from tools.harness.wait import until

BUILD = Path(__file__).parents[4] / "sim/build"
GIB = 1 << 30
GPUS = 2
DEADLINE_SECONDS = 30


class Simulator:
    """A simulated node of two GPUs in a folder of its own; `start` and `stop` load and unload its driver."""

    def __init__(self, folder: Path) -> None:
        self.environment = {
            **os.environ,
            "GPUSIM_DIR": str(folder),
            "GPUSIM_GPUS": str(GPUS),
            "LD_LIBRARY_PATH": str(BUILD / "lib"),
            "CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"),
        }
        self.server: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [str(BUILD / "bin/gpusim"), "serve", "--dir", self.environment["GPUSIM_DIR"]]
        self.server = subprocess.Popen(command, stdout=subprocess.PIPE, env=self.environment)
        assert self.server.stdout
        assert self.server.stdout.readline() == b"ready\n"

    def stop(self) -> None:
        assert self.server
        assert self.server.stdout
        self.server.terminate()
        self.server.wait(10)
        self.server.stdout.close()

    def fault(self, *words: str) -> None:
        subprocess.run([str(BUILD / "bin/gpusim"), "fault", *words], env=self.environment, check=True, timeout=10)

    def offline(self, *words: str) -> subprocess.Popen[bytes]:
        command = [str(BUILD / "bin/offline"), "--kernel-us", "2000", *words]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=self.environment)


@pytest.fixture
def simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    library = BUILD / "lib/libnvidia-ml.so.1"
    assert library.exists(), "run make sim"
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # from now on its soname means this file
    simulator = Simulator(tmp_path)
    monkeypatch.setenv("GPUSIM_DIR", simulator.environment["GPUSIM_DIR"])
    yield simulator
    simulator.stop()


@pytest.fixture
def clock() -> AheadClock:
    return AheadClock()


@pytest.fixture
def nvml(simulator: Simulator, clock: AheadClock) -> Iterator[Nvml]:
    with Nvml(monotonic_ns=clock) as nvml:
        yield nvml


@pytest.fixture
def busy(simulator: Simulator) -> Iterator[subprocess.Popen[bytes]]:
    process = simulator.offline("--device", "0", "--copy-bytes", str(1 << 20), "--memory", str(GIB), "--seconds", "60")
    yield process
    process.kill()
    process.wait()


def test_devices_are_described(nvml: Nvml) -> None:
    first, second = nvml.devices()
    assert (first.index, second.index) == (0, 1)
    assert first.uuid.startswith("GPU-")
    assert first.uuid != second.uuid
    assert first.sm_count == 132
    assert first.memory_total_bytes == 80 * GIB
    assert first.pci_bus_id != second.pci_bus_id


def test_an_idle_device_is_measured_as_idle(nvml: Nvml) -> None:
    first, _ = read_until(nvml, lambda readings: readings[0].sm_activity_ratio is not None)
    assert (first.sm_activity_ratio, first.sm_activity_source) == (0.0, "gpm")
    assert (first.pcie_tx_bytes_per_second, first.pcie_rx_bytes_per_second) == (0.0, 0.0)
    assert first.memory_used_bytes == 0
    assert first.memory_reserved_bytes
    for known in (first.sm_clock_hertz, first.power_watts, first.power_limit_watts, first.temperature_celsius):
        assert known
    assert nvml.processes(first.device) == []
    assert nvml.process_utilization(first.device) == {}


def test_a_working_process_shows_in_every_figure_of_its_device_only(nvml: Nvml, busy: subprocess.Popen[bytes]) -> None:
    first, second = read_until(
        nvml, lambda r: (r[0].sm_activity_ratio or 0) > 0.5 and (r[0].pcie_rx_bytes_per_second or 0) > 0
    )
    assert first.sm_activity_ratio is not None
    assert first.sm_activity_ratio <= 1
    ((tgid, used),) = nvml.processes(first.device)
    assert tgid == busy.pid
    assert used is not None
    assert used >= GIB
    assert first.memory_used_bytes is not None
    assert first.memory_used_bytes >= used
    assert second.sm_activity_ratio == 0
    assert nvml.processes(second.device) == []
    shares = until(lambda: nvml.process_utilization(first.device), "a process utilization", step_seconds=0.05)
    assert list(shares) == [busy.pid]
    assert 0 < shares[busy.pid] <= 1


def test_a_process_that_ends_leaves_the_list(nvml: Nvml, busy: subprocess.Popen[bytes]) -> None:
    read_until(nvml, lambda readings: bool(nvml.processes(readings[0].device)))
    busy.kill()
    read_until(nvml, lambda readings: not nvml.processes(readings[0].device))
    read_until(nvml, lambda readings: readings[0].memory_used_bytes == 0)


def test_a_lost_gpu_hides_only_itself_and_comes_back(simulator: Simulator, nvml: Nvml) -> None:
    read_until(nvml, lambda readings: readings[0].sm_activity_ratio is not None)
    simulator.fault("lose", "0")
    first, second = readings(nvml)
    assert first == DeviceReading(first.device, lost=True)
    assert not second.lost
    assert second.memory_used_bytes == 0
    simulator.fault("restore", "0")
    read_until(nvml, lambda readings: not readings[0].lost and readings[0].sm_activity_ratio is not None)
    assert any(error.endswith(":gpu_is_lost") for error in nvml.errors)


def test_an_unloaded_driver_is_survived(simulator: Simulator, nvml: Nvml, clock: AheadClock) -> None:
    before = nvml.devices()
    simulator.stop()
    assert [reading.lost for reading in readings(nvml)] == [True] * GPUS
    assert nvml.problem
    clock.ahead_ns += 10**10
    readings(nvml)
    assert "modprobe" in (nvml.problem or "")
    simulator.start()
    clock.ahead_ns += 10**10
    found = read_until(nvml, lambda readings: all(reading.sm_activity_ratio is not None for reading in readings))
    assert tuple(reading.device for reading in found) == before
    assert not nvml.problem


def test_xids_are_counted_by_device(simulator: Simulator, nvml: Nvml) -> None:
    readings(nvml)
    for _ in range(2):
        simulator.fault("xid", "1", "31")
    simulator.fault("xid", "1", "79")
    _, second = read_until(nvml, lambda readings: sum(readings[1].xid_counts.values()) == 3)
    first, second = readings(nvml)
    assert first.xid_counts == {}
    assert second.xid_counts == {31: 2, 79: 1}
    assert abs(second.xid_last_seen_wall_ns[79] - time.time_ns()) < 60 * 10**9


def test_without_gpm_and_counters_the_other_sources_serve(simulator: Simulator, busy: subprocess.Popen[bytes]) -> None:
    for function in ("nvmlGpmQueryDeviceSupport", "nvmlGpmSampleGet", "nvmlDeviceGetFieldValues"):
        simulator.fault("unsupported", function)
    with Nvml() as nvml:
        (first, _) = read_until(nvml, lambda r: (r[0].sm_activity_ratio or 0) > 0.5)
        assert first.sm_activity_source == "utilization"
        read_until(nvml, lambda r: r[0].pcie_rx_bytes_per_second is not None)
        assert nvml.errors["nvmlDeviceGetFieldValues:not_supported"] == GPUS


def test_an_unsupported_figure_is_unknown_and_costs_nothing_else(simulator: Simulator) -> None:
    simulator.fault("unsupported", "nvmlDeviceGetPowerUsage")
    with Nvml() as nvml:
        first, _ = readings(nvml)
        readings(nvml)
    assert first.power_watts is None
    assert first.temperature_celsius
    assert nvml.errors["nvmlDeviceGetPowerUsage:not_supported"] == GPUS
