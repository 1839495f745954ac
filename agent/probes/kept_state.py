# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is known of running processes, for the agent that comes next: contexts, graphs, devices, streams, names.

A process makes the calls that tell of these once, so an agent that is started later (an upgrade, a crash) would not
learn of them while the process lives: a graph would count as one kernel, a launch as one on an unknown device. They are
written as an agent ends, and now and then before, and taken over before any probe is there. Nothing is of a process
that has ended or runs another program since, of a thread that has ended, of another boot, or of a map whose structs
are different now. What such a process made or ended while no agent ran is not known.
"""

from __future__ import annotations

import ctypes as c
import json
import logging
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent.core.errors import GoneError, SetupError
from agent.core.model import ProcessId
from agent.node.procfs import Procfs, this_boot
from agent.probes import abi
from agent.probes.libbpf import BpfObject, Map

_log = logging.getLogger(__name__)
FILE: Final = "known.json"  # in the run directory
_TICKS_PER_SECOND: Final = 100  # USER_HZ
Names = Mapping[ProcessId, Mapping[int, str]]


@dataclass(frozen=True, slots=True)
class _Kind:
    """A map: the structs of its keys and values ("": a u64), and those within them."""

    key: str
    value: str
    inside: tuple[str, ...] = ()


_STACKS: Final = "context_stacks"  # by thread
_KINDS: Final[Mapping[str, _Kind]] = {
    "tenant_of": _Kind("process_id", ""),
    "contexts": _Kind("context_key", "context"),
    "uuids": _Kind("ordinal_key", "uuid"),
    "bus_ids": _Kind("ordinal_key", "bus_id"),
    "graphs": _Kind("graph_key", "graph", ("work",)),
    "nodes": _Kind("node_key", "node", ("work",)),
    "graph_memories": _Kind("graph_key", "graph_memory"),
    "non_blocking": _Kind("graph_key", "non_blocking"),
    _STACKS: _Kind("", "context_stack", ("current",)),
}


class _KeptMap:
    """One of these maps, as bytes."""

    def __init__(self, bpf: BpfObject, name: str, kind: _Kind) -> None:
        self._key, self._value = (
            c.c_uint8 * (abi.size_of(bpf, struct) if struct else 8) for struct in (kind.key, kind.value)
        )
        self._map: Map = bpf.map(name, self._key, self._value)
        structs = {kind.key, kind.value, *kind.inside} - {""}
        self.layout = {struct: abi.layout_of(bpf, struct) for struct in sorted(structs)}

    def read(self) -> Iterator[tuple[bytes, bytes]]:
        """Key and value."""
        for key, value in self._map.items():
            yield bytes(key), bytes(value)

    def put(self, key: bytes, value: bytes) -> bool:
        """False when there is no room. ValueError: of another size."""
        if (len(key), len(value)) != (c.sizeof(self._key), c.sizeof(self._value)):
            raise ValueError(f"an entry of {len(key)} and {len(value)} bytes")
        try:
            self._map.put(self._key.from_buffer_copy(key), self._value.from_buffer_copy(value))
        except OSError:
            return False
        return True

    def delete(self, key: bytes) -> None:
        """If it is there."""
        self._map.delete(self._key.from_buffer_copy(key))


class KeptState:
    """The maps of one loaded object, and the file. For one thread at a time. `refused`: facts that had no room."""

    def __init__(self, bpf: BpfObject, path: Path, proc: Procfs) -> None:
        self._path, self._proc = path, proc
        self._maps = {name: _KeptMap(bpf, name, kind) for name, kind in _KINDS.items()}
        self.refused = 0

    def take_over(self) -> Names:
        """Fills the maps from the file, and returns the names in it. What cannot be read is logged, and not known.

        To be called when no probe is there but the one that sees processes end.
        """
        try:
            document = json.loads(self._path.read_bytes())
            return self._take_over(document) if document["boot"] == this_boot() else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            _log.warning("%s cannot be used, so what runs is not known from before: %r", self._path, error)
            return {}

    def _take_over(self, document: Any) -> Names:
        stacks = {ProcessId(tgid, ticks): start_stack for tgid, ticks, start_stack in document["processes"]}
        alive = {process for process, start_stack in stacks.items() if self._is_same(process, start_stack)}
        put = []
        for name, key, value in self._entries(document, alive):
            put.append((name, key))
            self.refused += not self._maps[name].put(key, value)
        gone = {process for process in alive if not self._is_same(process, stacks[process])}
        tgids = {process.tgid for process in gone}
        for name, key in put:  # the probe that sees them end may have done so before this was there
            if _tgid(name, key) in tgids:
                self._maps[name].delete(key)
        _log.info("%d facts of %d running processes are known from before", len(put) - self.refused, len(alive - gone))
        return {
            ProcessId(tgid, ticks): {handle: document["texts"][index] for handle, index in names}
            for tgid, ticks, names in document["names"]
            if ProcessId(tgid, ticks) in alive - gone
        }

    def _entries(self, document: Any, alive: Collection[ProcessId]) -> Iterator[tuple[str, bytes, bytes]]:
        """(map, key, value) of what is there still."""
        maps, tgids = dict(document["maps"]), {process.tgid for process in alive}
        for name, kept in self._maps.items():
            found = maps.get(name)
            if found is None or found["layout"] != kept.layout:
                _log.warning("%s of running processes are not known: another version wrote %s", name, self._path)
                continue
            for key, value in ((bytes.fromhex(key), bytes.fromhex(value)) for key, value in found["entries"]):
                if name == _STACKS:
                    wanted = _tgid(name, key) in tgids and self._is_thread(key, document["at_ticks"])
                else:
                    wanted = abi.ProcessKey.from_buffer_copy(key).id() in alive
                if wanted:
                    yield name, key, value

    def _is_same(self, process: ProcessId, start_stack: int) -> bool:
        """Whether it runs, and the same program still: another one's stack begins elsewhere."""
        return self._start_stack(process) == start_stack

    def _start_stack(self, process: ProcessId) -> int | None:
        try:
            now = self._proc.stat(process.tgid)
        except (GoneError, SetupError):
            return None
        return now.start_stack if now.start_ticks == process.start_ticks and not now.dead else None

    def _is_thread(self, key: bytes, at_ticks: int) -> bool:
        """Whether a thread of the process that has the number now had it then."""
        threads = Procfs(f"{self._proc.root}/{_tgid(_STACKS, key)}/task")
        try:
            return threads.stat(_u64(key) & 0xFFFFFFFF).start_ticks <= at_ticks
        except (GoneError, SetupError):
            return False

    def save(self, names: Names) -> None:
        """Replaces the file by what is known now. OSError."""
        at_ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_SECOND) & 0xFFFFFFFF
        entries = {name: list(kept.read()) for name, kept in self._maps.items()}
        owners = {
            abi.ProcessKey.from_buffer_copy(key).id()
            for name, of in entries.items()
            if name != _STACKS
            for key, _ in of
        }
        stacks = {process: self._start_stack(process) for process in owners | names.keys()}
        texts = {text: index for index, text in enumerate({text for of in names.values() for text in of.values()})}
        _write(
            self._path,
            {
                "boot": this_boot(),
                "at_ticks": at_ticks,
                "processes": [[one.tgid, one.start_ticks, stack] for one, stack in stacks.items() if stack is not None],
                "maps": {
                    name: {"layout": kept.layout, "entries": [[key.hex(), value.hex()] for key, value in entries[name]]}
                    for name, kept in self._maps.items()
                },
                "texts": list(texts),
                "names": [
                    [one.tgid, one.start_ticks, [[handle, texts[text]] for handle, text in of.items()]]
                    for one, of in names.items()
                ],
            },
        )


def _u64(key: bytes) -> int:
    return int.from_bytes(key[:8], sys.byteorder)


def _tgid(name: str, key: bytes) -> int:
    """Of an entry's process."""
    return _u64(key) >> 32 if name == _STACKS else _u64(key) & 0xFFFFFFFF


def _write(path: Path, document: object) -> None:
    """Whole or not at all; for root's eyes."""
    temporary = f"{path}.new"
    with suppress(FileNotFoundError):
        os.unlink(temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "w", encoding="ascii") as file:
            json.dump(document, file, separators=(",", ":"))
        os.rename(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
