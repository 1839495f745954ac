# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`unmodelled.py LIBCUDA > unmodelled.h`: which calls a real library has that the simulated one does not model.

They are asked for by cuGetProcAddress, which answers without a GPU: for each name the exported form that a program gets
by the version of CUDA that it was built for. With `--all` the lines are those of every call, modelled or not.
"""

from __future__ import annotations

import ctypes as c
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HEAD = """\
/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * What libcuda {version} exports and this one does not model: NOT_SUPPORTED. As exports.h; made by unmodelled.py.
 */
/* clang-format off */
"""
_FORM = re.compile(r"(_v\d+)?(_ptds|_ptsz)?$")
_MODELLED = re.compile(r'^[EP]\(".*?", \d+, (\w+)(?:, (\w+))?\),$', re.MULTILINE)
_VERSIONS = [*range(2000, 13000, 10)]
_PER_THREAD = 2  # of enum CUdriverProcAddress_flags


def exported(library: str) -> list[str]:
    """The names of the functions that it exports."""
    lines = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    return sorted({name.partition("@")[0] for _, kind, name in map(str.split, lines.splitlines()) if kind == "T"})


def forms(libcuda: c.CDLL, name: str, names: dict[int, str]) -> Iterator[tuple[int, str, str]]:
    """Versions in which the form changes, with the export and its per-thread twin."""
    pointer, before = c.c_void_p(), None
    for version in _VERSIONS:
        found = []
        for flags in (0, _PER_THREAD):
            failed = libcuda.cuGetProcAddress(name.encode(), c.byref(pointer), version, c.c_uint64(flags))
            found.append(names[pointer.value or 0] if not failed else "")
        plain, twin = found
        if plain and found != before:
            yield version, plain, twin or plain
        before = found


def lines(path: str, modelled: set[str]) -> Iterator[str]:
    """Of all calls that are not modelled."""
    libcuda, exports = c.CDLL(path), exported(path)
    names = {c.cast(getattr(libcuda, name), c.c_void_p).value or 0: name for name in reversed(exports)}
    listed = set(modelled)
    for name in sorted({_FORM.sub("", export) for export in exports}):
        for version, plain, twin in forms(libcuda, name, names):
            if plain not in modelled:
                listed |= {plain, twin}
                forms_of_it = plain if plain == twin else f"{plain}, {twin}"
                yield f'{"E" if plain == twin else "P"}("{name}", {version}, {forms_of_it}),'
    for export in exports:  # that cuGetProcAddress never gives
        if export not in listed:
            yield f'E("", 0, {export}),'


def main() -> None:
    """Prints the header, or the lines alone."""
    path = sys.argv[-1]
    if "--all" in sys.argv:
        print(*lines(path, set()), sep="\n")
        return
    modelled = _MODELLED.findall(Path(__file__).with_name("exports.h").read_text())
    print(HEAD.format(version=Path(path).resolve().name.removeprefix("libcuda.so.")), end="")
    print(*lines(path, {name for names in modelled for name in names}), sep="\n")


if __name__ == "__main__":
    main()
