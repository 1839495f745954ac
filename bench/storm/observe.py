# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the kernel says after an act: who stands still and until when, who was sent signals, what of an agent is left.

Nothing here asks the agent. States are looked at about every millisecond, so a time is late by as much at most.
"""

from __future__ import annotations

import ctypes as c
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.probes.libbpf import BpfObject
from bench.storm.workloads import Standing, Watched
from tools.harness import cgroups
from tools.harness.uprobes import MEASURING

_LOOK_SECONDS: Final = 0.001
_QUIET_SECONDS: Final = 0.4  # in which a late stop shows
_PINS: Final = Path("/sys/fs/bpf")
_SIGNALS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGCONT)
_BEFORE_OTHERS: Final = -20


@dataclass(slots=True)
class Trace:
    """The workloads from an act on. Times are seconds after it.

    `met`: who stood still at the act; `ran`: when each that has stood was first seen to run; `last`: when it was last
    seen to have begun to run again; `standing`: who does not run now.
    """

    met: dict[str, Standing] = field(default_factory=dict)
    ran: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    standing: dict[str, Standing] = field(default_factory=dict)

    def note(self, seconds: float, standing: Mapping[str, Standing]) -> None:
        """One look."""
        for name in self.standing.keys() - standing.keys():
            self.last[name] = seconds
            self.ran.setdefault(name, seconds)
        self.standing = dict(standing)

    def stood_seconds(self, *, enforced: bool) -> float:
        """How long it took until all ran. `enforced`: they may be stopped again, and each has to run once."""
        return max((self.ran if enforced else self.last).values(), default=0.0)


def look(workloads: Sequence[Watched], kinds: Sequence[Standing]) -> dict[str, Standing]:
    """Who stands still, of these kinds."""
    found = ((one.name, one.standing()) for one in workloads)
    return {name: standing for name, standing in found if standing is not None and standing in kinds}


def watch(
    workloads: Sequence[Watched], kinds: Sequence[Standing], act: Callable[[], float], *, enforced: bool, seconds: float
) -> tuple[Trace, float]:
    """Acts, and looks until all run: each once where it is `enforced`, else until none has stood for a while.

    Returns what was seen, and the moment of the act by time.monotonic(), which `act` says.
    """
    trace = Trace()
    with _before_others():
        trace.met = trace.standing = look(workloads, kinds)
        began = quiet = act()
        while (now := time.monotonic()) < began + seconds:
            trace.note(now - began, look(workloads, kinds))
            if enforced:
                if trace.met.keys() <= trace.ran.keys():
                    break
            elif trace.standing:
                quiet = now
            elif now - quiet > _QUIET_SECONDS:
                break
            time.sleep(_LOOK_SECONDS)
    return trace, began


@contextmanager
def _before_others() -> Iterator[None]:
    """This thread looks in time on a machine whose CPUs are busy."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _BEFORE_OTHERS)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


class _Target(c.Structure):
    _fields_ = [("tgid", c.c_uint32), ("number", c.c_uint32)]


class _Sent(c.Structure):
    _fields_ = [("count", c.c_uint64), ("sender", c.c_uint64)]
    count: int
    sender: int


class SignalCounts:
    """How often each process was sent a signal that stops, resumes or ends one (signals.bpf.c). Of a `with` block."""

    def __init__(self) -> None:
        self._bpf = BpfObject(MEASURING / "signals.bpf.o")
        self._bpf.attach("note_signal")
        self._map = self._bpf.map("signals", _Target, _Sent)

    def of(self, tgid: int) -> dict[str, int]:
        """By the signal's name, since this was opened."""
        found = ((number.name, self._map.get(_Target(tgid, number))) for number in _SIGNALS)
        return {name: sent.count for name, sent in found if sent is not None}

    def __enter__(self) -> SignalCounts:
        return self

    def __exit__(self, *_: object) -> None:
        self._bpf.close()


@dataclass(frozen=True, slots=True)
class Traces:
    """What an agent can leave on a machine: BPF programs and links by id, pins, cgroups."""

    programs: frozenset[int]
    links: frozenset[int]
    pins: frozenset[str]
    cgroups: frozenset[str]

    @classmethod
    def now(cls) -> Traces:
        """As the kernel has them."""
        pins = (str(path) for path in _PINS.rglob("*")) if _PINS.is_dir() else ()
        folders = (name for root in cgroups.hierarchies() for name, _, _ in os.walk(root))
        return cls(_ids("prog"), _ids("link"), frozenset(pins), frozenset(folders))

    def beyond(self, before: Traces, own_cgroups: str) -> dict[str, int]:
        """How many of each there are more than before, but for what a living process has open: another agent's.

        `own_cgroups`: a path below which they are the storm's.
        """
        made = {path for path in self.cgroups - before.cgroups if own_cgroups not in path}
        programs, links = self.programs - before.programs, self.links - before.links
        if programs or links:
            programs, links = programs - held("prog"), links - held("link")
        return {
            "left_probes": len(programs) + len(links),
            "left_pins": len(self.pins - before.pins),
            "left_cgroups": len(made),
        }


def _ids(kind: str) -> frozenset[int]:
    following = getattr(c.CDLL("libbpf.so.1", use_errno=True), f"bpf_{kind}_get_next_id")
    found, number = set[int](), c.c_uint32(0)
    while following(number.value, c.byref(number)) == 0:
        found.add(number.value)
    return frozenset(found)


def held(kind: str) -> frozenset[int]:
    """The ids of the BPF programs or links of which a process has a descriptor."""
    pattern, found = re.compile(rf"^{kind}_id:\s*(\d+)$", re.MULTILINE), set[int]()
    for path in Path("/proc").glob("[0-9]*/fdinfo/*"):
        with suppress(OSError):
            found.update(map(int, pattern.findall(path.read_text())))
    return frozenset(found)


def changed_code_bytes(tgid: int, library: Path) -> int:
    """How many bytes of the library's code differ in a process from those in the file: breakpoints of probes.

    Those of another agent look the same, so it is 0 while any process has probes.
    """
    if held("link"):
        return 0
    content, changed = library.read_bytes(), 0
    with open(f"/proc/{tgid}/mem", "rb", buffering=0) as memory:
        for start, end, offset in _code(tgid, library):
            memory.seek(start)
            seen = memory.read(end - start)
            changed += sum(one != other for one, other in zip(seen, content[offset:], strict=False))
    return changed


def _code(tgid: int, library: Path) -> Iterator[tuple[int, int, int]]:
    for line in Path(f"/proc/{tgid}/maps").read_text().splitlines():
        if line.endswith(f"/{library.name}") and "r-xp" in line:
            addresses, _, offset, *_ = line.split()
            start, end = (int(word, 16) for word in addresses.split("-"))
            yield start, end, int(offset, 16)
