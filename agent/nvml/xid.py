# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Count XIDs (the driver's error reports) per device through an event set that the tick polls without waiting.

Counts outlive a driver reload; the event set does not and is made anew. NVML's events carry no time, so the last-seen
time is when the tick found it.
"""

from __future__ import annotations

import ctypes
from collections import Counter, defaultdict
from typing import Any, Final

from agent.nvml.calls import Calls, DeviceLostError

MOST_PER_POLL: Final = 64  # a storm of XIDs must not hold up the tick; the rest waits in the driver


class XidEvents:
    """XIDs by device since the start: how many, and when the last one was seen (CLOCK_REALTIME)."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._set: Any | None = None
        self._owners: dict[int, str] = {}
        self.counts: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self.last_seen_wall_ns: defaultdict[str, dict[int, int]] = defaultdict(dict)

    def register(self, owner: str, handle: Any) -> None:
        """Hear of this device's XIDs from now on."""
        if self._set is None:
            self._set = self._calls.try_call("", "nvmlEventSetCreate")
        if self._set is None:
            return
        self._owners[_address(handle)] = owner
        kind = self._calls.api.nvmlEventTypeXidCriticalError
        self._calls.try_call(owner, "nvmlDeviceRegisterEvents", handle, kind, self._set)

    def poll(self, wall_ns: int) -> None:
        """Count what has happened since the last poll. Never waits."""
        for _ in range(MOST_PER_POLL if self._set is not None else 0):
            event = self._next()
            if event is None:
                return
            if not event.eventType & self._calls.api.nvmlEventTypeXidCriticalError:
                continue
            owner = self._owners.get(_address(event.device))
            if owner is None:
                self._calls.errors["nvmlEventSetWait:unknown_device"] += 1
                continue
            self.counts[owner][int(event.eventData)] += 1
            self.last_seen_wall_ns[owner][int(event.eventData)] = wall_ns

    def close(self) -> None:
        """Give the event set back; the counts stay."""
        events, self._set = self._set, None
        self._owners.clear()
        if events is not None:
            self._calls.try_call("", "nvmlEventSetFree", events)

    def _next(self) -> Any | None:
        try:
            return self._calls.try_call("", "nvmlEventSetWait", self._set, 0)
        except DeviceLostError:  # already counted; says nothing about which device
            return None


def _address(handle: Any) -> int:
    """The handle's value: pointer objects to one device differ from call to call, what they hold does not."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
