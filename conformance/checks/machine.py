# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What machine this is: every other row is to be read with this one's. Reads, and changes nothing."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from conformance.host import Host, Unavailable
from conformance.machine_state import ROOT, mps_daemons, nvml
from conformance.report.model import Figure, Row, Verdict, skipped

NAME: Final = "machine"
TITLE: Final = "what this machine is and can do"
SECONDS: Final = 30
LEAST_SECONDS: Final = 12
_LISTING_SECONDS: Final = 8.0
FRAMEWORKS: Final = ("torch", "triton", "cupy", "jax", "cuda-bindings")
WHAT: Final = (
    "driver",
    "CUDA version of the driver",
    "GPU",
    "GPUs",
    "SMs",
    "memory of the GPU",
    "compute capability",
    "MIG mode",
    "compute mode",
    "persistence mode",
    "MPS control program",
    "MPS daemons that run already",
    "kernel",
    "sandboxed kernel",
    "BTF of the kernel",
    "BPF programs and uprobes can be used",
    "all uprobes in one link (uprobe_multi)",
    "what the agent asks of a machine",
    "root",
    "cgroup version",
    "CPUs",
    "glibc",
    "Python",
    "{framework}",
)
_COMPUTE_MODES: Final = ("default", "exclusive thread", "prohibited", "exclusive process")
_SM_COUNT, _MAJOR, _MINOR = 16, 75, 76  # CU_DEVICE_ATTRIBUTE_…
_BTF = Path("/sys/kernel/btf/vmlinux")
# Without importing them: that alone may take ten seconds.
_VERSIONS = """
import importlib.metadata, json
found = {}
for distribution in importlib.metadata.distributions():
    name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
    found.setdefault(name, distribution.version)
print(json.dumps(found))
"""


def rows(host: Host) -> Iterator[Row]:
    """Driver and GPU, kernel and rights, programs and libraries."""
    yield from _gpu()
    yield from _cuda(host)
    yield from _mps(host)
    yield from _kernel(host)
    yield from _software(host)


def _fact(what: str, ask: Callable[[], Figure], unit: str = "", note: str = "") -> Row:
    """A figure, or why there is none."""
    try:
        figure = ask()
    except (Unavailable, OSError, RuntimeError, AttributeError, ValueError) as error:
        return skipped(NAME, what, " ".join(str(error).split()) or type(error).__name__)
    return Row(item=NAME, what=what, verdict=Verdict.MEASURED, figure=figure, unit=unit, note=note)


def _gpu() -> Iterator[Row]:
    """Facts of the first GPU, by NVML."""
    try:
        with nvml() as api:
            first = api.nvmlDeviceGetHandleByIndex(0)
            yield from _readings(api, first)
    except (ImportError, RuntimeError) as error:
        yield skipped(NAME, "driver", str(error))


def _readings(api: Any, first: Any) -> Iterator[Row]:
    def ask(what: str, read: Callable[[], Figure], unit: str = "") -> Row:
        try:
            return _fact(what, read, unit)
        except api.NVMLError as error:
            return skipped(NAME, what, f"NVML: {error}")

    yield ask("driver", api.nvmlSystemGetDriverVersion)
    yield ask("GPU", lambda: api.nvmlDeviceGetName(first))
    yield ask("GPUs", api.nvmlDeviceGetCount)
    yield ask("memory of the GPU", lambda: api.nvmlDeviceGetMemoryInfo(first).total, "bytes")
    yield ask("MIG mode", lambda: "on" if api.nvmlDeviceGetMigMode(first)[0] else "off")
    yield ask("compute mode", lambda: _COMPUTE_MODES[api.nvmlDeviceGetComputeMode(first)])
    yield ask("persistence mode", lambda: "on" if api.nvmlDeviceGetPersistenceMode(first) else "off")


def _cuda(host: Host) -> Iterator[Row]:
    """Facts by the driver library; without a context."""
    try:
        library = _started(host)
    except (OSError, Unavailable) as why:
        yield skipped(NAME, "CUDA version of the driver", str(why))
        return
    note = f"{host.libcuda}"
    yield _fact("CUDA version of the driver", lambda: _version(library), note=note)
    yield _fact("SMs", lambda: _attribute(library, _SM_COUNT))
    yield _fact("compute capability", lambda: f"{_attribute(library, _MAJOR)}.{_attribute(library, _MINOR)}")


def _started(host: Host) -> Any:
    if host.libcuda is None:
        raise Unavailable("no libcuda.so.1 was found: is the NVIDIA driver installed?")
    library = ctypes.CDLL(str(host.libcuda))
    if code := library.cuInit(0):
        raise Unavailable(f"cuInit says {code}")
    return library


def _version(library: Any) -> str:
    number = ctypes.c_int()
    if code := library.cuDriverGetVersion(ctypes.byref(number)):
        raise Unavailable(f"cuDriverGetVersion says {code}")
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _attribute(library: Any, number: int) -> int:
    value = ctypes.c_int()
    if code := library.cuDeviceGetAttribute(ctypes.byref(value), number, 0):
        raise Unavailable(f"cuDeviceGetAttribute says {code}")
    return value.value


def _mps(host: Host) -> Iterator[Row]:
    yield _fact("MPS control program", lambda: str(host.mps_control()))
    yield _fact("MPS daemons that run already", lambda: len(mps_daemons()))


def _kernel(host: Host) -> Iterator[Row]:
    yield _fact("kernel", platform.release, note=platform.version())
    yield _sandbox()
    yield _fact("BTF of the kernel", lambda: _BTF.stat().st_size, "bytes")
    usable = host.bpf is None
    yield _fact("BPF programs and uprobes can be used", lambda: usable, note=host.bpf or "tried: both were used")
    yield _multi(host)
    yield _preflight()
    yield _fact("root", lambda: os.geteuid() == 0)
    yield _fact("cgroup version", _cgroup_version)
    yield _fact("CPUs", lambda: len(os.sched_getaffinity(0)))


def _cgroup_version() -> str:
    """The cgroup version, by what is mounted; systemd's hybrid layout has both."""
    kinds = {line.split()[2] for line in Path("/proc/self/mounts").read_text().splitlines()}
    found = [version for version, kind in (("1", "cgroup"), ("2", "cgroup2")) if kind in kinds]
    return " and ".join(found) or "none is mounted"


def _sandbox() -> Row:
    what = "sandboxed kernel"
    try:
        from conformance.checks.probes.uprobe_check import sandboxed
    except ImportError as error:
        return skipped(NAME, what, str(error))
    why = sandboxed()
    return _fact(what, lambda: why is not None, note=why or "")


def _multi(host: Host) -> Row:
    """As the agent tries it: without, taking its probes away takes a grace period for each."""
    what = "all uprobes in one link (uprobe_multi)"
    if host.bpf is not None:
        return skipped(NAME, what, host.bpf)
    from agent.core.errors import ProbeError
    from agent.probes.libbpf import BpfObject

    try:
        BpfObject(host.bpf_objects / "uprobe.bpf.o", multi=("uprobe_enter", "uprobe_return")).close()
    except ProbeError as error:
        return _fact(what, lambda: False, note=str(error))
    return _fact(what, lambda: True)


def _preflight() -> Row:
    what = "what the agent asks of a machine"
    try:
        from agent.core.errors import SetupError
        from agent.node import preflight
    except ImportError as error:
        return skipped(NAME, what, str(error))
    try:
        preflight.require_this_machine()
        if not preflight.has_the_nodes_pids():
            return _fact(what, lambda: False, note=preflight.OTHER_PIDS)
    except SetupError as error:
        return _fact(what, lambda: False, note=" ".join(str(error).split()))
    return _fact(what, lambda: True, note="capabilities, kernel, BTF, the node's own PID namespace")


def _software(host: Host) -> Iterator[Row]:
    yield _glibc()
    yield _fact("Python", platform.python_version, note=sys.executable)
    answer = host.run([host.python, "-c", _VERSIONS], timeout=_LISTING_SECONDS)
    try:
        versions = json.loads(answer.stdout)
    except ValueError:
        yield skipped(NAME, "{framework}", f"{host.python} does not say what it has: {answer.stderr.strip()[-200:]}")
        return
    for name in FRAMEWORKS:
        found = next((f"{n} {v}" for n, v in versions.items() if n == name or _is_build_of(name, n)), None)
        if found is None:
            yield skipped(NAME, name, f"{host.python} has no {name}")
        else:
            yield Row(item=NAME, what=name, verdict=Verdict.MEASURED, figure=found)


def _is_build_of(name: str, distribution: str) -> bool:
    """cupy comes as cupy-cuda13x."""
    return name == "cupy" and distribution.startswith("cupy-cuda")


def _glibc() -> Row:
    """What the bundle's programs and libraries need is counted when it is made."""
    have = os.confstr("CS_GNU_LIBC_VERSION") or "unknown"
    version = have.removeprefix("glibc ")
    needed = _bundle_needs()
    if needed is None:
        return _fact("glibc", lambda: version)
    enough = [int(part) for part in version.split(".")[:2]] >= [int(part) for part in needed.split(".")[:2]]
    note = "" if enough else "older than the bundle's programs and libraries need: those of them that need it fail"
    verdict = Verdict.OK if enough else Verdict.DIFFERS
    return Row(item=NAME, what="glibc", verdict=verdict, figure=version, baseline=needed, note=note)


def _bundle_needs() -> str | None:
    try:
        manifest = json.loads((ROOT / "manifest.json").read_text())
        return str(manifest["glibc"])
    except (OSError, ValueError, KeyError):
        return None
