# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows about the end of a client that has work queued: how the other one fares, and in which state the server is.

With 580.159.04 a signal that ends it takes the other one along, `terminate_client` does not.

Each with a daemon of its own: one that hangs costs its own rows only.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Final

from conformance.checks.mps.stage import Stage, row, staged
from conformance.checks.stopping.holds import states
from conformance.checks.stopping.timeline import Timeline
from conformance.clients.launcher import Client, SilenceError
from conformance.host import Host, Unavailable
from conformance.report.model import Row, Verdict, judged, skipped
from tools.harness.wait import poll

TERMINATED, TERM, KILLED = ENDS = ("terminate_client", "SIGTERM", "SIGKILL")
OTHER: Final = "{end} of a busy client: the other one's rate afterwards, of that before"
LONGEST: Final = "{end} of a busy client: longest time in which the other one ended no kernel"
ERROR: Final = "{end} of a busy client: error of the other one"
SERVER: Final = "{end} of a busy client: state of the server afterwards"
LATER: Final = "{end} of a busy client: a client that comes afterwards works"
OWN: Final = "terminate_client of a busy client: error that it gets itself"
OWN_MS: Final = "terminate_client of a busy client: it gets the error after"
_FORMS: Final = (OTHER, LONGEST, ERROR, SERVER, LATER)
LOGGED: Final = "lines about errors in the logs of daemon and server after these ends"
QUIT: Final = "quit ends daemon and server after"
_WORK: Final = ("--kernel-us", "2000", "--queue", "32")
_START_SECONDS: Final = 15.0  # of a client, with that of the server
_LIMIT_SECONDS: Final = 10.0  # for the other one to answer
_SLOWER_RATIO: Final = 0.8
_HURTS_MS: Final = 500.0
_HURT: Final = "CUDA_ERROR_ILLEGAL_ADDRESS"  # by a signal, and not at all by terminate_client
_SUSPECT: Final = ("error", "fail", "fatal", "fault", "terminat")


def whats(end: str) -> list[str]:
    """Names of the rows of one way to end."""
    own = [OWN, OWN_MS] if end == TERMINATED else []
    return [*(form.format(end=end) for form in _FORMS), *own, *([LOGGED] if end == KILLED else [])]


def rows(host: Host, end: str) -> Iterator[Row]:
    """Two clients; one ends. The first one has the server started, so that only `terminate_client` needs commands."""
    with staged(host) as stage:
        with stage.steps(*_WORK, seconds=_START_SECONDS) as other:
            ignoring = () if end == TERMINATED else ("--default-signals",)
            with stage.steps(*_WORK, *other.pace, *ignoring, seconds=_START_SECONDS) as ending:
                time.sleep(stage.seconds)
                ended = time.monotonic_ns()
                _end(stage, end, ending)
                time.sleep(stage.seconds)
                if end == TERMINATED:
                    yield from _own(ending, ended)
            yield from _other(stage, end, other, ended)
        yield _state(stage, end)
        if end == KILLED:
            yield _logged(stage)
        fine, note = _comes(stage)
        yield row(LATER.format(end=end), judged(fine), fine, baseline=True, note=note)


def _end(stage: Stage, end: str, ending: Client) -> None:
    if end == TERMINATED:
        control = stage.control()
        named = next((one for one in control.clients() if one.tgid == ending.tgid), None)
        if named is None:
            raise Unavailable(f"the daemon does not list process {ending.tgid}, which is its client")
        control.terminate(named)
        return
    os.kill(ending.tgid, signal.SIGTERM if end == TERM else signal.SIGKILL)
    ending.process.wait(_LIMIT_SECONDS)


def _own(ending: Client, ended_ns: int) -> Iterator[Row]:
    try:
        record = ending.hear(_LIMIT_SECONDS)
    except SilenceError as silence:
        yield row(OWN, Verdict.DIFFERS, "none", baseline="some error", note=str(silence))
        yield skipped("mps", OWN_MS, "it got none")
        return
    got = record["error"] or "none"
    yield row(OWN, judged(got != "none"), got, baseline="some error")
    yield row(OWN_MS, Verdict.MEASURED, (record["failed_ns"] - ended_ns) / 1e6, "ms")


def _other(stage: Stage, end: str, other: Client, ended_ns: int) -> Iterator[Row]:
    """Whether the other client goes on: it is asked to end; one that hangs does not answer."""
    named = [form.format(end=end) for form in (OTHER, LONGEST, ERROR)]
    try:
        record = other.finish(_LIMIT_SECONDS)
    except SilenceError as error:
        yield row(named[0], Verdict.DIFFERS, 0.0, "ratio", 1.0, f"it hangs: {error}")
        return
    line, span = Timeline.of(record), round(stage.seconds * 1e9)
    before = line.rate(ended_ns - span, ended_ns)
    after = line.rate(ended_ns, ended_ns + span)
    ratio = round(after / before, 3) if before else 0.0
    longest = gap_ms(line.ended_ns, ended_ns, ended_ns + span)
    failure = record["error"] or "none"
    if end == TERMINATED:
        note = "alone it may be faster than before"
        yield row(named[0], judged(ratio >= _SLOWER_RATIO), ratio, "ratio", 1.0, note)
        yield row(named[1], judged(longest < _HURTS_MS), longest, "ms")
        yield row(named[2], judged(failure == "none"), failure, baseline="none")
        return
    yield row(named[0], judged(ratio < _SLOWER_RATIO), ratio, "ratio", 0.0)
    yield row(named[1], Verdict.MEASURED, longest, "ms")
    yield row(named[2], judged(failure == _HURT), failure, baseline=_HURT)


def gap_ms(ended_ns: Sequence[int], since_ns: int, until_ns: int) -> float:
    """The longest time between two ends within this span, its edges counted as ends."""
    inside = [at for at in ended_ns if since_ns < at < until_ns]
    edges = [since_ns, *inside, until_ns]
    return round(max(later - earlier for earlier, later in itertools.pairwise(edges)) / 1e6, 3)


def _state(stage: Stage, end: str) -> Row:
    from enforce.actuators.mps.model import MpsError

    try:
        state = ", ".join(server.status or "unknown" for server in stage.control().servers()) or "no server"
    except (MpsError, Unavailable) as error:
        state = str(error)
    return row(SERVER.format(end=end), judged(state == "ACTIVE"), state, baseline="ACTIVE")


def _comes(stage: Stage) -> tuple[bool, str]:
    try:
        with stage.steps(*_WORK, seconds=_LIMIT_SECONDS) as late:
            time.sleep(0.2)
            record = late.finish(_LIMIT_SECONDS)
    except Exception as error:  # noqa: BLE001 - however it fails, that is the answer
        return False, str(error)[:200]
    return record["error"] is None and len(record["ended_ns"]) > 0, record["error"] or ""


def _logged(stage: Stage) -> Row:
    lines = stage.logged()
    found = [line for line in lines if any(word in line.lower() for word in _SUSPECT)]
    note = f"of {len(lines)} lines; the last: {found[-1][:160]}" if found else f"of {len(lines)} lines"
    return row(LOGGED, Verdict.MEASURED, len(found), note=note)


def quitting(host: Host) -> Iterator[Row]:
    """`quit` with a client that has gone."""
    with staged(host) as stage:
        server, daemon = stage.server(), stage.daemon()
        with stage.steps(*_WORK) as client:
            client.finish()
        begun = time.monotonic_ns()
        stage.asked("quit")
        gone = _gone([daemon.process.tgid, *([server.tgid] if server.tgid else [])])
        ms = (time.monotonic_ns() - begun) / 1e6
        yield row(QUIT, judged(gone), ms, "ms", note="" if gone else "something was still there after 10 s")


def _gone(tgids: list[int]) -> bool:
    return bool(poll(lambda: not any(_lives(tgid) for tgid in tgids), _LIMIT_SECONDS, 0.01))


def _lives(tgid: int) -> bool:
    found = states(tgid)
    return bool(found) and not found <= frozenset("ZX")
