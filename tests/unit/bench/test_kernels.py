# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is made of a machine's console, and whether the checks are tests that exist."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.kernels import guest
from bench.kernels.features import FEATURES, MARK, REFUSAL, arguments, cell, feature_of, row

_ROOT = Path(__file__).parents[3]
_MACHINE = {"wanted": "6.1", "cgroups": "v2"}
_STOPS, _WAITS = FEATURES["gate"][0], f"{FEATURES['waits'][0]}::test_each_request_is_one_latency"
_BEGINS, _ENDS = {"begins": "6.1.0-1-cloud-amd64"}, {"ends": True}


def record(test: str, outcome: str = "passed", **properties: object) -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "seconds": 1.5, "why": "because", "properties": properties}


def console(*lines: dict[str, Any] | str) -> str:
    return "\n".join(line if isinstance(line, str) else MARK + json.dumps(line) for line in lines)


@pytest.mark.parametrize("check", arguments(()))
def test_each_check_is_a_file_or_a_test_in_it(check: str) -> None:
    path, _, name = check.partition("::")
    assert (_ROOT / path).exists()
    assert not name or f"def {name}(" in (_ROOT / path).read_text()


def test_a_test_belongs_to_the_feature_that_names_it_most_precisely() -> None:
    assert feature_of(_STOPS) == "gate"
    assert feature_of("tests/kernel/launches/test_preempted.py::test_x") == "preempted"
    assert feature_of("tests/unit/test_layout.py::test_x") == ""


def test_a_machine_is_well_when_all_that_was_tried_works_and_it_ran_to_its_end() -> None:
    lines = [_BEGINS, record(_STOPS), record(_WAITS), _ENDS]
    found = row(_MACHINE, console("booting", *lines, "[  9.1] reboot: Power down"))
    assert found["ok"]
    assert found["kernel"] == "6.1.0-1-cloud-amd64"
    assert [cell(found, name) for name in ("gate", "waits", "pace")] == ["yes", "yes", "–"]
    assert not row(_MACHINE, console(*lines[:-1]))["ok"], "it did not run to its end"
    assert not row(_MACHINE, console(_BEGINS, _ENDS))["ok"], "nothing was tried"


def test_a_test_that_passes_at_the_second_try_is_one_and_one_that_does_not_is_a_failure() -> None:
    second = row(_MACHINE, console(_BEGINS, record(_STOPS, "failed"), record(_STOPS), _ENDS))
    assert second["ok"]
    assert cell(second, "gate") == "yes ²"
    failed = row(_MACHINE, console(_BEGINS, record(_STOPS, "failed"), record(_STOPS, "failed"), record(_WAITS), _ENDS))
    assert not failed["ok"]
    assert failed["features"]["gate"]["failed"] == {_STOPS.rpartition("::")[2]: "because"}
    assert (cell(failed, "gate"), cell(failed, "waits")) == ("NO", "yes")


def test_a_feature_all_of_whose_tests_were_skipped_does_not_work() -> None:
    skipped = row(_MACHINE, console(_BEGINS, record(_STOPS, "skipped"), record(_WAITS), _ENDS))
    assert not skipped["ok"]
    assert cell(skipped, "gate") == "NO"


def test_what_tests_say_of_the_kernel_is_in_the_table() -> None:
    memory = FEATURES["memory"][0]
    assert cell(row(_MACHINE, console(_BEGINS, record(memory, denies=True), _ENDS)), "memory") == "deny"
    assert cell(row(_MACHINE, console(_BEGINS, record(memory, denies=False), _ENDS)), "memory") == "hold"


@pytest.mark.parametrize(
    "complaint",
    [
        "[   54.518423] BUG: unable to handle page fault for address: 0000000cb05ef74a",
        "[   54.564557] WARNING: CPU: 1 PID: 375 at kernel/rcu/tasks.h:1995 exit_tasks_rcu_finish+0xf3/0x120",
        "[  100.000001] INFO: rcu_preempt detected stalls on CPUs/tasks:",
    ],
)
def test_a_kernel_that_complains_is_not_well_whatever_passed(complaint: str) -> None:
    found = row(_MACHINE, console(_BEGINS, record(_STOPS), complaint, _ENDS))
    assert not found["ok"]
    assert found["complaints"] == [complaint.partition("] ")[2]]


def test_a_kernel_that_is_too_old_is_well_when_it_is_refused_in_one_clear_line() -> None:
    assert row(_MACHINE, console(_BEGINS, record(REFUSAL, refusal="too old"), _ENDS))["ok"]
    assert not row(_MACHINE, console(_BEGINS, record(REFUSAL, "failed"), _ENDS))["ok"]


def test_a_line_that_the_kernel_wrote_into_is_left_out() -> None:
    broken = MARK + '{"test": "tests/ker[   9.1] random: crng init done'
    assert row(_MACHINE, console(_BEGINS, broken, record(_STOPS), _ENDS))["ok"]


def test_of_each_try_of_a_test_the_worst_phase_is_record(monkeypatch: pytest.MonkeyPatch) -> None:
    emitted: list[tuple[str, str]] = []
    monkeypatch.setattr(guest, "emit", lambda **what: emitted.append((what["test"], what["outcome"])))
    reporter = guest.Reporter()
    phases = [("setup", "passed"), ("call", "rerun"), ("teardown", "passed")]
    phases += [("setup", "passed"), ("call", "passed"), ("teardown", "passed")]
    reporter.pytest_runtest_logstart()
    for when, outcome in phases:
        report: Any = SimpleNamespace(nodeid="t", when=when, outcome=outcome, longrepr="", user_properties=[])
        reporter.pytest_runtest_logreport(report)
    assert emitted == [("t", "failed"), ("t", "passed")]
