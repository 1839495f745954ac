# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Addresses → names, while the process is there to be asked: by bcc, or module and offset from /proc/PID/maps.

bcc only resolves symbols here (it reads the process's files through /proc/PID/root); it loads no program, and has a
process of its own to do it in (agent/stacks/aside.py).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from agent.errors import GoneError
from agent.names import printable
from agent.procfs import Procfs

_LONGEST_NAME = 512
UNKNOWN = "[unknown]"


class Resolver(Protocol):
    """Names of one process's addresses; None where there is none."""

    def name(self, tgid: int, address: int) -> str | None: ...
    def renew(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Mapping:
    """A line of /proc/PID/maps that has code of a file."""

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
    """Module and file offset. What was read of a process stays known after its end."""

    def __init__(self, read_maps: Callable[[int], str]) -> None:
        self._read_maps = read_maps
        self._maps: dict[int, list[Mapping]] = {}
        self._fresh: set[int] = set()

    def name(self, tgid: int, address: int) -> str | None:
        """`libtorch.so+0x1f00`."""
        found = self._find(tgid, address)
        if found is None and tgid not in self._fresh:
            self._read(tgid)
            found = self._find(tgid, address)
        return f"{found.module}+{address - found.start + found.offset:#x}" if found else None

    def renew(self) -> None:
        """Lets each process be read again, once, for what it has loaded meanwhile."""
        self._fresh.clear()

    def see(self, tgid: int) -> None:
        """Reads a process that is there now: later it may be gone."""
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
    """Names for frames, from the first resolver that has one."""

    def __init__(self, proc: Procfs, bcc: Resolver | None) -> None:
        self._proc, self._modules = proc, Modules(proc.maps)
        self._resolvers: tuple[Resolver, ...] = (bcc, self._modules) if bcc else (self._modules,)
        self._processes: dict[int, str] = {}

    def stack(self, tgid: int, addresses: list[int]) -> tuple[str, ...]:
        """Outermost first, below it the process. Callers are looked up one byte before where they go on."""
        inner = [self._name(tgid, address - (depth > 0)) for depth, address in enumerate(addresses)]
        return (self._process(tgid), *reversed(inner))

    def see(self, tgids: Iterable[int]) -> None:
        """Keeps what a process's frames can be named by once it has ended."""
        for tgid in tgids:
            self._modules.see(tgid)
            self._process(tgid)

    def renew(self) -> None:
        """At each round."""
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
