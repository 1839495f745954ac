# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The memory limits in force: the maps `memory_rules` and `quotas`, written here only, and `quota_uses`, by the kernel.

By its rule a process may be stopped, so the rule has an entry in the ledger (`ledgered_rules`). Only changes are
written. A container keeps the number of its group for as long as it exists.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from agent.core.errors import WardenError
from agent.core.model import ContainerKey, ProcessId
from agent.node.procfs import Procfs
from agent.probes.abi import (
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
from agent.probes.libbpf import Map
from enforce.actuators.launch.ledgered_rules import LedgeredRules
from enforce.ledger.ledger import Ledger
from enforce.model import Target

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AllocationRule:
    """One process's rule: whether its allocations may be denied, and held."""

    target: Target
    deny: bool
    hold: bool
    max_hold_ns: int


@dataclass(frozen=True, slots=True)
class GroupQuota:
    """What the members may have allocated together. A member: a process and its own ordinal of the device."""

    limit_bytes: int
    members: tuple[tuple[ProcessId, int], ...]
    member_bytes: tuple[int, ...]  # live, as far as is known: for those beyond what the kernel has room for


@dataclass(frozen=True, slots=True)
class Refusals:
    """What was refused to one container, ever."""

    denied: int = 0
    held: int = 0
    for_room: int = 0  # of both: because of an online container's reserve
    pending_bytes: int = 0  # of calls that have not returned


GroupQuotaKey = tuple[ContainerKey | None, int]
"""(container, slot); None: all offline containers."""


class MemoryQuotas:
    """The rules and quotas of all processes. For one thread, the deciding one.

    The groups of the kernel are containers, and one of all offline containers.
    """

    def __init__(self, map_of: Callable[[str], Map], ledger: Ledger, proc: Procfs) -> None:
        self._rules, self._quotas, self._uses = map_of("memory_rules"), map_of("quotas"), map_of("quota_uses")
        self._ledgered = LedgeredRules("hold", ledger, proc)
        self._groups: dict[ContainerKey, int] = {}
        self._numbers = itertools.count(GROUP_ALL + 1)
        self._written: dict[ProcessId, bytes] = {}
        self._quotas_written: dict[tuple[int, int], bytes] = {}
        self._now_ns = 0  # of the last `put`
        self._refused = 0
        for left in (self._rules, self._quotas, self._uses):  # by an earlier policy: the groups' numbers begin anew
            for key, _ in list(left.items()):
                left.delete(key)

    def put(
        self, rules: Mapping[ProcessId, AllocationRule], quotas: Mapping[GroupQuotaKey, GroupQuota], now_ns: int
    ) -> None:
        """Makes these all that is in force. One that fails is counted and hinders no other."""
        self._now_ns = now_ns
        self._ledgered.maintain(now_ns)
        for process in [process for process in self._written if process not in rules]:
            self._remove_rule(process)
        wanted = {(self._group(key), slot): quota_of(quota) for (key, slot), quota in quotas.items()}
        for at in [at for at in self._quotas_written if at not in wanted]:
            self._quotas.delete(QuotaKey(*at))
            del self._quotas_written[at]
        for at, quota in wanted.items():
            self._put_quota(at, quota)
        for rule in rules.values():
            self._put_rule(rule)

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
        """Forgets all other containers: they are gone."""
        for container in self._groups.keys() - set(containers):
            group = self._groups.pop(container)
            for slot in range(SLOTS):
                self._uses.delete(QuotaKey(group, slot))

    def losses(self) -> dict[str, int]:
        """Rules, quotas and ledger entries that could not be written, for Snapshot.lost."""
        return {"memory:not_bounded": self._refused + self._ledgered.failures}

    def release_all(self) -> None:
        """Removes every rule and quota. Entries stay open until the processes are seen running."""
        self.put({}, {}, self._now_ns)

    def _group(self, container: ContainerKey | None) -> int:
        if container is None:
            return GROUP_ALL
        if container not in self._groups:
            self._groups[container] = next(self._numbers)
        return self._groups[container]

    def _put_quota(self, at: tuple[int, int], quota: Quota) -> None:
        if self._quotas_written.get(at) == bytes(quota):
            return
        try:
            self._quotas.put(QuotaKey(*at), quota)
            self._quotas_written[at] = bytes(quota)
        except OSError as error:
            self._refuse("a quota", error)

    def _put_rule(self, wanted: AllocationRule) -> None:
        process = wanted.target.process
        rule = rule_of(wanted, self._group(wanted.target.container))
        if self._written.get(process) == bytes(rule):
            return
        try:
            self._ledgered.put(wanted.target, lambda: self._rules.put(ProcessKey.of(process), rule))
            self._written[process] = bytes(rule)
        except (OSError, WardenError) as error:
            self._refuse(f"the rule of {process}", error)

    def _remove_rule(self, process: ProcessId) -> None:
        self._ledgered.remove(process, lambda: self._rules.delete(ProcessKey.of(process)))
        del self._written[process]

    def _refuse(self, what: str, error: Exception) -> None:
        self._refused += 1
        _log.warning("a memory limit is not in force, %s cannot be written: %s", what, error)


def rule_of(wanted: AllocationRule, group: int) -> MemoryRule:
    """As the kernel reads it."""
    target = wanted.target
    rule = MemoryRule(
        group=group,
        flags=(QUOTA_DENY if wanted.deny else 0) | (QUOTA_HOLD if wanted.hold else 0),
        max_hold_ns=wanted.max_hold_ns,
        slot_unknown=SLOT_NONE if target.slot_unknown is None else target.slot_unknown,
    )
    slots = [SLOT_NONE if slot is None else slot for slot in target.slots[:ORDINALS]]
    rule.slots[:] = slots + [SLOT_NONE] * (ORDINALS - len(slots))
    return rule


def quota_of(wanted: GroupQuota) -> Quota:
    """As the kernel reads it. Members beyond MOST_MEMBERS count with what they had at the last tick."""
    members = wanted.members[:MOST_MEMBERS]
    quota = Quota(
        limit_bytes=wanted.limit_bytes,
        other_bytes=sum(wanted.member_bytes[MOST_MEMBERS:]),
        count=len(members),
    )
    for index, (process, ordinal) in enumerate(members):
        quota.members[index] = MemoryKey(ProcessKey.of(process), ordinal)
    return quota
