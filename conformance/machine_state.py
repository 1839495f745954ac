# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The machine before the first item: libraries, whether BPF works, GPU settings. Every item gets it. Changes nothing.

`python -m conformance.machine_state` prints it as JSON, again after each part: in a process of its own, since a driver
or a kernel may hang, and what was observed before counts. The last item reads the settings again, so that a change is
noticed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from conformance import process_tree

ROOT: Final = Path(__file__).resolve().parents[1]
SIM_BUILD: Final = ROOT / "sim" / "build"
_CHECK_SECONDS: Final = 12.0
_UNOBSERVED: Final = "observing the machine did not finish; the log has its output"
_CGROUPS: Final = Path("/sys/fs/cgroup")
_DEEPEST: Final = 6
_ELSEWHERE: Final = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    "/run/nvidia/driver/usr/lib64",
    "/usr/lib/wsl/lib",
)
# The loader knows best, so it is asked, in a process that ends: prints which file it took.
_LOADS: Final = """
import ctypes, os, sys
class Info(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p)]
    _fields_ += [("name", ctypes.c_char_p), ("at", ctypes.c_void_p)]
function = getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2])
info = Info()
ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info))
print(os.path.realpath(os.fsdecode(info.file)))
"""


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """`settings`: GPU's UUID → setting → value, without those that the GPU lacks."""

    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    why_not: str = ""  # why NVML could not be read
    cgroups: list[str] = field(default_factory=list)  # with our name
    daemons: list[int] = field(default_factory=list)  # pids of MPS


def current_settings() -> MachineSettings:
    """The settings, cgroups and MPS daemons of now."""
    settings, why_not = _all_settings()
    return MachineSettings(settings, why_not, cgroups(), [process.pid for process in mps_daemons()])


def cgroups() -> list[str]:
    """Control groups whose name contains ours."""
    found = []
    for folder, below, _ in os.walk(_CGROUPS):
        if len(Path(folder).relative_to(_CGROUPS).parts) >= _DEEPEST:
            below.clear()
        found += [os.path.join(folder, name) for name in below if "gpuwarden" in name]
    return sorted(found)


def mps_daemons() -> list[process_tree.Process]:
    """Control daemons and servers of MPS, ours and others'."""
    return process_tree.named("nvidia-cuda-mps")


def _all_settings() -> tuple[dict[str, dict[str, str]], str]:
    try:
        with nvml() as api:
            handles = [api.nvmlDeviceGetHandleByIndex(index) for index in range(api.nvmlDeviceGetCount())]
            return {api.nvmlDeviceGetUUID(handle): _settings(api, handle) for handle in handles}, ""
    except Exception as error:  # noqa: BLE001  # a driver may answer in any way, and the run is to go on
        return {}, " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """The binding, ready for use. ImportError or RuntimeError in one line where it cannot be had."""
    from agent.core.errors import SetupError
    from agent.nvml.client import binding, explain, start

    try:
        api = binding()
    except SetupError as error:
        raise ImportError(str(error)) from error
    try:
        start(api)
    except api.NVMLError as error:
        raise RuntimeError(explain(api, error)) from error
    try:
        yield api
    except api.NVMLError as error:
        raise RuntimeError(f"NVML: {error}") from error
    finally:
        api.nvmlShutdown()


def _settings(api: Any, handle: Any) -> dict[str, str]:
    """Those that can be read: this GPU, or this driver, may lack some, or answer what cannot be parsed."""
    asked: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("MIG mode", lambda: api.nvmlDeviceGetMigMode(handle)[0]),
        ("compute mode", lambda: api.nvmlDeviceGetComputeMode(handle)),
        ("persistence mode", lambda: api.nvmlDeviceGetPersistenceMode(handle)),
        ("application clock of the SMs", lambda: api.nvmlDeviceGetApplicationsClock(handle, api.NVML_CLOCK_SM)),
        ("application clock of the memory", lambda: api.nvmlDeviceGetApplicationsClock(handle, api.NVML_CLOCK_MEM)),
        ("power limit (mW)", lambda: api.nvmlDeviceGetPowerManagementLimit(handle)),
        ("accounting mode", lambda: api.nvmlDeviceGetAccountingMode(handle)),
    )
    found = {}
    for name, ask in asked:
        with contextlib.suppress(Exception):
            found[name] = str(ask())
    return found


@dataclass(frozen=True, slots=True)
class MachineState:
    """`library_path`: what LD_LIBRARY_PATH has to be for programs to find the driver's libraries; "": nothing."""

    simulated: bool
    libcuda: str | None
    libnvml: str | None
    library_path: str
    bpf: str | None  # why it cannot be used; None: it can
    before: MachineSettings  # before the first item

    def as_json(self) -> str:
        """The state as one line of JSON."""
        return json.dumps(asdict(self))


def state_from_json(text: str) -> MachineState:
    """Parses what as_json made. ValueError, TypeError, KeyError."""
    given = json.loads(text)
    return MachineState(**{**given, "before": MachineSettings(**given["before"])})


def unknown_state(simulated: bool, why: str) -> MachineState:
    """The state where observing it failed."""
    return MachineState(simulated, None, None, "", why, MachineSettings())


def last_state(text: str) -> MachineState | None:
    """The last whole line of what `python -m conformance.machine_state` printed; None where there is none."""
    for line in reversed(text.split("\n")[:-1]):
        try:
            return state_from_json(line)
        except (ValueError, TypeError, KeyError):  # a library printed it
            continue
    return None


def observe(simulated: bool) -> Iterator[MachineState]:
    """The state as known so far, after each part. Takes some seconds."""
    libcuda, library_path = _library("libcuda.so.1", "cuInit", simulated)
    libnvml, _ = _library("libnvidia-ml.so.1", "nvmlInit_v2", simulated)
    seen = MachineState(simulated, libcuda, libnvml, library_path, _UNOBSERVED, MachineSettings(why_not=_UNOBSERVED))
    yield seen
    seen = replace(seen, bpf=_bpf(libcuda))
    yield seen
    yield replace(seen, before=_before(simulated))


def item_environment(state: MachineState) -> dict[str, str]:
    """For an item's own process: the loader reads LD_LIBRARY_PATH when a program begins, and never again."""
    folders = [state.library_path, *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    joined = ":".join(dict.fromkeys(folder for folder in folders if folder))
    return {"LD_LIBRARY_PATH": joined} if joined else {}


def _library(soname: str, function: str, simulated: bool) -> tuple[str | None, str]:
    """The file, and the folder to be named for programs to find it; "" where they find it anyway."""
    if simulated:
        path = SIM_BUILD / "lib" / soname
        return (str(path.resolve()) if path.is_file() else None), str(SIM_BUILD / "lib")
    found = _loaded(soname, function)
    if found is not None:
        return found, ""
    for folder in _ELSEWHERE:
        found = _loaded(f"{folder}/{soname}", function)
        if found is not None:
            return found, folder
    return None, ""


def _loaded(name: str, function: str) -> str | None:
    if "/" in name and not os.path.isfile(name):
        return None
    command = [sys.executable, "-c", _LOADS, name, function]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _bpf(libcuda: str | None) -> str | None:
    """Why BPF cannot be used, by conformance/checks/probes/uprobe_check.py; None: it can."""
    command = [sys.executable, "-m", "conformance.checks.probes.uprobe_check", *([libcuda] if libcuda else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"loading a BPF program and attaching it was not done within {_CHECK_SECONDS:g} s"
    if done.returncode == 0:
        return None
    output = (done.stdout.strip() or done.stderr.strip() or f"exit status {done.returncode}").splitlines()
    return output[-1]


def _before(simulated: bool) -> MachineSettings:
    if not simulated:
        return current_settings()
    from tools.harness.node import simulated_node

    with tempfile.TemporaryDirectory(prefix="gpuwarden-state-") as folder, simulated_node(Path(folder)) as node:
        os.environ.update(_without_library_path(node.environment))
        return current_settings()


def _without_library_path(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != "LD_LIBRARY_PATH"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m conformance.machine_state", description=__doc__)
    parser.add_argument("--simulated", action="store_true", help="of the simulated GPU")
    for found in observe(parser.parse_args().simulated):
        print(found.as_json(), flush=True)
