# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""NVIDIA's own libraries and MPS daemons: the user space of real drivers, which runs without a GPU as far as cuInit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.harness.library_caller import LibraryCaller

FETCHED = Path(__file__).parents[2] / "build" / "driver"  # `make driver-binaries`
MAJORS = ("535", "550", "555")


def libraries(major: str) -> Path:
    """The folder of one driver's libraries; the test is skipped where it could not be fetched."""
    missing = FETCHED / "missing"
    for found in (FETCHED / major).glob("usr/lib/*/nvidia/current"):
        return found
    reason = missing.read_text().strip() if missing.exists() else "run `make driver-binaries`"
    raise pytest.skip.Exception(f"no driver {major}: {reason}")


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
