# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Writes an OCI image layout out of folders, one layer each, without any engine.

`python -m tools.shipping.image.layout --help` says how. What the image says of itself (entry point, labels, user) is
read out of a stage of the Containerfile, so that both ways of building agree. The same folders give the same
digest: entries are sorted, owned by root, without write permission and of one time; the compression has no time stamp.
Prints the digest of the manifest, and sizes. Source: OCI image specification 1.0 (image-layout.md, config.md,
layer.md).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import platform
import re
import shlex
import stat
import string
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, cast

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_FOR_A_STEP = ("RUN", "COPY", "ADD", "SHELL")  # what makes a layer; here the layers are made already


class LayoutError(Exception):
    """Something that an image cannot be made of; the message says what to change."""


@dataclass(frozen=True)
class Layer:
    """One that is written: its digest as it lies there and as it is unpacked, and both sizes in bytes."""

    digest: str
    diff_id: str
    compressed_bytes: int
    bytes: int


class Hashed:
    """A stream that counts and hashes what is written."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out, self._hash, self.bytes = out, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        """Writes all of it."""
        self._hash.update(data)
        self.bytes += len(data)
        self._out.write(data)
        return len(data)

    def flush(self) -> None:
        """Does nothing: the stream belongs to the caller."""

    @property
    def digest(self) -> str:
        """The digest of everything so far."""
        return f"sha256:{self._hash.hexdigest()}"


def configuration(containerfile: str, arguments: Mapping[str, str], stage: str | None = None) -> dict[str, Any]:
    """The image's own configuration, as the last stage, or that of this name, has it. LayoutError: not understood."""
    config: dict[str, Any] = {}
    known = dict(arguments)
    stages: dict[str, dict[str, Any]] = {}
    for word, rest in _instructions(containerfile):
        if word == "FROM":
            config = stages[rest.rpartition(" AS ")[2]] = {}
        elif word == "ARG":
            name, _, default = rest.partition("=")
            known.setdefault(name, default.strip('"'))
        elif word not in _FOR_A_STEP:
            _apply(config, word, string.Template(rest).substitute(known))
    if stage is not None and stage not in stages:
        raise LayoutError(f"the Containerfile has no stage {stage}: one of {', '.join(stages)}")
    config = config if stage is None else stages[stage]
    return {key: value for key, value in config.items() if value}


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.split("\n") if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).split("\n"):
        word, _, rest = line.strip().partition(" ")
        if word:
            yield word.upper(), rest.strip()


def _apply(config: dict[str, Any], word: str, rest: str) -> None:
    if word in ("ENTRYPOINT", "CMD"):
        if not rest.startswith("["):
            raise LayoutError(f'{word} {rest}: write it as a list, {word} ["…"]: the image has no shell')
        config[word.capitalize()] = json.loads(rest)
    elif word in ("LABEL", "ENV"):
        pairs = dict(pair.split("=", 1) for pair in shlex.split(rest))
        if word == "ENV":
            config.setdefault("Env", []).extend(f"{name}={value}" for name, value in pairs.items())
        else:  # a label without a value is left out
            config.setdefault("Labels", {}).update({name: value for name, value in pairs.items() if value})
    elif word in ("USER", "WORKDIR", "STOPSIGNAL"):
        config[{"USER": "User", "WORKDIR": "WorkingDir", "STOPSIGNAL": "StopSignal"}[word]] = rest
    else:
        raise LayoutError(f"{word}: such a stage may have none; see tools/shipping/image/layout.py")


def write_layer(folder: Path, blobs: Path, created: int) -> Layer:
    """The folder's contents as a compressed layer. LayoutError for what does not belong into an image."""
    partial = blobs / "layer.partial"
    with partial.open("wb") as file:
        outer = Hashed(file)
        with gzip.GzipFile(
            filename="", mode="wb", compresslevel=9, fileobj=cast("IO[bytes]", outer), mtime=0
        ) as packed:
            inner = Hashed(cast("IO[bytes]", packed))
            with tarfile.open(mode="w|", fileobj=cast("IO[bytes]", inner), format=tarfile.PAX_FORMAT) as tar:
                for path in _sorted(folder):
                    _add(tar, path, path.relative_to(folder).as_posix(), created)
    partial.rename(blobs / outer.digest.removeprefix("sha256:"))
    return Layer(outer.digest, inner.digest, outer.bytes, inner.bytes)


def _sorted(folder: Path) -> list[Path]:
    """All paths below, a folder before its entries."""
    return sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).parts)


def _add(tar: tarfile.TarFile, path: Path, name: str, created: int) -> None:
    facts = path.lstat()
    entry = tarfile.TarInfo(name)
    entry.mtime = created
    entry.mode = 0o555 if stat.S_ISDIR(facts.st_mode) or facts.st_mode & stat.S_IXUSR else 0o444
    if facts.st_mode & (stat.S_ISUID | stat.S_ISGID):
        raise LayoutError(f"{path} is setuid or setgid: nothing in the image may be")
    if stat.S_ISDIR(facts.st_mode):
        entry.type = tarfile.DIRTYPE
        if facts.st_mode & stat.S_ISVTX:  # /tmp
            entry.mode = 0o1777
        tar.addfile(entry)
    elif stat.S_ISLNK(facts.st_mode):
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, os.readlink(path), 0o777
        tar.addfile(entry)
    elif stat.S_ISREG(facts.st_mode):
        entry.size = facts.st_size
        with path.open("rb") as content:
            tar.addfile(entry, content)
    else:
        raise LayoutError(f"{path} is neither file, folder nor link: leave it out")


def write_layout(config: Mapping[str, Any], layers: Sequence[Path], created: int, name: str, dest: Path) -> str:
    """All of the layout; returns the manifest's digest. `name`: REPOSITORY:TAG."""
    blobs = dest / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    written = [write_layer(folder, blobs, created) for folder in layers]
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    image = {
        "architecture": ARCHITECTURES[platform.machine()],
        "config": config,
        "created": at,
        "history": [{"created": at, "created_by": f"layout.py --layer {folder.name}"} for folder in layers],
        "os": "linux",
        "rootfs": {"diff_ids": [layer.diff_id for layer in written], "type": "layers"},
    }
    described = _blob(blobs, CONFIG, image)
    manifest = {
        "annotations": config.get("Labels", {}),
        "config": described,
        "layers": [{"digest": one.digest, "mediaType": LAYER, "size": one.compressed_bytes} for one in written],
        "mediaType": MANIFEST,
        "schemaVersion": 2,
    }
    entry = _blob(blobs, MANIFEST, manifest)
    entry["annotations"] = {
        "io.containerd.image.name": name,
        "org.opencontainers.image.ref.name": name.rpartition(":")[2],
    }
    entry["platform"] = {"architecture": image["architecture"], "os": "linux"}
    _write_json(dest / "index.json", {"manifests": [entry], "schemaVersion": 2})
    _write_json(dest / "oci-layout", {"imageLayoutVersion": "1.0.0"})
    for folder, layer in zip(layers, written, strict=True):
        print(f"layer {folder.name}: {_mib(layer.bytes)} unpacked, {_mib(layer.compressed_bytes)} compressed")
    return str(entry["digest"])


def _blob(blobs: Path, kind: str, value: object) -> dict[str, Any]:
    """Writes it under its digest; returns what refers to it."""
    data = _json(value)
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"digest": f"sha256:{digest}", "mediaType": kind, "size": len(data)}


def _write_json(path: Path, value: object) -> None:
    path.write_bytes(_json(value))


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"


def main() -> None:
    """Command line: writes the layout."""
    parser = argparse.ArgumentParser(description="Writes an OCI image layout out of folders.")
    parser.add_argument("--containerfile", type=Path, required=True, help="whose stage says what the image is")
    parser.add_argument("--stage", metavar="NAME", help="of the Containerfile (default: the last)")
    parser.add_argument("--argument", action="append", default=[], metavar="NAME=VALUE", help="for its ARGs")
    parser.add_argument("--created", type=int, required=True, metavar="EPOCH", help="the time of everything in it")
    parser.add_argument("--name", required=True, metavar="REPOSITORY:TAG", help="what the image is called")
    parser.add_argument("--layer", type=Path, action="append", required=True, metavar="DIR", help="lowest first")
    parser.add_argument("dest", type=Path, help="where the layout is written; must not exist")
    options = parser.parse_args()
    try:
        arguments = dict(pair.split("=", 1) for pair in options.argument)
        config = configuration(options.containerfile.read_text(), arguments, options.stage)
        digest = write_layout(config, options.layer, options.created, options.name, options.dest)
    except (LayoutError, FileExistsError, KeyError) as error:
        sys.exit(f"layout: {error}")
    print(f"{options.name}@{digest}")


if __name__ == "__main__":
    main()
