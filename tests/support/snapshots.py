# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A made-up snapshot that has one of everything: the awkward cases are in it, not only the pretty ones."""

from __future__ import annotations

from agent.core.model import (
    CollectorHealth,
    Container,
    ContainerKey,
    ContainerUsage,
    Device,
    DeviceHealth,
    DeviceReading,
    DeviceUuid,
    EnforcementStatus,
    FunctionUsage,
    OnlineUse,
    PeriodicStatus,
    ProbeCounts,
    ProbeStatus,
    Process,
    ProcessId,
    ProcessUsage,
    Provenance,
    Snapshot,
    Totals,
    Unattributed,
    Usage,
)

GIB, MIB = 1 << 30, 1 << 20
GPU_0, GPU_1, GPU_2 = (DeviceUuid(f"GPU-0000000{n}-aaaa-bbbb-cccc-dddddddddddd") for n in range(3))
NASTY = "\x1b[31mevil[/][bold]\x07\u202egnp.exe\n"


def device(index: int, uuid: DeviceUuid) -> Device:
    bus_id, link = f"00000000:{index + 1:02X}:00.0", 63_014_400_000
    return Device(index, uuid, "NVIDIA H200", bus_id, 132, 141 * GIB, pcie_bytes_per_second=link)


def container(key: str, name: str, **more: str) -> Container:
    return Container(ContainerKey(key), name, more.pop("runtime", "containerd"), id=key.ljust(64, "0"), **more)  # type: ignore[arg-type]


def usage(
    uuid: DeviceUuid, ratio: float | None, memory: int | None, estimated: bool = True, rate: float | None = 1e6
) -> Usage:
    return Usage(
        device=uuid,
        sm_ratio=ratio,
        sm_provenance=None if ratio is None else Provenance.ESTIMATED if estimated else Provenance.MEASURED,
        memory_bytes=memory,
        pcie_tx_bytes_per_second=rate,
        pcie_rx_bytes_per_second=None if rate is None else rate * 40,
        launches_per_second=None if rate is None else 12_345.0,
        totals=Totals() if rate is None else Totals(12.5, 123_450, 10_000_000, 400_000_000, 5_000_000, 6_000_000),
        sm_error_ratio=None if ratio is None else 0.02 if estimated else 0.0,
        memory_peak_bytes=None if memory is None else memory + MIB,
        memory_by_kind={} if memory is None else {"plain": memory // 2, "pinned": MIB},
        memory_by_age={} if memory is None else {"under_60_seconds": MIB, "older": memory // 2 - MIB},
    )


def readings() -> tuple[DeviceReading, ...]:
    return (
        DeviceReading(
            device(0, GPU_0),
            sm_activity_ratio=0.83,
            sm_activity_source="gpm",
            memory_used_bytes=97 * GIB,
            memory_reserved_bytes=GIB // 2,
            pcie_tx_bytes_per_second=2.5e6,
            pcie_rx_bytes_per_second=1.2e9,
            dram_activity_ratio=0.37,
            sm_clock_hertz=1.98e9,
            power_watts=512.3,
            power_limit_watts=700.0,
            temperature_celsius=61.0,
            xid_counts={31: 2, 79: 1},
            xid_last_seen_wall_ns={31: 1_795_000_000_000_000_000, 79: 1_795_000_001_500_000_000},
        ),
        DeviceReading(
            device(1, GPU_1), sm_activity_ratio=0.04, sm_activity_source="utilization", memory_used_bytes=3 * GIB
        ),
        DeviceReading(device(2, GPU_2), lost=True),
    )


def containers() -> tuple[ContainerUsage, ...]:
    chat = container("c1", "chat", pod="chat-7c9d", namespace="serving")
    training = container("c2", "trainer", pod="train-0", namespace="batch")
    twin_a, twin_b = container("c3", "twin", runtime="docker"), container("d4", "twin", runtime="docker")
    nasty = container("c5", NASTY, runtime="podman")
    unknown = Container(ContainerKey("host"), "host", "host")
    return (
        ContainerUsage(chat, (usage(GPU_0, 0.31, 40 * GIB), usage(GPU_1, 0.04, 2 * GIB)), (ProcessId(100, 1),)),
        ContainerUsage(
            training,
            (usage(GPU_0, 0.48, 50 * GIB),),
            (ProcessId(200, 2), ProcessId(201, 2)),
            (FunctionUsage("gemm", GPU_0, 900.0, 0.4, 0.00052), FunctionUsage("", GPU_0, 10.0, None, None, True)),
        ),
        ContainerUsage(
            twin_a, (usage(GPU_0, 0.01, GIB, estimated=False),), (ProcessId(300, 3),), unprobed={GPU_0: True}
        ),
        ContainerUsage(twin_b, (usage(GPU_0, 0.02, GIB),), (ProcessId(400, 4),), unprobed={GPU_0: False}),
        ContainerUsage(nasty, (usage(GPU_0, None, 123_456, rate=None),), (ProcessId(500, 5),)),
        ContainerUsage(unknown, (usage(GPU_1, None, None, rate=None),), ()),
    )


def processes() -> tuple[ProcessUsage, ...]:
    def process(tgid: int, ticks: int, command: str, key: str) -> Process:
        return Process(ProcessId(tgid, ticks), command, "root", ContainerKey(key))

    return (
        ProcessUsage(process(100, 1, "vllm serve", "c1"), (usage(GPU_0, 0.31, 40 * GIB), usage(GPU_1, 0.04, 2 * GIB))),
        ProcessUsage(process(200, 2, "python train.py", "c2"), (usage(GPU_0, 0.28, 30 * GIB),)),
        ProcessUsage(process(201, 2, "python train.py", "c2"), (usage(GPU_0, 0.20, 20 * GIB),)),
        ProcessUsage(process(500, 5, NASTY, "c5"), (usage(GPU_0, None, 123_456, rate=None),)),
    )


def probed(
    library: str, attached: int, unknown: tuple[str, ...] = (), failures: dict[str, str] | None = None
) -> ProbeStatus:
    failed = len(failures or {})
    roles = {"launch": ProbeCounts(attached, 3, 0), "free": ProbeCounts(0, 0, failed)}
    return ProbeStatus(library, attached, 3, failed, roles, failures or {}, unknown)


def ended() -> ContainerUsage:
    final = Usage(GPU_0, None, None, None, None, None, None, Totals(0.25, 730, 4_096, 8_192))
    return ContainerUsage(container("e6", "job-17", pod="job-17", namespace="batch"), (final,), ())


def held() -> ContainerUsage:
    holder = Container(
        ContainerKey("pod:batch/idle-0/notebook"), "notebook", "kubelet", pod="idle-0", namespace="batch"
    )
    return ContainerUsage(holder, (Usage(GPU_1, None, None, None, None, None, None),), ())


def rich_snapshot() -> Snapshot:
    return Snapshot(
        at_ns=5_000_000_000,
        wall_ns=1_795_000_002_000_000_000,
        interval_ns=1_000_000_000,
        devices=readings(),
        containers=containers(),
        processes=processes(),
        unattributed=(
            Unattributed(GPU_0, 0.01, 5 * GIB - 123_456, 0.0, 1.1e9, Totals(0.5, 0, 0, 12_000_000_000), 0, 2.5e6, 0.0),
            Unattributed(GPU_1, None, GIB, None, None),
        ),
        enforcement={
            ContainerKey("c1"): EnforcementStatus(
                "online",
                "chat",
                0.0123,
                0.99,
                0.050,
                73_000,
                511.5,
                slack_ratio=0.754,
                http={"status:2xx": 73_000, "status:4xx": 12, "ns:service": 876_000_000_000, "lost:evicted": 3},
                also_latency_seconds=0.0012,
                also_quantile=0.5,
                also_target_seconds=0.005,
                periodic=PeriodicStatus(0.04, 0.03, 90_000, 4, 0.0021, 0.0052, 0.61),  # to have each; none is both
            ),
            ContainerKey("c2"): EnforcementStatus(
                "offline",
                "training",
                share_ratio=0.62,
                paused_ratio=0.35,
                pauses_total=412,
                paused_seconds_total=9.5,
                reason="slack 75 %: growing by 2 % of the device",
                launch_gpu_seconds=0.0021,
                memory_quota_bytes=40 * GIB,
                allocations_denied_total=3,
                allocations_held_total=5,
                rungs=("mps",),
                troubles={"freeze": "another writer has frozen it: left alone"},
            ),
            ContainerKey("c5"): EnforcementStatus("unmatched"),
            ContainerKey("gone"): EnforcementStatus("offline"),
        },
        enforcing=True,
        health={
            GPU_0: DeviceHealth("disabled", "XID 79 (the GPU has fallen off the bus)", 12.5, 587.5),
            GPU_1: DeviceHealth("healthy", "within its bounds", 3600.0, 0.0),
        },
        online={GPU_0: OnlineUse(61.5, 1_230)},
        probes=(
            probed("/usr/lib/x86_64-linux-gnu/libcuda.so.1", 42, ("cuLaunchKernel_v9",)),
            probed("/proc/100/root/usr/lib/libcuda.so.1", 41, failures={"cuMemFree_v2": "Invalid argument"}),
            probed("/proc/200/root/usr/lib/libcuda.so.1", 42),
        ),
        collectors=(CollectorHealth("nvml", 0.004), CollectorHealth("launches", 0.001, "map read failed: E2BIG")),
        lost={"launches:full": 12, "events:ring_full": 0},
        container_losses={ContainerKey("c2"): {"launch_function": 49_216}},
        probe_calls={"cuLaunchKernel": 730, "cuMemAlloc_v2": 7},
        signal_failures={"chat:prometheus:timeout": 2},
        left_rules={"training:processes": 1, "training:names": 0},
        tick_seconds=0.012,
        decision_seconds=0.003,
        nvml_errors={"nvmlDeviceGetPowerUsage:not_supported": 1},
        name_lookups={"cri:found": 7, "docker:absent": 2},
        ended=(ended(),),
        held=(held(),),
        policy_error="/etc/gpuwarden/policy.yaml:12: offline[0].law: 'none-such' is unknown; write headroom",
        policy_wall_ns=1_794_999_000_000_000_000,
        device_totals={GPU_0: Totals(40.0, 0, 90_000_000, 15_000_000_000), GPU_1: Totals(2.0)},
    )
