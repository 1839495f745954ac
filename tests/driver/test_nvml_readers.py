# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Readers of NVML that are not ours show the simulated GPUs and the processes on them, without a complaint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver.conftest import fetched
from tools.harness.node import BUILD, Node, simulated_node
from tools.harness.wait import until

_SECONDS = 60


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, int]]:
    """Two GPUs, and the pid of a program that uses the first one."""
    with simulated_node(tmp_path_factory.mktemp("gpu"), {"gpus": "2", "memory": "2GiB"}) as node:
        program = node.start("offline", ["--seconds", str(_SECONDS * 2)])
        until(lambda: str(program.pid) in shown(node, "gpustat", "--show-pid"), "the program on the GPU")
        yield node, program.pid


def shown(node: Node, *command: str) -> str:
    """What a program of this environment prints, with nothing on its standard error."""
    path = [str(Path(sys.executable).with_name(command[0])), *command[1:]]
    environment = {**os.environ, **node.environment}
    done = subprocess.run(path, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_gpustat(busy: tuple[Node, int]) -> None:
    node, pid = busy
    first, second = shown(node, "gpustat", "--no-header", "--no-color", "--show-cmd", "--show-pid").splitlines()
    assert re.match(rf"\[0\] Simulated .* / +2048 MB \| .*offline/{pid}\(", first)
    assert re.match(r"\[1\] Simulated .* / +2048 MB \|\s*$", second)


def test_nvitop(busy: tuple[Node, int]) -> None:
    node, pid = busy
    output = shown(node, "nvitop", "--once", "--no-unicode")
    assert len(re.findall(r"^\| +[01] +Simulated ", output, re.MULTILINE)) == 2
    assert re.search(rf"^\| +0 +{pid} C .*MiB", output, re.MULTILINE)


def test_nvtop(busy: tuple[Node, int], tmp_path: Path) -> None:
    node, pid = busy
    socket, errors = tmp_path / "tmux", tmp_path / "errors"
    tmux = ["tmux", "-S", str(socket)]
    variables = " ".join(f"{name}={value}" for name, value in {**node.environment, "HOME": str(tmp_path)}.items())
    program = f"env {variables} {fetched('nvtop', 'usr/bin/nvtop')} 2>{errors}"
    subprocess.run([*tmux, "-f", "/dev/null", "new-session", "-d", "-x", "140", "-y", "40", program], check=True)
    try:

        def screen() -> str:
            return subprocess.run([*tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True).stdout

        until(lambda: re.search(rf"^ +{pid} +root +0 +Compute", screen(), re.MULTILINE), "the process")
        assert re.search(r"Device 0 \[Simulated .*\]", screen())
        assert re.search(r"Device 1 \[Simulated .*\]", screen())
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
    assert errors.read_text() == ""


def test_every_name_of_the_real_library_exists() -> None:
    real = fetched("550", "usr/lib/*/nvidia/current/libnvidia-ml.so.1")
    missing = exported(real) - exported(BUILD / "lib" / "libnvidia-ml.so.1")
    assert len(exported(real)) > 300
    assert missing == set()


def exported(library: Path) -> set[str]:
    """Names of functions."""
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
    return {line.split()[2].partition("@")[0] for line in listed.stdout.splitlines() if line.split()[1] == "T"}
