# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The wheel, as a user gets it who has only that: `make release-check` builds one and runs these."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.core.snapshot_json import loads
from sim.demo.stage import simulated_gpu
from tests.e2e.node import ROOT, TRAINING, Agent, Node
from tools.harness.wait import until
from tools.shipping.version import project_version

WHEEL = os.environ.get("GPUWARDEN_WHEEL")
pytestmark = pytest.mark.skipif(WHEEL is None, reason="no wheel was built: make release-check")


@dataclass(slots=True)
class Elsewhere(Node):
    """A node whose programs are the wheel's, in an environment of their own."""

    @property
    def programs(self) -> Path:
        """Where pip put them."""
        return self.folder / "venv" / "bin"

    def command(self, *arguments: str) -> list[str]:
        return [str(self.programs / "gpuwarden"), *arguments]

    def gputop(self, *arguments: str) -> str:
        """What it prints."""
        asked = [str(self.programs / "gputop"), *arguments]
        return subprocess.check_output(asked, env=self.environment, cwd=self.folder, text=True, timeout=60)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    here = Elsewhere(tmp_path_factory.mktemp("wheel") / "n")
    with simulated_gpu(here.stage):
        subprocess.run([sys.executable, "-m", "venv", str(here.programs.parent)], check=True)
        subprocess.run([str(here.programs / "pip"), "install", "--quiet", str(WHEEL)], check=True)
        yield here


def test_the_wheel_has_the_programs_that_were_compiled_here() -> None:
    with zipfile.ZipFile(str(WHEEL)) as wheel:
        shipped = {Path(name).name: wheel.read(name) for name in wheel.namelist() if name.endswith(".bpf.o")}
    assert shipped == {path.name: path.read_bytes() for path in (ROOT / "bpf/build").glob("*.bpf.o")}


def test_the_programs_say_their_version_and_options(elsewhere: Elsewhere) -> None:
    assert elsewhere.run("--version").stdout == f"gpuwarden {project_version()}\n"
    assert "--by-container" in elsewhere.gputop("--help")


def test_doctor_attaches_the_wheels_own_programs(elsewhere: Elsewhere) -> None:
    done = elsewhere.run("doctor")
    assert done.returncode == 0, done.stdout + done.stderr


def launches(agent: Agent, name: str) -> int:
    row = agent.container(name)
    return sum(usage.totals.launches for usage in row.usage) if row else 0


def test_the_agent_counts_what_a_container_launches(elsewhere: Elsewhere) -> None:
    with elsewhere.agent(None) as agent, elsewhere.container("training", "offline", TRAINING):
        name = elsewhere.name("training")
        until(lambda: launches(agent, name) > 0, "launches to be counted")
        shown = loads(elsewhere.gputop("--once", "--json", "--socket", str(agent.socket)))
        assert name in {row.container.name for row in shown.containers}


def test_the_demo_reports_that_the_wheel_has_no_simulated_gpu(elsewhere: Elsewhere) -> None:
    done = elsewhere.run("demo")
    assert done.returncode != 0
    assert "gpuwarden-sim" in done.stderr
