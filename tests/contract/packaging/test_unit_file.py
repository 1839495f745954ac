# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The unit as systemd itself judges it, and what docs/capabilities.md states of it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from agent.node.preflight import ANY_KERNEL, SINCE_6_6

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "packaging/systemd/gpuwarden.service"
PAGE = ROOT / "docs/capabilities.md"
MOST_POINTS = 3.4
# What is called by number, and where.
BY_NUMBER = {
    "agent/probes/libbpf.py": {"bpf"},
    "agent/node/container_files.py": {"openat2"},
    "enforce/actuators/mps/channel.py": {"landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"},
}
# What else the agent cannot do without: by ctypes, by Python, by libbpf.
BESIDES = {
    *("perf_event_open", "inotify_init1", "inotify_add_watch", "inotify_rm_watch", "fstatfs", "prctl"),
    *("pidfd_open", "pidfd_send_signal", "setxattr", "getxattr", "removexattr", "setpriority", "chown", "ioctl"),
    "memfd_create",
}
# It joins the node's cgroup namespace only from inside a container, where this unit is not.
NOT_HERE = {"setns"}
_OVERALL = re.compile(r"Overall exposure level for \S+: ([\d.]+)")


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False)


def settings(text: str) -> dict[str, list[str]]:
    """Every value of every key, in order; an empty one takes those before it away."""
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE):
        found[key] = [*found.get(key, []), value] if value else []
    return found


def capabilities(text: str) -> set[str]:
    return set(" ".join(settings(text)["CapabilityBoundingSet"]).split())


def security(unit: Path) -> dict[str, str]:
    """What systemd gives points for, and how many."""
    done = analyze("security", "--offline=yes", "--json=short", str(unit))
    return {row["name"]: row["exposure"] for row in json.loads(done.stdout) if row["exposure"]}


@pytest.fixture
def runnable(tmp_path: Path) -> Path:
    """The unit with a program that is there, whatever is installed here."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/usr/bin/gpuwarden", "/usr/bin/true"))
    return unit


def test_systemd_finds_nothing_wrong_with_it(runnable: Path) -> None:
    done = analyze("verify", "--man=no", str(runnable))
    assert (done.returncode, done.stderr) == (0, "")  # of an unknown key it only speaks
    runnable.write_text(runnable.read_text().replace("ProtectClock", "ProtectClocks"))
    assert "ProtectClocks" in analyze("verify", "--man=no", str(runnable)).stderr


def test_its_exposure_stays_below_the_bound_that_the_page_names() -> None:
    overall = _OVERALL.search(analyze("security", "--offline=yes", str(UNIT)).stdout)
    assert overall
    assert float(overall[1]) <= MOST_POINTS
    assert f"gives {overall[1]} of 10 points" in PAGE.read_text()


def test_every_point_that_is_left_is_explained_and_no_other(tmp_path: Path) -> None:
    rows = re.findall(r"^\| `(.+?)` \| ([\d.]+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    explained = {name.replace("\\|", "|"): points for name, points, _ in rows}
    assert explained == security(UNIT)
    assert all(len(reason) > 10 for _, _, reason in rows)
    looser = tmp_path / UNIT.name
    looser.write_text(UNIT.read_text().replace("ProtectHome=yes\n", ""))
    assert security(looser).keys() - explained.keys() == {"ProtectHome="}


def test_it_has_the_capabilities_that_are_needed_on_any_kernel_and_a_limit_in_place_of_sys_nice() -> None:
    text = UNIT.read_text()
    assert capabilities(text) == set(ANY_KERNEL) - {"CAP_SYS_NICE"}
    assert settings(text)["LimitNICE"] == ["-20"]


def test_when_memory_is_short_something_else_is_killed_first() -> None:
    [adjust] = settings(UNIT.read_text())["OOMScoreAdjust"]
    assert int(adjust) <= -900


def test_what_the_page_shows_for_newer_kernels_has_what_is_needed_there() -> None:
    shown = re.findall(r"^```ini\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    [narrower] = [text for text in shown if "CapabilityBoundingSet" in text]
    assert capabilities(UNIT.read_text() + narrower) == set(SINCE_6_6) - {"CAP_SYS_NICE"}


def group(name: str) -> set[str]:
    """The calls of one of systemd's groups, with those of the groups in it."""
    rows = {row.strip() for row in analyze("syscall-filter", name).stdout.splitlines() if row.startswith("    ")}
    rows = {row for row in rows if not row.startswith("#")}
    return {one for row in rows for one in (group(row) if row.startswith("@") else {row})}


def allowed(unit: str) -> set[str]:
    """What the filters leave: of all lines, those before with those after."""
    calls: set[str] = set()
    for line in settings(unit)["SystemCallFilter"]:
        words = line.lstrip("~").split()
        names = {one for word in words for one in (group(word) if word.startswith("@") else {word})}
        calls = calls - names if line.startswith("~") else calls | names
    return calls


def test_the_filter_lets_through_what_the_agent_calls() -> None:
    calls = allowed(UNIT.read_text())
    assert set().union(*BY_NUMBER.values(), BESIDES) - calls == set()
    assert calls & {*NOT_HERE, "ptrace", "unshare", "mount", "keyctl", "init_module"} == set()


def test_those_that_it_calls_by_number_are_all_listed() -> None:
    sources = [path for part in ("agent", "enforce", "gpuwarden") for path in (ROOT / part).rglob("*.py")]
    assert {str(path.relative_to(ROOT)) for path in sources if ".syscall(" in path.read_text()} == BY_NUMBER.keys()
    entering = {path.name for path in sources if ".setns(" in path.read_text()}
    assert entering == {"cgroups.py"}


def test_whatever_ends_the_agent_the_release_runs_with_the_same_rights_and_its_failure_is_no_failure() -> None:
    service = settings(UNIT.read_text())
    assert service["ExecStopPost"] == ["-/usr/bin/gpuwarden release"]  # "+" or "!" would be other rights
    assert service["RuntimeDirectoryPreserve"] == ["yes"]  # the ledger is there
