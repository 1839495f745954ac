# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Processes are locked, saved and restored from outside as the driver's documentation describes, each a function in
checkpoint_test.c."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tools.harness.node import BUILD

_HERE = Path(__file__).parent
_SIM = _HERE.parents[1] / "sim"
_LIBRARIES = BUILD / "lib"
_NAMES = re.findall(r"^\s*TEST\((\w+)\)", (_HERE / "checkpoint_test.c").read_text(), re.MULTILINE)
_TIMES = {
    "GPUSIM_SAVE_TIME": "100ms",
    "GPUSIM_SAVE_BANDWIDTH": "4GB/s",
    "GPUSIM_RESTORE_TIME": "50ms",
    "GPUSIM_RESTORE_BANDWIDTH": "8GB/s",
}
_WITH_MPS = "an_mps_client_is_refused"


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "checkpoint_test"
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g", "-O1", f"-I{_SIM / 'include'}"]
    libraries = [f"-L{_LIBRARIES}", "-lcuda", "-lpthread"]
    subprocess.run(["gcc", *flags, str(_HERE / "checkpoint_test.c"), "-o", str(path), *libraries], check=True)
    return path


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not tmp_path: other users have to get at the socket."""
    with tempfile.TemporaryDirectory(prefix="gpusim-") as path:
        Path(path).chmod(0o755)
        yield Path(path)


@contextmanager
def server(folder: Path, mps: bool) -> Iterator[None]:
    settings = {"GPUSIM_SMS": "4", "GPUSIM_MEMORY": "3GiB", "GPUSIM_MPS": "on" if mps else "off"} | _TIMES
    command = [str(BUILD / "bin" / "gpusim"), "serve", "--dir", str(folder)]
    with subprocess.Popen(command, env={**os.environ, **settings}, text=True, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            yield
            assert process.poll() is None
            process.terminate()
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()  # else Popen's own end would wait for ever after a failure


@pytest.mark.parametrize("name", _NAMES)
def test_of_checkpoints(program: Path, folder: Path, name: str) -> None:
    if name == _WITH_MPS:
        (folder / "mps").mkdir()
        (folder / "mps" / "control").touch()
    client = {
        "GPUSIM_DIR": str(folder),
        "GPUSIM": str(BUILD / "bin" / "gpusim"),
        "LD_LIBRARY_PATH": str(_LIBRARIES),
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"),
    }
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
    command = [str(program), name]
    with server(folder, mps=name == _WITH_MPS):
        done = subprocess.run(
            command, env={**inherited, **client}, capture_output=True, text=True, timeout=90, check=False
        )
    assert done.returncode == 0, done.stderr


def test_every_test_of_checkpoints_is_known_to_pytest(program: Path) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(_LIBRARIES)}
    listed = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert listed.stdout.split() == _NAMES
