# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Servers of the usual kinds, followed by their first process alone: every request counts, and how long it took."""

from __future__ import annotations

import http.client
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import pytest

from agent.node import preflight
from enforce.signals.http_probe import HttpProbes, WatchedPort
from tests.kernel.signals.http_servers import BODY, KINDS
from tests.support.programs.driver import bounds
from tools.harness.wait import until

_DELAY_NS = 3_000_000
_CLIENTS, _REQUESTS = 4, 10
_PATIENCE_SECONDS = 60.0


@pytest.fixture
def probes() -> Iterator[HttpProbes]:
    with HttpProbes(preflight.bpf_object().with_name("http.bpf.o")) as probes:
        yield probes


@contextmanager
def serving(kind: str, probes: HttpProbes) -> Iterator[int]:
    """Its port. It is followed from before it forks anything."""
    command = [sys.executable, "-m", "tests.kernel.signals.http_servers", kind, str(_DELAY_NS / 1e9)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            probes.follow(0, 1, server.pid)
            assert server.stdin
            assert server.stdout
            port = int(server.stdout.readline())
            probes.watch(0, 1, WatchedPort(port))
            server.stdin.write("go\n")
            server.stdin.flush()
            yield port
        finally:
            server.kill()


def ask(port: int) -> None:
    """So many requests on one connection, every other with a body."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        for number in range(_REQUESTS):
            connection.request(*(("POST", "/", b"y" * 30_000) if number % 2 else ("GET", "/")))
            assert connection.getresponse().read() == BODY


def counted(probes: HttpProbes, count: int) -> Any:
    """A client may have the last byte before the server's write has returned."""
    until(lambda: probes.latencies(0).count >= count, lambda: f"{count} latencies, not {probes.latencies(0).count}")
    return probes.latencies(0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_counts_and_lasts_no_less_than_the_server_waits(probes: HttpProbes, kind: str) -> None:
    with serving(kind, probes) as port, ThreadPoolExecutor(_CLIENTS) as pool:
        list(pool.map(ask, [port] * _CLIENTS))
        found, tallies = counted(probes, _CLIENTS * _REQUESTS), probes.tallies()
    assert found.count == sum(found.buckets) == _CLIENTS * _REQUESTS
    assert found.sum_ns >= found.count * _DELAY_NS
    least, most = bounds(found)
    assert least <= found.sum_ns <= most
    assert {name: count for name, count in tallies.items() if count} == {"answered": found.count}
