# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is done to one container beyond gate and pace, as decisions tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from enforce.ladder import Reasons


@dataclass(frozen=True, slots=True)
class Standing:
    """What is done to one container beyond gate and pace (or would be), and what could not be done."""

    rungs: tuple[str, ...] = ()
    troubles: Mapping[str, str] = field(default_factory=dict)
    reasons: Reasons = field(default_factory=dict)  # of what is wanted


NOWHERE = Standing()
