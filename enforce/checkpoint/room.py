# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How much memory of the host a container can still take: what the host has, and what its cgroups let it have.

What the driver saves is charged to the process that it saves. Without room the kernel would kill it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)
_CACHE = re.compile(r"^(?:total_)?inactive_file (\d+)$", re.MULTILINE)
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # v2, v1


def room_bytes(
    cgroup: str, cgroups: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")
) -> int | None:
    """The least of what the host and each cgroup on the way leave; None where nothing says so."""
    rooms = [_host_bytes(meminfo), *(_left_bytes(folder) for folder in _folders(cgroup, cgroups))]
    return min((room for room in rooms if room is not None), default=None)


def _host_bytes(meminfo: Path) -> int | None:
    found = _AVAILABLE.search(_text(meminfo))
    return int(found[1]) * 1024 if found else None


def _folders(cgroup: str, cgroups: Path) -> Iterator[Path]:
    path = PurePosixPath(cgroup.lstrip("/"))
    for below in (path, *path.parents):
        yield cgroups / below
        yield cgroups / "memory" / below


def _left_bytes(folder: Path) -> int | None:
    """Cache that was not used lately gives way."""
    for limit_file, usage_file in _FILES:
        limit, usage = _text(folder / limit_file).strip(), _text(folder / usage_file).strip()
        if limit.isdecimal() and usage.isdecimal():
            cache = _CACHE.search(_text(folder / "memory.stat"))
            return max(0, int(limit) - int(usage) + (int(cache[1]) if cache else 0))
    return None


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace")
    return ""
