# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The cases of the hostile set: each program as each kind of tenant, what is to show it, and what containing it means.

A tenant is offline (a rule slows it), matched by no rule, or without the GPU; it calls a library of its own that says
success to everything, or the node's; its rule has the default ladder or the full one. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from bench.hostile.attackers import ATTACKERS, UNDER_A_RULE, WITHOUT_A_RULE, Attacker


class Threat(StrEnum):
    """Who means what."""

    EVADES = "a tenant that evades"
    HURTS = "a tenant that hurts others"
    CLIENT = "a network client"
    USER = "a local user"
    ANSWERS = "hostile answers and files"


DEFAULT_LADDER: Final = "gate, pace, deny, hold"
FULL_LADDER: Final = "gate, pace, deny, hold, freeze, lock, swap, evict"


@dataclass(frozen=True, slots=True)
class Tenant:
    """One kind of tenant. `listed`: NVML lists it as a process on the GPU."""

    name: str
    place: str
    own_library: bool
    listed: bool
    ladder: str = DEFAULT_LADDER

    @property
    def is_enforced(self) -> bool:
        """Whether anything is done to it."""
        return self.place == UNDER_A_RULE and self.listed


TENANTS: Final = (
    Tenant("own library, offline, default ladder", UNDER_A_RULE, True, True),
    Tenant("own library, offline, full ladder", UNDER_A_RULE, True, True, FULL_LADDER),
    Tenant("own library, unmatched", WITHOUT_A_RULE, True, True),
    Tenant("own library, offline rule, no GPU", UNDER_A_RULE, True, False),
    Tenant("own library, unmatched, no GPU", WITHOUT_A_RULE, True, False),
    Tenant("node's library, offline, default ladder", UNDER_A_RULE, False, True),
    Tenant("node's library, offline, full ladder", UNDER_A_RULE, False, True, FULL_LADDER),
    Tenant("node's library, unmatched", WITHOUT_A_RULE, False, True),
)
_LOST = "of its own:"  # gpuwarden_container_losses_total of its container
# Attacker → what shows it, one of these, by the beginnings of the names that the agent has for it. Nothing: it does no
# harm that could be shown.
_SHOWN: Final[Mapping[str, tuple[str, ...]]] = {
    "functions": (_LOST,),
    "contexts": (_LOST, "map:ordinal"),
    "threads": (_LOST,),
    "processes": (),
    "sleepers": (),
    "five": (_LOST,),
    "events": (_LOST,),
    "names": (_LOST, "map:name", "names:"),
    "numbers": ("map:bounds", "map:ordinal"),
    "destroyed": (),
    "lives": (),
    "early lives": (),
    "programs": (),
    "cgroups": (),
}
_SHOWN_WHERE_ENFORCED: Final[Mapping[str, tuple[str, ...]]] = {
    "parked": (),
    "allocations": (),
    "stops": ("foreign resumes",),
    "tracer": ("foreign resumes",),
}
# The node's has no allocation that does not return, and gives real memory to a thousand contexts: then others lack it.
_OF_THEIR_OWN_LIBRARY: Final = ("parked", "contexts", "sleepers")
_REFUSED_BY_THE_NODES: Final = ("events", "names")  # it knows no invented event or module: nothing comes of the call
_FIXED: Final[Mapping[str, tuple[Threat, tuple[str, ...]]]] = {  # as they are
    "claims": (Threat.HURTS, ("claims:unlisted",)),
    "libraries": (Threat.HURTS, ("launches",)),
    "runc": (Threat.EVADES, ("stops", "rung")),
    "odd": (Threat.EVADES, ("stops", "rung")),
    "mapped": (Threat.EVADES, ("launches",)),
    "rewritten": (Threat.EVADES, ("libraries:rewritten",)),
    "behind": (Threat.EVADES, ("unprobed",)),
    "waits": (Threat.EVADES, ("stops", "rung")),
    "captures": (Threat.EVADES, ("stops", "rung")),
    "linked": (Threat.EVADES, ("unprobed",)),
    "scrapes": (Threat.CLIENT, ()),
    "errors": (Threat.CLIENT, ("http status:4xx",)),
    "senders": (Threat.CLIENT, ()),
    "connections": (Threat.CLIENT, ()),
}
_EVADES: Final = ("stops", "tracer", "lives", "early lives", "programs", "cgroups")

MISSING: Final[Mapping[str, str]] = {  # what is to be tried → why it is not here
    "ioctl straight to /dev/nvidia*": "the simulated GPU has no device file; with a real driver it would be `unprobed`",
    "graphs launched from the device": "the simulated GPU runs none; with a real one they would be `unprobed`",
    "another user who fills process table, inotify or disk": "part of exhaustion, which is not in this set",
    "the same against cgroups v1 and hybrid": "one machine has one layout of cgroups",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table. `shown_by`: beginnings of names, one of which is to be seen; none: nothing is to be."""

    name: str
    threat: Threat
    attacker: Attacker
    shown_by: tuple[str, ...]

    @property
    def expected(self) -> str:
        """For the table."""
        return " or ".join(self.shown_by) or "–"

    def is_seen(self, seen: Mapping[str, int]) -> bool | None:
        """Whether it is shown as it is to be; None where there is nothing to see."""
        return any(name.startswith(self.shown_by) for name in seen) if self.shown_by else None


def cases() -> list[Case]:
    """All of them."""
    return [case for attacker in ATTACKERS for case in _cases_of(attacker)]


def _cases_of(attacker: Attacker) -> Iterator[Case]:
    if attacker.name in _FIXED:
        threat, shown_by = _FIXED[attacker.name]
        yield Case(attacker.name, threat, attacker, shown_by)
    elif attacker.name in _SHOWN or attacker.name in _SHOWN_WHERE_ENFORCED:
        for tenant in TENANTS:
            if tenant.own_library or attacker.name not in _OF_THEIR_OWN_LIBRARY:
                yield _case(attacker, tenant)


def _case(attacker: Attacker, tenant: Tenant) -> Case:
    tried = replace(
        attacker,
        place=tenant.place,
        on_gpu=not tenant.own_library,
        listed=tenant.listed,
        ladder=tenant.ladder,
    )
    threat = Threat.EVADES if attacker.name in _EVADES else Threat.HURTS
    return Case(f"{attacker.name}: {tenant.name}", threat, tried, _shown_by(attacker, tenant))


def _shown_by(attacker: Attacker, tenant: Tenant) -> tuple[str, ...]:
    """One that is held may fill nothing: then its stops show it, or the launch at which it is held."""
    if attacker.name in _SHOWN_WHERE_ENFORCED:
        return _SHOWN_WHERE_ENFORCED[attacker.name] if tenant.is_enforced else ()
    shown = () if attacker.name in _REFUSED_BY_THE_NODES and not tenant.own_library else _SHOWN[attacker.name]
    return (*shown, "stops", "launches") if shown and tenant.is_enforced else shown
