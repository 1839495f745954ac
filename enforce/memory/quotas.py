# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Limits in force: the maps `memory_rules` and `quotas`, that only this writes, and `quota_uses`, that the kernel does.

A process's rule is in the ledger before the kernel has it, for by it the process may be stopped. Only changes are
written. A container keeps its group's number while it is there.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from agent.clock import NS_PER_SECOND, wall_ns
from agent.errors import WardenError
from agent.layout import (
    GROUP_ALL,
    MOST_MEMBERS,
    ORDINALS,
    QUOTA_DENY,
    QUOTA_HOLD,
    SLOT_NONE,
    SLOTS,
    MemoryKey,
    MemoryRule,
    ProcessKey,
    Quota,
    QuotaKey,
)
from agent.libbpf import Map
from agent.model import ContainerKey, ProcessId
from agent.procfs import Procfs
from enforce.entries import Entry
from enforce.leaving import Leaving
from enforce.ledger import Ledger
from enforce.model import Target

_log = logging.getLogger(__name__)
_AFFIRM_NS = 5 * NS_PER_SECOND


@dataclass(frozen=True, slots=True)
class Bound:
    """One process's rule: whether its allocations may be denied, and held."""

    target: Target
    deny: bool
    hold: bool
    max_hold_ns: int


@dataclass(frozen=True, slots=True)
class Allowance:
    """What the members may have allocated together. A member: a process and its own number of the device."""

    limit_bytes: int
    members: tuple[tuple[ProcessId, int], ...]
    member_bytes: tuple[int, ...]  # live, as far as is known: for those beyond what the kernel has room for


@dataclass(frozen=True, slots=True)
class Refusals:
    """Of one container, ever."""

    denied: int = 0
    held: int = 0
    for_room: int = 0  # of both: for an online container's sake
    pending_bytes: int = 0  # of calls that have not returned


AllowanceKey = tuple[ContainerKey | None, int]
"""(container, slot); None: all offline containers."""


class Bounds:
    """For one thread, the deciding one."""

    def __init__(self, map_of: Callable[[str], Map], ledger: Ledger, proc: Procfs) -> None:
        self._rules, self._quotas, self._uses = map_of("memory_rules"), map_of("quotas"), map_of("quota_uses")
        self._ledger = ledger
        self._leaving = Leaving(ledger, proc)
        self._groups: dict[ContainerKey, int] = {}
        self._numbers = itertools.count(GROUP_ALL + 1)
        self._written: dict[ProcessId, tuple[bytes, Entry]] = {}
        self._allowed: dict[tuple[int, int], bytes] = {}
        self._affirmed_ns = 0
        self.refused = 0  # rules and quotas that could not be put in force
        for left in (self._rules, self._quotas, self._uses):  # by a policy before: the groups' numbers begin anew
            for key, _ in list(left.items()):
                left.delete(key)

    def put(self, bounds: Mapping[ProcessId, Bound], allowances: Mapping[AllowanceKey, Allowance], now_ns: int) -> None:
        """Makes these all that is in force. One that fails is counted and hinders no other."""
        for process in [process for process in self._written if process not in bounds]:
            self._loosen(process)
        wanted = {(self._group(key), slot): quota_of(allowance) for (key, slot), allowance in allowances.items()}
        for at in [at for at in self._allowed if at not in wanted]:
            self._quotas.delete(QuotaKey(*at))
            del self._allowed[at]
        for at, quota in wanted.items():
            self._allow(at, quota)
        again = now_ns - self._affirmed_ns >= _AFFIRM_NS  # whoever released everything has closed our entries
        self._affirmed_ns = now_ns if again else self._affirmed_ns
        for bound in bounds.values():
            self._tighten(bound, again)
        with suppress(WardenError):  # then later
            self._leaving.close({entry.id for _, entry in self._written.values()})

    def refusals(self, container: ContainerKey) -> Refusals:
        """Summed over devices."""
        group = self._groups.get(container)
        if group is None:
            return Refusals()
        uses = [use for slot in range(SLOTS) if (use := self._uses.get(QuotaKey(group, slot))) is not None]
        return Refusals(
            sum(use.denied for use in uses),
            sum(use.held for use in uses),
            sum(use.for_room for use in uses),
            sum(use.pending_bytes for use in uses),
        )

    def keep(self, containers: Collection[ContainerKey]) -> None:
        """Drops what is kept about all others: they are gone."""
        for container in self._groups.keys() - set(containers):
            group = self._groups.pop(container)
            for slot in range(SLOTS):
                self._uses.delete(QuotaKey(group, slot))

    def losses(self) -> dict[str, int]:
        """What could not be put in force, for Snapshot.lost."""
        return {"memory:not_bounded": self.refused}

    def release_all(self) -> None:
        """Nothing is bounded any more. Entries stay open until the processes are seen running."""
        self.put({}, {}, self._affirmed_ns)

    def _group(self, container: ContainerKey | None) -> int:
        if container is None:
            return GROUP_ALL
        if container not in self._groups:
            self._groups[container] = next(self._numbers)
        return self._groups[container]

    def _allow(self, at: tuple[int, int], quota: Quota) -> None:
        if self._allowed.get(at) == bytes(quota):
            return
        try:
            self._quotas.put(QuotaKey(*at), quota)
            self._allowed[at] = bytes(quota)
        except OSError as error:
            self._refuse("a quota", error)

    def _tighten(self, bound: Bound, again: bool) -> None:
        process = bound.target.process
        rule = bytes(rule_of(bound, self._group(bound.target.container)))
        written = self._written.get(process)
        if written is not None and written[0] == rule and not again:
            return
        entry = written[1] if written else Entry.of("hold", process, bound.target.container, wall_ns())
        try:
            self._ledger.intend(entry)
            self._rules.put(ProcessKey.of(process), MemoryRule.from_buffer_copy(rule))
            self._written[process] = (rule, entry)
        except (OSError, WardenError) as error:
            self._refuse(str(process), error)

    def _loosen(self, process: ProcessId) -> None:
        self._rules.delete(ProcessKey.of(process))
        _, entry = self._written.pop(process)
        self._leaving.add(entry.id, process)

    def _refuse(self, what: str, error: Exception) -> None:
        self.refused += 1
        _log.warning("memory of %s not bounded: %s", what, error)


def rule_of(bound: Bound, group: int) -> MemoryRule:
    """As the kernel reads it."""
    target = bound.target
    rule = MemoryRule(
        group=group,
        flags=(QUOTA_DENY if bound.deny else 0) | (QUOTA_HOLD if bound.hold else 0),
        max_hold_ns=bound.max_hold_ns,
        slot_unknown=SLOT_NONE if target.slot_unknown is None else target.slot_unknown,
    )
    slots = [SLOT_NONE if slot is None else slot for slot in target.slots[:ORDINALS]]
    rule.slots[:] = slots + [SLOT_NONE] * (ORDINALS - len(slots))
    return rule


def quota_of(allowance: Allowance) -> Quota:
    """As the kernel reads it. Members that it has no room for count with what they had at the last tick."""
    members = allowance.members[:MOST_MEMBERS]
    quota = Quota(
        limit_bytes=allowance.limit_bytes,
        other_bytes=sum(allowance.member_bytes[MOST_MEMBERS:]),
        count=len(members),
    )
    for index, (process, ordinal) in enumerate(members):
        quota.members[index] = MemoryKey(ProcessKey.of(process), ordinal)
    return quota
