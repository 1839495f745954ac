# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Clients that want the signal `http` to say something else of a service than what it does for others."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.node import preflight
from agent.probes.abi import quantile_ns
from enforce.signals.http_probe import CONNECTIONS, HttpProbes, WatchedPort, details_of
from tools.harness.wait import until

_CLIENT = Path(__file__).parent / "programs" / "http_client.py"
_WORK_SECONDS = 0.05  # of an honest request, by design
_PLACE, _EPOCH = 3, 1
_BACKLOG = 4096


@pytest.fixture
def probes() -> Iterator[HttpProbes]:
    with HttpProbes(preflight.bpf_object().with_name("http.bpf.o")) as probes:
        yield probes


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            if b"Content-Length: 20" in head:
                await reader.readexactly(20)
            if b"/work" in head:
                await asyncio.sleep(_WORK_SECONDS)
            status = b"404 Not Found" if b"/absent" in head else b"200 OK"
            writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\n\r\nok")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    serving = asyncio.all_tasks() - {asyncio.current_task()}
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)
    await asyncio.sleep(0)  # for the sockets to be closed


@contextmanager
def service() -> Iterator[int]:
    """Its port, in a thread of this process."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 8192), most), most))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    start = asyncio.start_server(_serve, "127.0.0.1", 0, backlog=_BACKLOG)
    server = asyncio.run_coroutine_threadsafe(start, loop).result(60)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))


def watch(probes: HttpProbes, place: int, port: int) -> None:
    """Counts the port's requests at a place."""
    probes.watch(place, _EPOCH, WatchedPort(port))
    probes.follow(place, _EPOCH, os.getpid())


def work(port: int, times: int) -> None:
    """An honest client."""
    for _ in range(times):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/work", timeout=60) as answer:
            answer.read()


def attack(way: str, port: int, count: int) -> None:
    """Until it ends."""
    subprocess.run([sys.executable, _CLIENT, way, str(port), str(count)], check=True, timeout=120)


@contextmanager
def occupying(way: str, port: int, count: int) -> Iterator[None]:
    """While its connections are there."""
    command = [sys.executable, str(_CLIENT), way, str(port), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin
        assert client.stdout
        assert client.stdout.readline() == "there\n"
        yield
        client.stdin.close()


def median_ms(probes: HttpProbes) -> float | None:
    """Of all requests so far; None without any."""
    found = probes.latencies(_PLACE)
    median = quantile_ns(dict(enumerate(found.buckets)), 0.5) if found.count else None
    return None if median is None else median / 1e6


def test_answers_that_are_errors_make_no_service_look_quick(probes: HttpProbes) -> None:
    with service() as port:
        watch(probes, _PLACE, port)
        attack("errors", port, 300)
        until(lambda: details_of(probes.counts(_PLACE))["status:4xx"] == 300, "the errors to be counted")
        assert probes.latencies(_PLACE).count == 0, "a service that only errs has no latency, not a small one"
        work(port, 30)
        until(lambda: probes.latencies(_PLACE).count == 30, "the honest requests")
    assert details_of(probes.counts(_PLACE))["status:2xx"] == 30
    assert (median_ms(probes) or 0) >= 0.97 * 1e3 * _WORK_SECONDS


@pytest.mark.parametrize("way", ["slow_heads", "slow_bodies"])
def test_a_client_that_takes_a_second_to_ask_makes_no_answer_slow(probes: HttpProbes, way: str) -> None:
    with service() as port:
        watch(probes, _PLACE, port)
        attack(way, port, 3)
        until(lambda: probes.latencies(_PLACE).count == 3, "the requests")
    assert probes.latencies(_PLACE).sum_ns < 3 * 0.2 * 1e9
    seen = details_of(probes.counts(_PLACE))
    assert seen["ns:receive"] > 3 * 0.8e9, "how long they took to ask is kept"
    assert (seen["ns:head"] > 3 * 0.8e9) == (way == "slow_bodies")


@pytest.mark.parametrize("way", ["idle", "halves"])
def test_thousands_of_connections_of_one_client_hide_no_request_of_another(probes: HttpProbes, way: str) -> None:
    crowd = 3 * CONNECTIONS
    with service() as port, occupying(way, port, crowd):
        watch(probes, _PLACE, port)
        with occupying(way, port, crowd - 500):
            work(port, 50)
            until(lambda: probes.latencies(_PLACE).count == 50, lambda: f"50, not {probes.latencies(_PLACE).count}")
            lost = {name: n for name, n in details_of(probes.counts(_PLACE)).items() if name.startswith("lost:") and n}
            assert not lost
