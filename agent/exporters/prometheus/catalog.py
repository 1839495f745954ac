# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Every metric that GPU Warden exports: name, type, labels, meaning. docs/metrics.md is generated from this table.

Base units only (bytes, seconds, ratio 0–1, hertz, watts, celsius). No pid, kernel name or address is ever a label, so
the number of series is bounded by containers × devices. `gpu`, `UUID` and `pci_bus_id` are named as dcgm-exporter names
them, so that dashboards can join on them; its `modelName` is `model_name` here because promtool refuses camel case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["gauge", "counter"]

NONE: Final = ()
DEVICE: Final = ("gpu", "UUID", "pci_bus_id")
CONTAINER: Final = ("container", "pod", "namespace", "runtime", "id")
USE: Final = (*CONTAINER, *DEVICE)


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. A counter's name ends in _total."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


CATALOG: Final = (
    # What each container has of each device.
    Metric("gpuwarden_container_sm_ratio", "gauge", USE, "Share of the device's SM time that the container had."),
    Metric("gpuwarden_container_sm_estimated", "gauge", USE, "1 if the SM figures are worked out, 0 if measured."),
    Metric("gpuwarden_container_sm_error_ratio", "gauge", USE, "How far off the SM ratio may be, ±; itself estimated."),
    Metric("gpuwarden_container_sm_seconds_total", "counter", USE, "SM time in seconds of one whole device."),
    Metric("gpuwarden_container_memory_bytes", "gauge", USE, "Device memory in use."),
    Metric(
        "gpuwarden_container_memory_peak_bytes",
        "gauge",
        USE,
        "Most device memory that its processes of now had allocated at once, each for itself.",
    ),
    Metric(
        "gpuwarden_container_allocated_bytes",
        "gauge",
        (*USE, "kind"),
        "Live memory by the driver calls that made it; pinned is host memory.",
    ),
    Metric(
        "gpuwarden_container_allocated_by_age_bytes",
        "gauge",
        (*USE, "age"),
        "Live device memory by how long ago it was allocated: what leaks grows old.",
    ),
    Metric("gpuwarden_container_pcie_transmit_bytes_total", "counter", USE, "Bytes copied from device to host."),
    Metric("gpuwarden_container_pcie_receive_bytes_total", "counter", USE, "Bytes copied from host to device."),
    Metric("gpuwarden_container_launches_total", "counter", USE, "Kernels launched; a graph counts its kernel nodes."),
    # What no container is known to have caused: device minus all containers.
    Metric("gpuwarden_unattributed_sm_ratio", "gauge", DEVICE, "SM time of no known container, as a share of all."),
    Metric("gpuwarden_unattributed_sm_seconds_total", "counter", DEVICE, "SM time of no known container."),
    Metric("gpuwarden_unattributed_memory_bytes", "gauge", DEVICE, "Device memory of no known container."),
    Metric("gpuwarden_unattributed_pcie_transmit_bytes_total", "counter", DEVICE, "Other bytes from device to host."),
    Metric("gpuwarden_unattributed_pcie_receive_bytes_total", "counter", DEVICE, "Other bytes from host to device."),
    # The devices.
    Metric(
        "gpuwarden_device_info",
        "gauge",
        (*DEVICE, "model_name", "parent", "mig_profile"),
        "Always 1; names the device's model, and of a MIG instance its GPU's UUID and profile.",
    ),
    Metric(
        "gpuwarden_device_held_info",
        "gauge",
        USE,
        "Always 1; the kubelet gave the device to this container, whether it runs anything or not.",
    ),
    Metric("gpuwarden_device_lost", "gauge", DEVICE, "1 while the GPU does not answer (fallen off the bus)."),
    Metric("gpuwarden_device_sms", "gauge", DEVICE, "Streaming multiprocessors of the device."),
    Metric("gpuwarden_device_sm_ratio", "gauge", (*DEVICE, "source"), "SM activity; what it means is in the source."),
    Metric("gpuwarden_device_sm_seconds_total", "counter", DEVICE, "SM activity in seconds of the whole device."),
    Metric("gpuwarden_device_memory_size_bytes", "gauge", DEVICE, "Device memory that there is."),
    Metric("gpuwarden_device_memory_used_bytes", "gauge", DEVICE, "Device memory in use."),
    Metric("gpuwarden_device_memory_reserved_bytes", "gauge", DEVICE, "Device memory that the driver keeps."),
    Metric("gpuwarden_device_pcie_transmit_bytes_total", "counter", DEVICE, "PCIe bytes from device to host."),
    Metric("gpuwarden_device_pcie_receive_bytes_total", "counter", DEVICE, "PCIe bytes from host to device."),
    Metric("gpuwarden_device_sm_clock_hertz", "gauge", DEVICE, "Current SM clock."),
    Metric("gpuwarden_device_power_watts", "gauge", DEVICE, "Current power draw."),
    Metric("gpuwarden_device_power_limit_watts", "gauge", DEVICE, "Power limit in force."),
    Metric("gpuwarden_device_temperature_celsius", "gauge", DEVICE, "GPU temperature."),
    Metric("gpuwarden_device_xids_total", "counter", (*DEVICE, "xid"), "XID errors since the agent started."),
    Metric(
        "gpuwarden_device_xid_last_seen_timestamp_seconds",
        "gauge",
        (*DEVICE, "xid"),
        "When this XID was last seen (rate() misses the first one of a new series).",
    ),
    # Enforcement.
    Metric(
        "gpuwarden_device_health",
        "gauge",
        (*DEVICE, "state"),
        "1 for the state that the device is in (init, healthy, unhealthy, overlimit, disabled), 0 for the others.",
    ),
    Metric("gpuwarden_enforcing", "gauge", NONE, "1 if the policy is acted on, 0 if decisions are only logged."),
    Metric(
        "gpuwarden_policy_reload_success",
        "gauge",
        NONE,
        "1 if the policy file was taken when it was read last, 0 if it was refused; the snapshot and the log say why.",
    ),
    Metric("gpuwarden_policy_reload_timestamp_seconds", "gauge", NONE, "When the policy in force was read."),
    Metric("gpuwarden_container_role_info", "gauge", (*CONTAINER, "role", "rule"), "Always 1; role and matching rule."),
    Metric("gpuwarden_container_slo_latency_seconds", "gauge", CONTAINER, "Latency at the SLO's quantile."),
    Metric("gpuwarden_container_slo_target_seconds", "gauge", CONTAINER, "What that latency is to stay under."),
    Metric("gpuwarden_container_slo_quantile_ratio", "gauge", CONTAINER, "The SLO's quantile, 0–1."),
    Metric(
        "gpuwarden_container_slo_requests_total",
        "counter",
        CONTAINER,
        "Requests whose latency the SLO's signal read, since the policy was read.",
    ),
    Metric(
        "gpuwarden_container_slo_slow_requests_total",
        "counter",
        CONTAINER,
        "Those of them that took longer than the target; a bucket that the target divides counts in part.",
    ),
    Metric("gpuwarden_container_share_ratio", "gauge", CONTAINER, "Share of the device that it may use now."),
    Metric(
        "gpuwarden_container_paused_ratio",
        "gauge",
        CONTAINER,
        "Share of the last second that it was stopped: the mean over its processes on a GPU.",
    ),
    Metric(
        "gpuwarden_container_rung",
        "gauge",
        (*CONTAINER, "rung"),
        "1 while this rung of the rule's ladder, beyond gate and pace, is in force; with enforce: false, would be.",
    ),
    Metric(
        "gpuwarden_container_rung_trouble",
        "gauge",
        (*CONTAINER, "rung"),
        "1 while this rung is wanted or was passed over and cannot be done; the snapshot and the log say why.",
    ),
    Metric("gpuwarden_container_pauses_total", "counter", CONTAINER, "Times that a process of it was stopped."),
    Metric(
        "gpuwarden_container_foreign_resumes_total",
        "counter",
        CONTAINER,
        "Stops that somebody else ended with SIGCONT; whoever does that is not fought.",
    ),
    Metric(
        "gpuwarden_container_paused_seconds_total",
        "counter",
        CONTAINER,
        "Time that it was stopped: the mean over the processes that it had on a GPU meanwhile.",
    ),
    Metric("gpuwarden_container_memory_quota_bytes", "gauge", CONTAINER, "Device memory that it may hold on a device."),
    Metric(
        "gpuwarden_container_allocations_denied_total",
        "counter",
        CONTAINER,
        "Allocations that were made to return CUDA_ERROR_OUT_OF_MEMORY for want of quota or of room.",
    ),
    Metric(
        "gpuwarden_container_allocations_held_total",
        "counter",
        CONTAINER,
        "Allocations that were stopped before they ran for want of quota or of room.",
    ),
    Metric(
        "gpuwarden_signal_failures_total",
        "counter",
        ("rule", "signal", "reason"),
        "Times that an online rule's signal could not be read, since the policy was read.",
    ),
    # The agent itself.
    Metric("gpuwarden_build_info", "gauge", ("version",), "Always 1; names the agent's version."),
    Metric("gpuwarden_snapshot_timestamp_seconds", "gauge", NONE, "When the figures of this scrape were taken."),
    Metric("gpuwarden_snapshot_interval_seconds", "gauge", NONE, "Length of the tick that the figures are over."),
    Metric("gpuwarden_collector_success", "gauge", ("collector",), "1 if the collector's last run succeeded."),
    Metric("gpuwarden_collector_duration_seconds", "gauge", ("collector",), "How long its last run took."),
    Metric(
        "gpuwarden_probe_symbols",
        "gauge",
        ("library", "role", "state"),
        "Probed symbols of a library: attached, absent (the library has none such) or failed.",
    ),
    Metric(
        "gpuwarden_probe_failure_info",
        "gauge",
        ("library", "symbol", "reason"),
        "Always 1; a symbol that could not be attached, and why.",
    ),
    Metric(
        "gpuwarden_probe_unknown_exports",
        "gauge",
        ("library",),
        "Exports that look like newer versions of probed calls, which nothing sees; doctor names them.",
    ),
    Metric("gpuwarden_probe_calls_total", "counter", ("symbol",), "Calls of a probed symbol that were seen."),
    Metric("gpuwarden_nvml_errors_total", "counter", ("call", "error"), "NVML calls that failed or are not supported."),
    Metric(
        "gpuwarden_name_lookups_total",
        "counter",
        ("source", "outcome"),
        "Containers that were asked for at a runtime's socket, by what came of it.",
    ),
    Metric("gpuwarden_events_lost_total", "counter", ("source", "reason"), "Events that were lost, by map and reason."),
    # The port that this is served on, where `run` has a --web-config.
    Metric(
        "gpuwarden_web_config_reload_success",
        "gauge",
        NONE,
        "1 if the web configuration and its certificates were taken when they were read last, 0 if they were refused; "
        "the log says why.",
    ),
    Metric(
        "gpuwarden_web_config_reload_timestamp_seconds",
        "gauge",
        NONE,
        "When the web configuration in force was read.",
    ),
    Metric(
        "gpuwarden_web_refused_total",
        "counter",
        ("reason",),
        "Who was not let in: anonymous (gave no password), password (a wrong one), busy (too many to look at), "
        "certificate (none, or one that is not taken), handshake (no TLS that both speak).",
    ),
)
