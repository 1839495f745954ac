# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What libbpf and the kernel's verifier print: kept out of the output, and searched for the cause of a failed load.

Invariant: nothing of it reaches stdout or stderr but as debug log lines. libbpf has one print callback for the whole
process: it is set once and never freed, as objects may be opened, and closed, in any number and by several threads.
Messages are kept by thread, so that those of two loads do not mix.
"""

from __future__ import annotations

import ctypes as c
import errno
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from agent.core.errors import ProbeError, SetupError, WardenError
from agent.core.text import printable
from agent.node import preflight

_PRINT_DEBUG: Final = 2  # enum libbpf_print_level; more important ones are less
_KEPT_MESSAGES: Final = 20
_KEPT_CHARACTERS: Final = 64 << 10  # of a message; the verifier's log may have 16 MiB
_LONGEST_CAUSE: Final = 300
_BEGIN: Final = "-- BEGIN PROG LOAD LOG --"
_PROGRAM: Final = re.compile(r"prog '([^']+)'")
# After the verifier's reason; and what libbpf adds about any failure. Source: the verifier, libbpf
_STATISTICS: Final = ("processed ", "verification time ", "stack depth ", "-- END PROG LOAD LOG --")
_GENERAL: Final = re.compile(r"failed to load object|failed to load: -?\d+$|BPF program load failed: ")

_log = logging.getLogger(__name__)
_libc = c.CDLL(None)
_libc.vasprintf.argtypes = [c.POINTER(c.c_void_p), c.c_char_p, c.c_void_p]
_libc.free.argtypes = [c.c_void_p]


class _Kept(threading.local):
    def __init__(self) -> None:
        self.messages: deque[str] = deque(maxlen=_KEPT_MESSAGES)


_kept = _Kept()


def install(libbpf: Any) -> None:
    """Makes the loaded library print through this module."""
    libbpf.libbpf_set_print(_callback)


def clear() -> None:
    """Drops this thread's messages: those that follow belong to the next load."""
    _kept.messages.clear()


def load_error(code: int) -> WardenError:
    """The error for an object that did not load, by errno and this thread's messages: one line, with what to do."""
    try:
        preflight.require_this_machine()
    except SetupError as lacking:
        return SetupError(f"BPF programs did not load: {lacking}")
    reason = os.strerror(code)
    if code == errno.EPERM:
        return SetupError(
            f"the kernel refused bpf(2) ({reason}) although no capability is missing: a seccomp filter, a security "
            "module or kernel lockdown forbids it; see `dmesg`, or the container's seccomp profile"
        )
    found = cause(_kept.messages)
    if code == errno.ENOMEM:
        return ProbeError(
            f"BPF programs did not load ({reason}): {found}; raise the memory limit of the agent's cgroup"
        )
    return ProbeError(
        f"Linux {os.uname().release} did not load BPF programs ({reason}): {found}; try a newer release of GPU Warden, "
        "or report the whole log: `gpuwarden --verbose doctor`"
    )


def cause(messages: Iterable[str]) -> str:
    """The line that says why: the verifier's last one, with the program's name, else libbpf's last specific one."""
    found = "libbpf gave no reason"
    for message in messages:
        program = _PROGRAM.search(message)
        if _BEGIN in message and program is not None:
            lines = [line.strip() for line in message.partition(_BEGIN)[2].split("\n")]
            reasons = [line for line in lines if line and not line.startswith(_STATISTICS)]
            return _bounded(f"program {program[1]}: {reasons[-1] if reasons else 'the verifier gave no reason'}")
        if not _GENERAL.search(message):
            found = message.removeprefix("libbpf: ")
    return _bounded(found)


def _bounded(text: str) -> str:
    return printable(text, _LONGEST_CAUSE)


def _receive(level: int, text: bytes, arguments: int) -> int:
    """libbpf_print_fn_t. vasprintf, since the arguments can be read only once and the length is not known before."""
    if level >= _PRINT_DEBUG:
        return 0
    formatted = c.c_void_p()
    length = _libc.vasprintf(c.byref(formatted), text, arguments)
    if length < 0:
        return 0
    try:
        _keep(c.string_at(formatted, length).decode(errors="replace").strip())
    finally:
        _libc.free(formatted)
    return 0


_callback: Final = c.CFUNCTYPE(c.c_int, c.c_int, c.c_char_p, c.c_void_p)(_receive)


def _keep(message: str) -> None:
    if _log.isEnabledFor(logging.DEBUG):
        for line in message.split("\n"):
            _log.debug("%s", line)
    if len(message) > _KEPT_CHARACTERS:  # the beginning names the program, the end has the reason
        message = f"{message[:1024]}\n{message[-_KEPT_CHARACTERS:]}"
    _kept.messages.append(message)
