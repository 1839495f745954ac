# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden demo` as a process, and what is left of one: temporary files, cgroups, mounts, processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.node import is_gone
from tools.harness import cgroups

SECONDS = "8"
DEADLINE_SECONDS = 300.0


@contextmanager
def demo(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The demo, with its temporary files in `folder`, in a process group of its own as a shell starts it."""
    command = [sys.executable, "-P", "-m", "gpuwarden", "demo", "--seconds", SECONDS, "--plain"]
    for name in ("agent", "enforce", "gpuwarden"):
        decoy = folder / "elsewhere" / name / "__init__.py"
        decoy.parent.mkdir(parents=True)
        decoy.write_text("raise SystemExit('a decoy was run')\n")
    temporary = folder / "tmp"
    temporary.mkdir()
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(
            command,
            cwd=folder / "elsewhere",
            env={**os.environ, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"},
            stdout=out,
            stderr=err,
            process_group=0,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=DEADLINE_SECONDS)


def left_behind(folder: Path, pid: int) -> list[str]:
    """Everything of a demo that is still there."""
    found = [str(path) for path in (folder / "tmp").iterdir()]
    found += [str(path) for path in cgroups.folders(f"/gpuwarden-demo-{pid}")]
    found += [line for line in Path("/proc/self/mountinfo").read_text().split("\n") if str(folder) in line]
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid() and not is_gone(int(path.name)):
            try:
                words = (path / "environ").read_bytes() + (path / "cmdline").read_bytes()
            except OSError:  # it ended meanwhile
                continue
            if os.fsencode(folder / "tmp") in words:
                found.append(f"process {path.name}")
    return found
