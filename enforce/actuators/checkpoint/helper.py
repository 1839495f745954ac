# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Starts the helper program and waits for what it says. For one process there is one helper at a time.

Whoever starts a helper first takes a lock that the helper inherits: on a file in /proc of the very process that is
acted on, so that it is nobody else's and ends with it. When the agent is killed, its helper goes on; who undoes the act
waits for the helper's end, and so cannot look before the act and be gone after it.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from agent.errors import GoneError
from agent.model import ProcessId
from enforce.checkpoint.answer import Answer, Kind, parse_answer

LOCK_LIMIT_MS = 2000  # how long a lock may wait for the work to drain; nothing new is launched meanwhile
_LIMITS_SECONDS = {"state": 15.0, "lock": 30.0}
_COPY_LIMIT_SECONDS = 120.0  # all other acts may move a device's memory
_GRACE_SECONDS = 10.0  # the helper ends itself at its limit
_AGAIN_SECONDS = 0.01
_NO_MPS = "/nonexistent/gpuwarden"  # with a daemon's pipe the helper would become its client


def ask(act: str, process: ProcessId, library: str = "", settle_ms: int = 0, ours: bool = False) -> Answer:
    """One act on one process; blocks until it has ended, at most for its limit. Never raises for the process."""
    limit_seconds = _LIMITS_SECONDS.get(act, _COPY_LIMIT_SECONDS)
    # -I: neither the working directory nor the caller's environment says what runs
    command = [sys.executable, "-I", "-m", "enforce.checkpoint", act]
    command += ["--pid", str(process.tgid), "--start-ticks", str(process.start_ticks)]
    command += ["--timeout-ms", str(LOCK_LIMIT_MS), "--limit-ms", str(int(limit_seconds * 1000))]
    command += ["--settle-ms", str(settle_ms), "--library", library, *(["--ours"] if ours else [])]
    if act in ("lock", "swap-out"):
        command += ["--parent", str(os.getpid())]
    try:
        with _alone(process, limit_seconds) as held:
            return _run(command, limit_seconds + _GRACE_SECONDS, held)
    except TimeoutError:
        return Answer(Kind.BUSY, error=f"another act on process {process.tgid} takes long")
    except GoneError as error:
        return Answer(Kind.GONE, error=str(error))
    except OSError as error:
        return Answer(Kind.FAILED, error=f"the checkpoint helper cannot be started ({error}): free memory or processes")


def _run(command: list[str], limit_seconds: float, held: int | None) -> Answer:
    helper = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=_environment(),
        pass_fds=() if held is None else (held,),
        start_new_session=True,  # it outlives the agent
        text=True,
    )
    with helper:
        try:
            said, _ = helper.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            helper.kill()
            return Answer(Kind.TIMEOUT, error="the driver did not return in time")
    if not said:
        return Answer(
            Kind.TIMEOUT, error=f"the checkpoint helper ended with code {helper.returncode} before its answer"
        )
    return parse_answer(said.splitlines()[-1])


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    return environment | {"CUDA_MPS_PIPE_DIRECTORY": _NO_MPS}


@contextmanager
def _alone(process: ProcessId, limit_seconds: float) -> Iterator[int | None]:
    """The lock, as a descriptor for the helper to inherit. TimeoutError while another helper acts."""
    try:
        held = os.open(f"/proc/{process.tgid}/environ", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise GoneError(f"process {process.tgid} has ended") from error
    except PermissionError:  # without CAP_SYS_PTRACE: as good as it gets
        yield None
        return
    try:
        _wait_for(held, time.monotonic() + limit_seconds)
        yield held
    finally:
        with suppress(OSError):
            os.close(held)


def _wait_for(held: int, ends: float) -> None:
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= ends:
                raise TimeoutError from None
            time.sleep(_AGAIN_SECONDS)
        else:
            return
