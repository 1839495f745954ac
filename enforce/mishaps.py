# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What to do when an MPS server has met a fatal error, after MuxFlow's mixed error handling. Pure.

A fault of one client reaches every client of the server on that device, and the server takes no new work there until
they are gone. So: first the offline ones are asked to go (SIGTERM lets them release their contexts; a kill can hang
the others), and only if that did not help is the server ended, if all whom that would end have lost everything anyway.
Invariant: a server is never ended while somebody is connected who is not known to be lost.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from agent.clock import NS_PER_SECOND
from agent.model import ContainerKey, DeviceUuid

GRACE_NS = 30 * NS_PER_SECOND  # for those who were asked to go, and for the server to come back by itself


@dataclass(frozen=True, slots=True)
class Party:
    """One client. `may_stop`: an offline container whose rule lists evict."""

    tgid: int
    container: ContainerKey | None  # None: nobody knows whose it is
    may_stop: bool
    devices: frozenset[DeviceUuid] | None  # None: unknown


@dataclass(frozen=True, slots=True)
class Scene:
    """A server as it is now. `endangered`: all whom ending it would end, its own clients and perhaps others'."""

    faulted: bool
    broken: frozenset[DeviceUuid]  # devices on which everything of this server's is lost
    clients: tuple[Party, ...]
    endangered: tuple[Party, ...]


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is remembered of a fault."""

    since_ns: int
    was_ended: bool = False


@dataclass(frozen=True, slots=True)
class Response:
    """What to do: whom to ask to go, whether to end the server, and why."""

    stop: frozenset[ContainerKey] = frozenset()
    end_server: bool = False
    reason: str = ""


def respond(
    trouble: Trouble | None, scene: Scene, now_ns: int, grace_ns: int = GRACE_NS
) -> tuple[Trouble | None, Response]:
    """One look. None: all is well."""
    if not scene.faulted:
        return None, Response()
    trouble = trouble or Trouble(now_ns)
    stop = frozenset(party.container for party in scene.clients if party.may_stop and party.container is not None)
    waited = now_ns - trouble.since_ns >= grace_ns
    if not waited or trouble.was_ended:
        return trouble, Response(stop, reason="MPS server fault: offline clients are asked to go")
    safe = [party for party in scene.endangered if not is_lost(party, scene.broken)]
    if safe:
        said = f"MPS server fault: not ended, process {safe[0].tgid} may still be well"
        return trouble, Response(stop, reason=said)
    return replace(trouble, was_ended=True), Response(stop, True, "MPS server fault: all is lost there, ended")


def is_lost(party: Party, broken: Collection[DeviceUuid]) -> bool:
    """Whether everything that it has is known to be gone."""
    return bool(party.devices) and party.devices is not None and party.devices <= frozenset(broken)
