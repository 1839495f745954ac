# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The latest decisions, as the status page lists them."""

from __future__ import annotations

from enforce.audit.history import DecisionHistory
from enforce.audit.text import MOST, MOST_EACH, recent
from enforce.memory.accounts import MemoryDecision
from tests.support.decisions import CHAT, NS, OFFSET, TRAIN, at


def history(decisions: int) -> DecisionHistory:
    """Ten decisions a second that change their reason each time."""
    made = DecisionHistory(now=lambda: ((decisions + 1) * NS // 10, OFFSET))
    for number in range(decisions):
        made.update_containers([TRAIN, CHAT], number * NS // 10)
        reason = "slack 40%: waiting to grow" if number % 2 else "target missed by 5%: shorter queue"
        made.record_decision(at(number / 10, reason=reason, share_after=0.5), number * NS // 10)
    return made


def test_a_container_that_is_decided_about_all_the_time_has_a_few_lines_the_newest_first() -> None:
    lines = recent(history(600))
    assert 1 < len(lines) <= MOST_EACH
    assert [line.wall_ns for line in lines] == sorted((line.wall_ns for line in lines), reverse=True)
    assert {line.container for line in lines} == {TRAIN.name}
    assert "share 50 %" in lines[-1].what
    assert "waiting to grow" in lines[-1].why
    assert lines[-1].why.endswith(f"(for {CHAT.name})")


def test_reading_the_list_changes_nothing_of_what_is_remembered() -> None:
    made = history(300)
    before = made.explain(TRAIN.key)
    recent(made)
    assert made.explain(TRAIN.key) == before


def test_what_was_done_for_memory_is_among_them() -> None:
    made = history(5)
    made.for_memory.append(
        MemoryDecision(OFFSET + 60 * NS, TRAIN.key, "", "training", "deny", 3, 1, "nvml", 1, "over its quota", True)
    )
    first = recent(made)[0]
    assert (first.container, first.what, first.why, first.acted) == (TRAIN.name, "deny ×3", "over its quota", True)


def test_there_are_never_more_than_a_screenful() -> None:
    made = history(5)
    made.for_memory.extend(
        MemoryDecision(n, "gone", "", "r", "swap", 1, 1, "nvml", None, "no room", False) for n in range(100)
    )
    lines = recent(made)
    assert len(lines) == MOST
    assert {line.container for line in lines} <= {TRAIN.name, "gone"}


def test_without_a_decision_there_is_no_line() -> None:
    assert recent(DecisionHistory()) == []
