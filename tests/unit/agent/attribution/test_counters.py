# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a process passes in its calls' arguments is not believed beyond what a device can do."""

from __future__ import annotations

import pytest

from agent.attribution.counters import CountedWork, CounterDeltas
from agent.collectors.samples import CopyCount, LaunchCount, Sample
from agent.core.model import DeviceUuid, ProcessId

LIAR, HONEST = ProcessId(10, 1), ProcessId(11, 1)
GPU = DeviceUuid("GPU-0")


def work(tally: CounterDeltas, *samples: Sample) -> dict[ProcessId, CountedWork]:
    return {process: counted for (process, _), counted in tally.tick(samples, lambda process, ordinal: GPU).items()}


@pytest.mark.parametrize(
    "lie", [CopyCount(LIAR, 0, "host_to_device", (1 << 64) - 1, 1), LaunchCount(LIAR, 0, 7, 1, 1 << 63, 1, 1)]
)
def test_more_than_a_device_can_do_is_attributed_to_no_process(lie: Sample) -> None:
    tally = CounterDeltas()
    found = work(tally, lie, CopyCount(HONEST, 0, "host_to_device", 4096, 1))
    assert found == {HONEST: CountedWork(pcie_rx_bytes=4096)}
    assert tally.implausible == 1


def test_a_process_with_implausible_counts_is_counted_again_once_they_are_plausible() -> None:
    tally = CounterDeltas()
    work(tally, CopyCount(LIAR, 0, "host_to_device", 1 << 60, 1))
    assert work(tally, CopyCount(LIAR, 0, "host_to_device", (1 << 60) + 512, 2))[LIAR].pcie_rx_bytes == 512
