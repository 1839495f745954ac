# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Links are taken away together, as each waits for a grace period of the kernel; and so where no thread can be had."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

import pytest

from agent.probes.libbpf import BpfLink, BpfObject


class Attached(BpfObject):
    """Nothing but links."""

    def __init__(self, links: Iterable[BpfLink]) -> None:
        self._links, self._object = set(links), None


class Patient(Attached):
    """Whose links are only taken away once the last one is being taken away."""

    def detach(self, link: BpfLink) -> None:
        self._links.discard(link)
        self._all_of_them.wait(timeout=10)

    def __init__(self, links: Iterable[BpfLink]) -> None:
        super().__init__(links)
        self._all_of_them = threading.Barrier(len(self._links))


def test_all_links_wait_for_the_same_grace_period() -> None:
    bpf = Patient(BpfLink(descriptor, is_descriptor=True) for descriptor in range(20))
    bpf.close()
    assert not bpf._links


def test_without_threads_each_is_taken_away_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    descriptors = [*os.pipe(), *os.pipe()]
    monkeypatch.setattr(threading.Thread, "start", start)
    Attached(BpfLink(descriptor, is_descriptor=True) for descriptor in descriptors).close()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
