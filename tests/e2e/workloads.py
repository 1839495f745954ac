# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The containers that keep the GPU busy, and whether their offline processes are stopped or launch kernels."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from tests.e2e.node import Node, state
from tools.harness.containers import Container
from tools.harness.wait import until

AFTERWARDS_SECONDS = 1.5
SETTLED_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Busy:
    """Containers that keep the GPU busy: an online one, offline ones that the policy names, one that it does not."""

    chat: Container
    training: tuple[Container, ...]
    stranger: Container


def all_stopped(tgids: list[int]) -> bool:
    return all(state(tgid) == "T" for tgid in tgids)


def until_all_stopped(tgids: list[int]) -> None:
    """And for a while: the first stop under a new policy may end early, as the request that it met was half seen."""
    since = time.monotonic()

    def settled() -> bool:
        nonlocal since
        if not all_stopped(tgids):
            since = time.monotonic()
        return time.monotonic() - since > SETTLED_SECONDS

    until(settled, "all offline processes to be stopped for a while", step_seconds=0.001)


def until_all_run(tgids: list[int]) -> None:
    """Where none is stopped again. How soon is printed; that no pause just ended is shown by `assert_none_stops`."""
    began = time.monotonic()
    until(lambda: not any(state(tgid) == "T" for tgid in tgids), "every process to run", step_seconds=0.001)
    print(f"all run after {(time.monotonic() - began) * 1e3:.0f} ms")


def stop_each(*tgids: int) -> None:
    """SIGSTOP; returns when they stand still."""
    for tgid in tgids:
        os.kill(tgid, signal.SIGSTOP)
    until(lambda: all_stopped(list(tgids)), f"{tgids} to stand still", step_seconds=0.001)


def stop_within_a_pause(others: list[int], tgids: list[int]) -> None:
    """Holds those still that keep every process stopped, the agent first, which would replace others that stand still.

    A pause may end just before they do.
    """

    def held() -> bool:
        until_all_stopped(tgids)
        stop_each(*others)
        if all_stopped(tgids):
            return True
        for tgid in others:
            os.kill(tgid, signal.SIGCONT)
        return False

    until(held, "a moment at which all offline processes are stopped")


def assert_none_stops(tgids: list[int]) -> None:
    """That none of them is stopped for a while: the time that passes is what is tested."""
    deadline = time.monotonic() + AFTERWARDS_SECONDS
    while time.monotonic() < deadline:
        assert not any(state(tgid) == "T" for tgid in tgids)
        time.sleep(0.001)


def until_launching(node: Node, tgids: list[int], since: dict[int, int] | None = None) -> None:
    before = node.truth() if since is None else since
    until(lambda: all(node.truth()[tgid] > before[tgid] for tgid in tgids), "launches of all offline processes")
