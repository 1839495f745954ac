# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Everything is counted once however often it is probed: a file taken for several."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from agent.node import preflight
from agent.node.procfs import Procfs
from agent.probes.libcuda import LibcudaProbes
from agent.probes.libraries import FileId
from tests.support.programs.driver import MIXED_OPERATIONS, Driver, assert_mixed_operations, lost


@pytest.fixture(scope="module")
def doubled_probes(driver: Driver) -> Iterator[LibcudaProbes]:
    """Attached three times to one file, each time as if it were another."""
    numbers = count()
    with pytest.MonkeyPatch.context() as patch, LibcudaProbes(preflight.bpf_object(), Procfs()) as probes:
        patch.setattr("agent.probes.libraries.real_file", lambda *_: FileId(0, next(numbers)))
        for _ in range(3):
            assert not probes.ensure(str(driver.libcuda)).failed
        assert len(probes.libraries()) == 3
        yield probes


@pytest.mark.parametrize("through", ["symbol", "pointer"])
@pytest.mark.parametrize("streams", ["legacy", "per-thread"])
def test_what_is_probed_three_times_is_counted_once(
    driver: Driver, doubled_probes: LibcudaProbes, through: str, streams: str
) -> None:
    before = lost(doubled_probes).get("duplicate", 0)
    driven = driver.run(f"through={through}", f"streams={streams}", *MIXED_OPERATIONS)
    assert_mixed_operations(doubled_probes, driven.process, (driven.function(0), driven.function(0, device=1)))
    found = lost(doubled_probes)
    assert found.pop("duplicate") > before
    assert not found
