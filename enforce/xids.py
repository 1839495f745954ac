# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""XIDs (the driver's error reports) and how far each one's harm reaches: a table, and nothing else.

Source: NVIDIA's XID catalogue (docs.nvidia.com/deploy/xid-errors), column "immediate action": what it answers with a
restart of the application is APPLICATION, with a reset of the GPU or the machine FATAL, what it only wants looked into
DEVICE. What is not in the table is DEVICE: it keeps offline work from growing for a while and harms nobody.
"""

from __future__ import annotations

from enum import StrEnum


class Reach(StrEnum):
    """Whom an XID harms."""

    APPLICATION = "application"  # the program that met it (with MPS: all clients of that server)
    DEVICE = "device"  # it goes on, but not as it should
    FATAL = "fatal"  # everything on the device is lost until it is reset


XIDS: dict[int, tuple[Reach, str]] = {
    8: (Reach.APPLICATION, "the GPU stopped processing a program's work"),
    11: (Reach.APPLICATION, "invalid or corrupted push buffer"),
    13: (Reach.APPLICATION, "graphics engine exception: an access out of bounds or an illegal instruction"),
    31: (Reach.APPLICATION, "memory page fault"),
    32: (Reach.APPLICATION, "invalid or corrupted push buffer"),
    43: (Reach.APPLICATION, "a program's channel was reset"),
    45: (Reach.APPLICATION, "a program's channels were removed, mostly after another error or a signal"),
    46: (Reach.FATAL, "the GPU stopped processing"),
    48: (Reach.FATAL, "double-bit ECC error"),
    62: (Reach.FATAL, "the internal micro-controller halted"),
    63: (Reach.DEVICE, "a memory row or page is to be retired at the next reset"),
    64: (Reach.FATAL, "a memory row or page could not be retired"),
    69: (Reach.APPLICATION, "graphics engine class error"),
    74: (Reach.DEVICE, "NVLink error"),
    79: (Reach.FATAL, "the GPU has fallen off the bus"),
    92: (Reach.DEVICE, "many single-bit ECC errors"),
    94: (Reach.APPLICATION, "contained memory error"),
    95: (Reach.FATAL, "uncontained memory error"),
    109: (Reach.FATAL, "a context switch timed out"),
    119: (Reach.FATAL, "the GPU's system processor does not answer"),
    120: (Reach.FATAL, "error of the GPU's system processor"),
    140: (Reach.FATAL, "unrecovered ECC error"),
    143: (Reach.FATAL, "the GPU could not be initialised"),
}


def reach_of(xid: int) -> Reach:
    """How far its harm reaches."""
    return XIDS[xid][0] if xid in XIDS else Reach.DEVICE


def meaning_of(xid: int) -> str:
    """In words, for reasons and logs."""
    return f"XID {xid} ({XIDS[xid][1]})" if xid in XIDS else f"XID {xid}"
