# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Splitting what there is: fair by weight, nothing left lying."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enforce.fair import Claim, parts
from enforce.policy.quantities import Weight

weights = st.floats(Weight().least, Weight().most)  # all that a policy may say
claims = st.dictionaries(st.integers(0, 20), st.builds(Claim, weights, st.floats(0, 1)), min_size=1, max_size=12)


@given(claims)
def test_no_more_is_given_than_there_is_and_none_gets_more_than_it_wants(claims: dict[int, Claim]) -> None:
    given_parts = parts(claims)
    assert sum(given_parts.values()) <= 1 + 1e-9
    assert all(0 <= given_parts[who] <= claim.wanted + 1e-9 for who, claim in claims.items())


@given(claims)
def test_nothing_is_left_lying_that_somebody_wants(claims: dict[int, Claim]) -> None:
    wanted = sum(claim.wanted for claim in claims.values())
    assert sum(parts(claims).values()) == pytest.approx(min(1.0, wanted), abs=1e-6)


@given(claims)
def test_who_is_not_content_has_by_weight_no_less_than_anybody(claims: dict[int, Claim]) -> None:
    given_parts = parts(claims)
    for who, claim in claims.items():
        if given_parts[who] < claim.wanted - 1e-6:
            mine = given_parts[who] / claim.weight
            assert all(mine >= given_parts[other] / one.weight - 1e-6 for other, one in claims.items())


def test_three_to_one() -> None:
    assert parts({"a": Claim(3.0), "b": Claim(1.0)}) == {"a": 0.75, "b": 0.25}


def test_what_one_leaves_the_others_share_by_weight() -> None:
    split = parts({"a": Claim(1.0, 0.1), "b": Claim(2.0), "c": Claim(1.0)})
    assert split == pytest.approx({"a": 0.1, "b": 0.6, "c": 0.3})


def test_no_weight_is_too_small_to_be_split_by() -> None:
    assert parts({"a": Claim(1e-320), "b": Claim(1e-320)}) == {"a": 0.5, "b": 0.5}
