# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m conformance.checks.probes.uprobe_check [LIBCUDA]`: whether BPF programs and uprobes work here, by using
them.

Capabilities say less. The agent's own object is loaded; then one uprobe at the entry and one at the return of a
function in a copy of a library, which is called; then one uprobe on libcuda, if it is named. Prints one line where
something does not work, and ends with 1.
"""

from __future__ import annotations

import ctypes as c
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from agent.core.errors import WardenError
from agent.node import preflight
from agent.node.elf import exported_functions
from agent.probes import abi
from agent.probes.abi import U32
from agent.probes.libbpf import BpfObject
from enforce.signals.uprobe import Watched

_FUNCTION: Final = "zlibVersion"  # of a library that libbpf needs, so it is here
_OF_LIBCUDA: Final = "cuDriverGetVersion"  # any would do
_CALLS: Final = 3
_NUMBER: Final = 1  # of the watch and of the target


def reason(libcuda: str | None) -> str | None:
    """Why they cannot be used, in one line; None: they can. `libcuda`: None where there is none."""
    if (sandbox := sandboxed()) is not None:
        return sandbox
    try:
        preflight.require_this_machine()
        with BpfObject(preflight.bpf_object()) as bpf:
            bpf.attach("process_exit")
        with tempfile.TemporaryDirectory(prefix="gpuwarden-uprobe-") as folder:
            why_not = _calls_are_seen(_copied_library(Path(folder)))
        return why_not if why_not or libcuda is None else libcuda_refuses(libcuda)
    except (WardenError, OSError, AttributeError) as error:
        return " ".join(str(error).split())


def sandboxed() -> str | None:
    """Whose kernel this is, if it only plays Linux: gVisor has no BPF."""
    try:
        version = Path("/proc/version").read_text()
    except OSError:
        version = ""
    return sandbox_of(f"{version}{_first_messages()}", platform.release())


def sandbox_of(messages: str, release: str) -> str | None:
    """The sandbox whose kernel prints this of itself; None: no known one."""
    if "gvisor" in messages.lower():
        return f"the kernel is gVisor (it says Linux {release}), which has neither BPF nor uprobes"
    return None


def _first_messages() -> str:
    """The beginning of the kernel's log: gVisor begins it with its name."""
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return _old_log()
    try:
        return "".join(os.read(descriptor, 8192).decode(errors="replace") for _ in range(5))
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _old_log() -> str:
    """syslog(2): gVisor has no /dev/kmsg."""
    buffer = c.create_string_buffer(4096)
    read_all = 3
    size = c.CDLL(None).klogctl(read_all, buffer, len(buffer) - 1)
    return buffer.raw[:size].decode(errors="replace") if size > 0 else ""


def _copied_library(folder: Path) -> Path:
    with open("/proc/self/maps") as maps:
        mapped = [line.split(maxsplit=5)[5].strip() for line in maps if "/libz.so" in line]
    if not mapped:
        raise OSError("libz.so.1 is not loaded, which libbpf needs")
    copy = folder / "libscratch.so"
    shutil.copyfile(mapped[0], copy)
    return copy


def _calls_are_seen(library: Path) -> str | None:
    """Entry and return are both probed; what counts a call is the return."""
    offset = exported_functions(str(library), _FUNCTION)[_FUNCTION]
    function = getattr(c.CDLL(str(library)), _FUNCTION)
    with BpfObject(preflight.bpf_object().with_name("uprobe.bpf.o")) as bpf:
        recorded = bpf.map("recorded", U32, abi.Latency)
        recorded.put(U32(_NUMBER), abi.Latency())
        bpf.map("wanted", U32, Watched).put(U32(os.getpid()), Watched(_NUMBER, _NUMBER))
        for program, at_return in (("uprobe_return", True), ("uprobe_enter", False)):
            bpf.attach_uprobe(program, str(library), offset, _NUMBER, at_return=at_return)
        for _ in range(_CALLS):
            function()
        found = recorded.get(U32(_NUMBER))
    seen = found.count if found is not None else 0
    return None if seen == _CALLS else f"a uprobe was attached, but saw {seen} of {_CALLS} calls"


def libcuda_refuses(libcuda: str) -> str | None:
    """Why no uprobe can be on it, as on some file systems; None: one can, and is taken away again."""
    try:
        offset = exported_functions(libcuda, _OF_LIBCUDA)[_OF_LIBCUDA]
        with BpfObject(preflight.bpf_object().with_name("uprobe.bpf.o")) as bpf:
            bpf.attach_uprobe("uprobe_enter", libcuda, offset, _NUMBER, at_return=False)
    except (WardenError, OSError, KeyError, ValueError) as error:
        return f"uprobes work here, but not on {libcuda}: {' '.join(str(error).split())}"
    return None


if __name__ == "__main__":
    why = reason(sys.argv[1] if len(sys.argv) > 1 else None)
    if why is not None:
        print(why)
        sys.exit(1)
