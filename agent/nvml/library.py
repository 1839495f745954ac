# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Bring NVML up, or say in one line why not and what to do about it.

Owns the choice of library file. The binding only asks the dynamic linker for "libnvidia-ml.so.1"; drivers that live
elsewhere (GPU operator, GKE, WSL) are found by loading the file by path first, after which its soname resolves.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from typing import Any, Final

from agent.errors import SetupError

SONAME: Final = "libnvidia-ml.so.1"
ELSEWHERE: Final = (
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    "/run/nvidia/driver/usr/lib64",
    "/usr/local/nvidia/lib64",
    "/home/kubernetes/bin/nvidia/lib64",
    "/usr/lib/wsl/lib",
)


def binding() -> Any:
    """The module that binds NVML. SetupError when it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise SetupError("the Python package nvidia-ml-py is missing: pip install nvidia-ml-py") from error


def start(api: Any) -> None:
    """Initialise NVML, looking beside the linker's path too. Raises the binding's NVMLError."""
    try:
        api.nvmlInit()
    except api.NVMLError as error:
        if error.value != api.NVML_ERROR_LIBRARY_NOT_FOUND or not _load_from_elsewhere():
            raise
        api.nvmlInit()


def explain(api: Any, error: Any) -> str:
    """One line for an error of `start`: what is wrong and what to do."""
    value = error.value
    if value == api.NVML_ERROR_LIBRARY_NOT_FOUND:
        path = os.environ.get("LD_LIBRARY_PATH") or "unset"
        return (
            f"{SONAME} not found (looked in the linker cache, LD_LIBRARY_PATH={path}, {', '.join(ELSEWHERE)}): "
            "install the NVIDIA driver, or in a container ask for it (NVIDIA_DRIVER_CAPABILITIES=utility)"
        )
    cures = {
        api.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA kernel driver is not loaded: run 'modprobe nvidia', see dmesg",
        api.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA library and kernel driver differ in version, as after an "
        "upgrade: reload the kernel driver or reboot, then restart this program",
        api.NVML_ERROR_NO_PERMISSION: "no permission to open the NVIDIA devices: run as root",
        api.NVML_ERROR_GPU_IS_LOST: "every GPU has fallen off the bus: see dmesg for the XID, reset or reboot",
    }
    return cures.get(value, f"NVML does not start ({error}): check 'nvidia-smi' and dmesg")


def _load_from_elsewhere() -> bool:
    for folder in ELSEWHERE:
        try:
            ctypes.CDLL(f"{folder}/{SONAME}", mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return True
    return False
