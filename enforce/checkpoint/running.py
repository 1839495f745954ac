# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whether a process runs, so that the driver's own thread in it can take part: not stopped, traced or frozen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from agent.errors import GoneError
from agent.model import ProcessId
from agent.procfs import Procfs

_AGAIN_SECONDS = 0.005
_HELD = "Tt"
_START_TICKS = 0xFFFFFFFF  # the probes carry 32 bits of it


def check_identity(process: ProcessId, procfs: Procfs) -> None:
    """GoneError when the pid is another process's now, or nobody's."""
    found = procfs.stat(process.tgid)
    if found.dead or (found.start_ticks - process.start_ticks) & _START_TICKS:
        raise GoneError(f"process {process.tgid} has ended")


def what_holds(tgid: int, procfs: Procfs, cgroups: Path = Path("/sys/fs/cgroup")) -> str | None:
    """Why it does not run, as people say it; None: it runs."""
    if procfs.stat(tgid).state in _HELD:
        return "it is stopped"
    frozen = any(_is_frozen(path) for path in _freezers(procfs.cgroup(tgid), cgroups))
    return "its cgroup is frozen" if frozen else None


def wait_until_it_runs(tgid: int, procfs: Procfs, limit_seconds: float) -> str | None:
    """None as soon as it runs; why not, if that is not within the limit. Pacing stops a process for moments only."""
    ends = time.monotonic() + limit_seconds
    while (held := what_holds(tgid, procfs)) is not None and time.monotonic() < ends:
        time.sleep(_AGAIN_SECONDS)
    return held


def _freezers(text: str, cgroups: Path) -> Iterator[Path]:
    """The files that say so: of cgroup v2, wherever it is mounted, and of v1."""
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        below = path.lstrip("/")
        if "freezer" in controllers.split(","):
            yield cgroups / "freezer" / below / "freezer.state"
        elif number == "0" and not controllers:
            yield cgroups / below / "cgroup.events"
            yield cgroups / "unified" / below / "cgroup.events"


def _is_frozen(path: Path) -> bool:
    with suppress(OSError):
        text = path.read_text(encoding="ascii", errors="replace")
        return "frozen 1" in text or text.startswith(("FROZEN", "FREEZING"))
    return False
