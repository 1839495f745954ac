# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One container, or a few: what it has of its GPUs, what it holds, whether it is slowed and why."""

from __future__ import annotations

from dashboards.pages import Choice, Page, Row
from dashboards.panels import (
    BAD,
    BYTES,
    BYTES_PER_SECOND,
    COUNT,
    PER_SECOND,
    RATIO,
    SECONDS,
    WARN,
    WHOLE_WIDTH,
    Query,
    graph,
    named,
    number,
    placed,
    states,
)

HERE = 'instance=~"$instance", namespace=~"$namespace", pod=~"$pod", container=~"$container"'
ON_DEVICE = "{{who}} on {{instance}} GPU {{gpu}}{{part}}"
ON_NODE = "{{who}} on {{instance}}"
NAMES = ("instance", "namespace", "pod", "container")  # a table of containers has a column for each
ROW = "&".join(f"var-{name}=${{__data.fields.{name}:percentencode}}" for name in NAMES)
OPENS = ("container", f"/d/gpuwarden-container?${{datasource:queryparam}}&{ROW}")


def use(metric: str, legend: str = ON_DEVICE) -> Query:
    """A gauge of the container on each GPU."""
    return Query(placed(named(f"gpuwarden_container_{metric}{{{HERE}}}")), legend)


def rate(metric: str, legend: str = ON_DEVICE) -> Query:
    """A counter, per second."""
    return Query(placed(named(f"rate(gpuwarden_container_{metric}_total{{{HERE}}}[$__rate_interval])")), legend)


CONTAINER = Page(
    uid="gpuwarden-container",
    title="Container",
    says="What a container has of its GPUs, what it holds, and whether and how it is slowed.",
    choices=(
        Choice("instance", "Node", "gpuwarden_build_info"),
        Choice("namespace", "Namespace", 'gpuwarden_container_memory_bytes{instance=~"$instance"}'),
        Choice("pod", "Pod", 'gpuwarden_container_memory_bytes{instance=~"$instance", namespace=~"$namespace"}'),
        Choice(
            "container",
            "Container",
            'gpuwarden_container_memory_bytes{instance=~"$instance", namespace=~"$namespace", pod=~"$pod"}',
        ),
    ),
    rows=(
        Row(
            "Now",
            (
                number("SM time", "In whole GPUs.", COUNT, f"sum(gpuwarden_container_sm_ratio{{{HERE}}})"),
                number("Memory", "On all its GPUs.", BYTES, f"sum(gpuwarden_container_memory_bytes{{{HERE}}})"),
                number(
                    "Latency, of its target",
                    "Of an online container; the worst where several are chosen. Above 100 % the promise is missed.",
                    RATIO,
                    f"max(gpuwarden_container_slo_latency_seconds{{{HERE}}}"
                    f" / gpuwarden_container_slo_target_seconds{{{HERE}}})",
                    steps=((0.9, WARN), (1, BAD)),
                ),
                number(
                    "Share it may use",
                    "Of the device, for an offline container; the least where several are chosen.",
                    RATIO,
                    f"min(gpuwarden_container_share_ratio{{{HERE}}})",
                ),
                number(
                    "Stopped",
                    "Share of the last second, for an offline container; the most where several are chosen.",
                    RATIO,
                    f"max(gpuwarden_container_paused_ratio{{{HERE}}})",
                    steps=((0.9, WARN),),
                ),
                number(
                    "Stops",
                    "In the time that is shown.",
                    COUNT,
                    f"sum(increase(gpuwarden_container_pauses_total{{{HERE}}}[$__range]))",
                ),
            ),
        ),
        Row(
            "SM time and traffic",
            (
                graph(
                    "SM time",
                    "Share of each GPU.",
                    RATIO,
                    rate("sm_seconds"),
                    top=1,
                ),
                graph(
                    "How far off that may be",
                    "±, as a share of the GPU; 0 where it is measured, not estimated.",
                    RATIO,
                    use("sm_error_ratio"),
                ),
                graph("Launches", "Kernels; a graph counts its kernel nodes.", PER_SECOND, rate("launches"), width=8),
                graph(
                    "To the device",
                    "Bytes copied from host to device.",
                    BYTES_PER_SECOND,
                    rate("pcie_receive_bytes"),
                    width=8,
                ),
                graph(
                    "From the device",
                    "Bytes copied from device to host.",
                    BYTES_PER_SECOND,
                    rate("pcie_transmit_bytes"),
                    width=8,
                ),
            ),
        ),
        Row(
            "Memory",
            (
                graph(
                    "Memory",
                    "In use, the most that was allocated at once, and what a policy lets it hold on a GPU.",
                    BYTES,
                    use("memory_bytes"),
                    use("memory_peak_bytes", f"{ON_DEVICE}: most at once"),
                    use("memory_quota_bytes", f"{ON_NODE}: quota"),
                    width=8,
                ),
                graph(
                    "By kind",
                    "Live memory by the driver calls that made it; pinned is host memory.",
                    BYTES,
                    Query(f"sum by (kind) (gpuwarden_container_allocated_bytes{{{HERE}}})", "{{kind}}"),
                    stacked=True,
                    width=8,
                ),
                graph(
                    "By age",
                    "Live device memory by how long ago it was allocated: what leaks grows old.",
                    BYTES,
                    Query(f"sum by (age) (gpuwarden_container_allocated_by_age_bytes{{{HERE}}})", "{{age}}"),
                    stacked=True,
                    width=8,
                ),
            ),
        ),
        Row(
            "Enforcement",
            (
                graph(
                    "Latency and target",
                    "Of an online container, at its SLO's quantile.",
                    SECONDS,
                    use("slo_latency_seconds", ON_NODE),
                    use("slo_target_seconds", f"{ON_NODE}: target"),
                ),
                graph(
                    "Share it may use, and how much it is stopped",
                    "Of an offline container: the law's share of the device, and the share of the time it was stopped.",
                    RATIO,
                    use("share_ratio", f"{ON_NODE}: share"),
                    rate("paused_seconds", f"{ON_NODE}: stopped"),
                    top=1,
                ),
                graph("Stops", "How often it was stopped.", PER_SECOND, rate("pauses", ON_NODE), width=8),
                graph(
                    "Allocations refused",
                    "Denied ones returned CUDA_ERROR_OUT_OF_MEMORY, held ones were stopped before they ran.",
                    PER_SECOND,
                    rate("allocations_denied", f"{ON_NODE}: denied"),
                    rate("allocations_held", f"{ON_NODE}: held"),
                    width=8,
                ),
                graph(
                    "Stops that other processes ended",
                    "By SIGCONT. The process then runs for one second of GPU time.",
                    PER_SECOND,
                    rate("foreign_resumes", ON_NODE),
                    width=8,
                ),
                states(
                    "Ladder",
                    "Steps beyond gate and pace that are in force, or with enforce: false would be; the log says why.",
                    Query(
                        named(
                            f"gpuwarden_container_rung{{{HERE}}} or 2 * gpuwarden_container_rung_trouble{{{HERE}}}"
                            f" or 0 * label_replace(gpuwarden_container_share_ratio{{{HERE}}}"
                            f' unless ignoring (rung) gpuwarden_container_rung{{{HERE}}}, "rung", "none", "", "")'
                        ),
                        "{{who}}: {{rung}}",
                    ),
                    {0: ("not needed", "transparent"), 1: ("in force", WARN), 2: ("cannot be done", BAD)},
                    width=WHOLE_WIDTH,
                ),
            ),
        ),
    ),
)
