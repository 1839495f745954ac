# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The lower layer of the image: the least of Debian 12 that runs the agent.

`python -m tools.shipping.image.base DEST --list FILE --cache DIR [--pinned FILE]`. No shell, no apt, no dpkg; of each
package only libraries, Python's own modules and the licence. Those modules are there as bytecode without their source,
as in the .deb: nothing could be compiled at run time, where nothing is writable. What scanners look for is kept as
distroless images keep it (var/lib/dpkg/status.d). Packages come from apt, which checks their signatures; FILE gets
"name=version sha256" of each, and with --pinned exactly those are taken, or the build fails.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import py_compile
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tools.shipping.image.needs import missing

PYTHON = "3.11"
PACKAGES = {
    "base-files": "the release, for scanners; texts of common licences",
    "ca-certificates": "the signal prometheus over https",
    "gcc-12-base": "the licence of libgcc and libstdc++",
    "libbpf1": "loads the probes",
    "libbz2-1.0": "Python's bz2",
    "libc6": "",
    "libelf1": "libbpf",
    "libexpat1": "Python itself",
    "libffi8": "ctypes",
    "libgcc-s1": "ending threads",
    "liblzma5": "Python's lzma",
    f"libpython{PYTHON}-minimal": "",
    f"libpython{PYTHON}-stdlib": "",
    "libsqlite3-0": "the usage ledger",
    "libssl3": "digests, TLS",
    "libstdc++6": "protobuf",
    "libuuid1": "Python's uuid",
    f"python{PYTHON}-minimal": "",
    "python3-minimal": "/usr/bin/python3",
    "zlib1g": "Python itself, libelf",
}
_KEEP = re.compile(
    rf"usr/lib/[a-z0-9_]+-linux-gnu/[^/]+\.so(\.[0-9.]+)?|usr/lib(64)?/ld-linux[^/]*|usr/bin/python3(\.\d+)?"
    rf"|usr/lib/python{PYTHON}/.*|usr/share/doc/[^/]+(/copyright)?|usr/share/common-licenses/.*"
    r"|usr/lib/os-release|etc/os-release|etc/debian_version|usr/share/ca-certificates/.*\.crt"
)
_OF_NO_USE = re.compile(
    rf"usr/lib/python{PYTHON}/(__pycache__|ensurepip|idlelib|lib2to3|pydoc_data|sitecustomize\.py|test|tkinter|turtle)\b.*"
)
_MERGED = ("bin", "lib", "lib64", "sbin")  # links to those below usr
_FILES = {
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/passwd": "root:x:0:0:root:/:/nonexistent\nnobody:x:65534:65534:nobody:/:/nonexistent\n",
}
_MOUNT_POINTS = ("dev", "proc", "run", "sys", "tmp", "var/lib")


class BaseError(Exception):
    """The layer cannot be made; the message says what to do."""


def download(cache: Path, pinned: Path | None) -> list[Path]:
    """The packages as files. BaseError where apt has none, or others than those that are pinned."""
    wanted = dict(line.split() for line in pinned.read_text().splitlines()) if pinned else dict.fromkeys(PACKAGES, "")
    cache.mkdir(parents=True, exist_ok=True)
    for old in cache.glob("*.deb"):
        old.unlink()
    done = subprocess.run(["apt-get", "download", *wanted], cwd=cache, capture_output=True, text=True)
    if done.returncode:
        output = done.stderr.strip()[-500:]
        raise BaseError(f"apt-get download: {output}; run apt-get update on a Debian 12, or give no --pinned")
    files = sorted(cache.glob("*.deb"))
    if len(files) != len(wanted):
        raise BaseError(f"apt-get downloaded {len(files)} packages of {len(wanted)}: empty {cache} and try again")
    for file in files if pinned else ():
        if wanted.get(name_and_version(file)) != sha256(file):
            raise BaseError(f"{file.name} is not the one that {pinned} names")
    return files


def name_and_version(package: Path) -> str:
    """ "libc6=2.36-9+deb12u13"."""
    return _dpkg_deb("--show", "--showformat=${Package}=${Version}", str(package)).decode()


def sha256(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def unpack(package: Path, dest: Path) -> None:
    """Unpacks what is kept of a package, and writes its entry for scanners."""
    kept = set()
    with (
        subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as process,
        tarfile.open(mode="r|", fileobj=process.stdout) as files,
    ):
        for entry in files:
            path = merged(entry.name)
            if not entry.isdir() and _KEEP.fullmatch(path) and not _OF_NO_USE.fullmatch(path):
                _write(files, entry, dest / path)
                kept.add(path)
    if process.returncode:
        raise BaseError(f"{package} cannot be read: remove it and try again")
    name = name_and_version(package).partition("=")[0]
    if not (dest / "usr/share/doc" / name / "copyright").exists():
        raise BaseError(f"{package.name} brings no copyright: add the package that does")
    _tell_scanners(package, name, dest, kept)


def merged(name: str) -> str:
    """Where it lies since /lib is /usr/lib: "./lib/x/y" → "usr/lib/x/y"."""
    path = name.removeprefix("./").strip("/")
    return f"usr/{path}" if path.partition("/")[0] in _MERGED else path


def _write(files: tarfile.TarFile, entry: tarfile.TarInfo, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if entry.issym():
        path.symlink_to(entry.linkname)
    elif entry.isreg():
        content = files.extractfile(entry)
        assert content
        with path.open("wb") as file:
            shutil.copyfileobj(content, file)
        path.chmod(0o755 if entry.mode & 0o100 else 0o644)
    else:
        raise BaseError(f"{entry.name} is neither file nor link")


def _tell_scanners(package: Path, name: str, dest: Path, kept: set[str]) -> None:
    control = _dpkg_deb("--field", str(package))
    folder = dest / "var/lib/dpkg/status.d"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(control.replace(b"\nVersion: ", b"\nStatus: install ok installed\nVersion: ", 1))
    sums = _dpkg_deb("--info", str(package), "md5sums").decode()
    there = {path for path in kept if not path.endswith(".py")}  # those become bytecode
    ours = [line for line in sums.splitlines(keepends=True) if merged(line.split(maxsplit=1)[1].strip()) in there]
    (folder / f"{name}.md5sums").write_text("".join(ours))


def finish(dest: Path) -> Iterator[str]:
    """What packages leave to their scripts; yields what had to go because a library of it is not taken."""
    for name in _MERGED:
        if (dest / "usr" / name).is_dir() or name == "lib":
            (dest / name).symlink_to(f"usr/{name}")
    for path, text in _FILES.items():
        (dest / path).parent.mkdir(parents=True, exist_ok=True)
        (dest / path).write_text(text)
    for path in _MOUNT_POINTS:
        (dest / path).mkdir(parents=True, exist_ok=True)
    (dest / "tmp").chmod(0o1777)
    _trust(dest)
    _compile(dest)
    for extension, lacking in missing([dest]).items():
        if extension.parent.name != "lib-dynload":
            raise BaseError(f"{extension} needs {', '.join(lacking)}: add the package to tools/shipping/image/base.py")
        extension.unlink()
        yield f"{extension.name.partition('.')[0]} ({', '.join(lacking)})"


def _trust(dest: Path) -> None:
    """As update-ca-certificates does it: all authorities in one file, where OpenSSL looks."""
    authorities = sorted((dest / "usr/share/ca-certificates").rglob("*.crt"))
    bundle = dest / "etc/ssl/certs/ca-certificates.crt"
    bundle.parent.mkdir(parents=True)
    bundle.write_text("".join(path.read_text().rstrip("\n") + "\n" for path in authorities))
    shutil.rmtree(dest / "usr/share/ca-certificates")
    link = dest / "usr/lib/ssl/cert.pem"
    link.parent.mkdir(parents=True)
    link.symlink_to("/etc/ssl/certs/ca-certificates.crt")


def _compile(dest: Path) -> None:
    """Compiles by hash, unchecked: file times do not matter then."""
    if sys.version_info[:2] != tuple(map(int, PYTHON.split("."))):
        raise BaseError(f"this is not Python {PYTHON}, whose bytecode is wanted: build on Debian 12")
    modules = dest / f"usr/lib/python{PYTHON}"
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    if not compileall.compile_dir(
        modules, maxlevels=20, quiet=2, legacy=True, stripdir=str(dest), prependdir="/", invalidation_mode=mode
    ):
        raise BaseError(f"{modules} has modules that cannot be compiled")
    for source in modules.rglob("*.py"):
        source.unlink()


def _dpkg_deb(*arguments: str) -> bytes:
    return subprocess.run(["dpkg-deb", *arguments], check=True, capture_output=True).stdout


def main() -> None:
    """Command line: makes the layer."""
    parser = argparse.ArgumentParser(description="Makes the lower layer of the image out of Debian's packages.")
    parser.add_argument("dest", type=Path, help="must not exist")
    parser.add_argument("--list", type=Path, required=True, metavar="FILE", help="gets what was taken")
    parser.add_argument("--pinned", type=Path, metavar="FILE", help="take exactly these: a --list of before")
    parser.add_argument("--cache", type=Path, required=True, metavar="DIR", help="where packages are downloaded to")
    options = parser.parse_args()
    try:
        files = download(options.cache, options.pinned)
        options.dest.mkdir(parents=True)
        for file in files:
            unpack(file, options.dest)
        left_out = sorted(finish(options.dest))
    except (BaseError, FileExistsError) as error:
        sys.exit(f"base: {error}")
    options.list.write_text("".join(f"{name_and_version(file)} {sha256(file)}\n" for file in files))
    print(f"base: {len(files)} packages; without Python's {', '.join(left_out)}")


if __name__ == "__main__":
    main()
