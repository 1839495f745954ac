# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whether the run left the machine as it was: it comes last. `conformance.machine_state` was read before the first
item."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from conformance import process_tree
from conformance.host import Host
from conformance.isolation import RUN_VARIABLE, STATE_FILE
from conformance.machine_state import MachineSettings, current_settings, state_from_json
from conformance.report.model import Row, Verdict, skipped

NAME: Final = "leftovers"
TITLE: Final = "what this run left behind"
SECONDS: Final = 10
LEAST_SECONDS: Final = 10  # it is never skipped
WHAT: Final = (
    "processes of this run are gone",
    "MPS daemons of this run are gone",
    "control groups of this run are gone",
    "{setting} of every GPU is as it was",
    "settings of the GPUs are as they were",
)


def rows(host: Host) -> Iterator[Row]:
    """Checks that nothing of ours is left, and that every setting is as before."""
    before, now = state_from_json((host.folder.parent / STATE_FILE).read_text()).before, current_settings()
    yield _none(WHAT[0], [process_tree.name(process) for process in _of_this_run()])
    yield _none(WHAT[1], [str(pid) for pid in now.daemons if pid not in before.daemons and _is_ours(pid)])
    yield _none(WHAT[2], [path for path in now.cgroups if path not in before.cgroups and not _is_others(path)])
    yield from compared(before, now)


def _none(what: str, left: list[str]) -> Row:
    verdict = Verdict.FAILED if left else Verdict.OK
    return Row(item=NAME, what=what, verdict=verdict, figure=len(left), baseline=0, note=", ".join(left))


def _variable() -> str:
    return f"{RUN_VARIABLE}={os.environ.get(RUN_VARIABLE, '')}"


def _of_this_run() -> list[process_tree.Process]:
    """Without this item, and what it has itself begun."""
    own = set(process_tree.descendants(os.getpid()))
    return [process for process in process_tree.with_variable(_variable()) if process not in own]


def _is_ours(pid: int) -> bool:
    return any(process.pid == pid for process in process_tree.with_variable(_variable()))


def _is_others(path: str) -> bool:
    """Belongs to another run: processes run in it or below it, and none is of this run. Or it has gone meanwhile."""
    inside: set[int] = set()
    for listed in Path(path).rglob("cgroup.procs"):
        with suppress(OSError, ValueError):  # it goes just now
            inside.update(int(word) for word in listed.read_text().split())
    if not inside:
        return not Path(path).exists()
    return not inside & {process.pid for process in process_tree.with_variable(_variable())}


def compared(before: MachineSettings, now: MachineSettings) -> Iterator[Row]:
    """A row for each setting of the GPUs."""
    if not before.settings:
        yield skipped(NAME, WHAT[4], f"they were not read at the start: {before.why_not or 'no GPU was found'}")
        return
    names = dict.fromkeys(name for settings in before.settings.values() for name in settings)
    for name in names:
        then = [settings.get(name, "") for settings in before.settings.values()]
        today = [now.settings.get(gpu, {}).get(name, "") for gpu in before.settings]
        yield Row(
            item=NAME,
            what=WHAT[3].format(setting=name),
            verdict=Verdict.OK if today == then else Verdict.FAILED,
            figure=", ".join(today),
            baseline=", ".join(then),
            note="" if today == then else now.why_not or "this run never sets it: another user did, or a bug",
        )
