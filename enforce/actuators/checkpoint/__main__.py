# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m enforce.actuators.checkpoint ACT --pid N --start-ticks T`: one act on one process, one line of JSON.

Acts: state, held (the state, and the process's bytes on each device), lock, swap-out, swap-in, unlock, release (from
any state back to running). The identity of the process is checked right before the act, and its end right after. The
program ends by its own limit, whatever the driver does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import replace

from agent.core.errors import GoneError, SetupError, WardenError
from agent.core.model import ProcessId
from agent.node.pidfd import Pidfd
from agent.node.procfs import Procfs
from enforce.actuators.checkpoint import transitions
from enforce.actuators.checkpoint.driver import (
    AnswerKind,
    Cuda,
    Driver,
    HelperAnswer,
    Needs,
    NvmlMemory,
    RoomChecked,
    nvml_beside,
)
from enforce.actuators.checkpoint.transitions import wait_until_running

ACTS = ("state", "held", "lock", "swap-out", "swap-in", "unlock", "release")
_ENDING_MS = 500  # how long a process for which the driver has an error may take to end
_IGNORED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # half an act is worse than one that ends by its own limit


def main() -> int:
    """Prints the answer; exit code 0 if the act is done."""
    options = _parser().parse_args()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    out = _keep_stdout()
    watchdog = threading.Timer(options.limit_ms / 1e3, _give_up, [out])
    watchdog.daemon = True
    watchdog.start()
    answer = _answer(options)
    watchdog.cancel()
    os.write(out, (answer.to_line() + "\n").encode())
    return 0 if answer.kind is AnswerKind.DONE else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m enforce.actuators.checkpoint", description=__doc__)
    parser.add_argument("act", choices=ACTS)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--start-ticks", type=int, required=True, help="field 22 of /proc/PID/stat")
    parser.add_argument("--timeout-ms", type=int, default=2000, help="of a lock; and to wait until the process runs")
    parser.add_argument("--limit-ms", type=int, default=120_000, help="of everything (%(default)s)")
    parser.add_argument("--settle-ms", type=int, default=0, help="release: how long a lock may still come to be")
    parser.add_argument("--library", default="", help="the driver library, if not the first of the node")
    parser.add_argument("--parent", type=int, default=0, help="does nothing if this process is no longer its parent")
    parser.add_argument("--needs", type=_needs, help="bytes by device UUID: to be saved, or to be restored (JSON)")
    parser.add_argument("--ours", action="store_true", help="a lock that is there is ours")
    return parser


def _needs(text: str) -> Needs:
    return {str(uuid): int(used) for uuid, used in json.loads(text).items()}


def _answer(options: argparse.Namespace) -> HelperAnswer:
    process, procfs = ProcessId(options.pid, options.start_ticks), Procfs()
    try:
        with Pidfd(process, procfs) as pidfd:
            return _act_on(pidfd, procfs, options)
    except GoneError as error:
        return HelperAnswer(AnswerKind.GONE, error=str(error))
    except SetupError as error:
        return HelperAnswer(AnswerKind.NO_DRIVER, error=str(error))
    except (WardenError, OSError) as error:
        return HelperAnswer(AnswerKind.FAILED, error=f"process {process.tgid}: {error}")


def _act_on(pidfd: Pidfd, procfs: Procfs, options: argparse.Namespace) -> HelperAnswer:
    library = _library(options.library)
    memory = NvmlMemory(lambda: nvml_beside(library))
    driver = RoomChecked(Cuda(library), memory, options.needs)
    if options.act not in ("state", "held"):
        reason = wait_until_running(pidfd.process.tgid, procfs, options.timeout_ms / 1e3)
        if reason is not None:
            return HelperAnswer(
                AnswerKind.STOPPED, error=f"{reason}: the driver needs it to run; release pace and freeze first"
            )
    if options.parent and os.getppid() != options.parent:
        return HelperAnswer(AnswerKind.FAILED, error="the agent has ended: nothing is done any more")
    pidfd.check()
    answer = _act(driver, options)
    if options.act == "held" and answer.kind is AnswerKind.DONE:
        answer = replace(answer, held=memory.held(pidfd.process.tgid))
    return _check_again(answer, driver, pidfd)


def _act(driver: Driver, options: argparse.Namespace) -> HelperAnswer:
    tgid, limit_ms = options.pid, options.timeout_ms
    if options.act == "lock":
        return transitions.lock(driver, tgid, limit_ms, options.ours)
    if options.act == "swap-out":
        return transitions.swap_out(driver, tgid, limit_ms, options.ours)
    if options.act == "swap-in":
        return transitions.swap_in(driver, tgid)
    if options.act == "unlock":
        return transitions.unlock(driver, tgid)
    if options.act == "release":
        return transitions.release(driver, tgid, options.settle_ms / 1e3)
    return transitions.state(driver, tgid)


def _check_again(answer: HelperAnswer, driver: Driver, pidfd: Pidfd) -> HelperAnswer:
    """The driver takes a number, not a pidfd: if the process ended meanwhile, another one may have been locked.

    Only its end says that it is gone: the driver's error for that is also one of a process that cannot be restored.
    """
    if not pidfd.has_ended(_ENDING_MS if answer.kind is AnswerKind.FAILED else 0):
        return answer
    tgid = pidfd.process.tgid
    if answer.kind is AnswerKind.DONE and answer.before != answer.after and answer.after:
        transitions.release(driver, tgid)
    return HelperAnswer(AnswerKind.GONE, error=f"process {tgid} has ended")


def _library(wanted: str) -> str:
    if wanted and os.path.isfile(wanted):
        return wanted
    from agent.probes.discovery import host_libraries  # slow, and rarely needed

    found = host_libraries(())
    if not found:
        raise SetupError("no libcuda.so.1 on this node")
    return found[0]


def _keep_stdout() -> int:
    """A descriptor for the answer alone: what the driver prints goes to the log."""
    out = os.dup(1)
    os.dup2(2, 1)
    return out


def _give_up(out: int) -> None:
    answer = HelperAnswer(AnswerKind.TIMEOUT, error="the driver did not return in time")
    with suppress(OSError):
        os.write(out, (answer.to_line() + "\n").encode())
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
