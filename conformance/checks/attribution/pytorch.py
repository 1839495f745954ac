# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""PyTorch as a tenant: alone, where CUPTI says what it did, and beside a container, where it counts its steps.

While others take turns with it CUPTI's durations have the others' turns in them. So a step's SM time is taken alone.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any, Final, Self

from agent.core.model import Snapshot, Usage
from bench.attribution.errors import MOST_WORST
from bench.attribution.recording import Life
from conformance.checks.attribution import rows as out_of
from conformance.checks.attribution.rows import ITEM, on_device
from conformance.checks.attribution.scene import Stage, at_the_end, cast, played, window
from conformance.checks.attribution.tenants import BESIDE_PYTORCH, Tenant, TenantWork
from conformance.clients.workload import SAME_ORDER
from conformance.host import Host, Unavailable
from conformance.report.model import Row, holds, measured, near, part

PROGRAM: Final = Path(__file__).resolve().parents[2] / "programs" / "torch_steps.py"
NAME: Final = "PyTorch"
ALONE: Final = "PyTorch alone"
BESIDE: Final = "PyTorch beside a container"
_IMPORT_SECONDS: Final = 60.0
_OPEN_SECONDS: Final = 30.0
_EXTRA_SECONDS: Final = 20.0
_LEARN_SECONDS: Final = 2.0
_WAITING_SECONDS: Final = 1.6  # for snapshots, at both ends
_PROFILE_SECONDS: Final = 1.5
_LATE_NS: Final = 1_500_000_000  # NVML's samples are of the second before, and a tick of the agent comes after that
_BYTES_WITHIN: Final = 0.01
_LIVE_WITHIN: Final = 0.05
_TENANT: Final = Tenant(NAME, "torch", 0, 0, 1.0, 0.5)


@dataclass(slots=True)
class PyTorch:
    """The program, which was started early because importing takes seconds. `process` None: `why` there is none."""

    process: Popen[str] | None
    why: str = ""
    life: Life | None = None
    errors: Path | None = None
    events: queue.Queue[dict[str, Any]] = field(default_factory=queue.Queue)

    @classmethod
    @contextmanager
    def importing(cls, host: Host) -> Iterator[Self]:
        """Begins to import; ended after the block."""
        if host.simulated or not host.has("torch"):
            why = "needs a real GPU" if host.simulated else f"{host.python} has no PyTorch"
            yield cls(None, why)
            return
        errors = host.folder / "pytorch.err"
        with errors.open("w") as stderr:  # however much it warns of, it does not stop there
            process = host.start([host.python, str(PROGRAM)], SAME_ORDER, stderr=stderr)
        found = cls(process, errors=errors)
        threading.Thread(target=found.listen, daemon=True).start()
        try:
            yield found
        finally:
            host.end(process)

    def rows(self, stage: Stage, why_no_agent: str | None) -> Iterator[Row]:
        """Rows of both scenes; one row each where it cannot be had."""
        step_seconds: list[float] = []
        yield from part(ITEM, (f"{ALONE}: can be looked at",), partial(self._alone, stage, why_no_agent, step_seconds))
        yield from part(
            ITEM, (f"{BESIDE}: can be looked at",), partial(self._beside, stage, why_no_agent, step_seconds)
        )

    def listen(self) -> None:
        """Reads its lines, on a thread of its own, until it ends."""
        assert self.process is not None
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                if line.startswith("{"):
                    self.events.put(json.loads(line))
        except ValueError:  # closed from outside, or cut off: it ended
            pass
        self.events.put({"event": "ended"})

    def ask(self, words: str) -> None:
        """Has it do something, in its container."""
        assert self.process is not None
        assert self.process.stdin is not None
        print(words, file=self.process.stdin, flush=True)

    def until(self, event: str, seconds: float, no_gpu: str = "") -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Its line about that event, and those before.

        RuntimeError when it ends or takes too long, Unavailable with `no_gpu` when it has none.
        """
        before: list[dict[str, Any]] = []
        deadline = time.monotonic() + seconds
        while True:
            try:
                found = self.events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(f"PyTorch: no {event} in {seconds:g} s") from None
            if found["event"] == "no GPU":
                raise Unavailable(no_gpu)
            if found["event"] == "ended":
                raise RuntimeError(f"PyTorch ended: {self._last_words()}")
            if found["event"] == event:
                return found, before
            before.append(found)

    def _open(self, stage: Stage) -> None:
        """In a container of its own from before its first use of the GPU."""
        if self.process is None:
            raise Unavailable(self.why)
        if self.life is not None:
            return
        imported, _ = self.until("imported", _IMPORT_SECONDS)
        name = NAME if stage.cgroups is None else stage.cgroups.adopt(self.process.pid)
        self.ask("open")
        self.until("opened", _OPEN_SECONDS, f"PyTorch {imported['version']} finds no GPU")
        self.life = Life(NAME, name, self.process.pid, time.monotonic_ns())

    def _alone(self, stage: Stage, why_no_agent: str | None, step_seconds: list[float]) -> Iterator[Row]:
        self._open(stage)
        assert self.life is not None
        self.ask(f"run {_LEARN_SECONDS}")
        self.until("ran", _LEARN_SECONDS + _EXTRA_SECONDS)
        before = stage.recorder.snapshots.after(time.monotonic_ns() + _LATE_NS)
        self.ask(f"profile {_PROFILE_SECONDS}")
        profile, _ = self.until("profiled", _PROFILE_SECONDS + _EXTRA_SECONDS)
        after = stage.recorder.snapshots.after(profile["end_ns"] + _LATE_NS)
        step_seconds.append(profile["sm_seconds"] / max(1, profile["steps"]))
        lasted = (profile["end_ns"] - profile["begin_ns"]) / 1e9
        note = "all SMs that its blocks can fill; while it was profiled"
        yield measured(ITEM, f"{ALONE}: SM time by CUPTI", profile["sm_seconds"] / lasted, "ratio", note=note)
        yield measured(ITEM, f"{ALONE}: time with a kernel by CUPTI", profile["busy_seconds"] / lasted, "ratio")
        if why_no_agent is not None:
            raise Unavailable(why_no_agent)
        first, last = _usage(before, self.life.id), _usage(after, self.life.id)
        if first is None or last is None:
            raise RuntimeError("the agent knows nothing of its container")
        meanwhile = stage.recorder.snapshots.after((profile["begin_ns"] + profile["end_ns"]) // 2)
        yield from compared(first, last, profile, lasted, source(meanwhile, self.life.id))

    def _beside(self, stage: Stage, why_no_agent: str | None, step_seconds: list[float]) -> Iterator[Row]:
        self._open(stage)
        assert self.life is not None
        assert self.process is not None
        if not step_seconds:
            raise Unavailable("what a step of it takes alone is not known")
        lasts = stage.times.warm_up + stage.times.measured + _WAITING_SECONDS
        with cast(stage, BESIDE_PYTORCH) as players:
            self.ask(f"run {lasts}")
            span = window(stage)
            done = players.finish(BESIDE_PYTORCH)
            ended_ns = time.monotonic_ns()
        ran, progress = self.until("ran", lasts + _EXTRA_SECONDS)
        step_ns = step_seconds[0] * 1e9
        mine = [(int(one["at_ns"]), one["steps"] * step_ns) for one in progress if one["event"] == "progress"]
        grown = {players.working[one.name].pid: done[one.name].sm for one in BESIDE_PYTORCH}
        whole = {**done, NAME: TenantWork(0, 0, 0, mine)}
        one = played(
            stage,
            BESIDE,
            [*BESIDE_PYTORCH, _TENANT],
            whole,
            {**grown, self.process.pid: mine},
            [*players.lives, self.life],
            span,
            ended_ns,
        )
        yield from out_of.of_shares(one, stage.recorder.nvml_ended(), why_no_agent)
        note = "while the other one took turns with it"
        yield measured(ITEM, f"{BESIDE}: steps in a second", ran["steps"] / lasts, "1/s", note=note)
        if why_no_agent is None:
            yield from out_of.of_totals(one, at_the_end(stage.recorder, one), BESIDE_PYTORCH)

    def _last_words(self) -> str:
        words = "" if self.errors is None else self.errors.read_text(errors="replace").strip()
        return words[-400:] or "it says nothing"


def source(snapshot: Snapshot, container: str) -> str:
    """Whether the agent measured or estimated a container's share, and the source of the device's."""
    usage = _usage(snapshot, container)
    if usage is None:
        return "from what is not known"
    sources = (one.sm_activity_source for one in snapshot.devices if one.device.uuid == usage.device)
    return f"{usage.sm_provenance or 'not known'}, the device's by {next(sources, None) or 'nothing'}"


def compared(first: Usage, last: Usage, profile: Mapping[str, Any], lasted: float, of: str) -> Iterator[Row]:
    """The agent's totals grew by what CUPTI saw: between the two it did nothing else. `of`: its source."""
    then, now = first.totals, last.totals
    share = (now.sm_seconds - then.sm_seconds) / lasted
    true = profile["sm_seconds"] / lasted
    yield near(ITEM, f"{ALONE}: share of the device, agent", share, true, MOST_WORST, note=f"against CUPTI's; {of}")
    missed = profile["kernels"] - (now.launches - then.launches)
    note = f"{profile['kernels']} by CUPTI"
    yield holds(ITEM, f"{ALONE}: kernels that the agent missed", missed == 0, missed, 0, note)
    ways = (
        ("to", profile["to_device_bytes"], now.pcie_rx_bytes - then.pcie_rx_bytes),
        ("from", profile["from_device_bytes"], now.pcie_tx_bytes - then.pcie_tx_bytes),
    )
    for way, true_bytes, agents in ways:
        if true_bytes:
            what = f"{ALONE}: bytes copied {way} the device, agent ÷ CUPTI"
            note = f"{true_bytes} by CUPTI"
            yield near(ITEM, what, agents / true_bytes, 1.0, _BYTES_WITHIN, note=note)
    reserved = int(profile["reserved_bytes"])
    beyond = None if last.memory_bytes is None else last.memory_bytes - reserved
    note = "context, modules, and what libraries took behind its back"
    yield measured(ITEM, f"{ALONE}: bytes by NVML beyond what its allocator holds", beyond, "bytes", note=note)
    live = on_device(last) / reserved if reserved else None
    what = f"{ALONE}: bytes by the probes ÷ what its allocator holds"
    yield near(ITEM, what, live, 1.0, _LIVE_WITHIN, note="libraries' own allocations are in the former")


def _usage(snapshot: Snapshot, container: str) -> Usage | None:
    rows = (row for row in snapshot.containers if row.container.id == container and row.usage)
    return next((row.usage[0] for row in rows), None)
