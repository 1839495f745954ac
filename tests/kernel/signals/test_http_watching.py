# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A real container with a server that uses no GPU: its processes are found, and its requests become readings."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from subprocess import PIPE

import pytest

from agent.containers.index import ContainerIndex, Residents
from agent.core.clock import monotonic_ns
from agent.core.model import Container as Known
from agent.core.model import ContainerUsage, Snapshot
from agent.node import preflight
from agent.node.procfs import Procfs
from enforce.policy.model import HttpSource, Slo
from enforce.signals.http import Http, losses, request_follower
from enforce.signals.http_probe import LOSSES, HttpProbes, WatchedPort, details_of
from enforce.signals.latency_window import Requests
from enforce.signals.process_follower import ProcessFollower
from tools.harness.containers import Container, Mount
from tools.harness.wait import until

_SERVERS = Path(__file__).with_name("http_servers.py").resolve()
_PATIENCE_SECONDS = 90.0
_DELAY_SECONDS = 0.002


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    """With a process for each connection."""
    command = ["python3", str(_SERVERS), "forks", str(_DELAY_SECONDS)]
    own = f"/docker/{secrets.token_hex(32)}"
    with Container.start(
        "http-watching", command, cgroup_path=own, mounts=[Mount(_SERVERS)], state=tmp_path
    ) as container:
        yield container


def test_a_front_end_in_a_container_has_latencies(container: Container) -> None:
    proc = Procfs()
    known = ContainerIndex(proc).container_of(proc.process_id(container.tgid))
    assert container.stdout
    port = int(container.stdout.readline())
    container.stdin.write("go\n")
    container.stdin.flush()
    assert container.tgid in Residents(proc).of(known)
    with closing(request_follower(proc, lambda: preflight.bpf_object().with_name("http.bpf.o"))) as follower:
        assert losses(follower) == {}
        assert follower.trouble(known.key)
        _read_until_there_is_a_reading(follower, known, port)
        assert set(losses(follower)) == {f"http:{name}" for name in (*LOSSES, "failed")}
        assert losses(follower)["http:failed"] == 0
        until(lambda: follower.trouble(known.key) is None, "no trouble")
        number = follower.watch(known, WatchedPort(port), monotonic_ns())
        assert number is not None
        follower.forget(known.key)
        until(lambda: follower.buckets(number) is None, "the container to be forgotten")
        before = follower.tallies()["answered"]
        assert before >= 20
        until(lambda: counts(follower, known, port), "the server to be followed")
        assert follower.tallies()["answered"] == before


def counts(follower: ProcessFollower[WatchedPort], known: Known, port: int) -> bool:
    """Whether the container's requests are counted now; asks for them."""
    number = follower.watch(known, WatchedPort(port), monotonic_ns())
    return number is not None and follower.buckets(number) is not None


def _read_until_there_is_a_reading(follower: ProcessFollower[WatchedPort], known: Known, port: int) -> None:
    signal = Http(follower, Requests(), [])
    slo = Slo("http", 0.5, 50_000_000, 3600 * 10**9, 20, HttpSource(port))
    snapshot = Snapshot(0, 0, 10**9, containers=(ContainerUsage(known, (), ()),))
    signal.read(snapshot, known.key, slo, monotonic_ns())
    until(lambda: counts(follower, known, port), "the server to be followed")
    until(lambda: _reading_after_requests(signal, snapshot, slo, port), "a reading")
    reading = signal.read(snapshot, known.key, slo, monotonic_ns())
    assert reading is not None
    assert reading.latency_ns is not None
    assert reading.latency_ns >= 0.98 * _DELAY_SECONDS * 1e9


def _reading_after_requests(signal: Http, snapshot: Snapshot, slo: Slo, port: int) -> object:
    for _ in range(10):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
            answer.read()
    return signal.read(snapshot, snapshot.containers[0].container.key, slo, monotonic_ns())


def test_probes_that_do_not_load_are_a_trouble_and_a_failure_and_nothing_worse(tmp_path: Path) -> None:
    proc = Procfs()
    known = ContainerIndex(proc).container_of(proc.process_id(os.getpid()))
    with closing(request_follower(proc, lambda: tmp_path / "http.bpf.o")) as follower:
        follower.watch(known, WatchedPort(8000), monotonic_ns())
        until(lambda: follower.failures, "a failure")
        until(lambda: "make bpf" in (follower.trouble(known.key) or ""), "the trouble")
        assert follower.watch(known, WatchedPort(8000), monotonic_ns()) is None
        assert losses(follower)["http:failed"] == 1


_FORKS = """
import os, signal, sys
sys.stdin.readline()
children = []
for _ in range(1100):
    child = os.fork()
    if not child:
        signal.pause()
    children.append(child)
print("done", flush=True)
sys.stdin.readline()
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
print("done", flush=True)
sys.stdin.readline()
"""


def test_a_service_that_forks_without_end_has_its_own_part_of_the_processes_and_no_more() -> None:
    with (
        HttpProbes(preflight.bpf_object().with_name("http.bpf.o")) as probes,
        subprocess.Popen([sys.executable, "-c", _FORKS], text=True, stdin=PIPE, stdout=PIPE) as service,
    ):
        assert service.stdin is not None
        assert service.stdout is not None
        probes.watch(0, 1, WatchedPort(8000))
        probes.follow(0, 1, service.pid)
        service.stdin.write("go\n")
        service.stdin.flush()
        service.stdout.readline()
        assert len(probes.followed()) == 1 + 1024
        assert details_of(probes.counts(0))["lost:no_process"] == 1100 - 1024
        service.stdin.write("go\n")
        service.stdin.flush()
        service.stdout.readline()
        until(lambda: len(probes.followed()) == 1, "its children to be forgotten")
        assert probes.counts(0).children == 0
        service.stdin.write("go\n")
        service.stdin.flush()
