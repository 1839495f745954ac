# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The quick start, as it is written: from `git clone` to two containers on the screen, and to a first policy.

`packaging/fresh-machine.sh DIR make demo` does the same where nothing is installed yet.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.e2e.node import ROOT

PAGE = (ROOT / "docs/quick-start.md").read_text()
DEADLINE_SECONDS = 900.0  # a virtual environment is made and everything is compiled


def commands_below(heading: str) -> list[str]:
    """Those of the first block of shell below a heading that begins so, a line each, without comments."""
    found = re.search(rf"^## {heading}.*?^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found, heading
    return [line.partition("#")[0].strip() for line in found[1].splitlines()]


def said(commands: list[str], folder: Path) -> str:
    """What the shell of a newcomer shows, who types them one after another. All have to succeed."""
    ours = ("VIRTUAL_ENV", "GPUWARDEN_SIM_BUILD", "MAKE", "MFLAGS")  # make's, for it hands its variables down
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(commands)],
        cwd=folder,
        env={**environment, "ARGS": "--seconds 8"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_two_commands_show_two_containers_and_three_more_make_a_policy_that_check_accepts(tmp_path: Path) -> None:
    see, write = commands_below("Two commands"), commands_below("Three commands")
    assert (len(see), len(write)) == (2, 3)
    screen = said([line.replace(" URL ", f" {ROOT} ") for line in see], tmp_path)
    below = screen[screen.index("\nCONTAINER ") :]
    assert re.search(r"^chat +(runc +)?online ", below, re.MULTILINE)
    assert re.search(r"^training +(runc +)?offline ", below, re.MULTILINE)
    assert "policy.yaml: ok: " in said(write, tmp_path)
