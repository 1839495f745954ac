# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The page of memory on which agent, guardian and backstop show each other that they run, and who has to undo what.

It is a memfd: it needs no file system and no BPF, and lives as long as one of the three. Each writes its own word,
whole at once, so there is no lock to be killed under. Times are CLOCK_MONOTONIC, which stands still while the machine
sleeps.
"""

from __future__ import annotations

import ctypes as c
import mmap
import os
from enum import Enum
from typing import Final

STILL_NS: Final = 500_000_000  # ten rounds of the guardian, five decisions of the agent


class Beats(c.Structure):
    """When each of them last ran; 0: not yet."""

    _fields_ = [
        ("agent_ns", c.c_uint64),
        ("guardian_ns", c.c_uint64),
        ("backstop_ns", c.c_uint64),
        ("released_ns", c.c_uint64),  # when the backstop last resumed what the guardian holds
    ]
    agent_ns: int
    guardian_ns: int
    backstop_ns: int
    released_ns: int

    @classmethod
    def shared(cls, fd: int) -> Beats:
        """The page behind the descriptor, live."""
        return cls.from_buffer(mmap.mmap(fd, mmap.PAGESIZE))


def new_page() -> int:
    """The descriptor of a page of zeros. OSError."""
    fd = os.memfd_create("gpuwarden-beats")
    os.ftruncate(fd, mmap.PAGESIZE)
    return fd


class Duty(Enum):
    """What nobody else undoes now."""

    NOTHING = "nothing"
    STOPS = "stops"  # the agent lives, and does what is its own
    EVERYTHING = "everything"


def duty(agent_ns: int, guardian_ns: int, now_ns: int) -> Duty:
    """The backstop's, by the last beats of the others: the guardian undoes everything while it runs."""
    if now_ns - guardian_ns <= STILL_NS:
        return Duty.NOTHING
    return Duty.STOPS if now_ns - agent_ns <= STILL_NS else Duty.EVERYTHING
