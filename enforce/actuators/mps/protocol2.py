# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Protocol 2: one command a line on standard input, the answer on standard output. Every driver to date knows it.

What is set for a server is for clients that connect to it later; what is set by default, for servers that start later.
Errors are text too, with exit code 0, so an answer counts only in the form that the command is known to have. A server
that starts answers nothing at all, as it does where there is no limit or no client: each question about a server is
asked together with one that a ready server answers. Sources: NVIDIA's MPS guide, "Legacy MPS v2 interface"; the daemons
of 535, 550 and 555 (tests/driver/test_mps_language.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from agent.core.model import DeviceUuid
from enforce.actuators.mps.channel import MpsChannel
from enforce.actuators.mps.model import Daemon, MpsClient, MpsError, MpsServer, MpsSetting, Scope, UnknownProtocolError

_PERCENTAGE = re.compile(r"^[0-9]{1,3}(\.[0-9]{1,18})?$")
_MEMORY = re.compile(r"^([0-9]{1,18})([KMGT]?)B?$")
_MAX_DIGITS = 10
_MOST_SERVERS = 64  # one for each user whose clients have connected
_UUID = re.compile(r"\b(?:GPU|MIG)-[0-9a-f][0-9a-f-]+")
_NONE = {"", "0", "unlimited", "none", "n/a", "not set"}
_DEVICE_LINE = re.compile(r"^\[([0-9]{1,4})\] ")  # then bus and name; below it a line for each client, "PID.number"
_CLIENT_LINE = re.compile(r"^([0-9]{1,10})(?:\.[0-9]{1,18})?$")
_DONE = "0"  # the last word of a `terminate_client` that succeeded
_UNKNOWN = ("unknown command", "invalid command", "unrecognized command", "usage:")


@dataclass(frozen=True, slots=True)
class Protocol2:
    """A daemon that answered in it."""

    channel: MpsChannel
    protocol: int = 2

    @property
    def daemon(self) -> Daemon:
        """The daemon."""
        return self.channel.daemon

    def servers(self) -> tuple[MpsServer, ...]:
        """With their states; one that ends meanwhile has none."""
        tgids = self._numbers("get_server_list")
        if len(tgids) > _MOST_SERVERS:  # each is asked about, and a daemon may be a container's own
            raise MpsError(f"MPS: get_server_list answered {len(tgids)} servers, which is malformed")
        return tuple(MpsServer(str(tgid), tgid, self._status(tgid)) for tgid in tgids)

    def clients(self) -> tuple[MpsClient, ...]:
        """Those of all servers. MpsError while one of them starts: its clients are unknown."""
        found = []
        for server in self.servers():
            command = f"get_client_list {server.name}"
            text = self._command(command) if server.faulted else self._of_ready(server.name, command)
            found += [MpsClient(tgid, server.name) for tgid in self._tgids(command, text)]
        return tuple(dict.fromkeys(found))

    def scopes(self) -> tuple[Scope, ...]:
        """Every server; where there is none, those to come."""
        return tuple(Scope(str(server)) for server in self._numbers("get_server_list")) or (Scope(""),)

    def devices(self) -> dict[DeviceUuid, int]:
        """As `device_query` lists them. To 555 there is none, and this is empty: the ordinals are unknown."""
        found: dict[DeviceUuid, int] = {}
        try:
            lines = self._command("device_query").splitlines()
        except UnknownProtocolError:
            return found
        for line in lines:
            ordinal, uuid = line.split(maxsplit=1)[:1], _UUID.search(line)
            if uuid and ordinal and (number := whole(ordinal[0])) is not None:
                found[DeviceUuid(uuid[0])] = number
        return found

    def device_clients(self) -> dict[DeviceUuid, tuple[int, ...]]:
        """A line with a device's ordinal, then lines of pids. Of devices with unknown ordinals nothing is known."""
        uuids = {ordinal: uuid for uuid, ordinal in self.devices().items()}
        found: dict[DeviceUuid, list[int]] = {}
        device: DeviceUuid | None = None
        for line in self._command("get_device_client_list").splitlines() if uuids else ():
            if (named := _DEVICE_LINE.match(line)) or _UUID.search(line):
                device = self._device(line, uuids.get(int(named[1])) if named else None)
                if device is not None:
                    found.setdefault(device, [])
            elif device is not None and (client := _CLIENT_LINE.match(line.strip())):
                found[device].append(int(client[1]))
        return {uuid: tuple(tgids) for uuid, tgids in found.items()}

    def _device(self, line: str, by_ordinal: DeviceUuid | None) -> DeviceUuid | None:
        uuid = _UUID.search(line)
        return DeviceUuid(uuid[0]) if uuid else by_ordinal

    def settings(self, scope: Scope, ordinals: tuple[int, ...]) -> dict[str, tuple[MpsSetting, ...]]:
        """Priority is the daemon's, whichever server; the others are one server's."""
        return {
            "percentage": (MpsSetting("percentage", scope),),
            "memory": tuple(MpsSetting("memory", scope, ordinal) for ordinal in ordinals),
            "priority": (MpsSetting("priority", Scope("")),),
        }

    def get(self, setting: MpsSetting) -> str:
        """Percent ("40"), MiB ("512M") or "" for none, 0 or 1."""
        command = f"get_{_setting_name(setting)}{_scope_words(setting)}"
        of_server = setting.scope.server and setting.what != "priority"
        text = (self._of_ready(setting.scope.server, command) if of_server else self._command(command)).strip()
        if setting.what == "percentage" and _PERCENTAGE.match(text):
            return f"{float(text):g}"
        if setting.what == "priority" and text in ("0", "1"):
            return text
        if setting.what == "memory" and text.lower() in _NONE:
            return ""
        if setting.what == "memory" and (found := _MEMORY.match(text)):
            return mebibytes(int(found[1]), found[2])
        raise self._malformed(f"get_{_setting_name(setting)}", text)

    def put(self, setting: MpsSetting, value: str) -> None:
        """And reads it back."""
        command = f"set_{_setting_name(setting)}{_scope_words(setting)} {value}"
        said = " ".join(self._command(command).split())[:200]
        if said and not (setting.what == "percentage" and _PERCENTAGE.match(said)):
            raise MpsError(f"MPS: {command.split()[0]} failed: {said}")
        now = self.get(setting)
        if not reads_as(setting, now, value):
            raise MpsError(f"MPS: set_{_setting_name(setting)} {value} was accepted, but it is {now or 'none'}")

    def terminate(self, client: MpsClient) -> None:
        """See Control. A daemon that says nothing has to list the client no longer."""
        said = self._command(f"terminate_client {client.server} {client.tgid}").split()
        if said != [_DONE] and (said or client in self.clients()):
            raise MpsError(f"MPS: terminate_client failed: {' '.join(said)[:200] or 'nothing'}")

    def shut_down(self, server: MpsServer) -> None:
        """Protocol 2 ends servers only together with the daemon: within a second, clients or not.

        The exit code is that of the server which ended last; a refusal has a text.
        """
        said = " ".join(self.channel.ask(given="quit -t 1\n").text.split())[:200]
        if said:
            raise MpsError(f"MPS: quit failed: {said}")

    def _status(self, server: int) -> str:
        """535 does not know the command: a server that answers is active there."""
        answer = self.channel.ask(given=f"get_server_status {server}\nget_active_thread_percentage {server}\n")
        status, _, percentage = answer.text.strip().partition("\n")
        if answer.succeeded and status.isalpha():
            return status.upper()
        unknown = status.lower().startswith(_UNKNOWN)
        return "ACTIVE" if answer.succeeded and unknown and _PERCENTAGE.match(percentage) else ""

    def _of_ready(self, server: str, command: str) -> str:
        """The answer of a server that is ready; MpsError of one that starts, which answers nothing."""
        text = self._command(f"get_active_thread_percentage {server}\n{command}")
        percentage, _, answer = text.partition("\n")
        if _PERCENTAGE.match(percentage):
            return answer
        if text.strip():
            raise self._malformed(command, text)
        raise MpsError(f"MPS: server {server} does not answer {command.split()[0]}: it is starting, or has failed")

    def _numbers(self, command: str) -> tuple[int, ...]:
        return self._tgids(command, self._command(command))

    def _tgids(self, command: str, text: str) -> tuple[int, ...]:
        numbers = [whole(word) for word in text.split()]
        if not all(number and number < 1 << 31 for number in numbers):
            raise self._malformed(command, text)
        return tuple(number for number in numbers if number)

    def _command(self, command: str) -> str:
        answer = self.channel.ask(given=command + "\n")
        if not answer.succeeded or any(answer.text.lower().startswith(word) for word in _UNKNOWN):
            reason = " ".join(answer.text.split())[:200] or "nothing"
            if any(word in reason.lower() for word in _UNKNOWN):
                raise UnknownProtocolError(f"MPS: {command.split()[0]} is not known there: {reason}")
            raise MpsError(f"MPS: {command.split()[0]} failed: {reason}")
        return answer.text

    def _malformed(self, command: str, text: str) -> MpsError:
        return MpsError(f"MPS: {command.split()[0]} answered {' '.join(text.split())[:80]!r}, which is malformed")


def whole(text: str) -> int | None:
    """The number that a word is; None: it is none, or too long."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else None


def mebibytes(number: int, unit: str) -> str:
    """In whole MiB, rounded up, so that two ways of writing a limit compare; "" for none."""
    scale = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}[unit]
    return f"{-(-number * scale >> 20)}M" if number else ""


def reads_as(setting: MpsSetting, shown: str, value: str) -> bool:
    """Whether a setting of `value` may be shown like that: a memory limit is shown in whole GiB, rounded down."""
    if shown == value:
        return True
    found = _MEMORY.match(value) if setting.what == "memory" else None
    gib = int(found[1]) // 1024 if found and found[2] == "M" else 0
    return gib > 0 and shown == f"{gib * 1024}M"


def _setting_name(setting: MpsSetting) -> str:
    default = "" if setting.scope.server else "default_"
    names = {
        "percentage": f"{default}active_thread_percentage",
        "memory": f"{default}device_pinned_mem_limit",
        "priority": "default_client_priority",
    }
    return names[setting.what]


def _scope_words(setting: MpsSetting) -> str:
    return "".join(f" {word}" for word in _words(setting))


def _words(setting: MpsSetting) -> Iterator[str]:
    if setting.what != "priority" and setting.scope.server:
        yield setting.scope.server
    if setting.device is not None:
        yield str(setting.device)
