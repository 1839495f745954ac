# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What tenants may put into a bounded map."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.collectors.tenants import credits_of

SIZE = 16384


@given(
    held=st.dictionaries(st.integers(0, 40), st.integers(0, SIZE // 4), max_size=20),
    ruled=st.sets(st.integers(0, 40), max_size=5),
)
def test_no_tenant_gets_beyond_a_quarter_of_the_map_nor_of_what_is_left_of_three_quarters_for_those_without_a_rule(
    held: dict[int, int], ruled: set[int]
) -> None:
    granted = credits_of(SIZE, held, held, ruled)
    newcomer = granted.pop(-1)
    assert newcomer > 0
    assert all(0 <= credit <= max(0, SIZE // 4 - held[tenant]) for tenant, credit in granted.items())
    others = [tenant for tenant in held if tenant not in ruled]
    before = sum(held[tenant] for tenant in others)
    free = max(0, SIZE * 3 // 4 - before)
    assert all(granted[tenant] <= max(free // 4, free // len(others)) for tenant in others)


def test_a_tenant_under_a_rule_has_its_part_though_all_others_are_at_their_bound() -> None:
    held = dict.fromkeys(range(1, 4), SIZE // 4)
    granted = credits_of(SIZE, held, [*held, 9], {9})
    assert granted[9] == SIZE // 4
    assert [granted[tenant] for tenant in held] == [0, 0, 0]
