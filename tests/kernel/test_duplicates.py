# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Everything is counted once however often it is probed: a file taken for several."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from agent import preflight
from agent.libraries import FileId
from agent.model import ProcessId
from agent.probes import Probes
from agent.procfs import Procfs
from tests.kernel.driven import Driver, Memory, copied, latencies, launched, lost, memory

OPERATIONS = (
    "3*alloc:1048576",
    "alloc_too_much:1099511627776",
    "free",
    *("23*launch:3x5x7:32x1x1", "2*copy_htod_async:1009", "sync") * 4,
    "new:1",
    "7*launch:2x1x1:32x1x1",
    "copy_dtoh:2003",
)


@pytest.fixture(scope="module")
def doubled_probes(driver: Driver) -> Iterator[Probes]:
    """Attached three times to one file, each time as if it were another."""
    numbers = count()
    with pytest.MonkeyPatch.context() as patch, Probes(preflight.bpf_object(), Procfs()) as probes:
        patch.setattr("agent.libraries.real_file", lambda *_: FileId(0, next(numbers)))
        for _ in range(3):
            assert not probes.ensure(str(driver.libcuda)).failed
        assert len(probes.libraries()) == 3
        yield probes


def check(probes: Probes, process: ProcessId, functions: tuple[int, int]) -> None:
    """That they have exactly OPERATIONS; `functions`: of device 0 and 1."""
    mib = 1 << 20
    assert launched(probes, process) == {
        (0, functions[0]): (4 * 23, 4 * 23 * 105, 32),
        (1, functions[1]): (7, 14, 32),
    }
    assert memory(probes, process) == {0: Memory({"plain": 2 * mib}, 3, 1, failures=1, peak=3 * mib)}
    assert copied(probes, process) == {
        (0, "host_to_device"): (8, 8 * 1009),
        (1, "device_to_host"): (1, 2003),
    }
    assert latencies(probes, process).count == 4 + 1


@pytest.mark.parametrize("through", ["symbol", "pointer"])
@pytest.mark.parametrize("streams", ["legacy", "per-thread"])
def test_what_is_probed_three_times_is_counted_once(
    driver: Driver, doubled_probes: Probes, through: str, streams: str
) -> None:
    before = lost(doubled_probes).get("duplicate", 0)
    driven = driver.run(f"through={through}", f"streams={streams}", *OPERATIONS)
    check(doubled_probes, driven.process, (driven.function(0), driven.function(0, device=1)))
    found = lost(doubled_probes)
    assert found.pop("duplicate") > before
    assert not found
