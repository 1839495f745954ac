# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a run looks at once, before its first item, and all items are told: libraries, BPF, how the GPU is set.

`python -m gpu.look` prints it as JSON, again after each part: in a process of its own, since a driver or a kernel that
is looked at may hang, and what was seen before it does is to count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from gpu.standing import Standing, standing

ROOT: Final = Path(__file__).resolve().parents[1]
SIM_BUILD: Final = ROOT / "sim" / "build"
_CHECK_SECONDS: Final = 12.0
_NOT_LOOKED: Final = "looking at it did not come to its end; the log has what was printed"
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
class Look:
    """`library_path`: what LD_LIBRARY_PATH has to be for programs to find the driver's libraries; "": nothing."""

    simulated: bool
    libcuda: str | None
    libnvml: str | None
    library_path: str
    bpf: str | None  # why it cannot be used; None: it can
    before: Standing  # how the machine was

    def as_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def look_from(text: str) -> Look:
    """What as_json made. ValueError, TypeError, KeyError."""
    given = json.loads(text)
    return Look(**{**given, "before": Standing(**given["before"])})


def blind(simulated: bool, why: str) -> Look:
    """Where looking itself failed."""
    return Look(simulated, None, None, "", why, Standing())


def last_look(text: str) -> Look | None:
    """The last whole line of what `python -m gpu.look` printed; None where there is none."""
    for line in reversed(text.split("\n")[:-1]):
        try:
            return look_from(line)
        except (ValueError, TypeError, KeyError):  # a library printed it
            continue
    return None


def looks(simulated: bool) -> Iterator[Look]:
    """After each part what is known then. Takes some seconds."""
    libcuda, library_path = _library("libcuda.so.1", "cuInit", simulated)
    libnvml, _ = _library("libnvidia-ml.so.1", "nvmlInit_v2", simulated)
    seen = Look(simulated, libcuda, libnvml, library_path, _NOT_LOOKED, Standing(why_not=_NOT_LOOKED))
    yield seen
    seen = replace(seen, bpf=_bpf(libcuda))
    yield seen
    yield replace(seen, before=_before(simulated))


def item_environment(look: Look) -> dict[str, str]:
    """For an item's own process: the loader reads LD_LIBRARY_PATH when a program begins, and never again."""
    folders = [look.library_path, *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
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
    """What gpu/uprobe_check.py says of this machine."""
    command = [sys.executable, "-m", "gpu.uprobe_check", *([libcuda] if libcuda else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"loading a BPF program and attaching it was not done within {_CHECK_SECONDS:g} s"
    if done.returncode == 0:
        return None
    said = (done.stdout.strip() or done.stderr.strip() or f"exit status {done.returncode}").splitlines()
    return said[-1]


def _before(simulated: bool) -> Standing:
    if not simulated:
        return standing()
    from bench.node import simulated_node

    with tempfile.TemporaryDirectory(prefix="gpuwarden-look-") as folder, simulated_node(Path(folder)) as node:
        os.environ.update(_without_library_path(node.environment))
        return standing()


def _without_library_path(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != "LD_LIBRARY_PATH"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m gpu.look", description=__doc__)
    parser.add_argument("--simulated", action="store_true", help="at the simulated GPU")
    for found in looks(parser.parse_args().simulated):
        print(found.as_json(), flush=True)
