# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What NVML says of loads of which everything is known, who is in which list, what MPS changes, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from conformance import process_tree
from conformance.clients import workload
from conformance.clients.workload import Pace
from conformance.host import Host
from conformance.report.model import Row, holds, measured, part, skipped

if TYPE_CHECKING:
    from conformance.checks.nvml.binding import Gpu
    from conformance.checks.nvml.watching import Times

TITLE: Final = "NVML: utilisation, process lists, MPS, GPM, PCIe counters, and what each call costs"
SECONDS: Final = 60
LEAST_SECONDS: Final = 40
WHAT: Final = (
    "GPM: supported",
    "XID: an event set takes the device",
    "XID: types of events that the device has",
    "accounting mode",
    "{old or new} call: answers",
    "{old or new} call: names the process",
    "{old call, new call, or of the device}: samples come every",
    "{old call, new call, or of the device}: age of a sample when it is first seen",
    "old and new call: largest difference between their means",
    "smUtil of a load of {25, 50, 100} %, {old or new} call",
    "device utilisation with a load of {25, 50, 100} %, nvmlDeviceGetSamples",
    "GPM SM_UTIL with a load of {25, 50, 100} %",
    "GPM GRAPHICS_UTIL with a load of {25, 50, 100} %",
    "smUtil, kernels on half of the SMs",
    "GPM SM_UTIL, kernels on half of the SMs",
    "GPM GRAPHICS_UTIL, kernels on half of the SMs",
    "GPM SM_OCCUPANCY, kernels on half of the SMs",
    "lists: a process without MPS is in",
    "lists: bytes of a process beyond what it allocated",
    "lists: growth of the device's used bytes beyond those of the process",
    "accounting: {GPU utilisation, peak bytes, time} of a process",
    "MPS: clients are in the list",
    "MPS: clients that the agent takes for such",
    "MPS: the server is in the list",
    "MPS: name of the server's program",
    "MPS: smUtil goes to",
    "MPS: smUtil of the client {name}",
    "MPS: bytes of a client beyond what it allocated",
    "MPS: GPM SM_UTIL, two clients on half of the SMs each",
    "PCIe to the device: field 198 ÷ copied",
    "PCIe to the device: GPM 21 ÷ copied",
    "PCIe from the device: field 197 ÷ copied",
    "PCIe from the device: GPM 20 ÷ copied",
    "PCIe {to or from} the device: nvmlDeviceGetPcieThroughput ÷ copied",
    "PCIe {to or from} the device: the other direction's field ÷ copied",
    "PCIe {to or from} the device: field {197 or 198} is cumulative",
    "cost of {source of PCIe bytes}",
    "agent: cost of a tick",
    "agent: cost of {call}",
    "agent: calls that NVML refuses",
    "agent: SM activity of the device",
)
_NVML: Final = "nvml"
_MEMORY: Final = 1 << 30
_MPS_MEMORY: Final = 1 << 28


def rows(host: Host) -> Iterator[Row]:
    """Unavailable without NVML, its binding or a GPU; WorkloadError when our kernels do not run."""
    from conformance.checks.nvml.binding import first_gpu

    with first_gpu(host) as gpu:
        yield from part(_NVML, ("what is supported",), partial(_supported, gpu))
        pace = workload.pace_of(host, gpu.sm_count, 0.5 if host.quick else 2.2)
        for percent in (50,) if host.quick else (50, 25, 100):
            yield from part(_NVML, (f"a load of {percent} %",), partial(_duty, host, gpu, pace, percent))
        yield from part(_NVML, ("kernels on half of the SMs, and costs",), partial(_half, host, gpu, pace))
        yield from part(_NVML, ("MPS",), partial(_mps, host, gpu, pace))
        for direction in ("to the device", "from the device"):
            yield from part(_NVML, (f"PCIe {direction}",), partial(_copies, host, gpu, pace, direction))


def _supported(gpu: Gpu) -> Iterator[Row]:
    from conformance.checks.nvml import gpm
    from conformance.checks.nvml.binding import Refused, asked

    answer = gpm.supported(gpu)
    why = answer.why if isinstance(answer, Refused) else "Hopper and later"
    yield holds(_NVML, "GPM: supported", answer is True, answer is True, True, why)
    registered = asked(gpu.api, partial(_register, gpu))
    why = registered.why if isinstance(registered, Refused) else "nvmlEventTypeXidCriticalError"
    yield holds(_NVML, "XID: an event set takes the device", registered is None, registered is None, True, why)
    types = asked(gpu.api, lambda: gpu.api.nvmlDeviceGetSupportedEventTypes(gpu.handle))
    if isinstance(types, Refused):
        yield skipped(_NVML, "XID: types of events that the device has", types.why)
    else:
        xid = bool(types & gpu.api.nvmlEventTypeXidCriticalError)
        yield holds(_NVML, "XID: types of events that the device has", xid, hex(types), note="critical XIDs are 0x8")
    mode = asked(gpu.api, lambda: gpu.api.nvmlDeviceGetAccountingMode(gpu.handle))
    if isinstance(mode, Refused):
        yield skipped(_NVML, "accounting mode", mode.why)
    else:
        yield measured(_NVML, "accounting mode", "on" if mode else "off", note="left as it is: to switch it needs root")


def _register(gpu: Gpu) -> None:
    events = gpu.api.nvmlEventSetCreate()
    try:
        gpu.api.nvmlDeviceRegisterEvents(gpu.handle, gpu.api.nvmlEventTypeXidCriticalError, events)
    finally:
        gpu.api.nvmlEventSetFree(events)


def _duty(host: Host, gpu: Gpu, pace: Pace, percent: int) -> Iterator[Row]:
    from conformance.checks.nvml import rows as rows_of_lists
    from conformance.checks.nvml import rows as rows_of_samples
    from conformance.checks.nvml.watching import Load, watch

    load = Load(f"busy-{percent}", percent / 100, memory=str(_MEMORY))
    seen = watch(host, gpu, pace, [load], _times(host))
    yield from rows_of_samples.of_a_duty(seen, percent)
    if percent == 50:
        yield from rows_of_samples.of_the_calls(seen)
        yield from rows_of_lists.of_the_lists(seen, _MEMORY)
        yield from _accounting(gpu, seen.pids[load.name], seen.busy[load.name])


def _accounting(gpu: Gpu, pid: int, busy: float) -> Iterator[Row]:
    """Of a process that ended. Only where accounting is switched on."""
    from conformance.checks.nvml.binding import Refused, asked

    what = "accounting: GPU utilisation of a process"
    mode = asked(gpu.api, lambda: gpu.api.nvmlDeviceGetAccountingMode(gpu.handle))
    if isinstance(mode, Refused) or not mode:
        why = mode.why if isinstance(mode, Refused) else "accounting mode is off, and stays so"
        yield skipped(_NVML, what, why)
        return
    stats = asked(gpu.api, lambda: gpu.api.nvmlDeviceGetAccountingStats(gpu.handle, pid))
    if isinstance(stats, Refused):
        yield skipped(_NVML, what, stats.why)
        return
    yield measured(_NVML, what, stats.gpuUtilization / 100, "ratio", round(busy, 4), "over its whole life")
    yield measured(_NVML, "accounting: peak bytes of a process", stats.maxMemoryUsage, "bytes", _MEMORY)
    yield measured(_NVML, "accounting: time of a process", int(stats.time), "ms", note="from its start to its end")


def _half(host: Host, gpu: Gpu, pace: Pace) -> Iterator[Row]:
    """And what calls cost meanwhile: an idle device may answer faster."""
    from conformance.checks.nvml import cost, pcie
    from conformance.checks.nvml import rows as rows_of_costs
    from conformance.checks.nvml import rows as rows_of_samples
    from conformance.checks.nvml.watching import Load, watch

    ticks, interval = (3, 0.15) if host.quick else (8, 0.3)
    spent: list[cost.Cost] = []
    sources: dict[str, Any] = {}

    def afterwards() -> None:
        spent.append(cost.measure(gpu.api, ticks, interval))
        sources.update(pcie.costs(gpu))

    seen = watch(host, gpu, pace, [Load("half", 1.0, sms=0.5)], _times(host), afterwards=afterwards)
    yield from rows_of_samples.of_half_the_sms(seen)
    yield from rows_of_costs.of_cost(spent[0], seen.busy["half"] / 2)
    yield from rows_of_costs.of_sources(sources)


def _mps(host: Host, gpu: Gpu, pace: Pace) -> Iterator[Row]:
    from conformance.checks.nvml import rows as rows_of_lists
    from conformance.checks.nvml.watching import Load, watch

    loads = [Load(f"busy-{p}-mps", p / 100, sms=0.5, memory=str(_MPS_MEMORY)) for p in (25, 75)]
    with host.mps() as clients:
        seen = watch(host, gpu, pace, loads, _times(host), clients)
        yield from rows_of_lists.of_mps(seen, _MPS_MEMORY)
        yield _server(host, clients)


def _server(host: Host, clients: Mapping[str, str]) -> Row:
    """The agent knows the MPS server by its name."""
    from conformance.checks.nvml.lists import MPS_SERVER, program_of

    what = "MPS: name of the server's program"
    if host.simulated:
        return skipped(_NVML, what, "the simulated GPU starts it, so it has no such folder in its environment")
    pipes = f"CUDA_MPS_PIPE_DIRECTORY={clients['CUDA_MPS_PIPE_DIRECTORY']}"
    names = {program_of(process.pid).rpartition("/")[2] for process in process_tree.with_variable(pipes)}
    servers = sorted(name for name in names if "mps" in name and "control" not in name)
    note = "the agent takes a process of that name for the server"
    return holds(_NVML, what, servers == [MPS_SERVER], " / ".join(servers) or "none", MPS_SERVER, note)


def _copies(host: Host, gpu: Gpu, pace: Pace, direction: str) -> Iterator[Row]:
    from conformance.checks.nvml import pcie
    from conformance.checks.nvml import rows as rows_of_costs

    settle, seconds = (0.1, 0.4) if host.quick else (0.5, 1.5)
    yield from rows_of_costs.of_copies(pcie.copied(host, gpu, pace, direction, settle, seconds))


def _times(host: Host) -> Times:
    """NVML's samples come about once a second; the first one may speak of the time before."""
    from conformance.checks.nvml.watching import Times

    return Times(0.9, 1.2) if host.quick else Times(1.1, 2.5)
