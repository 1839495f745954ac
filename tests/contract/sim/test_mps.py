# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The MPS control program speaks the real one's language (protocol 2), on real sockets.

What the real daemons answer without a server that is ready, line by line, is in tests/driver/test_mps_language.py.
"""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.harness.node import Node, simulated_node
from tools.harness.wait import until


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with simulated_node(tmp_path / "gpu", {"gpus": "2"}) as node:
        yield node


@pytest.fixture
def mps(node: Node) -> Iterator[Node]:
    with node.mps_daemon():
        yield node


def server_pid(node: Node) -> str:
    return node.mps_control("get_server_list").stdout.strip()


def start(node: Node, kernels: int = 10, kernel_us: int = 100) -> subprocess.Popen[str]:
    """A client that launches without end."""
    made = node.start("offline", ["--seconds", "0", "--kernel-us", str(kernel_us), "--kernels", str(kernels)])
    assert made.stdout
    assert made.stdout.readline() == "ready\n"
    return made


def launches(node: Node, process: subprocess.Popen[str]) -> int:
    return sum(entry["launches"] for entry in node.truth() if entry["pid"] == process.pid)


def goes_on(node: Node, process: subprocess.Popen[str]) -> None:
    before = launches(node, process)
    until(lambda: launches(node, process) > before, "more launches")


def error_of(process: subprocess.Popen[str]) -> str:
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    return errors


def test_without_a_daemon_every_command_fails_and_reports_it(node: Node) -> None:
    done = node.mps_control("get_server_list")
    assert done.returncode != 0
    assert "Cannot find MPS control daemon process" in done.stderr


def test_the_daemon_listens_at_a_socket_that_stays_and_quit_ends_it(node: Node) -> None:
    with node.mps_daemon():
        pipe = node.folder / "mps" / "control"
        assert stat.S_ISSOCK(os.stat(pipe).st_mode)
        assert node.status()[0]["mps"] is True
        assert node.mps_control("quit").returncode == 0
        assert pipe.exists()
        assert node.mps_control("get_server_list").returncode == 1
        assert node.status()[0]["mps"] is False


def test_a_version_that_is_not_known_is_refused(node: Node) -> None:
    done = node.run("nvidia-cuda-mps-control", extra={"GPUSIM_MPS_VERSION": "600"})
    assert (done.returncode, done.stderr) == (2, "GPUSIM_MPS_VERSION is 535, 550, 555 or 580\n")


def test_a_pipe_that_a_killed_daemon_left_is_no_daemon(node: Node) -> None:
    left = node.folder / "mps" / "control"
    left.parent.mkdir()
    os.mkfifo(left)
    node.mps = True
    assert node.mps_control("get_server_list").returncode != 0
    node.mps = False
    with node.mps_daemon():
        assert node.mps_control("get_server_list").returncode == 0


def test_a_second_daemon_is_refused(mps: Node) -> None:
    done = mps.run("nvidia-cuda-mps-control", ["-d"])
    assert done.returncode != 0
    assert "already running" in done.stdout


def test_the_server_starts_with_the_first_client_and_has_the_defaults_of_then(node: Node) -> None:
    with node.mps_daemon(server=False):
        assert node.mps_control("get_server_list", "set_default_active_thread_percentage 40").stdout == "40.0\n"
        begun = time.monotonic()
        start(node)
        assert time.monotonic() - begun > 0.17  # it waits for its server
        node.mps_control("set_default_active_thread_percentage 60")
        assert node.mps_control(f"get_active_thread_percentage {server_pid(node)}").stdout == "40.0\n"


def test_a_server_is_shut_down_with_its_clients_when_it_is_forced(mps: Node) -> None:
    server = server_pid(mps)
    client = start(mps)
    assert mps.mps_control(f"shutdown_server {server}", "get_server_list").stdout == f"{server}\n"
    assert mps.mps_control(f"shutdown_server {server} -f", "get_server_list").stdout == ""
    assert client.wait(timeout=60) != 0


def test_a_server_is_a_process_of_its_own_that_answers_nothing_before_it_is_ready(node: Node) -> None:
    with node.mps_daemon(server=False):
        assert node.mps_control(f"start_server -uid {os.geteuid()}", "get_server_list").stdout == ""
        server = until(lambda: server_pid(node), "a server in the list")
        assert Path(f"/proc/{server}/cmdline").read_text().rstrip("\0") == "nvidia-cuda-mps-server"
        until(lambda: node.mps_control(f"get_server_status {server}").stdout == "ACTIVE\n", "the server to be ready")
        assert node.mps_control(f"get_active_thread_percentage {server}").stdout == "100.0\n"
    until(lambda: not Path(f"/proc/{server}").exists(), "the server to end with its daemon")


def test_a_client_that_is_killed_at_work_takes_the_others_along_and_newcomers_work(mps: Node) -> None:
    mps.mps = False
    apart = start(mps)
    mps.mps = True
    victim, other = start(mps, kernel_us=100_000), start(mps)
    until(lambda: launches(mps, victim), "its kernels")
    victim.kill()
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in error_of(other)
    assert mps.mps_control(f"get_server_status {server_pid(mps)}").stdout == "ACTIVE\n"
    goes_on(mps, start(mps))
    goes_on(mps, apart)


def test_a_client_that_leaves_in_order_harms_nobody(mps: Node) -> None:
    leaving, other = start(mps, kernel_us=100_000), start(mps)
    until(lambda: launches(mps, leaving), "its kernels")
    leaving.terminate()
    leaving.communicate(timeout=60)
    goes_on(mps, other)


def test_a_client_that_is_idle_when_it_is_killed_harms_nobody(mps: Node) -> None:
    idle = mps.start("online", ["--start-now", "--rate", "0.001", "--seconds", "1000"])
    assert idle.stdout
    assert idle.stdout.readline() == "ready\n"
    other = start(mps)
    idle.kill()
    idle.communicate(timeout=60)
    goes_on(mps, other)


def test_a_terminated_client_gets_its_error_a_little_later_and_harms_nobody(mps: Node) -> None:
    ended, other = start(mps, kernel_us=20_000), start(mps)
    until(lambda: launches(mps, ended), "its kernels")
    assert mps.mps_control(f"terminate_client {server_pid(mps)} {ended.pid}").stdout == "0\n"
    assert "CUDA_ERROR_MPS_CLIENT_TERMINATED" in error_of(ended)
    goes_on(mps, other)


def test_there_is_one_active_server(mps: Node) -> None:
    server = server_pid(mps)
    assert server.isdigit()
    done = mps.mps_control(f"get_server_status {server}", f"get_client_list {server}", "start_server -uid 0")
    assert (done.returncode, done.stdout) == (0, "ACTIVE\n")


def test_percentages_are_set_read_back_and_lost_on_quit(node: Node) -> None:
    with node.mps_daemon():
        assert node.mps_control("get_default_active_thread_percentage").stdout == "100.0\n"
        assert node.mps_control("set_default_active_thread_percentage 40").stdout == "40.0\n"
        server = server_pid(node)
        assert node.mps_control(f"set_active_thread_percentage {server} 25").returncode == 0
        assert node.mps_control(f"get_active_thread_percentage {server}").stdout == "25.0\n"
        assert node.mps_control("get_default_active_thread_percentage").stdout == "40.0\n"
    with node.mps_daemon():
        assert node.mps_control("get_default_active_thread_percentage").stdout == "100.0\n"


def test_memory_limits_are_per_device(mps: Node) -> None:
    server = server_pid(mps)
    done = mps.mps_control(
        "set_default_device_pinned_mem_limit 0 2G",
        f"set_device_pinned_mem_limit {server} 1 512M",
        "get_default_device_pinned_mem_limit 0",
        f"get_device_pinned_mem_limit {server} 1",
    )
    assert (done.returncode, done.stdout) == (0, "2G\n512M\n")


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("frobnicate", 'Unknown command "frobnicate"'),
        ("get_server_status", "A server PID is required"),
        ("get_server_status 1", "Server 1 not found"),
        ("set_active_thread_percentage 1 50", "Server 1 not found"),
        ("set_default_active_thread_percentage 0", "100.0"),
        ("set_default_active_thread_percentage half", "100.0"),
        ("set_active_thread_percentage SERVER 101", "100.0"),
        ("set_default_client_priority 2", "Invalid priority value - must be 0 or 1!"),
        ("set_device_pinned_mem_limit SERVER 7 1G", "Invalid device ordinal!"),
        ("terminate_client 1 1", "Server 1 not found\nServer 1 not found!\n1"),
        ("terminate_client SERVER 1", "Invalid process 1!\n1"),
    ],
)
def test_a_wrong_command_changes_nothing_and_its_exit_code_is_0(mps: Node, command: str, answer: str) -> None:
    server = server_pid(mps)
    done = mps.mps_control(
        command.replace("SERVER", server),
        "get_default_active_thread_percentage",
        f"get_active_thread_percentage {server}",
        f"get_device_pinned_mem_limit {server} 0",
        "get_default_client_priority",
    )
    assert (done.returncode, done.stdout) == (0, f"{answer}\n100.0\n100.0\n0\n")


def test_device_query_names_every_device(mps: Node) -> None:
    done = mps.mps_control("device_query")
    assert len(done.stdout.splitlines()) == 3
    for device in mps.status():
        assert str(device["uuid"]) in done.stdout


def test_the_daemon_ends_with_the_gpu(tmp_path: Path) -> None:
    with simulated_node(tmp_path / "gpu") as node:
        environment = {**os.environ, **node.environment, "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "pipes")}
        daemon = node.start("nvidia-cuda-mps-control", ["-f"], environment)
        assert daemon.stdout
        assert "Starting control daemon" in daemon.stdout.readline()
        node._running[0].terminate()
        assert daemon.wait(timeout=60) == 0
        assert not (tmp_path / "pipes" / "nvidia-cuda-mps-control.pid").exists()


def test_clients_are_listed_and_can_be_terminated(mps: Node) -> None:
    client = start(mps)
    server = server_pid(mps)
    assert mps.mps_control(f"get_client_list {server}").stdout == f"{client.pid}\n"
    header, line = mps.mps_control("ps").stdout.splitlines()
    assert header.split() == ["PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND"]
    pid, _, of_server, uuid, namespace, command, *_ = line.split()
    assert (pid, of_server) == (str(client.pid), server)
    assert str(mps.status()[0]["uuid"]).startswith(uuid)
    assert namespace == str(os.stat("/proc/self/ns/pid").st_ino)
    assert command.endswith("offline")
    by_device = mps.mps_control("get_device_client_list").stdout.splitlines()
    assert [line.partition(",")[0].partition(".")[0] for line in by_device] == [
        "[0] 01:00",
        str(client.pid),
        "[1] 02:00",
    ]
    assert mps.mps_control(f"terminate_client {server} {client.pid}").stdout == "0\n"
    assert client.wait(timeout=60) != 0
    until(lambda: mps.mps_control(f"get_client_list {server}").stdout == "", "the client to be off the list")


def test_quit_with_a_limit_does_not_wait_for_clients_for_ever(mps: Node) -> None:
    client = start(mps)
    assert mps.mps_control("quit -t 1").returncode == 0
    assert client.wait(timeout=60) != 0
