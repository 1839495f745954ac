# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Splitting what there is: fair by weight, nothing left lying."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enforce.controller.decision import ShareClaim, parts
from enforce.policy.schema import LEAST_WEIGHT, MOST_WEIGHT

weights = st.floats(LEAST_WEIGHT, MOST_WEIGHT)  # all that a policy may say
claims = st.dictionaries(st.integers(0, 20), st.builds(ShareClaim, weights, st.floats(0, 1)), min_size=1, max_size=12)


@given(claims)
def test_no_more_is_given_than_there_is_and_none_gets_more_than_it_wants(claims: dict[int, ShareClaim]) -> None:
    given_parts = parts(claims)
    assert sum(given_parts.values()) <= 1 + 1e-9
    assert all(0 <= given_parts[key] <= claim.wanted + 1e-9 for key, claim in claims.items())


@given(claims)
def test_nothing_that_is_wanted_stays_unused(claims: dict[int, ShareClaim]) -> None:
    wanted = sum(claim.wanted for claim in claims.values())
    assert sum(parts(claims).values()) == pytest.approx(min(1.0, wanted), abs=1e-6)


@given(claims)
def test_a_claim_that_is_not_met_has_by_weight_no_less_than_any_other(claims: dict[int, ShareClaim]) -> None:
    given_parts = parts(claims)
    for key, claim in claims.items():
        if given_parts[key] < claim.wanted - 1e-6:
            mine = given_parts[key] / claim.weight
            assert all(mine >= given_parts[other] / one.weight - 1e-6 for other, one in claims.items())


def test_three_to_one() -> None:
    assert parts({"a": ShareClaim(3.0), "b": ShareClaim(1.0)}) == {"a": 0.75, "b": 0.25}


def test_what_one_leaves_the_others_share_by_weight() -> None:
    split = parts({"a": ShareClaim(1.0, 0.1), "b": ShareClaim(2.0), "c": ShareClaim(1.0)})
    assert split == pytest.approx({"a": 0.1, "b": 0.6, "c": 0.3})


def test_no_weight_is_too_small_to_be_split_by() -> None:
    assert parts({"a": ShareClaim(1e-320), "b": ShareClaim(1e-320)}) == {"a": 0.5, "b": 0.5}
