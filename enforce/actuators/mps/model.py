# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The data types of MPS: daemons, their servers and clients, and the limits of new clients. All are immutable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from agent.core.errors import WardenError
from agent.core.model import DeviceUuid, ProcessId
from agent.core.text import printable


class MpsError(WardenError):
    """A control daemon could not be asked, or its answer is malformed. Nothing is known about its clients then."""


class MpsTimeoutError(MpsError):
    """It did not answer in time."""


class UnknownProtocolError(MpsError):
    """The daemon does not know this protocol."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """A control daemon, where it is reached, and the program that speaks to it."""

    process: ProcessId
    pipe_directory: str  # as the daemon sees it
    program: str
    contested: bool = False  # another process claims its pipe
    pipe: tuple[int, int] | None = None  # which file that is: its device and inode

    @property
    def contested_error(self) -> str:
        """The error text for a contested daemon."""
        where = printable(self.pipe_directory, 160)
        return f"several processes claim to be the MPS control daemon at {where}: end the false ones"


@dataclass(frozen=True, slots=True)
class MpsServer:
    """What clients share: a process of its own. `name` is what commands call it: its pid, or a name (protocol 3)."""

    name: str
    tgid: int | None
    status: str  # "ACTIVE", "FAULT", … in capitals; "" unknown

    @property
    def faulted(self) -> bool:
        """Whether it has met a fatal error, which all its clients share."""
        return "FAULT" in self.status


@dataclass(frozen=True, slots=True)
class MpsClient:
    """A process that shares the SMs through a server; its pid as the daemon sees it."""

    tgid: int
    server: str
    space: str = ""  # the namespace, with protocol 3


@dataclass(frozen=True, slots=True)
class Scope:
    """The new clients a limit is for: those of a server, of one namespace of it, or ("") of servers to come."""

    server: str
    space: str = ""


@dataclass(frozen=True, slots=True)
class MpsSetting:
    """One limit: its kind and scope. `device`: the ordinal of a memory limit where the protocol has one for each."""

    what: str  # "percentage" | "memory" | "priority"
    scope: Scope
    device: int | None = None


class MpsControl(Protocol):
    """A control daemon that answers. Every call ends in bounded time; each may raise MpsError."""

    @property
    def protocol(self) -> int:
        """2 or 3."""
        ...

    @property
    def daemon(self) -> Daemon:
        """The daemon."""
        ...

    def servers(self) -> tuple[MpsServer, ...]:
        """Those that run."""
        ...

    def clients(self) -> tuple[MpsClient, ...]:
        """Those of all servers, each process once."""
        ...

    def scopes(self) -> tuple[Scope, ...]:
        """The scopes for which limits can be set now."""
        ...

    def devices(self) -> dict[DeviceUuid, int]:
        """UUID → ordinal."""
        ...

    def device_clients(self) -> dict[DeviceUuid, tuple[int, ...]]:
        """Device → pids of the clients that use it, as far as the daemon reports them."""
        ...

    def settings(self, scope: Scope, ordinals: tuple[int, ...]) -> dict[str, tuple[MpsSetting, ...]]:
        """What can be set for a scope: by kind."""
        ...

    def get(self, setting: MpsSetting) -> str:
        """The value, normalised so that two ways of writing it compare; "" where nothing is set."""
        ...

    def put(self, setting: MpsSetting, value: str) -> None:
        """For clients that connect from now on. `value` as `get` gave it, or percent, 0 or 1, or MiB ("512M")."""
        ...

    def terminate(self, client: MpsClient) -> None:
        """Ends a client's use of the device without harm to the others; the process itself gets errors."""
        ...

    def shut_down(self, server: MpsServer) -> None:
        """Ends a server and all its clients' contexts."""
        ...
