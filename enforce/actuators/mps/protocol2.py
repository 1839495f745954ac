# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Protocol 2: one command a line on standard input, the answer on standard output. Every driver to date knows it.

What is set for a server is for clients that connect to it later; what is set by default, for servers that start later.
Source: NVIDIA's MPS guide, "Legacy MPS v2 interface".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from agent.core.model import DeviceUuid
from enforce.actuators.mps.channel import Channel
from enforce.actuators.mps.model import Daemon, MpsClient, MpsError, MpsServer, MpsSetting, Scope, UnknownProtocolError

_PERCENTAGE = re.compile(r"^[0-9]{1,3}(\.[0-9]{1,18})?$")
_MEMORY = re.compile(r"^([0-9]{1,18})([KMGT]?)B?$")
_MAX_DIGITS = 10
_UUID = re.compile(r"\b(?:GPU|MIG)-[0-9a-f][0-9a-f-]+")
_NONE = {"", "0", "unlimited", "none", "n/a", "not set"}
_UNKNOWN = ("unknown command", "invalid command", "unrecognized command", "usage:")


@dataclass(frozen=True, slots=True)
class Protocol2:
    """A daemon that answered in it."""

    channel: Channel
    protocol: int = 2

    @property
    def daemon(self) -> Daemon:
        """The daemon."""
        return self.channel.daemon

    def servers(self) -> tuple[MpsServer, ...]:
        """With their states; one that ends meanwhile has none."""
        return tuple(MpsServer(str(tgid), tgid, self._status(tgid)) for tgid in self._numbers("get_server_list"))

    def clients(self) -> tuple[MpsClient, ...]:
        """Those of all servers."""
        found = []
        for server in self._numbers("get_server_list"):
            found += [MpsClient(tgid, str(server)) for tgid in self._numbers(f"get_client_list {server}")]
        return tuple(dict.fromkeys(found))

    def scopes(self) -> tuple[Scope, ...]:
        """Every server; where there is none, those to come."""
        return tuple(Scope(str(server)) for server in self._numbers("get_server_list")) or (Scope(""),)

    def devices(self) -> dict[DeviceUuid, int]:
        """As `device_query` lists them."""
        found: dict[DeviceUuid, int] = {}
        for line in self._command("device_query").splitlines():
            ordinal, uuid = line.split(maxsplit=1)[:1], _UUID.search(line)
            if uuid and ordinal and (number := whole(ordinal[0])) is not None:
                found[DeviceUuid(uuid[0])] = number
        return found

    def device_clients(self) -> dict[DeviceUuid, tuple[int, ...]]:
        """A line that names a device, then lines of pids."""
        found: dict[DeviceUuid, tuple[int, ...]] = {}
        device: DeviceUuid | None = None
        for line in self._command("get_device_client_list").splitlines():
            if uuid := _UUID.search(line):
                device = DeviceUuid(uuid[0])
                found.setdefault(device, ())
            elif device is not None and (number := whole(line.strip())) is not None:
                found[device] += (number,)
        return found

    def settings(self, scope: Scope, ordinals: tuple[int, ...]) -> dict[str, tuple[MpsSetting, ...]]:
        """Priority is the daemon's, whichever server; the others are one server's."""
        return {
            "percentage": (MpsSetting("percentage", scope),),
            "memory": tuple(MpsSetting("memory", scope, ordinal) for ordinal in ordinals),
            "priority": (MpsSetting("priority", Scope("")),),
        }

    def get(self, setting: MpsSetting) -> str:
        """Percent ("40"), MiB ("512M") or "" for none, 0 or 1."""
        text = self._command(f"get_{_setting_name(setting)}{_scope_words(setting)}").strip()
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
        self._command(f"set_{_setting_name(setting)}{_scope_words(setting)} {value}")
        now = self.get(setting)
        if now != value:
            raise MpsError(f"MPS: set_{_setting_name(setting)} {value} was accepted, but it is {now or 'none'}")

    def terminate(self, client: MpsClient) -> None:
        """See Control."""
        self._command(f"terminate_client {client.server} {client.tgid}")

    def shut_down(self, server: MpsServer) -> None:
        """Protocol 2 ends servers only together with the daemon: within a second, clients or not."""
        self._command("quit -t 1")

    def _status(self, server: int) -> str:
        answer = self.channel.ask(given=f"get_server_status {server}\n")
        words = answer.text.split()
        return words[0].upper() if answer.succeeded and len(words) == 1 and words[0].isalpha() else ""

    def _numbers(self, command: str) -> tuple[int, ...]:
        text = self._command(command)
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
