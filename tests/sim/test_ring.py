# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The server's promises to its clients, each a C function in ring_test.c that speaks the protocol by hand."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_SIM = _HERE.parents[1] / "sim"
_NAMES = re.findall(r"^\s*TEST\((\w+)\)", (_HERE / "ring_test.c").read_text(), re.MULTILINE)
_FLAGS = [
    "-std=gnu11",
    "-D_GNU_SOURCE",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-g",
    "-O1",
    f"-I{_SIM}",
    f"-I{_SIM / 'include'}",
]


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tests and a server that is stopped by the compiler's checks for stray memory and overflow."""
    folder = tmp_path_factory.mktemp("ring")
    server = [str(source) for source in sorted((_SIM / "server").glob("*.c"))]
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    subprocess.run(["gcc", *_FLAGS, *checks, *server, "-o", str(folder / "gpusim")], check=True)
    subprocess.run(["gcc", *_FLAGS, str(_HERE / "ring_test.c"), "-o", str(folder / "ring_test")], check=True)
    return folder


@pytest.fixture
def environment(programs: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """A server of its own per test, which must end cleanly on SIGTERM."""
    environment = {**os.environ, "GPUSIM_DIR": str(tmp_path)}
    command = [str(programs / "gpusim"), "serve"]
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield environment
        server.terminate()
        _, errors = server.communicate(timeout=30)
        assert server.returncode == 0, errors
        assert not errors


@pytest.mark.parametrize("name", _NAMES)
def test_of_the_ring(programs: Path, environment: dict[str, str], name: str) -> None:
    command = [str(programs / "ring_test"), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_every_test_of_the_ring_is_known_to_pytest(programs: Path) -> None:
    listed = subprocess.run([programs / "ring_test"], capture_output=True, text=True, timeout=60, check=True)
    assert listed.stdout.split() == _NAMES
