# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is done otherwise before Linux 6.1: these tests only pretend to be there, the maps are this kernel's."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest

from agent.node import preflight
from agent.node.procfs import Procfs
from agent.probes.libbpf import BpfObject
from agent.probes.libcuda import LibcudaProbes
from tests.support.programs.driver import Driver, kernels, lost

_NO_PREALLOC = 1
_MIB = 1 << 20


def _facts(fd: int) -> dict[str, int]:
    lines = re.findall(
        r"^(map_flags|memlock|max_entries):\s*(\w+)$", Path(f"/proc/self/fdinfo/{fd}").read_text(), re.MULTILINE
    )
    return {name: int(value, 0) for name, value in lines}


def _pretend(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr("agent.probes.libbpf.kernel_version", lambda _: preflight.kernel_version(release))


def _map_facts(bpf: BpfObject) -> list[dict[str, int]]:
    found, facts = bpf.lib.bpf_object__next_map(bpf._object, None), []
    while found:
        facts.append(_facts(bpf.lib.bpf_map__fd(found)))
        found = bpf.lib.bpf_object__next_map(bpf._object, found)
    return facts


def test_maps_grow_from_linux_6_1_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "6.1.0")
    with BpfObject(preflight.bpf_object()) as bpf:
        assert any(facts["map_flags"] & _NO_PREALLOC for facts in _map_facts(bpf))


def test_no_map_grows_before_linux_6_1_and_all_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "5.15.0-91-generic")
    with BpfObject(preflight.bpf_object()) as bpf:
        facts = _map_facts(bpf)
        assert not any(one["map_flags"] & _NO_PREALLOC for one in facts if one["max_entries"])  # 0: task storage
        assert sum(one["memlock"] for one in facts) < 33 * _MIB


def test_launches_are_counted_in_preallocated_maps(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "5.15.0-91-generic")
    with LibcudaProbes(preflight.bpf_object(), Procfs()) as probes:
        probes.ensure(str(driver.libcuda))
        driven = driver.run("10*launch:4x1x1:2x1x1")
        assert kernels(probes, driven.process) == 10
        assert not lost(probes)


def test_probes_may_have_as_many_files_open_as_the_hard_limit_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        with LibcudaProbes(preflight.bpf_object(), Procfs()):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
