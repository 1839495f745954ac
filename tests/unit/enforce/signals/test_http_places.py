# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which containers are watched where more of them have the signal `http` than there are places."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.model import Container, ContainerKey
from agent.core.worker import Worker
from agent.node.procfs import Procfs
from enforce.signals.http import admitted, losses, request_follower
from enforce.signals.http_probe import WATCHES, HttpProbes, HttpProcessProbes, WatchedPort

Wanted = dict[ContainerKey, WatchedPort]


@dataclass
class Pretended:
    """Probes that know which place has which port."""

    ports: dict[int, int] = field(default_factory=dict)

    def watch(self, place: int, epoch: int, source: WatchedPort) -> None:
        assert place not in self.ports
        self.ports[place] = source.port

    def unwatch(self, place: int) -> None:
        del self.ports[place]

    def followed(self) -> dict[int, int]:
        return {}

    def tallies(self) -> dict[str, int]:
        return {}


def wanted(kind: str, number: int, annotated: bool) -> Wanted:
    keys = [ContainerKey(f"docker:{kind}-{one:03}") for one in range(number)]
    return {key: WatchedPort(8000, annotated=annotated) for key in keys}


class NoProcesses:
    """Containers without processes."""

    def of(self, container: Container) -> set[int]:
        return set()

    def forget(self, container: ContainerKey) -> None:
        """Nothing."""


def test_the_policy_files_containers_are_watched_whatever_is_annotated(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "start", lambda _: None)  # the test makes the rounds
    follower, probes = request_follower(Procfs(), Path), Pretended()
    follower._kernel.probes = HttpProcessProbes(cast(HttpProbes, probes))
    follower._processes = NoProcesses()
    monkeypatch.setattr("enforce.signals.process_follower.monotonic_ns", lambda: 0)
    annotated, own = wanted("annotated", WATCHES, annotated=True), wanted("own", 40, annotated=False)

    def assign(all_of: Wanted) -> set[ContainerKey]:
        for key in list(follower._watches):
            if key not in all_of:
                follower.forget(key)
        for key, port in all_of.items():
            follower.watch(Container(key, key, "docker"), port, 0)
        follower.step()
        watched = {key for key, watch in follower._watches.items() if watch.number is not None}
        assert len(probes.ports) == len(watched)
        return watched

    with caplog.at_level(logging.ERROR):
        assert len(assign(annotated)) == WATCHES // 2
        before = assign({**annotated, **own})
        assert before >= own.keys()
        assert len(before) == WATCHES
        assert all(assign({**annotated, **own}) == before for _ in range(10))
    assert len(caplog.records) == 1
    failed = WATCHES // 2 + (WATCHES // 2 - (WATCHES - 40))  # each container once
    assert sum(follower.failures.values()) == losses(follower)["http:failed"] == failed
    refused = next(key for key in annotated if key not in before)
    assert "more than 64 containers" in (follower.trouble(refused) or "")
    assign(own)
    assert follower.trouble(refused) == "its processes have not been looked for yet"


NUMBERS = st.integers(0, 2 * WATCHES)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_annotated_ones_take_at_most_half_and_never_a_place_of_the_files(own: int, annotated: int, kept: int) -> None:
    of_file, of_pods = wanted("own", own, annotated=False), wanted("annotated", annotated, annotated=True)
    all_of = {**of_pods, **of_file}
    placed = admitted(all_of, ())
    assert len(placed.keys() & of_file.keys()) == min(own, WATCHES)
    assert len(placed.keys() & of_pods.keys()) == min(annotated, WATCHES // 2, WATCHES - min(own, WATCHES))
    some = set(list(placed)[:kept])
    assert admitted(dict(reversed(all_of.items())), some).keys() >= some
