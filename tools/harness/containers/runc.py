# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""runc, on machines as they are: with "/" on a disk, on the initial RAM disk, or in a plain chroot."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import IO

from agent.core.errors import SetupError

_START_SECONDS = 30


class ContainerError(SetupError):
    """A container cannot be started; where runc refused, the message is its own."""


def run(state: Path, folder: Path, output: Path | None) -> subprocess.Popen[str]:
    """pivot_root is refused where / is the initial RAM disk or a plain chroot; moving the mount works there."""
    try:
        return _run_once(state, folder, output, [])
    except ContainerError as error:
        if "pivot_root" not in str(error):
            raise
        return _run_once(state, folder, output, ["--no-pivot"])


def _run_once(state: Path, folder: Path, output: Path | None, options: list[str]) -> subprocess.Popen[str]:
    command = [
        *_own_root(state),
        *_runc(state),
        "run",
        "--detach",
        *options,
        "--bundle",
        str(folder),
        "--pid-file",
        str(folder / "pid"),
    ]
    log = folder / "stderr"
    with log.open("w") as errors, (output or Path(os.devnull)).open("a") as target:
        process = subprocess.Popen(
            [*command, folder.name],
            stdin=subprocess.PIPE,
            stdout=target if output else subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # Ctrl-C is for us: we stop the container
        )
    try:
        if process.wait(_START_SECONDS) == 0:
            return process
        raise ContainerError(f"runc could not start {folder.name}: {log.read_text(errors='replace').strip()}")
    except BaseException:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                close(stream)
        raise
    finally:
        while os.path.ismount(state / "root"):  # where mounts are shared, the one of _own_root came out to us
            subprocess.run(["mount", "--make-rprivate", state / "root"], check=True)  # or / itself would go too
            subprocess.run(["umount", "--lazy", state / "root"], check=True)


def _own_root(state: Path) -> list[str]:
    """runc changes mounts at "/", which must be a mount point for that; in a plain chroot it gets one to start from."""
    points = (line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().split("\n") if line)
    if "/" in points:
        return []
    root = state / "root"
    root.mkdir(exist_ok=True)
    script = 'mount --rbind / "$0" && mount --make-rprivate "$0" && exec chroot "$0" "$@"'
    return ["unshare", "--mount", "--propagation", "unchanged", "sh", "-c", script, str(root)]


def delete(state: Path, name: str) -> None:
    """Makes runc forget a container; it may never have known it."""
    subprocess.run([*_runc(state), "delete", "--force", name], capture_output=True, check=False)


def close(stream: IO[str]) -> None:
    try:
        stream.close()
    except BrokenPipeError:  # what was still to be written has no reader any more
        return


def _runc(state: Path) -> list[str]:
    return ["runc", "--root", str(state / "runc")]
