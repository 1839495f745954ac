# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""bpf/stacks.h in ctypes: what the stacks object's maps hold."""

from __future__ import annotations

import ctypes as c

STACK_FRAMES = 127
TALLIES = ("seen", "sampled", "collision", "no_stack", "full", "unreadable")
LOSSES = TALLIES[2:]

U32, U64 = c.c_uint32, c.c_uint64
Addresses = c.c_uint64 * STACK_FRAMES


class StackKey(c.Structure):
    """Who called, from where."""

    _fields_ = [("tgid", U32), ("stack", c.c_int32), ("caller", U64)]


class Count(c.Structure):
    """How often."""

    _fields_ = [("value", U64)]


class LiveKey(c.Structure):
    """An allocation by its pointer."""

    _fields_ = [("pointer", U64), ("tgid", U32), ("_pad", U32)]


class Live(c.Structure):
    """Where it was made, and how large it is."""

    _fields_ = [("stack", StackKey), ("bytes", U64)]
