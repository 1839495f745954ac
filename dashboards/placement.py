# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The fleet's service: which pods wait, what the plan is worth, and whether what was expected came true."""

from __future__ import annotations

from dashboards.pages import Page, Row
from dashboards.panels import BAD, COUNT, PER_SECOND, RATIO, SECONDS, WARN, Query, graph, number


def quantile(part: float, metric: str, by: str = "") -> str:
    """Of a histogram."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({part}, sum by ({labels}) (rate({metric}_bucket[$__rate_interval])))"


PLACEMENT = Page(
    uid="gpuwarden-placement",
    title="Placement",
    says="Offline pods that wait for a GPU beside an online service, and the plan that places them.",
    choices=(),
    rows=(
        Row(
            "Now",
            (
                number("Pods that wait", "For a GPU.", COUNT, 'sum(gpuwarden_fleet_jobs{state="waiting"})'),
                number("Pods with a GPU", "Bound to a node.", COUNT, 'sum(gpuwarden_fleet_jobs{state="bound"})'),
                number(
                    "GPUs with room",
                    "Healthy, protected and without offline work.",
                    COUNT,
                    "sum(gpuwarden_fleet_slots)",
                ),
                number(
                    "Longest wait",
                    "Of the pods that wait now.",
                    SECONDS,
                    "max(gpuwarden_fleet_longest_wait_seconds)",
                    steps=((3600, WARN),),
                ),
                number(
                    "Age of the plan",
                    "Nothing new is placed by one that is older than three intervals.",
                    SECONDS,
                    "time() - max(gpuwarden_fleet_plan_timestamp_seconds)",
                    steps=((180, WARN), (600, BAD)),
                ),
                number(
                    "GPUs of two pods",
                    "By their annotations, which another writer must have set.",
                    COUNT,
                    "sum(gpuwarden_fleet_gpus_of_two_pods)",
                    steps=((1, BAD),),
                ),
            ),
        ),
        Row(
            "Pods",
            (
                graph(
                    "Pods by state",
                    "Waiting, reserved (a GPU is written on the pod) and bound.",
                    COUNT,
                    Query("sum by (state) (gpuwarden_fleet_jobs)", "{{state}}"),
                    stacked=True,
                    width=8,
                ),
                graph(
                    "Wait until bound",
                    "From a pod's creation to its binding.",
                    SECONDS,
                    Query(quantile(0.5, "gpuwarden_fleet_wait_seconds"), "p50"),
                    Query(quantile(0.9, "gpuwarden_fleet_wait_seconds"), "p90"),
                    width=8,
                ),
                graph(
                    "Pods that cannot be placed",
                    "By reason: their annotations are missing or cannot be read.",
                    COUNT,
                    Query("sum by (reason) (gpuwarden_fleet_refused_pods)", "{{reason}}"),
                    width=8,
                ),
            ),
        ),
        Row(
            "Plan",
            (
                graph(
                    "GPUs with room",
                    "By model, and whether the plan uses them.",
                    COUNT,
                    Query("sum by (model, state) (gpuwarden_fleet_slots)", "{{model}} {{state}}"),
                    stacked=True,
                    width=8,
                ),
                graph(
                    "GPUs without room",
                    "By reason.",
                    COUNT,
                    Query("sum by (reason) (gpuwarden_fleet_unknown_slots)", "{{reason}}"),
                    width=8,
                ),
                graph(
                    "Gain over simpler placing",
                    "Value of the plan to that of first fit, greedy and random: 1 is no gain.",
                    RATIO,
                    Query("max by (over) (gpuwarden_fleet_plan_gain_ratio)", "over {{over}}"),
                    width=8,
                ),
                graph(
                    "Gap to the optimum",
                    "At most this part of the best plan's value is missed.",
                    RATIO,
                    Query("max(gpuwarden_fleet_plan_gap_ratio)", "gap"),
                    steps=((0.01, WARN),),
                    width=8,
                ),
                graph(
                    "Time of a plan",
                    "Reading the figures, and solving.",
                    SECONDS,
                    Query("max by (step) (gpuwarden_fleet_plan_duration_seconds)", "{{step}}"),
                    width=8,
                ),
                graph(
                    "Plans that could not be made",
                    "In a second. The service's log says why.",
                    PER_SECOND,
                    Query("sum(rate(gpuwarden_fleet_plan_failures_total[$__rate_interval]))", "plans"),
                    width=8,
                ),
            ),
        ),
        Row(
            "Learning",
            (
                graph(
                    "Error of what was expected",
                    "Throughput expected less measured, to alone: quantiles over six hours.",
                    RATIO,
                    *(
                        Query(
                            f"histogram_quantile({part}, sum by (le) "
                            "(increase(gpuwarden_fleet_prediction_error_ratio_bucket[6h])))",
                            f"p{part * 100:.0f}",
                        )
                        for part in (0.1, 0.5, 0.9)
                    ),
                    lowest=None,
                ),
                graph(
                    "Pairs",
                    "With a measured throughput, and worth half as their online side missed its promise.",
                    COUNT,
                    Query("sum(gpuwarden_fleet_measured_pairs)", "measured"),
                    Query("sum(gpuwarden_fleet_penalised_pairs)", "worth half"),
                ),
            ),
        ),
        Row(
            "Service",
            (
                graph(
                    "Time of a request",
                    "Of the scheduler's: p99 by verb.",
                    SECONDS,
                    Query(quantile(0.99, "gpuwarden_fleet_extender_duration_seconds", "verb"), "{{verb}}"),
                    width=8,
                ),
                graph(
                    "Bindings",
                    "In a second, by outcome; unknown: the API server did not answer.",
                    PER_SECOND,
                    Query("sum by (outcome) (rate(gpuwarden_fleet_binds_total[$__rate_interval]))", "{{outcome}}"),
                    stacked=True,
                    width=8,
                ),
                graph(
                    "Taken back and dropped",
                    "In a second: reservations that were not bound in time, events and marks that were not written.",
                    PER_SECOND,
                    Query("sum(rate(gpuwarden_fleet_released_total[$__rate_interval]))", "reservations"),
                    Query("sum(rate(gpuwarden_fleet_notices_dropped_total[$__rate_interval]))", "notices"),
                    width=8,
                ),
            ),
        ),
    ),
)
