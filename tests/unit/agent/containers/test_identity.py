# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Cgroup text → container, over what real hosts show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.containers import identify, parse_cgroup
from agent.containers.identity import POD_UID, reported_path
from agent.core.model import HOST

A = "3f29c1a7" * 8
B = "b07de5d0" * 8
UID = "8dbc5577-d0e2-4706-8787-57d52c03ddf2"
UID_ = UID.replace("-", "_")
STATIC = "c0ffee0123456789c0ffee0123456789"
POD = f"/kubepods/burstable/pod{UID}"
POD_SLICE = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice"
USER = "/user.slice/user-1000.slice/user@1000.service"

CONTAINERS = [  # path, runtime, id, pod uid
    (f"/docker/{A}", "docker", A, None),
    (f"/system.slice/docker-{A}.scope", "docker", A, None),
    (f"/docker/{A}/system.slice/nginx.service", "docker", A, None),
    (f"/docker/{A}/init.scope", "docker", A, None),
    (f"/ecs/0a1b2c3d4e5f/{A}", "docker", A, None),
    (f"/ecstasks.slice/ecstasks-0a1b.slice/docker-{A}.scope", "docker", A, None),
    (f"{POD}/{A}", "containerd", A, UID),
    (f"/kubepods/pod{UID}/{A}", "containerd", A, UID),
    (f"/kubepods/besteffort/pod{STATIC}/{A}", "containerd", A, STATIC),
    (f"{POD_SLICE}/cri-containerd-{A}.scope", "containerd", A, UID),
    (f"/kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{A}.scope", "containerd", A, UID),
    (f"/kubelet.slice/kubelet{POD_SLICE}/cri-containerd-{A}.scope", "containerd", A, UID),
    (f"/system.slice/containerd.service/kubepods-burstable-pod{UID_}.slice:cri-containerd:{A}", "containerd", A, UID),
    (f"/system.slice/nerdctl-{A}.scope", "containerd", A, None),
    (f"/default/{A}", "runc", A, None),
    (f"/system.slice/k3s.service{POD}/{A}", "containerd", A, UID),
    (f"/kubepods-burstable-pod{UID_}.slice/cri-containerd-{A}.scope", "containerd", A, UID),
    (f"/cri-containerd-{A}.scope", "containerd", A, None),
    ("/lxc.payload.project_web/.lxc/init.scope", "lxc", "project_web", None),
    ("/slurm/uid_1000/job_42/step_0", "slurm", "42", None),
    ("/slurm/uid_1000/job_42", "slurm", "42", None),
    ("/system.slice/node7_slurmstepd.scope/job_42/step_batch/user/task_special", "slurm", "42", None),
    (f"{POD_SLICE}/crio-{A}.scope", "cri-o", A, UID),
    (f"{POD_SLICE}/crio-{A}.scope/container", "cri-o", A, UID),
    (f"{POD}/crio-{A}", "cri-o", A, UID),
    (f"/machine.slice/libpod-{A}.scope", "podman", A, None),
    (f"/machine.slice/libpod-{A}.scope/container", "podman", A, None),
    (f"/machine.slice/machine-libpod_pod_{B}.slice/libpod-{A}.scope/container", "podman", A, None),
    (f"/libpod_parent/libpod-{A}", "podman", A, None),
    (f"/libpod_parent/{B}/libpod-{A}", "podman", A, None),
    (f"/system.slice/web.service/libpod-payload-{A}", "podman", A, None),
    ("/lxc.payload.web", "lxc", "web", None),
    ("/lxc.payload.web/system.slice/nginx.service", "lxc", "web", None),
    ("/lxc.payload/web", "lxc", "web", None),
    ("/lxc/101/ns/init.scope", "lxc", "101", None),
    ("/slurm/uid_1000/job_42/step_0/task_0", "slurm", "42", None),
    ("/slurm_node7/uid_1000/job_42/step_batch", "slurm", "42", None),
    ("/system.slice/slurmstepd.scope/job_42/step_0/user/task_0", "slurm", "42", None),
    ("/system.slice/node7_slurmstepd.scope/job_42/step_extern/user", "slurm", "42", None),
    (f"/actions_job/{A}", "runc", A, None),
    (A, "runc", A, None),
    ("/gpuwarden-demo/online", "runc", "online", None),
]
NESTED = [  # path, the outer container's runtime and id
    (f"/docker/{B}/docker/{A}", "docker", B),
    (f"/docker/{B}/kubelet{POD}/{A}", "docker", B),
    (f"/docker/{B}/kubelet.slice/kubelet-kubepods-burstable-pod{UID_}.slice/cri-containerd-{A}.scope", "docker", B),
    (f"/system.slice/docker-{B}.scope/docker/{A}", "docker", B),
    (f"/docker/{B}/system.slice/docker-{A}.scope", "docker", B),
    (f"{POD}/{B}/docker/{A}", "containerd", B),
    (f"/slurm/uid_1000/job_42/step_0/libpod-{A}.scope", "slurm", "42"),
    (f"/lxc.payload.web/docker/{A}", "lxc", "web"),
    ("/lxc.payload.outer/lxc.payload.inner", "lxc", "outer"),
]
ROOTLESS = [  # path, runtime, id
    (f"{USER}/user.slice/docker-{A}.scope", "docker", A),
    (f"{USER}/user.slice/nerdctl-{A}.scope", "containerd", A),
    (f"{USER}/user.slice/user-libpod_pod_{B}.slice/libpod-{A}.scope/container", "podman", A),
    (f"{USER}/app.slice/web.service/libpod-payload-{A}/container", "podman", A),
    (f"{USER}/user.slice/libpod-{A}.scope/container", "podman", A),
    (f"{USER}/kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{A}.scope", "containerd", A),
    (f"/user.slice/user-1000.slice/cri-containerd-{A}.scope", "containerd", A),
    (f"{USER}/lxc.payload.web", "lxc", "web"),
]
OTHERS = [  # path, runtime, name
    ("/", "host", "host"),
    ("/system.slice", "host", "host"),
    ("/user.slice/user-1000.slice", "host", "host"),
    ("/libpod_parent/conmon", "host", "host"),
    (f"{POD}/crio-conmon-{A}", "host", "host"),
    ("/lxc.monitor.web", "host", "host"),
    ("/system.slice/ssh.service", "systemd", "ssh.service"),
    ("/system.slice/docker.service", "systemd", "docker.service"),
    ("/system.slice/containerd.service", "systemd", "containerd.service"),
    ("/system.slice/slurmd.service", "systemd", "slurmd.service"),
    ("/system.slice/slurmstepd.scope/system", "systemd", "slurmstepd.scope"),
    ("/system.slice/system-getty.slice/getty@tty1.service", "systemd", "getty@tty1.service"),
    ("/system.slice/system-vllm.slice/vllm@llama\\x2d3.service/worker", "systemd", "vllm@llama\\x2d3.service"),
    ("/machine.slice/systemd-nspawn@web.service/payload", "systemd", "systemd-nspawn@web.service"),
    ("/system.slice/slurmstepd.scope/job_one/step_0", "systemd", "slurmstepd.scope"),
    ("/user.slice/user-1000.slice/session-3.scope", "systemd", "session-3.scope"),
    (f"{USER}/init.scope", "systemd", "init.scope"),
    (f"{USER}/app.slice/app-jupyter.service/kernel-1", "systemd", "app-jupyter.service"),
    (f"/system.slice/jupyter.service/cri-containerd-{A}.scope", "systemd", "jupyter.service"),
    (f"/system.slice/jupyter.service/a.slice/libpod-payload-{A}", "systemd", "jupyter.service"),
    ("/system.slice/jupyter.service/ssh.service", "systemd", "jupyter.service"),
    (f"/user.slice/user-1000.slice/session-3.scope/docker/{A}", "systemd", "session-3.scope"),
    (f"{POD_SLICE}/crio-conmon-{A}.scope", "systemd", f"crio-conmon-{A}.scope"),
    (f"/machine.slice/libpod-conmon-{A}.scope", "systemd", f"libpod-conmon-{A}.scope"),
]
PATHS = [row[0] for row in CONTAINERS]


@pytest.mark.parametrize(("path", "runtime", "full_id", "pod"), CONTAINERS)
def test_a_container_is_known_by_its_cgroup(path: str, runtime: str, full_id: str, pod: str | None) -> None:
    it = identify(path)
    assert (it.runtime, it.id, it.labels.get(POD_UID)) == (runtime, full_id, pod)
    assert it.name == {A: A[:12], "42": "job_42"}.get(full_id, full_id)


@pytest.mark.parametrize(("path", "runtime", "full_id"), NESTED)
def test_what_a_container_makes_inside_itself_is_its_own_whatever_its_name(
    path: str, runtime: str, full_id: str
) -> None:
    it = identify(path)
    assert (it.runtime, it.id, it.uid) == (runtime, full_id, None)


@pytest.mark.parametrize(("path", "runtime", "full_id"), ROOTLESS)
def test_a_users_container_never_has_the_key_nor_the_pod_of_one_of_root(path: str, runtime: str, full_id: str) -> None:
    it = identify(path)
    assert (it.runtime, it.id, it.uid, dict(it.labels)) == (runtime, full_id, 1000, {})
    assert it.name == f"{A[:12] if full_id == A else full_id}@1000"
    assert it.key not in {f"{runtime}:{full_id}", identify(f"/{runtime}/{full_id}").key}


def test_a_name_below_a_users_directory_is_that_users_wherever_it_lies() -> None:
    path = f"/kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{A}.scope"
    theirs, roots = identify(path, owner_uid=1000), identify(path, owner_uid=0)
    assert (theirs.key, theirs.uid, dict(theirs.labels)) == (f"containerd:1000/{A}", 1000, {})
    assert (roots.key, roots.uid) == (f"containerd:{A}", None)


@pytest.mark.parametrize(("path", "runtime", "name"), OTHERS)
def test_what_is_no_container_is_its_unit_or_the_host(path: str, runtime: str, name: str) -> None:
    it = identify(path)
    assert (it.runtime, it.name, it.id) == (runtime, name, "")
    assert (it.key == HOST) is (runtime == "host")


def test_where_pid_1_lives_is_the_host_even_in_a_container_or_a_unit() -> None:
    assert identify("/init.scope", init_path="/init.scope").key == HOST
    assert identify(f"/docker/{A}", init_path=f"/docker/{A}").key == HOST
    assert identify(f"/docker/{A}/docker/{B}", init_path=f"/docker/{A}").id == B


def test_two_containers_of_one_name_have_two_keys() -> None:
    keys = {
        identify(path).key
        for path in ("/lxc/web", "/lxc/outer/lxc/web", "/a/web", "/b/web", "/x.service", "/y/x.service")
    }
    assert len(keys) == 6


def test_a_name_cannot_write_on_the_terminal() -> None:
    assert identify("/lxc.payload.\x1b[2Jweb\u202e").name == "\\x1b[2Jweb\\u202e"


def v1(path: str, other: str = "/", systemd: str | None = None) -> str:
    lines = [f"4:memory:{path}", f"3:cpu,cpuacct:{path}", f"2:freezer:{path}", f"1:name=systemd:{systemd or path}"]
    return "\n".join(["13:rdma:" + other, *lines, ""])


@pytest.mark.parametrize("path", PATHS)
def test_a_container_is_found_on_v1_v2_and_hybrid(path: str) -> None:
    path = "/" + path.lstrip("/")
    assert parse_cgroup(f"0::{path}\n") == path
    assert parse_cgroup(v1(path)) == path
    assert parse_cgroup(v1(path) + f"0::{path}\n") == path
    assert parse_cgroup(v1(path) + "0::/\n") == path
    assert parse_cgroup(v1("/") + f"0::{path}\n") == path


def test_a_container_in_v1_wins_over_the_unit_that_v2_names() -> None:
    text = v1(f"/docker/{A}") + "0::/system.slice/containerd.service\n"
    assert parse_cgroup(text) == f"/docker/{A}"


def test_a_slurm_job_is_found_in_the_controllers_that_slurm_uses() -> None:
    text = v1("/slurm/uid_1/job_7/step_0", systemd="/system.slice/slurmd.service")
    assert identify(parse_cgroup(text)).id == "7"


def test_a_limit_in_one_controller_makes_no_container() -> None:
    assert parse_cgroup("2:cpu:/\n1:memory:/limits/513c\n0::/\n") == "/"
    text = "3:cpu:/user.slice\n2:memory:/user.slice/session-1.scope\n1:name=systemd:/user.slice/session-1.scope\n0::/\n"
    assert identify(parse_cgroup(text)).name == "session-1.scope"
    assert parse_cgroup("3:cpu:/\n2:freezer:/\n1:memory:/limits/513c\n") == "/"


@pytest.mark.parametrize("path", PATHS)
def test_what_the_kernel_reported_means_the_same(path: str) -> None:
    assert reported_path([path, "/"]) == parse_cgroup(f"0::{path}\n")
    assert reported_path(["/", path]) == parse_cgroup(f"0::{path}\n")
    unit = "/system.slice/containerd.service"
    assert reported_path([unit, path]) == parse_cgroup(v1(path) + f"0::{unit}\n")


def test_where_the_kernel_reported_no_container_the_v2_path_wins() -> None:
    assert reported_path(["/system.slice/ssh.service", "/limits/1"]) == "/system.slice/ssh.service"
    assert reported_path(["/", "/system.slice/ssh.service"]) == "/system.slice/ssh.service"
    assert reported_path(["/"]) == reported_path([]) == "/"


def test_paths_from_another_namespace_or_of_a_removed_cgroup_are_understood() -> None:
    pod = f"kubepods-burstable-pod{UID_}.slice"
    it = identify(parse_cgroup(f"0::/../../{pod}/cri-containerd-{A}.scope\n"))
    assert (it.id, it.labels) == (A, {POD_UID: UID})
    assert parse_cgroup(f"0::/../../docker/{A}\n") == f"/docker/{A}"
    assert parse_cgroup(f"0::/docker/{A} (deleted)\n") == f"/docker/{A}"


PARTS = st.one_of(
    st.text(st.characters(exclude_characters="/\n\0"), min_size=1, max_size=20),
    st.sampled_from(
        ["docker", "lxc", "slurm", f"pod{UID}", "kubepods", "a.service", "b.scope", "c.slice", A, f"crio-{B}.scope"]
    ),
)
ANY_PATHS = st.lists(PARTS, max_size=8).map(lambda parts: "/" + "/".join(parts))


@given(st.text())
def test_any_text_has_a_path(text: str) -> None:
    assert parse_cgroup(text).startswith("/")


@given(ANY_PATHS)
def test_any_path_is_somebodys(path: str) -> None:
    it = identify(path)
    assert it.name
    assert it.key == HOST or f"{path}/".startswith(it.cgroup + "/")
    assert it.name.isprintable()


@given(ANY_PATHS)
def test_a_container_is_the_same_seen_from_its_own_cgroup(path: str) -> None:
    it = identify(path)
    if it.key != HOST:
        assert identify(it.cgroup) == it


@given(st.sampled_from(PATHS), st.sampled_from(["", "/init.scope", "/system.slice/x.service", "/user", "/0"]))
def test_what_a_container_makes_of_its_own_cgroup_changes_nothing(path: str, below: str) -> None:
    if identify(path).id == "online":  # nothing but a cgroup: no name shows where it ends
        return
    assert identify(path + below) == identify(path)


@given(
    st.sampled_from([f"/docker/{B}", "/lxc.payload.outer", f"{POD_SLICE}/cri-containerd-{B}.scope"]),
    st.sampled_from([*PATHS, *(row[0] for row in (*NESTED, *ROOTLESS))]),
)
def test_the_outermost_container_wins(outer: str, inner: str) -> None:
    assert identify(f"{outer}/{inner.lstrip('/')}") == identify(outer)


@given(st.sampled_from(PATHS), st.lists(PARTS, min_size=1, max_size=4), st.integers(1, 1 << 31))
def test_no_path_below_a_users_directory_has_the_key_of_a_container_of_root(
    victim: str, above: list[str], uid: int
) -> None:
    key = identify(victim).key
    if identify(victim).id == "online":
        return
    path = f"/user.slice/user-{uid}.slice/user@{uid}.service/{'/'.join(above)}/{victim.lstrip('/')}"
    assert identify(path).key != key
