# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One tick: collectors → identities → attribution → an immutable snapshot.

Owns the state between ticks: previous counts, learned durations, running totals. One thread calls `tick`; everybody
else reads `snapshot`. A collector that fails is reported and hides nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agent.accounts import Accounts, Part
from agent.attribution import sum_usage
from agent.books import Books
from agent.clock import NS_PER_SECOND, monotonic_ns, wall_ns
from agent.containers.holdings import Held, holders
from agent.evidence import Evidence
from agent.function_names import FunctionNames
from agent.kernels import FunctionWork, top_functions
from agent.members import Members, Told
from agent.model import (
    CollectorHealth,
    ContainerKey,
    ContainerUsage,
    DeviceHealth,
    DeviceUuid,
    Enforcement,
    ProcessId,
    ProcessUsage,
    Snapshot,
    Usage,
)
from agent.probes import Probes
from agent.samples import Collector, Sample

_log = logging.getLogger(__name__)
_SWEEP_TICKS = 30


@dataclass(slots=True)
class Pipeline:
    """See the module."""

    collectors: Sequence[Collector]
    members: Members
    probes: Probes | None
    names: FunctionNames = field(default_factory=FunctionNames)
    snapshot: Snapshot | None = None
    enforcement: Mapping[ContainerKey, Enforcement] = field(default_factory=dict)  # written by whoever enforces
    enforcing: bool = False
    device_health: Mapping[DeviceUuid, DeviceHealth] = field(default_factory=dict)  # likewise
    policy_error: str | None = None  # likewise
    policy_wall_ns: int | None = None  # likewise
    decided_ns: int | None = None  # likewise: when the last decision was completed; None: none are made
    unprobed: tuple[ProcessId, ...] = ()  # on a GPU by NVML's word, with no call seen: their libcuda may be unknown
    nvml_errors: Callable[[], Mapping[str, int]] = dict
    name_lookups: Callable[[], Mapping[tuple[str, str], int]] = dict
    held: Callable[[], Held | None] = lambda: None
    signal_failures: Callable[[], Mapping[str, int]] = dict  # "rule:signal:reason" → count, by whoever enforces
    losses: Callable[[], Mapping[str, int]] = dict  # "source:reason" → count, of other parts of the agent
    books: Books = field(default_factory=Books)
    _accounts: Accounts = field(init=False)
    _last_ns: int | None = None
    _exited: set[ProcessId] = field(default_factory=set)
    _probed: frozenset[ProcessId] = frozenset()
    _ticks: int = 0

    def __post_init__(self) -> None:
        self._accounts = Accounts(self.members, self.names)

    def tick(self, now_ns: int) -> Snapshot:
        """Observes once and publishes the snapshot."""
        dead = self._find_dead()  # before the samples are taken, so that these hold all that the dead ever did
        samples, health = self._collect(now_ns)
        interval = now_ns - self._last_ns if self._last_ns is not None else 0
        self._last_ns = now_ns
        evidence = Evidence.of(samples, self.members.proc)
        if self.probes and evidence.readings:
            self.probes.tell_sm_count(evidence.sm_count)
        for process in evidence.processes:
            self.members.see(process)
        self.members.refresh()
        parts = self._accounts.tick(samples, evidence, interval)
        self.snapshot = self._snapshot(now_ns, interval, parts, health)
        self.unprobed = tuple(set(evidence.by_tgid.values()) - evidence.probed)
        self._bury(dead, evidence.probed, now_ns)
        return self.snapshot

    def seen(self, told: Told) -> None:
        """A probe saw its first call."""
        self.members.see(told.process, told)

    def exited(self, process: ProcessId) -> None:
        """A probe saw it die: its last figures are taken at the next tick, then it is forgotten."""
        self._exited.add(process)

    def replaced(self, process: ProcessId) -> None:
        """It runs another program: what it is called has changed."""
        self.members.renew(process)

    def _collect(self, now_ns: int) -> tuple[list[Sample], list[CollectorHealth]]:
        samples: list[Sample] = []
        health = []
        for collector in self.collectors:
            began, error = monotonic_ns(), None
            try:
                samples.extend(collector.collect(now_ns))
            except Exception as failure:  # noqa: BLE001  # whatever one source does, the others go on; it is exported
                error = f"{type(failure).__name__}: {failure}"
                _log.warning("collector %s: %s", collector.name, error)
            health.append(CollectorHealth(collector.name, (monotonic_ns() - began) / NS_PER_SECOND, error))
        return samples, health

    def _snapshot(
        self, now_ns: int, interval_ns: int, parts: Sequence[Part], health: Sequence[CollectorHealth]
    ) -> Snapshot:
        seconds = interval_ns / NS_PER_SECOND
        by_process: dict[ProcessId, list[Usage]] = {}
        rest = []
        for part in parts:
            for one in part.work:
                usage = part.attribution.usage[one.process]
                by_process.setdefault(one.process, []).append(usage)
                if (member := self.members.get(one.process)) is not None:
                    self.books.book(member.container, one, usage, seconds)
            rest.append(self.books.rest(part.attribution.unattributed, seconds))
            self.books.count_device(part.attribution, sum(one.launches or 0 for one in part.work), seconds)
        return Snapshot(
            at_ns=now_ns,
            wall_ns=wall_ns(),
            interval_ns=interval_ns,
            devices=tuple(part.attribution.reading for part in parts),
            containers=self._containers(by_process, parts, seconds),
            processes=tuple(
                ProcessUsage(member.process, tuple(usage))
                for process, usage in by_process.items()
                if (member := self.members.get(process))
            ),
            unattributed=tuple(rest),
            enforcement=dict(self.enforcement),
            enforcing=self.enforcing,
            health=dict(self.device_health),
            policy_error=self.policy_error,
            policy_wall_ns=self.policy_wall_ns,
            probes=tuple(library.status() for library in self.probes.libraries()) if self.probes else (),
            collectors=tuple(health),
            lost=self._lost(),
            device_totals=dict(self.books.devices),
            ended=self.books.ended(now_ns),
            held=holders(self.held() or {}),
            probe_calls=self.probes.calls() if self.probes else {},
            nvml_errors=dict(self.nvml_errors()),
            signal_failures=dict(self.signal_failures()),
            name_lookups={f"{source}:{outcome}": n for (source, outcome), n in self.name_lookups().items()},
        )

    def _lost(self) -> dict[str, int]:
        lost = {f"map:{name}": count for name, count in self.probes.lost()} if self.probes else {}
        return {
            **lost,
            **self.losses(),
            "members:full": self.members.refused,
            "members:unreadable": self.members.unreadable,
            "names:full": self.names.refused,
            "ended:unscraped": self.books.dropped,
            **self._accounts.lost(),
        }

    def _containers(
        self, by_process: Mapping[ProcessId, Sequence[Usage]], parts: Iterable[Part], seconds: float
    ) -> tuple[ContainerUsage, ...]:
        grouped: dict[ContainerKey, list[ProcessId]] = {}
        containers = {}
        for process in by_process:
            member = self.members.get(process)
            if member is not None:
                grouped.setdefault(member.container.key, []).append(process)
                containers[member.container.key] = member.container
        functions: dict[ProcessId, list[FunctionWork]] = {}
        for part in parts:
            for process, work in part.functions.items():
                functions.setdefault(process, []).extend(work)
        return tuple(
            ContainerUsage(
                containers[key],
                sum_usage([usage for process in processes for usage in by_process[process]], self.books.of(key)),
                tuple(processes),
                top_functions((one for process in processes for one in functions.get(process, ())), seconds),
            )
            for key, processes in grouped.items()
        )

    def _find_dead(self) -> list[ProcessId]:
        """Those that a probe saw dying, and now and then whoever died unseen."""
        self._ticks += 1
        known = {member.process.id for member in self.members.all()} | self._probed
        candidates = known if self._ticks % _SWEEP_TICKS == 0 else self._exited & known
        self._exited &= known
        return [process for process in candidates if not self.members.proc.is_alive(process)]

    def _bury(self, dead: Collection[ProcessId], probed: frozenset[ProcessId], now_ns: int) -> None:
        """Forgets the dead; their last figures are in the snapshot that was just published."""
        if dead:
            before = {member.container.key: member.container for member in self.members.all()}
            for collector in self.collectors:
                collector.forget(dead)
            self._accounts.forget(dead)
            self.names.forget(dead)
            self.members.remove(dead)
            self._exited.difference_update(dead)
            living = {member.container.key for member in self.members.all()}
            self.books.end((container for key, container in before.items() if key not in living), now_ns)
        self._probed = probed.difference(dead)
        if self._ticks % _SWEEP_TICKS == 0:
            self.names.retain({member.process.id for member in self.members.all()} | self._probed)
