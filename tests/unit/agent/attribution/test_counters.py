# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a process says in its calls' arguments is not believed beyond what a device can do."""

from __future__ import annotations

import pytest

from agent.model import DeviceUuid, ProcessId
from agent.samples import CopyCount, LaunchCount, Sample
from agent.tally import Counted, Tally

LIAR, HONEST = ProcessId(10, 1), ProcessId(11, 1)
GPU = DeviceUuid("GPU-0")


def work(tally: Tally, *samples: Sample) -> dict[ProcessId, Counted]:
    return {process: counted for (process, _), counted in tally.tick(samples, lambda process, ordinal: GPU).items()}


@pytest.mark.parametrize(
    "lie", [CopyCount(LIAR, 0, "host_to_device", (1 << 64) - 1, 1), LaunchCount(LIAR, 0, 7, 1, 1 << 63, 1, 1)]
)
def test_more_than_a_device_can_do_is_nobodys_work(lie: Sample) -> None:
    tally = Tally()
    found = work(tally, lie, CopyCount(HONEST, 0, "host_to_device", 4096, 1))
    assert found == {HONEST: Counted(pcie_rx_bytes=4096)}
    assert tally.implausible == 1


def test_a_liar_is_counted_again_once_it_tells_the_truth() -> None:
    tally = Tally()
    work(tally, CopyCount(LIAR, 0, "host_to_device", 1 << 60, 1))
    assert work(tally, CopyCount(LIAR, 0, "host_to_device", (1 << 60) + 512, 2))[LIAR].pcie_rx_bytes == 512
