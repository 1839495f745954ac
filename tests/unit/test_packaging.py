# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What packages install beside the program: said once, right, and the same everywhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from agent.main import DEFAULT_POLICY
from enforce.policy.load import parse

ROOT = Path(__file__).parents[2]
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


def test_the_package_depends_on_the_python_whose_bytecode_it_has() -> None:
    (major, minor) = re.findall(
        r"^python_version=(\d+)\.(\d+)", (ROOT / "packaging/tree.sh").read_text(), re.MULTILINE
    )[0]
    (depends,) = re.findall(r"^Depends: libbpf1.*$", (ROOT / "packaging/deb/control").read_text(), re.MULTILINE)
    assert f"python3 (>= {major}.{minor}), python3 (<< {major}.{int(minor) + 1})" in depends


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_maintainer_scripts_are_shell_and_let_debhelper_add_its_part(script: Path) -> None:
    subprocess.run(["sh", "-n", script], check=True)
    assert re.search(r"^#DEBHELPER#$", script.read_text(), re.MULTILINE)
