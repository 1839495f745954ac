# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A test's tier is the folder that it lies in: the marker is set here, so that nobody can forget it.

What fails in a tier that watches a clock runs once more and is listed as RERUN: a stall of the machine is no bug of
ours, and a failure that comes back is one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "machines that stall",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,  # what lands is judged by the same cases each time; people look for new ones
)
settings.load_profile("machines that stall")

TIERS = ("unit", "contract", "kernel", "sim", "e2e", "gpu")
_TIMED = ("contract", "kernel", "sim", "e2e")  # watch real kernels, clocks and programs on machines that stall
_ROOT = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test with its tier, and skips the tiers that only root can run."""
    for item in items:
        tier = item.path.relative_to(_ROOT).parts[0]
        if tier not in TIERS:
            raise pytest.UsageError(f"{item.path} lies in no tier; move it into one of tests/{{{','.join(TIERS)}}}/")
        item.add_marker(tier)
        if tier in _TIMED:
            item.add_marker(pytest.mark.flaky(reruns=1))
        if tier in ("kernel", "e2e") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason=f"the {tier} tier needs root"))
