# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Starts and ends `gpuwarden run` for measurements and tests, and finds the processes that recover beside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import create_server
from typing import Final

import psutil

from agent.core.errors import SetupError
from tools.harness.wait import poll

_ROOT: Final = Path(__file__).resolve().parents[2]
_READY_SECONDS: Final = 60.0
_END_SECONDS: Final = 120.0


def command(*arguments: object, isolated: bool = False) -> list[str]:
    """The command line of an agent on a free port. `isolated`: see tools/harness/isolated_agent.py."""
    module = "tools.harness.isolated_agent" if isolated else "gpuwarden"
    return [sys.executable, "-m", module, "run", "--listen", "127.0.0.1:0", *map(str, arguments)]


def require_no_policy() -> None:
    """SetupError where the machine has a policy, by which an agent that is given none would enforce."""
    from gpuwarden.options import DEFAULT_POLICY

    if DEFAULT_POLICY.exists():
        raise SetupError(f"{DEFAULT_POLICY} would have the agent enforce: move it away for the measurement")


def start(command: list[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts the agent; its output goes to the log."""
    with log.open("wb") as out:
        return subprocess.Popen(command, cwd=_ROOT, env={**os.environ, **environment}, stdout=out, stderr=out)


def wait_until_ready(
    process: subprocess.Popen[bytes] | subprocess.Popen[str], log: Path, seconds: float = _READY_SECONDS
) -> None:
    """Waits for the agent's `ready` line. SetupError, with the end of its log, when it ends instead or takes longer."""

    def ready() -> bool:
        return "\nready\n" in "\n" + log.read_text(errors="replace")

    poll(lambda: ready() or process.poll() is not None, seconds)
    if not ready():
        raise SetupError(f"the agent did not start: {log.read_text(errors='replace').strip()[-2000:]}")


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the agent, which detaches its probes first: slow where each has its own link. TimeoutExpired: killed."""
    process.terminate()
    try:
        process.wait(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


@contextmanager
def running(command: list[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """An agent that is ready; it ends with the block. SetupError: it did not start."""
    process = start(command, log, environment)
    try:
        wait_until_ready(process, log)
        yield process
    finally:
        end(process)


def free_port() -> int:
    """A TCP port of the loopback interface that nothing has now."""
    with create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def maps_bytes(pid: int) -> int:
    """What the BPF maps take that a process has open, each once."""
    found = {}
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            fields = dict(re.findall(r"^(map_id|memlock):\s*(\d+)$", path.read_text(), re.MULTILINE))
            if "map_id" in fields:
                found[fields["map_id"]] = int(fields["memlock"])
    return sum(found.values())


def guardians(run_dir: Path) -> list[int]:
    """The guardian processes of this run directory's ledger, whatever their parents."""
    return _recovering(run_dir, "enforce.recovery.guardian")


def backstops(run_dir: Path) -> list[int]:
    """The same of the backstops."""
    return _recovering(run_dir, "enforce.recovery.backstop")


def _recovering(run_dir: Path, module: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words: list[str] = process.info["cmdline"] or []  # of one that ended: none
        if module in words and f"{run_dir}/" in words[-1]:
            found.append(process.pid)
    return found
