# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Single uprobes, as before Linux 6.6, count the same.

Taking them away takes up to a minute, for each waits for a grace period of its own, and delays other attaches of a
probe meanwhile. So this is the last file of its folder, and the tests of the next ones run at the same time.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from agent.node import preflight
from agent.node.procfs import Procfs
from agent.probes.libbpf import BpfObject
from agent.probes.libcuda import LibcudaProbes
from tests.support.programs.driver import MIXED_OPERATIONS, Driver, assert_mixed_operations, lost


@pytest.fixture(scope="session")
def at_leisure() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Does something while other tests run. What goes wrong with it is an error at the end of all tests."""
    begun: list[Future[None]] = []
    with ThreadPoolExecutor() as threads:
        yield lambda act: begun.append(threads.submit(act))
    for one in begun:
        one.result()


@pytest.fixture
def own(driver: Driver, tmp_path: Path) -> Driver:
    """With a libcuda that no other test has: it is probed for longer than this one takes."""
    return replace(driver, libcuda=Path(shutil.copy(driver.libcuda, tmp_path)))


@pytest.fixture
def single_probes(
    own: Driver, at_leisure: Callable[[Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[LibcudaProbes]:
    """Attached one by one."""

    def load(path: Path, **_: object) -> BpfObject:
        return BpfObject(path)

    monkeypatch.setattr("agent.probes.libbpf.BpfObject", load)
    probes = LibcudaProbes(preflight.bpf_object(), Procfs())
    try:
        if probes.can_deny:
            pytest.skip("what denies is attached together with others alone, and each kernel that denies can do that")
        assert not probes.ensure(str(own.libcuda)).failed
        yield probes
    finally:
        at_leisure(probes.close)


def test_single_uprobes_count_the_same(own: Driver, single_probes: LibcudaProbes) -> None:
    driven = own.run(*MIXED_OPERATIONS)
    assert_mixed_operations(single_probes, driven.process, (driven.function(0), driven.function(0, device=1)))
    assert not lost(single_probes)
