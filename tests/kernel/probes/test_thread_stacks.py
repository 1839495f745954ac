# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The stack of a program at a probe is its thread's, as the kernel has compiled it (bpf/probe.bpf.h)."""

from __future__ import annotations

import ctypes as c
import os
import platform
from collections.abc import Iterator
from contextlib import suppress

import pytest

from agent.probes.libcuda import LibcudaProbes

_KPROBE = 2  # enum bpf_prog_type: of uprobes, too; others do not begin while they run on the same CPU
_STACK_OF_CPU = bytes.fromhex("654c030c25")  # add %gs:…, %r9: the address of this CPU's own, since Linux 6.13


class _Info(c.Structure):
    """The head of struct bpf_prog_info."""

    _fields_ = [
        ("type", c.c_uint32),
        ("id", c.c_uint32),
        ("tag", c.c_uint8 * 8),
        ("jited_bytes", c.c_uint32),
        ("translated_bytes", c.c_uint32),
        ("jited", c.c_uint64),
        ("translated", c.c_uint64),
        ("load_time", c.c_uint64),
        ("uid", c.c_uint32),
        ("map_count", c.c_uint32),
        ("map_ids", c.c_uint64),
        ("name", c.c_char * 16),
    ]
    type: int
    jited_bytes: int
    jited: int
    name: bytes


def _info(descriptor: int, info: _Info) -> _Info:
    library = c.CDLL("libbpf.so.1", use_errno=True)
    size = c.c_uint32(c.sizeof(info))
    assert library.bpf_obj_get_info_by_fd(descriptor, c.byref(info), c.byref(size)) == 0
    return info


def _programs() -> Iterator[tuple[str, int, bytes]]:
    """Name, type and machine code of those that this process has open."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if "bpf-prog" in os.readlink(f"/proc/self/fd/{name}"):
                found = _info(int(name), _Info())
                code = c.create_string_buffer(found.jited_bytes)
                _info(int(name), _Info(jited=c.addressof(code), jited_bytes=found.jited_bytes))
                yield found.name.decode(), found.type, code.raw


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the machine code that is looked for is x86-64's")
def test_no_program_of_a_probe_has_a_stack_that_it_shares_with_what_takes_its_cpu(fresh_probes: LibcudaProbes) -> None:
    programs = [(name, code) for name, kind, code in _programs() if kind == _KPROBE]
    assert len(programs) > 20
    assert [name for name, code in programs if _STACK_OF_CPU in code] == []
