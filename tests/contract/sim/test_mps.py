# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The MPS control program speaks the real one's language (protocol 2), on a real pipe."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.harness.node import Node, simulated_node


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


def test_without_a_daemon_every_command_fails_and_reports_it(node: Node) -> None:
    done = node.mps_control("get_server_list")
    assert done.returncode != 0
    assert "Cannot find MPS control daemon process" in done.stdout


def test_the_daemon_makes_a_pipe_and_quit_takes_it_away(node: Node) -> None:
    with node.mps_daemon():
        pipe = node.folder / "mps" / "control"
        assert stat.S_ISFIFO(os.stat(pipe).st_mode)
        assert node.status()[0]["mps"] is True
        assert node.mps_control("quit").returncode == 0
        assert not pipe.exists()
        assert node.status()[0]["mps"] is False


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
    assert "already running" in done.stderr


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
    assert (done.returncode, done.stdout) == (0, "2048M\n512M\n")


def test_the_default_client_priority_is_0_or_1(mps: Node) -> None:
    assert mps.mps_control("set_default_client_priority 1", "get_default_client_priority").stdout == "1\n"
    assert mps.mps_control("set_default_client_priority 2").returncode != 0


@pytest.mark.parametrize(
    "command",
    [
        "frobnicate",
        "get_server_status",
        "get_server_status 1",
        "set_active_thread_percentage 1 50",
        "set_default_active_thread_percentage 0",
        "set_default_active_thread_percentage 101",
        "set_default_active_thread_percentage half",
        "set_default_device_pinned_mem_limit 7 1G",
        "set_default_device_pinned_mem_limit 0 lots",
        "terminate_client 1 1",
        "ps -x",
    ],
)
def test_a_wrong_command_changes_nothing_and_fails(mps: Node, command: str) -> None:
    done = mps.mps_control(command, "get_default_active_thread_percentage")
    assert done.returncode != 0
    first, *rest = done.stdout.splitlines()
    assert first
    assert rest == ["100.0"]


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
        assert not (tmp_path / "pipes" / "control").exists()


def test_clients_are_listed_and_can_be_terminated(mps: Node) -> None:
    client = mps.start("offline", ["--seconds", "0", "--kernel-us", "100", "--kernels", "10"])
    assert client.stdout
    assert client.stdout.readline() == "ready\n"
    server = server_pid(mps)
    assert mps.mps_control(f"get_client_list {server}").stdout == f"{client.pid}\n"
    header, line = mps.mps_control("ps").stdout.splitlines()
    assert header.split() == ["PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND"]
    pid, _, of_server, uuid, namespace, command, *_ = line.split()
    assert (pid, of_server) == (str(client.pid), server)
    assert str(mps.status()[0]["uuid"]).startswith(uuid)
    assert namespace == str(os.stat("/proc/self/ns/pid").st_ino)
    assert command.endswith("offline")
    assert mps.mps_control(f"terminate_client {server} {client.pid}").returncode == 0
    assert client.wait(timeout=60) != 0
    assert mps.mps_control(f"get_client_list {server}").stdout == ""


def test_quit_with_a_limit_does_not_wait_for_clients_for_ever(mps: Node) -> None:
    client = mps.start("offline", ["--seconds", "0", "--kernel-us", "100", "--kernels", "10"])
    assert client.stdout
    assert client.stdout.readline() == "ready\n"
    assert mps.mps_control("quit -t 1").returncode == 0
    assert client.wait(timeout=60) != 0
