# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whether return probes are attached at all, and what is lost without them.

On x86-64 from Linux 6.11 on, a function with a return probe returns through a system call (uretprobe, 335). A seccomp
filter that does not know it ended the process, until the kernel let it pass all filters (6.14). Versions say too
little, as distributions backport either, so it is tried: a process of our own enters seccomp and calls a probed
function, which begins with a nop of five bytes: from Linux 6.18 on its probe becomes a system call, too (uprobe, 336).
Invariant: no process ends or fails because it is watched. One probe serves every process that maps a file, and a
process may enter seccomp after that, so there is no choosing by process: they are attached everywhere or nowhere.
"""

from __future__ import annotations

import errno
import os
import platform
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import cache
from typing import Final

from agent.core.errors import WardenError
from agent.node import preflight

LOST: Final = (
    "launches are counted, and memory is what NVML reports; not known are memory by kind, age and peak, PCIe bytes of "
    "containers, waits, names of kernels, what a graph holds, and which device a process means that uses several; so "
    "the signals gpu_wait and uprobe have no latency, deny and hold do nothing, stacks of allocations are refused"
)
_UPGRADE: Final = "upgrade to Linux 6.14 or later, or to a kernel of your distribution that has its fix"
_SECONDS: Final = 10.0  # for a program of a few dozen instructions
_MFD_EXEC: Final = 0x10  # it may be executed where sysctl vm.memfd_noexec is 1. Source: linux/memfd.h
_NUMBER: Final = 1  # of the watch and of the target


class ReturnProbes(StrEnum):
    """The values of --return-probes."""

    AUTO = "auto"
    OFF = "off"


def no_returns(why: str | None) -> str | None:
    """Why something that needs a return cannot work; None: it can."""
    return None if why is None else f"return probes are off: {why}"


def why_off(choice: ReturnProbes) -> str | None:
    """Why no return probe may be attached; None: they may. May start processes, the first time."""
    return "--return-probes off" if choice is ReturnProbes.OFF else danger()


@cache
def danger() -> str | None:
    """Why a process under seccomp does not survive every probe on this kernel; None: it does. Tried once."""
    if platform.machine() != "x86_64":
        return None  # a return probe is a breakpoint there
    try:
        return danger_of(*try_out())
    except (WardenError, OSError, subprocess.TimeoutExpired) as error:
        return f"whether processes under seccomp survive them could not be tried: {error}"


def danger_of(statuses: tuple[int, ...], returns: int) -> str | None:
    """What follows from a trial: the exit statuses of the processes, and how many returns were seen.

    Strict mode is refused to what is under a filter already, as the agent is under systemd's and a runtime's. Then the
    filter's answer stands for both: the kernel's exception for these calls is one for both (cf6cb56ef244).
    """
    judged = statuses[1:] if statuses[0] == _STRICT_REFUSED else statuses  # it went on without, and was seen
    killed = [status for status in judged if status < 0]
    if killed:
        names = ", ".join(signal.Signals(-status).name for status in killed)
        return f"on this kernel a process under seccomp ends at the return of a probed function ({names}); {_UPGRADE}"
    if any(judged) or returns != CALLS * len(statuses):
        return f"a trial under seccomp gave no answer: exit statuses {statuses}, {returns} returns seen"
    return None


# What is tried, as a program: it waits for a byte, enters seccomp, calls a function, and ends with 0. Machine code, as
# strict mode allows nothing else than read, write and exit. One argument: strict mode; two: a filter of its own.
_BASE: Final = 0x400000
_HEADERS_BYTES: Final = 64 + 56
_CODE: Final = bytes.fromhex(
    "488d7424f0 31ff ba01000000 31c0 0f05"  # read(0, below the stack, 1)
    "bf26000000 be01000000 31d2 4531d2 4531c0 b89d000000 0f05"  # prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    "bf16000000 8b3424 488d1522000000 b89d000000 0f05 89c3"  # status = prctl(PR_SET_SECCOMP, argc, filter)
    "e80e000000 e809000000 89df b83c000000 0f05"  # the function, twice; exit(status)
    "0f1f440000 c3"  # the function: a nop of five bytes, ret
)
FUNCTION: Final = _HEADERS_BYTES + len(_CODE) - 6  # its offset in the file
CALLS: Final = 2  # of it: the first has the kernel make a call of the nop
_STRICT_REFUSED: Final = 256 - errno.EINVAL  # the exit status, of the error that prctl gave
_ALLOW, _KILL_PROCESS = 0x7FFF0000, 0x80000000
_EXIT: Final = 60
_FILTER: Final = (  # struct sock_filter: load the number of the system call; allow exit, kill for all others
    (0x20, 0, 0, 0),
    (0x15, 0, 1, _EXIT),
    (0x06, 0, 0, _ALLOW),
    (0x06, 0, 0, _KILL_PROCESS),
)


def program() -> bytes:
    """The ELF file."""
    filter_at = _HEADERS_BYTES + len(_CODE) + 16
    code = _CODE + struct.pack("<QQ", len(_FILTER), _BASE + filter_at)
    code += b"".join(struct.pack("<HBBI", *one) for one in _FILTER)
    size = _HEADERS_BYTES + len(code)
    start = _BASE + _HEADERS_BYTES
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 2, 62, 1, start, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 4096)
    return header + segment + code


def try_out() -> tuple[tuple[int, int], int]:
    """The exit statuses under strict mode and under a filter, with a return probe; and how many returns were seen."""
    from agent.probes import abi  # both are needed only where something is tried
    from agent.probes.libbpf import load_uprobes

    number = abi.U32(_NUMBER)
    programs = ("uprobe_return", "uprobe_enter")
    with _file() as path, load_uprobes(preflight.bpf_object().with_name("uprobe.bpf.o"), programs) as bpf:
        recorded = bpf.map("recorded", abi.U32, abi.Latency)
        recorded.put(number, abi.Latency())
        for name in programs:  # the return first, as everywhere
            bpf.attach_uprobes(name, path, [(FUNCTION, _NUMBER)], at_return=name == "uprobe_return")
        wanted = bpf.map("wanted", abi.U32, abi.U32 * 2)

        def follow(tgid: int) -> None:
            wanted.put(abi.U32(tgid), (abi.U32 * 2)(_NUMBER, _NUMBER))

        statuses = _status(path, ["strict"], follow), _status(path, ["own", "filter"], follow)
        latency = recorded.get(number)
        return statuses, latency.count if latency else 0


def _status(path: str, arguments: list[str], follow: Callable[[int], None]) -> int:
    """The exit status of one process that the probes follow."""
    descriptor = int(path.rpartition("/")[2])
    with subprocess.Popen(arguments, executable=path, stdin=subprocess.PIPE, pass_fds=[descriptor]) as process:
        try:
            follow(process.pid)
            process.communicate(b"\n", timeout=_SECONDS)
        finally:
            process.kill()
    return process.returncode


def _memory_file() -> int:
    try:
        return os.memfd_create("gpuwarden-return-probes", os.MFD_CLOEXEC | _MFD_EXEC)
    except OSError:  # EINVAL before Linux 6.3, where every such file can be executed; else executing it says why not
        return os.memfd_create("gpuwarden-return-probes", os.MFD_CLOEXEC)


@contextmanager
def _file() -> Iterator[str]:
    """The path of the program, in memory: a folder may be mounted with noexec."""
    written = _memory_file()
    try:
        os.write(written, program())
        descriptor = os.open(f"/proc/self/fd/{written}", os.O_RDONLY)  # what is open for writing cannot be executed
    finally:
        os.close(written)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
