# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One command to nvidia-cuda-mps-control, in bounded time, with bounded output, confined to the daemon's directory.

A control daemon that hangs keeps its command program waiting for ever, so the program is killed, and only the program.
It follows the protocol of the daemon that runs, whatever its own version is.

The daemon's directory may be a container's, and the program opens as root what lies in it: root in that container may
put links there to any file of the node. So the directory is found as the daemon finds it and handed over as a
descriptor, and the program runs under Landlock (Linux 5.13, landlock(7)) in a thread of its own, as the confinement of
a thread cannot be undone: what a link leads to outside of the directory can be neither written, nor made, nor removed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import selectors
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from agent.core.errors import GoneError, SetupError
from agent.core.text import printable
from agent.node import container_files
from agent.node.procfs import Procfs
from enforce.actuators.mps.model import Daemon, MpsError, MpsTimeoutError

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
    """This thread and the programs it starts can change files only below `directory` from now on. MpsError."""
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


TIMEOUT_SECONDS = 5.0
MAX_OUTPUT_BYTES = 1 << 17  # 48 clients on each of 16 devices take 80 KB
_REAP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class CommandAnswer:
    """What a command printed, and whether it succeeded."""

    succeeded: bool
    text: str


@dataclass(frozen=True, slots=True)
class MpsChannel:
    """Commands to one daemon."""

    daemon: Daemon
    timeout_seconds: float = TIMEOUT_SECONDS
    proc: Procfs = field(default_factory=Procfs)

    def ask(self, arguments: Sequence[str] = (), given: str = "") -> CommandAnswer:
        """Runs the program. MpsError when it cannot be run, does not end in time or prints too much."""
        try:
            with ThreadPoolExecutor(1, "mps-command") as thread:  # one that ends: its confinement cannot be undone
                return thread.submit(self._ask, arguments, given).result()
        except RuntimeError as error:  # no thread can be made: too many, or this program is ending
            raise MpsError(f"MPS is left alone: {error}") from error

    def _ask(self, arguments: Sequence[str], given: str) -> CommandAnswer:
        with self._directory() as directory:
            confine(directory)
            process = self._start(arguments, directory)
            try:
                text = self._communicate(process, given.encode())
                return CommandAnswer(process.returncode == 0, text)
            finally:
                _end(process)

    @contextmanager
    def _directory(self) -> Iterator[int]:
        """The daemon's, as it finds it."""
        daemon, where = self.daemon, printable(self.daemon.pipe_directory, 160)
        try:
            with self.proc.root_of(daemon.process) as root:
                found = container_files.find(root, daemon.pipe_directory, os.O_DIRECTORY)
        except GoneError as error:
            raise MpsError(f"Cannot find MPS control daemon process {daemon.process.tgid}: {error}") from error
        except SetupError as error:
            raise MpsError(f"MPS is left alone: {error}") from error
        except OSError as error:
            raise MpsError(f"{where} of the MPS control daemon {daemon.process.tgid}: {error.strerror}") from error
        try:
            yield found
        finally:
            os.close(found)

    def _start(self, arguments: Sequence[str], directory: int) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                [self.daemon.program, *arguments],
                env=_environment(f"/proc/self/fd/{directory}"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(directory,),
            )
        except OSError as error:
            raise MpsError(f"{self.daemon.program} cannot be run ({error.strerror}): MPS is left alone") from error

    def _communicate(self, process: subprocess.Popen[bytes], given: bytes) -> str:
        ends = time.monotonic() + self.timeout_seconds
        assert process.stdin
        assert process.stdout
        with suppress(OSError):  # it may have ended without reading: its output says why
            process.stdin.write(given)  # far less than a pipe holds
            process.stdin.close()
        output = self._read(process.stdout.fileno(), ends)
        try:
            process.wait(max(0.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise self._timed_out() from error
        return output.decode("utf-8", "replace")

    def _read(self, descriptor: int, ends: float) -> bytes:
        output = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while True:
                left = ends - time.monotonic()
                if left <= 0:
                    raise self._timed_out()
                if not selector.select(left):
                    continue
                chunk = os.read(descriptor, 1 << 16)
                if not chunk:
                    return bytes(output)
                output += chunk
                if len(output) > MAX_OUTPUT_BYTES:
                    raise MpsError(f"{self.daemon.program} prints without end: MPS is left alone")

    def _timed_out(self) -> MpsTimeoutError:
        where, seconds = printable(self.daemon.pipe_directory, 160), self.timeout_seconds
        return MpsTimeoutError(f"the MPS control daemon at {where} did not answer in {seconds:g} s: restart it")


def _environment(pipe_directory: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_MPS_PROTOCOL_VERSION"}
    return {**kept, "CUDA_MPS_PIPE_DIRECTORY": pipe_directory, "LC_ALL": "C"}


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    for stream in (process.stdin, process.stdout):
        if stream:
            with suppress(OSError):
                stream.close()
    with suppress(subprocess.TimeoutExpired):  # in the kernel, for a disk perhaps: reaped when the next one is made
        process.wait(_REAP_SECONDS)
