# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The laws: pure functions from latency and state to the share that offline work may use."""

from __future__ import annotations

from typing import Any

from enforce.controller.laws.constant import Fixed, Off
from enforce.controller.laws.headroom import Headroom
from enforce.controller.laws.tgs import Tgs
from enforce.model import Law
from enforce.policy.model import OfflineRule, Tuning

BUILTIN: tuple[type[Any], ...] = (Headroom, Fixed, Tgs, Off)


def law_of(rule: OfflineRule, tuning: Tuning) -> Law[Any]:
    """The law that a rule names, with its limits."""
    for law in BUILTIN:
        if law.name == rule.law:
            made: Law[Any] = law.of(rule, tuning)
            return made
    raise KeyError(rule.law)
