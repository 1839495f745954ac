# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m agent.stacks`: the symbol reader, bcc in a confined process. For agent/stacks/symbolizer.py only.

Requests on stdin, a line each: "TGID ADDRESS", the address in hexadecimal, is answered with a name or null in JSON;
"renew" is not answered. The first line of output is null when it is ready, else the error.

It parses hostile files in C, so it may read files, those of other processes included, and do nothing else. It runs as
user nobody, has only the two capabilities that reading /proc/PID/root takes and cannot regain others, and a seccomp
filter refuses the calls that would turn these into more (ptrace(2), writing /proc/PID/mem), those that start programs,
and the network. Sources: capabilities(7), seccomp(2).
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import os
import platform
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any, Final

from agent.core.errors import SetupError

_NOBODY: Final = 65534
_DAC_READ_SEARCH, _SYS_PTRACE = 2, 19

_LIMITS: Final = (
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_DATA, 4 << 30),  # a C++ program of 1 GiB takes some hundred MiB
)

_SET_PARENT_DEATH_SIGNAL, _SET_KEEPCAPS, _SET_SECCOMP, _SET_NO_NEW_PRIVILEGES = 1, 8, 22, 38  # prctl(2)
_CAPABILITY_VERSION = 0x20080522
_FILTER_MODE = 2

# classic BPF, <linux/filter.h>; struct seccomp_data: number, architecture, instruction pointer (8), arguments (8 each)
_LOAD, _IS, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_SIGNALLING = (8, 10, 15)  # fcntl(2): F_SETOWN, F_SETSIG, F_SETOWN_EX: the receiver and number of a signal
_ITSELF = 0  # prlimit(2)
_OTHER_NUMBERS = 0x40000000  # x32, the same calls under other numbers
_EVERYWHERE = (424, 425, 428, 429, 430, 431, 432, 434, 435, 437, 438, 440, 442)  # numbers from 424 on are the same

_ARCHITECTURES: Final = {
    # audit's number; open(2), where there is one; openat(2); fcntl(2); prlimit64(2); what is refused:
    # ptrace, process_vm_{readv,writev}, kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, execve, execveat,
    # socket, connect, bind, bpf, perf_event_open, mount, umount2, setns, unshare, clone, {init,finit,delete}_module,
    # kexec_load, add_key, request_key, keyctl, chroot, pivot_root, userfaultfd, open_by_handle_at; creat, fork, vfork;
    # and of all: pidfd_send_signal, io_uring_setup, open_tree … fsmount, pidfd_open, clone3, openat2, pidfd_getfd,
    # process_madvise, mount_setattr
    "x86_64": (
        0xC000003E,
        2,
        257,
        72,
        302,
        (
            *(101, 310, 311, 62, 200, 234, 129, 297, 59, 322, 41, 42, 49, 321, 298, 165, 166, 308, 272, 56),
            *(175, 313, 176, 246, 248, 249, 250, 161, 155, 323, 304, 85, 57, 58),
        ),
    ),
    "aarch64": (
        0xC00000B7,
        None,
        56,
        25,
        261,
        (
            *(117, 270, 271, 129, 130, 131, 138, 240, 221, 281, 198, 203, 200, 280, 241, 40, 39, 268, 97, 220),
            *(105, 273, 106, 104, 217, 218, 219, 51, 41, 282, 265),
        ),
    ),
}


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("value", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction))]


class _CapabilityHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _CapabilityData(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


def confine() -> None:
    """Confines this process, irreversibly. SetupError where the kernel refuses that."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        for limit, most in _LIMITS:
            resource.setrlimit(limit, (most, most))
        _check(libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _check(libc.prctl(_SET_KEEPCAPS, 1, 0, 0, 0))
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        kept = 1 << _DAC_READ_SEARCH | 1 << _SYS_PTRACE
        data = (_CapabilityData * 2)(_CapabilityData(kept, kept, 0), _CapabilityData(0, 0, 0))
        _check(libc.capset(ctypes.byref(_CapabilityHeader(_CAPABILITY_VERSION, 0)), data))
        _check(libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))
        code = [_Instruction(*one) for one in _filter(platform.machine())]
        program = _Program(len(code), (_Instruction * len(code))(*code))
        _check(libc.prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program), 0, 0))
    except (OSError, ValueError) as error:  # ValueError: a limit that may not be raised
        raise SetupError(f"the symbol reader cannot be confined ({error}): use --no-symbols") from error


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _filter(machine: str) -> Sequence[tuple[int, int, int, int]]:
    """The seccomp filter. Each test is followed by its verdict, so that jumps are short."""
    if machine not in _ARCHITECTURES:
        raise SetupError(f"the symbol reader cannot be confined on {machine}: use --no-symbols")
    architecture, plain_open, open_at, fcntl, limits, refused = _ARCHITECTURES[machine]
    code = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_IS, 1, 0, architecture), (_RETURN, 0, 0, _KILL)]
    code += [(_LOAD, 0, 0, _NUMBER_AT), (_AT_LEAST, 0, 1, _OTHER_NUMBERS), (_RETURN, 0, 0, _REFUSE)]
    for number in (*refused, *_EVERYWHERE):
        code += [(_IS, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    for opening, flags in ((plain_open, 1), (open_at, 2)):
        if opening is not None:
            code += [(_IS, 0, 4, opening), (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * flags), (_ANY_BIT, 0, 1, _WRITING)]
            code += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    for command in _SIGNALLING:
        code += [(_IS, 0, 4, fcntl), (_LOAD, 0, 0, _ARGUMENTS_AT + 8), (_IS, 0, 1, command)]
        code += [(_RETURN, 0, 0, _REFUSE), (_LOAD, 0, 0, _NUMBER_AT)]
    code += [(_IS, 0, 3, limits), (_LOAD, 0, 0, _ARGUMENTS_AT), (_IS, 1, 0, _ITSELF), (_RETURN, 0, 0, _REFUSE)]
    return [*code, (_RETURN, 0, 0, _ALLOW)]


_SYSTEM_PACKAGES = "/usr/lib/python3/dist-packages"
_LONGEST_NAME = 4096
_INSTALL = (
    "names of functions need bcc: install it (Debian: apt-get install python3-bpfcc), or use --no-symbols ({why})"
)


class Caches:
    """bcc's symbol caches, one per process."""

    def __init__(self, bcc: Any) -> None:
        self._bcc = bcc
        self._caches: dict[int, Any] = {}
        self._fresh: set[int] = set()

    def name(self, tgid: int, address: int) -> str | None:
        """The function's demangled name."""
        found, module = self._resolve(tgid, address)
        if module is None and tgid not in self._fresh:  # the module may have been loaded since
            self._caches.pop(tgid, None)
            found, _ = self._resolve(tgid, address)
        return found

    def renew(self) -> None:
        """Lets each process be read again, once, for modules loaded meanwhile."""
        self._fresh.clear()

    def _resolve(self, tgid: int, address: int) -> tuple[str | None, object]:
        if tgid not in self._caches:
            self._caches[tgid] = self._bcc.SymbolCache(tgid)
            self._fresh.add(tgid)
        name, _, module = self._caches[tgid].resolve(address, True)
        text = name[:_LONGEST_NAME].decode(errors="backslashreplace") if isinstance(name, bytes) else name
        return text or None, module


def main() -> int:
    """Answers requests until the end of stdin."""
    try:
        sys.path.append(_SYSTEM_PACKAGES)  # the system's bcc, outside of the virtual environment
        caches = Caches(importlib.import_module("bcc"))
        confine()
    except (ImportError, OSError, AttributeError, SetupError) as error:
        _answer(str(error) if isinstance(error, SetupError) else _INSTALL.format(why=error))
        return SetupError.exit_code
    _answer(None)
    for line in sys.stdin:
        if line == "renew\n":
            caches.renew()
        else:
            tgid, _, address = line.partition(" ")
            _answer(caches.name(int(tgid), int(address, 16)))
    return 0


def _answer(value: str | None) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    sys.exit(main())
