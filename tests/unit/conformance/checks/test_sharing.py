# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Turns of two processes, and when a newcomer has its share, from when their kernels ended."""

from __future__ import annotations

from conformance.checks.sharing import Turn, share_after_ns, turns
from conformance.checks.stopping.timeline import Timeline

MS = 1_000_000


def test_a_turn_lasts_from_the_end_of_the_others_last_kernel_to_that_of_its_own() -> None:
    assert turns([1, 2, 3, 7, 8, 13], [5, 6, 10, 11]) == [Turn(False, 3, 2), Turn(True, 2, 2), Turn(False, 3, 2)]


def test_one_process_alone_has_no_turns() -> None:
    assert turns([1, 2, 3], []) == []
    assert turns([], []) == []


def test_a_newcomer_has_its_share_with_the_first_window_that_is_like_the_later_ones() -> None:
    slow, fast = range(0, 400, 100), range(400, 2000, 10)  # a kernel each 100 ms, then one each 10 ms
    line = Timeline((0,), [at * MS for at in (*slow, *fast)])
    found = share_after_ns(line, 0, 1000 * MS, 2000 * MS)
    assert found is not None
    assert 400 * MS < found <= 460 * MS


def test_a_newcomer_that_gets_nothing_has_no_share() -> None:
    assert share_after_ns(Timeline((0,), []), 0, 1000 * MS, 2000 * MS) is None
