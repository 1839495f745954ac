# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What packages install beside the program: stated once, right, and the same everywhere."""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from enforce.policy.load import parse
from gpuwarden.options import DEFAULT_POLICY

ROOT = Path(__file__).parents[4]
POLICY = ROOT / "packaging/policy.yaml"
SCRIPTS = sorted(path for path in (ROOT / "packaging/deb").iterdir() if path.suffix in (".prerm", ".postrm"))


def test_the_installed_policy_only_observes() -> None:
    policy = parse(POLICY.read_text(), str(DEFAULT_POLICY))
    assert (policy.enforce, policy.online, policy.offline) == (False, (), ())


def test_the_rules_that_the_installed_policy_shows_are_right() -> None:
    text = POLICY.read_text()
    shown = re.sub(r"^# ((?:online|offline):\n|  .*\n)", r"\1", text[text.index("enforce:") :], flags=re.MULTILINE)
    policy = parse("version: 1\n" + shown, str(DEFAULT_POLICY))
    assert [rule.name for rule in policy.online] == ["chat"]
    assert [rule.name for rule in policy.offline] == ["training"]


def test_the_package_brings_the_python_whose_bytecode_it_has_and_depends_on_no_other() -> None:
    (version,) = re.findall(r"^python_version=(\S+)", (ROOT / "packaging/tree.sh").read_text(), re.MULTILINE)
    (sources,) = re.findall(r"^sources=\((.*)\)$", (ROOT / "packaging/runtime.sh").read_text(), re.MULTILINE)
    assert f"python{version}" in sources.split()
    depends = re.findall(r"^Depends: .*$", (ROOT / "packaging/deb/control").read_text(), re.MULTILINE)
    assert depends
    assert not any("python3" in line or "libbpf" in line for line in depends)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_maintainer_scripts_are_shell_and_let_debhelper_add_its_part(script: Path) -> None:
    subprocess.run(["sh", "-n", script], check=True)
    assert re.search(r"^#DEBHELPER#$", script.read_text(), re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Machine:
    """A folder that stands for `/`, and the few programs that a maintainer script finds."""

    root: Path

    def run(self, script: str, *arguments: str) -> str:
        """What it printed; it has to succeed."""
        text = (ROOT / "packaging/deb" / script).read_text()
        text = re.sub(r"(?<![\w.])/(?=(?:etc|run|var)/)", f"{self.root}/", text)
        done = subprocess.run(
            ["/bin/sh", "-c", text, script, *arguments],
            env={"PATH": str(self.root / "bin")},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    def program(self, name: str, does: str) -> None:
        """One that notes how it was called."""
        path = self.root / "bin" / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>{self.root}/calls\n{does}\n')
        path.chmod(0o755)

    def calls(self) -> list[str]:
        """Of these, in their order."""
        path = self.root / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def here(self) -> set[str]:
        """Which of the package's folders."""
        return {name for name in ("etc", "run", "var/lib") if (self.root / name / "gpuwarden").exists()}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    for folder in ("bin", "etc/gpuwarden", "run/gpuwarden", "run/systemd/system", "var/lib/gpuwarden"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("rm", "flock"):
        found = shutil.which(name)
        assert found
        (tmp_path / "bin" / name).symlink_to(found)
    made = Machine(tmp_path)
    made.program("getent", "")
    made.program("groupdel", "")
    made.program("deb-systemd-invoke", "")
    made.program("gpuwarden", "")
    return made


@pytest.mark.parametrize("was_enforced", [False, True])
def test_a_purge_leaves_nothing(machine: Machine, was_enforced: bool) -> None:
    if was_enforced:
        (machine.root / "run/gpuwarden/enforcing.lock").touch()
    assert machine.run("gpuwarden.postrm", "purge") == ""
    assert machine.here() == set()
    assert machine.calls()[-1] == "groupdel gpuwarden"


def test_a_purge_leaves_another_agent_its_ledger(machine: Machine) -> None:
    with (machine.root / "run/gpuwarden/enforcing.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another agent enforces" in machine.run("gpuwarden.postrm", "purge")
    assert machine.here() == {"run", "var/lib"}
    assert machine.run("gpuwarden.postrm", "purge") == ""
    assert machine.here() == set()


def test_a_removal_that_is_no_purge_keeps_what_the_user_wrote(machine: Machine) -> None:
    machine.run("gpuwarden.postrm", "remove")
    assert (machine.here(), machine.calls()) == ({"etc", "run", "var/lib"}, [])


@pytest.mark.parametrize("action", ["remove", "upgrade", "deconfigure"])
def test_before_files_change_the_agent_is_stopped_and_what_is_in_force_undone(machine: Machine, action: str) -> None:
    (machine.root / "run/gpuwarden/ledger.jsonl").touch()
    assert machine.run("gpuwarden.prerm", action) == ""
    assert machine.calls() == ["deb-systemd-invoke stop gpuwarden.service", "gpuwarden release"]


@pytest.mark.parametrize(("action", "goes_on"), [("remove", "by hand"), ("upgrade", "'gpuwarden release', or the ag")])
def test_what_cannot_be_undone_blocks_no_action_and_is_reported(machine: Machine, action: str, goes_on: str) -> None:
    (machine.root / "run/gpuwarden/ledger.jsonl").touch()
    machine.program("gpuwarden", "exit 1")
    output = machine.run("gpuwarden.prerm", action)
    assert "not everything could be released" in output
    assert "kill -CONT PID" in output
    assert [goes_on in output, "next start, tries again" in output] == [True, action == "upgrade"]
