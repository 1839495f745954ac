# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m conformance.bundle`: one folder with all that `conformance/run` needs on a machine with a GPU and little
else.

It is laid out as the checkout is, so everything finds its files where it always does. Packages are of the versions that
are installed here, which the tests ran with; pip gets them as wheels for the Python of that machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from conformance.machine_state import ROOT
from conformance.report.writer import code_version
from tools.shipping.closure import requirements

MOST_BYTES: Final = 50_000_000
PYTHON: Final = "3.12"
BUILD: Final = ROOT / "build"
SOURCES: Final = (
    "agent",
    "enforce",
    "gpuwarden",
    "bench",
    "conformance",
    "tools/__init__.py",
    "tools/harness",
    "pyproject.toml",
)
LEFT_OUT: Final = ("bench/results/",)
SUFFIXES: Final = (".py", ".csv", ".css", ".html", ".js", ".toml")
OBJECTS: Final = ("bpf/build", "build/bpf")  # the product's programs, and those that only measure
PROGRAMS: Final = ("sim/build/bin", "sim/build/lib")
LIBRARY: Final = "libbpf.so.1"  # and what it needs
_LOADS: Final = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(open('/proc/self/maps').read())"
_OF_THE_SYSTEM: Final = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2")
_NEWEST_MANYLINUX: Final = 36  # glibc 2.36, as our own programs are built against on Debian 12


class BundleError(Exception):
    """The bundle cannot be made; one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m conformance.bundle",
        description="Makes a folder that checks GPU Warden on a real GPU: its `run` needs Python, the NVIDIA driver "
        "and no network.",
    )
    parser.add_argument("--python", default=PYTHON, metavar="X.Y", help=f"of the machine that it is for ({PYTHON})")
    parser.add_argument("--out", type=Path, default=BUILD / "gpu-bundle", metavar="DIR", help="(build/gpu-bundle)")
    given = parser.parse_args(argv)
    try:
        make(given.out, given.python)
    except (BundleError, OSError) as error:
        print(f"gpu-bundle: {error}", file=sys.stderr)
        return 1
    return 0


def make(out: Path, python: str) -> None:
    """Makes the bundle, whole or not at all. BundleError."""
    if platform.machine() != "x86_64":
        raise BundleError(f"the programs built here are for {platform.machine()}, and the bundle is for x86_64")
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    copy_sources(partial)
    copy_built(partial)
    libraries = copy_libraries(partial / "lib")
    wheels = copy_wheels(partial / "wheels", python)
    shutil.copy2(ROOT / "conformance" / "run", partial / "run")
    (partial / "PYTHON").write_text(f"{python}\n")
    (partial / "VERSION").write_text(f"{code_version()}\n")
    manifest = {
        "version": code_version(),
        "python": python,
        "glibc": newest_glibc(partial),
        "libraries": libraries,
        "wheels": sorted(wheel.name for wheel in wheels),
    }
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    size = size_bytes(partial)
    if size > MOST_BYTES:
        raise BundleError(f"{partial} has {size:,} bytes, more than {MOST_BYTES:,}: leave something out")
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)
    parts = ", ".join(f"{path.name} {size_bytes(path) / 1e6:.1f}" for path in sorted(out.iterdir()) if path.is_dir())
    print(f"{out}: {size / 1e6:.1f} MB of at most {MOST_BYTES / 1e6:.0f} ({parts}); glibc {manifest['glibc']} or later")


def copy_sources(to: Path) -> None:
    """Python and what it reads. Also an entry that says that gpuwarden is installed, and its version."""
    for path in _tracked():
        if path.suffix in SUFFIXES and not str(path).startswith(LEFT_OUT):
            (to / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, to / path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entry = to / f"{project['name']}-{project['version']}.dist-info"
    entry.mkdir()
    text = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (entry / "METADATA").write_text(text)


def _tracked() -> list[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *SOURCES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BundleError(f"git does not list the sources: {done.stderr.strip()}")
    return [Path(name) for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def copy_built(to: Path) -> None:
    """BPF objects, workloads, and the simulated GPU, with which the same folder is tried where there is no GPU."""
    for folder in OBJECTS:
        for path in (ROOT / folder).glob("*.bpf.o"):
            (to / "bpf" / "build").mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to / "bpf" / "build" / path.name)
    for folder in PROGRAMS:
        shutil.copytree(ROOT / folder, to / folder, symlinks=True)


def copy_libraries(to: Path) -> list[str]:
    """libbpf and all that it needs, but for glibc, as this machine has them. Their names, the needed ones first."""
    to.mkdir()
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            _LOADS,
            LIBRARY,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BundleError(f"{LIBRARY} does not load here: {done.stderr.strip().splitlines()[-1]}")
    mapped = {Path(line.split(maxsplit=5)[5]) for line in done.stdout.splitlines() if ".so" in line}
    files = {_soname(path): path for path in sorted(mapped)}
    order: list[str] = []
    _needed(LIBRARY, files, order)
    for name in order:
        shutil.copyfile(files[name], to / name)
    (to / "ORDER").write_text("".join(f"{name}\n" for name in order))
    return order


def _needed(name: str, files: dict[str, Path], order: list[str]) -> None:
    for below in _dynamic(files[name], "DT_NEEDED"):
        if below not in _OF_THE_SYSTEM and below not in order:
            _needed(below, files, order)
    order.append(name)


def _soname(path: Path) -> str:
    return next(_dynamic(path, "DT_SONAME"), path.name)


def _dynamic(path: Path, kind: str) -> Iterator[str]:
    """Names of that kind in a library's dynamic section."""
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        section: Any = ELFFile(file).get_section_by_name(".dynamic")
        if section is not None:
            attribute = {"DT_NEEDED": "needed", "DT_SONAME": "soname"}[kind]
            yield from (getattr(tag, attribute) for tag in section.iter_tags() if tag.entry.d_tag == kind)


def newest_glibc(folder: Path) -> str:
    """The newest glibc that a program or library in the folder asks for. Wheels have theirs in their names."""
    asked = [version for path in sorted(folder.rglob("*")) if _is_elf(path) for version in _asked(path)]
    return ".".join(map(str, max(asked, default=(0,))))


def _is_elf(path: Path) -> bool:
    if not path.is_file() or path.suffix in (".o", ".py"):
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _asked(path: Path) -> Iterator[tuple[int, ...]]:
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        section: Any = ELFFile(file).get_section_by_name(".gnu.version_r")
        for _, versions in section.iter_versions() if section is not None else ():
            for version in versions:
                if version.name.startswith("GLIBC_2."):
                    yield tuple(int(part) for part in version.name.removeprefix("GLIBC_").split("."))


def copy_wheels(to: Path, python: str) -> list[Path]:
    """Fetched once for these versions; afterwards no network is needed."""
    installed = _pip("list", "--format=freeze", "--exclude-editable").stdout
    key = hashlib.sha256("\n".join([python, *requirements(), installed]).encode()).hexdigest()[:16]
    kept = BUILD / f"gpu-wheels-{python}-{key}"
    if not kept.is_dir():
        _fetch(kept, python, installed)
    shutil.copytree(kept, to)
    wheels = sorted(to.glob("*.whl"))
    for wheel in wheels:
        if any(".data/purelib/" in name or ".data/platlib/" in name for name in zipfile.ZipFile(wheel).namelist()):
            raise BundleError(f"{wheel.name} keeps modules apart, so unpacking it does not install it")
    return wheels


def _fetch(kept: Path, python: str, installed: str) -> None:
    partial = kept.with_name(f"{kept.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    constraints = partial / "constraints.txt"
    constraints.write_text(installed)
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(_NEWEST_MANYLINUX, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    _pip(
        "download", "--quiet", "--only-binary=:all:", "--python-version", python, "--implementation", "cp",
        *(f"--platform={name}" for name in platforms),
        "--constraint", str(constraints), "--dest", str(partial), *requirements(),
    )  # fmt: skip
    constraints.unlink()
    os.replace(partial, kept)


def size_bytes(folder: Path) -> int:
    """Size of all files in a folder; links count nothing."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BundleError(f"pip {arguments[0]}: {' '.join(done.stderr.split())[-600:]}")
    return done


if __name__ == "__main__":
    sys.exit(main())
