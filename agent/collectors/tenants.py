# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Budgets of the kernel's maps: what each tenant (bpf/tenant.bpf.h) holds, and how much more it may put in.

Counted anew at every tick, so that nothing leaks: the kernel only takes from what was granted. No tenant gets more than
a quarter of a map; those without a process under a rule get no more than three quarters together, as long as no more
than four of them take all that they may within one tick.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from agent.collectors.samples import Sample
from agent.core.model import ProcessId
from agent.node.procfs import Procfs
from agent.probes.abi import LOST, U32, U64, ProcessKey, Tenant, size_of
from agent.probes.libbpf import Map
from agent.probes.libcuda import LibcudaProbes

_OTHERS: Final = 0  # TENANT_OTHERS
_SWEEP_TICKS: Final = 30
_TGID_LOW, _TGID_HIGH = 0, 1  # which half of a key's first eight bytes is the tgid


@dataclass(frozen=True, slots=True)
class Budget:
    """The maps whose entries one credit pays for. `half`: of the key's first u64, the one with the tgid."""

    reason: str
    maps: tuple[tuple[str, str], ...]  # map, struct of its values
    size: int
    key_bytes: int
    half: int = _TGID_LOW


BUDGETS: Final = (
    Budget("launch_function", (("launches", "launch_value"),), 65536, 24),
    Budget("launch", (("other_launches", "launch_value"),), 8192, 24),
    Budget("process", (("tenant_of", ""),), 16384, 8),
    Budget("thread", (("threads", "thread"),), 16384, 8, _TGID_HIGH),
    Budget("memory", (("memory", "memory_value"),), 8192, 16),
    Budget("copy", (("copies", "copy_value"),), 16384, 16),
    Budget("latency", (("latencies", "latency"), ("delivered", "deliveries")), 2048, 8),
    Budget("context", (("contexts", "context"),), 8192, 16),
)


def credits_of(size: int, held: Mapping[int, int], tenants: Collection[int], ruled: Collection[int]) -> dict[int, int]:
    """How many entries more each tenant may make in a map of `size`; at `-1` what one has that was never seen."""
    others = [tenant for tenant in tenants if tenant not in ruled]
    free = max(0, size * 3 // 4 - sum(held.get(tenant, 0) for tenant in others))
    each = max(free // max(1, len(others)), free // 4)  # few want so much at once
    granted = {
        tenant: max(0, min(size // 4 - held.get(tenant, 0), size if tenant in ruled else each)) for tenant in tenants
    }
    granted[-1] = max(size // 1024, min(size // 8, free // 4))
    return granted


class Tenants:
    """Yields no samples: it writes the credits and reads the losses."""

    name = "tenants"

    def __init__(self, probes: LibcudaProbes) -> None:
        self._tenants, self._newcomer = probes.map("tenants"), probes.map("newcomer")
        self._losses = probes.map("tenant_losses")
        self._owners, self._rules = probes.map("tenant_of"), probes.map("rules")
        self._budgets = tuple((budget, _maps(probes, budget)) for budget in BUDGETS)
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
        ruled = {by_tgid[key.tgid] for key, _ in self._rules.items() if key.tgid in by_tgid} - {_OTHERS}
        newcomer, wanted = Tenant(), {tenant: Tenant() for tenant in found}
        for budget, maps in self._budgets:
            held = Counter[int]()
            for counts in maps:
                held.update(_held(counts, budget, by_tgid))
            index = LOST.index(budget.reason)
            for tenant, credit in credits_of(budget.size, held, found, ruled).items():
                (newcomer if tenant == -1 else wanted[tenant]).credit[index] = credit
        self._newcomer.put(U32(0), newcomer)
        for tenant, value in found.items():
            self._write(tenant, value, wanted[tenant])

    def _write(self, tenant: int, before: Tenant, wanted: Tenant) -> None:
        """Less what it spent since it was read: that may not be among what was counted."""
        now = self._tenants.get(U64(tenant)) or before
        granted = [
            max(0, credit - max(0, old - left))
            for credit, old, left in zip(wanted.credit, before.credit, now.credit, strict=True)
        ]
        if granted != list(now.credit):
            now.credit[:] = granted
            self._tenants.put(U64(tenant), now)


def _maps(probes: LibcudaProbes, budget: Budget) -> tuple[Map, ...]:
    return tuple(
        probes.bpf.map(
            name, ctypes.c_uint8 * budget.key_bytes, ctypes.c_uint8 * (size_of(probes.bpf, value) if value else 8)
        )
        for name, value in budget.maps
    )


def _held(counts: Map, budget: Budget, by_tgid: Mapping[int, int]) -> Counter[int]:
    held = Counter[int]()
    stride = budget.key_bytes // 4
    for keys, _ in counts.raw():
        held.update(by_tgid.get(tgid, _OTHERS) for tgid in keys.cast("I")[budget.half :: stride].tolist())
    return held
