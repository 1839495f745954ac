# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Waiting for what NVML shows only after a while: by the agent's client, and by the binding itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pynvml

from agent.core.model import DeviceReading
from agent.nvml.client import Nvml
from tools.harness.wait import until

T = TypeVar("T")


def readings(nvml: Nvml) -> list[DeviceReading]:
    """One of each device."""
    return [nvml.read(device) for device in nvml.devices()]


def read_until(nvml: Nvml, condition: Callable[[list[DeviceReading]], bool]) -> list[DeviceReading]:
    """The first readings that meet the condition."""
    latest: list[DeviceReading] = []

    def met() -> bool:
        latest[:] = readings(nvml)
        return condition(latest)

    until(met, lambda: f"other readings than {latest}; errors: {nvml.errors}, {nvml.problem}", step_seconds=0.02)
    return latest


def answered(call: Callable[[], T]) -> T:
    """The first true result; NVML reports "not found" until it has a sample."""

    def result() -> T | None:
        try:
            return call()
        except pynvml.NVMLError_NotFound:
            return None

    return until(result, "a result of NVML", step_seconds=0.05)
