# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What enforcement says about a container, in a word or a figure. Pure."""

from __future__ import annotations

from typing import Final

from agent.model import Enforcement

HELD: Final = {"freeze": "frozen", "lock": "locked", "swap": "swapped", "evict": "evicted"}  # the mildest first
WHOLE_SHARE: Final = 0.9995
HARDLY: Final = 0.005  # of the time: less is written as 0 %


def slack(said: Enforcement) -> float | None:
    """How much of the target is left, as a ratio of it; negative where it is missed."""
    if said.latency_seconds is None or not said.target_seconds:
        return None
    return 1 - said.latency_seconds / said.target_seconds


def stopped(said: Enforcement) -> float | None:
    """The share of time that it stood still."""
    return 1.0 if _held(said) else said.paused_ratio


def state(said: Enforcement, enforcing: bool) -> str | None:
    """One word, with how much of the time it is stopped: free, paced, paused 36%, frozen. None: it is not offline."""
    if said.role != "offline":
        return None
    if not enforcing:
        return "free"
    if held := _held(said):
        return held
    if said.paused_ratio is not None and said.paused_ratio >= HARDLY:
        return f"paused {said.paused_ratio * 100:.0f}%"
    return "paced" if said.share_ratio is not None and said.share_ratio < WHOLE_SHARE else "free"


def _held(said: Enforcement) -> str | None:
    """The strongest rung where there is one: how often it was stopped besides says little then."""
    return next((word for rung, word in reversed(HELD.items()) if rung in said.rungs), None)
