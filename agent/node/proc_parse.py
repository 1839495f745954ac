# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Parsers of the files of /proc/PID: text in, values out, no I/O.

Everything in there that a process can choose (its name, arguments, paths) is hostile: it may hold anything, and it ends
up on terminals and in logs. Lines end at "\\n" only: splitlines() would let a name forge lines. Source: proc(5).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

from agent.core.text import printable

_OCTAL = re.compile(r"\\([0-7]{3})")
_UNIX = re.compile(r"^\w+: \w+ \w+ ([0-9a-fA-F]{8}) \w+ \w+ +[0-9]+ (.+)$", re.MULTILINE)
_ACCEPTS = 1 << 16  # __SO_ACCEPTCON, <linux/net.h>
DELETED = " (deleted)"
START_TICKS: Final = 0xFFFFFFFF  # the probes carry 32 bits of it; they wrap after 497 days


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/PID/stat that we use."""

    comm: str
    state: str  # one letter: R S D T t Z X I
    parent_tgid: int
    threads: int
    start_ticks: int  # field 22, 1/100 s since boot; the low 32 bits, which are what the probes carry (497 days)
    start_stack: int = 0  # field 28, the address where its stack begins; another one after each exec

    @property
    def dead(self) -> bool:
        """A zombie whose last thread is gone. (A zombie with threads only lost its first one and works on.)"""
        return self.state in "ZX" and self.threads <= 1


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A file in a process's address space, as that process names it."""

    path: str
    device: int  # as st_dev has it
    inode: int
    deleted: bool
    span: str = field(default="", compare=False)  # where it is first mapped, as /proc/PID/map_files calls that


def unescaped(text: str) -> str:
    """A path without the octal escapes that maps and mountinfo have for blanks, line ends and backslashes."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def parse_stat(text: str) -> Stat:
    """ValueError when it is none. The name may hold spaces and parentheses: only the last one closes it."""
    head, closing, tail = text.rpartition(")")
    fields = tail.split()
    if not closing or "(" not in head or len(fields) < 20:
        raise ValueError("not a stat line")
    comm = head[head.index("(") + 1 :]
    start_stack = int(fields[25]) if len(fields) > 25 else 0
    return Stat(comm, fields[0], int(fields[1]), int(fields[17]), int(fields[19]) & START_TICKS, start_stack)


def parse_status_uid(text: str) -> int | None:
    """The real uid in /proc/PID/status."""
    for line in text.split("\n"):
        if line.startswith("Uid:"):
            fields = line.split()
            return int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else None
    return None


def parse_listening_unix(text: str) -> frozenset[str]:
    """The paths in /proc/PID/net/unix of sockets that take connections. A path can forge lines."""
    return frozenset(found[2] for found in _UNIX.finditer(text) if int(found[1], 16) & _ACCEPTS)


def parse_command(arguments: str, longest: int) -> str:
    """NUL-separated arguments as one printable line of at most `longest` characters; "" when there are none."""
    return printable(" ".join(arguments.rstrip("\0").split("\0")), longest)


def parse_environ(text: str, names: Collection[str]) -> dict[str, str]:
    """Those variables of a NUL-separated environment; of one that is set twice the first, as getenv has it."""
    found: dict[str, str] = {}
    for entry in text.split("\0"):
        name, equals, value = entry.partition("=")
        if equals and name in names:
            found.setdefault(name, value)
    return found


def parse_maps(text: str, wanted: Callable[[str], bool], *, code: bool = False) -> Iterator[MappedFile]:
    """The files whose base name is wanted, each once, in order of address. `code`: only mappings that may be run."""
    seen: set[MappedFile] = set()
    for line in text.split("\n"):
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[5].startswith("/") or (code and "x" not in fields[1]):
            continue
        path, deleted = strip_deleted(unescaped(fields[5]))
        if not wanted(path.rpartition("/")[2]):
            continue
        mapped = MappedFile(path, _device(fields[3]), int(fields[4]), deleted, _span(fields[0]))
        if mapped not in seen:
            seen.add(mapped)
            yield mapped


def _span(text: str) -> str:
    """maps pads its addresses with zeros, map_files does not."""
    start, _, end = text.partition("-")
    return f"{int(start, 16):x}-{int(end, 16):x}"


def strip_deleted(path: str) -> tuple[str, bool]:
    """A path as the kernel writes it, and whether what it named has been removed since."""
    return path.removesuffix(DELETED), path.endswith(DELETED)


def _device(text: str) -> int:
    major, _, minor = text.partition(":")
    high, low = int(major, 16), int(minor, 16)
    return (high & 0xFFF) << 8 | (high & ~0xFFF) << 32 | (low & 0xFF) | (low & ~0xFF) << 12
