# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows out of the process lists, without and with MPS, and out of who is credited with what under MPS. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpu.nvml import gpm
from gpu.nvml.lists import bytes_of, lists_of
from gpu.nvml.rows_of_samples import NVML, gpm_near
from gpu.nvml.samples import NEW, OLD
from gpu.nvml.watching import Seen
from gpu.parts import holds, measured
from gpu.row import Row, skipped

_MIB: Final = 1 << 20
SIMULATED_CONTEXT_BYTES: Final = 300 * _MIB


def of_the_lists(seen: Seen, allocated_bytes: int) -> Iterator[Row]:
    """Which list has a process without MPS, and with how many bytes."""
    (pid,) = seen.pids.values()
    where = lists_of(seen.listed, pid)
    yield holds(NVML, "lists: a process without MPS is in", where == "compute", where, "compute", _strangers(seen))
    used = bytes_of(seen.listed, pid)
    beyond = None if used is None else used - allocated_bytes
    yield measured(
        NVML,
        "lists: bytes of a process beyond what it allocated",
        beyond,
        "bytes",
        SIMULATED_CONTEXT_BYTES,
        "the context and the module; the baseline is the simulated GPU's",
    )
    what = "lists: growth of the device's used bytes beyond those of the process"
    if used is None or seen.used_bytes is None or seen.used_before_bytes is None:
        yield skipped(NVML, what, "NVML does not say")
    else:
        note = "in the agent's figures these bytes are nobody's"
        yield measured(NVML, what, seen.used_bytes - seen.used_before_bytes - used, "bytes", 0, note)


def of_mps(seen: Seen, allocated_bytes: int) -> Iterator[Row]:
    """Two clients, each on half of the SMs."""
    where = {lists_of(seen.listed, pid) for pid in seen.pids.values()}
    told = " / ".join(sorted(where))
    yield holds(NVML, "MPS: clients are in the list", where == {"MPS compute"}, told, "MPS compute")
    known = seen.mps_clients & set(seen.pids.values())
    yield holds(
        NVML, "MPS: clients that the agent takes for such", len(known) == len(seen.pids), len(known), len(seen.pids)
    )
    listed = " / ".join(sorted({lists_of(seen.listed, pid) for pid in seen.mps_servers})) or "none"
    yield measured(NVML, "MPS: the server is in the list", listed, note=_strangers(seen))
    credited = _credited(seen)
    yield holds(
        NVML,
        "MPS: smUtil goes to",
        credited != "nobody",
        credited,
        "clients",
        "the agent is ready for both: a server's share is given to nobody, and its clients' then comes from the probes",
    )
    for name, pid in seen.pids.items():
        call = NEW if seen.samples[NEW].found else OLD
        ratio = seen.samples[call].mean_ratio(pid, seen.ready_us)
        note = seen.samples[call].refused or "on half of the SMs; baseline: its share of the time by its own count"
        yield measured(NVML, f"MPS: smUtil of the client {name}", ratio, "ratio", round(seen.busy[name], 4), note)
    used = [bytes_of(seen.listed, pid) for pid in seen.pids.values()]
    beyond = [one - allocated_bytes for one in used if one is not None]
    yield measured(
        NVML,
        "MPS: bytes of a client beyond what it allocated",
        max(beyond, default=None),
        "bytes",
        SIMULATED_CONTEXT_BYTES,
        "the larger one; the baseline is the simulated GPU's",
    )
    truth = sum(seen.busy.values()) / 2 if seen.sm_truth is None else seen.sm_truth
    yield gpm_near("MPS: GPM SM_UTIL, two clients on half of the SMs each", seen.gpm, gpm.SM_UTIL, truth)


def _credited(seen: Seen) -> str:
    pids = seen.samples[NEW].pids() | seen.samples[OLD].pids()
    who = [
        name
        for name, those in (
            ("clients", pids & set(seen.pids.values())),
            ("server", pids & seen.mps_servers),
        )
        if those
    ]
    return " and ".join(who) or "nobody"


def _strangers(seen: Seen) -> str:
    others = [entry for entry in seen.listed if entry.pid not in seen.pids.values()]
    return f"others on the device: {', '.join(f'{e.pid} ({e.list})' for e in others) or 'nobody'}"
