# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What has to work on every kernel, the tests that show each, and what a machine's lines say of it. Pure.

Tests that judge times of milliseconds are left out: the machines are emulated, an order of magnitude slower.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final

MARK: Final = "@@ "  # begins a line of a machine, which is a JSON object
REFUSAL: Final = "refusal"
_KERNEL: Final = "tests/kernel/"
_E2E: Final = "tests/e2e/"
FEATURES: Final[Mapping[str, Sequence[str]]] = {
    "load": (f"{_KERNEL}probes/test_layout.py", f"{_KERNEL}signals/test_http_layout.py"),
    "attach": (f"{_KERNEL}probes/test_every_symbol.py", f"{_KERNEL}probes/test_without_uprobe_multi.py"),
    "preempted": (f"{_KERNEL}launches/test_preempted.py",),
    "counts": (
        f"{_KERNEL}launches/test_launches.py",
        f"{_KERNEL}memory/test_memory_and_copies.py",
    ),
    "waits": (f"{_KERNEL}launches/test_waits.py",),
    "gate": (
        f"{_KERNEL}launches/test_stops.py::test_each_thread_stops_at_its_own_launch_though_the_first_of_them_has_lost_its_cpu",
        f"{_E2E}enforcing/test_enforcement.py",
    ),
    "pace": (
        f"{_KERNEL}launches/test_queues.py::test_a_launch_that_was_stopped_is_not_on_the_gpu_before_its_process_goes_on",
        f"{_KERNEL}launches/test_queues.py::test_a_process_that_has_waited_for_all_of_its_work_has_none_queued",
        f"{_KERNEL}launches/test_queues.py::test_no_more_is_left_than_the_longest_pause_pays_back",
    ),
    "memory": (
        f"{_KERNEL}memory/test_quota_on_stock_kernels.py::test_this_kernel_denies_an_allocation_or_holds_it",
        f"{_KERNEL}memory/test_memory_holds.py::test_an_allocation_over_the_quota_stops_its_process_before_it_runs_and_goes_on_when_there_is_room",
        f"{_KERNEL}memory/test_memory_holds.py::test_when_the_warden_ends_a_held_process_runs_on",
    ),
    "freeze": (f"{_E2E}enforcing/test_freezing.py",),
    "kills": (
        f"{_E2E}recovery/test_fail_open.py::test_after_the_agent_is_killed_every_stopped_process_runs",
        f"{_E2E}recovery/test_fail_open.py::test_after_the_guardian_is_killed_every_process_runs_and_a_new_one_takes_over",
        f"{_E2E}recovery/test_standing_still.py::test_after_both_are_killed_every_process_runs_and_the_lock_is_free",
        f"{_E2E}recovery/test_standing_still.py::test_when_agent_and_guardian_stand_still_every_process_runs_and_when_they_go_on_they_enforce_again",
    ),
    "release": (
        f"{_E2E}recovery/test_fail_open.py::test_release_resumes_what_a_power_cut_left_stopped_and_nothing_else",
        f"{_E2E}recovery/test_fail_open.py::test_the_next_start_releases_what_a_power_cut_left_and_its_end_releases_everything",
    ),
    "http": (
        f"{_KERNEL}signals/test_http.py::test_requests_on_one_connection_are_one_latency_each",
        f"{_KERNEL}signals/test_http.py::test_every_call_that_moves_bytes_is_seen",
        f"{_KERNEL}signals/test_http.py::test_ipv6_is_seen",
    ),
    "uprobe": (
        f"{_KERNEL}signals/test_uprobe_signal.py::test_a_call_takes_from_its_beginning_to_its_return",
        f"{_KERNEL}signals/test_uprobe_signal.py::test_threads_do_not_mix_up_their_calls",
    ),
    "seccomp": (
        f"{_KERNEL}probes/test_seccomp_on_stock_kernels.py",
        f"{_KERNEL}probes/test_return_probes.py::test_the_trial_ends_on_this_kernel_with_every_return_seen_or_with_a_death",
    ),
}
OF_CGROUPS: Final = ("gate", "freeze", "kills", "release")
"""What may depend on how cgroups are mounted"""
_COMPLAINT: Final = re.compile(
    r"^\[ *\d+\.\d+\] ((?:BUG|WARNING|Oops|INFO: rcu|Kernel panic|general protection)\S*.*)$", re.M
)
_SHOWN: Final = 5


@dataclass(slots=True)
class Result:
    """One feature on one machine."""

    passed: int = 0
    second_tries: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """It works: something was tried, and nothing failed."""
        return self.passed > 0 and not self.failed


def arguments(only: Collection[str]) -> list[str]:
    """Of pytest, for these features; none: all."""
    return [check for name, checks in FEATURES.items() if not only or name in only for check in checks]


def feature_of(test: str) -> str:
    """Of a test's name. The most precise argument counts."""
    found = [(len(check), name) for name, checks in FEATURES.items() for check in checks if test.startswith(check)]
    return max(found)[1] if found else ""


def records(console: str) -> list[dict[str, Any]]:
    """What the machine wrote for us, without what cannot be read: a line that the kernel wrote into."""
    found = []
    for line in console.splitlines():
        with suppress(ValueError):
            found += [json.loads(line.removeprefix(MARK))] if line.startswith(MARK) else []
    return found


def results(written: Iterable[Mapping[str, Any]]) -> dict[str, Result]:
    """By feature, in their order. A test that failed and then passed is a second try."""
    tests: dict[str, list[Mapping[str, Any]]] = {}
    for record in written:
        if "test" in record and feature_of(record["test"]):
            tests.setdefault(record["test"], []).append(record)
    found: dict[str, Result] = {}
    for test, tries in tests.items():
        result = found.setdefault(feature_of(test), Result())
        result.seconds = round(result.seconds + sum(record["seconds"] for record in tries), 1)
        outcome, name = tries[-1]["outcome"], test.rpartition("::")[2]
        if outcome == "passed":
            result.passed += 1
            result.second_tries += len(tries) - 1
        else:
            (result.skipped if outcome == "skipped" else result.failed)[name] = tries[-1]["why"]
    return {name: found[name] for name in FEATURES if name in found}


def properties(written: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What its tests recorded of the kernel."""
    return {name: value for record in written for name, value in record.get("properties", {}).items()}


def complaints(console: str) -> list[str]:
    """What a healthy kernel does not write, the first few lines."""
    return _COMPLAINT.findall(console)[:_SHOWN]


def row(machine: Mapping[str, str], console: str) -> dict[str, Any]:
    """All that is known of one machine. `ok`: it ran to its end, all that was tried works, and its kernel is well."""
    written = records(console)
    found, complained = results(written), complaints(console)
    refusals = [record for record in written if record.get("test") == REFUSAL]
    ended = any("ends" in record for record in written)
    works = all(record["outcome"] == "passed" for record in refusals) and all(one.ok for one in found.values())
    return {
        **machine,
        "kernel": next((record["begins"] for record in written if "begins" in record), ""),
        "features": {name: {"ok": result.ok, **asdict(result)} for name, result in found.items()},
        "properties": properties(written),
        "complaints": complained,
        "ended": ended,
        "ok": ended and works and bool(found or refusals) and not complained,
    }


def cell(row: Mapping[str, Any], feature: str) -> str:
    """Of a table: what a feature does there."""
    result, known = row["features"].get(feature), row["properties"]
    if result is None:
        return "–"
    if not result["ok"]:
        return "NO"
    words = {
        "attach": known.get("links", "yes"),
        "memory": "deny" if known.get("denies") else "hold",
        "seccomp": "some die" if known.get("seccomp_dies") else "safe",
    }
    return str(words.get(feature, "yes")) + (" ²" if result["second_tries"] else "")
