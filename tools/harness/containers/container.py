# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Real containers for tests, benches and the demo: runc, with the cgroup path of whichever runtime is asked for.

What a container needs on the host (cgroups, mounts, files) is written down before it is made, so that `stop`, or after
a crash `sweep`, can always take it away again.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

from tools.harness import cgroups
from tools.harness.containers import runc
from tools.harness.containers.oci_bundle import Mount, unmount_root, write_bundle
from tools.harness.containers.runc import ContainerError

STATE = Path(os.environ.get("GPUWARDEN_CONTAINERS", "/run/gpuwarden-containers"))


@dataclass(slots=True)
class Container:
    """A running container. Leave its `with` block, or call `stop`, and nothing of it is left on the host."""

    name: str
    cgroup_path: str
    tgid: int  # of its first process, as the host counts
    stdin: IO[str]
    stdout: IO[str] | None  # None when it writes to a file
    state: Path
    _pidfd: int = field(repr=False)

    @classmethod
    def start(
        cls,
        name: str,
        args: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        cgroup_path: str | None = None,
        mounts: Sequence[Mount] = (),
        overlay_lower: Path | None = None,
        output: Path | None = None,
        state: Path = STATE,
    ) -> Container:
        """Runs `args` with the host's programs in a container of its own; `output`: a file for its stdout.

        `cgroup_path` decides what it looks like: "/docker/<64 hex>", "/kubepods/besteffort/pod<uid>/<64 hex>", …
        Its stderr goes to a file that `errors` reads. ContainerError when it cannot be started.
        """
        cgroup = cgroup_path or f"/gpuwarden/{name}"
        folder = state / "containers" / name
        with _registry() as made:
            made.update(_claim(folder, cgroup))
            try:
                write_bundle(folder, args, env or {}, cgroup, mounts, overlay_lower)
                process = runc.run(state, folder, output)
                tgid = int((folder / "pid").read_text())
                assert process.stdin
                return cls(name, cgroup, tgid, process.stdin, process.stdout, state, os.pidfd_open(tgid))
            except BaseException:
                _remove(state, folder, made)
                raise

    def errors(self) -> str:
        """What it wrote to stderr so far; for as long as it is not stopped."""
        return (self.state / "containers" / self.name / "stderr").read_text(errors="replace")

    def alive(self) -> bool:
        """Whether its first process still runs."""
        return not self.wait(0)

    def wait(self, timeout_seconds: float) -> bool:
        """Whether its first process ended within that time."""
        if self._pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(timeout_seconds * 1000))

    def stop(self) -> None:
        """Kills it and removes whatever it needed on the host. Doing it twice does no harm."""
        for stream in (self.stdin, self.stdout):
            if stream is not None:
                runc.close(stream)
        with _registry() as made:
            _remove(self.state, self.state / "containers" / self.name, made)
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def __enter__(self) -> Container:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def sweep(prefix: str = "", state: Path = STATE) -> list[str]:
    """Removes containers that a killed run left behind, by the beginning of their names. Returns the names."""
    swept = []
    with _registry() as made:
        for record in sorted(state.glob(f"containers/{prefix}*/record.json")):
            _remove(state, record.parent, made)
            swept.append(record.parent.name)
    return swept


def _claim(folder: Path, cgroup: str) -> list[Path]:
    """Writes down what is about to be made; returns the cgroup directories among it."""
    existing = [*cgroups.folders(cgroup), *([folder] if folder.exists() else [])]
    if existing:
        raise ContainerError(f"{existing[0]} exists already: sweep() removes what an earlier run left")
    folder.mkdir(parents=True)
    missing = cgroups.missing(cgroup)
    record = {"cgroup_path": cgroup, "missing": [str(path) for path in missing]}
    (folder / "record.json").write_text(json.dumps(record))
    return missing


def _remove(state: Path, folder: Path, made: set[Path]) -> None:
    if not folder.exists():
        return
    record = json.loads((folder / "record.json").read_text())
    made.update(Path(path) for path in record["missing"])
    cgroups.empty(record["cgroup_path"])
    runc.delete(state, folder.name)
    unmount_root(folder)
    made.intersection_update(cgroups.remove(record["cgroup_path"], made))
    shutil.rmtree(folder)


@contextmanager
def _registry() -> Iterator[set[Path]]:
    """The cgroup directories that we made, under a lock: one for the whole machine, since containers share parents.

    The mount that they are made in is also in it, where it is ours, and goes after the last of them.
    """
    STATE.mkdir(parents=True, exist_ok=True)
    with (STATE / "cgroups").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        made = {Path(line) for line in file.read().split("\n") if line}
        if cgroups.mount_if_none():
            made.add(cgroups.PLACE)
        try:
            yield made
        finally:
            if made == {cgroups.PLACE}:
                cgroups.unmount()
                made.clear()
            file.truncate(0)
            file.write("".join(f"{path}\n" for path in sorted(made)))
