# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What follows from a trial of return probes under seccomp."""

from __future__ import annotations

import errno
import signal

import pytest

from agent.probes.return_probes import ReturnProbes, danger_of, no_returns, why_off


def test_processes_that_survive_and_whose_returns_are_seen_are_no_danger() -> None:
    assert danger_of((0, 0), 4) is None


@pytest.mark.parametrize("statuses", [(-signal.SIGKILL, 0), (0, -signal.SIGSYS), (0, -signal.SIGSEGV)])
def test_one_that_is_killed_is_enough_and_the_reason_says_what_to_do(statuses: tuple[int, int]) -> None:
    reason = danger_of(statuses, 1) or ""
    assert signal.Signals(-min(statuses)).name in reason
    assert "upgrade to Linux 6.14" in reason


@pytest.mark.parametrize(("statuses", "returns"), [((0, 0), 0), ((0, 0), 2), ((1, 0), 4), ((0, 22), 4)])
def test_a_trial_that_proves_nothing_is_a_danger(statuses: tuple[int, int], returns: int) -> None:
    assert "gave no answer" in (danger_of(statuses, returns) or "")


@pytest.mark.parametrize(("own", "returns", "safe"), [(0, 4, True), (0, 3, False), (-signal.SIGSYS, 3, False)])
def test_where_strict_mode_is_refused_the_filter_decides(own: int, returns: int, *, safe: bool) -> None:
    """As under systemd's SystemCallFilter or a runtime's profile: prctl's EINVAL as the exit status."""
    assert (danger_of((256 - errno.EINVAL, own), returns) is None) == safe


def test_a_trial_that_proves_nothing_is_reported_as_it_was_seen() -> None:
    """As in a PID namespace, where the probe sees no process of the number that it was given."""
    assert f"exit statuses {(256 - errno.EINVAL, 0)}, 0 returns seen" in (danger_of((256 - errno.EINVAL, 0), 0) or "")


def test_off_needs_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.probes.return_probes.try_out", lambda: pytest.fail("nothing is to be tried"))
    assert no_returns(why_off(ReturnProbes.OFF)) == "return probes are off: --return-probes off"
