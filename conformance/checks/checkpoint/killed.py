# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows about a caller that is killed in the middle of a call, and about the product's own helper program."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Final

from conformance.checks.checkpoint.stage import CALL_SECONDS, Stage, must_call, must_do, row
from conformance.clients import launcher
from conformance.host import Unavailable
from conformance.report.model import Row, Verdict, judged

LOCKING: Final = "states after the caller of a lock was killed: at once, and when the work had drained"
LOCKING_FREED: Final = "the product's release after it: the process runs, and launches"
SAVING: Final = "state after the caller of a checkpoint was killed"
SAVING_FREED: Final = "the product's release after it: the process runs, and its memory is unchanged"
WHATS: Final = (LOCKING, LOCKING_FREED, SAVING, SAVING_FREED)
HELPER: Final = "the product's helper program, start and end included: {act}"
ACTS: Final = ("state", "lock", "unlock", "swap-out", "swap-in")
_SMALL_BYTES: Final = 1 << 24
_KERNEL_MS, _KERNELS = 100, 5
_SETTLED_SECONDS: Final = 0.5
_SAVING_SECONDS: Final = 0.002  # into a checkpoint that takes far longer


def rows(stage: Stage) -> Iterator[Row]:
    """What a SIGKILL in each state leaves, as the OOM killer sends it."""
    yield from _locking(stage)
    yield from _saving(stage)


def _locking(stage: Stage) -> Iterator[Row]:
    with stage.holder(_SMALL_BYTES) as holder, stage.calls() as later:
        must_do(holder, f"busy {_KERNEL_MS * 1000} 0")
        must_do(holder, f"busy {_KERNEL_MS * 1000} {_KERNELS}")
        with stage.calls() as calls:
            calls.say(f"lock {holder.tgid} 8000")
            time.sleep(_KERNEL_MS / 1000)
            calls.process.kill()
            calls.process.wait(10)
        at_once = _state(later.ask(f"state {holder.tgid}", CALL_SECONDS))
        time.sleep(_KERNEL_MS * _KERNELS / 1000 + _SETTLED_SECONDS)
        drained = _state(later.ask(f"state {holder.tgid}", CALL_SECONDS))
        yield row(LOCKING, Verdict.MEASURED, f"{at_once}, {drained}", baseline="LOCKED, LOCKED")
        freed = must_call(later, f"release {holder.tgid}")
        must_do(holder, "step")
        yield row(LOCKING_FREED, judged(freed["state"] == "RUNNING"), freed["state"], baseline="RUNNING")


def _saving(stage: Stage) -> Iterator[Row]:
    with stage.holder(stage.less_bytes) as holder, stage.calls() as later:
        with stage.calls() as calls:
            must_call(calls, f"lock {holder.tgid} 5000")
            calls.say(f"checkpoint {holder.tgid}")
            time.sleep(_SAVING_SECONDS)
            calls.process.kill()
            calls.process.wait(10)
        time.sleep(_SETTLED_SECONDS)
        state = _state(later.ask(f"state {holder.tgid}", CALL_SECONDS))
        yield row(SAVING, Verdict.MEASURED, state)
        freed = must_call(later, f"release {holder.tgid}", 60.0)["state"]
        wrong = must_do(holder, "check", 60.0)["wrong"]
        must_do(holder, "step")
        fine = freed == "RUNNING" and (stage.host.simulated or wrong == 0)
        note = f"{wrong} chunks differ" if not stage.host.simulated else ""
        yield row(SAVING_FREED, judged(fine), freed, baseline="RUNNING", note=note)


def _state(answer: dict[str, object]) -> str:
    return str(answer.get("state") or answer.get("message"))


def helper(stage: Stage) -> Iterator[Row]:
    """The helper process, as the agent's ladder calls it."""
    from agent.node.procfs import Procfs
    from enforce.actuators.checkpoint.driver import AnswerKind
    from enforce.actuators.checkpoint.helper import ask

    library = launcher.library(stage.host)
    with stage.holder(stage.less_bytes) as holder:
        process = Procfs().process_id(holder.tgid)
        needs = f"--needs={json.dumps(ask('held', process, library).held or {})}"
        for act in ACTS:
            begun = time.monotonic_ns()
            answer = ask(act, process, library, "--ours", needs)
            ms = (time.monotonic_ns() - begun) / 1e6
            if answer.kind is not AnswerKind.DONE:
                ask("release", process, library, needs)
                raise Unavailable(f"{act}: {answer.kind}: {answer.error}")
            yield row(HELPER.format(act=act), Verdict.MEASURED, ms, "ms", note=f"{stage.less_bytes >> 20} MiB")
        ask("release", process, library, needs)
        must_do(holder, "step")
