# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m conformance.checks.checkpoint.calls LIBRARY`: the product's checkpoint calls one by one, each with its
time and error.

A process of its own, as the product's helper is: the driver's library may hang or crash it. Answers each line of its
standard input with one of JSON: `{"ms": …, "code": CUresult or 0, "message": …}` and what the command asks for:

    state PID                  {"state": NAME}
    lock PID MS | checkpoint PID | restore PID | unlock PID
    release PID                from whatever state to running: {"state": NAME}
    memory                     what NVML says is used on the first device: {"used": bytes}
    listed PID                 whether NVML lists it among the computing processes there: {"listed": …, "bytes": …}
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from agent.core.errors import SetupError
from enforce.actuators.checkpoint import transitions
from enforce.actuators.checkpoint.driver import AnswerKind, CallError, Cuda


def answer(driver: Cuda, words: Sequence[str]) -> dict[str, Any]:
    """Executes one command; its answer."""
    begun = time.monotonic_ns()
    try:
        answer = {"code": 0, **_done(driver, words[0], [int(word) for word in words[1:]])}
    except CallError as error:
        answer = {"code": error.code, "message": str(error)}
    except ValueError as error:  # a state that the product does not know
        answer = {"code": -1, "message": str(error)}
    return {**answer, "ms": (time.monotonic_ns() - begun) / 1e6}


def _done(driver: Cuda, command: str, numbers: Sequence[int]) -> dict[str, Any]:
    if command == "memory":
        return _memory()
    if command == "listed":
        return _listed(*numbers)
    if command == "state":
        return {"state": driver.state(*numbers).name}
    if command == "release":
        found = transitions.release(driver, numbers[0])
        state = found.after.name if found.after is not None else ""
        return {"state": state, "message": found.error or "", "code": _code(found.kind)}
    getattr(driver, command)(*numbers)
    return {}


def _code(kind: AnswerKind) -> int:
    return 0 if kind is AnswerKind.DONE else -1


def _memory() -> dict[str, Any]:
    nvml, device = _nvml()
    return {"used": int(nvml.nvmlDeviceGetMemoryInfo(device).used)}


def _listed(tgid: int) -> dict[str, Any]:
    nvml, device = _nvml()
    found = [one for one in nvml.nvmlDeviceGetComputeRunningProcesses(device) if one.pid == tgid]
    return {"listed": bool(found), "bytes": found[0].usedGpuMemory if found else None}


def _nvml() -> tuple[Any, Any]:
    import pynvml

    pynvml.nvmlInit()
    return pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)


def main() -> int:
    """2 when the library has no such calls; its output then is `{"error": …}`."""
    try:
        driver = Cuda(sys.argv[1])
    except SetupError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 2
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(driver, line.split())), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
