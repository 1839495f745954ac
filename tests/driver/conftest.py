# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""NVIDIA's own libraries and MPS daemons: the user space of real drivers, which runs without a GPU as far as cuInit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver import mps_daemons
from tools.harness.library_caller import LibraryCaller

FETCHED = Path(__file__).parents[2] / "build" / "driver"  # `make driver-binaries`
MAJORS = ("535", "550", "555")


def fetched(name: str, pattern: str) -> Path:
    """What is there of it; skips where it could not be had."""
    for found in (FETCHED / name).glob(pattern):
        return found
    missing = FETCHED / "missing"
    reason = missing.read_text().strip() if missing.exists() else "run `make driver-binaries`"
    raise pytest.skip.Exception(f"no {name}: {reason}")


def libraries(major: str) -> Path:
    """The folder with the libraries and programs of one driver."""
    return fetched(major, "usr/lib/*/nvidia/current")


@pytest.fixture(params=MAJORS)
def driver(request: pytest.FixtureRequest) -> Path:
    """The folder with the libraries and programs of one driver."""
    return libraries(str(request.param))


@pytest.fixture
def libcuda(driver: Path) -> Path:
    """Its libcuda.so.1."""
    return (driver / "libcuda.so.1").resolve()


@pytest.fixture
def caller() -> Iterator[LibraryCaller]:
    """A process that has not mapped the library yet."""
    with LibraryCaller() as started:
        yield started


@pytest.fixture
def folder() -> Iterator[Path]:
    """One for the pipes and logs of an MPS daemon, which any user can enter."""
    with tempfile.TemporaryDirectory(prefix="mps-") as made:
        path = Path(made)
        path.chmod(0o755)
        for name in ("pipes", "logs"):
            (path / name).mkdir()
            (path / name).chmod(0o777)
        yield path


@pytest.fixture(
    params=[*(("real", major) for major in MAJORS), *(("simulated", major) for major in (*MAJORS, "580"))],
    ids="-".join,
)
def control(request: pytest.FixtureRequest, folder: Path) -> Iterator[mps_daemons.Control]:
    """The MPS control of each driver, and the simulated one as each of them."""
    kind, major = request.param
    if kind == "real":
        yield mps_daemons.real(major, libraries(major), folder)
        return
    with mps_daemons.simulated(major, folder) as made:
        yield made
