# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a run looks at before its first item, and how it is handed on."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu.items import leftovers
from gpu.look import Look, blind, item_environment, last_look, look_from, looks
from gpu.row import Verdict
from gpu.standing import Standing, standing
from gpu.uprobe_check import libcuda_refuses, sandbox_of

BEFORE = Standing({"GPU-1": {"MIG mode": "0", "compute mode": "0"}}, "", ["/sys/fs/cgroup/gpuwarden"], [4])


def test_a_look_is_handed_on_as_it_is() -> None:
    look = Look(False, "/usr/lib/libcuda.so.580", None, "/opt", "no BTF", BEFORE)
    assert look_from(look.as_json()) == look
    assert look_from(blind(True, "it hung").as_json()).bpf == "it hung"


def test_the_last_look_that_was_written_whole_counts() -> None:
    first, second = blind(False, "first"), Look(False, "/usr/lib/libcuda.so.580", None, "", None, BEFORE)
    cut_off = second.as_json()[:-1]
    assert last_look(f"{first.as_json()}\n{second.as_json()}\na word of a library\n{cut_off}") == second
    assert last_look(f"{first.as_json()}\n{second.as_json()}") == first
    assert last_look(cut_off) is None


def test_what_is_looked_at_is_told_before_the_next_thing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object) -> str | None:
        raise TimeoutError

    monkeypatch.setattr("gpu.look._library", lambda *_: ("/usr/lib/libcuda.so.580", "/opt"))
    monkeypatch.setattr("gpu.look._bpf", hang)
    parts = looks(False)
    seen = next(parts)
    assert (seen.libcuda, seen.library_path) == ("/usr/lib/libcuda.so.580", "/opt")
    assert seen.bpf
    assert seen.before.why_not
    with pytest.raises(TimeoutError):
        next(parts)


def test_a_driver_that_answers_in_any_way_leaves_the_rest_to_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> object:
        raise ZeroDivisionError("in the\nbinding")

    monkeypatch.setattr("gpu.standing.nvml", broken)
    seen = standing()
    assert (seen.settings, seen.why_not) == ({}, "in the binding")


def test_the_drivers_folder_is_looked_at_first_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/theirs:/opt")
    assert item_environment(Look(False, None, None, "/opt", None, BEFORE)) == {"LD_LIBRARY_PATH": "/opt:/theirs"}
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert item_environment(Look(False, None, None, "", None, BEFORE)) == {}


def test_a_kernel_that_only_plays_linux_is_named() -> None:
    said = sandbox_of("<6>[    0.000000] Starting gVisor...\n", "4.4.0")
    assert said is not None
    assert "gVisor (it says Linux 4.4.0)" in said
    assert sandbox_of("Linux version 6.18.44 (gcc 12.2)", "6.18.44") is None


def test_a_libcuda_that_alone_cannot_be_probed_is_the_reason(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")
    said = libcuda_refuses(str(tmp_path / "libcuda.so.1"))
    assert said is not None
    assert said.startswith(f"uprobes work here, but not on {tmp_path}/libcuda.so.1: ")


def test_a_setting_that_changed_is_a_failure_and_one_that_did_not_is_fine() -> None:
    now = Standing({"GPU-1": {"MIG mode": "0", "compute mode": "3"}})
    found = {row.what: row for row in leftovers.compared(BEFORE, now)}
    assert found["MIG mode of every GPU is as it was"].verdict is Verdict.OK
    changed = found["compute mode of every GPU is as it was"]
    assert (changed.verdict, changed.figure, changed.baseline) == (Verdict.FAILED, "3", "0")


def test_settings_that_were_not_read_are_not_compared() -> None:
    (row,) = leftovers.compared(Standing(why_not="no driver"), Standing())
    assert row.verdict is Verdict.SKIPPED
    assert "no driver" in row.note


def test_settings_that_can_no_longer_be_read_are_not_as_they_were() -> None:
    rows = list(leftovers.compared(BEFORE, Standing(why_not="the GPU is lost")))
    assert {row.verdict for row in rows} == {Verdict.FAILED}
    assert {row.note for row in rows} == {"the GPU is lost"}
