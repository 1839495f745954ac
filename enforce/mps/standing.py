# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Who stands where: which daemon a container's clients go to, and who else a limit there would reach. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from agent.model import ContainerKey
from enforce.model import Subject
from enforce.mps.model import Scope
from enforce.mps.survey import Picture, Place
from enforce.policy.model import OfflineRule
from enforce.roster import Seat, processes_of

RUNG = "mps"
Seats = Mapping[ContainerKey, Seat]


def is_limited(seat: Seat) -> bool:
    """Whether the policy lets this container's clients be limited."""
    rule = seat.classification.rule
    return isinstance(rule, OfflineRule) and RUNG in rule.ladder


def place_of(subject: Subject, picture: Picture) -> Place | None:
    """The daemon that the container's processes are connected to, or would connect to."""
    mine = set(subject.processes)
    for place in picture.places:
        if any(process in mine for process, _ in place.connected):
            return place
    for place in picture.places:
        if any(process in mine and scopes for process, scopes in place.reached):
            return place
    return None


def scopes_of(subject: Subject, place: Place) -> frozenset[Scope]:
    """Where its clients are; while it has none, where they could go."""
    mine = set(subject.processes)
    now = {Scope(client.server, client.space) for process, client in place.connected if process in mine}
    could = (scope for process, scopes in place.reached if process in mine for scope in scopes)
    return frozenset(now) or frozenset(could)


def bystander(place: Place, scopes: frozenset[Scope], seats: Seats) -> str | None:
    """A container that is not to be limited, but would be, as soon as it connects.

    In a namespace (protocol 3) it need not be there at all; with protocol 2 its clients of now are safe.
    """
    apart = place.control is not None and place.control.protocol == 3
    connected = {process for process, _ in place.connected}
    reached = dict(place.reached)
    for seat in seats.values():
        for process in processes_of(seat) if not is_limited(seat) else ():
            if (apart or process not in connected) and reached.get(process, frozenset()) & scopes:
                return seat.container.name
    return None


def obstacle(subject: Subject, picture: Picture, seats: Seats) -> str | None:
    """Why no limit may be set for the container's clients, as a sentence for people."""
    if not picture.places:
        return "no MPS control daemon runs here: start nvidia-cuda-mps-control -d, or take mps out of the ladder"
    place = place_of(subject, picture)
    if place is None:
        errors = [place.error for place in picture.places if place.error]
        return errors[0] if errors else "its processes reach none of the MPS control daemons that run here"
    scopes = scopes_of(subject, place)
    if len(scopes) != 1:
        servers = ", ".join(sorted({scope.server for scope in scopes}))
        return f"several users' MPS servers ({servers}): not known which its next client goes to"
    other = bystander(place, scopes, seats)
    if other is None:
        return None
    if place.control is not None and place.control.protocol == 3:
        return f"{other} is in the same MPS namespace: give offline containers one of their own"
    return f"{other} reaches the MPS daemon and is not connected yet: it would be limited too"
