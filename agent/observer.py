# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The observing half of the agent: owns probes, NVML, names, the pipeline and the thread that ticks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from agent.collectors import BUILTIN
from agent.collectors.devices import Devices
from agent.collectors.samples import Collector
from agent.containers.gpu_processes import GpuProcess, GpuProcessRegistry
from agent.containers.index import ContainerIndex, Residents
from agent.containers.naming import Naming
from agent.containers.runtimes import sockets
from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import SetupError
from agent.core.model import ContainerKey, Device, ProcessId, Snapshot
from agent.core.registry import Listeners, LossRegistry
from agent.core.worker import Worker
from agent.node import cgroups, preflight
from agent.node.procfs import Procfs
from agent.nvml.client import Nvml
from agent.pipeline import Pipeline, SnapshotSources
from agent.probes.discovery import FIRST_ROUND_NS, ROUND_NS, ContentSearch, Discovery
from agent.probes.events import EventReader, FunctionNames
from agent.probes.kept_state import KeptState
from agent.probes.libcuda import LibcudaProbes
from agent.probes.return_probes import ReturnProbes, why_off

_log = logging.getLogger(__name__)
_DISCOVERY_NS = 2 * NS_PER_SECOND
_SAVED_SECONDS = 60.0
_WORK_RATIO = 0.05  # of a core that ticks take, as long as that makes an interval no longer than …
_LONGEST_INTERVALS = 2  # … so many


@dataclass(frozen=True, slots=True)
class ObserverSettings:
    """`interval_ns`: how often to observe. `libcuda`: libraries to attach besides the node's own.

    `sockets`: where to ask for containers' names besides the usual places, as KIND=PATH. `kept`: the file with what the
    agent before knew of running processes, for the one that comes next; None: neither.
    """

    interval_ns: int = NS_PER_SECOND
    libcuda: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()
    return_probes: ReturnProbes = ReturnProbes.AUTO
    kept: Path | None = None


class Observer:
    """A context manager: inside it the pipeline ticks in a thread of its own. Entered once.

    `listeners` get every snapshot, on the observing thread. `losses` and `signal_failures` are for Snapshot.lost and
    Snapshot.signal_failures: parts register what they lose. Both may be registered with before the block begins.
    """

    def __init__(self, settings: ObserverSettings) -> None:
        self._settings = settings
        self.proc = Procfs()
        self.listeners: Listeners[Snapshot] = Listeners()
        self.losses, self.signal_failures = LossRegistry(), LossRegistry()
        self._stack = ExitStack()
        interval_seconds = settings.interval_ns / NS_PER_SECOND
        self._worker = Worker(
            "observer", self._observe, failed="a tick", first_seconds=interval_seconds, retry_seconds=interval_seconds
        )
        self._due_ns = self._discovered_ns = 0
        self._ticking: Pipeline | None = None

    def __enter__(self) -> Self:
        preflight.require_this_machine()
        cgroups.join_node_namespace()  # the threads that already run, of pages and sockets, read no cgroups
        with ExitStack() as stack:
            nvml = stack.enter_context(Nvml())
            if not nvml.devices():
                raise SetupError("NVML finds no GPU: check nvidia-smi; in a container, ask for the devices")
            returns_off = why_off(self._settings.return_probes)
            self.probes = stack.enter_context(LibcudaProbes(preflight.bpf_object(), self.proc, returns_off))
            self._discovery = Discovery(self.probes, self.proc)
            self._by_content = ContentSearch(self.probes, self.proc)
            self.naming = stack.enter_context(Naming(sockets(self._settings.sockets)))
            self._index = ContainerIndex(self.proc, placed=self.naming.placed)
            members = GpuProcessRegistry(
                self._index, self._devices_of(nvml), self.proc, self.naming.named, Residents(self.proc).once
            )
            collectors: list[Collector] = [*(collector(self.probes) for collector in BUILTIN), Devices(nvml)]
            names = FunctionNames(owner=lambda process: _owner(members.get(process), process))
            self.pipeline = Pipeline(
                collectors, members, self.probes, names, self._sources(nvml), lambda: events.drain()
            )
            if self._settings.kept is not None:
                self._keep(KeptState(self.probes.bpf, self._settings.kept, self.proc), names, stack)
            events = EventReader(self.probes, self.pipeline, names)
            events.start()
            stack.callback(events.stop)
            stack.enter_context(self.losses.register("observer", lambda: self._lost(events)))
            if not self._discovery.attach_host(self._settings.libcuda):
                _log.warning("no libcuda.so.1 on this node yet: containers' own are looked for; name it with --libcuda")
            self._discovery.look(monotonic_ns() + FIRST_ROUND_NS)
            self._tick(monotonic_ns())
            self._ticking = self.pipeline
            self._due_ns = monotonic_ns() + self._settings.interval_ns
            stack.callback(self._worker.close)
            self._worker.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _keep(self, kept: KeptState, names: FunctionNames, stack: ExitStack) -> None:
        """Takes over what the agent before knew, before anything is attached, and writes it for the next one."""
        for process, of_process in kept.take_over().items():
            for function, name in of_process.items():
                names.learn(process, function, name)

        def save() -> float:
            kept.save(names.all())
            return _SAVED_SECONDS

        keeper = Worker(
            "keeper",
            save,
            failed="writing what is known of processes",
            first_seconds=_SAVED_SECONDS,
            retry_seconds=_SAVED_SECONDS,
        )
        stack.callback(partial(_once_more, save))
        stack.callback(keeper.close)
        keeper.start()
        stack.enter_context(self.losses.register("kept", lambda: _losses(kept, keeper)))

    @property
    def members(self) -> GpuProcessRegistry:
        """The processes on GPUs."""
        return self.pipeline.members

    @property
    def libcuda(self) -> tuple[str, ...]:
        """Libraries that were named beside the node's own."""
        return self._settings.libcuda

    def snapshot(self) -> Snapshot | None:
        """The latest snapshot; None before the first."""
        return self._ticking.snapshot if self._ticking else None

    def decided_ns(self) -> int | None:
        """When the last decision was completed; None while none are made."""
        return self._ticking.enforcement.decided_ns if self._ticking else None

    def served(self, snapshot: Snapshot) -> None:
        """A scraper got this snapshot: what had ended by then may be dropped."""
        if self._ticking:
            self._ticking.totals.scraped(snapshot.ended)

    def _devices_of(self, nvml: Nvml) -> Callable[[], Sequence[Device]]:
        def devices() -> Sequence[Device]:
            snapshot = self.pipeline.snapshot
            return [reading.device for reading in snapshot.devices] if snapshot else first

        first = nvml.devices()
        return devices

    def _sources(self, nvml: Nvml) -> SnapshotSources:
        return SnapshotSources(
            losses=self.losses,
            signal_failures=self.signal_failures,
            nvml_errors=lambda: nvml.errors,
            name_lookups=self.naming.counts,
            held=self.naming.holders,
        )

    def _lost(self, events: EventReader) -> dict[str, int]:
        return {
            "ticks:failed_calls": self.listeners.failures,
            "ticks:failed": self._worker.failures,
            "watcher:failed": events.failures,
            "libraries:refused": self._discovery.refused,
            **self._by_content.lost(),
            "libraries:full": self.probes.refused,
            "libraries:rewritten": self.probes.put_off,
            "containers:id_refused": self._index.refused,
            "libraries:clash": self.probes.clashes,
        }

    def _tick(self, now_ns: int) -> None:
        if self._index.correct():
            self.members.identify_again()
        self.listeners.notify(self.pipeline.tick(now_ns))

    def _observe(self) -> float:
        """A tick and a round of discovery. Ticks that are missed are not made up for; long ones are made less often."""
        now, began_ns = monotonic_ns(), time.thread_time_ns()
        self._tick(now)
        ends_ns = monotonic_ns() + ROUND_NS
        self._by_content.look(self.pipeline.unseen, ends_ns - ROUND_NS // 2)
        self._discovery.look_at(self.pipeline.unprobed, ends_ns - ROUND_NS // 2)  # half of the round is for the rest
        if now - self._discovered_ns >= _DISCOVERY_NS:
            self._discovered_ns = now
            self._discovery.look(ends_ns)
        interval_ns, spent_ns = self._settings.interval_ns, time.thread_time_ns() - began_ns
        rest_ns = min(max(interval_ns, round(spent_ns / _WORK_RATIO)), _LONGEST_INTERVALS * interval_ns)
        self._due_ns = max(self._due_ns + rest_ns, monotonic_ns())
        return max(0.0, (self._due_ns - monotonic_ns()) / NS_PER_SECOND)


def _once_more(save: Callable[[], object]) -> None:
    """As the agent ends."""
    try:
        save()
    except OSError as error:
        _log.warning("the next agent will know less of what runs: %s", error)


def _losses(kept: KeptState, keeper: Worker) -> dict[str, int]:
    return {"kept:full": kept.refused, "kept:failed": keeper.failures}


def _owner(member: GpuProcess | None, process: ProcessId) -> ContainerKey | ProcessId:
    """Whose part of what is bounded it uses: its container's, its own while that is not known."""
    return process if member is None else member.container.key
