# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden run` as people run it, for as long as something is measured beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from agent.errors import SetupError

_ROOT: Final = Path(__file__).resolve().parents[1]
_READY_SECONDS: Final = 60.0
_END_SECONDS: Final = 120.0


def command(*arguments: object, isolated: bool = False) -> list[str]:
    """That starts one, with a port of its own. `isolated`: see bench/attribution_isolated.py."""
    module = "bench.attribution_isolated" if isolated else "agent"
    return [sys.executable, "-m", module, "run", "--listen", "127.0.0.1:0", *map(str, arguments)]


def require_no_policy() -> None:
    """SetupError where the machine has a policy, by which an agent that is given none would enforce."""
    from agent.main import DEFAULT_POLICY

    if DEFAULT_POLICY.exists():
        raise SetupError(f"{DEFAULT_POLICY} would have the agent enforce: move it away for the measurement")


def start(command: list[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """What it says goes to the log."""
    with log.open("wb") as out:
        return subprocess.Popen(command, cwd=_ROOT, env={**os.environ, **environment}, stdout=out, stderr=out)


def wait_until_ready(
    process: subprocess.Popen[bytes] | subprocess.Popen[str], log: Path, seconds: float = _READY_SECONDS
) -> None:
    """SetupError, with the end of its log, when it ends instead or takes longer."""
    deadline = time.monotonic() + seconds
    while "\nready\n" not in "\n" + log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SetupError(f"the agent did not start: {log.read_text(errors='replace').strip()[-2000:]}")
        time.sleep(0.01)


def end(process: subprocess.Popen[bytes]) -> None:
    """It takes its probes away first, which lasts where each is detached by itself. TimeoutExpired: it was killed."""
    process.terminate()
    try:
        process.wait(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


@contextmanager
def running(command: list[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """One that is ready; it ends with the block. SetupError: it did not start."""
    process = start(command, log, environment)
    try:
        wait_until_ready(process, log)
        yield process
    finally:
        end(process)
