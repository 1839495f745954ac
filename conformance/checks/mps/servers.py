# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows about commands that need a server: what it says while it starts, its own values, its lists, and its end.

All in protocol 2, which every daemon speaks, line by line as it is written in NVIDIA's documentation.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from typing import Final

from conformance.checks.mps.stage import Stage, row, staged
from conformance.clients.launcher import Client, SilenceError
from conformance.host import Host, Unavailable
from conformance.report.model import Row, Verdict, judged
from tools.harness.wait import poll

LISTED: Final = "start_server: the server is in the list after"
READY: Final = "start_server: it is ready after"
MEANWHILE: Final = "start_server: what get_active_thread_percentage says of it until then"
STARTING: Final = (LISTED, READY, MEANWHILE)
OWN_PERCENT: Final = "a server's percentage when the default was set to 70 after its start"
SET_PERCENT: Final = "a server's percentage after set_active_thread_percentage S 50"
OWN_MEMORY: Final = "a server's memory limit when the default was set to 2G after its start"
SET_MEMORY: Final = "a server's memory limit after set_device_pinned_mem_limit S 0 1G"
VALUES: Final = (OWN_PERCENT, SET_PERCENT, OWN_MEMORY, SET_MEMORY)
FORM: Final = "get_device_client_list has lines of the forms [n] bb:dd.f, STRING and PID.ID"
STRING: Final = "get_device_client_list: STRING is"
COLUMNS: Final = "ps: its columns"
LISTS: Final = (FORM, STRING, COLUMNS)
REFUSED: Final = "shutdown_server with a client: the client goes on"
FORCED: Final = "shutdown_server -f with a client: error of the client"
GONE: Final = "shutdown_server -f: the server is out of the list after"
ANOTHER: Final = "shutdown_server -f: a client that comes afterwards works, with another server"
SHUTDOWN: Final = (REFUSED, FORCED, GONE, ANOTHER)
_DEVICE_LINE: Final = re.compile(r"\[\d+\] +[0-9a-fA-F:]*[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d, *(?P<string>.+)")
_CLIENT_LINE: Final = re.compile(r"\d+\.\d+")
_UUID: Final = re.compile(r"(GPU|MIG)-[0-9a-f-]{8,}")
_STARTS_SECONDS: Final = 15.0
_ENDS_SECONDS: Final = 10.0
_STEP_SECONDS: Final = 0.005
_MOST_ANSWERS: Final = 4  # different ones, in a note


def starting(host: Host) -> Iterator[Row]:
    """A server's first moments, with a question after the other."""
    with staged(host) as stage:
        begun = time.monotonic()
        _said(stage, f"start_server -uid {os.getuid()}")
        lists: list[str] = []
        if not poll(lambda: _answered(stage, "get_server_list", lists), _STARTS_SECONDS, _STEP_SECONDS):
            raise Unavailable(f"{_STARTS_SECONDS:g} s after start_server get_server_list says: {_different(lists)}")
        took = (time.monotonic() - begun) * 1e3
        yield row(LISTED, Verdict.MEASURED, took, "ms", note=f"until then it says: {_different(lists[:-1])}")
        answers: list[str] = []
        own = f"get_active_thread_percentage {lists[-1]}"
        ready = poll(lambda: _answered(stage, own, answers), _STARTS_SECONDS, _STEP_SECONDS)
        took = (time.monotonic() - begun) * 1e3
        note = "" if ready else f"it was not within {_STARTS_SECONDS:g} s"
        yield row(READY, judged(bool(ready)), took, "ms", note=note)
        yield row(MEANWHILE, Verdict.MEASURED, _different(answers[:-1]), note=f"{len(answers)} answers")


def _answered(stage: Stage, command: str, answers: list[str]) -> bool:
    """Whether the answer, which is added to the others, is a number."""
    answers.append(_said(stage, command))
    return bool(re.fullmatch(r"\d+(\.\d+)?", answers[-1]))


def _different(answers: list[str]) -> str:
    """Answers that are not alike, as a note."""
    found = dict.fromkeys(answer or "an empty line" for answer in answers)
    return "; ".join(list(found)[:_MOST_ANSWERS]) or "no other answer"


def _said(stage: Stage, command: str) -> str:
    """What the daemon says to a line; that it says nothing in time is an answer, too."""
    from enforce.actuators.mps.model import MpsError

    try:
        return stage.asked(command).text.strip()
    except MpsError as error:
        return str(error)


def values(host: Host) -> Iterator[Row]:
    """A default is for servers that start later; a server's own value is for clients that come later."""
    with staged(host) as stage:
        server = stage.server().name
        _said(stage, "set_default_active_thread_percentage 70")
        yield _value(stage, OWN_PERCENT, f"get_active_thread_percentage {server}", "100.0")
        _said(stage, f"set_active_thread_percentage {server} 50")
        default = _said(stage, "get_default_active_thread_percentage")
        own = f"get_active_thread_percentage {server}"
        yield _value(stage, SET_PERCENT, own, "50.0", f"the default is {default}")
        _said(stage, "set_default_device_pinned_mem_limit 0 2G")
        yield _value(stage, OWN_MEMORY, f"get_device_pinned_mem_limit {server} 0", "")
        _said(stage, f"set_device_pinned_mem_limit {server} 0 1G")
        default = _said(stage, "get_default_device_pinned_mem_limit 0")
        yield _value(stage, SET_MEMORY, f"get_device_pinned_mem_limit {server} 0", "1G", f"the default is {default}")


def _value(stage: Stage, what: str, command: str, expected: str, note: str = "") -> Row:
    found = _said(stage, command)
    return row(what, judged(found == expected), found or "unset", baseline=expected or "unset", note=note)


def lists(host: Host) -> Iterator[Row]:
    """What a list of clients looks like, with one client."""
    with staged(host) as stage:
        stage.server()
        with stage.steps("--kernel-us", "500") as client:
            lines = [line.strip() for line in _said(stage, "get_device_client_list").split("\n")]
            columns = _said(stage, "ps").partition("\n")[0]
        yield form_row(lines, client.tgid)
        yield row(STRING, Verdict.MEASURED, string_kind(lines), note=" | ".join(lines)[:160])
        yield row(COLUMNS, Verdict.MEASURED, " ".join(columns.split()))


def form_row(lines: list[str], tgid: int) -> Row:
    """Whether these are all the lines that the product's parser knows, the client's among them."""
    odd = [line for line in lines if not (_DEVICE_LINE.fullmatch(line) or _CLIENT_LINE.fullmatch(line))]
    listed = any(line.split(".")[0] == str(tgid) for line in lines if _CLIENT_LINE.fullmatch(line))
    missing = "" if listed else f"process {tgid} is not in it"
    note = "; ".join(part for part in (f"others: {odd[:2]}" if odd else "", missing) if part)
    return row(FORM, judged(listed and not odd), not odd, baseline=True, note=note)


def string_kind(lines: list[str]) -> str:
    """What stands behind the bus address: "a UUID", "a name", or "nothing"."""
    found = [match["string"] for line in lines if (match := _DEVICE_LINE.fullmatch(line))]
    if not found:
        return "nothing"
    return "a UUID" if _UUID.search(found[0]) else "a name"


def shutdown(host: Host) -> Iterator[Row]:
    """Without and with force, a busy client each time."""
    with staged(host) as stage:
        server = stage.server().name
        with stage.steps("--kernel-us", "500") as client:
            answer = _said(stage, f"shutdown_server {server}")
            yield _goes_on(client, stage.seconds, answer)
        with stage.steps("--kernel-us", "500") as client:
            before = _said(stage, "get_server_list").split()
            begun = time.monotonic()
            answer = _said(stage, f"shutdown_server {before[-1] if before else server} -f")
            yield _error_of(client, stage.seconds, answer)
            gone = poll(lambda: not set(before) & set(_said(stage, "get_server_list").split()), _ENDS_SECONDS, 0.01)
            took = (time.monotonic() - begun) * 1e3
        yield row(GONE, judged(bool(gone)), took, "ms", note="" if gone else "it stays")
        yield _another(stage, before)


def _goes_on(client: Client, seconds: float, answer: str) -> Row:
    time.sleep(seconds)
    try:
        error = client.finish()["error"] or ""
    except SilenceError as silence:
        error = str(silence)
    said = f"the daemon says: {answer or 'nothing'}"
    return row(REFUSED, judged(not error), not error, baseline=True, note=f"{error}; {said}" if error else said)


def _error_of(client: Client, seconds: float, answer: str) -> Row:
    time.sleep(seconds)
    try:
        error = client.finish()["error"] or "none"
    except SilenceError as silence:
        error = f"it hangs: {silence}"
    note = f"the daemon says: {answer or 'nothing'}"
    return row(FORCED, judged(error.startswith("CUDA_")), error, baseline="some error", note=note)


def _another(stage: Stage, before: list[str]) -> Row:
    with stage.steps("--kernel-us", "500", seconds=_STARTS_SECONDS) as late:
        time.sleep(stage.seconds)
        servers = _said(stage, "get_server_list").split()
        record = late.finish()
    works = record["error"] is None and len(record["ended_ns"]) > 0
    other = bool(servers) and not set(servers) & set(before)
    said = f"servers {', '.join(before)} before, {', '.join(servers) or 'none'} after"
    return row(ANOTHER, judged(works and (other or stage.host.simulated)), works, baseline=True, note=said)
