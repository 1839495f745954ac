# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""All nodes at once: is every promise kept, who uses the GPUs, and which node wants a look."""

from __future__ import annotations

from dashboards.container import NAMES, OPENS
from dashboards.pages import Choice, Page, Row
from dashboards.panels import BAD, BYTES, COUNT, RATIO, SECONDS, WARN, WATTS, Column, Query, graph, number, rows

HERE = 'instance=~"$instance"'
MISSED = " or ".join(
    f"gpuwarden_container_{slo}_latency_seconds{{{HERE}}} > gpuwarden_container_{slo}_target_seconds{{{HERE}}}"
    for slo in ("slo", "slo_also")
)


def by_namespace(expr: str) -> str:
    """Sums; what is in no namespace has a name too."""
    return f'label_replace(sum by (namespace) ({expr}), "namespace", "outside Kubernetes", "namespace", "")'


FLEET = Page(
    uid="gpuwarden-fleet",
    title="Fleet",
    says="All nodes: promises kept, GPUs in use, and who uses them.",
    choices=(Choice("instance", "Node", "gpuwarden_build_info"),),
    rows=(
        Row(
            "Now",
            (
                number("Nodes", "Agents that are scraped.", COUNT, f"count(gpuwarden_build_info{{{HERE}}})", width=3),
                number("GPUs", "MIG instances count each.", COUNT, f"count(gpuwarden_device_info{{{HERE}}})", width=3),
                number(
                    "GPUs lost",
                    "GPUs that do not answer: fallen off the bus.",
                    COUNT,
                    f"sum(gpuwarden_device_lost{{{HERE}}})",
                    steps=((1, BAD),),
                    width=3,
                ),
                number(
                    "Promises missed",
                    "Online containers whose latency is over its target now.",
                    COUNT,
                    f"count({MISSED}) or vector(0)",
                    steps=((1, BAD),),
                    width=3,
                ),
                number(
                    "SM activity",
                    "Mean over the GPUs. Before Hopper: the share of time in which any kernel ran.",
                    RATIO,
                    f"avg(gpuwarden_device_sm_ratio{{{HERE}}})",
                    width=3,
                ),
                number(
                    "Memory in use",
                    "Of all device memory that there is.",
                    RATIO,
                    f"sum(gpuwarden_device_memory_used_bytes{{{HERE}}})"
                    f" / sum(gpuwarden_device_memory_size_bytes{{{HERE}}})",
                    steps=((0.9, WARN), (0.97, BAD)),
                    width=3,
                ),
                number(
                    "Offline work stopped",
                    "Share of the last second that offline containers were stopped, in the mean.",
                    RATIO,
                    f"avg(gpuwarden_container_paused_ratio{{{HERE}}})",
                    steps=((0.9, WARN),),
                    width=3,
                ),
                number(
                    "Only watching",
                    "Nodes that act on nothing: no policy, or one with enforce: false.",
                    COUNT,
                    f"count(gpuwarden_enforcing{{{HERE}}} == 0) or vector(0)",
                    width=3,
                ),
            ),
        ),
        Row(
            "Use",
            (
                graph(
                    "SM time by namespace",
                    "In whole GPUs: 2.5 is two GPUs and a half.",
                    COUNT,
                    Query(
                        by_namespace(f"rate(gpuwarden_container_sm_seconds_total{{{HERE}}}[$__rate_interval])"),
                        "{{namespace}}",
                    ),
                    Query(
                        f"sum(rate(gpuwarden_unattributed_sm_seconds_total{{{HERE}}}[$__rate_interval]))",
                        "of no known container",
                    ),
                    stacked=True,
                ),
                graph(
                    "Memory by namespace",
                    "Device memory in use.",
                    BYTES,
                    Query(by_namespace(f"gpuwarden_container_memory_bytes{{{HERE}}}"), "{{namespace}}"),
                    Query(f"sum(gpuwarden_unattributed_memory_bytes{{{HERE}}})", "of no known container"),
                    stacked=True,
                ),
                graph(
                    "SM activity by node",
                    "Mean over each node's GPUs.",
                    RATIO,
                    Query(f"avg by (instance) (gpuwarden_device_sm_ratio{{{HERE}}})", "{{instance}}"),
                    top=1,
                ),
                graph(
                    "Power by node",
                    "What the GPUs draw.",
                    WATTS,
                    Query(f"sum by (instance) (gpuwarden_device_power_watts{{{HERE}}})", "{{instance}}"),
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Nodes",
            (
                rows(
                    "Nodes",
                    "One line each; the name opens the node.",
                    ("instance",),
                    Column("GPUs", f"count by (instance) (gpuwarden_device_info{{{HERE}}})"),
                    Column("SM activity", f"avg by (instance) (gpuwarden_device_sm_ratio{{{HERE}}})", RATIO),
                    Column(
                        "Memory in use",
                        f"sum by (instance) (gpuwarden_device_memory_used_bytes{{{HERE}}})"
                        f" / sum by (instance) (gpuwarden_device_memory_size_bytes{{{HERE}}})",
                        RATIO,
                        ((0.9, WARN), (0.97, BAD)),
                    ),
                    Column(
                        "Containers",
                        "count by (instance) (count by (instance, namespace, pod, container, id)"
                        f" (gpuwarden_container_memory_bytes{{{HERE}}}))",
                    ),
                    Column("Enforcing", f"gpuwarden_enforcing{{{HERE}}}"),
                    Column(
                        "Age of the figures",
                        f"time() - gpuwarden_snapshot_timestamp_seconds{{{HERE}}}",
                        SECONDS,
                        ((60, BAD),),
                    ),
                    link=("instance", "/d/gpuwarden-node?${datasource:queryparam}&var-instance=${__value.raw}"),
                ),
            ),
        ),
        Row(
            "Containers",
            (
                rows(
                    "Who uses most",
                    "Over the time that is shown; the name opens the container.",
                    (*NAMES, "id"),
                    Column("GPU hours", f"increase(gpuwarden_container_sm_seconds_total{{{HERE}}}[$__range]) / 3600"),
                    Column("Memory now", f"gpuwarden_container_memory_bytes{{{HERE}}}", BYTES),
                    Column("Launches", f"increase(gpuwarden_container_launches_total{{{HERE}}}[$__range])"),
                    link=OPENS,
                ),
            ),
        ),
        Row(
            "Trouble",
            (
                graph(
                    "GPUs by health",
                    "As enforcement judges them: offline work starts on healthy ones only, and leaves in overlimit.",
                    COUNT,
                    Query(f"sum by (state) (gpuwarden_device_health{{{HERE}}})", "{{state}}"),
                    stacked=True,
                    width=8,
                ),
                graph(
                    "XID errors",
                    "Since each agent's start. Which number means what: NVIDIA's list of XIDs.",
                    COUNT,
                    Query(
                        f"sum by (instance, gpu, xid) (gpuwarden_device_xids_total{{{HERE}}})",
                        "{{instance}} GPU {{gpu}}: XID {{xid}}",
                    ),
                    width=8,
                ),
                graph(
                    "Events lost",
                    "What the agents could not count, in a second. Figures are too low where this is not 0; unanswered:"
                    " clients that gave up.",
                    "cps",
                    Query(
                        "sum by (instance, source, reason)"
                        f" (rate(gpuwarden_events_lost_total{{{HERE}}}[$__rate_interval]))",
                        "{{instance}} {{source}}: {{reason}}",
                    ),
                    width=8,
                ),
            ),
        ),
    ),
)
