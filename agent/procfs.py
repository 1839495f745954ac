# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Processes, as /proc tells them.

Whatever a process does while it is being read (exit, exec, be replaced under the same pid) ends in GoneError, never in
another process's data under its name: who needs certainty asks `process_id` again afterwards. No read is unbounded, and
no path that a process names is followed out of its own root.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import pwd
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from agent import proctext
from agent.errors import GoneError, SetupError
from agent.model import ProcessId
from agent.names import printable
from agent.proctext import MappedFile, Stat

LONGEST_COMMAND = 256
_COMMAND_BYTES, _ENVIRON_BYTES, _MAPS_BYTES, _SMALL_BYTES = 4 << 10, 1 << 20, 16 << 20, 64 << 10
_GONE = {errno.ENOENT, errno.ESRCH, errno.ENOTDIR}
_NOT_NOW = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # ours or the machine's lack; of the process it says nothing
_OPENAT2 = 437  # the same number on every architecture; Linux 5.6
_RESOLVE_NO_MAGICLINKS, _RESOLVE_IN_ROOT = 0x02, 0x10


class _OpenHow(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


@dataclass(frozen=True, slots=True)
class Procfs:
    """A /proc, or a tree of fixtures that looks like one."""

    root: str = "/proc"

    def tgids(self) -> Iterator[int]:
        """Every process there is; some may be gone before they are looked at."""
        yield from (int(name) for name in os.listdir(self.root) if name.isdecimal())

    def stat(self, tgid: int) -> Stat:
        """State and start time."""
        try:
            return proctext.parse_stat(self._read(tgid, "stat", _SMALL_BYTES))
        except ValueError as error:
            raise GoneError(f"process {tgid}: its stat is unreadable, as if it had just ended") from error

    def process_id(self, tgid: int) -> ProcessId:
        """Who has this pid now."""
        return ProcessId(tgid, self.stat(tgid).start_ticks)

    def is_alive(self, process: ProcessId) -> bool:
        """Whether that very process still runs; a zombie does not, one that cannot be read may."""
        try:
            now = self.stat(process.tgid)
        except GoneError:
            return False
        except SetupError:
            return True
        return now.start_ticks == process.start_ticks and not now.dead

    def command(self, tgid: int) -> str:
        """The command line, printable and bounded; "[name]" where there is none (kernel threads, zombies)."""
        line = proctext.parse_command(self._read(tgid, "cmdline", _COMMAND_BYTES), LONGEST_COMMAND)
        return line or f"[{printable(self.stat(tgid).comm, LONGEST_COMMAND - 2)}]"

    def arguments(self, tgid: int) -> tuple[str, ...]:
        """The command line's words as they are, the first few KiB of them; empty for kernel threads and zombies."""
        text = self._read(tgid, "cmdline", _COMMAND_BYTES).rstrip("\0")
        return tuple(text.split("\0")) if text else ()

    def status(self, tgid: int) -> str:
        """The text of /proc/PID/status."""
        return self._read(tgid, "status", _SMALL_BYTES)

    def user(self, tgid: int) -> str:
        """The name of the real user, its number where this machine has no name for it."""
        uid = proctext.parse_status_uid(self.status(tgid))
        if uid is None:
            raise GoneError(f"process {tgid} ended while its user was read")
        return user_name(uid)

    def environ(self, tgid: int, names: Collection[str]) -> dict[str, str]:
        """Those of the variables that the process was started with."""
        return proctext.parse_environ(self._read(tgid, "environ", _ENVIRON_BYTES), names)

    def cgroup(self, tgid: int) -> str:
        """The text of /proc/PID/cgroup."""
        return self._read(tgid, "cgroup", _SMALL_BYTES)

    def mounts(self, tgid: int) -> str:
        """The text of /proc/PID/mountinfo."""
        return self._read(tgid, "mountinfo", _MAPS_BYTES)

    def maps(self, tgid: int) -> str:
        """The text of /proc/PID/maps."""
        return self._read(tgid, "maps", _MAPS_BYTES)

    def mapped(self, tgid: int, wanted: Callable[[str], bool]) -> tuple[MappedFile, ...]:
        """The mapped files whose base name is wanted."""
        try:
            return tuple(proctext.parse_maps(self._read(tgid, "maps", _MAPS_BYTES), wanted))
        except ValueError as error:
            raise GoneError(f"process {tgid} ended while its maps were read") from error

    def open_inside(self, tgid: int, path: str) -> int:
        """A descriptor of the regular file that `path` is to that process, read-only; the caller closes it.

        Links resolve as they do for the process, so none leads out of its root. GoneError when there is no such file.
        """
        try:
            root = os.open(f"{self.root}/{tgid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _translated(error, f"root of process {tgid}") from error
        try:
            return _regular(_open_beneath(root, path), path)
        except OSError as error:
            raise _translated(error, f"{path} of process {tgid}") from error
        finally:
            os.close(root)

    def gpu_minors(self, tgid: int) -> frozenset[int] | None:
        """N of each /dev/nvidiaN that the process sees; None where there is none at all, so that it says nothing."""
        try:
            names = os.listdir(f"{self.root}/{tgid}/root/dev")
        except OSError:
            return None
        return frozenset(int(name[6:]) for name in names if name.startswith("nvidia") and name[6:].isdecimal()) or None

    def open_mapped(self, tgid: int, path: str) -> int:
        """A descriptor of a file that the process has mapped and that was deleted since; the caller closes it."""
        folder = f"{self.root}/{tgid}/map_files"
        try:
            for name in os.listdir(folder):
                link = os.path.join(folder, name)
                if os.readlink(link) == path + proctext.DELETED:
                    return _regular(os.open(link, os.O_RDONLY | os.O_CLOEXEC), path)
        except OSError as error:
            raise _translated(error, f"mapped files of process {tgid}") from error
        raise GoneError(f"process {tgid} does not map {path} any more")

    def _read(self, tgid: int, name: str, most_bytes: int) -> str:
        try:
            with open(f"{self.root}/{tgid}/{name}", "rb", buffering=0) as stream:
                return b"".join(_chunks(stream.read, most_bytes)).decode("utf-8", "surrogateescape")
        except OSError as error:
            raise _translated(error, f"{name} of process {tgid}") from error


def _chunks(read: Callable[[int], bytes | None], most_bytes: int) -> Iterator[bytes]:
    """procfs hands over at most a page or so per read."""
    while most_bytes > 0 and (chunk := read(min(most_bytes, 1 << 16))):
        most_bytes -= len(chunk)
        yield chunk


def _open_beneath(root: int, path: str) -> int:
    how = _OpenHow(
        os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS
    )
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t(ctypes.sizeof(how))
    descriptor = libc.syscall(ctypes.c_long(_OPENAT2), root, os.fsencode(path), ctypes.byref(how), size)
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return int(descriptor)


def _regular(descriptor: int, path: str) -> int:
    """Who opens a FIFO or a device on a container's word may hang, or do something to it."""
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise GoneError(f"{path} is not a regular file")


def _translated(error: OSError, what: str) -> GoneError | SetupError:
    if error.errno in (errno.EACCES, errno.EPERM):
        return SetupError(f"not allowed to read {what}: run as root")
    if error.errno in _NOT_NOW:
        return SetupError(f"{what} cannot be read now: {error.strerror}; raise the limit of open files, or free memory")
    reason = "no longer there" if error.errno in _GONE else error.strerror
    return GoneError(f"{what}: {reason}")


@functools.lru_cache(maxsize=1024)
def user_name(uid: int) -> str:
    """Its number where this machine has no name for it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
