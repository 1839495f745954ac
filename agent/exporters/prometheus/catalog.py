# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Every metric that GPU Warden exports: name, type, labels, meaning. docs/metrics.md is generated from this table.

Base units only (bytes, seconds, ratio 0–1, hertz, watts, celsius). No pid, kernel name or address is ever a label, so
the number of series is bounded by containers × devices. `gpu`, `UUID` and `pci_bus_id` are named as dcgm-exporter names
them, so that dashboards can join on them; its `modelName` is `model_name` here because promtool rejects camel case.
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
    # Usage of each device by each container.
    Metric("gpuwarden_container_sm_ratio", "gauge", USE, "Ratio of the device's SM time used by the container."),
    Metric("gpuwarden_container_sm_estimated", "gauge", USE, "1 if the SM figures are estimated, 0 if measured."),
    Metric("gpuwarden_container_sm_error_ratio", "gauge", USE, "Estimated error of the SM ratio (±)."),
    Metric("gpuwarden_container_sm_seconds_total", "counter", USE, "SM time used, in seconds of the whole device."),
    Metric("gpuwarden_container_memory_bytes", "gauge", USE, "Device memory in use."),
    Metric(
        "gpuwarden_container_memory_peak_bytes",
        "gauge",
        USE,
        "Sum of the peak device memory allocations of each current process.",
    ),
    Metric(
        "gpuwarden_container_allocated_bytes",
        "gauge",
        (*USE, "kind"),
        "Live allocations by the kind of driver call that made them; graph is what nodes of launched graphs allocate, "
        "pinned is host memory.",
    ),
    Metric(
        "gpuwarden_container_allocated_by_age_bytes",
        "gauge",
        (*USE, "age"),
        "Live device memory by age of the allocation; leaked memory moves to the oldest age.",
    ),
    Metric("gpuwarden_container_pcie_transmit_bytes_total", "counter", USE, "Bytes copied from device to host."),
    Metric("gpuwarden_container_pcie_receive_bytes_total", "counter", USE, "Bytes copied from host to device."),
    Metric(
        "gpuwarden_container_peer_transmit_bytes_total",
        "counter",
        USE,
        "Bytes copied to another GPU of the node. The driver API does not say whether they went over NVLink or PCIe.",
    ),
    Metric(
        "gpuwarden_container_peer_receive_bytes_total",
        "counter",
        USE,
        "Bytes copied from another GPU of the node. The driver API does not say whether they came over NVLink or PCIe.",
    ),
    Metric(
        "gpuwarden_container_launches_total",
        "counter",
        USE,
        "Kernels launched; a graph launch counts each of its kernel nodes.",
    ),
    Metric(
        "gpuwarden_container_unprobed",
        "gauge",
        USE,
        "1 while NVML reports work of the container that no launch seen by the probes explains, 0 if launches do; "
        "absent while it is unknown (no work yet, MPS clients, MIG, no probes).",
    ),
    # Device minus the sum of all containers.
    Metric(
        "gpuwarden_unattributed_sm_ratio", "gauge", DEVICE, "Ratio of the device's SM time attributed to no container."
    ),
    Metric("gpuwarden_unattributed_sm_seconds_total", "counter", DEVICE, "SM time attributed to no container."),
    Metric("gpuwarden_unattributed_memory_bytes", "gauge", DEVICE, "Device memory attributed to no container."),
    Metric(
        "gpuwarden_unattributed_pcie_transmit_bytes_total", "counter", DEVICE, "Unattributed bytes, device to host."
    ),
    Metric("gpuwarden_unattributed_pcie_receive_bytes_total", "counter", DEVICE, "Unattributed bytes, host to device."),
    # The sum of all containers minus the device, where that is more.
    Metric(
        "gpuwarden_device_excess_memory_bytes",
        "gauge",
        DEVICE,
        "Memory that containers have beyond the device's own figure: counted twice, or read at another instant.",
    ),
    Metric(
        "gpuwarden_device_excess_pcie_transmit_bytes_per_second",
        "gauge",
        DEVICE,
        "Copies of containers beyond the device's own counter, device to host.",
    ),
    Metric(
        "gpuwarden_device_excess_pcie_receive_bytes_per_second",
        "gauge",
        DEVICE,
        "Copies of containers beyond the device's own counter, host to device.",
    ),
    # The devices.
    Metric(
        "gpuwarden_device_info",
        "gauge",
        (*DEVICE, "model_name", "parent", "mig_profile"),
        "Always 1; labels give the device's model and, for a MIG instance, its parent GPU's UUID and its profile.",
    ),
    Metric(
        "gpuwarden_device_held_info",
        "gauge",
        USE,
        "Always 1; the kubelet assigned the device to this container, whether or not the container uses it.",
    ),
    Metric("gpuwarden_device_lost", "gauge", DEVICE, "1 while the GPU does not respond (fallen off the bus)."),
    Metric("gpuwarden_device_sms", "gauge", DEVICE, "Number of streaming multiprocessors."),
    Metric(
        "gpuwarden_device_sm_ratio", "gauge", (*DEVICE, "source"), "SM activity; the label source gives its definition."
    ),
    Metric("gpuwarden_device_sm_seconds_total", "counter", DEVICE, "SM activity, in seconds of the whole device."),
    Metric("gpuwarden_device_memory_size_bytes", "gauge", DEVICE, "Total device memory."),
    Metric("gpuwarden_device_memory_used_bytes", "gauge", DEVICE, "Device memory in use."),
    Metric("gpuwarden_device_memory_reserved_bytes", "gauge", DEVICE, "Device memory reserved by the driver."),
    Metric("gpuwarden_device_pcie_transmit_bytes_total", "counter", DEVICE, "Bytes sent over PCIe, device to host."),
    Metric("gpuwarden_device_pcie_receive_bytes_total", "counter", DEVICE, "Bytes received over PCIe, host to device."),
    Metric(
        "gpuwarden_device_pcie_link_bytes_per_second",
        "gauge",
        DEVICE,
        "What the PCIe link can carry in one direction, packets' headers included: its generation and width, by NVML.",
    ),
    Metric(
        "gpuwarden_device_dram_activity_ratio",
        "gauge",
        DEVICE,
        "Share of the device memory's bandwidth that is used. GPUs that report it (Hopper and later).",
    ),
    Metric("gpuwarden_device_sm_clock_hertz", "gauge", DEVICE, "Current SM clock."),
    Metric("gpuwarden_device_power_watts", "gauge", DEVICE, "Current power draw."),
    Metric("gpuwarden_device_power_limit_watts", "gauge", DEVICE, "Power limit in force."),
    Metric("gpuwarden_device_temperature_celsius", "gauge", DEVICE, "GPU temperature."),
    Metric("gpuwarden_device_xids_total", "counter", (*DEVICE, "xid"), "XID errors since the agent started."),
    Metric(
        "gpuwarden_device_xid_last_seen_timestamp_seconds",
        "gauge",
        (*DEVICE, "xid"),
        "Unix time at which this XID was last seen; rate() misses the first event of a new series.",
    ),
    # Enforcement.
    Metric(
        "gpuwarden_device_health",
        "gauge",
        (*DEVICE, "state"),
        "1 for the current state of the device (init, healthy, unhealthy, overlimit, disabled), 0 for the others.",
    ),
    Metric(
        "gpuwarden_device_online_busy_seconds_total",
        "counter",
        DEVICE,
        "Time in which requests of online or periodic containers ran on the device.",
    ),
    Metric(
        "gpuwarden_device_online_gaps_total",
        "counter",
        DEVICE,
        "Idle times between such requests: with the time above, how long a gap is in the mean.",
    ),
    Metric("gpuwarden_enforcing", "gauge", NONE, "1 if the policy is enforced, 0 if decisions are only logged."),
    Metric(
        "gpuwarden_policy_reload_success",
        "gauge",
        NONE,
        "1 if the last reload of the policy file succeeded, 0 if it failed; the snapshot and the log give the reason.",
    ),
    Metric(
        "gpuwarden_policy_reload_timestamp_seconds", "gauge", NONE, "Unix time at which the active policy was loaded."
    ),
    Metric(
        "gpuwarden_container_role_info",
        "gauge",
        (*CONTAINER, "role", "rule"),
        "Always 1; labels give role and matching rule.",
    ),
    Metric("gpuwarden_container_slo_latency_seconds", "gauge", CONTAINER, "Online latency at the SLO's quantile."),
    Metric("gpuwarden_container_slo_target_seconds", "gauge", CONTAINER, "Upper bound on that latency."),
    Metric("gpuwarden_container_slo_quantile_ratio", "gauge", CONTAINER, "The SLO's quantile, 0–1."),
    Metric(
        "gpuwarden_container_slo_also_latency_seconds",
        "gauge",
        CONTAINER,
        "Online latency at the SLO's second quantile, where the policy has one (slo.also).",
    ),
    Metric("gpuwarden_container_slo_also_target_seconds", "gauge", CONTAINER, "Upper bound on that latency."),
    Metric("gpuwarden_container_slo_also_quantile_ratio", "gauge", CONTAINER, "The SLO's second quantile, 0–1."),
    Metric(
        "gpuwarden_container_slo_requests_total",
        "counter",
        CONTAINER,
        "Requests measured by the SLO's signal since the policy was loaded.",
    ),
    Metric(
        "gpuwarden_container_slo_slow_requests_total",
        "counter",
        CONTAINER,
        "Requests slower than the target; a histogram bucket that contains the target counts in part.",
    ),
    Metric(
        "gpuwarden_container_deadline_seconds",
        "gauge",
        CONTAINER,
        "Periodic containers: time from the begin of a request within which it is to end.",
    ),
    Metric(
        "gpuwarden_container_deadline_requests_total",
        "counter",
        CONTAINER,
        "Periodic containers: requests that ended, since the agent knows the container.",
    ),
    Metric(
        "gpuwarden_container_deadline_misses_total",
        "counter",
        CONTAINER,
        "Periodic containers: requests that ended later than their deadline.",
    ),
    Metric(
        "gpuwarden_container_deadline_worst_lateness_seconds",
        "gauge",
        CONTAINER,
        "Periodic containers: the most by which a request was later than its deadline; 0 while none was.",
    ),
    Metric(
        "gpuwarden_container_deadline_request_seconds",
        "gauge",
        CONTAINER,
        "Periodic containers: how long the longest requests of the last ten seconds had the device.",
    ),
    Metric(
        "gpuwarden_container_deadline_load_ratio",
        "gauge",
        CONTAINER,
        "Periodic containers: load of the admission test on their GPUs; up to 1 all deadlines there are met.",
    ),
    Metric(
        "gpuwarden_container_http_answers_total",
        "counter",
        (*CONTAINER, "status"),
        "Answers seen by the signal http, by class of status; slo.status of the policy says which have a latency.",
    ),
    Metric(
        "gpuwarden_container_http_seconds_total",
        "counter",
        (*CONTAINER, "part"),
        "Time of the requests that have a latency: receive (first byte to last byte of the request, read), head (end "
        "of its head to last byte of the answer), first_byte and service (end of the request to first and last byte "
        "of the answer).",
    ),
    Metric(
        "gpuwarden_container_http_lost_total",
        "counter",
        (*CONTAINER, "reason"),
        "Requests or connections to the container of which the signal http has no latency, by reason.",
    ),
    Metric(
        "gpuwarden_container_share_ratio",
        "gauge",
        CONTAINER,
        "Share of the device that the container may currently use.",
    ),
    Metric(
        "gpuwarden_container_paused_ratio",
        "gauge",
        CONTAINER,
        "Ratio of the last second spent stopped: mean over the container's GPU processes.",
    ),
    Metric(
        "gpuwarden_container_rung",
        "gauge",
        (*CONTAINER, "rung"),
        "1 while this rung of the rule's ladder is in force (gate and pace excluded); with enforce: false, would be.",
    ),
    Metric(
        "gpuwarden_container_rung_trouble",
        "gauge",
        (*CONTAINER, "rung"),
        "1 while this rung is required but was skipped or cannot be applied; the snapshot and the log give the reason.",
    ),
    Metric(
        "gpuwarden_container_launch_gpu_seconds",
        "gauge",
        CONTAINER,
        "Estimated GPU time of one launch of an offline container, the mean of its processes.",
    ),
    Metric(
        "gpuwarden_container_pauses_total",
        "counter",
        CONTAINER,
        "Number of times a process of the container was stopped.",
    ),
    Metric(
        "gpuwarden_container_pcie_pauses_total",
        "counter",
        CONTAINER,
        "Of these, stops at a copy between host and device.",
    ),
    Metric(
        "gpuwarden_container_pcie_paused_seconds_total",
        "counter",
        CONTAINER,
        "Time spent stopped at such copies: mean over the container's GPU processes.",
    ),
    Metric(
        "gpuwarden_container_foreign_resumes_total",
        "counter",
        CONTAINER,
        "Stops that another process ended with SIGCONT; the agent lets the process run for one second of GPU time.",
    ),
    Metric(
        "gpuwarden_container_losses_total",
        "counter",
        (*CONTAINER, "reason"),
        "What was not recorded of the container because it had used up its own share of the agent's maps, by reason.",
    ),
    Metric(
        "gpuwarden_container_paused_seconds_total",
        "counter",
        CONTAINER,
        "Time spent stopped: mean over the container's GPU processes.",
    ),
    Metric(
        "gpuwarden_container_memory_quota_bytes",
        "gauge",
        CONTAINER,
        "Maximum device memory of the container on a device.",
    ),
    Metric(
        "gpuwarden_container_allocations_denied_total",
        "counter",
        CONTAINER,
        "Allocations failed with CUDA_ERROR_OUT_OF_MEMORY because of the quota or of insufficient free memory.",
    ),
    Metric(
        "gpuwarden_container_allocations_held_total",
        "counter",
        CONTAINER,
        "Allocations delayed before they ran because of the quota or of insufficient free memory.",
    ),
    Metric(
        "gpuwarden_signal_failures_total",
        "counter",
        ("rule", "signal", "reason"),
        "Failed reads of an online rule's signal since the policy was loaded.",
    ),
    Metric(
        "gpuwarden_container_left_rule_total",
        "counter",
        ("rule", "reason"),
        "Containers that left this rule while they ran, by what changed (processes, names, policy), or never "
        "entered it, as only some of their processes match (mixed); the log names them.",
    ),
    # The agent itself.
    Metric("gpuwarden_build_info", "gauge", ("version",), "Always 1; the label gives the agent's version."),
    Metric("gpuwarden_snapshot_timestamp_seconds", "gauge", NONE, "Unix time of the snapshot that this scrape shows."),
    Metric("gpuwarden_snapshot_interval_seconds", "gauge", NONE, "Length of the tick that the snapshot covers."),
    Metric(
        "gpuwarden_tick_duration_seconds", "gauge", NONE, "Time that the tick before the one of this snapshot took."
    ),
    Metric("gpuwarden_decision_duration_seconds", "gauge", NONE, "Time that the last decision of enforcement took."),
    Metric("gpuwarden_collector_success", "gauge", ("collector",), "1 if the collector's last run succeeded."),
    Metric("gpuwarden_collector_duration_seconds", "gauge", ("collector",), "Duration of the collector's last run."),
    Metric(
        "gpuwarden_probe_symbols",
        "gauge",
        ("library", "role", "state"),
        "Number of probed symbols by state: attached, absent (not exported by the library), failed, or off (without "
        "return probes).",
    ),
    Metric(
        "gpuwarden_return_probes",
        "gauge",
        NONE,
        "1 if return probes are attached; 0: off, and what needs them is unknown (gpuwarden doctor gives the reason).",
    ),
    Metric(
        "gpuwarden_probe_failure_info",
        "gauge",
        ("library", "symbol", "reason"),
        "Always 1; a symbol to which no probe could be attached, with the reason.",
    ),
    Metric(
        "gpuwarden_probe_unknown_exports",
        "gauge",
        ("library",),
        "Exports that look like newer versions of probed calls and are not probed; listed by gpuwarden doctor.",
    ),
    Metric("gpuwarden_probe_calls_total", "counter", ("symbol",), "Observed calls of a probed symbol."),
    Metric("gpuwarden_nvml_errors_total", "counter", ("call", "error"), "NVML calls that failed or are unsupported."),
    Metric(
        "gpuwarden_name_lookups_total",
        "counter",
        ("source", "outcome"),
        "Lookups of a container at a runtime's socket, by outcome.",
    ),
    Metric("gpuwarden_events_lost_total", "counter", ("source", "reason"), "Events lost, by source and reason."),
    # The metrics port, with `gpuwarden run --web-config`.
    Metric(
        "gpuwarden_web_config_reload_success",
        "gauge",
        NONE,
        "1 if the last reload of the web configuration and its certificates succeeded, 0 if it failed; the log gives "
        "the reason.",
    ),
    Metric(
        "gpuwarden_web_config_reload_timestamp_seconds",
        "gauge",
        NONE,
        "Unix time at which the active web configuration was loaded.",
    ),
    Metric(
        "gpuwarden_web_refused_total",
        "counter",
        ("reason",),
        "Clients rejected, by reason: anonymous (no password), password (wrong password), busy (too many at once), "
        "certificate (missing or not accepted), handshake (no common TLS version or cipher suite).",
    ),
)
