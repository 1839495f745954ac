# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One node: what each container has of each GPU, what is of no known container, and how the agent fares."""

from __future__ import annotations

from dashboards.pages import Choice, Page, Row
from dashboards.panels import (
    BAD,
    BYTES,
    BYTES_PER_SECOND,
    CELSIUS,
    COUNT,
    GOOD,
    HERTZ,
    PER_SECOND,
    RATIO,
    SECONDS,
    WARN,
    WATTS,
    Query,
    graph,
    named,
    number,
    placed,
    states,
)

NODE_ONLY = 'instance="$instance"'
HERE = 'instance="$instance", gpu=~"$gpu"'
HEALTH = ("init", "healthy", "unhealthy", "overlimit", "disabled")
DEVICE = "GPU {{gpu}}{{part}}"
ON_DEVICE = "{{who}} on " + DEVICE
UNKNOWN = "of no known container on " + DEVICE


def per_container(metric: str) -> Query:
    """A gauge of each container on each GPU."""
    return Query(placed(named(f"gpuwarden_container_{metric}{{{HERE}}}")), ON_DEVICE)


def rate_per_container(metric: str) -> Query:
    """A counter of each container on each GPU, per second."""
    return Query(placed(named(f"rate(gpuwarden_container_{metric}_total{{{HERE}}}[$__rate_interval])")), ON_DEVICE)


def per_device(metric: str, legend: str = DEVICE) -> Query:
    """A gauge of each GPU."""
    return Query(placed(f"gpuwarden_{metric}{{{HERE}}}"), legend)


def rate_per_device(metric: str, legend: str = DEVICE) -> Query:
    """A counter of each GPU, per second."""
    return Query(placed(f"rate(gpuwarden_{metric}_total{{{HERE}}}[$__rate_interval])"), legend)


def beside(metric: str) -> Query:
    """A gauge of dcgm-exporter, on this node's GPUs: both know a GPU by its UUID."""
    ours = f"group by (UUID, gpu) (gpuwarden_device_info{{{HERE}}})"
    return Query(placed(f"max by (UUID) ({metric}) * on (UUID) group_right () {ours}"), DEVICE)


NODE = Page(
    uid="gpuwarden-node",
    title="Node",
    says="One node: which container uses how much of which GPU, what slows whom, and how the agent fares.",
    choices=(
        Choice("instance", "Node", "gpuwarden_build_info", several=False),
        Choice("gpu", "GPU", 'gpuwarden_device_info{instance="$instance"}'),
    ),
    rows=(
        Row(
            "Now",
            (
                number("GPUs", "MIG instances count each.", COUNT, f"count(gpuwarden_device_info{{{HERE}}})"),
                number("SM activity", "Mean over the GPUs.", RATIO, f"avg(gpuwarden_device_sm_ratio{{{HERE}}})"),
                number(
                    "Memory in use",
                    "Of all that there is.",
                    RATIO,
                    f"sum(gpuwarden_device_memory_used_bytes{{{HERE}}})"
                    f" / sum(gpuwarden_device_memory_size_bytes{{{HERE}}})",
                    steps=((0.9, WARN), (0.97, BAD)),
                ),
                number(
                    "SM time of no known container",
                    "As a share of the device; the GPU where it is highest.",
                    RATIO,
                    f"max(gpuwarden_unattributed_sm_ratio{{{HERE}}})",
                    steps=((0.1, WARN), (0.3, BAD)),
                ),
                number(
                    "Enforcing",
                    "1 if the policy is acted on, 0 if decisions are only logged or there is none.",
                    COUNT,
                    f"gpuwarden_enforcing{{{NODE_ONLY}}}",
                ),
                number(
                    "Age of the figures",
                    "How long ago the agent took what is shown.",
                    SECONDS,
                    f"time() - gpuwarden_snapshot_timestamp_seconds{{{NODE_ONLY}}}",
                    steps=((60, BAD),),
                ),
            ),
        ),
        Row(
            "Containers",
            (
                graph(
                    "SM time",
                    "Share of each GPU. Stacked they add up to the GPU's activity: nothing is counted twice.",
                    RATIO,
                    rate_per_container("sm_seconds"),
                    rate_per_device("unattributed_sm_seconds", UNKNOWN),
                    stacked=True,
                    top=1,
                ),
                graph(
                    "Memory",
                    "Stacked they add up to the memory in use.",
                    BYTES,
                    per_container("memory_bytes"),
                    per_device("unattributed_memory_bytes", UNKNOWN),
                    stacked=True,
                ),
                graph(
                    "To the device",
                    "Bytes copied from host to device over PCIe.",
                    BYTES_PER_SECOND,
                    rate_per_container("pcie_receive_bytes"),
                    rate_per_device("unattributed_pcie_receive_bytes", UNKNOWN),
                    stacked=True,
                    width=8,
                ),
                graph(
                    "From the device",
                    "Bytes copied from device to host over PCIe.",
                    BYTES_PER_SECOND,
                    rate_per_container("pcie_transmit_bytes"),
                    rate_per_device("unattributed_pcie_transmit_bytes", UNKNOWN),
                    stacked=True,
                    width=8,
                ),
                graph(
                    "Launches",
                    "Kernels; a graph counts its kernel nodes.",
                    PER_SECOND,
                    rate_per_container("launches"),
                    width=8,
                ),
            ),
        ),
        Row(
            "Enforcement",
            (
                graph(
                    "Promises",
                    "Latency of each online container as a share of its target: above 100 % the promise is missed.",
                    RATIO,
                    Query(
                        named(
                            f"gpuwarden_container_slo_latency_seconds{{{NODE_ONLY}}}"
                            f" / gpuwarden_container_slo_target_seconds{{{NODE_ONLY}}}"
                        ),
                        "{{who}}",
                    ),
                    top=1,
                    steps=((1, BAD),),
                    width=8,
                ),
                graph(
                    "Share that offline work may use",
                    "Of the device; what the law decided last.",
                    RATIO,
                    Query(named(f"gpuwarden_container_share_ratio{{{NODE_ONLY}}}"), "{{who}}"),
                    top=1,
                    width=8,
                ),
                graph(
                    "Stopped",
                    "Share of the time that each offline container was stopped.",
                    RATIO,
                    Query(
                        named(f"rate(gpuwarden_container_paused_seconds_total{{{NODE_ONLY}}}[$__rate_interval])"),
                        "{{who}}",
                    ),
                    top=1,
                    width=8,
                ),
            ),
        ),
        Row(
            "GPUs",
            (
                graph(
                    "SM activity",
                    "In brackets what it is: gpm is the share of SMs with work (Hopper and later), utilization the"
                    " share of time in which any kernel ran.",
                    RATIO,
                    Query(
                        placed(
                            f"gpuwarden_device_sm_ratio{{{HERE}}} * on (instance, UUID) group_left (model_name)"
                            f" gpuwarden_device_info{{{HERE}}}"
                        ),
                        DEVICE + " {{model_name}} ({{source}})",
                    ),
                    top=1,
                ),
                graph(
                    "Memory",
                    "In use, kept by the driver, and all that there is.",
                    BYTES,
                    per_device("device_memory_used_bytes", f"{DEVICE} in use"),
                    per_device("device_memory_reserved_bytes", f"{DEVICE} kept by the driver"),
                    per_device("device_memory_size_bytes", f"{DEVICE} in all"),
                ),
                graph(
                    "Power",
                    "Drawn, and the limit in force.",
                    WATTS,
                    per_device("device_power_watts"),
                    per_device("device_power_limit_watts", f"{DEVICE} limit"),
                    width=6,
                ),
                graph("Temperature", "Of the GPU.", CELSIUS, per_device("device_temperature_celsius"), width=6),
                graph(
                    "SM clock",
                    "As it is now; it falls with heat and power.",
                    HERTZ,
                    per_device("device_sm_clock_hertz"),
                    width=6,
                ),
                states(
                    "Health",
                    "As enforcement judges it: offline work starts on healthy GPUs only, and leaves in overlimit. Of"
                    " MIG instances of one GPU the worst.",
                    Query(
                        "max by (gpu) ("
                        + " or ".join(
                            f'{number} * (gpuwarden_device_health{{{HERE}, state="{state}"}} == 1)'
                            for number, state in enumerate(HEALTH, 1)
                        )
                        + ")",
                        "GPU {{gpu}}",
                    ),
                    {
                        1: ("init", "blue"),
                        2: ("healthy", GOOD),
                        3: ("unhealthy", "yellow"),
                        4: ("overlimit", WARN),
                        5: ("disabled", BAD),
                    },
                    width=6,
                ),
            ),
        ),
        Row(
            "With dcgm-exporter",
            (
                graph(
                    "Tensor cores",
                    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE of this node's GPUs, where dcgm-exporter runs too.",
                    RATIO,
                    beside("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"),
                    top=1,
                ),
                graph(
                    "Device memory's bandwidth",
                    "DCGM_FI_PROF_DRAM_ACTIVE of this node's GPUs, where dcgm-exporter runs too.",
                    RATIO,
                    beside("DCGM_FI_PROF_DRAM_ACTIVE"),
                    top=1,
                ),
            ),
        ),
        Row(
            "The agent",
            (
                graph(
                    "Collectors",
                    "How long each takes, once a tick.",
                    SECONDS,
                    Query(f"gpuwarden_collector_duration_seconds{{{NODE_ONLY}}}", "{{collector}}"),
                    width=6,
                ),
                graph(
                    "Collectors that failed",
                    "1 where the last run failed.",
                    COUNT,
                    Query(f"1 - gpuwarden_collector_success{{{NODE_ONLY}}}", "{{collector}}"),
                    top=1,
                    width=6,
                ),
                graph(
                    "Events lost",
                    "What could not be counted, in a second. Figures are too low where this is not 0; unanswered:"
                    " clients that gave up.",
                    PER_SECOND,
                    Query(
                        f"rate(gpuwarden_events_lost_total{{{NODE_ONLY}}}[$__rate_interval])", "{{source}}: {{reason}}"
                    ),
                    width=6,
                ),
                graph(
                    "Probed symbols",
                    "Of all libraries; absent are those that a library does not have.",
                    COUNT,
                    Query(f"sum by (state) (gpuwarden_probe_symbols{{{NODE_ONLY}}})", "{{state}}"),
                    width=6,
                ),
                graph(
                    "Probed calls",
                    "How often they were seen: the ten most frequent.",
                    PER_SECOND,
                    Query(
                        f"topk(10, rate(gpuwarden_probe_calls_total{{{NODE_ONLY}}}[$__rate_interval]))", "{{symbol}}"
                    ),
                ),
                graph(
                    "Signals that could not be read",
                    "Since the policy was read, by rule. Until one can be read, offline work is held, then let go.",
                    COUNT,
                    Query(f"gpuwarden_signal_failures_total{{{NODE_ONLY}}}", "{{rule}}: {{signal}} {{reason}}"),
                ),
            ),
        ),
    ),
)
