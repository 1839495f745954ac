# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""An MPS control daemon that is only its command program, which does what a test says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from agent.node.procfs import Procfs
from enforce.actuators.mps.model import Daemon

PROC: Final = Procfs()
PATIENCE_SECONDS: Final = 60.0


def fake(folder: Path, script: str, pipes: Path | None = None) -> Daemon:
    """A command program that runs the script."""
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return Daemon(PROC.process_id(os.getpid()), str(pipes or folder), str(program))
