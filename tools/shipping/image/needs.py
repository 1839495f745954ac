# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which shared libraries the ELF files below some folders need, and which of those are nowhere in there.

`python -m tools.shipping.image.needs DIR…`: exit code 1, and a line for each, where one is missing. By file name, as
the dynamic linker looks; that it looks in the right folder is for running the image to show.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_MAGIC = b"\x7fELF"
_FILE = re.compile(r"^File: (.*)$")
_NEEDED = re.compile(r"\(NEEDED\).*\[(.*)\]$")
# Given by the driver where the image runs.
OF_THE_DRIVER = frozenset({"libcuda.so.1", "libnvidia-ml.so.1"})


def needed(folders: Iterable[Path]) -> dict[Path, list[str]]:
    """The libraries that each ELF file needs, by name."""
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if _is_elf(path)]
    if not files:
        return {}
    # The first file twice: readelf names files only where there are several.
    command = ["readelf", "--wide", "--dynamic", str(files[0]), *map(str, files)]
    listed = subprocess.run(
        command, check=True, env={"LC_ALL": "C", "PATH": "/usr/bin"}, capture_output=True, text=True
    )
    found: dict[Path, list[str]] = {}
    for line in listed.stdout.splitlines():
        if file := _FILE.match(line):
            found[current := Path(file[1])] = []
        elif name := _NEEDED.search(line):
            found[current].append(name[1])
    return found


def missing(folders: Sequence[Path]) -> dict[Path, list[str]]:
    """The needed libraries that are missing, by ELF file."""
    there = {path.name for folder in folders for path in folder.rglob("*.so*")} | OF_THE_DRIVER
    wanted: Mapping[Path, list[str]] = needed(folders)
    lacking = {file: [name for name in names if name not in there] for file, names in wanted.items()}
    return {file: names for file, names in lacking.items() if names}


def _is_elf(path: Path) -> bool:
    if path.is_symlink() or not path.is_file() or path.name.endswith(".bpf.o"):
        return False
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


if __name__ == "__main__":
    lacks = missing([Path(folder) for folder in sys.argv[1:]])
    for path, names in lacks.items():
        print(
            f"needs: {path} needs {', '.join(names)}: add the package to tools/shipping/image/base.py", file=sys.stderr
        )
    sys.exit(1 if lacks else 0)
