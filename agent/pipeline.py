# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One tick: collectors → identities → attribution → an immutable snapshot.

Owns the state between ticks: previous counts, learned durations, running totals, processes that exited. One thread
calls `tick`; any thread reads `snapshot` and may publish what enforcement and the policy are doing, which the next
snapshot repeats. A collector that fails is reported and hides nothing else.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field

from agent.attribution.engine import AttributionEngine, DeviceTick, FunctionWork, top_functions
from agent.attribution.inputs import TickInputs
from agent.attribution.split import sum_usage
from agent.attribution.totals import RunningTotals
from agent.collectors.samples import Collector, Sample
from agent.collectors.tenants import Tenants
from agent.containers.gpu_processes import GpuProcessRegistry, ProcessEvent
from agent.containers.kubelet import DeviceHolders, holders
from agent.core.clock import NS_PER_SECOND, monotonic_ns, wall_ns
from agent.core.model import (
    CollectorHealth,
    ContainerKey,
    ContainerUsage,
    DeviceHealth,
    DeviceUuid,
    EnforcementStatus,
    OnlineUse,
    ProcessId,
    ProcessUsage,
    Snapshot,
    Unattributed,
    Usage,
)
from agent.core.registry import LossRegistry
from agent.probes.events import FunctionNames
from agent.probes.libcuda import LibcudaProbes

_log = logging.getLogger(__name__)
_SWEEP_TICKS = 30


@dataclass(frozen=True, slots=True)
class EnforcementReport:
    """What enforcement publishes once per decision. The default: nothing is enforced, nothing is decided."""

    enforcing: bool = False
    containers: Mapping[ContainerKey, EnforcementStatus] = field(default_factory=dict)
    device_health: Mapping[DeviceUuid, DeviceHealth] = field(default_factory=dict)
    online: Mapping[DeviceUuid, OnlineUse] = field(default_factory=dict)
    decided_ns: int | None = None  # when the last decision was completed; None: none are made
    left_rules: Mapping[str, int] = field(default_factory=dict)  # see Snapshot
    decision_seconds: float | None = None  # how long that decision took


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """The policy in force: when it was read (None: there is none), and what is wrong with the file (None: nothing)."""

    wall_ns: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SnapshotSources:
    """Figures of other parts of the agent that every snapshot carries."""

    losses: LossRegistry = field(default_factory=LossRegistry)
    signal_failures: LossRegistry = field(default_factory=LossRegistry)  # "rule:signal:reason" → count
    nvml_errors: Callable[[], Mapping[str, int]] = dict
    name_lookups: Callable[[], Mapping[tuple[str, str], int]] = dict
    held: Callable[[], DeviceHolders | None] = lambda: None


class ExitedProcesses:
    """Finds processes that exited: those that a probe saw, at once; the others by a sweep every _SWEEP_TICKS."""

    def __init__(self, members: GpuProcessRegistry) -> None:
        self._members = members
        self._exited: set[ProcessId] = set()
        self._probed: frozenset[ProcessId] = frozenset()
        self._ticks = 0

    @property
    def known(self) -> set[ProcessId]:
        """Processes of which anything is kept."""
        return {member.process.id for member in self._members.all()} | self._probed

    @property
    def sweeps(self) -> bool:
        """Whether this tick looks at all processes."""
        return self._ticks % _SWEEP_TICKS == 0

    def add(self, process: ProcessId) -> None:
        """A probe saw it exit. For any thread."""
        self._exited.add(process)

    def find(self) -> list[ProcessId]:
        """Once a tick: those that are gone."""
        self._ticks += 1
        known = self.known
        candidates = known if self.sweeps else self._exited & known
        self._exited &= known
        return [process for process in candidates if not self._members.proc.is_alive(process)]

    def forget(self, dead: Collection[ProcessId], probed: frozenset[ProcessId]) -> None:
        """At the end of the tick. `probed`: the processes that the probes counted in it."""
        self._exited.difference_update(dead)
        self._probed = probed.difference(dead)


class ContainerLosses:
    """What containers lost because their own budgets were used up: in the kernel's maps, and in the registry."""

    def __init__(self, members: GpuProcessRegistry, tenants: Tenants | None) -> None:
        self._members, self._tenants = members, tenants
        self._names: dict[int, ContainerKey] = {}

    def by_container(self) -> dict[ContainerKey, dict[str, int]]:
        """Since the start, by reason. Of a tenant with several containers (a pod without slices): at the first seen."""
        found = {key: {"member": count} for key, count in self._members.refused_of.items()}
        if self._tenants is None:
            return found
        owned = set(self._tenants.owners.values()) | self._tenants.lost.keys()
        self._names = {tenant: key for tenant, key in self._names.items() if tenant in owned}
        for process, tenant in self._tenants.owners.items():
            if tenant not in self._names and (member := self._members.get(process)) is not None:
                self._names[tenant] = member.container.key
        for tenant, lost in self._tenants.lost.items():
            if lost and tenant in self._names:
                sums = Counter(found.get(self._names[tenant], {}))
                sums.update(lost)
                found[self._names[tenant]] = dict(sums)
        return found


@dataclass(slots=True)
class Pipeline:
    """`tick` observes once. `members`: the processes on GPUs. Without `probes` only the collectors say what runs.

    `drain_events` has `seen`, `exited` and `replaced` called for all that the probes have reported so far.
    """

    collectors: Sequence[Collector]
    members: GpuProcessRegistry
    probes: LibcudaProbes | None
    names: InitVar[FunctionNames | None] = None
    sources: SnapshotSources = field(default_factory=SnapshotSources)
    drain_events: Callable[[], object] = lambda: None
    snapshot: Snapshot | None = field(init=False, default=None)
    enforcement: EnforcementReport = field(init=False, default=EnforcementReport())
    policy: PolicyStatus = field(init=False, default=PolicyStatus())
    unprobed: tuple[ProcessId, ...] = field(init=False, default=())  # NVML lists them, and no probe saw a call
    totals: RunningTotals = field(init=False, default_factory=RunningTotals)
    _engine: AttributionEngine = field(init=False)
    _exited: ExitedProcesses = field(init=False)
    _losses: ContainerLosses = field(init=False)
    _last_ns: int | None = field(init=False, default=None)
    _tick_seconds: float | None = field(init=False, default=None)

    def __post_init__(self, names: FunctionNames | None) -> None:
        sees_returns = self.probes is None or self.probes.returns_off is None
        self._engine = AttributionEngine(self.members, FunctionNames() if names is None else names, sees_returns)
        self._exited = ExitedProcesses(self.members)
        tenants = [one for one in self.collectors if isinstance(one, Tenants)]
        self._losses = ContainerLosses(self.members, tenants[0] if tenants else None)

    @property
    def unseen(self) -> frozenset[ProcessId]:
        """Processes that worked on a GPU in the last tick without launches that explain it."""
        return self._engine.unprobed.unseen

    def publish(self, report: EnforcementReport) -> None:
        """Enforcement's report, for the next snapshots. Once per decision."""
        self.enforcement = report

    def publish_policy(self, status: PolicyStatus) -> None:
        """The state of the policy file, for the next snapshots."""
        self.policy = status

    def tick(self, now_ns: int) -> Snapshot:
        """Observes once and publishes the snapshot."""
        began_ns = monotonic_ns()
        dead = self._exited.find()  # before the samples are taken, so that these hold all that the dead ever did
        samples, health = self._collect(now_ns)
        self.drain_events()  # so that the processes of what was counted are known, though they have ended
        interval = now_ns - self._last_ns if self._last_ns is not None else 0
        self._last_ns = now_ns
        inputs = TickInputs.of(samples, self.members.proc)
        if self.probes and inputs.readings:
            self.probes.set_sm_count(inputs.sm_count)
        for process in inputs.processes:
            self.members.see(process)
        self.members.refresh()
        parts = self._engine.tick(samples, inputs, interval)
        self.members.place(self._engine.ordinals())
        self.snapshot = self._snapshot(now_ns, interval, parts, health)
        self.unprobed = tuple(set(inputs.by_tgid.values()) - inputs.probed)
        self._forget_dead(dead, inputs.probed, now_ns)
        self._tick_seconds = (monotonic_ns() - began_ns) / NS_PER_SECOND
        return self.snapshot

    def seen(self, event: ProcessEvent) -> None:
        """A probe saw the first call of a process. NVML may have listed it before, when it ran another program."""
        known = self.members.get(event.process) is not None
        self.members.see(event.process, event)
        if known:
            self.members.renew(event.process)

    def exited(self, process: ProcessId) -> None:
        """A probe saw the process exit: its last figures are taken at the next tick, then it is forgotten."""
        self._exited.add(process)

    def replaced(self, process: ProcessId) -> None:
        """The process runs another program: its command has changed."""
        self.members.renew(process)

    def _collect(self, now_ns: int) -> tuple[list[Sample], list[CollectorHealth]]:
        samples: list[Sample] = []
        health = []
        for collector in self.collectors:
            began, error = monotonic_ns(), None
            try:
                samples.extend(collector.collect(now_ns))
            except Exception as failure:  # noqa: BLE001  # one collector must not stop the others; its error is exported
                error = f"{type(failure).__name__}: {failure}"
                _log.warning("collector %s: %s", collector.name, error)
            health.append(CollectorHealth(collector.name, (monotonic_ns() - began) / NS_PER_SECOND, error))
        return samples, health

    def _snapshot(
        self, now_ns: int, interval_ns: int, parts: Sequence[DeviceTick], health: Sequence[CollectorHealth]
    ) -> Snapshot:
        seconds = interval_ns / NS_PER_SECOND
        by_process, unattributed = self._count(parts, seconds)
        enforcement, policy, sources = self.enforcement, self.policy, self.sources
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
            unattributed=unattributed,
            enforcement=dict(enforcement.containers),
            enforcing=enforcement.enforcing,
            health=dict(enforcement.device_health),
            online=dict(enforcement.online),
            left_rules=dict(enforcement.left_rules),
            tick_seconds=self._tick_seconds,
            decision_seconds=enforcement.decision_seconds,
            policy_error=policy.error,
            policy_wall_ns=policy.wall_ns,
            probes=tuple(library.status() for library in self.probes.libraries()) if self.probes else (),
            collectors=tuple(health),
            lost=self._lost(),
            container_losses=self._losses.by_container(),
            device_totals=dict(self.totals.devices),
            ended=self.totals.ended(now_ns),
            held=holders(sources.held() or {}),
            probe_calls=self.probes.calls() if self.probes else {},
            return_probes_off=self.probes.returns_off if self.probes else None,
            nvml_errors=dict(sources.nvml_errors()),
            signal_failures=sources.signal_failures.counts(),
            name_lookups={f"{source}:{outcome}": n for (source, outcome), n in sources.name_lookups().items()},
        )

    def _count(
        self, parts: Iterable[DeviceTick], seconds: float
    ) -> tuple[dict[ProcessId, list[Usage]], tuple[Unattributed, ...]]:
        """Adds the tick to the running totals; each process's usage by device, and what is unattributed per device."""
        by_process: dict[ProcessId, list[Usage]] = {}
        unattributed = []
        for part in parts:
            for one in part.work:
                usage = part.attribution.usage[one.process]
                by_process.setdefault(one.process, []).append(usage)
                if (member := self.members.get(one.process)) is not None:
                    self.totals.add(member.container, one, usage, seconds)
            unattributed.append(self.totals.add_unattributed(part.attribution.unattributed, seconds))
            self.totals.add_device(part.attribution, sum(one.launches or 0 for one in part.work), seconds)
        return by_process, tuple(unattributed)

    def _lost(self) -> dict[str, int]:
        maps = {f"map:{name}": count for name, count in self.probes.lost()} if self.probes else {}
        return {
            **maps,
            **self.sources.losses.counts(),
            **self.sources.signal_failures.failures(),
            **self.sources.losses.failures(),
            "members:full": self.members.refused,
            "members:unreadable": self.members.unreadable,
            "ended:unscraped": self.totals.dropped,
            **self._engine.lost(),
        }

    def _containers(
        self, by_process: Mapping[ProcessId, Sequence[Usage]], parts: Iterable[DeviceTick], seconds: float
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
                sum_usage([usage for process in processes for usage in by_process[process]], self.totals.of(key)),
                tuple(processes),
                top_functions((one for process in processes for one in functions.get(process, ())), seconds),
                self._unprobed(key),
            )
            for key, processes in grouped.items()
        )

    def _unprobed(self, container: ContainerKey) -> Mapping[DeviceUuid, bool]:
        """On which devices it works unseen; nothing is known while no library is probed."""
        libraries = self.probes.libraries() if self.probes else ()
        return self._engine.unprobed.of(container) if any(library.attached for library in libraries) else {}

    def _forget_dead(self, dead: Collection[ProcessId], probed: frozenset[ProcessId], now_ns: int) -> None:
        """Forgets the dead; their last figures are in the snapshot that was just published."""
        if dead:
            before = {member.container.key: member.container for member in self.members.all()}
            for collector in self.collectors:
                collector.forget(dead)
            self._engine.forget(dead)
            self.members.remove(dead)
            remaining = {member.container.key for member in self.members.all()}
            self._engine.unprobed.retain(remaining)
            self.totals.end((container for key, container in before.items() if key not in remaining), now_ns)
        self._exited.forget(dead, probed)
        if self._exited.sweeps:
            known, proc = self._exited.known, self.members.proc
            self._engine.names.retain(lambda one: one in known or proc.is_alive(one))  # idle programs name none again
