# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How the rounds of the bench of copies are judged."""

from __future__ import annotations

from bench.pcie.run import bound_ns, failures, spread

MS = 1e6
GOOD = {
    "share 1:1": 0.51,
    "share 1:2": 0.34,
    "share 1:4": 0.196,
    "p99 alone": 0.2 * MS,
    "p99 held 4000000": 1.9 * MS,
    "p99 held 64000000": 7.0 * MS,
}


def test_the_bound_is_what_may_be_under_way_and_one_copy() -> None:
    assert bound_ns(12_000_000) == 1.5 * MS


def test_shares_near_the_weights_and_latencies_within_the_bound_hold() -> None:
    assert failures([GOOD]) == []


def test_every_round_is_judged() -> None:
    missed = failures([GOOD, GOOD | {"share 1:4": 0.215}, GOOD | {"p99 held 64000000": 8.0 * MS}])
    assert [line.split(":")[0] for line in missed] == ["round 2", "round 3"]


def test_a_figure_is_reported_by_its_least_middle_and_greatest_round() -> None:
    rounds = [{"share 1:1": value} for value in (0.5, 0.4, 0.6)]
    assert spread(rounds) == {"share 1:1": (0.4, 0.5, 0.6)}
