# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Files of containers: resolved as the process resolves them, and opened only once their type is known.

A path in a container may be anything that its root user can make: a link to a file of the node, a FIFO without a
writer, a device that acts when it is opened, a file of /proc whose reading empties a log.
Invariants: no link and no `..` leads out of the given directory (openat2, RESOLVE_IN_ROOT), nor into another process by
/proc (RESOLVE_NO_MAGICLINKS); whatever is there is looked at before it is opened (O_PATH); only regular files of file
systems that hold files are opened, for reading, and no open waits (O_NONBLOCK).

Mounts are crossed (no RESOLVE_NO_XDEV): a container's root consists of them, and the driver's libraries are bind
mounts. A user who may mount there without being root of the node can only bind what it sees itself, or mount file
systems with its own content; the kernel denies us those that a program serves (FUSE), as we are outside its namespace.

All functions raise OSError; GoneError for what is there and is not to be opened; SetupError where openat2 is refused.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from typing import Final

from agent.core.errors import GoneError, SetupError

_OPENAT2 = 437  # the same number on every architecture; Linux 5.6
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_IN_ROOT = 0x02, 0x04, 0x10
_MOST_TRIES = 8  # openat2(2): EAGAIN while a component is renamed or mounted over
_REFUSED = (errno.ENOSYS, errno.EPERM)
_STATFS_BYTES = 256  # struct statfs is 120 on both architectures; f_type is its first word

# <linux/magic.h>. Their files are regular by name, but reading one may do something, wait, or never end.
_NOT_FILES: Final = {
    0x9FA0: "proc",
    0x62656572: "sysfs",
    0x64626720: "debugfs",
    0x74726163: "tracefs",
    0x73636673: "securityfs",
    0x62656570: "configfs",
    0x27E0EB: "cgroup",
    0x63677270: "cgroup2",
    0xCAFE4A11: "bpf",
    0x6165676C: "pstore",
    0xDE5E81E4: "efivarfs",
    0x42494E4D: "binfmt_misc",
    0xF97CFF8C: "selinuxfs",
}


class _OpenHow(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


_LIBC = ctypes.CDLL(None, use_errno=True)
_HOW_BYTES = ctypes.c_size_t(ctypes.sizeof(_OpenHow))


def open_file(root: int, path: str) -> int:
    """A descriptor of the regular file that `path` is below the directory `root`, for reading; the caller closes it."""
    found = find(root, path)
    try:
        return _reopened(found, path)
    finally:
        os.close(found)


def open_link(link: str, path: str) -> int:
    """The same for a link of /proc that is the file itself, as in /proc/PID/map_files; messages call it `path`."""
    found = os.open(link, os.O_PATH | os.O_CLOEXEC)
    try:
        return _reopened(found, path)
    finally:
        os.close(found)


def look(root: int, path: str, *, links: bool = True) -> os.stat_result:
    """What `path` is below `root`; nothing is opened. Without `links` a symbolic link on the way is ELOOP."""
    found = find(root, path, links=links)
    try:
        return os.fstat(found)
    finally:
        os.close(found)


def list_folder(root: int, path: str, most: int) -> list[str]:
    """The names in a directory below `root`. GoneError where there are more than `most`."""
    folder = _find(root, path, os.O_RDONLY | os.O_DIRECTORY)  # what is none is not opened: ENOTDIR comes before
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry, _ in zip(entries, range(most + 1), strict=False)]
    finally:
        os.close(folder)
    if len(names) > most:
        raise GoneError(f"{path} has more than {most} entries")
    return names


def find(root: int, path: str, flags: int = 0, *, links: bool = True) -> int:
    """An O_PATH descriptor of anything below `root`, which is not opened; the caller closes it."""
    return _find(root, path, os.O_PATH | flags, 0 if links else _RESOLVE_NO_SYMLINKS)


def _find(root: int, path: str, flags: int, resolve: int = 0) -> int:
    how = _OpenHow(flags | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS | resolve)
    for _ in range(_MOST_TRIES):
        found, code = _openat2(root, os.fsencode(path), how)
        if found >= 0:
            return found
        if code != errno.EAGAIN:
            break
    if code in _REFUSED and not works():
        raise SetupError(
            f"openat2 is refused here ({os.strerror(code)}), so no file of a container is opened: allow openat2(2) in "
            "the seccomp profile of the agent (Linux 5.6 or later has it)"
        )
    raise OSError(code, os.strerror(code), path)


def works() -> bool:
    """Whether this kernel has openat2 and no seccomp filter refuses it."""
    found, _ = _openat2(-100, b"/", _OpenHow(os.O_PATH | os.O_CLOEXEC, 0, 0))  # -100: AT_FDCWD
    if found >= 0:
        os.close(found)
    return found >= 0


def _openat2(folder: int, path: bytes, how: _OpenHow) -> tuple[int, int]:
    """The descriptor, or -1 and errno."""
    if b"\0" in path:
        return -1, errno.ENOENT
    found = _LIBC.syscall(ctypes.c_long(_OPENAT2), folder, path, ctypes.byref(how), _HOW_BYTES)
    return int(found), ctypes.get_errno()


def _reopened(found: int, path: str) -> int:
    """Opens what `find` found: that very file, whatever has its name by now."""
    kind = stat.S_IFMT(os.fstat(found).st_mode)
    if kind != stat.S_IFREG:
        raise GoneError(f"{path} is not a regular file but {_KINDS.get(kind, 'something else')}")
    if (system := _NOT_FILES.get(_file_system(found))) is not None:
        raise GoneError(f"{path} is on a file system that holds no files of its own ({system})")
    return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)


def _file_system(descriptor: int) -> int:
    facts = ctypes.create_string_buffer(_STATFS_BYTES)
    if _LIBC.fstatfs(descriptor, facts) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return ctypes.c_ulong.from_buffer(facts).value & 0xFFFFFFFF


_KINDS: Final = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}
