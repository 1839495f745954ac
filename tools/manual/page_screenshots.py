# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`make screenshots-page`: the status page of an agent that holds the demo's two containers, as pictures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from agent.core.errors import SetupError
from agent.node.preflight import require_this_machine
from sim.demo import shapes
from sim.demo.stage import Stage, agent, simulated_gpu

FOLDER: Final = Path(__file__).resolve().parents[2] / "docs" / "images"
SCHEMES: Final = {"dark": 0, "light": 1}  # as --blink-settings counts them
ALONE_SECONDS: Final = 25.0
TOGETHER_SECONDS: Final = 60.0
TARGET_SECONDS: Final = 0.006  # a request takes 4 ms of the GPU
SIZE: Final = "1280,960"


def main() -> None:
    """Takes the screenshots. Needs root; runs a simulated GPU for about a minute and a half."""
    require_this_machine()
    with tempfile.TemporaryDirectory(prefix="gpuwarden-pictures-") as folder:
        stage = Stage(Path(folder))
        policy = stage.folder / "policy.yaml"
        with simulated_gpu(stage):
            shapes.write_policy(policy, TARGET_SECONDS, enforce=True)
            with agent(stage, policy):
                _run(stage)


def _run(stage: Stage) -> None:
    endless = ("--seconds", "3600")
    training = (*shapes.OFFLINE, *shapes.OFFLINE_PACE, *endless)
    with stage.container("chat", "online", (*shapes.ONLINE, "--start-now", "--seed", "7", *endless)):
        time.sleep(ALONE_SECONDS)  # for the graphs to show both phases
        with stage.container("training", "offline", training):
            time.sleep(TOGETHER_SECONDS)
            for name, scheme in SCHEMES.items():
                picture(_address(stage), scheme, FOLDER / f"status-{name}.png", stage.folder / "profile")


def _address(stage: Stage) -> str:
    found = re.search(r"metrics on (http://[^/]+)/metrics", (stage.folder / "agent.log").read_text())
    if found is None:
        raise SetupError("the agent does not say where it serves its page")
    return found[1]


def picture(address: str, scheme: int, path: Path, profile: Path) -> None:
    """Takes one, in place of an older one. SetupError when chromium does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # an old one is none
    command = ["chromium", "--headless", "--disable-gpu", "--hide-scrollbars", f"--window-size={SIZE}", address]
    command += ["--force-device-scale-factor=1.5", f"--blink-settings=preferredColorScheme={scheme}"]
    command += [f"--screenshot={path}", f"--user-data-dir={profile}", "--no-first-run"]
    command += ["--no-sandbox"] if os.geteuid() == 0 else []
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    if done.returncode or not path.exists():
        raise SetupError(f"chromium took no picture: {done.stderr.strip()[-500:]}")
    print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
