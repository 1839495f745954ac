# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Processes, read from /proc.

Whatever a process does while it is being read (exit, exec, be replaced under the same pid) ends in GoneError, never in
another process's data under its name: a caller who needs certainty compares `process_id` again afterwards. No read is
unbounded, and no path that a process names is followed out of its own root.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import pwd
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from agent.core.errors import GoneError, SetupError
from agent.core.model import ProcessId
from agent.core.text import printable
from agent.node import container_files, proc_parse
from agent.node.proc_parse import MappedFile, Stat

LONGEST_COMMAND = 256
_COMMAND_BYTES, _ENVIRON_BYTES, _MAPS_BYTES, _SMALL_BYTES = 4 << 10, 1 << 20, 16 << 20, 64 << 10
_GONE = {errno.ENOENT, errno.ESRCH, errno.ENOTDIR}
_NOT_NOW = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
}  # a limit of the agent or the machine, not a fact about the process
_MOST_DEVICES = 4096  # entries of a container's /dev: it may make any number
_NS_GET_USERNS = 0xB701  # <linux/nsfs.h>


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
            return proc_parse.parse_stat(self._read(tgid, "stat", _SMALL_BYTES))
        except ValueError as error:
            raise GoneError(f"process {tgid}: its stat is unreadable, as if it had just ended") from error

    def process_id(self, tgid: int) -> ProcessId:
        """The process that has this pid now."""
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

    def thread_states(self, tgid: int) -> frozenset[str]:
        """Of all threads: the first may have ended (Z) or wait for a disk (D) while the process is stopped."""
        threads, found = Procfs(f"{self.root}/{tgid}/task"), set()
        for tid in self.tids(tgid):
            with suppress(GoneError):
                found.add(threads.stat(tid).state)
        return frozenset(found)

    def tids(self, tgid: int) -> list[int]:
        """Its threads that there are; none of a process that is gone."""
        try:
            return list(Procfs(f"{self.root}/{tgid}/task").tgids())
        except FileNotFoundError:
            return []

    def command(self, tgid: int) -> str:
        """The command line, printable and bounded; "[name]" where there is none (kernel threads, zombies)."""
        line = proc_parse.parse_command(self._read(tgid, "cmdline", _COMMAND_BYTES), LONGEST_COMMAND)
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
        uid = proc_parse.parse_status_uid(self.status(tgid))
        if uid is None:
            raise GoneError(f"process {tgid} ended while its user was read")
        return user_name(uid)

    def is_of_node(self, tgid: int) -> bool:
        """Whether it is root's and sees the node's own processes and files: no container's, whatever its name.

        For an agent in the node's PID namespace. Where the node's files are not known, its processes alone decide.
        """
        if proc_parse.parse_status_uid(self.status(tgid)) != 0:
            return False
        if self._link(tgid, "ns/pid") != self._link("self", "ns/pid"):
            return False
        files = self._files_of_node()
        return files is None or self._link(tgid, "ns/mnt") == files

    def executable(self, tgid: int) -> str:
        """The path of the file that it runs, as it sees it; the file may have been removed since."""
        return proc_parse.strip_deleted(self._link(tgid, "exe"))[0]

    def environ(self, tgid: int, names: Collection[str]) -> dict[str, str]:
        """Those of the variables that the process was started with."""
        return proc_parse.parse_environ(self._read(tgid, "environ", _ENVIRON_BYTES), names)

    def cgroup(self, tgid: int) -> str:
        """The text of /proc/PID/cgroup."""
        return self._read(tgid, "cgroup", _SMALL_BYTES)

    def mounts(self, tgid: int) -> str:
        """The text of /proc/PID/mountinfo."""
        return self._read(tgid, "mountinfo", _MAPS_BYTES)

    def listens_at(self, tgid: int, path: str) -> bool:
        """Whether a UNIX socket that was bound to this path takes connections, in the process's network namespace."""
        return path in proc_parse.parse_listening_unix(self._read(tgid, "net/unix", _MAPS_BYTES))

    def maps(self, tgid: int) -> str:
        """The text of /proc/PID/maps."""
        return self._read(tgid, "maps", _MAPS_BYTES)

    def mapped(self, tgid: int, wanted: Callable[[str], bool]) -> tuple[MappedFile, ...]:
        """The mapped files whose base name is wanted."""
        try:
            return tuple(proc_parse.parse_maps(self._read(tgid, "maps", _MAPS_BYTES), wanted))
        except ValueError as error:
            raise GoneError(f"process {tgid} ended while its maps were read") from error

    def mapped_code(self, tgid: int) -> tuple[MappedFile, ...]:
        """The mapped files from which the process may run code, whatever they are called, deleted ones too."""
        try:
            return tuple(proc_parse.parse_maps(self._read(tgid, "maps", _MAPS_BYTES), lambda _: True, code=True))
        except ValueError as error:
            raise GoneError(f"process {tgid} ended while its maps were read") from error

    @contextmanager
    def root_of(self, process: ProcessId) -> Iterator[int]:
        """A descriptor of its root directory, for agent.node.container_files. GoneError when the process has ended."""
        try:
            root = os.open(f"{self.root}/{process.tgid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _translated(error, f"root of process {process.tgid}") from error
        try:
            self.require(process)  # after it was opened: no other process can have had the pid before
            yield root
        finally:
            os.close(root)

    def open_inside(self, process: ProcessId, path: str) -> int:
        """A descriptor of the regular file that `path` is to that process, read-only; the caller closes it.

        Links resolve as they do for the process, so none leads out of its root. GoneError when there is no such file.
        """
        with self.root_of(process) as root:
            try:
                return container_files.open_file(root, path)
            except OSError as error:
                raise _translated(error, f"{path} of process {process.tgid}") from error

    def look_inside(self, process: ProcessId, path: str) -> os.stat_result:
        """What `path` is to that process; nothing is opened. GoneError when there is nothing."""
        with self.root_of(process) as root:
            try:
                return container_files.look(root, path)
            except OSError as error:
                raise _translated(error, f"{path} of process {process.tgid}") from error

    def gpu_minors(self, process: ProcessId) -> frozenset[int] | None:
        """N of each /dev/nvidiaN that the process sees; None where there is none at all: unknown."""
        try:
            with self.root_of(process) as root:
                names = container_files.list_folder(root, "/dev", _MOST_DEVICES)
        except (OSError, GoneError, SetupError):
            return None
        return frozenset(int(name[6:]) for name in names if name.startswith("nvidia") and name[6:].isdecimal()) or None

    def open_mapped(self, process: ProcessId, file: MappedFile) -> int:
        """A descriptor of a file that the process has mapped and that was deleted since; the caller closes it."""
        link = f"{self.root}/{process.tgid}/map_files/{file.span}"
        try:
            if os.readlink(link) != file.path + proc_parse.DELETED:
                raise GoneError(f"process {process.tgid} does not map {file.path} any more")
        except OSError as error:
            raise _translated(error, f"mapped files of process {process.tgid}") from error
        return self.open_span(process, file)

    def open_span(self, process: ProcessId, file: MappedFile) -> int:
        """A descriptor of the regular file that the process has mapped there now; the caller closes it.

        No path is followed: it may be hidden by a mount, have characters that maps does not tell apart, or be none.
        """
        link = f"{self.root}/{process.tgid}/map_files/{file.span}"
        try:
            opened = container_files.open_link(link, file.path)
        except OSError as error:
            raise _translated(error, f"mapped files of process {process.tgid}") from error
        try:
            self.require(process)
        except BaseException:
            os.close(opened)
            raise
        return opened

    def mounts_by_itself(self, process: ProcessId) -> bool:
        """Whether its mounts may have been made without being root of the node: in another user namespace."""
        try:
            space = os.open(f"{self.root}/{process.tgid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
            try:
                owner = fcntl.ioctl(space, _NS_GET_USERNS)
            finally:
                os.close(space)
            try:
                return not os.path.samestat(os.fstat(owner), os.stat(f"{self.root}/self/ns/user"))
            finally:
                os.close(owner)
        except OSError:
            return True

    def require(self, process: ProcessId) -> None:
        """GoneError when the process has ended, whichever has its pid now."""
        if self.process_id(process.tgid) != process:
            raise GoneError(f"process {process.tgid} has ended, and another one has its pid")

    def _files_of_node(self) -> str | None:
        for tgid in (1, 2):  # PID 1 may not be inspected everywhere; 2 is the first kernel thread
            with suppress(GoneError, SetupError):
                return self._link(tgid, "ns/mnt")
        return None

    def _link(self, tgid: int | str, name: str) -> str:
        try:
            return os.readlink(f"{self.root}/{tgid}/{name}")
        except OSError as error:
            raise _translated(error, f"{name} of process {tgid}") from error

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


def _translated(error: OSError, what: str) -> GoneError | SetupError:
    if error.errno in (errno.EACCES, errno.EPERM):
        return SetupError(f"not allowed to read {what}: run as root")
    if error.errno in _NOT_NOW:
        return SetupError(f"{what} cannot be read now: {error.strerror}; raise the limit of open files, or free memory")
    reason = "no longer there" if error.errno in _GONE else error.strerror
    return GoneError(f"{what}: {reason}")


@functools.lru_cache(maxsize=1024)
def user_name(uid: int) -> str:
    """The user's name; the number where this machine has no name for it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def this_boot() -> str:
    """The kernel's id of this boot; "" where it has none."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read(64).strip()
    return ""
