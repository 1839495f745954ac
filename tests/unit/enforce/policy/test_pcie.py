# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The section `pcie`, and the bound that is printed where it is on."""

from __future__ import annotations

import pytest

from agent.core.errors import PolicyError
from enforce.policy.findings import summary
from enforce.policy.load import parse
from enforce.policy.model import Pcie

HEAD = "version: 1\n"


def test_copies_are_not_paced_unless_the_policy_says_so() -> None:
    policy = parse(HEAD, "p")
    assert policy.pcie == Pcie(pace=False, bytes_per_second=None)
    assert "copies" not in summary(policy)


def test_the_bound_of_an_online_copy_is_in_the_summary() -> None:
    known = parse(HEAD + "pcie: {pace: true, bandwidth: 12GB}\n", "p")
    assert known.pcie == Pcie(pace=True, bytes_per_second=12_000_000_000)
    assert "0.5 ms of offline copies at most, and for one whole one (64 MB at 12 GB/s: 5.3 ms)" in summary(known)
    assert "(its bytes / the link's speed)" in summary(parse(HEAD + "pcie: {pace: true}\n", "p"))


@pytest.mark.parametrize(
    ("section", "what"),
    [
        ("{pace: maybe}", "pace"),
        ("{pace: true, bandwidth: 12}", "without a unit"),
        ("{pace: true, bandwidth: 12GB/s}", "GB"),
        ("{paced: true}", "pace"),
    ],
)
def test_a_mistake_says_what_to_write_instead(section: str, what: str) -> None:
    with pytest.raises(PolicyError, match=what):
        parse(f"{HEAD}pcie: {section}\n", "p")
