# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""XIDs (the driver's error reports): how often each device had which, and how severe each one is.

They are counted through an event set that the tick polls without waiting. Counts outlive a driver reload; the event set
does not and is created anew. NVML's events carry no time, so the last-seen time is when the tick found them.

Severity is by NVIDIA's XID catalogue (docs.nvidia.com/deploy/xid-errors), column "immediate action": APPLICATION where
it is a restart of the application, FATAL where it is a reset of the GPU or the machine, DEVICE where it only has to be
looked into. An XID that is not in the table is DEVICE: it keeps offline work from growing for a while.
"""

from __future__ import annotations

import ctypes
from collections import Counter, defaultdict
from enum import StrEnum
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
        except DeviceLostError:  # already counted; the device is unknown
            return None


def _address(handle: Any) -> int:
    """The handle's value: pointer objects to one device differ from call to call, what they hold does not."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


class XidSeverity(StrEnum):
    """What an XID harms, the least severe first."""

    APPLICATION = "application"  # the program that met it (with MPS: all clients of that server)
    DEVICE = "device"  # it goes on, but not as it should
    FATAL = "fatal"  # everything on the device is lost until it is reset


XIDS: dict[int, tuple[XidSeverity, str]] = {
    8: (XidSeverity.APPLICATION, "the GPU stopped processing a program's work"),
    11: (XidSeverity.APPLICATION, "invalid or corrupted push buffer"),
    13: (XidSeverity.APPLICATION, "graphics engine exception: an access out of bounds or an illegal instruction"),
    31: (XidSeverity.APPLICATION, "memory page fault"),
    32: (XidSeverity.APPLICATION, "invalid or corrupted push buffer"),
    43: (XidSeverity.APPLICATION, "a program's channel was reset"),
    45: (XidSeverity.APPLICATION, "a program's channels were removed, mostly after another error or a signal"),
    46: (XidSeverity.FATAL, "the GPU stopped processing"),
    48: (XidSeverity.FATAL, "double-bit ECC error"),
    62: (XidSeverity.FATAL, "the internal micro-controller halted"),
    63: (XidSeverity.DEVICE, "a memory row or page is to be retired at the next reset"),
    64: (XidSeverity.FATAL, "a memory row or page could not be retired"),
    69: (XidSeverity.APPLICATION, "graphics engine class error"),
    74: (XidSeverity.DEVICE, "NVLink error"),
    79: (XidSeverity.FATAL, "the GPU has fallen off the bus"),
    92: (XidSeverity.DEVICE, "many single-bit ECC errors"),
    94: (XidSeverity.APPLICATION, "contained memory error"),
    95: (XidSeverity.FATAL, "uncontained memory error"),
    109: (XidSeverity.FATAL, "a context switch timed out"),
    119: (XidSeverity.FATAL, "the GPU's system processor does not answer"),
    120: (XidSeverity.FATAL, "error of the GPU's system processor"),
    140: (XidSeverity.FATAL, "unrecovered ECC error"),
    143: (XidSeverity.FATAL, "the GPU could not be initialised"),
}


def severity_of(xid: int) -> XidSeverity:
    """By the table; DEVICE where the XID is not in it."""
    return XIDS[xid][0] if xid in XIDS else XidSeverity.DEVICE


def meaning_of(xid: int) -> str:
    """The XID and what it means, for reasons and logs."""
    return f"XID {xid} ({XIDS[xid][1]})" if xid in XIDS else f"XID {xid}"
