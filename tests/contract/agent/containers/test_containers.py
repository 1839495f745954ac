# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Real runc containers: found from the host under the right name, and gone without a trace."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agent.containers import ContainerIndex
from agent.containers.identity import POD_UID
from agent.node.procfs import Procfs
from tools.harness import cgroups
from tools.harness.containers import Container, ContainerError, Mount, sweep
from tools.harness.wait import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="runc with real cgroups needs root")
ROOT = Path(__file__).parents[4]
PROC = Procfs()
UID = "8dbc5577-d0e2-4706-8787-57d52c03ddf2"
SLEEP = ["sleep", "1000"]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def name() -> str:
    return f"test-{secrets.token_hex(4)}"


@pytest.mark.parametrize(
    ("cgroup", "runtime", "pod"),
    [
        ("/docker/{id}", "docker", None),
        ("/system.slice/docker-{id}.scope", "docker", None),
        ("/kubepods/besteffort/pod" + UID + "/{id}", "containerd", UID),
        (
            "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod"
            + UID.replace("-", "_")
            + ".slice/cri-containerd-{id}.scope",
            "containerd",
            UID,
        ),
        ("/kubepods/besteffort/pod" + UID + "/crio-{id}", "cri-o", UID),
        ("/libpod_parent/libpod-{id}", "podman", None),
    ],
)
def test_a_container_is_found_from_the_host(state: Path, name: str, cgroup: str, runtime: str, pod: str | None) -> None:
    full_id = secrets.token_hex(32)
    path = cgroup.format(id=full_id)
    with Container.start(name, SLEEP, cgroup_path=path, state=state) as container:
        it = ContainerIndex().container_of(PROC.process_id(container.tgid))
        assert (it.runtime, it.id, it.cgroup, it.labels.get(POD_UID)) == (runtime, full_id, path, pod)
        assert command_after_exec(container.tgid) == "sleep 1000"


def command_after_exec(tgid: int) -> str:
    """runc returns while its process becomes ours; for a moment that has no command line."""
    until(lambda: PROC.command(tgid) == "sleep 1000", lambda: f"`sleep 1000`, not `{PROC.command(tgid)}`")
    return PROC.command(tgid)


def test_without_a_runtimes_path_it_is_plain_runc(state: Path, name: str) -> None:
    with Container.start(name, SLEEP, state=state) as container:
        it = ContainerIndex().container_of(PROC.process_id(container.tgid))
        assert (it.runtime, it.name) == ("runc", name)


def test_the_caller_talks_to_the_program_inside(state: Path, name: str) -> None:
    script = "import os, sys; print(os.environ['MARK'], os.getpid(), sys.stdin.readline(), end='', flush=True)"
    with Container.start(name, ["/usr/bin/python3", "-c", script], {"MARK": "here"}, state=state) as container:
        assert container.stdout
        container.stdin.write("hello\n")
        container.stdin.flush()
        assert container.stdout.readline() == "here 1 hello\n"
        assert container.wait(10)


def test_a_program_that_does_not_exist_is_an_error_and_leaves_nothing(state: Path, name: str) -> None:
    with pytest.raises(ContainerError, match="no-such-program"):
        Container.start(name, ["/no-such-program"], state=state)
    assert_nothing_left(state, f"/gpuwarden/{name}")


def test_a_bind_mounted_folder_is_read_only_unless_asked_for(state: Path, name: str, tmp_path: Path) -> None:
    (tmp_path / "ro").mkdir()
    (tmp_path / "rw").mkdir()
    mounts = [Mount(tmp_path / "ro", Path("/ro")), Mount(tmp_path / "rw", Path("/rw"), read_only=False)]
    command = ["sh", "-c", "touch /ro/no; touch /rw/yes; echo done"]
    with Container.start(name, command, mounts=mounts, state=state) as container:
        assert container.stdout
        assert container.stdout.readline() == "done\n"
        assert "Read-only file system" in container.errors()
    assert sorted(path.name for path in tmp_path.glob("r?/*")) == ["yes"]


def test_two_containers_of_one_image_share_its_files(state: Path, name: str, tmp_path: Path) -> None:
    library = tmp_path / "image" / "opt" / "cuda" / "libcuda.so.1"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"library")
    inside = "opt/cuda/libcuda.so.1"
    with (
        Container.start(f"{name}-a", SLEEP, overlay_lower=tmp_path / "image", state=state) as first,
        Container.start(f"{name}-b", SLEEP, overlay_lower=tmp_path / "image", state=state) as second,
    ):
        views = [Path(f"/proc/{each.tgid}/root", inside) for each in (first, second)]
        facts = [view.stat() for view in views]
        assert [view.read_bytes() for view in views] == [b"library", b"library"]
        assert facts[0].st_ino == facts[1].st_ino == library.stat().st_ino
        assert facts[0].st_dev != facts[1].st_dev  # the trap: one file, two faces
    assert_nothing_left(state, f"/gpuwarden/{name}-a")


def test_stopping_takes_everything_away_and_may_be_done_twice(state: Path, name: str) -> None:
    path = f"/kubepods/besteffort/pod{UID}/{secrets.token_hex(32)}"
    absent = cgroups.missing(path)
    container = Container.start(name, SLEEP, cgroup_path=path, state=state)
    assert cgroups.folders(path)
    container.stop()
    container.stop()
    assert not container.alive()
    assert set(absent) <= set(cgroups.missing(path))
    assert_nothing_left(state, path)


def test_two_containers_of_one_pod_share_a_parent_until_the_last_one_ends(state: Path, name: str) -> None:
    pod = f"/gpuwarden-pod-{name}"
    first = Container.start(f"{name}-a", SLEEP, cgroup_path=f"{pod}/a", state=state)
    second = Container.start(f"{name}-b", SLEEP, cgroup_path=f"{pod}/b", state=state)
    first.stop()
    assert second.alive()
    second.stop()
    assert not cgroups.folders(pod)


def test_a_frozen_or_stopped_container_can_be_taken_away(state: Path, name: str) -> None:
    container = Container.start(name, SLEEP, state=state)
    os.kill(container.tgid, signal.SIGSTOP)
    for folder in cgroups.folders(container.cgroup_path):
        for file, value in (("freezer.state", "FROZEN"), ("cgroup.freeze", "1")):
            if (folder / file).exists():
                (folder / file).write_text(value)
    container.stop()
    assert_nothing_left(state, container.cgroup_path)


def test_what_a_killed_run_left_is_swept(state: Path, name: str, tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    script = f"""
        import os, signal
        from pathlib import Path
        from tools.harness.containers import Container
        image, state = Path({str(tmp_path / "image")!r}), Path({str(state)!r})
        Container.start({name!r}, {SLEEP!r}, overlay_lower=image, state=state)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert cgroups.folders(f"/gpuwarden/{name}")
    assert sweep("another-run", state) == []
    assert sweep(name, state) == [name]
    assert_nothing_left(state, f"/gpuwarden/{name}")


def test_nothing_is_left_when_the_caller_is_interrupted(state: Path, name: str) -> None:
    script = f"""
        import signal
        from pathlib import Path
        from tools.harness.containers import Container
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent of the test run may ignore it
        with Container.start({name!r}, {SLEEP!r}, state=Path({str(state)!r})):
            print("up", flush=True)
            signal.pause()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as caller:
        assert caller.stdout
        assert caller.stdout.readline() == b"up\n"
        caller.send_signal(signal.SIGINT)
        assert caller.wait(30) != 0
    assert_nothing_left(state, f"/gpuwarden/{name}")


def test_a_cgroup_that_is_in_use_is_not_taken(state: Path, name: str) -> None:
    with (
        Container.start(f"{name}-a", SLEEP, cgroup_path=f"/gpuwarden/{name}", state=state) as first,
        pytest.raises(ContainerError, match="exists already"),
    ):
        Container.start(f"{name}-b", SLEEP, cgroup_path=f"/gpuwarden/{name}", state=state)
    assert not first.alive()


def assert_nothing_left(state: Path, cgroup: str) -> None:
    assert cgroups.folders(cgroup) == []
    assert list(state.glob("containers/*")) == []
    assert list(state.glob("runc/*")) == []
    assert str(state) not in Path("/proc/self/mountinfo").read_text()
