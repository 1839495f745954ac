# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Protocol 2: one command a line on standard input, the answer on standard output. Spoken by every driver to date.

What is set for a server is for clients that connect to it later; what is set by default, for servers that start later.
Source: NVIDIA's MPS guide, "Legacy MPS v2 interface".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from agent.model import DeviceUuid
from enforce.mps.channel import Channel
from enforce.mps.model import Client, Daemon, MpsError, NotSpokenError, Scope, Server, Setting

_PERCENTAGE = re.compile(r"^[0-9]{1,3}(\.[0-9]{1,18})?$")
_MEMORY = re.compile(r"^([0-9]{1,18})([KMGT]?)B?$")
_MOST_DIGITS = 10
_UUID = re.compile(r"\b(?:GPU|MIG)-[0-9a-f][0-9a-f-]+")
_NONE = {"", "0", "unlimited", "none", "n/a", "not set"}
_UNKNOWN = ("unknown command", "invalid command", "unrecognized command", "usage:")


@dataclass(frozen=True, slots=True)
class Protocol2:
    """A daemon that was found to speak it."""

    channel: Channel
    protocol: int = 2

    @property
    def daemon(self) -> Daemon:
        """Who is spoken to."""
        return self.channel.daemon

    def servers(self) -> tuple[Server, ...]:
        """With their states; one that ends meanwhile has none."""
        return tuple(Server(str(tgid), tgid, self._status(tgid)) for tgid in self._numbers("get_server_list"))

    def clients(self) -> tuple[Client, ...]:
        """Those of all servers."""
        found = []
        for server in self._numbers("get_server_list"):
            found += [Client(tgid, str(server)) for tgid in self._numbers(f"get_client_list {server}")]
        return tuple(dict.fromkeys(found))

    def scopes(self) -> tuple[Scope, ...]:
        """Every server; where there is none, those to come."""
        return tuple(Scope(str(server)) for server in self._numbers("get_server_list")) or (Scope(""),)

    def devices(self) -> dict[DeviceUuid, int]:
        """As `device_query` lists them."""
        found: dict[DeviceUuid, int] = {}
        for line in self._say("device_query").splitlines():
            ordinal, uuid = line.split(maxsplit=1)[:1], _UUID.search(line)
            if uuid and ordinal and (number := whole(ordinal[0])) is not None:
                found[DeviceUuid(uuid[0])] = number
        return found

    def device_clients(self) -> dict[DeviceUuid, tuple[int, ...]]:
        """A line that names a device, then lines of pids."""
        found: dict[DeviceUuid, tuple[int, ...]] = {}
        device: DeviceUuid | None = None
        for line in self._say("get_device_client_list").splitlines():
            if uuid := _UUID.search(line):
                device = DeviceUuid(uuid[0])
                found.setdefault(device, ())
            elif device is not None and (number := whole(line.strip())) is not None:
                found[device] += (number,)
        return found

    def settings(self, scope: Scope, ordinals: tuple[int, ...]) -> dict[str, tuple[Setting, ...]]:
        """Priority is the daemon's, whichever server: that is told apart from what is one server's."""
        return {
            "percentage": (Setting("percentage", scope),),
            "memory": tuple(Setting("memory", scope, ordinal) for ordinal in ordinals),
            "priority": (Setting("priority", Scope("")),),
        }

    def get(self, setting: Setting) -> str:
        """Percent ("40"), MiB ("512M") or "" for none, 0 or 1."""
        text = self._say(f"get_{_noun(setting)}{_whom(setting)}").strip()
        if setting.what == "percentage" and _PERCENTAGE.match(text):
            return f"{float(text):g}"
        if setting.what == "priority" and text in ("0", "1"):
            return text
        if setting.what == "memory" and text.lower() in _NONE:
            return ""
        if setting.what == "memory" and (found := _MEMORY.match(text)):
            return mebibytes(int(found[1]), found[2])
        raise self._senseless(f"get_{_noun(setting)}", text)

    def put(self, setting: Setting, value: str) -> None:
        """And looks whether it is so."""
        self._say(f"set_{_noun(setting)}{_whom(setting)} {value}")
        now = self.get(setting)
        if now != value:
            raise MpsError(f"MPS: set_{_noun(setting)} {value} was taken without a word, but it is {now or 'none'}")

    def terminate(self, client: Client) -> None:
        """See Control."""
        self._say(f"terminate_client {client.server} {client.tgid}")

    def shut_down(self, server: Server) -> None:
        """Protocol 2 ends servers only together with the daemon: within a second, clients or not."""
        self._say("quit -t 1")

    def _status(self, server: int) -> str:
        answer = self.channel.ask(given=f"get_server_status {server}\n")
        words = answer.text.split()
        return words[0].upper() if answer.fine and len(words) == 1 and words[0].isalpha() else ""

    def _numbers(self, command: str) -> tuple[int, ...]:
        text = self._say(command)
        numbers = [whole(word) for word in text.split()]
        if not all(number and number < 1 << 31 for number in numbers):
            raise self._senseless(command, text)
        return tuple(number for number in numbers if number)

    def _say(self, command: str) -> str:
        answer = self.channel.ask(given=command + "\n")
        if not answer.fine or any(answer.text.lower().startswith(word) for word in _UNKNOWN):
            said = " ".join(answer.text.split())[:200] or "nothing"
            if any(word in said.lower() for word in _UNKNOWN):
                raise NotSpokenError(f"MPS: {command.split()[0]} is not known there: {said}")
            raise MpsError(f"MPS: {command.split()[0]} failed, it said: {said}")
        return answer.text

    def _senseless(self, command: str, text: str) -> MpsError:
        return MpsError(f"MPS: {command.split()[0]} answered {' '.join(text.split())[:80]!r}, which makes no sense")


def whole(text: str) -> int | None:
    """The number that a word is, if it is one of any use."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def mebibytes(number: int, unit: str) -> str:
    """In whole MiB, rounded up, so that two ways of writing a limit compare; "" for none."""
    scale = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}[unit]
    return f"{-(-number * scale >> 20)}M" if number else ""


def _noun(setting: Setting) -> str:
    default = "" if setting.scope.server else "default_"
    names = {
        "percentage": f"{default}active_thread_percentage",
        "memory": f"{default}device_pinned_mem_limit",
        "priority": "default_client_priority",
    }
    return names[setting.what]


def _whom(setting: Setting) -> str:
    return "".join(f" {word}" for word in _words(setting))


def _words(setting: Setting) -> Iterator[str]:
    if setting.what != "priority" and setting.scope.server:
        yield setting.scope.server
    if setting.device is not None:
        yield str(setting.device)
