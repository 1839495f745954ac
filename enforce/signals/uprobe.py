# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`uprobe`: how long a function takes, from its call to its return, in all processes of a container.

`UprobeProbes` is the kernel side: bpf/uprobe.bpf.c loaded, attached and read. A ProcessFollower calls it on a thread of
its own, so that a reading of the signal `Uprobe` is one look into a map. Of the pseudo-container of the host, only the
processes that use a GPU are timed.

Invariants: a file is attached once for each function, whatever the paths that lead to it; the calls of a process count
only with the probe that was attached for it; a function that no followed process needs, or whose file is being written
over, has no probe.
"""

from __future__ import annotations

import ctypes as c
import itertools
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from agent.core.errors import GoneError, ProbeError, SetupError
from agent.core.model import HOST, ContainerKey, ContainerUsage, ProcessId, Snapshot
from agent.node.elf import Extent
from agent.node.elf_functions import function_offset
from agent.node.instructions import places
from agent.node.procfs import Procfs
from agent.probes import abi
from agent.probes.abi import U32, U64
from agent.probes.attachment import Attachment, Attachments, ProbedFunction
from agent.probes.libbpf import Map, load_uprobes
from agent.probes.libraries import OpenFile, opened
from enforce.model import Reading
from enforce.policy.model import Slo, Source, UprobeSource
from enforce.signals.latency_window import Buckets, Requests, Windows
from enforce.signals.process_follower import ContainerProcesses, FollowerSettings, ProcessFollower

_log = logging.getLogger(__name__)
TALLIES = ("abandoned", "full")
_MOST_TARGETS = 256
_ENTRY, _RETURN = "uprobe_enter", "uprobe_return"


class Watched(c.Structure):
    """struct watched of bpf/uprobe.h: a followed process."""

    _fields_ = [("watch", U32), ("target", U32)]


class UprobeProbes:
    """`ProcessProbes` of the signal uprobe (enforce.signals.process_probes). A target is one function of one file.

    Belongs to one thread, but for `buckets` and `tallies`, which any may call. `close` detaches every probe.
    """

    def __init__(self, object_path: Path, proc: Procfs) -> None:
        self._proc = proc
        self._bpf = load_uprobes(object_path, {_ENTRY, _RETURN})
        self._wanted: Map = self._bpf.map("wanted", U32, Watched)
        self._recorded: Map = self._bpf.map("recorded", U32, abi.Latency)
        self._tallies: Map = self._bpf.map("tallies", U32, U64)
        for program in ("uprobe_exit", "uprobe_exec"):
            self._bpf.attach(program)
        self._numbers = itertools.count(1)
        self._targets: dict[Attachment, int] = {}  # by their numbers in the map `wanted`
        self._files = Attachments(self._bpf, self._forget)

    def begin(self, number: int, source: UprobeSource) -> None:
        """Calls can be counted under this number from now on. OSError when there are too many."""
        self._recorded.put(U32(number), abi.Latency())

    def end(self, number: int) -> None:
        """Drops what was counted under the number, and follows its processes no more."""
        self._recorded.delete(U32(number))
        for tgid, found in self.followed().items():
            if found == number:
                self.unfollow(tgid)

    def buckets(self, number: int) -> Buckets | None:
        """The latencies of the calls that were counted under this number."""
        found = self._recorded.get(U32(number))
        return bytes(found.buckets) if found is not None else None

    def followed(self) -> dict[int, int]:
        """tgid → number."""
        return {key.value: value.watch for key, value in self._wanted.items()}

    def follow(self, number: int, source: UprobeSource, process: ProcessId) -> None:
        """Counts the calls of a process that runs. GoneError, ProbeError, SetupError, OSError."""
        if not self._proc.is_alive(process):
            return
        try:
            with opened(self._proc, process, source.binary) as file:
                purpose = (source.symbol, source.offset, source.nothrow)
                attachment = self._files.find(file, purpose) or self._attach(file, source, purpose)
        except GoneError as error:
            raise GoneError(f"{source.binary}: {error}; write slo.binary as the container sees it") from error
        except (ProbeError, SetupError) as error:
            raise type(error)(f"{source.binary}: {error}") from error
        self._wanted.put(U32(process.tgid), Watched(number, self._targets[attachment]))
        if not self._proc.is_alive(process):  # after `put`: the kernel deletes the entry of one that ends, but once
            self.unfollow(process.tgid)

    def point(self, number: int, slots: int) -> None:
        """Nothing: a request may wait in the service for long before the function is called."""

    def unfollow(self, tgid: int) -> None:
        """The process's calls count no more."""
        self._wanted.delete(U32(tgid))

    def drop_changed(self) -> set[int]:
        """Detaches from files that are being written over, and unfollows the processes that lost their probe so."""
        self._files.drop_changed(self._files.changes.take())
        attached = set(self._targets.values())
        lost = {key.value for key, value in self._wanted.items() if value.target not in attached}
        for tgid in lost:
            self.unfollow(tgid)
        return lost

    def drop_unused(self) -> None:
        """Detaches from functions that no followed process needs."""
        used = {value.target for _, value in self._wanted.items()}
        for attachment in [one for one, target in self._targets.items() if target not in used]:
            self._files.drop(attachment)

    def changes_fd(self) -> int | None:
        """Readable when `drop_changed` has something to do."""
        return self._files.changes.fileno()

    def tallies(self) -> dict[str, int]:
        """Calls that were not recorded, by reason."""
        return dict(zip(TALLIES, self._tallies.per_cpu_array(len(TALLIES)), strict=True))

    def details(self, _number: int) -> dict[str, int]:
        """Nothing: a call has a latency and no more."""
        return {}

    def close(self) -> None:
        """Detaches everything."""
        self._files.close()
        self._bpf.close()

    def _forget(self, attachment: Attachment) -> None:
        self._targets.pop(attachment, None)

    def _attach(self, file: OpenFile, source: UprobeSource, purpose: tuple[object, ...]) -> Attachment:
        if len(self._targets) >= _MOST_TARGETS:
            raise ProbeError(f"more than {_MOST_TARGETS} functions are timed; write fewer rules with signal uprobe")
        target = next(self._numbers)

        def function(descriptor: int) -> list[ProbedFunction]:
            offset = function_offset(descriptor, source.symbol, source.offset, source.nothrow)
            place = places(descriptor, [Extent(offset, 0)])[offset]
            return [ProbedFunction(source.symbol or hex(offset), offset, target, _ENTRY, _RETURN, place)]

        attachment = self._files.attach(file, function, purpose)
        for reason in attachment.failed.values():
            self._files.drop(attachment)
            raise ProbeError(reason)
        self._targets[attachment] = target
        _log.info("timing %s of %s", source.symbol or f"offset {source.offset}", source.binary)
        return attachment


class Uprobe:
    """`load` makes the kernel side, `processes` lists containers' own; both are called on the follower's thread."""

    name = "uprobe"

    def __init__(
        self, load: Callable[[], UprobeProbes], processes: ContainerProcesses, proc: Procfs, requests: Requests
    ) -> None:
        self.follower = ProcessFollower[UprobeSource](FollowerSettings("uprobe"), load, processes, proc)
        self._windows = Windows(requests)
        self._snapshot: Snapshot | None = None
        self._rows: dict[ContainerKey, ContainerUsage] = {}
        self._sources: dict[ContainerKey, UprobeSource] = {}

    def read(self, snapshot: Snapshot, container: ContainerKey, slo: Slo, now_ns: int) -> Reading | None:
        """None while the window holds fewer than `min_samples` calls."""
        if snapshot is not self._snapshot:  # one lasts for many readings
            self._snapshot = snapshot
            self._rows.update((row.container.key, row) for row in snapshot.containers)
        row = self._rows.get(container)
        if row is None or not isinstance(slo.source, UprobeSource):
            return None
        if self._sources.setdefault(container, slo.source) != slo.source:  # another function: other latencies
            self._windows.forget([container])
            self._sources[container] = slo.source
        only = row.processes if container == HOST else None
        number = self.follower.watch(row.container, slo.source, now_ns, only)
        histograms = {number: self.follower.buckets(number)} if number is not None else {}
        return self._windows.read(container, histograms, slo, now_ns)

    def trouble(self, container: ContainerKey) -> str | None:
        """Why there is no reading, where it is more than silence."""
        return self.follower.trouble(container)

    def forget(self, containers: Iterable[ContainerKey]) -> None:
        """Drops what is kept about containers that are gone; the follower takes their probes away."""
        gone = list(containers)
        self._windows.forget(gone)
        for container in gone:
            self._rows.pop(container, None)
            self._sources.pop(container, None)
            self.follower.forget(container)

    def failures(self) -> dict[tuple[Source, str], int]:
        """Processes in which the function could not be timed, since the start, by source and reason."""
        return {(source, reason): count for (source, reason), count in list(self.follower.failures.items())}

    def losses(self) -> dict[str, int]:
        """For Snapshot.lost: calls that were not recorded, and rounds that failed. Empty where nothing was watched."""
        if not self.follower.started:
            return {}
        tallies = {f"uprobe:{name}": count for name, count in self.follower.tallies().items()}
        return {**tallies, "uprobe:failed": self.follower.failed_rounds}

    def close(self) -> None:
        """Detaches every probe."""
        self.follower.close()
