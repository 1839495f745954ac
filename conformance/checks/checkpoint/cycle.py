# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows about one way there and back: running, locked, saved, restored, running."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any, Final

from conformance.checks.checkpoint.stage import CALL_SECONDS, RefusedError, Stage, must_call, must_do, row
from conformance.clients.launcher import Client, SilenceError
from conformance.report.model import Row, Verdict, judged, skipped

SUPPORTED: Final = "the driver library has the calls"
STATES: Final = "states on the way: running, locked, saved, restored, unlocked"
STATE: Final = "a call for the state of a process"
LOCK: Final = "lock of an idle process"
SAVE: Final = "checkpoint of a process with device memory"
RESTORE: Final = "restore of that process"
UNLOCK: Final = "unlock of that process"
WAITS: Final = "a launch of a locked process waits for the unlock"
GIVEN_BACK: Final = "device memory that a checkpoint gives back, by NVML"
TAKEN_AGAIN: Final = "device memory in use after the restore, by NVML"
LISTED: Final = "NVML lists a saved process"
CONTENTS: Final = "chunks of memory with other contents after it"
GOES_ON: Final = "numbers that a launch after it leaves wrong"
WHATS: Final = (
    *(SUPPORTED, STATES, STATE, LOCK, SAVE, RESTORE, UNLOCK, WAITS, GIVEN_BACK, TAKEN_AGAIN, LISTED, CONTENTS, GOES_ON),
)
GRAPH: Final = "with a CUDA graph: saved, restored, and replayed"
PINNED: Final = "with pinned host memory: saved, restored, and unchanged"
EXTRAS: Final = (GRAPH, PINNED)
UNTOLD: Final = "the simulated GPU's memory has no contents"
_ON_THE_WAY: Final = "RUNNING LOCKED CHECKPOINTED LOCKED RUNNING"
_SLACK_BYTES: Final = 1 << 26
_SMALL_BYTES: Final = 1 << 24
_BLOCKED_SECONDS: Final = 0.2
_STATE_CALLS: Final = 20
_STATE_MS: Final = 0.48  # R580, of a process without CUDA


def rows(stage: Stage) -> Iterator[Row]:
    """A cycle with nothing else on the device."""
    with stage.calls() as calls:
        yield row(SUPPORTED, Verdict.OK, True, baseline=True)
        with stage.holder(stage.saved_bytes) as holder:
            yield from _there_and_back(stage, calls, holder)


def _there_and_back(stage: Stage, calls: Client, holder: Client) -> Iterator[Row]:
    tgid, states = holder.tgid, []
    before = must_call(calls, "memory")["used"]
    states.append(_state(calls, tgid))
    took = [must_call(calls, f"state {tgid}")["ms"] for _ in range(_STATE_CALLS)]
    yield row(STATE, Verdict.MEASURED, median(took), "ms", _STATE_MS, f"median of {_STATE_CALLS}")
    yield row(LOCK, Verdict.MEASURED, must_call(calls, f"lock {tgid} 5000")["ms"], "ms")
    states.append(_state(calls, tgid))
    save = must_call(calls, f"checkpoint {tgid}", 60.0)
    yield row(SAVE, Verdict.MEASURED, save["ms"], "ms", note=_pace(stage, save))
    states.append(_state(calls, tgid))
    saved = must_call(calls, "memory")["used"]
    given = before - saved
    yield row(GIVEN_BACK, judged(given >= stage.saved_bytes), given, "bytes", stage.saved_bytes, "contexts come on top")
    listed = must_call(calls, f"listed {tgid}")["listed"]
    yield row(LISTED, judged(not listed), listed, baseline=False)
    restore = must_call(calls, f"restore {tgid}", 60.0)
    yield row(RESTORE, Verdict.MEASURED, restore["ms"], "ms", note=_pace(stage, restore))
    states.append(_state(calls, tgid))
    blocked = _blocked(holder)
    yield row(UNLOCK, Verdict.MEASURED, must_call(calls, f"unlock {tgid}")["ms"], "ms")
    states.append(_state(calls, tgid))
    step = holder.hear(CALL_SECONDS) if blocked else {}
    yield row(WAITS, judged(blocked and "error" not in step), blocked, baseline=True)
    passed = " ".join(states)
    yield row(STATES, judged(passed == _ON_THE_WAY), passed, baseline=_ON_THE_WAY)
    after = must_call(calls, "memory")["used"]
    yield row(TAKEN_AGAIN, judged(abs(after - before) <= _SLACK_BYTES), after, "bytes", before)
    yield from _unchanged(stage, holder)


def _unchanged(stage: Stage, holder: Client) -> Iterator[Row]:
    if stage.host.simulated:
        yield skipped("checkpoint", CONTENTS, UNTOLD)
    else:
        wrong = must_do(holder, "check", 60.0)["wrong"]
        chunks = f"of {stage.saved_bytes >> 24} of 16 MiB"
        yield row(CONTENTS, judged(wrong == 0), wrong, baseline=0, note=chunks)
    wrong = must_do(holder, "step")["wrong"]
    if stage.host.simulated:
        yield skipped("checkpoint", GOES_ON, f"it launches, and {UNTOLD}")
    else:
        yield row(GOES_ON, judged(wrong == 0), wrong, baseline=0)


def extras(stage: Stage, what: str, *options: str) -> Iterator[Row]:
    """A process that has something besides: there and back, then it is used."""
    with stage.calls() as calls, stage.holder(_SMALL_BYTES, *options) as holder:
        must_do(holder, "step")
        try:
            for command in ("lock {} 5000", "checkpoint {}", "restore {}", "unlock {}"):
                must_call(calls, command.format(holder.tgid), 30.0)
        except RefusedError as error:
            calls.ask(f"release {holder.tgid}", CALL_SECONDS)
            yield row(what, Verdict.DIFFERS, str(error), baseline="works")
            return
        wrong = must_do(holder, "step")["wrong"] + must_do(holder, "check")["wrong"]
        fine = stage.host.simulated or wrong == 0
        note = UNTOLD if stage.host.simulated else ""
        yield row(what, judged(fine), "works" if fine else f"{wrong} wrong", baseline="works", note=note)


def _state(calls: Client, tgid: int) -> str:
    return str(must_call(calls, f"state {tgid}")["state"])


def _blocked(holder: Client) -> bool:
    """Whether a launch does not come back."""
    holder.say("step")
    time.sleep(_BLOCKED_SECONDS)
    try:
        holder.hear(0.01)
    except SilenceError:
        return True
    return False


def _pace(stage: Stage, answer: dict[str, Any]) -> str:
    gigabytes = stage.saved_bytes / 1e9
    return f"{stage.saved_bytes >> 20} MiB and a context, {gigabytes / max(answer['ms'], 1e-6) * 1e3:.1f} GB/s"
