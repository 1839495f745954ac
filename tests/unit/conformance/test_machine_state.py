# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a run looks at before its first item, and how it is handed on."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.checks import leftovers
from conformance.checks.probes.uprobe_check import libcuda_refuses, sandbox_of
from conformance.machine_state import (
    MachineSettings,
    MachineState,
    current_settings,
    item_environment,
    last_state,
    observe,
    state_from_json,
    unknown_state,
)
from conformance.report.model import Verdict

BEFORE = MachineSettings({"GPU-1": {"MIG mode": "0", "compute mode": "0"}}, "", ["/sys/fs/cgroup/gpuwarden"], [4])


def test_a_look_is_handed_on_as_it_is() -> None:
    state = MachineState(False, "/usr/lib/libcuda.so.580", None, "/opt", "no BTF", BEFORE)
    assert state_from_json(state.as_json()) == state
    assert state_from_json(unknown_state(True, "it hung").as_json()).bpf == "it hung"


def test_the_last_look_that_was_written_whole_counts() -> None:
    first, second = (
        unknown_state(False, "first"),
        MachineState(False, "/usr/lib/libcuda.so.580", None, "", None, BEFORE),
    )
    cut_off = second.as_json()[:-1]
    assert last_state(f"{first.as_json()}\n{second.as_json()}\na word of a library\n{cut_off}") == second
    assert last_state(f"{first.as_json()}\n{second.as_json()}") == first
    assert last_state(cut_off) is None


def test_each_check_is_reported_before_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object) -> str | None:
        raise TimeoutError

    monkeypatch.setattr("conformance.machine_state._library", lambda *_: ("/usr/lib/libcuda.so.580", "/opt"))
    monkeypatch.setattr("conformance.machine_state._bpf", hang)
    parts = observe(False)
    seen = next(parts)
    assert (seen.libcuda, seen.library_path) == ("/usr/lib/libcuda.so.580", "/opt")
    assert seen.bpf
    assert seen.before.why_not
    with pytest.raises(TimeoutError):
        next(parts)


def test_a_driver_that_answers_in_any_way_leaves_the_rest_to_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> object:
        raise ZeroDivisionError("in the\nbinding")

    monkeypatch.setattr("conformance.machine_state.nvml", broken)
    seen = current_settings()
    assert (seen.settings, seen.why_not) == ({}, "in the binding")


def test_the_drivers_folder_is_looked_at_first_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/theirs:/opt")
    assert item_environment(MachineState(False, None, None, "/opt", None, BEFORE)) == {
        "LD_LIBRARY_PATH": "/opt:/theirs"
    }
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert item_environment(MachineState(False, None, None, "", None, BEFORE)) == {}


def test_a_kernel_that_only_plays_linux_is_named() -> None:
    message = sandbox_of("<6>[    0.000000] Starting gVisor...\n", "4.4.0")
    assert message is not None
    assert "gVisor (it says Linux 4.4.0)" in message
    assert sandbox_of("Linux version 6.18.44 (gcc 12.2)", "6.18.44") is None


def test_a_libcuda_that_alone_cannot_be_probed_is_the_reason(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")
    message = libcuda_refuses(str(tmp_path / "libcuda.so.1"))
    assert message is not None
    assert message.startswith(f"uprobes work here, but not on {tmp_path}/libcuda.so.1: ")


def test_a_setting_that_changed_is_a_failure_and_one_that_did_not_is_fine() -> None:
    now = MachineSettings({"GPU-1": {"MIG mode": "0", "compute mode": "3"}})
    found = {row.what: row for row in leftovers.compared(BEFORE, now)}
    assert found["MIG mode of every GPU is as it was"].verdict is Verdict.OK
    changed = found["compute mode of every GPU is as it was"]
    assert (changed.verdict, changed.figure, changed.baseline) == (Verdict.FAILED, "3", "0")


def test_settings_that_were_not_read_are_not_compared() -> None:
    (row,) = leftovers.compared(MachineSettings(why_not="no driver"), MachineSettings())
    assert row.verdict is Verdict.SKIPPED
    assert "no driver" in row.note


def test_settings_that_can_no_longer_be_read_are_not_as_they_were() -> None:
    rows = list(leftovers.compared(BEFORE, MachineSettings(why_not="the GPU is lost")))
    assert {row.verdict for row in rows} == {Verdict.FAILED}
    assert {row.note for row in rows} == {"the GPU is lost"}
