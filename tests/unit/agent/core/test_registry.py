# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Parts that register losses and listeners: one that fails hides nothing of the others."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest

from agent.core.registry import Listeners, LossRegistry


class Counters:
    """A source of losses that can fail."""

    def __init__(self, **counts: int) -> None:
        self.counts = counts
        self.fails = False

    def read(self) -> Mapping[str, int]:
        if self.fails:
            raise OSError("the map is gone")
        return {f"part:{name}": count for name, count in self.counts.items()}


def test_counts_of_all_sources_are_merged_and_equal_keys_are_added_up() -> None:
    losses = LossRegistry()
    losses.register("one", Counters(full=2, late=1).read)
    losses.register("two", Counters(full=3).read)
    assert losses.counts() == {"part:full": 5, "part:late": 1}
    assert losses.failures() == {}


def test_a_source_counts_until_its_registration_is_closed() -> None:
    losses = LossRegistry()
    with losses.register("one", Counters(full=2).read) as registration:
        assert losses.counts() == {"part:full": 2}
    assert losses.counts() == {}
    registration.close()
    assert losses.counts() == {}


def test_two_registrations_of_one_name_are_closed_separately() -> None:
    losses = LossRegistry()
    before = losses.register("enforcement", Counters(full=2).read)
    losses.register("enforcement", Counters(late=1).read)
    before.close()
    assert losses.counts() == {"part:late": 1}


def test_a_source_that_raises_is_counted_by_name_and_keeps_its_last_counts(caplog: pytest.LogCaptureFixture) -> None:
    losses, broken = LossRegistry(), Counters(full=2)
    losses.register("broken", broken.read)
    losses.register("sound", Counters(late=1).read)
    assert losses.counts() == {"part:full": 2, "part:late": 1}
    broken.fails = True
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert losses.counts() == {"part:full": 2, "part:late": 1}
    assert losses.failures() == {"broken:unread_losses": 3}
    assert len(caplog.records) == 1


def test_a_listener_that_raises_is_counted_and_the_others_are_called(caplog: pytest.LogCaptureFixture) -> None:
    listeners: Listeners[int] = Listeners()
    heard: list[int] = []

    def fail(_: int) -> None:
        raise ZeroDivisionError

    listeners.register(fail)
    registration = listeners.register(heard.append)
    for value in (1, 2):
        listeners.notify(value)
    registration.close()
    listeners.notify(3)
    assert heard == [1, 2]
    assert listeners.failures == 3
    assert len(caplog.records) == 1
