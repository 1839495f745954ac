# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A thread that writes nowhere but in one directory, and whatever programs it starts.

nvidia-cuda-mps-control opens what lies in a daemon's directory, as root. Whoever is root in a container that has that
directory may put links there, to any file of the node. So the program runs under Landlock (Linux 5.13, landlock(7)):
what a link leads to outside of the directory can be neither written nor made nor removed.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from enforce.mps.model import MpsError

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same numbers on every architecture
_VERSION_FLAG, _PATH_BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38
# <linux/landlock.h>: write, remove (directory, file), make (device, directory, file, socket, FIFO, device, link)
_WRITE, _REMOVE, _MAKE_FILE, _MAKE_SOCKET, _MAKE_FIFO, _TRUNCATE = 1 << 1, 1 << 5, 1 << 8, 1 << 9, 1 << 10, 1 << 14
_CHANGES: Final = _WRITE | sum(1 << bit for bit in range(4, 13))
_INSIDE: Final = _WRITE | _REMOVE | _MAKE_FILE | _MAKE_SOCKET | _MAKE_FIFO
_TRUNCATE_SINCE = 3  # version of Landlock


class _Ruleset(ctypes.Structure):
    _fields_ = [("handled_access_fs", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


def confine(directory: int) -> None:
    """From now on this thread and what it starts change files only below `directory`. For good. MpsError."""
    try:
        version = _call(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG))
        truncate = _TRUNCATE if version >= _TRUNCATE_SINCE else 0
        with _ruleset(_CHANGES | truncate) as ruleset:
            _allow(ruleset, directory, _INSIDE | truncate)
            _allow_nowhere(ruleset, _WRITE | truncate)
            if ctypes.CDLL(None, use_errno=True).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
                raise OSError(ctypes.get_errno(), "no_new_privs")
            _call(_RESTRICT, ruleset, ctypes.c_uint32(0))
    except OSError as error:
        raise MpsError(_why(error)) from error


@contextmanager
def _ruleset(handled: int) -> Iterator[int]:
    rules = _Ruleset(handled)
    ruleset = _call(_CREATE, ctypes.byref(rules), ctypes.c_size_t(ctypes.sizeof(rules)), ctypes.c_uint32(0))
    try:
        yield ruleset
    finally:
        os.close(ruleset)


def _allow_nowhere(ruleset: int, access: int) -> None:
    nowhere = os.open(os.devnull, os.O_PATH | os.O_CLOEXEC)
    try:
        _allow(ruleset, nowhere, access)
    finally:
        os.close(nowhere)


def _allow(ruleset: int, place: int, access: int) -> None:
    rule = _Beneath(access, place)
    _call(_ADD, ruleset, ctypes.c_int(_PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint32(0))


def _call(number: int, *arguments: object) -> int:
    result = int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _why(error: OSError) -> str:
    cure = {
        errno.ENOSYS: "this kernel has no Landlock",
        errno.EOPNOTSUPP: "Landlock is off: boot with lsm=landlock,… (see /sys/kernel/security/lsm)",
        errno.EPERM: "the seccomp profile of the agent has to allow the landlock_* calls",
    }.get(error.errno or 0, error.strerror)
    return f"MPS is left alone, for commands to its daemon cannot be kept in the daemon's directory: {cure}"
