# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Budgets of the kernel's maps: what each tenant (bpf/tenant.bpf.h) holds, and how much more it may put in.

Counted anew at every tick, so that nothing leaks: the kernel only takes from what was granted. No tenant gets more than
a quarter of a map; those without a process under an online rule get no more than three quarters together, as long as no
more than four of them take all that they may within one tick. Handles that no call need end (graphs, events, streams …)
give way to newer ones of the same tenant.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from agent.collectors.samples import Sample
from agent.core.model import ProcessId
from agent.node.procfs import Procfs
from agent.probes.abi import LOST, ROLE_ONLINE, U32, U64, ProcessKey, Tenant, offset_of, size_of
from agent.probes.libbpf import Map
from agent.probes.libcuda import LibcudaProbes

_OTHERS: Final = 0  # TENANT_OTHERS
_UNKNOWN: Final = -2  # in place of a tenant: the process is not, or no longer, known
_SWEEP_TICKS: Final = 30
_CROWDED_PART: Final = 8  # of a map: what handles one tenant keeps from tick to tick at most, half of what it may have
_TGID_LOW, _TGID_HIGH = 0, 1  # which half of a key's first eight bytes is the tgid


@dataclass(frozen=True, slots=True)
class Kept:
    """A map. `value`: the struct of its values, "" for a u64. `made`: its field that says when an entry was made."""

    name: str
    value: str = ""
    made: str = ""


@dataclass(frozen=True, slots=True)
class Budget:
    """The maps whose entries one credit pays for. `half`: of the key's first u64, the one with the tgid.

    `swept`: what ended processes left is deleted here. Without maps: the records of a ring that is read all the time,
    `ring` of them a tick.
    """

    reason: str
    maps: tuple[Kept, ...]
    key_bytes: int = 16
    half: int = _TGID_LOW
    swept: bool = False
    ring: int = 0


BUDGETS: Final = (
    Budget("launch_function", (Kept("launches", "launch_value"),), 24),
    Budget("launch", (Kept("other_launches", "launch_value"),), 24),
    Budget("process", (Kept("tenant_of"),), 8),
    Budget("thread", (Kept("context_stacks", "context_stack"),), 8, _TGID_HIGH),
    Budget("memory", (Kept("memory", "memory_value"),)),
    Budget("allocation", (Kept("allocations", "allocation"),), 24),
    Budget("mapping", (Kept("mappings", "mapping"),)),
    Budget("context_memory", (Kept("context_memories", "context_memory"),)),
    Budget("copy", (Kept("copies", "copy_value"),)),
    Budget("latency", (Kept("latencies", "latency"), Kept("delivered", "deliveries")), 8),
    Budget("context", (Kept("contexts", "context"),), swept=True),
    Budget("new_graph", (Kept("graphs", "graph", "made_ns"), Kept("captures", "graph", "made_ns")), swept=True),
    Budget("node", (Kept("nodes", "node", "changed_ns"),), 24, swept=True),
    Budget("graph_memory", (Kept("graph_memories", "graph_memory", "graph_ns"),), swept=True),
    Budget(
        "stream", (Kept("joins", "joined", "capture_ns"), Kept("non_blocking", "non_blocking", "made_ns")), swept=True
    ),
    Budget("record", (Kept("recorded_events", "event_record", "at_ns"),), swept=True),
    Budget("uuid", (Kept("uuids", "uuid"), Kept("bus_ids", "bus_id")), 12, swept=True),
    Budget("event", (), ring=4096),
    Budget("name", (), ring=16384),
)


def credits_of(size: int, held: Mapping[int, int], tenants: Collection[int], ruled: Collection[int]) -> dict[int, int]:
    """How many entries more each tenant may make in a map of `size`; at `-1` what one has that was never seen."""
    others = [tenant for tenant in tenants if tenant not in ruled]
    free = max(0, size * 3 // 4 - sum(held.get(tenant, 0) for tenant in others))
    each = max(free // max(1, len(others)), free // 4)  # few want so much at once
    granted = {
        tenant: max(0, min(size // 4 - held.get(tenant, 0), size if tenant in ruled else each)) for tenant in tenants
    }
    granted[-1] = max(1, size // 1024, min(size // 8, free // 4))  # never 0, which is no bound at all
    return granted


class Tenants:
    """Yields no samples: it writes the credits and reads the losses."""

    name = "tenants"

    def __init__(self, probes: LibcudaProbes) -> None:
        self._tenants, self._newcomer = probes.map("tenants"), probes.map("newcomer")
        self._losses = probes.map("tenant_losses")
        self._owners, self._rules = probes.map("tenant_of"), probes.map("rules")
        self._budgets = tuple((budget, _TenantEntries.of(probes, budget), _size(probes, budget)) for budget in BUDGETS)
        self._unknown: dict[str, set[tuple[str, bytes]]] = {}  # entries of no known process, by reason
        self._proc, self._ticks = Procfs(), 0
        self.owners: dict[ProcessId, int] = {}
        self.lost: dict[int, dict[str, int]] = {}

    def collect(self, now_ns: int) -> Iterable[Sample]:
        """Counts what is held, and grants what may follow."""
        self._ticks += 1
        self.owners = {key.id(): value.value for key, value in self._owners.items()}
        if self._ticks % _SWEEP_TICKS == 0:
            self.forget([process for process in self.owners if not self._proc.is_alive(process)])
            self._drop_others_than({_OTHERS, *self.owners.values()})
        found = {key.value: value for key, value in self._tenants.items()}
        found.setdefault(_OTHERS, Tenant())
        self._grant(found)
        self.lost = {
            key.value: {reason: count for reason, count in zip(LOST, value.lost, strict=True) if count}
            for key, value in self._losses.items()
        }
        return ()

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Drops whose they were."""
        for process in processes:
            self._owners.delete(ProcessKey.of(process))

    def _drop_others_than(self, present: Collection[int]) -> None:
        """Whose processes are all gone: a tenant that comes back begins anew."""
        for key, _ in list(self._tenants.items()):
            if key.value not in present:
                self._tenants.delete(key)
                self._losses.delete(key)

    def _grant(self, found: dict[int, Tenant]) -> None:
        by_tgid = {process.tgid: tenant for process, tenant in self.owners.items()}
        ruled = {
            by_tgid[key.tgid]
            for key, rule in self._rules.items()
            if rule.role == ROLE_ONLINE and key.tgid in by_tgid  # offline ones are bounded like those without a rule
        } - {_OTHERS}
        newcomer, wanted = Tenant(), {tenant: Tenant() for tenant in found}
        for budget, maps, size in self._budgets:
            held = self._held(budget, maps, size, by_tgid)
            index = LOST.index(budget.reason)
            for tenant, credit in credits_of(size, held, found, ruled).items():
                (newcomer if tenant == -1 else wanted[tenant]).credit[index] = credit
        self._newcomer.put(U32(0), newcomer)
        for tenant, value in found.items():
            self._write(tenant, value, wanted[tenant])

    def _held(
        self, budget: Budget, maps: Collection[_TenantEntries], size: int, by_tgid: Mapping[int, int]
    ) -> Counter[int]:
        """How many entries each tenant has; those of no known process are the others'."""
        held = Counter[int]()
        for one in maps:
            held.update(one.held(by_tgid))
        if budget.swept and (held[_UNKNOWN] or max(held.values(), default=0) > size // _CROWDED_PART):
            held.subtract(self._sweep(budget, maps, held, size // _CROWDED_PART))
        held[_OTHERS] += held.pop(_UNKNOWN, 0)
        return held

    def _sweep(self, budget: Budget, maps: Collection[_TenantEntries], held: Counter[int], most: int) -> Counter[int]:
        """Deletes what belongs to no known process for a second tick, and the oldest of who has more than `most`."""
        entries = [(tenant, made_ns, one, key) for one in maps for tenant, made_ns, key in one.each(self.owners)]
        unknown = {(one.name, key) for tenant, _, one, key in entries if tenant == _UNKNOWN}
        ended = unknown & self._unknown.get(budget.reason, set())
        self._unknown[budget.reason] = unknown - ended
        excess = {tenant: count - most for tenant, count in held.items() if tenant != _UNKNOWN and count > most}
        gone = Counter[int]()
        for tenant, made_ns, one, key in sorted(entries, key=lambda entry: entry[1] or 0):
            is_old = made_ns is not None and gone[tenant] < excess.get(tenant, 0)
            if (is_old or (one.name, key) in ended) and one.delete(key):
                gone[tenant] += 1
        return gone

    def _write(self, tenant: int, before: Tenant, wanted: Tenant) -> None:
        """Less what it spent since it was read: that may not be among what was counted."""
        now = self._tenants.get(U64(tenant)) or before
        if bytes(now) != bytes(before):
            wanted.credit[:] = [
                max(0, credit - max(0, old - left))
                for credit, old, left in zip(wanted.credit, before.credit, now.credit, strict=True)
            ]
        if bytes(now) != bytes(wanted):
            self._tenants.put(U64(tenant), wanted)


def _size(probes: LibcudaProbes, budget: Budget) -> int:
    return min((probes.bpf.max_entries(one.name) for one in budget.maps), default=budget.ring)


@dataclass(frozen=True, slots=True)
class _TenantEntries:
    """One map's entries, by tenant. `made_at`: where a value says when it was made; None: nowhere."""

    name: str
    map: Map
    key: type[ctypes.Array[ctypes.c_uint8]]
    value_bytes: int
    half: int
    made_at: int | None

    @classmethod
    def of(cls, probes: LibcudaProbes, budget: Budget) -> tuple[_TenantEntries, ...]:
        """The maps of a budget."""
        return tuple(cls._one(probes, budget, kept) for kept in budget.maps)

    @classmethod
    def _one(cls, probes: LibcudaProbes, budget: Budget, kept: Kept) -> _TenantEntries:
        key, size = ctypes.c_uint8 * budget.key_bytes, size_of(probes.bpf, kept.value) if kept.value else 8
        made_at = offset_of(probes.bpf, kept.value, kept.made) if kept.value and kept.made else None
        return cls(kept.name, probes.bpf.map(kept.name, key, ctypes.c_uint8 * size), key, size, budget.half, made_at)

    def held(self, by_tgid: Mapping[int, int]) -> Counter[int]:
        """The number of each tenant's, and at _UNKNOWN that of no known process's."""
        held = Counter[int]()
        for keys, _ in self.map.raw():
            tgids = keys.cast("I")[self.half :: len(self.key()) // 4].tolist()
            held.update(by_tgid.get(tgid, _UNKNOWN) for tgid in tgids)
        return held

    def each(self, owners: Mapping[ProcessId, int]) -> Iterator[tuple[int, int | None, bytes]]:
        """(tenant or _UNKNOWN, when it was made, key) of each entry. For keys that begin with the process."""
        size = len(self.key())
        for keys, values in self.map.raw():
            for at in range(len(keys) // size):
                key = bytes(keys[at * size : (at + 1) * size])
                made_ns = None
                if self.made_at is not None:
                    begin = at * self.value_bytes + self.made_at
                    made_ns = int.from_bytes(values[begin : begin + 8], sys.byteorder)
                process = ProcessKey.from_buffer_copy(key).id()
                yield owners.get(process, _UNKNOWN), made_ns, key

    def delete(self, key: bytes) -> bool:
        """False when it is gone already."""
        return self.map.delete(self.key.from_buffer_copy(key))
