# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which part of the SMs a launch keeps busy."""

from __future__ import annotations

import pytest

from agent.attribution.contention import sm_fraction


@pytest.mark.parametrize(
    ("blocks", "threads", "fraction"),
    [(66, 1024, 0.5), (132, 1024, 1.0), (264, 1024, 1.0), (264 + 132, 1024, 1.0), (264 + 66, 1024, 0.75), (0, 1, 1.0)],
)
def test_a_launch_keeps_as_many_sms_busy_as_it_has_blocks_for(blocks: int, threads: int, fraction: float) -> None:
    assert sm_fraction(blocks, threads, 132) == pytest.approx(fraction)
