# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Protocol 3: `module verb` as arguments, named servers, and namespaces with limits of their own (drivers from 615 on).

A namespace's limits reach the clients that connect through its directory, and no others. Source: NVIDIA's MPS guide,
"MPS v3 interface". `connect` finds by trying, not by the driver's version, which protocol a control daemon knows: 2
first, then 3. A daemon that does not answer at all is not tried a second time: that would only double the wait.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass

from agent.core.model import DeviceUuid
from enforce.actuators.mps.channel import TIMEOUT_SECONDS, MpsChannel
from enforce.actuators.mps.model import (
    Daemon,
    MpsClient,
    MpsControl,
    MpsError,
    MpsServer,
    MpsSetting,
    MpsTimeoutError,
    Scope,
    UnknownProtocolError,
)
from enforce.actuators.mps.protocol2 import _MEMORY, _NONE, _PERCENTAGE, Protocol2, mebibytes, reads_as, whole

_FORMAT = "--format=csv,noheader"
_FIELDS = {"percentage": "active-thread-percentage", "memory": "pinned-memory-limit", "priority": "client-priority"}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_DEFAULT = "default"  # every server's own namespace


@dataclass(frozen=True, slots=True)
class Protocol3:
    """A daemon that answered in it."""

    channel: MpsChannel
    protocol: int = 3

    @property
    def daemon(self) -> Daemon:
        """The daemon."""
        return self.channel.daemon

    def servers(self) -> tuple[MpsServer, ...]:
        """Ready ones have the state ACTIVE, as with protocol 2."""
        rows = self._table(["server", "list"], 4)
        return tuple(MpsServer(_name(row[0]), whole(row[2]), _state(row[3])) for row in rows)

    def clients(self) -> tuple[MpsClient, ...]:
        """Those of all servers."""
        rows = self._table(["client", "list", "--all"], 4)
        pids = [whole(row[0]) for row in rows]
        if not all(pids):
            raise MpsError("MPS: client list answered with a pid that is no number")
        named = zip(pids, rows, strict=True)
        return tuple(dict.fromkeys(MpsClient(pid, _name(row[1]), _name(row[3])) for pid, row in named if pid))

    def scopes(self) -> tuple[Scope, ...]:
        """Every namespace."""
        return tuple(Scope(_name(row[1]), _name(row[0])) for row in self._table(["namespace", "list"], 2))

    def devices(self) -> dict[DeviceUuid, int]:
        """As `device list` has them."""
        found = {}
        for row in self._table(["device", "list"], 4):
            if (ordinal := whole(row[0])) is not None:
                found[DeviceUuid(row[3])] = ordinal
        return found

    def device_clients(self) -> dict[DeviceUuid, tuple[int, ...]]:
        """A client has a line for each device, by its ordinal."""
        uuids = {str(ordinal): uuid for uuid, ordinal in self.devices().items()}
        found: dict[DeviceUuid, list[int]] = {}
        for row in self._table(["client", "list", "--all"], 4):
            if row[2] in uuids and (pid := whole(row[0])) is not None:
                found.setdefault(uuids[row[2]], []).append(pid)
        return {uuid: tuple(tgids) for uuid, tgids in found.items()}

    def settings(self, scope: Scope, ordinals: tuple[int, ...]) -> dict[str, tuple[MpsSetting, ...]]:
        """A memory limit is one for all devices."""
        return {what: (MpsSetting(what, scope),) for what in _FIELDS}

    def get(self, setting: MpsSetting) -> str:
        """As with protocol 2."""
        scope, field = setting.scope, _FIELDS[setting.what]
        text = self._command(["namespace", "get", scope.space, scope.server, field]).strip()
        if text.lower() in _NONE | {"-"} and setting.what != "priority":
            return "100" if setting.what == "percentage" else ""
        if setting.what == "percentage" and _PERCENTAGE.match(text):
            return f"{float(text):g}"
        if setting.what == "priority" and text in ("0", "1"):
            return text
        if setting.what == "memory" and (found := _MEMORY.match(text)):
            return mebibytes(int(found[1]), found[2])
        raise MpsError(f"MPS: namespace get {field} answered {text[:80]!r}, which is malformed")

    def put(self, setting: MpsSetting, value: str) -> None:
        """And reads it back. A daemon may refuse while a client is connected there."""
        scope, option = setting.scope, f"--{_FIELDS[setting.what]}={value}"
        if scope.space == _DEFAULT:
            self._command(["server", "set", scope.server, option])
        else:
            self._command(["namespace", "set", scope.space, f"--server={scope.server}", option])
        now = self.get(setting)
        if not reads_as(setting, now, value):
            raise MpsError(f"MPS: {option} was accepted, but it is {now or 'none'}")

    def terminate(self, client: MpsClient) -> None:
        """See Control."""
        self._command(["client", "terminate", str(client.tgid)])

    def shut_down(self, server: MpsServer) -> None:
        """That server alone; the daemon and other servers stay."""
        self._command(["server", "delete", server.name, "--force"])

    def _table(self, arguments: list[str], least: int) -> list[list[str]]:
        text = self._command([*arguments, _FORMAT])
        try:
            rows = [row for row in csv.reader(text.splitlines()) if row]
        except csv.Error as error:
            raise MpsError(f"MPS: {' '.join(arguments)} answered no table ({error})") from error
        if any(len(row) < least for row in rows):
            raise MpsError(f"MPS: {' '.join(arguments)} answered a line of too few columns, which is malformed")
        return [[cell.strip() for cell in row] for row in rows]

    def _command(self, arguments: list[str]) -> str:
        answer = self.channel.ask(["-p", "3", *arguments])
        reason = " ".join(answer.text.split())[:200] or "nothing"
        if answer.succeeded:
            return answer.text
        if "invalid option" in reason or reason.startswith(("Usage", "Unknown")):
            raise UnknownProtocolError(f"MPS: {' '.join(arguments[:2])} is not known there: {reason}")
        raise MpsError(f"MPS: {' '.join(arguments[:2])} failed: {reason}")


def _name(word: str) -> str:
    """Of a server or namespace. It becomes an argument: none may look like an option, or lead elsewhere."""
    if not _NAME.fullmatch(word):
        raise MpsError(f"MPS: {word[:40]!r} is no name of a server or namespace")
    return word


def _state(word: str) -> str:
    return "ACTIVE" if word.upper() == "READY" else word.upper()


PROTOCOLS: tuple[type[Protocol2] | type[Protocol3], ...] = (Protocol2, Protocol3)


def connect(daemon: Daemon, timeout_seconds: float = TIMEOUT_SECONDS) -> MpsControl:
    """MpsError when the daemon knows none of the protocols: its answer to the first."""
    return connect_over(MpsChannel(daemon, timeout_seconds))


def connect_over(channel: MpsChannel) -> MpsControl:
    """The same, over a channel to the daemon."""
    first: MpsError | None = None
    for protocol in PROTOCOLS:
        control = protocol(channel)
        try:
            if control.servers() or protocol is Protocol2:
                return control
            raise UnknownProtocolError("MPS: protocol 3 answers nothing: drivers that do not know it ignore -p 3")
        except MpsTimeoutError:
            raise
        except MpsError as error:
            first = first or error
    assert first
    raise first
