# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Call NVML so that one failing reading costs that reading only.

A refused call gives None and is counted; a call that a device does not support is not made again. Two kinds of
failure concern more than the reading and are raised: the device is gone, or NVML as a whole is.
"""

from __future__ import annotations

from collections import Counter
from typing import Any


class DeviceLostError(Exception):
    """The GPU has fallen off the bus or waits for a reset. Concerns this device only."""


class NvmlDownError(Exception):
    """The driver was unloaded or NVML shut down: nothing can be read until it is started again."""


class Calls:
    """Guarded calls into one binding. `errors` counts "call:error" since the start."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self.errors: Counter[str] = Counter()
        self._unsupported: set[tuple[str, str]] = set()
        self._names = {
            getattr(api, name): name.removeprefix("NVML_ERROR_").lower()
            for name in dir(api)
            if name.startswith("NVML_ERROR_")
        }
        self._never = self._codes("NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH", "DEPRECATED")
        self._lost = self._codes("GPU_IS_LOST", "GPU_NOT_FOUND", "RESET_REQUIRED")
        self._down = self._codes("UNINITIALIZED", "DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH")
        # Answers, not errors: nothing since the last call, no event, and success with an empty list.
        self._empty = {api.NVML_SUCCESS, api.NVML_ERROR_NOT_FOUND, api.NVML_ERROR_TIMEOUT}

    def try_call(self, owner: str, name: str, *arguments: Any) -> Any | None:
        """The call's result, or None. `owner` is a device's UUID ("" for calls about none)."""
        if (owner, name) in self._unsupported:
            return None
        function = getattr(self.api, name, None)
        if function is None:
            self._mark_unsupported(owner, name, "function_not_found")
            return None
        try:
            return function(*arguments)
        except self.api.NVMLError as error:
            self.judge(owner, name, error)
            return None

    def first(self, owner: str, names: tuple[str, ...], *arguments: Any) -> Any | None:
        """The result of the first of several equivalent calls that this driver supports."""
        for name in names:
            result = self.try_call(owner, name, *arguments)
            if result is not None or (owner, name) not in self._unsupported:
                return result
        return None

    def judge(self, owner: str, name: str, error: Any) -> None:
        """Count an error, or raise what concerns more than the one reading."""
        if error.value in self._empty:
            return
        if error.value in self._never:
            self._mark_unsupported(owner, name, self._names[error.value])
            return
        self.count(name, error)
        if error.value in self._lost:
            raise DeviceLostError(name)
        if error.value in self._down:
            raise NvmlDownError(name)

    def count(self, name: str, error: Any) -> None:
        """Count an error that the caller deals with itself."""
        self.errors[f"{name}:{self._names.get(error.value, error.value)}"] += 1

    def supports(self, owner: str, name: str) -> bool:
        """False once the driver has reported the call as unsupported."""
        return (owner, name) not in self._unsupported

    def refuse(self, owner: str, name: str) -> None:
        """Never make this call again for this device, which reported it as unsupported without an error."""
        self._unsupported.add((owner, name))

    def forget(self, owner: str) -> None:
        """The device came back, or the driver was replaced: every call may be supported again."""
        self._unsupported = {key for key in self._unsupported if key[0] != owner}

    def _codes(self, *names: str) -> set[int]:
        """The codes that this binding knows: older ones lack a few."""
        return {code for code, name in self._names.items() if name.upper() in names}

    def _mark_unsupported(self, owner: str, name: str, reason: str) -> None:
        self.errors[f"{name}:{reason}"] += 1
        self._unsupported.add((owner, name))
