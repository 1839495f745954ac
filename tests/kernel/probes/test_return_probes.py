# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Without return probes launches are counted, and nothing else: no figure that a return would have completed.

With `auto` they are there where a trial says that processes under seccomp survive them.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from agent.node import preflight
from agent.node.procfs import Procfs
from agent.probes import abi, return_probes
from agent.probes.libcuda import LibcudaProbes
from agent.probes.symbols import SYMBOLS, WITHOUT_RETURNS
from tests.support.programs.driver import MIXED_OPERATIONS, Driver, launched, lost

_OF_CALLS = ("memory", "allocations", "copies", "latencies", "delivered", "calls", "freeings", "contexts", "charges")


@pytest.fixture(scope="module")
def entries_alone(driver: Driver) -> Iterator[LibcudaProbes]:
    with LibcudaProbes(preflight.bpf_object(), Procfs(), "a reason") as probes:
        assert not probes.ensure(str(driver.libcuda)).failed
        yield probes


def test_launches_are_counted_exactly_on_a_device_that_is_not_known(
    driver: Driver, entries_alone: LibcudaProbes
) -> None:
    driven = driver.run(*MIXED_OPERATIONS)
    unknown = abi.DEVICE_UNKNOWN
    assert launched(entries_alone, driven.process) == {
        (unknown, driven.function(0)): (4 * 23, 4 * 23 * 105, 32),
        (unknown, driven.function(0, 1)): (7, 14, 32),
    }
    assert not lost(entries_alone)


@pytest.mark.parametrize("name", _OF_CALLS)
def test_nothing_waits_for_a_return_and_nothing_is_booked_that_needs_one(
    driver: Driver, entries_alone: LibcudaProbes, name: str
) -> None:
    driver.run(*MIXED_OPERATIONS)
    bpf, key = entries_alone.bpf, ctypes.create_string_buffer(256)
    assert bpf.lib.bpf_map_get_next_key(bpf.map_fd(name), None, key), "the map is not empty"


def test_the_status_of_a_library_counts_what_is_off_by_role(driver: Driver, entries_alone: LibcudaProbes) -> None:
    status = entries_alone.ensure(str(driver.libcuda)).status()
    on = sum(symbol.role in WITHOUT_RETURNS for symbol in SYMBOLS)
    assert (status.attached, status.off, status.failed) == (on, len(SYMBOLS) - on, 0)
    assert (status.roles["alloc"].attached, status.roles["launch"].off) == (0, 0)
    assert status.roles["alloc"].off > 0


def test_no_allocation_can_be_denied(entries_alone: LibcudaProbes) -> None:
    assert not entries_alone.can_deny


def test_a_request_that_never_ends_does_not_keep_its_gate_shut(driver: Driver, entries_alone: LibcudaProbes) -> None:
    with driver.start("launch:1x1x1:1x1x1", "sync") as driven:
        rule = abi.Rule(role=abi.ROLE_ONLINE, slot_unknown=0)
        entries_alone.map("rules").put(abi.ProcessKey.of(driven.process), rule)
        driven.begin()
        driven.finish()
        gate = entries_alone.map("gates").share(abi.SLOTS)[0]
        assert gate.last_online_ns > 0
        assert gate.in_wait == 0, "only a wait that is seen to begin and not to end would keep it shut for long"


x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere return probes need no system call")


@x86
def test_the_trial_ends_on_this_kernel_with_every_return_seen_or_with_a_death() -> None:
    statuses, returns = return_probes.try_out()
    assert returns == return_probes.CALLS * sum(status == 0 for status in statuses)
    assert (return_probes.danger_of(statuses, returns) is None) == (statuses == (0, 0))


_UNDER_A_FILTER = """
import ctypes, struct
allow_all = ctypes.create_string_buffer(struct.pack("<HBBI", 6, 0, 0, 0x7FFF0000))
filter = ctypes.create_string_buffer(struct.pack("<QQ", 1, ctypes.addressof(allow_all)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, filter) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
from agent.probes import return_probes
print(return_probes.try_out(), return_probes.danger())
"""


@x86
def test_an_agent_that_is_under_a_filter_itself_comes_to_the_same_answer() -> None:
    """As the unit's and a container runtime's are; strict mode is refused there."""
    command = [sys.executable, "-c", _UNDER_A_FILTER]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"(({256 - errno.EINVAL}, 0), {2 * return_probes.CALLS}) {return_probes.danger()}\n"


@x86
def test_the_processes_of_the_trial_may_do_nothing_but_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another system call than exit in its place, both are killed: so they would be by that of a return."""
    exit_of_all = return_probes.program().replace(b"\xb8\x3c\0\0\0", b"\xb8\xe7\0\0\0")
    monkeypatch.setattr(return_probes, "program", lambda: exit_of_all)
    statuses, _ = return_probes.try_out()
    assert statuses == (-signal.SIGKILL, -signal.SIGSYS)
    assert "SIGKILL, SIGSYS" in (return_probes.danger_of(statuses, 4) or "")


@x86
def test_a_trial_whose_returns_are_not_seen_is_no_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(return_probes, "FUNCTION", return_probes.FUNCTION - 1)  # before it: never reached
    statuses, returns = return_probes.try_out()
    assert returns == 0
    assert return_probes.danger_of(statuses, returns)


def test_what_cannot_be_tried_is_no_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError("no program can be started")

    monkeypatch.setattr(return_probes, "try_out", refuse)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return_probes.danger.cache_clear()
    try:
        assert "could not be tried: no program" in (return_probes.why_off(return_probes.ReturnProbes.AUTO) or "")
    finally:
        return_probes.danger.cache_clear()
