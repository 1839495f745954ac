# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A cgroup namespace of our own, as containers have where cgroups are v2, and the way out of it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.node import cgroups as cgroup_namespace
from tools.harness import cgroups

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="cgroups and namespaces need root")
# Prints what the thread sees before and after joining, and what a thread that it starts then sees.
INSIDE = """
import json, os, sys, threading
from pathlib import Path
from agent.node.cgroups import hierarchies, join_node_namespace, parse_mounts
def seen():
    mounts = parse_mounts(Path("/proc/thread-self/mountinfo").read_text())
    return [Path("/proc/thread-self/cgroup").read_text(), [hierarchy.point for hierarchy in hierarchies(mounts)]]
def later():
    views.append(seen())
views = [seen()]
joined = join_node_namespace()
views.append(seen())
thread = threading.Thread(target=later)
thread.start()
thread.join()
print(json.dumps([joined, *views]))
"""


@pytest.fixture
def group() -> Iterator[str]:
    """A cgroup, in every hierarchy."""
    path = f"/gpuwarden-namespace-{secrets.token_hex(4)}"
    made = cgroups.missing(path)
    for folder in made:
        folder.mkdir()
    try:
        yield path
    finally:
        assert not cgroups.remove(path, made)


def enter(path: str) -> None:
    for folder in cgroups.folders(path):
        for name in ("cpuset.cpus", "cpuset.mems"):  # v1 wants these first
            if (folder / name).exists() and not (folder / name).read_text().strip():
                (folder / name).write_text((folder.parent / name).read_text())
        (folder / "cgroup.procs").write_text(str(os.getpid()))


def test_out_of_a_namespace_of_its_own_the_agent_sees_what_the_node_sees(group: str) -> None:
    command = ["unshare", "--cgroup", sys.executable, "-c", INSIDE]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=lambda: enter(group), timeout=60)
    assert done.returncode == 0, done.stderr
    joined, inside, outside, thread = json.loads(done.stdout)
    assert joined
    assert inside[1] == []
    assert f":{group}" not in inside[0]
    assert f":{group}\n" in outside[0]
    assert [Path(place) for place in outside[1]]
    assert thread == outside


def test_where_it_sees_what_the_node_sees_nothing_is_done() -> None:
    before = os.readlink("/proc/thread-self/ns/cgroup")
    assert cgroup_namespace.join_node_namespace()
    assert os.readlink("/proc/thread-self/ns/cgroup") == before


def test_a_process_that_may_not_join_logs_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    own = tmp_path / "cgroup"
    own.symlink_to("cgroup:[1]")
    monkeypatch.setattr(cgroup_namespace, "_OWN", str(own))
    monkeypatch.setattr(cgroup_namespace, "_node_namespace", lambda: str(tmp_path / "gone"))
    assert not cgroup_namespace.join_node_namespace()
    assert "nothing is frozen" in caplog.text
