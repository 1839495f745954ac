# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A container image of a static busybox, and of other static programs, as an archive that every runtime can load."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_image(archive: Path, tag: str, labels: dict[str, str] | None = None, programs: Sequence[Path] = ()) -> None:
    """Writes the image in the layout of `docker save`, with `programs` in /bin."""
    layer = _layer(programs)
    digest = hashlib.sha256(layer).hexdigest()
    configuration = {"Cmd": ["sleep", "1000"], "Env": ["PATH=/bin"], "Labels": labels or {}}
    config = _json(
        {
            "architecture": _ARCHITECTURES[_machine()],
            "os": "linux",
            "config": configuration,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            "history": [{"created": "2026-01-01T00:00:00Z"}],
        }
    )
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = _json([{"Config": name, "RepoTags": [tag], "Layers": [f"{digest}/layer.tar"]}])
    with tarfile.open(archive, "w") as files:
        for path, content in ((name, config), (f"{digest}/layer.tar", layer), ("manifest.json", manifest)):
            _add(files, path, content)


def _layer(programs: Sequence[Path]) -> bytes:
    content = io.BytesIO()
    busybox = shutil.which("busybox")
    assert busybox, "install busybox-static: packaging/setup.sh test"
    with tarfile.open(fileobj=content, mode="w") as files:
        for folder in ("bin", "dev", "etc", "proc", "sys", "tmp"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            files.addfile(entry)
        _add(files, "bin/busybox", Path(busybox).read_bytes(), 0o755)
        for program in programs:
            _add(files, f"bin/{program.name}", program.read_bytes(), 0o755)
        for applet in ("sh", "sleep"):
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            files.addfile(link)
    return content.getvalue()


def _add(files: tarfile.TarFile, path: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = len(content), mode
    files.addfile(entry, io.BytesIO(content))


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _machine() -> str:
    import platform

    return platform.machine()
