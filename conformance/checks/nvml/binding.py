# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""NVML through its Python binding, on the library that this run found, and what it says when it refuses."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from conformance.host import Host, Unavailable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Gpu:
    """NVML's first device."""

    api: Any  # pynvml
    handle: Any
    sm_count: int
    memory_total_bytes: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A call that NVML did not answer; `why` is NVML's error, and `code` its number, where it was NVML."""

    why: str
    code: int | None = None


@contextmanager
def first_gpu(host: Host) -> Iterator[Gpu]:
    """NVML, started. Unavailable where there is no library, no binding, no GPU, or a GPU in MIG mode."""
    api = _binding(host)
    try:
        api.nvmlInit()
    except api.NVMLError as error:
        raise Unavailable(f"NVML does not start: {error}") from error
    try:
        yield _first(api)
    finally:
        api.nvmlShutdown()


def asked(api: Any, call: Callable[[], T]) -> T | Refused:
    """What the call returns, or NVML's error. A binding that lacks the function refuses too."""
    try:
        return call()
    except api.NVMLError as error:
        return Refused(str(error), int(error.value))
    except AttributeError as error:
        return Refused(f"nvidia-ml-py is too old for it: {error}")


def _binding(host: Host) -> Any:
    if host.libnvml is None:
        raise Unavailable("no libnvidia-ml.so.1 found: is the driver installed?")
    try:
        # By its path: the binding asks for the soname only, which is then the one of the file that is loaded.
        ctypes.CDLL(str(host.libnvml), mode=ctypes.RTLD_GLOBAL)
        return importlib.import_module("pynvml")
    except OSError as error:
        raise Unavailable(f"{host.libnvml} cannot be loaded: {error}") from error
    except ImportError as error:
        raise Unavailable(f"the Python package nvidia-ml-py is missing: {error}") from error


def _first(api: Any) -> Gpu:
    try:
        if not api.nvmlDeviceGetCount():
            raise Unavailable("NVML knows no GPU")
        handle = api.nvmlDeviceGetHandleByIndex(0)
        total = int(api.nvmlDeviceGetMemoryInfo(handle).total)
    except api.NVMLError as error:
        raise Unavailable(f"NVML gives nothing of the first GPU: {error}") from error
    mode = asked(api, lambda: api.nvmlDeviceGetMigMode(handle))
    if not isinstance(mode, Refused) and mode[0]:
        raise Unavailable("the first GPU is in MIG mode, in which NVML has no utilisation by process")
    return Gpu(api, handle, _sm_count(api, handle), total)


def _sm_count(api: Any, handle: Any) -> int:
    from agent.nvml.device import CORES_PER_SM

    try:
        cores = int(api.nvmlDeviceGetNumGpuCores(handle))
        capability = tuple(api.nvmlDeviceGetCudaComputeCapability(handle))
    except api.NVMLError as error:
        raise Unavailable(f"NVML does not say how many SMs the GPU has: {error}") from error
    return cores // CORES_PER_SM.get(capability, 128)
