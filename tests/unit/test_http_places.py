# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Who is watched where more containers have the signal `http` than there are places."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.http.layout import WATCHES
from agent.http.probes import HttpProbes
from agent.http.watching import HttpWatching, Wish, admitted
from agent.model import Container, ContainerKey
from agent.procfs import Procfs

Wishes = dict[ContainerKey, Wish]


@dataclass
class Pretended:
    """Probes that know which place is whose port."""

    ports: dict[int, int] = field(default_factory=dict)

    def watch(self, place: int, epoch: int, port: int, path: str) -> None:
        assert place not in self.ports
        self.ports[place] = port

    def unwatch(self, place: int) -> None:
        del self.ports[place]


def wishes(kind: str, number: int, annotated: bool) -> Wishes:
    keys = [ContainerKey(f"docker:{kind}-{one:03}") for one in range(number)]
    return {key: Wish(Container(key, key, "docker"), 8000, annotated=annotated) for key in keys}


def test_the_policy_files_containers_are_watched_whatever_is_annotated(caplog: pytest.LogCaptureFixture) -> None:
    watching, probes = HttpWatching(Procfs(), Path), Pretended()
    annotated, own = wishes("annotated", WATCHES, annotated=True), wishes("own", 40, annotated=False)

    def assign(all_of: Wishes) -> set[ContainerKey]:
        watching._assign(cast(HttpProbes, probes), all_of)
        assert len(probes.ports) == len(watching._watched)
        return set(watching._watched)

    with caplog.at_level(logging.ERROR):
        assert len(assign(annotated)) == WATCHES // 2
        before = assign({**annotated, **own})
        assert before >= own.keys()
        assert len(before) == WATCHES
        assert all(assign({**annotated, **own}) == before for _ in range(10))
    assert len(caplog.records) == 1
    assert watching.failures == WATCHES // 2 + (WATCHES // 2 - (WATCHES - 40))  # each container once
    refused = next(key for key in annotated if key not in before)
    assert "more than 64 containers" in (watching.trouble(refused) or "")
    assign(own)
    assert watching.trouble(refused) == "its requests are counted from now on"


NUMBERS = st.integers(0, 2 * WATCHES)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_annotated_ones_take_at_most_half_and_never_a_place_of_the_files(own: int, annotated: int, kept: int) -> None:
    of_file, of_pods = wishes("own", own, annotated=False), wishes("annotated", annotated, annotated=True)
    everybody = {**of_pods, **of_file}
    placed = admitted(everybody, ())
    assert len(placed.keys() & of_file.keys()) == min(own, WATCHES)
    assert len(placed.keys() & of_pods.keys()) == min(annotated, WATCHES // 2, WATCHES - min(own, WATCHES))
    some = set(list(placed)[:kept])
    assert admitted(dict(reversed(everybody.items())), some).keys() >= some
