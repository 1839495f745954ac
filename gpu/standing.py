# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How the machine is set: read before the first item and in the last one, so that a change is seen. Changes nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu import offspring

_CGROUPS = Path("/sys/fs/cgroup")
_DEEPEST = 6


@dataclass(frozen=True, slots=True)
class Standing:
    """Of every GPU by its UUID: setting → value, those only that this GPU has."""

    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    why_not: str = ""  # NVML says nothing
    cgroups: list[str] = field(default_factory=list)  # of ours by name
    daemons: list[int] = field(default_factory=list)  # pids of MPS


def standing() -> Standing:
    """Now."""
    settings, why_not = _all_settings()
    return Standing(settings, why_not, cgroups(), [process.pid for process in mps_daemons()])


def cgroups() -> list[str]:
    """Control groups with our name in theirs."""
    found = []
    for folder, below, _ in os.walk(_CGROUPS):
        if len(Path(folder).relative_to(_CGROUPS).parts) >= _DEEPEST:
            below.clear()
        found += [os.path.join(folder, name) for name in below if "gpuwarden" in name]
    return sorted(found)


def mps_daemons() -> list[offspring.Process]:
    """Control daemons and servers, whoever started them."""
    return offspring.named("nvidia-cuda-mps")


def _all_settings() -> tuple[dict[str, dict[str, str]], str]:
    try:
        with nvml() as api:
            handles = [api.nvmlDeviceGetHandleByIndex(index) for index in range(api.nvmlDeviceGetCount())]
            return {api.nvmlDeviceGetUUID(handle): _settings(api, handle) for handle in handles}, ""
    except Exception as error:  # noqa: BLE001  # a driver may answer in any way, and the run is to go on
        return {}, " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """The binding, ready for use. ImportError or RuntimeError in one line where it cannot be had."""
    from agent.errors import SetupError
    from agent.nvml import library

    try:
        api = library.binding()
    except SetupError as error:
        raise ImportError(str(error)) from error
    try:
        library.start(api)
    except api.NVMLError as error:
        raise RuntimeError(library.explain(api, error)) from error
    try:
        yield api
    except api.NVMLError as error:
        raise RuntimeError(f"NVML: {error}") from error
    finally:
        api.nvmlShutdown()


def _settings(api: Any, handle: Any) -> dict[str, str]:
    """Those that can be read: this GPU, or this driver, may lack some, or say what nobody can read."""
    asked: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("MIG mode", lambda: api.nvmlDeviceGetMigMode(handle)[0]),
        ("compute mode", lambda: api.nvmlDeviceGetComputeMode(handle)),
        ("persistence mode", lambda: api.nvmlDeviceGetPersistenceMode(handle)),
        ("application clock of the SMs", lambda: api.nvmlDeviceGetApplicationsClock(handle, api.NVML_CLOCK_SM)),
        ("application clock of the memory", lambda: api.nvmlDeviceGetApplicationsClock(handle, api.NVML_CLOCK_MEM)),
        ("power limit (mW)", lambda: api.nvmlDeviceGetPowerManagementLimit(handle)),
        ("accounting mode", lambda: api.nvmlDeviceGetAccountingMode(handle)),
    )
    found = {}
    for name, ask in asked:
        with contextlib.suppress(Exception):
            found[name] = str(ask())
    return found
