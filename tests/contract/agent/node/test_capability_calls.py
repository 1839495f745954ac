# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Each call that agent/node/preflight.py names, with its capability alone and without it: the kernel's own word.

What loads programs and attaches probes is in tests/e2e/packaging/test_capabilities.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.node.preflight import CAPABILITIES
from tests.support.groups import group

ROOT = Path(__file__).parents[4]
NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give rights away")

OPEN_MAPPED = """\
import sys
from agent.node.procfs import Procfs

process = Procfs().process_id(int(sys.argv[1]))
[file] = [*Procfs().mapped(process.tgid, "program".__eq__)]
Procfs().open_mapped(process, file)
"""
OPEN_ROOT = """\
import sys
from agent.node.procfs import Procfs

Procfs().open_inside(Procfs().process_id(int(sys.argv[1])), "/etc/passwd")
"""
READ_ENVIRON = "import sys; from agent.node.procfs import Procfs; Procfs().environ(int(sys.argv[1]), ['HOME'])"
RESUME = "import os, signal, sys; signal.pidfd_send_signal(os.pidfd_open(int(sys.argv[1])), signal.SIGCONT)"
HURRY = "import os; os.setpriority(os.PRIO_PROCESS, 0, -20)"
MARK = """\
import os, sys
from enforce.actuators.freezer.cgroup import Cgroup, FreezerCgroup
with Cgroup(FreezerCgroup.of(2, sys.argv[1])) as cgroup:
    assert cgroup.claim() and cgroup.marked()
    cgroup.unmark()
"""


@dataclass(frozen=True, slots=True)
class Other:
    """A process, and the file that it has mapped and that was deleted."""

    tgid: int
    mapped: str


def works(names: Sequence[str], program: str, *arguments: str) -> bool:
    """Whether user 0 can do it with these capabilities alone. Else the kernel refused, and nothing else went wrong."""
    kept = ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for name in names)])
    command = ["setpriv", "--no-new-privs", "--inh-caps=-all", f"--bounding-set={kept}", sys.executable, "-c", program]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        assert "not permitted" in done.stderr or "not allowed" in done.stderr or "denied" in done.stderr, done.stderr
    return done.returncode == 0


@contextmanager
def other(folder: Path, uid: int) -> Iterator[Other]:
    """Its own program is the file. In a session of its own: in ours every process may resume it."""
    mapped = folder / "program"
    shutil.copy("/usr/bin/sleep", mapped)
    process = subprocess.Popen([mapped, "3600"], user=uid, group=uid, extra_groups=[], start_new_session=True)
    mapped.unlink()
    try:
        yield Other(process.pid, str(mapped))
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def anothers() -> Iterator[Other]:
    """Another user's process."""
    folder = Path(f"/tmp/gpuwarden-capabilities-{os.getpid()}")  # pytest's own folders are closed to others
    folder.mkdir()
    try:
        with other(folder, NOBODY) as made:
            yield made
    finally:
        folder.rmdir()


@pytest.fixture
def roots(tmp_path: Path) -> Iterator[Other]:
    """A process of root's, with all of root's rights."""
    with other(tmp_path, 0) as made:
        yield made


def test_sys_ptrace_opens_the_root_of_a_process_that_has_more_rights(roots: Other) -> None:
    assert works(["CAP_SYS_PTRACE"], OPEN_ROOT, str(roots.tgid))
    assert not works(["CAP_DAC_READ_SEARCH"], OPEN_ROOT, str(roots.tgid))


def test_dac_read_search_reads_what_another_users_process_was_started_with(anothers: Other) -> None:
    both = ["CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"]
    assert works(both, READ_ENVIRON, str(anothers.tgid))
    for name in both:
        assert not works([name], READ_ENVIRON, str(anothers.tgid))


@pytest.mark.parametrize("name", ["CAP_CHECKPOINT_RESTORE", "CAP_SYS_ADMIN"])
def test_checkpoint_restore_or_sys_admin_opens_a_deleted_file_that_a_process_has_mapped(
    name: str, anothers: Other
) -> None:
    both = ["CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"]
    assert works([*both, name], OPEN_MAPPED, str(anothers.tgid), anothers.mapped)
    assert not works(both, OPEN_MAPPED, str(anothers.tgid), anothers.mapped)


def test_kill_resumes_another_users_process(anothers: Other) -> None:
    assert works(["CAP_KILL"], RESUME, str(anothers.tgid))
    assert not works(["CAP_SYS_PTRACE"], RESUME, str(anothers.tgid))


def test_sys_nice_raises_the_priority() -> None:
    assert works(["CAP_SYS_NICE"], HURRY)
    assert not works([], HURRY)


def test_sys_admin_marks_a_cgroup() -> None:
    with group(2) as box:
        assert works(["CAP_SYS_ADMIN"], MARK, str(box.folder))
        assert not works(["CAP_DAC_READ_SEARCH"], MARK, str(box.folder))


def test_every_capability_is_tried_somewhere() -> None:
    tried = Path(__file__).read_text() + (ROOT / "tests/e2e/packaging/test_capabilities.py").read_text()
    assert all(one.name in tried for one in CAPABILITIES)
