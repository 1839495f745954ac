# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the hypervisor took of the CPUs."""

from __future__ import annotations

import os

import pytest

from tools.harness.quiet import Stolen


def test_what_was_stolen_is_a_share_of_all_cpus_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus, then = os.cpu_count() or 1, Stolen.now()
    monkeypatch.setattr(Stolen, "now", lambda: Stolen(then.at + 10, then.seconds + 3 * cpus))
    assert then.ratio() == pytest.approx(0.3)
