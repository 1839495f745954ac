# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows about what a daemon says: how the product finds and asks it, languages, commands, and how answers are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from conformance.checks.mps.stage import NAME, Stage, row, staged
from conformance.clients.launcher import Client
from conformance.host import Host
from conformance.report.model import Row, Verdict, judged, skipped

if TYPE_CHECKING:
    from enforce.actuators.mps.channel import CommandAnswer
    from enforce.actuators.mps.model import MpsControl, MpsServer

FOUND: Final = "the product finds the daemon among all processes, and its program"
CHANNEL: Final = "the product's channel to the daemon, confined to its folder"
PROTOCOL: Final = "the language that the product speaks with it"
SPOKEN: Final = "protocol {protocol} is spoken"
SERVER: Final = "a server starts before the first client, by start_server"
READS: Final = "the product reads: {what}"
READINGS: Final = ("servers", "clients", "devices", "device_clients", "percentage", "memory", "priority")
COMMAND: Final = "command: {command}"
COMMANDS: Final = (
    "get_server_list",
    "get_server_status S",
    "get_client_list S",
    "get_device_client_list",
    "ps",
    "device_query",
    "get_default_active_thread_percentage",
    "get_active_thread_percentage S",
    "get_default_device_pinned_mem_limit 0",
    "get_device_pinned_mem_limit S 0",
    "get_default_client_priority",
    "lspart",
)
PRODUCT: Final = (FOUND, CHANNEL)
WHATS: Final = (
    *(PROTOCOL, SPOKEN.format(protocol=2), SPOKEN.format(protocol=3), SERVER),
    *(READS.format(what=what) for what in READINGS),
    *(COMMAND.format(command=command) for command in COMMANDS),
)
_NOT_ALWAYS: Final = frozenset({"lspart", "get_server_status S", "device_query"})  # of newer daemons only
_UNKNOWN: Final = frozenset({"lspart"})  # to 580
_ERRORS: Final = ("unknown", "invalid", "not found", "insufficient")  # the exit code is 0 then too
_LONGEST_NOTE: Final = 160


def product(host: Host) -> Iterator[Row]:
    """How the product gets at the daemon. No other row needs it."""
    with staged(host) as stage:
        yield from _found(stage)


def _found(stage: Stage) -> Iterator[Row]:
    from agent.node.procfs import Procfs
    from enforce.actuators.mps.daemons import daemons
    from enforce.actuators.mps.protocol3 import connect

    found = [one for one in daemons(Procfs()) if one.pipe_directory == str(stage.pipes)]
    if not found:
        yield row(FOUND, Verdict.DIFFERS, False, baseline=True, note=f"process {stage.daemon().process.tgid} is one")
        yield skipped(NAME, CHANNEL, f"see “{FOUND}”")
        return
    yield row(FOUND, Verdict.OK, True, baseline=True, note=f"{found[0].program}, contested: {found[0].contested}")
    yield confined(lambda: connect(found[0]).servers())


def confined(ask: Callable[[], object]) -> Row:
    """Skipped on a kernel that has no Landlock: the product leaves MPS alone there, and says so."""
    answers, message = _tried(ask)
    if not answers and "landlock" in message.lower():
        return skipped(NAME, CHANNEL, message)
    return row(CHANNEL, judged(answers), answers, baseline=True, note=message)


def rows(host: Host) -> Iterator[Row]:
    """Rows of the control language, with one client that works."""
    with staged(host) as stage:
        yield from _languages(stage)
        server = stage.server()
        yield row(SERVER, Verdict.OK, server.status, baseline="ACTIVE", note=f"process {server.tgid}")
        with stage.steps("--kernel-us", "500") as client:
            yield from _readings(stage.control(), server, client)
            for command in COMMANDS:
                yield _command(stage, command, server.name)


def _languages(stage: Stage) -> Iterator[Row]:
    from enforce.actuators.mps.protocol3 import PROTOCOLS

    yield row(PROTOCOL, Verdict.MEASURED, stage.control().protocol)
    for number, language in zip((2, 3), PROTOCOLS, strict=True):
        spoken, message = _tried(language(stage.channel()).servers)
        yield row(SPOKEN.format(protocol=number), Verdict.MEASURED, spoken, note=message)


def _tried(ask: Callable[[], object]) -> tuple[bool, str]:
    from enforce.actuators.mps.model import MpsError

    try:
        return True, _short(str(ask()))
    except MpsError as error:
        return False, _short(str(error))


def _readings(control: MpsControl, server: MpsServer, client: Client) -> Iterator[Row]:
    """What the product's parsers make of the answers, and whether the client and the server are in there."""
    from enforce.actuators.mps.model import Scope

    settings = control.settings(Scope(server.name, "default" if control.protocol == 3 else ""), (0,))
    asked: dict[str, tuple[Callable[[], Any], Callable[[Any], bool]]] = {
        "servers": (control.servers, lambda found: server.name in [one.name for one in found]),
        "clients": (control.clients, lambda found: client.tgid in [one.tgid for one in found]),
        "devices": (control.devices, lambda found: 0 in found.values()),
        "device_clients": (control.device_clients, lambda found: any(client.tgid in pids for pids in found.values())),
        "percentage": (lambda: control.get(settings["percentage"][0]), lambda found: found == "100"),
        "memory": (lambda: control.get(settings["memory"][0]), lambda found: found == ""),
        "priority": (lambda: control.get(settings["priority"][0]), lambda found: found == "0"),
    }
    for what, (ask, holds) in asked.items():
        known = what not in ("devices", "device_clients") or control.protocol == 3 or bool(control.devices())
        if known:
            yield _reading(READS.format(what=what), ask, holds)
        else:
            yield skipped(NAME, READS.format(what=what), "without device_query the daemon names no ordinals")


def _reading(what: str, ask: Callable[[], Any], holds: Callable[[Any], bool]) -> Row:
    from enforce.actuators.mps.model import MpsError

    try:
        found = ask()
    except MpsError as error:
        return row(what, Verdict.DIFFERS, False, baseline=True, note=_short(str(error)))
    return row(what, judged(holds(found)), holds(found), baseline=True, note=_short(repr(found)))


def _command(stage: Stage, command: str, server: str) -> Row:
    from enforce.actuators.mps.model import MpsError

    what = COMMAND.format(command=command)
    try:
        answer = stage.asked(command.replace(" S", f" {server}"))
    except MpsError as error:
        return row(what, Verdict.DIFFERS, False, baseline=True, note=_short(str(error)))
    return answered(command, answer)


def answered(command: str, answer: CommandAnswer) -> Row:
    """What a daemon said to one line of protocol 2."""
    what = COMMAND.format(command=command)
    fine = answer.succeeded and not any(word in answer.text.lower() for word in _ERRORS)
    expected = command not in _UNKNOWN
    verdict = Verdict.MEASURED if command in _NOT_ALWAYS else judged(fine == expected)
    return row(what, verdict, fine, baseline=expected, note=_short(answer.text) or "it says nothing")


def _short(text: str) -> str:
    return " | ".join(" ".join(line.split()) for line in text.split("\n") if line.strip())[:_LONGEST_NOTE]
