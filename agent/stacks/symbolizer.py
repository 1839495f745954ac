# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Addresses → names, while the process runs: by bcc, else module and offset from /proc/PID/maps.

bcc only resolves symbols, through /proc/PID/root; it loads no program. As it parses hostile files in C++ and may hang,
grow or crash, it runs in a confined process, the symbol reader (agent/stacks/__main__.py). One that takes too long or
ends is not restarted: frames are then named by module and offset.
"""

from __future__ import annotations

import bisect
import json
import logging
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from agent.core.errors import GoneError, SetupError
from agent.core.text import printable
from agent.node.procfs import Procfs

_log = logging.getLogger(__name__)
_LONGEST_NAME = 512
UNKNOWN = "[unknown]"


class Resolver(Protocol):
    """Resolves addresses of processes to names; None where there is none."""

    def name(self, tgid: int, address: int) -> str | None: ...
    def renew(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Mapping:
    """An executable mapping of a file, from /proc/PID/maps."""

    start: int
    end: int
    offset: int
    module: str


def parse_code(text: str) -> list[Mapping]:
    """The executable mappings, in order of address."""
    found = []
    for line in text.split("\n"):
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and "x" in fields[1]:
            start, _, end = fields[0].partition("-")
            module = fields[5].rpartition("/")[2]
            found.append(Mapping(int(start, 16), int(end, 16), int(fields[2], 16), module))
    return found


class Modules:
    """Resolves to module and file offset. The mappings of a process stay known after its end."""

    def __init__(self, read_maps: Callable[[int], str]) -> None:
        self._read_maps = read_maps
        self._maps: dict[int, list[Mapping]] = {}
        self._fresh: set[int] = set()

    def name(self, tgid: int, address: int) -> str | None:
        """As in `libtorch.so+0x1f00`."""
        found = self._find(tgid, address)
        if found is None and tgid not in self._fresh:
            self._read(tgid)
            found = self._find(tgid, address)
        return f"{found.module}+{address - found.start + found.offset:#x}" if found else None

    def renew(self) -> None:
        """Lets each process be read again, once, for modules loaded meanwhile."""
        self._fresh.clear()

    def see(self, tgid: int) -> None:
        """Reads a process while it runs: later it may be gone."""
        if tgid not in self._maps:
            self._read(tgid)

    def _read(self, tgid: int) -> None:
        self._fresh.add(tgid)
        try:
            self._maps[tgid] = parse_code(self._read_maps(tgid)) or self._maps.get(tgid, [])
        except (GoneError, ValueError):
            self._maps.setdefault(tgid, [])

    def _find(self, tgid: int, address: int) -> Mapping | None:
        maps = self._maps.get(tgid, [])
        index = bisect.bisect_right(maps, address, key=lambda mapping: mapping.start) - 1
        return maps[index] if index >= 0 and address < maps[index].end else None


class Frames:
    """Names of frames, from the first resolver that has one."""

    def __init__(self, proc: Procfs, bcc: Resolver | None) -> None:
        self._proc, self._modules = proc, Modules(proc.maps)
        self._resolvers: tuple[Resolver, ...] = (bcc, self._modules) if bcc else (self._modules,)
        self._processes: dict[int, str] = {}

    def stack(self, tgid: int, addresses: list[int]) -> tuple[str, ...]:
        """The process, then its frames, outermost first. Callers are looked up one byte before their return address."""
        inner = [self._name(tgid, address - (depth > 0)) for depth, address in enumerate(addresses)]
        return (self._process(tgid), *reversed(inner))

    def see(self, tgids: Iterable[int]) -> None:
        """Keeps what is needed to name the frames of processes that end."""
        for tgid in tgids:
            self._modules.see(tgid)
            self._process(tgid)

    def renew(self) -> None:
        """To be called at each round."""
        for resolver in self._resolvers:
            resolver.renew()

    def _name(self, tgid: int, address: int) -> str:
        for resolver in self._resolvers:
            if name := resolver.name(tgid, address):
                return printable(name, _LONGEST_NAME)
        return UNKNOWN

    def _process(self, tgid: int) -> str:
        if tgid not in self._processes:
            try:
                self._processes[tgid] = f"{printable(self._proc.stat(tgid).comm, 64)} [{tgid}]"
            except GoneError:
                return f"[{tgid}]"
        return self._processes[tgid]


_PATIENCE_SECONDS = 30.0  # the symbols of the largest libraries take many seconds
_MOST_BYTES = 1 << 16  # of an answer


class Bcc:
    """The symbol reader's process. `close` ends it."""

    def __init__(self, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        """SetupError with what to do where it cannot work."""
        self._patience_seconds = patience_seconds
        self._failure: str | None = None  # why it was killed
        self._left = b""
        command = [sys.executable, "-I", "-m", "agent.stacks"]  # -I: another user may control the working directory
        pipe = subprocess.PIPE
        errors = None if _log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True)
        except OSError as error:
            raise SetupError(f"the symbol reader cannot be started ({error}): use --no-symbols") from error
        self._require_ready()

    def _require_ready(self) -> None:
        why = self._answer()  # None when it is ready, else why it cannot work
        if self._failure is not None:
            why = f"the symbol reader did not start ({self._failure}): use --no-symbols"
        if why is not None:
            self.close()
            raise SetupError(why)

    @property
    def trouble(self) -> str | None:
        """What to say about names that are missing; None while the reader works."""
        if self._failure is None:
            return None
        return f"the symbol reader failed ({self._failure}): modules and offsets instead of names"

    def name(self, tgid: int, address: int) -> str | None:
        """The function's name, demangled; None where it has none, or the reader has failed."""
        self._send(f"{tgid} {address:x}\n")
        return self._answer()

    def renew(self) -> None:
        """Lets each process be read again, once, for modules loaded meanwhile."""
        self._send("renew\n")

    def close(self) -> None:
        """Kills the process."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        self._process.wait()

    def _send(self, line: str) -> None:
        if self._failure is None:
            assert self._process.stdin
            try:
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()
            except OSError:
                self._fail("it ended")

    def _answer(self) -> str | None:
        ends = time.monotonic() + self._patience_seconds
        while self._failure is None:
            line, whole, rest = self._left.partition(b"\n")
            if whole:
                self._left = rest
                return self._read(line)
            if len(self._left) > _MOST_BYTES:
                self._fail("its answer has no end")
            else:
                self._receive(ends)
        return None

    def _read(self, line: bytes) -> str | None:
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            self._fail("its answer is not JSON")
            return None
        return answer if isinstance(answer, str) else None

    def _receive(self, ends: float) -> None:
        assert self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, ends - time.monotonic())):
                self._fail(f"it took longer than {self._patience_seconds:g} s")
                return
        chunk = os.read(self._process.stdout.fileno(), 1 << 16)
        self._left += chunk
        if not chunk:
            self._fail("it ended")

    def _fail(self, why: str) -> None:
        self._failure = why
        self._process.kill()
