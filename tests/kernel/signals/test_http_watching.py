# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A real container with a server that uses no GPU: its processes are found, and its requests become readings."""

from __future__ import annotations

import os
import secrets
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agent import preflight
from agent.clock import monotonic_ns
from agent.containers.index import ContainerIndex
from agent.containers.residents import Residents
from agent.http.layout import LOSSES
from agent.http.watching import HttpWatching, Wish
from agent.model import Container as Known
from agent.model import ContainerUsage, Snapshot
from agent.procfs import Procfs
from bench.containers import Container, Mount
from enforce.policy.model import HttpSource, Slo
from enforce.signals.http import Http
from enforce.signals.requests import Requests

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


def until(condition: Callable[[], object]) -> None:
    """Polls; AssertionError when it stays false."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_front_end_in_a_container_has_latencies(container: Container) -> None:
    proc = Procfs()
    known = ContainerIndex(proc).container_of(proc.process_id(container.tgid))
    assert container.stdout
    port = int(container.stdout.readline())
    container.stdin.write("go\n")
    container.stdin.flush()
    assert container.tgid in Residents(proc).of(known)
    with closing(HttpWatching(proc, lambda: preflight.bpf_object().with_name("http.bpf.o"))) as watching:
        assert watching.losses() == {}
        assert watching.trouble(known.key)
        _read_until_there_is_a_reading(watching, known, port)
        assert set(watching.losses()) == {f"http:{name}" for name in (*LOSSES, "failed")}
        assert watching.losses()["http:failed"] == 0
        until(lambda: watching.trouble(known.key) is None)
        watching.forget(known.key)
        until(lambda: watching.buckets(known.key) is None)
        before = watching.tallies()["answered"]
        assert before >= 20
        watching.want(Wish(known, port), monotonic_ns())
        until(lambda: watching.buckets(known.key) is not None)
        assert watching.tallies()["answered"] == before


def _read_until_there_is_a_reading(watching: HttpWatching, known: Known, port: int) -> None:
    signal = Http(watching, Requests(), [])
    slo = Slo("http", 0.5, 50_000_000, 3600 * 10**9, 20, HttpSource(port))
    snapshot = Snapshot(0, 0, 10**9, containers=(ContainerUsage(known, (), ()),))
    signal.read(snapshot, known.key, slo, monotonic_ns())
    until(lambda: watching.buckets(known.key) is not None)
    until(lambda: _reading_after_requests(signal, snapshot, slo, port))
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
    with closing(HttpWatching(proc, lambda: tmp_path / "http.bpf.o")) as watching:
        watching.want(Wish(known, 8000), monotonic_ns())
        until(lambda: watching.failures)
        until(lambda: "make bpf" in (watching.trouble(known.key) or ""))
        assert watching.buckets(known.key) is None
        assert watching.losses()["http:failed"] == 1
