# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A running agent's BPF maps, read from outside: what the kernel uses, independent of what the agent reports."""

from __future__ import annotations

import ctypes as c
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agent.node.procfs import Procfs
from agent.probes import abi
from agent.probes.abi import Pace, ProcessKey, Rule
from agent.probes.libbpf import Library, Map

_MAP_ID = re.compile(r"^map_id:\s*(\d+)$", re.MULTILINE)


class _MapInfo(c.Structure):
    """The beginning of the kernel's struct bpf_map_info."""

    _fields_ = [
        *((name, c.c_uint32) for name in ("type", "id", "key_size", "value_size", "max_entries", "flags")),
        ("name", c.c_char * 16),
    ]


@contextmanager
def map_of(agent: int, name: str) -> Iterator[Map]:
    """The map `name` that the process `agent` holds."""
    libbpf = c.CDLL("libbpf.so.1", use_errno=True)
    for number in sorted(_ids(agent)):
        descriptor = libbpf.bpf_map_get_fd_by_id(c.c_uint32(number))
        if descriptor < 0:
            continue
        try:
            info, length = _MapInfo(), c.c_uint32(c.sizeof(_MapInfo))
            assert libbpf.bpf_obj_get_info_by_fd(descriptor, c.byref(info), c.byref(length)) == 0
            if info.name == name.encode():
                yield Map(Library(), descriptor, *abi.MAPS[name])
                return
        finally:
            os.close(descriptor)
    raise AssertionError(f"process {agent} holds no map {name}")


def rule_of(agent: int, tgid: int) -> Rule | None:
    """The rule that the kernel has for a process; None where it has none."""
    with map_of(agent, "rules") as rules:
        found: Rule | None = rules.get(_key(tgid))
        return found


def pace_of(agent: int, tgid: int) -> Pace | None:
    """What the kernel has charged a process; None where it never did."""
    with map_of(agent, "paces") as paces:
        found: Pace | None = paces.get(_key(tgid))
        return found


def _key(tgid: int) -> ProcessKey:
    return ProcessKey.of(Procfs().process_id(tgid))


def _ids(tgid: int) -> set[int]:
    found: set[int] = set()
    for path in Path(f"/proc/{tgid}/fdinfo").iterdir():
        with suppress(FileNotFoundError):
            found |= {int(number) for number in _MAP_ID.findall(path.read_text())}
    return found
