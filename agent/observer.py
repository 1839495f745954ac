# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The observing half of the agent, put together: probes, NVML, members, pipeline, and the thread that ticks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from agent import cgroup_namespace, preflight
from agent.clock import NS_PER_SECOND, monotonic_ns
from agent.collectors import BUILTIN
from agent.collectors.devices import Devices
from agent.containers.index import ContainerIndex
from agent.containers.naming import Naming
from agent.containers.sources import sockets
from agent.discovery import ROUND_NS, Discovery
from agent.errors import SetupError
from agent.function_names import FunctionNames
from agent.members import Members
from agent.model import Device, Snapshot
from agent.nvml import Nvml
from agent.pipeline import Pipeline
from agent.probes import Probes
from agent.procfs import Procfs
from agent.samples import Collector
from agent.watcher import Watcher

_log = logging.getLogger(__name__)
_DISCOVERY_NS = 2 * NS_PER_SECOND


@dataclass(frozen=True, slots=True)
class Settings:
    """`interval_ns`: how often to observe. `libcuda`: libraries to attach besides the node's own.

    `sockets`: where to ask for containers' names besides the usual places, as KIND=PATH.
    """

    interval_ns: int = NS_PER_SECOND
    libcuda: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()


class Observer:
    """A context manager: inside it the pipeline ticks in a thread of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.libcuda = settings.libcuda
        self._stack = ExitStack()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)
        self._ticking: Pipeline | None = None
        self.proc = Procfs()
        self.on_tick: list[Callable[[Snapshot], None]] = []  # called with every snapshot, on the observing thread
        self.losses: Callable[[], Mapping[str, int]] = dict  # what other parts lost, for Snapshot.lost
        self.failed_calls = 0  # of on_tick
        self.failed_ticks = 0

    def __enter__(self) -> Self:
        preflight.require_this_machine()
        cgroup_namespace.join_the_nodes()  # the threads that run, of pages and sockets, read no cgroups
        with ExitStack() as stack:
            nvml = stack.enter_context(Nvml())
            if not nvml.devices():
                raise SetupError("NVML finds no GPU: check nvidia-smi; in a container, ask for the devices")
            self.probes = stack.enter_context(Probes(preflight.bpf_object(), self.proc))
            self._discovery = Discovery(self.probes, self.proc)
            self.naming = stack.enter_context(Naming(sockets(self._settings.sockets)))
            index = ContainerIndex(self.proc)
            self.members = Members(index, self._devices_of(nvml), self.proc, self.naming.named)
            collectors: list[Collector] = [*(collector(self.probes) for collector in BUILTIN), Devices(nvml)]
            names = FunctionNames()
            self.pipeline = Pipeline(
                collectors,
                self.members,
                self.probes,
                names,
                nvml_errors=lambda: nvml.errors,
                name_lookups=self.naming.counts,
                held=self.naming.held,
                losses=self._losses,
            )
            self._watcher = Watcher(self.probes, self.pipeline, names)
            self._watcher.start()
            stack.callback(self._watcher.stop)
            if not self._discovery.attach_host(self._settings.libcuda):
                _log.warning("no libcuda.so.1 on this node yet: containers' own are looked for; name it with --libcuda")
            self._discovery.look()
            self._tick(monotonic_ns())
            self._ticking = self.pipeline
            self._thread.start()
            stack.callback(self._stop)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def snapshot(self) -> Snapshot | None:
        """The latest picture; None before the first."""
        return self._ticking.snapshot if self._ticking else None

    def decided_ns(self) -> int | None:
        """When the last decision was completed; None while none are made."""
        return self._ticking.decided_ns if self._ticking else None

    def served(self, snapshot: Snapshot) -> None:
        """A scraper has this snapshot now: what had ended by then need not be kept for it."""
        if self._ticking:
            self._ticking.books.scraped(snapshot.ended)

    def _devices_of(self, nvml: Nvml) -> Callable[[], Sequence[Device]]:
        def devices() -> Sequence[Device]:
            snapshot = self.pipeline.snapshot
            return [reading.device for reading in snapshot.devices] if snapshot else first

        first = nvml.devices()
        return devices

    def _losses(self) -> dict[str, int]:
        return {
            **self.losses(),
            "ticks:failed_calls": self.failed_calls,
            "ticks:failed": self.failed_ticks,
            "watcher:failed": self._watcher.failures,
            "libraries:refused": self._discovery.refused,
            "libraries:full": self.probes.refused,
        }

    def _tick(self, now_ns: int) -> None:
        snapshot = self.pipeline.tick(now_ns)
        for call in self.on_tick:
            try:
                call(snapshot)
            except Exception:  # noqa: BLE001  # whoever listens must not stop the observing
                if not self.failed_calls:
                    _log.exception("a listener failed; further failures are only counted")
                self.failed_calls += 1

    def _stop(self) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        looked = 0
        due = monotonic_ns() + self._settings.interval_ns
        while not self._ending.wait(max(0.0, (due - monotonic_ns()) / NS_PER_SECOND)):
            now = monotonic_ns()
            due = max(due + self._settings.interval_ns, now)
            try:
                self._tick(now)
                ends_ns = monotonic_ns() + ROUND_NS
                self._discovery.look_at(self.pipeline.unprobed, ends_ns - ROUND_NS // 2)  # the others have a half too
                if now - looked >= _DISCOVERY_NS:
                    looked = now
                    self._discovery.look(ends_ns)
            except Exception:  # noqa: BLE001  # a tick that fails is missing from the figures; the next one may work
                self.failed_ticks += 1
                _log.exception("a tick failed")
