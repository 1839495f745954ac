# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a failed read did not come to is read the next time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from agent.collectors.launches import Launches
from agent.collectors.samples import LaunchCount
from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.probes.abi import LaunchKey, LaunchValue


class Counts:
    """A map with one entry, which can fail."""

    def __init__(self, last_ns: int) -> None:
        self.last_ns, self.fails = last_ns, False

    def raw(self) -> Iterator[tuple[memoryview, memoryview]]:
        if self.fails:
            raise OSError(12, "Cannot allocate memory")
        key, value = (
            LaunchKey((10, 1), 0, 0, 7),
            LaunchValue(launches=1, kernels=1, blocks=1, last_ns=self.last_ns, threads_per_block=32),
        )
        yield memoryview(bytes(key)), memoryview(bytes(value))


class OneMap:
    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def map(self, name: str) -> Any:
        return self._counts if name == "launches" else Nothing()


class Nothing:
    def raw(self) -> Iterator[tuple[memoryview, memoryview]]:
        return iter(())


def test_launches_of_the_time_of_a_failed_read_are_seen_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now = monotonic_ns()
    counts = Counts(last_ns=now + NS_PER_SECOND)
    collector = Launches(OneMap(counts))  # type: ignore[arg-type]
    at = iter([now, now + 10 * NS_PER_SECOND, now + 20 * NS_PER_SECOND, now + 30 * NS_PER_SECOND])
    monkeypatch.setattr("agent.collectors.launches.monotonic_ns", lambda: next(at))
    list(collector.collect(0))
    counts.fails = True
    with pytest.raises(OSError, match="Cannot allocate"):
        list(collector.collect(0))
    counts.fails = False
    assert [one.launches for one in collector.collect(0) if isinstance(one, LaunchCount)] == [1]
    assert not [one for one in collector.collect(0) if isinstance(one, LaunchCount)]  # it did not change since
