# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What an image of ours has to be.

`python -m tools.shipping.image.check LAYOUT` says each thing that it is not, with exit code 1, and its size. The layout
is whole (digest and size of each descriptor, diff_id of each layer), and in it nothing is setuid, writable, anybody's
but root's, a shell or a package manager, and no link leads nowhere.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import posixpath
import stat
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_UNWANTED = frozenset({"apt", "apt-get", "bash", "busybox", "dash", "dpkg", "pip", "pip3", "sh", "sudo", "su"})
_LABELS = ("title", "description", "vendor", "licenses", "version", "revision", "created")
_COMMANDS = (["run"], ["fleet", "serve", "--help"])
_OF_THE_NODE = ("/proc/", "/dev/", "/sys/")
_MOST_LINKS = 40  # on one way, as Linux has it


def read_blob(layout: Path, descriptor: dict[str, Any], faults: list[str]) -> bytes:
    """What the descriptor means; a fault where it is another thing."""
    algorithm, _, digest = descriptor["digest"].partition(":")
    data: bytes = (layout / "blobs" / algorithm / digest).read_bytes()
    if hashlib.new(algorithm, data).hexdigest() != digest or len(data) != descriptor["size"]:
        faults.append(f"blob {digest} is not what its descriptor says")
    return data


def faults_of(layout: Path) -> tuple[list[str], str]:
    """What is wrong with the layout, and the image in one line."""
    faults: list[str] = []
    if json.loads((layout / "oci-layout").read_text()) != {"imageLayoutVersion": "1.0.0"}:
        faults.append("oci-layout: not version 1.0.0")
    [entry] = json.loads((layout / "index.json").read_text())["manifests"]
    manifest = json.loads(read_blob(layout, entry, faults))
    image = json.loads(read_blob(layout, manifest["config"], faults))
    referred = {one["digest"].partition(":")[2] for one in (entry, manifest["config"], *manifest["layers"])}
    faults += [f"blob {path.name} belongs to nothing" for path in layout.glob("blobs/*/*") if path.name not in referred]
    files: dict[str, tarfile.TarInfo] = {}
    unpacked = 0
    for layer, diff_id in zip(manifest["layers"], image["rootfs"]["diff_ids"], strict=True):
        data = gzip.decompress(read_blob(layout, layer, faults))
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != diff_id:
            faults.append(f"layer {layer['digest']} does not unpack to its diff_id")
        unpacked += len(data)
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            files |= {entry.name: entry for entry in tar}
    faults += [*_of_configuration(image["config"]), *_of_files(files)]
    packed = sum(layer["size"] for layer in manifest["layers"])
    return faults, f"{entry['digest']}: {len(files)} files, {_mib(unpacked)}, {_mib(packed)} compressed"


def _of_configuration(config: dict[str, Any]) -> Iterator[str]:
    labels = config.get("Labels", {})
    for name in _LABELS:
        if not labels.get(f"org.opencontainers.image.{name}"):
            yield f"label org.opencontainers.image.{name} is missing"
    if config.get("Entrypoint") != ["/usr/bin/gpuwarden"] or config.get("Cmd") not in _COMMANDS:
        yield f"it starts {config.get('Entrypoint')} {config.get('Cmd')}"
    if not config.get("User", "").replace(":", "").isdecimal():
        yield f"its user is {config.get('User')!r}, not a number"


def _of_files(files: dict[str, tarfile.TarInfo]) -> Iterator[str]:
    for name, entry in files.items():
        if entry.uid or entry.gid:
            yield f"{name} is not root's"
        if entry.mode & (stat.S_ISUID | stat.S_ISGID):
            yield f"{name} is setuid or setgid"
        if entry.mode & 0o222 and not entry.issym() and not entry.mode & stat.S_ISVTX:
            yield f"{name} is writable"
        if posixpath.basename(name) in _UNWANTED and not entry.isdir():
            yield f"{name} is in it"
        if entry.issym() and not _leads_somewhere(files, name):
            yield f"{name} leads nowhere: {entry.linkname}"


def _leads_somewhere(files: dict[str, tarfile.TarInfo], name: str) -> bool:
    """Whether the way to it, with every link on it followed, ends at something that is there."""
    left, done = name.split("/"), ""
    for _ in range(_MOST_LINKS * 20):
        if not left:
            return True
        step = posixpath.normpath(f"/{done}/{left.pop(0)}").lstrip("/")
        entry = files.get(step)
        if not step:
            done = ""
        elif entry is None:
            return f"/{step}/".startswith(_OF_THE_NODE)
        elif entry.issym():
            target = posixpath.join("/", posixpath.dirname(step), entry.linkname)
            left, done = [part for part in target.split("/") if part] + left, ""
        else:
            done = step
    return False


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"


if __name__ == "__main__":
    found, summary = faults_of(Path(sys.argv[1]))
    for fault in found:
        print(f"check: {fault}", file=sys.stderr)
    print(summary)
    sys.exit(1 if found else 0)
