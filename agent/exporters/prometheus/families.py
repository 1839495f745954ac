# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A snapshot as rows of metrics: pure, one function per part of the catalogue.

Invariant: what is unknown is no row. A counter is known once it has moved or its rate has been read; until then 0 would
be a claim.

Label values, so that no two series are the same one and no name can grow without bound.

Containers that would share every label (two with one name in one namespace) are distinguished by `id`, the first 12
characters of the runtime's id, which is empty otherwise. They are not summed: a sum would fall when one of them ends,
and two latencies cannot be summed at all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from agent.core.clock import NS_PER_SECOND
from agent.core.model import (
    Container,
    ContainerKey,
    ContainerUsage,
    Device,
    DeviceReading,
    DeviceUuid,
    EnforcementStatus,
    PeriodicStatus,
    ProbeStatus,
    Provenance,
    Snapshot,
    Totals,
    Unattributed,
    Usage,
)
from agent.core.text import printable

LONGEST: Final = 200  # characters; runtimes allow more than can be read
SHORT_ID: Final = 12
THROUGH_A_PROCESS: Final = re.compile(r"^/proc/\d+/(root(?=/)|map_files/[^/]*)")
Labels = tuple[str, ...]


def container_labels(containers: Iterable[Container]) -> dict[ContainerKey, Labels]:
    """Values of catalog.CONTAINER for each container; distinct for distinct keys."""
    known = {container.key: container for container in containers}
    plain = {key: _plain(container) for key, container in known.items()}
    shared = Counter(plain.values())
    short = {key: container.id[:SHORT_ID] if shared[plain[key]] > 1 else "" for key, container in known.items()}
    labels = {key: (*plain[key], short[key]) for key in known}
    taken = Counter(labels.values())
    return {key: value if taken[value] == 1 else (*plain[key], text(key)) for key, value in labels.items()}


def device_labels(device: Device) -> Labels:
    """Values of catalog.DEVICE."""
    return str(device.index), device.uuid, device.pci_bus_id


def library_path(path: str) -> str:
    """The path as its container sees it: the pid through which the agent reaches it would be a new series each time."""
    return text(THROUGH_A_PROCESS.sub("", path))


def text(value: str | None) -> str:
    """A label value: bounded, and fit for a terminal."""
    return printable(value or "")[:LONGEST]


def _plain(container: Container) -> Labels:
    return tuple(map(text, (container.name, container.pod, container.namespace, container.runtime)))


Row = tuple[str, Labels, float]
Candidate = tuple[str, Labels, float | None]
PREFIX: Final = "gpuwarden_"
HEALTH_STATES: Final = ("init", "healthy", "unhealthy", "overlimit", "disabled")


def rows(snapshot: Snapshot) -> Iterator[Row]:
    """(metric name, label values in the catalogue's order, value) of everything known."""
    for name, labels, value in _all(snapshot):
        if value is not None:
            yield PREFIX + name, labels, value


def _all(snapshot: Snapshot) -> Iterator[Candidate]:
    devices = {reading.device.uuid: device_labels(reading.device) for reading in snapshot.devices}
    usages = (*snapshot.containers, *snapshot.ended)
    containers = container_labels(used.container for used in (*usages, *snapshot.held))
    for container, usage in _known_uses(usages, devices):
        yield from _usage(usage, containers[container] + devices[usage.device])
    for key, device, unprobed in _unprobed(snapshot.containers, devices):
        yield "container_unprobed", containers[key] + devices[device], unprobed
    for container, usage in _known_uses(snapshot.held, devices):
        yield "device_held_info", containers[container] + devices[usage.device], 1
    for rest in snapshot.unattributed:
        if rest.device in devices:
            yield from _unattributed(rest, devices[rest.device])
    for reading in snapshot.devices:
        yield from _device(reading, devices[reading.device.uuid])
        yield from _device_totals(
            reading, snapshot.device_totals.get(reading.device.uuid), devices[reading.device.uuid]
        )
    yield from _health(snapshot, devices)
    yield from _online(snapshot, devices)
    for key, enforcement in snapshot.enforcement.items():
        if key in containers:
            yield from _enforcement(enforcement, containers[key])
    yield from _losses(snapshot, containers)
    yield from _agent(snapshot)


def _losses(snapshot: Snapshot, containers: Mapping[ContainerKey, Labels]) -> Iterator[Candidate]:
    """Of a container in no row, as NVML lists none of its processes, by its key: it may be the one that floods."""
    for key, losses in snapshot.container_losses.items():
        labels = containers.get(key, (text(key), "", "", "", ""))
        for reason, count in losses.items():
            yield "container_losses_total", (*labels, text(reason)), count


def _known_uses(
    containers: Iterable[ContainerUsage], devices: Mapping[DeviceUuid, Labels]
) -> Iterator[tuple[ContainerKey, Usage]]:
    for used in containers:
        yield from ((used.container.key, usage) for usage in used.usage if usage.device in devices)


def _unprobed(
    containers: Iterable[ContainerUsage], devices: Mapping[DeviceUuid, Labels]
) -> Iterator[tuple[ContainerKey, DeviceUuid, bool]]:
    for used in containers:
        yield from ((used.container.key, device, is_so) for device, is_so in used.unprobed.items() if device in devices)


def _usage(usage: Usage, labels: Labels) -> Iterator[Candidate]:
    totals = usage.totals
    estimated = None if usage.sm_provenance is None else usage.sm_provenance is Provenance.ESTIMATED
    yield "container_sm_ratio", labels, usage.sm_ratio
    yield "container_sm_estimated", labels, estimated
    yield "container_sm_error_ratio", labels, usage.sm_error_ratio
    yield "container_memory_bytes", labels, usage.memory_bytes
    yield "container_memory_peak_bytes", labels, usage.memory_peak_bytes
    for kind, size in usage.memory_by_kind.items():
        yield "container_allocated_bytes", (*labels, text(kind)), size
    for age, size in usage.memory_by_age.items():
        yield "container_allocated_by_age_bytes", (*labels, text(age)), size
    yield "container_launches_total", labels, _counter(totals.launches, usage.launches_per_second)
    yield from _flows("container", labels, totals, usage)
    copies = usage.pcie_tx_bytes_per_second  # unknown where no probe counts copies
    yield "container_peer_transmit_bytes_total", labels, _counter(totals.peer_tx_bytes, copies)
    yield "container_peer_receive_bytes_total", labels, _counter(totals.peer_rx_bytes, copies)


def _unattributed(rest: Unattributed, labels: Labels) -> Iterator[Candidate]:
    yield "unattributed_sm_ratio", labels, rest.sm_ratio
    yield "unattributed_memory_bytes", labels, rest.memory_bytes
    yield from _flows("unattributed", labels, rest.totals, rest)
    yield "device_excess_memory_bytes", labels, rest.memory_excess_bytes
    yield "device_excess_pcie_transmit_bytes_per_second", labels, rest.pcie_tx_excess_bytes_per_second
    yield "device_excess_pcie_receive_bytes_per_second", labels, rest.pcie_rx_excess_bytes_per_second


def _flows(owner: str, labels: Labels, totals: Totals, rate: Usage | Unattributed) -> Iterator[Candidate]:
    yield f"{owner}_sm_seconds_total", labels, _counter(totals.sm_seconds, rate.sm_ratio)
    tx, rx = rate.pcie_tx_bytes_per_second, rate.pcie_rx_bytes_per_second
    yield f"{owner}_pcie_transmit_bytes_total", labels, _counter(totals.pcie_tx_bytes, tx)
    yield f"{owner}_pcie_receive_bytes_total", labels, _counter(totals.pcie_rx_bytes, rx)


def _device(reading: DeviceReading, labels: Labels) -> Iterator[Candidate]:
    device: Device = reading.device
    yield "device_info", (*labels, text(device.name), text(device.parent), text(device.mig_profile)), 1
    yield "device_lost", labels, reading.lost
    yield "device_sms", labels, device.sm_count
    yield "device_sm_ratio", (*labels, text(reading.sm_activity_source)), reading.sm_activity_ratio
    yield "device_memory_size_bytes", labels, device.memory_total_bytes
    yield "device_memory_used_bytes", labels, reading.memory_used_bytes
    yield "device_memory_reserved_bytes", labels, reading.memory_reserved_bytes
    yield "device_pcie_link_bytes_per_second", labels, device.pcie_bytes_per_second
    yield "device_dram_activity_ratio", labels, reading.dram_activity_ratio
    yield "device_sm_clock_hertz", labels, reading.sm_clock_hertz
    yield "device_power_watts", labels, reading.power_watts
    yield "device_power_limit_watts", labels, reading.power_limit_watts
    yield "device_temperature_celsius", labels, reading.temperature_celsius
    for xid, count in reading.xid_counts.items():
        yield "device_xids_total", (*labels, str(xid)), count
    for xid, at_ns in reading.xid_last_seen_wall_ns.items():
        yield "device_xid_last_seen_timestamp_seconds", (*labels, str(xid)), at_ns / NS_PER_SECOND


def _health(snapshot: Snapshot, devices: Mapping[DeviceUuid, Labels]) -> Iterator[Candidate]:
    for uuid, health in snapshot.health.items():
        for state in HEALTH_STATES if uuid in devices else ():
            yield "device_health", (*devices[uuid], state), health.state == state


def _online(snapshot: Snapshot, devices: Mapping[DeviceUuid, Labels]) -> Iterator[Candidate]:
    for uuid, use in snapshot.online.items():
        if uuid in devices:
            yield "device_online_busy_seconds_total", devices[uuid], use.busy_seconds_total
            yield "device_online_gaps_total", devices[uuid], use.gaps_total


def _device_totals(reading: DeviceReading, totals: Totals | None, labels: Labels) -> Iterator[Candidate]:
    if totals is None:
        return
    tx, rx = reading.pcie_tx_bytes_per_second, reading.pcie_rx_bytes_per_second
    yield "device_sm_seconds_total", labels, _counter(totals.sm_seconds, reading.sm_activity_ratio)
    yield "device_pcie_transmit_bytes_total", labels, _counter(totals.pcie_tx_bytes, tx)
    yield "device_pcie_receive_bytes_total", labels, _counter(totals.pcie_rx_bytes, rx)


def _enforcement(enforcement: EnforcementStatus, labels: Labels) -> Iterator[Candidate]:
    yield "container_role_info", (*labels, text(enforcement.role), text(enforcement.rule)), 1
    yield "container_slo_latency_seconds", labels, enforcement.latency_seconds
    yield "container_slo_target_seconds", labels, enforcement.target_seconds
    yield "container_slo_quantile_ratio", labels, enforcement.latency_quantile
    yield "container_slo_also_latency_seconds", labels, enforcement.also_latency_seconds
    yield "container_slo_also_target_seconds", labels, enforcement.also_target_seconds
    yield "container_slo_also_quantile_ratio", labels, enforcement.also_quantile
    yield "container_slo_requests_total", labels, enforcement.requests_total
    yield "container_slo_slow_requests_total", labels, enforcement.slow_requests_total
    yield from _http(enforcement.http, labels)
    yield from _periodic(enforcement.periodic, labels)
    yield "container_share_ratio", labels, enforcement.share_ratio
    yield "container_paused_ratio", labels, enforcement.paused_ratio
    for rung in enforcement.rungs:
        yield "container_rung", (*labels, text(rung)), 1
    for rung in enforcement.troubles:
        yield "container_rung_trouble", (*labels, text(rung)), 1
    if enforcement.role in ("offline", "periodic"):  # no other is paused: a counter that cannot move says nothing
        yield "container_pauses_total", labels, enforcement.pauses_total
        yield "container_pcie_pauses_total", labels, enforcement.copy_pauses_total
        yield "container_pcie_paused_seconds_total", labels, enforcement.copy_paused_seconds_total
        yield "container_foreign_resumes_total", labels, enforcement.foreign_resumes_total
        yield "container_paused_seconds_total", labels, enforcement.paused_seconds_total
    if enforcement.role == "offline":
        yield "container_launch_gpu_seconds", labels, enforcement.launch_gpu_seconds
        yield "container_memory_quota_bytes", labels, enforcement.memory_quota_bytes
        yield "container_allocations_denied_total", labels, enforcement.allocations_denied_total
        yield "container_allocations_held_total", labels, enforcement.allocations_held_total


def _periodic(periodic: PeriodicStatus | None, labels: Labels) -> Iterator[Candidate]:
    if periodic is not None:
        yield "container_deadline_seconds", labels, periodic.deadline_seconds
        yield "container_deadline_requests_total", labels, periodic.requests_total
        yield "container_deadline_misses_total", labels, periodic.misses_total
        yield "container_deadline_worst_lateness_seconds", labels, periodic.worst_lateness_seconds
        yield "container_deadline_request_seconds", labels, periodic.request_gpu_seconds
        yield "container_deadline_load_ratio", labels, periodic.load_ratio


def _http(http: Mapping[str, int], labels: Labels) -> Iterator[Candidate]:
    for name, count in http.items():
        kind, _, what = name.partition(":")
        if kind == "status":
            yield "container_http_answers_total", (*labels, text(what)), count
        elif kind == "ns":
            yield "container_http_seconds_total", (*labels, text(what)), count / NS_PER_SECOND
        elif kind == "lost":
            yield "container_http_lost_total", (*labels, text(what)), count


def _agent(snapshot: Snapshot) -> Iterator[Candidate]:
    yield "enforcing", (), snapshot.enforcing
    yield from _policy(snapshot)
    yield "snapshot_timestamp_seconds", (), snapshot.wall_ns / NS_PER_SECOND
    yield "snapshot_interval_seconds", (), snapshot.interval_ns / NS_PER_SECOND
    yield "tick_duration_seconds", (), snapshot.tick_seconds
    yield "decision_duration_seconds", (), snapshot.decision_seconds
    for health in snapshot.collectors:
        yield "collector_success", (text(health.name),), health.error is None
        yield "collector_duration_seconds", (text(health.name),), health.duration_seconds
    for probe in snapshot.probes:
        yield from _probe(probe, library_path(probe.library))
    yield "return_probes", (), snapshot.return_probes_off is None
    for symbol, count in snapshot.probe_calls.items():
        yield "probe_calls_total", (text(symbol),), count
    for call, count in snapshot.nvml_errors.items():
        name, _, error = call.partition(":")
        yield "nvml_errors_total", (text(name), text(error)), count
    for failed, count in snapshot.signal_failures.items():
        rule, signal, reason = failed.split(":", 2)
        yield "signal_failures_total", (text(rule), text(signal), text(reason)), count
    for left, count in snapshot.left_rules.items():
        rule, _, reason = left.rpartition(":")
        yield "container_left_rule_total", (text(rule), text(reason)), count
    for lookup, count in snapshot.name_lookups.items():
        name, _, outcome = lookup.partition(":")
        yield "name_lookups_total", (text(name), text(outcome)), count
    for source, count in snapshot.lost.items():
        name, _, reason = source.partition(":")
        yield "events_lost_total", (text(name), text(reason)), count


def _policy(snapshot: Snapshot) -> Iterator[Candidate]:
    read_at = snapshot.policy_wall_ns
    if read_at is not None or snapshot.policy_error is not None:  # else no file was ever read
        yield "policy_reload_success", (), snapshot.policy_error is None
    yield "policy_reload_timestamp_seconds", (), None if read_at is None else read_at / NS_PER_SECOND


def _probe(probe: ProbeStatus, library: str) -> Iterator[Candidate]:
    for role, counts in probe.roles.items():
        for state in ("attached", "absent", "failed", "off"):
            yield "probe_symbols", (library, text(role), state), getattr(counts, state)
    for symbol, reason in probe.failures.items():
        yield "probe_failure_info", (library, text(symbol), text(reason)), 1
    yield "probe_unknown_exports", (library,), len(probe.unknown_versions)


def _counter(total: float, rate: float | None) -> float | None:
    return None if rate is None and not total else total
