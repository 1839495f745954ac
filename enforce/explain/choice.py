# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The one container that somebody means: by key, name, pod, namespace/pod or the beginning of its id. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from agent.errors import WardenError
from agent.names import joined, printable
from enforce.explain.model import Who

SHORTEST_ID = 4
MOST_LISTED = 20


def choose(wanted: str, known: Sequence[Who]) -> Who:
    """WardenError that lists what there is when it is none of them, or more than one."""
    for fits in (_is_key, _is_name, _begins_id):
        found = sorted((who for who in known if fits(who, wanted)), key=lambda who: (who.name, who.key))
        if len(found) == 1:
            return found[0]
        if found:
            raise WardenError(f"{shown(wanted)} means more than one container, give the key of one:\n{listed(found)}")
    if not known:
        raise WardenError(f"nothing is known about {shown(wanted)}, nor about any other container")
    everybody = sorted(known, key=lambda who: (who.role != "offline", who.name, who.key))
    raise WardenError(f"nothing is known about {shown(wanted)}; there is something to say about:\n{listed(everybody)}")


def listed(containers: Sequence[Who]) -> str:
    """One line each: role, names, key."""
    lines = [f"  {who.role or '?':<9} {shown(title(who))}  ({shown(who.key)})" for who in containers[:MOST_LISTED]]
    more = len(containers) - MOST_LISTED
    return "\n".join([*lines, f"  and {more} more"] if more > 0 else lines)


def title(who: Who) -> str:
    """namespace/pod: name, as much of it as there is."""
    pod = joined(who.namespace, who.pod)
    return f"{pod}: {who.name}" if pod else who.name


def shown(name: str) -> str:
    """A name from outside, cut and made harmless."""
    return printable(name, 160)


def _is_key(who: Who, wanted: str) -> bool:
    return wanted == who.key


def _is_name(who: Who, wanted: str) -> bool:
    pod = f"{who.namespace}/{who.pod}" if who.namespace and who.pod else None
    return wanted in (who.name, who.pod, pod, who.id or None, f"{pod}/{who.name}" if pod else None)


def _begins_id(who: Who, wanted: str) -> bool:
    return len(wanted) >= SHORTEST_ID and (who.id or who.key.rpartition(":")[2]).startswith(wanted)
