# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""An allocation over its quota on kernels as distributions ship them: denied from Linux 6.18 on, held before.

What is booted, or run on this machine's own, loads the same objects as the agent and looks at what a program's calls
return (guest/guest.c).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kernel.memory.quota_guest import build_guest, compile_guest
from tests.support.booting import or_skip, stock_images
from tools.harness import stock_kernels

_NEW, _OLD = (6, 18), (6, 1)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], list[str]]:
    """By kernel, the lines that the guest wrote."""
    with or_skip():
        kernels = stock_images(tmp_path_factory.mktemp("archive"), [(_NEW, (99, 0)), (_OLD, (6, 2))])
    texts = stock_kernels.boot(kernels, build_guest(tmp_path_factory.mktemp("guest")))
    return {version: text.splitlines() for version, text in zip((_NEW, _OLD), texts, strict=True)}


def _checks(lines: list[str]) -> list[str]:
    """What was checked; none may have failed, and the last one must have been reached."""
    assert "END" in lines, "\n".join(lines[-30:])
    assert not [line for line in lines if line.startswith("FAILED")], "\n".join(lines)
    return [line.removeprefix("OK ") for line in lines if line.startswith("OK ")]


def test_a_new_kernel_denies_and_the_program_runs_on_as_after_any_failure(
    output: dict[tuple[int, int], list[str]],
) -> None:
    checks = _checks(output[_NEW])
    assert "deny: yes" in output[_NEW]
    assert "an allocation that does not fit returns and never runs" in checks
    assert "so does every one of several threads from any depth of stack" in checks
    assert "no process is denied or held once the lease is over" in checks


def test_an_old_kernel_refuses_to_deny_and_the_allocation_is_held_until_there_is_room(
    output: dict[tuple[int, int], list[str]],
) -> None:
    checks = _checks(output[_OLD])
    assert "deny: no" in output[_OLD]
    assert "links: single" in output[_OLD]
    assert "an allocation that does not fit stops its process before it runs" in checks
    assert "once there is room it goes on" in checks
    assert "no process is denied or held once the lease is over" in checks


def test_this_kernel_denies_an_allocation_or_holds_it(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    program = compile_guest(tmp_path)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([program, tmp_path], env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    checks = _checks(lines)
    record_property("denies", "deny: yes" in lines)
    record_property("links", "multi" if "links: multi" in lines else "single")
    denied = "an allocation that does not fit returns and never runs" in checks
    held = "an allocation that does not fit stops its process before it runs" in checks
    assert denied == ("deny: yes" in lines) != held
