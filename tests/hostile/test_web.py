# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Clients that try to keep all others from being answered by the agent's port: of another user, on many addresses."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.exporters.prometheus import collector
from tests.support.serving import TcpServer
from tests.support.snapshots import rich_snapshot

_CROWD = Path(__file__).parent / "programs" / "crowd.py"
_SCRAPES = 10
_NOBODY = 65534


@contextmanager
def crowd(port: int, way: str) -> Iterator[None]:
    """Two processes that open connections as fast as they can."""
    command = [sys.executable, str(_CROWD), str(port), way, str(_NOBODY)]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for one in both:
            assert one.stdout
            assert one.stdout.readline() == "there\n"
        yield
    finally:
        for one in both:
            one.communicate(timeout=60)


@pytest.mark.parametrize("way", ["mute", "half"])
def test_every_scrape_beside_a_crowd_of_loopback_addresses_is_answered(way: str) -> None:
    failed = []
    with TcpServer({"/metrics": collector.application(rich_snapshot)}) as server, crowd(server.port, way):
        for _ in range(_SCRAPES):
            try:
                with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
                    assert answer.read().startswith(b"# HELP")
            except OSError as error:
                failed.append(error)
    assert not failed
